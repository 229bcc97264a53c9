//! Creation and parsing of keys and certificates. P-256 throughout.

use std::time::Duration;

use hearth_controller_core::build::short_digest;
use jiff::Timestamp;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SubjectPublicKeyInfo,
    date_time_ymd,
};
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;

use super::AuthorityError;

/// Backdating of the start of validity: clocks of nodes differ.
pub(super) const SKEW: Duration = Duration::from_secs(5 * 60);

/// A certificate with its key, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) certificate: String,
    pub(super) key: String,
    pub(super) facts: Facts,
}

/// Purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usage {
    /// Servers and clients.
    Both,
    /// Servers only: its holder accepts calls and makes none.
    Server,
}

/// Facts read from a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    /// Serial number in hexadecimal digits.
    pub(super) serial: String,
    pub(super) subject: String,
    pub(super) issuer: String,
    /// DNS names.
    pub(super) names: Vec<String>,
    pub(super) usage: Usage,
    pub(super) not_before: Timestamp,
    pub(super) not_after: Timestamp,
}

impl Facts {
    /// Reads the first certificate of a PEM text; `None` if no certificate can be read.
    pub(super) fn read(pem: &str) -> Option<Self> {
        let (_, pem) = parse_x509_pem(pem.as_bytes()).ok()?;
        let certificate = pem.parse_x509().ok()?;
        let names = match certificate.subject_alternative_name().ok()? {
            Some(extension) => extension
                .value
                .general_names
                .iter()
                .filter_map(dns_name)
                .collect(),
            None => Vec::new(),
        };
        let validity = certificate.validity();
        let time = |seconds| Timestamp::from_second(seconds).ok();
        Some(Self {
            serial: certificate.raw_serial_as_string().replace(':', ""),
            subject: certificate.subject().to_string(),
            issuer: certificate.issuer().to_string(),
            names,
            usage: match certificate.extended_key_usage().ok()? {
                Some(usage) if !usage.value.client_auth && !usage.value.any => Usage::Server,
                _ => Usage::Both,
            },
            not_before: time(validity.not_before.timestamp())?,
            not_after: time(validity.not_after.timestamp())?,
        })
    }
}

fn dns_name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    }
}

impl Pair {
    /// Reads a pair; `None` if the certificate cannot be read or the key belongs to another one.
    pub(super) fn read(certificate: &str, key: &str) -> Option<Self> {
        let pair = KeyPair::from_pem(key).ok()?;
        let (_, pem) = parse_x509_pem(certificate.as_bytes()).ok()?;
        let parsed = pem.parse_x509().ok()?;
        if parsed.public_key().subject_public_key.data.as_ref() != pair.public_key_raw() {
            return None;
        }
        Some(Self {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            facts: Facts::read(certificate)?,
        })
    }

    fn new(certificate: String, key: &KeyPair) -> Result<Self, AuthorityError> {
        let facts = Facts::read(&certificate).ok_or(AuthorityError::Unreadable)?;
        Ok(Self {
            certificate,
            key: key.serialize_pem(),
            facts,
        })
    }

    /// Creates an authority. Its name includes part of its key's digest: while two are trusted, each is found by name.
    pub(super) fn authority(now: Timestamp, lifetime: Duration) -> Result<Self, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::new(Vec::new())?;
        let digest = short_digest(key.public_key_raw());
        parameters.distinguished_name = named(&format!("hearth authority {digest}"));
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        valid(&mut parameters, now, lifetime);
        let certificate = parameters.self_signed(&key)?;
        Self::new(certificate.pem(), &key)
    }

    /// Issues a certificate of this authority for `name`. It expires no later than its authority.
    pub(super) fn issue(
        &self,
        name: &str,
        usage: Usage,
        now: Timestamp,
        lifetime: Duration,
    ) -> Result<Self, AuthorityError> {
        let key = KeyPair::generate()?;
        let certificate = self.sign(&key, name, usage, now, lifetime)?;
        Self::new(certificate, &key)
    }

    /// Signs a certificate for someone else's key and returns it as PEM.
    pub(super) fn sign(
        &self,
        key: &impl PublicKeyData,
        name: &str,
        usage: Usage,
        now: Timestamp,
        lifetime: Duration,
    ) -> Result<String, AuthorityError> {
        let mut parameters = CertificateParams::new(vec![name.to_owned()])?;
        parameters.distinguished_name = named(name);
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        if usage == Usage::Both {
            let client = ExtendedKeyUsagePurpose::ClientAuth;
            parameters.extended_key_usages.push(client);
        }
        parameters.use_authority_key_identifier_extension = true;
        let left = Duration::try_from(self.facts.not_after.duration_since(now)).unwrap_or_default();
        valid(&mut parameters, now, lifetime.min(left));
        let issuer = Issuer::from_ca_cert_pem(&self.certificate, KeyPair::from_pem(&self.key)?)?;
        Ok(parameters.signed_by(key, &issuer)?.pem())
    }
}

