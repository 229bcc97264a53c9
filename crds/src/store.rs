//! Name under which a node stores a fetched model, who may use it, and what a store says of it.

use std::cmp::Reverse;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::model::{HttpFile, HttpSource, HuggingFaceSource, ModelSource};
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
    /// Size of its files, or what is there of them.
    pub bytes: u64,
    /// Bytes of these that other models of the store have, too: they are on the disk once, and stay when this model goes.
    #[serde(default)]
    pub shared_bytes: u64,
    /// How far its download is; `None` if it is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<PartialModel>,
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

/// A download that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartialModel {
    /// Bytes of the whole download, as far as that is known.
    pub total_bytes: Option<u64>,
    /// Whether a process goes on with it at this time.
    pub is_running: bool,
}

impl StoredModel {
    /// Its source; `-` if that is not known.
    pub fn name(&self) -> &str {
        self.source.as_deref().unwrap_or("-")
    }
}

/// All that a node's store has of whole models, those of single namespaces among it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeStore {
    /// Number of models.
    pub models: u32,
    /// Size of their files in bytes, rounded up to whole GiB, so that the size of a model that is not named cannot be told from it.
    pub bytes: u64,
}

impl NodeStore {
    /// The store of so many models, with the size of their files in bytes as it may be told.
    pub fn rounded(models: u32, bytes: u64) -> Self {
        const GIB: u64 = 1 << 30;
        Self {
            models,
            bytes: bytes.div_ceil(GIB).saturating_mul(GIB),
        }
    }
}

/// A model that a node's store has, or that its agent is fetching: one that every deployment may have that names it. What a
/// Secret, or a secret in its URL, has opened is told nowhere but in [`NodeStore`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeModel {
    /// Name of its directory in the store.
    pub key: String,
    /// Repository and revision, or URL.
    pub source: String,
    /// Commit of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Size of its files in bytes; 0 until all are there.
    #[serde(default)]
    pub bytes: u64,
    /// When its files were verified (RFC 3339). Unset while it is fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub verified_at: Option<String>,
    /// The hour in which it was last named or asked for (RFC 3339). Unset while a worker has it mapped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub last_used: Option<String>,
    /// Whether a worker of the node has it mapped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_use: bool,
    /// Whether it stays until it is unpinned.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pinned: bool,
    /// How far it is, while it is fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<NodeFetch>,
}

/// How far a model is that a node's agent is fetching, as of the last minute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeFetch {
    /// Share of its bytes that is there. Unset while its size is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u32>,
    /// Its size in bytes. Unset while that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The node whose agent gives it. Unset if a server does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_node: Option<String>,
}

/// Most models of a node that its profile names.
const MAX_NODE_MODELS: usize = 32;
/// Longest text of one of them, in characters.
const MAX_NODE_MODEL_CHARS: usize = 256;

impl NodeModel {
    /// Whether a profile that names these names no more: its store may have others that every deployment may have.
    pub fn are_most(models: &[Self]) -> bool {
        models.len() >= MAX_NODE_MODELS
    }

    /// The models as a profile has them: those that are fetched and those that are mapped first, then the most recently used
    /// ones, as many as it names; in an order that is the same each time.
    pub fn listed(mut models: Vec<Self>) -> Vec<Self> {
        let use_of = |model: &Self| {
            let is_idle = model.fetch.is_none() && !model.in_use;
            (is_idle, Reverse(model.last_used.clone()))
        };
        models.sort_by_cached_key(|model| (use_of(model), model.key.clone()));
        models.truncate(MAX_NODE_MODELS);
        for model in &mut models {
            let fetch = model.fetch.as_mut();
            let from_node = fetch.and_then(|fetch| fetch.from_node.as_mut());
            let texts = [Some(&mut model.key), Some(&mut model.source)];
            let texts = texts
                .into_iter()
                .chain([model.commit.as_mut(), from_node])
                .flatten();
            for text in texts {
                if let Some((at, _)) = text.char_indices().nth(MAX_NODE_MODEL_CHARS) {
                    text.truncate(at);
                    text.push('…');
                }
            }
        }
        models.sort_by(|a, b| (&a.source, &a.key).cmp(&(&b.source, &b.key)));
        models
    }
}

