//! Downloads through proxies, and what never goes through one.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_fetch::{
    AddressPolicy, Cache, Egress, FetchError, FetchOptions, ProxyVariables, Source, fetch,
};
use support::hub::HubServer;
use support::proxy::ProxyServer;
use support::{Fault, FileServer, model_tar, noise, sha256};
use tempfile::TempDir;

/// An address for documentation (RFC 5737): nobody answers there.
const FAR: &str = "203.0.113.7";

fn through(proxy: &str, none_for: &str) -> FetchOptions {
    let variables = ProxyVariables {
        http: Some(proxy.to_owned()),
        https: Some(proxy.to_owned()),
        none_for: Some(none_for.to_owned()),
        ..ProxyVariables::default()
    };
    FetchOptions {
        connect_timeout: Duration::from_secs(5),
        attempts: 2,
        first_backoff: Duration::from_millis(10),
        max_backoff: Duration::from_millis(10),
        reserve_bytes: 0,
        egress: Egress::new(None, &variables).unwrap(),
        ..FetchOptions::default()
    }
}

/// The same on a node of a cluster with the range 10.42.0.0/16, where the tests' own addresses are open.
fn on_a_node(proxy: &str) -> FetchOptions {
    let cluster = vec!["10.42.0.0/16".parse().unwrap()];
    let open = vec!["127.0.0.1/32".parse().unwrap()];
    FetchOptions {
        private_patience: Duration::from_secs(2),
        address_policy: AddressPolicy::outside(cluster, open),
        ..through(proxy, "")
    }
}

async fn fetched(source: &Source, options: &FetchOptions) -> Result<PathBuf, FetchError> {
    let directory = TempDir::new().unwrap();
    let cache = Cache::new(directory.path());
    let work = fetch(source, &cache, options, Arc::new(|_| {}));
    let outcome = tokio::time::timeout(Duration::from_secs(60), work);
    outcome.await.expect("it hangs")
}

#[tokio::test]
async fn an_archive_comes_through_the_proxy_with_its_password() {
    let archive = model_tar(100_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::CutAfter(50_000)]);
    let proxy = ProxyServer::start(server.address()).await;
    let url = format!("http://{FAR}/models/m.tar?signature=secret");
    let source = Source::new(&url, &sha256(&archive)).unwrap();
    let named = proxy.url().replace("http://", "http://ann:hush@");
    fetched(&source, &through(&named, "nas.lan")).await.unwrap();
    let line = format!("GET {url} HTTP/1.1");
    assert_eq!(proxy.asked(), [line.clone(), line]);
    assert_eq!(server.sent_bytes(), archive.len(), "bytes came twice");
    // ann:hush
    for head in proxy.heads() {
        let head = head.to_ascii_lowercase();
        assert!(
            head.contains("proxy-authorization: basic yw5uomh1c2g="),
            "{head}"
        );
    }
    // The server that the proxy leads to is asked for nothing that is for the proxy.
    assert!(
        server
            .seen()
            .iter()
            .all(|seen| seen.authorization.is_none())
    );
}

#[tokio::test]
async fn a_repository_comes_through_the_proxy_but_for_what_is_on_this_machine() {
    let files: [(&str, &[u8]); 3] = [
        ("config.json", b"{\"model_type\":\"llama\"}"),
        ("tokenizer.json", b"{}"),
        // From a server of its own on 127.0.0.1, to which the hub redirects.
        ("model.safetensors", &noise(200_000, 7)),
    ];
    let server = HubServer::start("acme/poems", &files).await;
    let address = server.url().replace("http://", "").parse().unwrap();
    let proxy = ProxyServer::start(address).await;
    let source = Source::of_hub(&format!("http://{FAR}"), "acme/poems", None).unwrap();
    fetched(&source, &through(&proxy.url(), "")).await.unwrap();
    let large = server.asked().iter().filter(|asked| asked.is_large).count();
    assert_eq!(large, 1);
    let asked = proxy.asked();
    assert_eq!(asked.len(), server.asked().len() - large, "{asked:?}");
    let is_far = |line: &String| line.starts_with(&format!("GET http://{FAR}/"));
    assert!(asked.iter().all(is_far), "{asked:?}");
}

