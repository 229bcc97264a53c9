//! Mapping between Secrets and authorities or certificates: pure.

use std::collections::BTreeMap;

use hearth_controller_core::names::{
    APP, LABEL_APP, LABEL_COMPONENT, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, MANAGER,
};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::due::{AuthorityTimes, Leaf};
use super::issue::{Facts, Pair};

/// Annotation with the time since which `ca.crt` is unchanged.
const ANNOTATION_TRUSTED_SINCE: &str = "hearth.dev/trusted-since";
/// Annotation of the authority with the time at which it took over from the one in `old.crt`.
const ANNOTATION_PROMOTED: &str = "hearth.dev/promoted";
const TLS_TYPE: &str = "kubernetes.io/tls";

/// The authority, with its successor and its predecessor if they exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    /// The authority that signs.
    pub(super) signing: Pair,
    /// The successor, which is already trusted and will sign soon.
    pub(super) next: Option<Pair>,
    /// The predecessor, which is still trusted: its certificate and facts.
    pub(super) old: Option<(String, Facts)>,
    pub(super) promoted: Option<Timestamp>,
}

impl Keys {
    /// Reads the Secret; `None` if its contents are invalid.
    pub(super) fn read(secret: &Secret) -> Option<Self> {
        let pair = |certificate, key| match (text(secret, certificate), text(secret, key)) {
            (Some(certificate), Some(key)) => Pair::read(&certificate, &key),
            _ => None,
        };
        let old = text(secret, "old.crt").and_then(|pem| {
            let facts = Facts::read(&pem)?;
            Some((pem, facts))
        });
        Some(Self {
            signing: pair("tls.crt", "tls.key")?,
            next: pair("next.crt", "next.key"),
            promoted: old.as_ref().and_then(|_| time(secret, ANNOTATION_PROMOTED)),
            old,
        })
    }

    /// Builds the Secret, with metadata that was read or created.
    pub(super) fn secret(&self, mut metadata: ObjectMeta, immutable: Option<bool>) -> Secret {
        let mut data = BTreeMap::from([
            entry("tls.crt", &self.signing.certificate),
            entry("tls.key", &self.signing.key),
            entry("ca.crt", &self.bundle()),
        ]);
        if let Some(next) = &self.next {
            data.extend([
                entry("next.crt", &next.certificate),
                entry("next.key", &next.key),
            ]);
        }
        if let Some((old, _)) = &self.old {
            data.extend([entry("old.crt", old)]);
        }
        let annotations = metadata.annotations.get_or_insert_default();
        match self.promoted {
            Some(promoted) => {
                annotations.insert(ANNOTATION_PROMOTED.to_owned(), promoted.to_string())
            }
            None => annotations.remove(ANNOTATION_PROMOTED),
        };
        Secret {
            metadata,
            data: Some(data),
            type_: Some(TLS_TYPE.to_owned()),
            immutable,
            ..Secret::default()
        }
    }

    pub(super) fn times(&self) -> AuthorityTimes<'_> {
        AuthorityTimes {
            signing: &self.signing.facts,
            next: self.next.as_ref().map(|next| &next.facts),
            promoted: self.promoted,
        }
    }

    /// Subjects of all trusted authorities.
    pub(super) fn trusted(&self) -> Vec<String> {
        self.all().into_iter().map(|(subject, _)| subject).collect()
    }

    /// All trusted authorities as one PEM text, in an order that does not change when one takes over from another.
    pub(super) fn bundle(&self) -> String {
        let mut all = self.all();
        all.sort();
        all.into_iter()
            .map(|(_, certificate)| certificate)
            .collect()
    }

    fn all(&self) -> Vec<(String, String)> {
        let pairs = [Some(&self.signing), self.next.as_ref()]
            .into_iter()
            .flatten();
        let pairs = pairs.map(|pair| (pair.facts.subject.clone(), pair.certificate.clone()));
        let old = self
            .old
            .iter()
            .map(|(pem, facts)| (facts.subject.clone(), pem.clone()));
        pairs.chain(old).collect()
    }
}

/// A certificate with its key and the bundle, as a Secret holds them.
#[derive(Clone, Debug)]
pub(super) struct StoredLeaf {
    pub(super) pair: Pair,
    pub(super) leaf: Leaf,
}