/// Reads a public key.
///
/// # Errors
/// The text is not PEM, or the key is not P-256.
pub(super) fn public_key_of(pem: &str) -> Result<SubjectPublicKeyInfo, AuthorityError> {
    let key = SubjectPublicKeyInfo::from_pem(pem).map_err(|_| AuthorityError::PublicKey)?;
    match key.algorithm() == &PKCS_ECDSA_P256_SHA256 {
        true => Ok(key),
        false => Err(AuthorityError::PublicKey),
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::OrganizationName, "hearth");
    // A common name has at most 64 characters; a deployment's name may be longer, and only its DNS name matters.
    let common: String = name.chars().take(64).collect();
    names.push(DnType::CommonName, common);
    names
}

fn valid(parameters: &mut CertificateParams, now: Timestamp, lifetime: Duration) {
    let now_s = u64::try_from(now.as_second()).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    parameters.not_before = epoch + Duration::from_secs(now_s).saturating_sub(SKEW);
    parameters.not_after = epoch + Duration::from_secs(now_s) + lifetime;
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{RootCertStore, crypto::aws_lc_rs};

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn now() -> Timestamp {
        "2026-11-20T12:00:00Z".parse().expect("time")
    }

    /// Whether a client that trusts `bundle` accepts the certificate for `name` at `at`.
    fn is_accepted(bundle: &str, leaf: &Pair, name: &str, at: Timestamp) -> bool {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            roots.add(certificate.expect("PEM")).expect("authority");
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .expect("verifier");
        let certificate = CertificateDer::from_pem_slice(leaf.certificate.as_bytes()).expect("PEM");
        let name = ServerName::try_from(name.to_owned()).expect("name");
        let at = UnixTime::since_unix_epoch(Duration::from_secs(at.as_second() as u64));
        verifier
            .verify_server_cert(&certificate, &[], &name, &[], at)
            .is_ok()
    }

    #[test]
    fn a_leaf_is_accepted_for_its_name_in_its_time() {
        let authority = Pair::authority(now(), 10 * DAY).expect("authority");
        let leaf = authority
            .issue("demo.default.hearth", Usage::Both, now(), DAY)
            .expect("leaf");
        assert_eq!(leaf.facts.names, ["demo.default.hearth"]);
        assert_eq!(leaf.facts.issuer, authority.facts.subject);
        let accepted = |name, at| is_accepted(&authority.certificate, &leaf, name, at);
        let later = |duration| now().checked_add(duration).expect("time");
        assert!(accepted("demo.default.hearth", now()));
        assert!(accepted(
            "demo.default.hearth",
            now().checked_sub(SKEW).expect("time")
        ));
        assert!(accepted("demo.default.hearth", later(DAY)));
        assert!(!accepted("demo.default.hearth", later(DAY + DAY)));
        assert!(!accepted("other.default.hearth", now()));
    }

    #[test]
    fn while_one_authority_follows_another_leaves_of_both_are_accepted() {
        let old = Pair::authority(now(), 10 * DAY).expect("authority");
        let new = Pair::authority(now(), 10 * DAY).expect("authority");
        assert_ne!(old.facts.subject, new.facts.subject);
        let bundle = format!("{}{}", new.certificate, old.certificate);
        for authority in [&old, &new] {
            let leaf = authority
                .issue("agent.hearth", Usage::Both, now(), DAY)
                .expect("leaf");
            assert!(is_accepted(&bundle, &leaf, "agent.hearth", now()));
        }
        let leaf = new
            .issue("agent.hearth", Usage::Both, now(), DAY)
            .expect("leaf");
        assert!(!is_accepted(&old.certificate, &leaf, "agent.hearth", now()));
    }

    #[test]
    fn a_leaf_never_outlives_its_authority() {
        let authority = Pair::authority(now(), DAY).expect("authority");
        let leaf = authority
            .issue("agent.hearth", Usage::Both, now(), 90 * DAY)
            .expect("leaf");
        assert_eq!(leaf.facts.not_after, authority.facts.not_after);
    }

    #[test]
    fn what_was_written_is_read_again_and_strange_things_are_not() {
        let authority = Pair::authority(now(), DAY).expect("authority");
        let other = Pair::authority(now(), DAY).expect("authority");
        assert_eq!(
            Pair::read(&authority.certificate, &authority.key),
            Some(authority.clone())
        );
        assert_eq!(Pair::read(&authority.certificate, &other.key), None);
        assert_eq!(Pair::read("", &authority.key), None);
        assert_eq!(Pair::read(&authority.certificate, "-----BEGIN"), None);
    }

    #[test]
    fn a_long_name_is_kept_whole_where_it_counts() {
        let name = format!("{}.{}.hearth", "a".repeat(40), "b".repeat(63));
        let authority = Pair::authority(now(), DAY).expect("authority");
        let leaf = authority
            .issue(&name, Usage::Both, now(), DAY)
            .expect("leaf");
        assert_eq!(leaf.facts.names, [name]);
    }
}
