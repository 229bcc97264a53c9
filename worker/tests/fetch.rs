//! `hearth-worker fetch` from a user's point of view.

#![allow(clippy::unwrap_used)] // helpers of tests

#[path = "../fetch/tests/support/mod.rs"]
mod server;
mod support;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use serde_json::Value;
use server::{Fault, FileServer, model_tar, sha256};
use support::{program, until};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, pem::PemObject};

fn fetch(url: &str, sha256: &str, into: &Path) -> Command {
    let mut command = program();
    command
        .args(["fetch", "--url", url, "--sha256", sha256, "--into"])
        .arg(into)
        .env("NO_PROXY", "127.0.0.1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs the command to its end, concurrently with the test's servers.
async fn run(mut command: Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// A process that is killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn the_directory_is_printed_and_progress_beside_it() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    let cache = TempDir::new().unwrap();
    let (code, stdout, stderr) = run(fetch(&server.url(), &sha256(&archive), cache.path())).await;
    assert_eq!(code, 0, "{stderr}");
    let directory = stdout.trim_end();
    assert!(
        Path::new(directory).join("config.json").is_file(),
        "{stdout}"
    );
    assert!(
        stderr.contains("downloading: ") && stderr.contains(" of 1.9 MiB"),
        "{stderr}"
    );
    assert!(stderr.contains("unpacking"), "{stderr}");

    let again = fetch(&server.url(), &sha256(&archive), cache.path());
    assert_eq!(run(again).await.1.trim_end(), directory);
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn json_is_a_line_an_event() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    server.pace(Duration::from_millis(2));
    let cache = TempDir::new().unwrap();
    let mut command = fetch(&server.url(), &sha256(&archive), cache.path());
    command.arg("--json");
    let (code, stdout, stderr) = run(command).await;
    assert_eq!(code, 0, "{stderr}");
    let events: Vec<Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (last, progress) = events.split_last().unwrap();
    assert_eq!(last["event"], "fetched");
    assert!(
        Path::new(last["directory"].as_str().unwrap())
            .join("config.json")
            .is_file()
    );
    assert!(progress.iter().all(|event| event["event"] == "progress"));
    let downloading: Vec<&Value> = progress
        .iter()
        .filter(|event| event["phase"] == "downloading")
        .collect();
    assert!(downloading.len() > 1, "{stdout}");
    assert_eq!(downloading[0]["total_bytes"], archive.len());
    let bytes: Vec<u64> = downloading
        .iter()
        .map(|event| event["bytes"].as_u64().unwrap())
        .collect();
    assert!(bytes.is_sorted(), "{bytes:?}");
}

#[tokio::test]
async fn a_killed_fetch_is_gone_on_with() {
    let archive = model_tar(3_000_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::StallAfter(1_700_000)]);
    let cache = TempDir::new().unwrap();
    let checksum = sha256(&archive);
    let part = cache
        .path()
        .join(format!("partial/{}.part", &checksum[..32]));
    let first = Running(
        fetch(&server.url(), &checksum, cache.path())
            .spawn()
            .unwrap(),
    );
    until("a part is on disk", async || {
        fs::metadata(&part).is_ok_and(|metadata| metadata.len() == 1_700_000)
    })
    .await;
    // Same as kill -9.
    drop(first);
    let (code, _, stderr) = run(fetch(&server.url(), &checksum, cache.path())).await;
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(server.sent_bytes(), archive.len(), "bytes came twice");
    assert_eq!(
        fs::read_dir(cache.path().join("partial")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn of_many_processes_one_fetches() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    // Slow enough that all four start before the first is done.
    server.pace(Duration::from_millis(20));
    let cache = TempDir::new().unwrap();
    let checksum = sha256(&archive);
    let fetches = (0..4).map(|_| run(fetch(&server.url(), &checksum, cache.path())));
    let outcomes = futures::future::join_all(fetches).await;
    for (code, stdout, stderr) in &outcomes {
        assert_eq!(*code, 0, "{stderr}");
        assert_eq!(stdout, &outcomes[0].1);
    }
    let waited = outcomes
        .iter()
        .filter(|(_, _, stderr)| stderr.contains("waiting for another process"));
    assert_eq!(waited.count(), 3);
    assert_eq!(server.sent_bytes(), archive.len());
}

#[tokio::test]
async fn faults_are_told_with_a_remedy() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let cache = TempDir::new().unwrap();
    let right = sha256(&archive);
    let wrong = sha256(b"other");
    server.faults([Fault::Status(404, Vec::new())]);
    for (url, checksum, expected) in [
        (
            server.url(),
            right.as_str(),
            [
                "was not found: the server answered 404",
                "\n  check the URL",
            ],
        ),
        (
            server.url(),
            wrong.as_str(),
            [right.as_str(), "\n  check that the sha256 is"],
        ),
        (
            server.url(),
            "abc",
            ["sha256 is \"abc\"", "\n  write the 64"],
        ),
        (
            "nas/m.tar".to_owned(),
            right.as_str(),
            ["url is \"nas/m.tar\"", "\n  write a URL"],
        ),
    ] {
        let (code, stdout, stderr) = run(fetch(&url, checksum, cache.path())).await;
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        let message = stderr.rsplit_once("error: ").expect("an error").1;
        for part in expected {
            assert!(message.contains(part), "{part} not in {message}");
        }
    }
}

/// Serves one file over TLS, to any client that accepts the certificate.
async fn serve_tls(config: ServerConfig, file: Vec<u8>) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else {
                continue;
            };
            let mut request = [0; 4096];
            if stream.read(&mut request).await.is_err() {
                continue;
            }
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", file.len());
            let _ = stream.write_all(head.as_bytes()).await;
            let _ = stream.write_all(&file).await;
            let _ = stream.shutdown().await;
        }
    });
    format!("https://{address}/m.tar")
}