/// Whether every deployment that names the source may have what is stored under the key: no Secret, and nothing secret in its
/// URL, was needed to fetch it. `source` is repository and revision, or with `sha256` the URL.
pub fn is_for_all(key: &str, source: &str, sha256: Option<&str>) -> bool {
    match (sha256, source.split_once('@')) {
        (Some(sha256), _) => shown_url(source) == source && key == store_key(source, sha256, ""),
        (None, Some((repo, revision))) => key == hub_store_key(repo, revision, ""),
        (None, None) => false,
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

/// Returns the same for a list of files: different for each file's path, SHA-256 and URL, and for each holder.
pub fn files_store_key(files: &[HttpFile], holder: &str) -> String {
    let urls = sorted(files).flat_map(|file| [file.path(), &*file.url]);
    let urls = digits_of(urls.collect::<Vec<_>>());
    key_of(["hearth http files 1", &files_revision(files), &urls, holder])
}

/// SHA-256 of a list of files, whichever servers they come from: of each one's path and SHA-256, in any order. 64 lower-case
/// hexadecimal digits.
pub fn files_revision(files: &[HttpFile]) -> String {
    let parts = sorted(files).flat_map(|file| [file.path(), &*file.sha256]);
    digits_of(parts.collect::<Vec<_>>())
}

fn sorted(files: &[HttpFile]) -> impl Iterator<Item = &HttpFile> {
    let mut files: Vec<&HttpFile> = files.iter().collect();
    files.sort_by_key(|file| file.path());
    files.into_iter()
}

fn key_of(parts: [&str; 4]) -> String {
    let mut key = digits_of(parts);
    key.truncate(STORE_KEY_DIGITS);
    key
}

/// Digests the parts, each with its length.
fn digits_of<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    let digits = digest.finalize();
    digits.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl HttpSource {
    /// Returns who may use the model: empty for anyone who knows the URL, otherwise the namespace whose Secret, or
    /// whose URL with a user, password or query, gives access.
    pub fn holder(&self, namespace: &str) -> String {
        let is_secret = |url: &String| shown_url(url) != *url;
        let mut urls = self.files.iter().map(|file| &file.url).chain([&self.url]);
        match &self.secret_ref {
            Some(secret) => format!("{namespace}/{}", secret.name),
            None if urls.any(is_secret) => format!("{namespace}/"),
            None => String::new(),
        }
    }

    /// Returns the model's [`store_key`] or [`files_store_key`].
    pub fn store_key(&self, namespace: &str) -> String {
        let holder = self.holder(namespace);
        match self.files.is_empty() {
            true => store_key(&self.url, &self.sha256, &holder),
            false => files_store_key(&self.files, &holder),
        }
    }

    /// What identifies its bytes, whichever server they come from: the archive's SHA-256, or [`files_revision`].
    pub fn revision(&self) -> String {
        match self.files.is_empty() {
            true => self.sha256.clone(),
            false => files_revision(&self.files),
        }
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
    fn files_have_one_revision_in_any_order_and_a_name_for_each_place_and_holder() {
        let file = |url: &str, digit: char| HttpFile {
            url: url.to_owned(),
            sha256: digit.to_string().repeat(64),
            path: None,
        };
        let source = |files: &[HttpFile]| HttpSource {
            files: files.to_vec(),
            ..HttpSource::default()
        };
        let config = file("http://nas/m/config.json", 'a');
        let weights = file("http://nas/m/model.safetensors", 'b');
        let both = source(&[config.clone(), weights.clone()]);
        let turned = source(&[weights.clone(), config.clone()]);
        assert_eq!(both.revision(), turned.revision());
        assert_eq!(both.store_key("one"), turned.store_key("two"));
        let named = HttpFile {
            path: Some("config.json".to_owned()),
            ..config.clone()
        };
        let same = source(&[named, weights.clone()]);
        assert_eq!(both.store_key("one"), same.store_key("one"));
        let elsewhere = file("http://mirror/m/model.safetensors", 'b');
        let mirrored = source(&[config.clone(), elsewhere]);
        assert_eq!(both.revision(), mirrored.revision());
        let signed = file("http://nas/m/model.safetensors?sig=1", 'b');
        let signed = source(&[config.clone(), signed]);
        assert_eq!((&*both.holder("one"), &*signed.holder("one")), ("", "one/"));
        let other = source(&[config, file("http://nas/m/model.safetensors", 'c')]);
        assert_ne!(both.revision(), other.revision());
        let mut keys = vec![
            both.store_key("one"),
            mirrored.store_key("one"),
            signed.store_key("one"),
            signed.store_key("two"),
            other.store_key("one"),
        ];
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 5);
    }

    #[test]
    fn only_what_nothing_secret_opened_is_for_all() {
        let sha256 = "a".repeat(64);
        let url = "https://nas/a.tar";
        let signed = "https://nas/a.tar?sig=1";
        for (key, source, sha256, expected) in [
            (hub_store_key("a/b", "main", ""), "a/b@main", None, true),
            (
                hub_store_key("a/b", "main", "one/hub"),
                "a/b@main",
                None,
                false,
            ),
            (hub_store_key("a/b", "v2", ""), "a/b@main", None, false),
            (store_key(url, &sha256, ""), url, Some(&*sha256), true),
            (
                store_key(url, &sha256, "one/nas"),
                url,
                Some(&*sha256),
                false,
            ),
            // As it is recorded: without what is secret.
            (
                store_key(signed, &sha256, "one/"),
                url,
                Some(&*sha256),
                false,
            ),
            (
                store_key(signed, &sha256, ""),
                signed,
                Some(&*sha256),
                false,
            ),
            (store_key(url, &sha256, ""), "-", None, false),
        ] {
            assert_eq!(is_for_all(&key, source, sha256), expected, "{source}");
        }
    }

    #[test]
    fn a_profile_lists_so_many_models_in_the_same_order() {
        let model = |number: usize, hour: usize| NodeModel {
            key: format!("{number:032}"),
            source: format!("a/{number:03}@main"),
            last_used: Some(format!(
                "2026-01-{:02}T{:02}:00:00Z",
                1 + hour / 24,
                hour % 24
            )),
            ..NodeModel::default()
        };
        let mut models: Vec<NodeModel> = (0..40).map(|number| model(number, number)).collect();
        models[0].in_use = true;
        models[1].fetch = Some(NodeFetch::default());
        models[39].source = "ä".repeat(1000);
        let listed = NodeModel::listed(models.clone());
        models.reverse();
        assert_eq!(NodeModel::listed(models), listed);
        assert_eq!(NodeModel::listed(listed.clone()), listed);
        let keys: Vec<usize> = listed.iter().map(|it| it.key.parse().unwrap()).collect();
        let most_recent: Vec<usize> = [0, 1].into_iter().chain(10..40).collect();
        assert_eq!(keys, most_recent);
        assert_eq!(listed[31].source.chars().count(), 257);
    }

    #[test]
    fn who_could_not_have_fetched_a_model_has_another_name_for_it() {
        let source = |url: &str, secret: Option<&str>| HttpSource {
            url: url.to_owned(),
            sha256: "a".repeat(64),
            secret_ref: secret.map(|name| SecretRef {
                name: name.to_owned(),
            }),
            files: Vec::new(),
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
