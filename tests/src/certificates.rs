//! Test certificates, generated on demand.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// Writes ca.crt, tls.crt and tls.key: a certificate authority and one certificate signed by it for these names.
///
/// # Panics
/// When they cannot be made or written.
pub fn write_certificates(directory: &Path, names: &[&str]) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let make = || -> Result<[(&str, String); 3], rcgen::Error> {
        let authority_key = KeyPair::generate()?;
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_pem = authority.self_signed(&authority_key)?.pem();
        let issuer = Issuer::new(authority, authority_key);
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(names)?.signed_by(&key, &issuer)?;
        Ok([
            ("ca.crt", authority_pem),
            ("tls.crt", certificate.pem()),
            ("tls.key", key.serialize_pem()),
        ])
    };
    for (name, text) in make().unwrap_or_else(|error| panic!("certificates: {error}")) {
        std::fs::write(directory.join(name), text)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}