#[tokio::test]
async fn certificates_are_checked_and_own_authorities_can_be_named() {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["127.0.0.1".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap(),
        )
        .unwrap();
    let archive = model_tar(100_000);
    let url = serve_tls(config, archive.clone()).await;
    let cache = TempDir::new().unwrap();
    let (code, _, stderr) = run(fetch(&url, &sha256(&archive), cache.path())).await;
    assert_eq!(code, 1);
    assert!(
        stderr.contains("TLS verification failed for") && stderr.contains("HEARTH_CA_BUNDLE"),
        "{stderr}"
    );
    assert!(!stderr.contains("trying again"), "{stderr}");

    let pem = cache.path().join("nas.pem");
    fs::write(&pem, certificate.pem()).unwrap();
    for variable in ["SSL_CERT_FILE", "HEARTH_CA_BUNDLE"] {
        let cache = TempDir::new().unwrap();
        let mut command = fetch(&url, &sha256(&archive), cache.path());
        command.env(variable, &pem);
        let (code, _, stderr) = run(command).await;
        assert_eq!(code, 0, "{variable}: {stderr}");
    }
    let mut command = fetch(&url, &sha256(&archive), cache.path());
    command.env("HEARTH_CA_BUNDLE", "/nowhere.pem");
    let (code, _, stderr) = run(command).await;
    assert_eq!(code, 1);
    assert!(stderr.contains("/nowhere.pem cannot be read"), "{stderr}");
}

#[tokio::test]
async fn a_repository_is_fetched_listed_and_removed() {
    let config: (&str, &[u8]) = ("config.json", b"{\"model_type\":\"llama\"}");
    let weights = server::noise(2_000_000, 7);
    let files = [config, ("model.safetensors", &weights)];
    let hub = server::hub::HubServer::start("acme/poems", &files).await;
    hub.pace(Duration::from_millis(2));
    let cache = TempDir::new().unwrap();
    let command = |words: &[&str]| {
        let mut command = program();
        command
            .args(words)
            .arg(cache.path())
            .env("NO_PROXY", "127.0.0.1")
            .env("HF_ENDPOINT", hub.url())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    let (code, stdout, stderr) = run(command(&["fetch", "--repo", "acme/poems", "--into"])).await;
    assert_eq!(code, 0, "{stderr}");
    let directory = Path::new(stdout.trim_end());
    assert_eq!(
        fs::read(directory.join("model.safetensors")).unwrap(),
        weights
    );
    // The rate and what is left of the time stand beside the bytes.
    assert!(
        stderr.contains(" of 1.9 MiB, ") && stderr.contains(" left"),
        "{stderr}"
    );
    let (code, stdout, stderr) = run(command(&["models", "--json", "--in"])).await;
    assert_eq!(code, 0, "{stderr}");
    let listed: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(listed[0]["source"], "acme/poems@main");
    assert_eq!(listed[0]["commit"], hub.listing()["sha"]);
    let key = listed[0]["key"].as_str().unwrap();
    assert_eq!(directory.file_name().unwrap(), key);
    let (code, stdout, stderr) = run(command(&["models", "--json", "--remove", key, "--in"])).await;
    assert_eq!((code, stdout.trim_end()), (0, "[]"), "{stderr}");
    assert!(!directory.exists());
    let (code, _, stderr) = run(command(&["models", "--remove", key, "--in"])).await;
    assert!(code == 1 && stderr.contains("no such model"), "{stderr}");
    let (code, _, stderr) = run(command(&["fetch", "--repo", "poems", "--into"])).await;
    assert!(code == 1 && stderr.contains("owner/name"), "{stderr}");
}