impl StoredLeaf {
    /// Reads the Secret; `None` if it does not hold a certificate with its key.
    pub(super) fn read(secret: &Secret) -> Option<Self> {
        let pair = Pair::read(&text(secret, "tls.crt")?, &text(secret, "tls.key")?)?;
        let leaf = Leaf {
            facts: pair.facts.clone(),
            bundle: text(secret, "ca.crt").unwrap_or_default(),
            bundle_since: time(secret, ANNOTATION_TRUSTED_SINCE),
        };
        Some(Self { pair, leaf })
    }

    /// Builds the successor of `before`: the bundle's time is kept as long as the bundle is unchanged.
    pub(super) fn following(
        before: Option<&Self>,
        pair: Pair,
        bundle: &str,
        now: Timestamp,
    ) -> Self {
        let since = before
            .filter(|before| before.leaf.bundle == bundle)
            .and_then(|before| before.leaf.bundle_since);
        let leaf = Leaf {
            facts: pair.facts.clone(),
            bundle: bundle.to_owned(),
            bundle_since: since.or(Some(now)),
        };
        Self { pair, leaf }
    }

    /// Builds the Secret to be applied.
    pub(super) fn secret(&self, mut metadata: ObjectMeta) -> Secret {
        if let Some(since) = self.leaf.bundle_since {
            let annotations = metadata.annotations.get_or_insert_default();
            annotations.insert(ANNOTATION_TRUSTED_SINCE.to_owned(), since.to_string());
        }
        Secret {
            metadata,
            data: Some(BTreeMap::from([
                entry("tls.crt", &self.pair.certificate),
                entry("tls.key", &self.pair.key),
                entry("ca.crt", &self.leaf.bundle),
            ])),
            type_: Some(TLS_TYPE.to_owned()),
            ..Secret::default()
        }
    }
}

/// Whether Hearth created the Secret.
pub(super) fn is_ours(secret: &Secret) -> bool {
    let labels = secret.metadata.labels.as_ref();
    labels.is_some_and(|labels| labels.get(LABEL_MANAGED_BY).is_some_and(|by| by == MANAGER))
}

/// Builds the metadata of one of our Secrets.
pub(super) fn metadata(
    namespace: &str,
    name: &str,
    component: &str,
    deployment: Option<&str>,
    owner: Option<OwnerReference>,
) -> ObjectMeta {
    let pairs = [
        Some((LABEL_APP, APP)),
        Some((LABEL_MANAGED_BY, MANAGER)),
        Some((LABEL_COMPONENT, component)),
        deployment.map(|name| (LABEL_DEPLOYMENT, name)),
    ];
    let labels = pairs.into_iter().flatten();
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(
            labels
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
        ),
        owner_references: owner.map(|owner| vec![owner]),
        ..ObjectMeta::default()
    }
}

fn text(secret: &Secret, key: &str) -> Option<String> {
    let bytes = secret.data.as_ref()?.get(key)?;
    String::from_utf8(bytes.0.clone()).ok()
}

fn time(secret: &Secret, note: &str) -> Option<Timestamp> {
    secret
        .metadata
        .annotations
        .as_ref()?
        .get(note)?
        .parse()
        .ok()
}

