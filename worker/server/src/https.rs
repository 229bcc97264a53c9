//! HTTPS for clients, from PEM files.

use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::config::{GatewayError, HttpsFiles};

/// An acceptor that offers HTTP/2 and HTTP/1.1.
///
/// # Errors
/// [`GatewayError::Https`] naming the file.
pub(crate) fn acceptor(files: &HttpsFiles) -> Result<TlsAcceptor, GatewayError> {
    let bad = |path: &Path, what, problem: String| GatewayError::Https {
        path: path.to_owned(),
        what,
        problem,
    };
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| bad(&files.cert, "certificate", error.to_string()))?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| bad(&files.key, "private key", error.to_string()))?;
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(&files.cert, "certificate", error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| {
            bad(
                &files.cert,
                "certificate that fits the private key",
                error.to_string(),
            )
        })?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
