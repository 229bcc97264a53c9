//! The certificates of a cluster, and the kubeconfigs of its components.

use std::path::{Path, PathBuf};

use anyhow::Context;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use serde_json::json;

/// A directory with a certificate authority and the certificates that it signed: `NAME.crt` and `NAME.key`.
pub(super) struct Pki {
    directory: PathBuf,
    name: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    /// Creates an authority, `NAME.crt` in `directory`.
    pub(super) fn new(directory: &Path, name: &str) -> anyhow::Result<Self> {
        let key = KeyPair::generate()?;
        let mut parameters = CertificateParams::new(Vec::new())?;
        parameters.distinguished_name = distinguished(name, None);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = parameters.self_signed(&key)?;
        write(directory, &format!("{name}.crt"), &certificate.pem())?;
        write(directory, &format!("{name}.key"), &key.serialize_pem())?;
        Ok(Self {
            directory: directory.to_path_buf(),
            name: name.to_owned(),
            issuer: Issuer::new(parameters, key),
        })
    }

    /// Signs a certificate for `user` of `group`, also valid for servers with these names and addresses.
    pub(super) fn sign(
        &self,
        file: &str,
        user: &str,
        group: Option<&str>,
        names: &[&str],
    ) -> anyhow::Result<()> {
        let key = KeyPair::generate()?;
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut parameters = CertificateParams::new(names)?;
        parameters.distinguished_name = distinguished(user, group);
        parameters.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let certificate = parameters.signed_by(&key, &self.issuer)?;
        let directory = &self.directory;
        write(directory, &format!("{file}.crt"), &certificate.pem())?;
        write(directory, &format!("{file}.key"), &key.serialize_pem())
    }

    /// Writes `NAME.kubeconfig` next to the certificate of that name.
    pub(super) fn kubeconfig(&self, name: &str, server: &str) -> anyhow::Result<()> {
        let file = |name: String| self.directory.join(name).display().to_string();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "hearth", "cluster": {
                "server": server,
                "certificate-authority": file(format!("{}.crt", self.name)),
            }}],
            "users": [{"name": name, "user": {
                "client-certificate": file(format!("{name}.crt")),
                "client-key": file(format!("{name}.key")),
            }}],
            "contexts": [{"name": "hearth", "context": {"cluster": "hearth", "user": name}}],
            "current-context": "hearth",
        });
        write(
            &self.directory,
            &format!("{name}.kubeconfig"),
            &config.to_string(),
        )
    }
}

/// Writes the key pair that signs service account tokens: `sa.key` and `sa.pub`.
pub(super) fn service_account_keys(directory: &Path) -> anyhow::Result<()> {
    let key = KeyPair::generate()?;
    write(directory, "sa.key", &key.serialize_pem())?;
    write(directory, "sa.pub", &key.public_key_pem())
}

fn distinguished(user: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, user);
    name
}

fn write(directory: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let path = directory.join(name);
    std::fs::write(&path, text).with_context(|| path.display().to_string())
}