#[tokio::test]
async fn https_goes_through_a_tunnel() {
    let server = FileServer::start(Vec::new()).await;
    let proxy = ProxyServer::start(server.address()).await;
    let source = Source::new("https://hub.example/m.tar", &sha256(b"")).unwrap();
    // The server behind the proxy has no TLS.
    let error = fetched(&source, &through(&proxy.url(), ""))
        .await
        .unwrap_err();
    assert!(matches!(error, FetchError::Tls { .. }), "{error}");
    assert_eq!(proxy.asked()[0], "CONNECT hub.example:443 HTTP/1.1");
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn this_machine_and_exceptions_are_reached_directly() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let proxy = ProxyServer::start(server.address()).await;
    let by_name = server.url().replace("127.0.0.1", "localhost");
    for url in [server.url(), by_name] {
        let source = Source::new(&url, &sha256(&archive)).unwrap();
        for options in [through(&proxy.url(), ""), through(&proxy.url(), "*")] {
            fetched(&source, &options).await.unwrap();
        }
    }
    // An address of this machine that is no loopback one would go through the proxy; an exception does not.
    let source = Source::new(&format!("http://{FAR}:9/m.tar"), &sha256(b"")).unwrap();
    let mut options = through(&proxy.url(), "203.0.113.0/24");
    (options.connect_timeout, options.attempts) = (Duration::from_millis(200), 1);
    let error = fetched(&source, &options).await.unwrap_err().to_string();
    assert!(!error.contains("proxy"), "{error}");
    assert!(proxy.asked().is_empty(), "{:?}", proxy.asked());
}

#[tokio::test]
async fn a_proxy_that_does_not_answer_is_named_without_its_password() {
    let source = Source::of_hub(&format!("http://{FAR}"), "acme/poems", None).unwrap();
    let proxy = "http://ann:hush@127.0.0.1:9";
    let error = fetched(&source, &through(proxy, "")).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, FetchError::Lost { .. }), "{text}");
    let words = "no connection through the proxy http://127.0.0.1:9/: ";
    assert!(text.contains(words), "{text}");
}

#[tokio::test]
async fn an_agent_asks_the_proxy_for_nothing_inside_its_cluster() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let proxy = ProxyServer::start(server.address()).await;
    let options = on_a_node(&proxy.url());
    let sha = sha256(&archive);
    // The node itself, its link, and the cluster: refused, as without a proxy.
    for url in ["http://10.42.0.7/m.tar", "http://169.254.169.254/m.tar"] {
        let source = Source::new(url, &sha).unwrap();
        let error = fetched(&source, &options).await.unwrap_err();
        assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    }
    // What is open there is asked directly.
    let source = Source::new(&server.url(), &sha).unwrap();
    fetched(&source, &options).await.unwrap();
    assert!(proxy.asked().is_empty(), "{:?}", proxy.asked());

    // Everything else is the proxy's, which a redirect into the cluster does not lead to.
    let far = Source::new(&format!("http://{FAR}/m.tar"), &sha).unwrap();
    fetched(&far, &options).await.unwrap();
    assert_eq!(proxy.asked().len(), 1);
    let inside = ("location", "http://10.42.0.7/m.tar".to_owned());
    server.faults([Fault::Status(302, vec![inside])]);
    let error = fetched(&far, &options).await.unwrap_err();
    assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    assert_eq!(proxy.asked().len(), 2);
}

#[tokio::test]
async fn what_a_server_behind_the_proxy_answered_is_told_to_nobody() {
    let server = FileServer::start(Vec::new()).await;
    let proxy = ProxyServer::start(server.address()).await;
    server.faults([Fault::Status(404, Vec::new())]);
    let source = Source::new(&format!("http://{FAR}/m.tar"), &sha256(b"")).unwrap();
    let options = on_a_node(&proxy.url());
    let error = fetched(&source, &options).await.unwrap_err();
    assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("through a proxy") && !text.contains("404"),
        "{text}"
    );
    // A hub is the administrator's choice.
    let hub = Source::of_hub(&format!("http://{FAR}"), "acme/poems", None).unwrap();
    server.faults([Fault::Status(404, Vec::new())]);
    let error = fetched(&hub, &options).await.unwrap_err();
    assert!(matches!(error, FetchError::HubNotFound { .. }), "{error}");
}
