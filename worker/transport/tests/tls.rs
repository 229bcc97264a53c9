//! Mutual TLS with certificates made on the spot.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::path::{Path, PathBuf};

use common::{ask, counting};
use futures::StreamExt;
use hearth_transport::{
    ClientOptions, Clients, Endpoint, Listener, RpcErrorKind, ServerOptions, Tls, TlsFiles, Worker,
    serve,
    tonic::transport::{Certificate, ClientTlsConfig, Endpoint as TonicEndpoint},
    v1::decode_client::DecodeClient,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// An authority that signs certificates into a directory.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: PathBuf,
}

impl Authority {
    fn new(dir: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let dir = dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, dir }
    }

    fn issue(&self, name: &str, host: &str) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        let files = TlsFiles {
            cert: self.dir.join(format!("{name}.pem")),
            key: self.dir.join(format!("{name}.key")),
            ca: self.dir.join("ca.pem"),
            server_name: None,
        };
        std::fs::write(&files.cert, cert.pem()).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        files
    }
}

/// Serves with these certificates; gives the address.
fn served(files: &TlsFiles) -> Endpoint {
    let (routes, _) = counting();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.address().to_string().parse().unwrap();
    let options = ServerOptions {
        tls: Some(Tls::read(files).unwrap()),
        ..ServerOptions::default()
    };
    tokio::spawn(async move { serve(listener, routes, &options, std::future::pending()).await });
    address
}

fn dialled(endpoint: &Endpoint, files: Option<&TlsFiles>) -> Worker {
    let options = ClientOptions {
        tls: files.map(|f| Tls::read(f).unwrap()),
        ..ClientOptions::default()
    };
    Clients::new(options).worker(endpoint).unwrap()
}

async fn refused(worker: &Worker) -> String {
    let status = worker.decode().generate(ask(1)).await.unwrap_err();
    let error = worker.error(&status);
    assert_eq!(error.kind(), RpcErrorKind::Gone, "{status:?}");
    error.to_string()
}

#[tokio::test]
async fn both_ends_of_one_authority_talk() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let endpoint = served(&ours.issue("server", "127.0.0.1"));
    let worker = dialled(&endpoint, Some(&ours.issue("client", "gateway")));
    let stream = worker.decode().generate(ask(4)).await.unwrap().into_inner();
    assert_eq!(stream.map(Result::unwrap).count().await, 6);
}

#[tokio::test]
async fn certificates_of_another_authority_are_refused_by_either_end() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let theirs = Authority::new(dir.path(), "theirs");
    let endpoint = served(&ours.issue("server", "127.0.0.1"));
    // The client does not trust the server.
    let stranger = theirs.issue("client", "gateway");
    let message = refused(&dialled(&endpoint, Some(&stranger))).await;
    assert!(message.contains("certificate"), "{message}");
    // The client trusts the server, and the server does not trust the client.
    let mixed = TlsFiles {
        ca: ours.dir.join("ca.pem"),
        ..stranger
    };
    refused(&dialled(&endpoint, Some(&mixed))).await;
}

#[tokio::test]
async fn a_caller_without_certificate_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let endpoint = served(&ours.issue("server", "127.0.0.1"));
    refused(&dialled(&endpoint, None)).await;
    let ca = Certificate::from_pem(ours.issuer.pem());
    let tls = ClientTlsConfig::new()
        .ca_certificate(ca)
        .domain_name("127.0.0.1");
    let channel = TonicEndpoint::from_shared(format!("https://{endpoint}"))
        .unwrap()
        .tls_config(tls)
        .unwrap()
        .connect_lazy();
    assert!(DecodeClient::new(channel).generate(ask(1)).await.is_err());
}

#[tokio::test]
async fn a_certificate_for_another_host_is_refused_unless_its_name_is_expected() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let endpoint = served(&ours.issue("server", "hearth-worker"));
    let mut files = ours.issue("client", "gateway");
    let message = refused(&dialled(&endpoint, Some(&files))).await;
    assert!(
        message.contains("hearth-worker") || message.contains("not valid for name"),
        "{message}"
    );
    files.server_name = Some("hearth-worker".to_owned());
    let worker = dialled(&endpoint, Some(&files));
    assert!(worker.decode().generate(ask(1)).await.is_ok());
}

#[test]
fn unusable_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let good = ours.issue("a", "a");
    let other = ours.issue("b", "b");
    let error = |files: TlsFiles| Tls::read(&files).err().unwrap().to_string();

    let missing = dir.path().join("nowhere.pem");
    let text = error(TlsFiles {
        cert: missing.clone(),
        ..good.clone()
    });
    assert!(
        text.starts_with("cannot read the TLS certificate") && text.contains("nowhere.pem"),
        "{text}"
    );

    let text = error(TlsFiles {
        cert: good.key.clone(),
        ..good.clone()
    });
    assert!(
        text.contains("a.key") && text.contains("no PEM certificate"),
        "{text}"
    );

    let text = error(TlsFiles {
        key: good.cert.clone(),
        ..good.clone()
    });
    assert!(
        text.contains("a.pem") && text.contains("no PEM private key"),
        "{text}"
    );

    let text = error(TlsFiles {
        key: other.key,
        ..good.clone()
    });
    assert!(
        text.contains("b.key does not belong to the certificate"),
        "{text}"
    );

    let empty = dir.path().join("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let text = error(TlsFiles {
        ca: empty,
        ..good.clone()
    });
    assert!(
        text.contains("authority") && text.contains("empty.pem"),
        "{text}"
    );

    let broken = dir.path().join("broken.pem");
    std::fs::write(
        &broken,
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    let text = error(TlsFiles {
        cert: broken,
        ..good
    });
    assert!(text.contains("broken.pem"), "{text}");
}
