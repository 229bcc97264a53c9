//! URLs of models: what of one may be shown, and under which name a node keeps what it gives.

use sha2::{Digest, Sha256};

use crate::model::{HttpSource, ModelSource, ModelSpec};

/// Digits of the name of a fetched model in a node's store.
pub const STORE_KEY_DIGITS: usize = 32;

/// A URL as it may be shown: without user, password, query and fragment, which can hold secrets. Text that is no URL
/// loses all that could be one of these; so does a URL whose password ends its authority too early, by a `/` or `?` that
/// was not written as `%2F` or `%3F`. Of one with an `@` in its path, what follows that is shown.
pub fn shown_url(url: &str) -> String {
    let kept = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = kept.split_once("://") else {
        return kept.rsplit('@').next().unwrap_or_default().to_owned();
    };
    let rest = rest.trim_start_matches('/');
    let end = rest.find(['/', '\\']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let Some((_, host)) = authority.rsplit_once('@') else {
        return match rest.rsplit_once('@') {
            Some((_, shown)) => format!("{scheme}://{shown}"),
            None if has_port(authority) => format!("{scheme}://{rest}"),
            None => format!("{scheme}://…"),
        };
    };
    format!("{scheme}://{host}{path}")
}

/// Whether what follows the host can be a port: otherwise it is the beginning of a password.
fn has_port(authority: &str) -> bool {
    let after = match authority.rsplit_once(']') {
        Some((_, after)) => after,
        None => authority.find(':').map_or("", |at| &authority[at..]),
    };
    let port = after.strip_prefix(':').unwrap_or(after);
    port.bytes().all(|byte| byte.is_ascii_digit())
}

/// The name of a fetched model in a node's store: another one for each archive, URL and holder, so that a model is
/// handed to those alone whose own source gives it. `holder` says who may ask with that URL; empty: anybody.
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
    /// Who may have what the URL gives: anybody who names it, or only the namespace whose Secret, or whose URL with a
    /// user, password or query, was the permission.
    pub fn holder(&self, namespace: &str) -> String {
        match &self.secret_ref {
            Some(secret) => format!("{namespace}/{}", secret.name),
            None if shown_url(&self.url) != self.url => format!("{namespace}/"),
            None => String::new(),
        }
    }

    /// See [`store_key`].
    pub fn store_key(&self, namespace: &str) -> String {
        store_key(&self.url, &self.sha256, &self.holder(namespace))
    }
}

impl ModelSpec {
    /// The spec as it may be copied to other objects: its URLs without secrets.
    #[must_use]
    pub fn shown(&self) -> Self {
        let mut spec = self.clone();
        spec.source.hide();
        spec.adapters
            .iter_mut()
            .for_each(|adapter| adapter.source.hide());
        spec
    }
}

impl ModelSource {
    fn hide(&mut self) {
        if let Some(http) = &mut self.http {
            http.url = shown_url(&http.url);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::SecretRef;

    #[test]
    fn only_scheme_host_and_path_are_shown() {
        for (url, shown) in [
            (
                "https://nas.lan/models/a.tar",
                "https://nas.lan/models/a.tar",
            ),
            (
                "https://ann:pw@nas.lan:8443/a.tar?sig=pw#pw",
                "https://nas.lan:8443/a.tar",
            ),
            ("https://ann@nas/a@b.tar", "https://nas/a@b.tar"),
            ("http://a:pw@pw@nas/x", "http://nas/x"),
            ("http://nas?pw", "http://nas"),
            ("http://nas#pw@x/y", "http://nas"),
            ("http://ann:pw@[::1]:80/x", "http://[::1]:80/x"),
            // Parsers of URLs skip slashes, and take a backslash for one.
            ("http:///ann:pw@nas/x", "http://nas/x"),
            ("http://nas\\a@b/x", "http://b/x"),
            // A password that ends the authority for a parser.
            ("https://ann:sec/ret@nas/m.tar", "https://nas/m.tar"),
            ("https://ann:1/ret@nas/m.tar", "https://nas/m.tar"),
            ("https://ann:sec\\ret@nas/m.tar", "https://nas/m.tar"),
            ("https://ann:sec?ret@nas/m.tar", "https://…"),
            ("https://ann:sec#ret@nas/m.tar", "https://…"),
            ("https://[::1]:sec/x", "https://…"),
            ("https://[fd00::1]/x", "https://[fd00::1]/x"),
            ("https://[fd00::1]:8443/x", "https://[fd00::1]:8443/x"),
            ("https://nas:/x", "https://nas:/x"),
            ("http:ann:pw@nas/x", "nas/x"),
            ("ann:pw@nas/x?pw", "nas/x"),
            ("", ""),
        ] {
            assert_eq!(shown_url(url), shown, "{url}");
        }
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
            // Parts do not run into each other.
            store_key("https://nas/a.tar", &"a".repeat(63), "a"),
        ];
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), 9);
    }
}
