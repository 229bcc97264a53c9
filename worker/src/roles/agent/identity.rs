//! Identity of this agent: the operator exchanges its token for a certificate; the private key never leaves the
//! process.

use std::path::{Path, PathBuf};

use hearth_transport::v1::{CertifyRequest, CertifyResponse, IdentifyResponse};
use hearth_transport::{Tls, TlsNames};
use rcgen::KeyPair;
use tonic::Status;

/// Credentials with which this agent proves its node.
pub(super) struct Identity {
    /// Name of the node.
    node: String,
    tls: Tls,
    /// Path of the token; the kubelet renews it before it expires.
    token: PathBuf,
    key: KeyPair,
}

impl Identity {
    /// Creates the identity with a new key.
    ///
    /// # Errors
    /// An error if no key can be generated.
    pub(super) fn new(node: &str, tls: Tls, token: &Path) -> Result<Self, rcgen::Error> {
        Ok(Self {
            node: node.to_owned(),
            tls,
            token: token.to_owned(),
            key: KeyPair::generate()?,
        })
    }

    /// Returns the current token and the public key.
    ///
    /// # Errors
    /// FAILED_PRECONDITION if there is no token.
    pub(super) async fn tell(&self) -> Result<IdentifyResponse, Status> {
        let token = tokio::fs::read_to_string(&self.token).await;
        let token = token.map_err(|error| {
            let path = self.token.display();
            Status::failed_precondition(format!("the token {path} cannot be read: {error}"))
        })?;
        Ok(IdentifyResponse {
            token: token.trim().to_owned(),
            public_key: self.key.public_key_pem(),
        })
    }

    /// Uses the certificate from now on.
    ///
    /// # Errors
    /// FAILED_PRECONDITION for another node's certificate, INVALID_ARGUMENT for one with another key.
    pub(super) fn take(&self, request: CertifyRequest) -> Result<CertifyResponse, Status> {
        let CertifyRequest { node, certificate } = request;
        if node != self.node {
            let own = &self.node;
            return Err(Status::failed_precondition(format!(
                "the certificate is for node {node:?}, but this agent runs on {own:?}"
            )));
        }
        let adopted = self.tls.adopt(&certificate, &self.key.serialize_pem());
        adopted.map_err(|error| Status::invalid_argument(error.to_string()))?;
        tracing::info!(node, "this node's own certificate");
        Ok(CertifyResponse {})
    }

    /// Returns certificates for connections with others than the operator, with names of their own.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a certificate that is not for this agent's key.
    pub(super) fn beside(&self, certificate: &str, names: &TlsNames) -> Result<Tls, Status> {
        let key = self.key.serialize_pem();
        let tls = self.tls.beside(certificate, &key, names);
        tls.map_err(|error| Status::invalid_argument(error.to_string()))
    }
}
