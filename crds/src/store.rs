//! Name under which a node stores a fetched model, who may use it, and what a store says of it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::model::{HttpSource, HuggingFaceSource, ModelSource};
use crate::url::shown_url;

/// Digits of the name of a fetched model in a node's store.
pub const STORE_KEY_DIGITS: usize = 32;

/// The hub that repositories come from where no mirror is named.
pub const HUB_ENDPOINT: &str = "https://huggingface.co";
/// The revision of a repository for which none is named.
pub const HUB_REVISION: &str = "main";

/// A stored model, as `hearth-worker models --json` and `hearth models list -o json` print it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredModel {
    /// Name of its directory in `models/`.
    pub key: String,
    /// Repository and revision, or URL without secrets; `None` if an earlier version fetched it.
    pub source: Option<String>,
    /// Commit of a repository.
    pub commit: Option<String>,
    /// SHA-256 of an archive.
    pub sha256: Option<String>,
    /// Size of its files.
    pub bytes: u64,
    /// When it was last asked for or in use, in seconds since 1970; `None` if that is not known.
    pub used_at_s: Option<u64>,
    /// When its files were verified, in seconds since 1970; `None` if an earlier version fetched it.
    pub verified_at_s: Option<u64>,
    /// Whether a worker has it mapped.
    pub in_use: bool,
    /// Whether it stays until it is unpinned.
    pub pinned: bool,
    /// Its directory.
    pub directory: PathBuf,
}

impl StoredModel {
    /// Its source; `-` if that is not known.
    pub fn name(&self) -> &str {
        self.source.as_deref().unwrap_or("-")
    }
}

/// Returns the name of a fetched model in a node's store: different for each archive, URL and holder, so that a model
/// is given only to deployments whose own source provides it. `holder` identifies who may use the URL; empty for
/// anyone.
pub fn store_key(url: &str, sha256: &str, holder: &str) -> String {
    key_of(["hearth model 1", sha256, url, holder])
}

/// Returns the same for a repository of a hub at a revision. The hub's address is no part of it: a mirror holds the same
/// repositories, and a model that is stored need not be fetched again when another mirror is chosen.
pub fn hub_store_key(repo: &str, revision: &str, holder: &str) -> String {
    key_of(["hearth hub model 1", repo, revision, holder])
}

/// Digests the parts, each with its length.
fn key_of(parts: [&str; 4]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let digits = digest.finalize();
    let mut key: String = digits.iter().map(|byte| format!("{byte:02x}")).collect();
    key.truncate(STORE_KEY_DIGITS);
    key
}

impl HttpSource {
    /// Returns who may use the model: empty for anyone who knows the URL, otherwise the namespace whose Secret, or
    /// whose URL with a user, password or query, gives access.
    pub fn holder(&self, namespace: &str) -> String {
        match &self.secret_ref {
            Some(secret) => format!("{namespace}/{}", secret.name),
            None if shown_url(&self.url) != self.url => format!("{namespace}/"),
            None => String::new(),
        }
    }

    /// Returns the model's [`store_key`].
    pub fn store_key(&self, namespace: &str) -> String {
        store_key(&self.url, &self.sha256, &self.holder(namespace))
    }
}

impl HuggingFaceSource {
    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(HUB_REVISION)
    }

    /// Returns who may use the model: empty for anyone, otherwise the namespace and the Secret whose token opens the
    /// repository.
    pub fn holder(&self, namespace: &str) -> String {
        match &self.token_secret_ref {
            Some(secret) => format!("{namespace}/{}", secret.name),
            None => String::new(),
        }
    }

    /// Returns the model's [`hub_store_key`].
    pub fn store_key(&self, namespace: &str) -> String {
        hub_store_key(&self.repo, self.revision(), &self.holder(namespace))
    }
}

impl ModelSource {
    /// Whether the nodes' agents fetch the model.
    pub fn is_fetched(&self) -> bool {
        self.http.is_some() || self.hugging_face.is_some()
    }

    /// Returns the name of the model in the nodes' stores; `None` if it is not fetched.
    pub fn store_key(&self, namespace: &str) -> Option<String> {
        if let Some(http) = &self.http {
            return Some(http.store_key(namespace));
        }
        let hub = self.hugging_face.as_ref()?;
        Some(hub.store_key(namespace))
    }

    /// Returns who may use a fetched model, as in [`HttpSource::holder`] and [`HuggingFaceSource::holder`].
    pub fn holder(&self, namespace: &str) -> String {
        match (&self.http, &self.hugging_face) {
            (Some(http), _) => http.holder(namespace),
            (None, Some(hub)) => hub.holder(namespace),
            (None, None) => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SecretRef;

    #[test]
    fn a_model_of_a_hub_has_a_name_for_each_revision_and_holder() {
        let source = |repo: &str, revision: Option<&str>, secret: Option<&str>| HuggingFaceSource {
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            token_secret_ref: secret.map(|name| SecretRef {
                name: name.to_owned(),
            }),
        };
        let public = source("a/b", None, None);
        assert_eq!(public.store_key("one"), public.store_key("two"));
        assert_eq!(
            public.store_key("one"),
            source("a/b", Some("main"), None).store_key("one")
        );
        let gated = source("a/b", None, Some("hub"));
        let mut keys = vec![
            public.store_key("one"),
            gated.store_key("one"),
            gated.store_key("two"),
            source("a/b", None, Some("other")).store_key("one"),
            source("a/b", Some("v2"), None).store_key("one"),
            source("a/c", None, None).store_key("one"),
            // Neither is an archive.
            store_key("a/b", "main", ""),
            store_key("main", "a/b", ""),
        ];
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 8);
        let fetched = ModelSource {
            hugging_face: Some(gated.clone()),
            ..ModelSource::default()
        };
        assert!(fetched.is_fetched());
        assert_eq!(fetched.store_key("one"), Some(gated.store_key("one")));
        assert_eq!(fetched.holder("one"), "one/hub");
    }

    #[test]
    fn who_could_not_have_fetched_a_model_has_another_name_for_it() {
        let source = |url: &str, secret: Option<&str>| HttpSource {
            url: url.to_owned(),
            sha256: "a".repeat(64),
            secret_ref: secret.map(|name| SecretRef {
                name: name.to_owned(),
            }),
        };
        let public = source("https://nas/a.tar", None);
        assert_eq!(public.store_key("one"), public.store_key("two"));
        assert_eq!(public.store_key("one").len(), STORE_KEY_DIGITS);
        let private = source("https://nas/a.tar", Some("nas"));
        let signed = source("https://nas/a.tar?sig=1", None);
        let mut keys = vec![
            public.store_key("one"),
            source("https://mirror/a.tar", None).store_key("one"),
            private.store_key("one"),
            private.store_key("two"),
            source("https://nas/a.tar", Some("other")).store_key("one"),
            signed.store_key("one"),
            signed.store_key("two"),
            source("https://ann:pw@nas/a.tar", None).store_key("one"),
            // Parts are delimited.
            store_key("https://nas/a.tar", &"a".repeat(63), "a"),
        ];
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 9);
    }
}