fn entry(key: &str, text: &str) -> (String, ByteString) {
    (key.to_owned(), ByteString(text.as_bytes().to_vec()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::due::{AuthorityDue, LeafAction, LeafWanted, authority_due, leaf_due};
    use super::super::issue::Usage;
    use super::*;

    const LEAF: Duration = Duration::from_secs(90 * 24 * 3600);

    fn start() -> Timestamp {
        "2026-11-20T12:00:00Z".parse().expect("time")
    }

    fn stored(keys: &Keys) -> Keys {
        let secret = keys.secret(
            metadata("hearth-system", "hearth-ca", "authority", None, None),
            None,
        );
        Keys::read(&secret).expect("keys")
    }

    fn days(count: u64) -> Timestamp {
        start()
            .checked_add(Duration::from_secs(count * 24 * 3600))
            .expect("time")
    }

    /// Simulates the Secret of one deployment over the twenty years in which two authorities follow a first one, day
    /// by day: at each time every certificate in use is trusted by every bundle in use.
    #[test]
    fn no_process_ever_meets_one_that_it_does_not_trust() {
        let mut keys = Keys::new(start()).expect("keys");
        let mut leaf: Option<StoredLeaf> = None;
        let (mut issued, mut authorities) = (0, vec![keys.signing.facts.subject.clone()]);
        for day in 0..20 * 365 {
            let now = days(day);
            loop {
                let due = authority_due(keys.times(), LEAF, now);
                if matches!(due, AuthorityDue::Nothing(_)) {
                    break;
                }
                assert_ne!(due, AuthorityDue::Replace);
                keys = stored(&keys.after(due, now).expect("keys"));
            }
            if authorities.last() != Some(&keys.signing.facts.subject) {
                authorities.push(keys.signing.facts.subject.clone());
            }
            let (trusted, bundle) = (keys.trusted(), keys.bundle());
            let wanted = LeafWanted {
                name: "demo.default.hearth",
                usage: Usage::Both,
                signing: &keys.signing.facts,
                trusted: &trusted,
                bundle: &bundle,
                lifetime: LEAF,
            };
            let due = leaf_due(leaf.as_ref().map(|leaf| &leaf.leaf), wanted, now);
            let pair = match (due, &leaf) {
                (LeafAction::Nothing(_), _) => continue,
                (LeafAction::Trust, Some(leaf)) => leaf.pair.clone(),
                _ => {
                    issued += 1;
                    keys.signing
                        .issue(wanted.name, wanted.usage, now, LEAF)
                        .expect("leaf")
                }
            };
            let next = StoredLeaf::following(leaf.as_ref(), pair, &bundle, now);
            // Processes that have not read the newest files yet are one write behind.
            let behind = leaf.replace(next);
            let subjects = |bundle: &str| -> Vec<String> {
                let pems = bundle.split_inclusive("-----END CERTIFICATE-----\n");
                pems.filter_map(Facts::read)
                    .map(|facts| facts.subject)
                    .collect()
            };
            let newest = leaf.as_ref().expect("leaf");
            if let Some(behind) = &behind {
                assert!(
                    subjects(&behind.leaf.bundle).contains(&newest.leaf.facts.issuer),
                    "day {day}"
                );
                assert!(
                    subjects(&newest.leaf.bundle).contains(&behind.leaf.facts.issuer),
                    "day {day}"
                );
            }
            assert!(now < newest.leaf.facts.not_after, "day {day}");
        }
        assert_eq!(authorities.len(), 3, "{authorities:?}");
        assert!(
            (120..140).contains(&issued),
            "{issued} certificates in 20 years"
        );
    }

    #[test]
    fn a_secret_gives_back_what_was_put_in() {
        let mut keys = Keys::new(start()).expect("keys");
        assert_eq!(stored(&keys), keys);
        keys = keys.after(AuthorityDue::Announce, days(1)).expect("keys");
        assert_eq!(stored(&keys), keys);
        let bundle = keys.bundle();
        keys = keys.after(AuthorityDue::Promote, days(2)).expect("keys");
        assert_eq!(stored(&keys), keys);
        assert_eq!(keys.bundle(), bundle);
        keys = keys.after(AuthorityDue::DropOld, days(3)).expect("keys");
        assert_eq!(stored(&keys), keys);
        assert_eq!(
            keys.trusted(),
            std::slice::from_ref(&keys.signing.facts.subject)
        );
    }

    #[test]
    fn an_altered_secret_is_not_taken_for_an_authority() {
        let keys = Keys::new(start()).expect("keys");
        let mut secret = keys.secret(metadata("n", "hearth-ca", "authority", None, None), None);
        secret.data.as_mut().expect("data").remove("tls.key");
        assert_eq!(Keys::read(&secret), None);
        assert_eq!(Keys::read(&Secret::default()), None);
    }

    #[test]
    fn only_secrets_with_our_label_are_ours() {
        let mut secret = Secret {
            metadata: metadata("default", "demo-tls", "tls", Some("demo"), None),
            ..Secret::default()
        };
        assert!(is_ours(&secret));
        secret.metadata.labels = None;
        assert!(!is_ours(&secret));
    }
}
