//! Certificate authorities and proxies that the agent's environment names.

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::server::proxy::ProxyServer;
use super::*;

/// An address for documentation (RFC 5737), of which the hub's certificate is.
const HUB: &str = "203.0.113.7";

/// Speaks TLS for a server that does not; returns the address.
async fn in_tls(certificates: &Path, server: SocketAddr) -> SocketAddr {
    let chain = CertificateDer::pem_file_iter(certificates.join("tls.crt")).unwrap();
    let key = PrivateKeyDer::from_pem_file(certificates.join("tls.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.map(Result::unwrap).collect(), key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut client = acceptor.accept(client).await?;
                let mut server = TcpStream::connect(server).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    address
}

/// The request for the repository, at the address of which the certificate is.
fn request_of(server: &server::hub::HubServer) -> ModelRequest {
    let mut request = hub::wanted(server, "", "", "");
    request.hub.as_mut().unwrap().endpoint = format!("https://{HUB}");
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hub_of_a_private_authority_is_reached_through_the_proxy() {
    let private = Authority::new();
    let certificates = private.issue(HUB);
    let server = hub::start(&hub::demo_files()).await;
    let plain = server.url().replace("http://", "").parse().unwrap();
    let proxy = ProxyServer::start(in_tls(&certificates, plain).await).await;
    let bundle = certificates.join("ca.crt");
    let environment = [
        ("HTTPS_PROXY", proxy.url()),
        ("HEARTH_CA_BUNDLE", bundle.display().to_string()),
    ];
    let fixture = Fixture::with_environment(&environment);
    let request = request_of(&server);
    let ready = settled(&fixture.operator, &request).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert!(fixture.has(&request));
    let asked = proxy.asked();
    let is_tunnel = |line: &String| *line == format!("CONNECT {HUB}:443 HTTP/1.1");
    assert!(
        !asked.is_empty() && asked.iter().all(is_tunnel),
        "{asked:?}"
    );

    // Without the authority nothing is fetched, and the message says where to name it.
    let fixture = Fixture::with_environment(&environment[..1]);
    let failed = settled(&fixture.operator, &request).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    for words in ["TLS verification failed", "caBundle of Hearth's chart"] {
        assert!(failed.message.contains(words), "{}", failed.message);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_is_read_anew_by_each_fetch() {
    let (old, new) = (Authority::new(), Authority::new());
    let certificates = new.issue(HUB);
    let server = hub::start(&hub::demo_files()).await;
    let plain = server.url().replace("http://", "").parse().unwrap();
    let proxy = ProxyServer::start(in_tls(&certificates, plain).await).await;
    let directory = TempDir::new().unwrap();
    let bundle = directory.path().join("ca.pem");
    fs::copy(old.issue("x").join("ca.crt"), &bundle).unwrap();
    let fixture = Fixture::with_environment(&[
        ("HTTPS_PROXY", proxy.url()),
        ("HEARTH_CA_BUNDLE", bundle.display().to_string()),
    ]);
    let request = request_of(&server);
    let failed = settled(&fixture.operator, &request).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed, "{}", failed.message);
    // As a kubelet replaces it when the ConfigMap has changed. A failure is told until the next try is due.
    let next = directory.path().join("next.pem");
    fs::copy(certificates.join("ca.crt"), &next).unwrap();
    fs::rename(&next, &bundle).unwrap();
    until("the model is fetched", async || {
        model(&fixture.operator, &request).await.state() == ModelState::Ready
    })
    .await;
}

#[test]
fn an_agent_without_its_bundle_or_with_a_wrong_proxy_does_not_start() {
    let directory = TempDir::new().unwrap();
    let empty = directory.path().join("empty.pem");
    fs::write(&empty, "").unwrap();
    for (name, value, words) in [
        (
            "HEARTH_CA_BUNDLE",
            "/nowhere/ca.pem",
            "/nowhere/ca.pem cannot be read",
        ),
        (
            "HEARTH_CA_BUNDLE",
            empty.to_str().unwrap(),
            "empty.pem is empty",
        ),
        ("HTTPS_PROXY", "socks5://p.lan:1080", "HTTPS_PROXY is "),
    ] {
        let output = support::program()
            .args([
                "agent",
                "--node",
                "node-1",
                "--listen",
                "127.0.0.1:0",
                "--cache-dir",
            ])
            .arg(directory.path())
            .env(name, value)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    }
}
