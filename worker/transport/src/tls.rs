//! Mutual TLS from PEM files: both ends show a certificate of the same authority.

use std::path::{Path, PathBuf};

use rustls::{
    RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

/// Where the certificates of a process lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM: this process's certificate, then intermediate ones.
    pub cert: PathBuf,
    /// PEM: the private key of that certificate.
    pub key: PathBuf,
    /// PEM: the authority that signed the certificates of both ends.
    pub ca: PathBuf,
    /// Name that the other end's certificate must carry; none: the host that is dialled.
    pub server_name: Option<String>,
}

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("cannot read the TLS {what} {path}: {reason}")]
    Read {
        /// `certificate`, `key` or `authority`.
        what: &'static str,
        /// File.
        path: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// The file holds something else.
    #[error("the TLS {what} {path} is not usable: {detail}")]
    Content {
        /// `certificate`, `key` or `authority`.
        what: &'static str,
        /// File.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Key and certificate are of different pairs.
    #[error("the TLS key {key} does not belong to the certificate {cert}: {detail}")]
    Pair {
        /// File.
        cert: PathBuf,
        /// File.
        key: PathBuf,
        /// The library's reason.
        detail: String,
    },
}

/// Checked certificates of this process.
#[derive(Clone)]
pub struct Tls {
    identity: Identity,
    authority: Certificate,
    server_name: Option<String>,
}

impl Tls {
    /// Reads and checks the files: each holds what it should, and the key belongs to the certificate.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let TlsFiles {
            cert,
            key,
            ca,
            server_name,
        } = files;
        // Two providers may be linked in, and then rustls asks for a choice; an earlier choice stays.
        let _ = aws_lc_rs::default_provider().install_default();
        let (cert_pem, chain) = certificates("certificate", cert)?;
        let (ca_pem, authorities) = certificates("authority", ca)?;
        let key_pem = read("key", key)?;
        let parsed = PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|e| content("key", key, format!("it holds no PEM private key ({e})")))?;
        CertifiedKey::from_der(chain, parsed, &aws_lc_rs::default_provider()).map_err(|e| {
            TlsError::Pair {
                cert: cert.clone(),
                key: key.clone(),
                detail: e.to_string(),
            }
        })?;
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots
                .add(authority)
                .map_err(|e| content("authority", ca, e.to_string()))?;
        }
        Ok(Self {
            identity: Identity::from_pem(cert_pem, key_pem),
            authority: Certificate::from_pem(ca_pem),
            server_name: server_name.clone(),
        })
    }

    /// For a server: callers without a certificate of the authority are refused.
    pub fn server(&self) -> ServerTlsConfig {
        ServerTlsConfig::new()
            .identity(self.identity.clone())
            .client_ca_root(self.authority.clone())
    }

    /// For a client that dials `host`.
    pub fn client(&self, host: &str) -> ClientTlsConfig {
        ClientTlsConfig::new()
            .identity(self.identity.clone())
            .ca_certificate(self.authority.clone())
            .domain_name(self.server_name.as_deref().unwrap_or(host))
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|reason| TlsError::Read {
        what,
        path: path.to_owned(),
        reason,
    })
}

/// The file's bytes and the certificates in them, one at least.
fn certificates(
    what: &'static str,
    path: &Path,
) -> Result<(Vec<u8>, Vec<CertificateDer<'static>>), TlsError> {
    let pem = read(what, path)?;
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let parsed = parsed.map_err(|e| content(what, path, e.to_string()))?;
    if parsed.is_empty() {
        let detail = "it holds no PEM certificate".to_owned();
        return Err(content(what, path, detail));
    }
    Ok((pem, parsed))
}

fn content(what: &'static str, path: &Path, detail: String) -> TlsError {
    TlsError::Content {
        what,
        path: path.to_owned(),
        detail,
    }
}
