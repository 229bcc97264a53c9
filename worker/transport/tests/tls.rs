//! Mutual TLS with certificates generated for the tests.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::{
    ask,
    certificates::{Authority, dialled, served},
};
use futures::StreamExt;
use hearth_transport::{
    RpcErrorKind, Tls, TlsFiles, TlsNames, Worker,
    tonic::transport::{Certificate, ClientTlsConfig, Endpoint as TonicEndpoint},
    v1::decode_client::DecodeClient,
};

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
    // The client trusts the server, but the server does not trust the client.
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
    files.names.server = Some("hearth-worker".to_owned());
    let worker = dialled(&endpoint, Some(&files));
    assert!(worker.decode().generate(ask(1)).await.is_ok());
}

/// A process called `name` that expects the same name of others.
fn named(authority: &Authority, name: &str) -> TlsFiles {
    TlsFiles {
        names: TlsNames::shared(name),
        ..authority.issue(name, name)
    }
}

#[tokio::test]
async fn a_name_is_asked_for_in_both_directions() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let red = named(&ours, "red.default.hearth");
    let blue = named(&ours, "blue.default.hearth");
    let endpoint = served(&red);
    assert!(
        dialled(&endpoint, Some(&red))
            .decode()
            .generate(ask(1))
            .await
            .is_ok()
    );
    // The client expects another server.
    let message = refused(&dialled(&endpoint, Some(&blue))).await;
    assert!(message.contains("blue.default.hearth"), "{message}");
    // The client expects this server, which does not expect the client.
    let intruder = |files: TlsFiles| TlsFiles {
        names: red.names.clone(),
        ..files
    };
    refused(&dialled(&endpoint, Some(&intruder(blue)))).await;
    refused(&dialled(
        &endpoint,
        Some(&intruder(ours.issue("no-name", "10.0.0.1"))),
    ))
    .await;
    // The operator's certificate has another name, but it may call.
    let operator = intruder(ours.issue("operator", "operator.hearth"));
    let operator = dialled(&endpoint, Some(&operator));
    assert!(operator.decode().generate(ask(1)).await.is_ok());
    // A name certified by another authority does not count.
    let theirs = Authority::new(dir.path(), "theirs");
    let forged = TlsFiles {
        ca: ours.dir.join("ca.pem"),
        ..named(&theirs, "red.default.hearth")
    };
    refused(&dialled(&endpoint, Some(&forged))).await;
}

#[tokio::test]
async fn a_client_that_says_nothing_holds_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let endpoint = served(&ours.issue("server", "127.0.0.1"));
    let mut silent = Vec::new();
    for _ in 0..50 {
        let stream = tokio::net::TcpStream::connect(endpoint.to_string()).await;
        silent.push(stream.unwrap());
    }
    let worker = dialled(&endpoint, Some(&ours.issue("client", "gateway")));
    let mut decode = worker.decode();
    let answer = tokio::time::timeout(std::time::Duration::from_secs(5), decode.generate(ask(1)));
    assert!(answer.await.unwrap().is_ok());
    drop(silent);
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
        ..good.clone()
    });
    assert!(text.contains("broken.pem"), "{text}");

    for name in ["two words", "10.0.0.1", ""] {
        let text = error(TlsFiles {
            names: TlsNames::shared(name),
            ..ours.issue("c", "c")
        });
        assert!(
            text.contains(&format!("{name:?} is not a DNS name")),
            "{text}"
        );
    }
}

#[test]
fn unusable_pem_in_memory_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let files = ours.issue("a", "a");
    let [cert, key, ca] =
        [&files.cert, &files.key, &files.ca].map(|path| std::fs::read_to_string(path).unwrap());
    let names = TlsNames::default();
    let tls = Tls::from_pem(&cert, &key, &ca, &names).unwrap();
    let text = tls.replace(&cert, "", &ca).unwrap_err().to_string();
    assert!(
        text.starts_with("the TLS key in memory is not usable"),
        "{text}"
    );
    let text = Tls::from_pem(&cert, &key, "", &names).err().unwrap();
    assert!(
        text.to_string().starts_with("the TLS authority in memory"),
        "{text}"
    );
}
