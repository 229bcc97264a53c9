//! HTTP clients of an endpoint, and the certificates that they trust.

pub(crate) mod openai;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};
use serde_json::Value;

/// Creates a client for `url`. With `trusted`, a PEM file, an HTTPS server must present a certificate from that file,
/// or one signed by one of them and carrying the server's name; without it the system's authorities decide. This machine
/// itself is never asked through a proxy, whatever the environment says.
///
/// # Errors
/// The file cannot be read or has no certificate; the system has no authorities.
pub(crate) fn client(
    url: &str,
    trusted: Option<&Path>,
    timeout: Option<Duration>,
) -> anyhow::Result<reqwest::Client> {
    let mut builder = reqwest::Client::builder();
    if is_own(url) {
        builder = builder.no_proxy();
    }
    if let Some(timeout) = timeout {
        builder = builder.timeout(timeout);
    }
    builder = match trusted {
        _ if !url.starts_with("https:") => builder.tls_certs_only([]),
        Some(file) => builder.tls_backend_preconfigured(trusting(file)?),
        None => builder,
    };
    builder
        .build()
        .context("this system's certificate authorities cannot be read\n  name the server's certificate: --ca FILE")
}

/// Workers that wait for a member of their group, each with that member, by a gateway's answer to `/ready`.
pub(crate) fn waits_for(body: &Value) -> impl Iterator<Item = (&str, &str)> {
    let workers = body["workers"].as_array().into_iter().flatten();
    workers.filter_map(|worker| Some((worker["name"].as_str()?, worker["waits_for"].as_str()?)))
}

/// Whether the URL's host is this machine.
fn is_own(url: &str) -> bool {
    let url = reqwest::Url::parse(url).ok();
    let host = url.as_ref().and_then(|url| url.host_str());
    host.is_some_and(|host| {
        let host = host.trim_start_matches('[').trim_end_matches([']', '.']);
        match host.parse::<IpAddr>() {
            Ok(address) => address.to_canonical().is_loopback(),
            Err(_) => host == "localhost" || host.ends_with(".localhost"),
        }
    })
}

fn trusting(file: &Path) -> anyhow::Result<ClientConfig> {
    let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .with_context(|| {
            format!(
                "{} cannot be read as a certificate\n  name a PEM file with the server's certificate or that of its authority",
                file.display()
            )
        })?;
    if certificates.is_empty() {
        bail!(
            "{} holds no certificate\n  name a PEM file with the server's certificate or that of its authority",
            file.display()
        );
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    // A certificate that cannot be an authority is still matched byte for byte.
    roots.add_parsable_certificates(certificates.iter().cloned());
    let by_authority =
        WebPkiServerVerifier::builder_with_provider(roots.into(), provider.clone()).build();
    let verifier = Trusting {
        certificates,
        by_authority: by_authority.ok(),
        provider: provider.clone(),
    };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    Ok(config.with_no_client_auth())
}

/// Accepts the certificates of a file themselves, whatever name they carry, and those that they signed for the
/// server's name.
#[derive(Debug)]
struct Trusting {
    certificates: Vec<CertificateDer<'static>>,
    by_authority: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if self.certificates.iter().any(|known| known == end_entity) {
            return Ok(ServerCertVerified::assertion());
        }
        match &self.by_authority {
            Some(by_authority) => by_authority.verify_server_cert(
                end_entity,
                intermediates,
                server_name,
                ocsp_response,
                now,
            ),
            None => Err(CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        let algorithms = &self.provider.signature_verification_algorithms;
        algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::is_own;

    #[test]
    fn this_machine_is_known_in_every_spelling() {
        for (url, is) in [
            ("http://127.0.0.1:8080/v1", true),
            ("http://127.8.9.1/v1", true),
            ("https://localhost:8443/v1", true),
            ("http://a.localhost./v1", true),
            ("http://[::1]:8080/v1", true),
            ("http://[::ffff:127.0.0.1]/v1", true),
            ("http://192.168.1.7:8080/v1", false),
            ("http://localhost.example/v1", false),
            ("http://demo.default/v1", false),
        ] {
            assert_eq!(is_own(url), is, "{url}");
        }
    }
}
