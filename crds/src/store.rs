//! Name under which a node stores a fetched model, and who may use it.

use sha2::{Digest, Sha256};

use crate::model::HttpSource;
use crate::url::shown_url;

/// Digits of the name of a fetched model in a node's store.
pub const STORE_KEY_DIGITS: usize = 32;

/// Returns the name of a fetched model in a node's store: different for each archive, URL and holder, so that a model
/// is given only to deployments whose own source provides it. `holder` identifies who may use the URL; empty for
/// anyone.
pub fn store_key(url: &str, sha256: &str, holder: &str) -> String {
    let mut digest = Sha256::new();
    for part in ["hearth model 1", sha256, url, holder] {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SecretRef;

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
