//! Certificates generated for tests, and both ends of a connection that uses them.

use std::path::{Path, PathBuf};

use hearth_transport::{
    ClientOptions, Clients, Endpoint, Listener, ServerOptions, Tls, TlsFiles, TlsNames, Worker,
    serve,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::counting;

/// An authority that writes the certificates it signs into a directory.
pub(crate) struct Authority {
    pub(crate) issuer: CertifiedIssuer<'static, KeyPair>,
    pub(crate) dir: PathBuf,
}

impl Authority {
    pub(crate) fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    /// Issues a certificate; returns it and its key as PEM.
    pub(crate) fn sign(&self, host: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        (cert.pem(), key.serialize_pem())
    }

    pub(crate) fn issue(&self, name: &str, host: &str) -> TlsFiles {
        let (cert, key) = self.sign(host);
        let files = TlsFiles {
            cert: self.dir.join(format!("{name}.pem")),
            key: self.dir.join(format!("{name}.key")),
            ca: self.dir.join("ca.pem"),
            names: TlsNames::default(),
        };
        std::fs::write(&files.cert, cert).unwrap();
        std::fs::write(&files.key, key).unwrap();
        files
    }
}

/// Serves with these certificates; returns the address.
pub(crate) fn served(files: &TlsFiles) -> Endpoint {
    serve_with(Tls::read(files).unwrap())
}

pub(crate) fn serve_with(tls: Tls) -> Endpoint {
    let (routes, _) = counting();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.address().to_string().parse().unwrap();
    let options = ServerOptions {
        tls: Some(tls),
        ..ServerOptions::default()
    };
    tokio::spawn(async move { serve(listener, routes, &options, std::future::pending()).await });
    address
}

/// Connects to a worker with these certificates, over a separate connection.
pub(crate) fn dialled(endpoint: &Endpoint, files: Option<&TlsFiles>) -> Worker {
    dial_with(endpoint, files.map(|files| Tls::read(files).unwrap()))
}

pub(crate) fn dial_with(endpoint: &Endpoint, tls: Option<Tls>) -> Worker {
    let options = ClientOptions {
        tls,
        ..ClientOptions::default()
    };
    Clients::new(options).worker(endpoint).unwrap()
}
