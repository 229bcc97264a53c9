//! Client identity: where only some clients may call, a certificate from the authority is not enough.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::{danger::HandshakeSignatureValid, verify_server_name},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ParsedCertificate,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

/// Accepts a client that another verifier accepts, if its certificate carries one of the names.
#[derive(Debug)]
pub(crate) struct NamedClients {
    authority: Arc<dyn ClientCertVerifier>,
    names: Vec<ServerName<'static>>,
}

impl NamedClients {
    /// Wraps `authority`, or returns it unchanged if there are no names.
    pub(crate) fn over(
        authority: Arc<dyn ClientCertVerifier>,
        names: Vec<ServerName<'static>>,
    ) -> Arc<dyn ClientCertVerifier> {
        if names.is_empty() {
            return authority;
        }
        Arc::new(Self { authority, names })
    }
}

impl ClientCertVerifier for NamedClients {
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .authority
            .verify_client_cert(end_entity, intermediates, now)?;
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let mut refusal = Error::InvalidCertificate(CertificateError::NotValidForName);
        for name in &self.names {
            match verify_server_name(&certificate, name) {
                Ok(()) => return Ok(verified),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    fn offer_client_auth(&self) -> bool {
        self.authority.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.authority.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.authority.root_hint_subjects()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authority.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.authority.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.authority.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.authority.requires_raw_public_keys()
    }
}
