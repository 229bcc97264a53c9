//! Certificates that are replaced while processes run.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::{
    ask,
    certificates::{Authority, dial_with, dialled, serve_with, served},
};
use futures::StreamExt;
use hearth_transport::{Endpoint, Tls, TlsFiles, TlsNames, Worker};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio_rustls::TlsConnector;

const NAME: &str = "demo.default.hearth";
/// Time within which a change takes effect.
const LATEST: Duration = Duration::from_secs(5);
/// The same, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A mounted Secret: links into a directory that is swapped atomically, as the kubelet does.
struct Mount {
    dir: PathBuf,
    version: u32,
}

impl Mount {
    fn new(dir: &Path, name: &str, files: [&str; 3]) -> Self {
        let mut mount = Self {
            dir: dir.join(name),
            version: 0,
        };
        std::fs::create_dir(&mount.dir).unwrap();
        mount.swap(files);
        for file in ["tls.crt", "tls.key", "ca.crt"] {
            let target = Path::new("..data").join(file);
            std::os::unix::fs::symlink(target, mount.dir.join(file)).unwrap();
        }
        mount
    }

    fn swap(&mut self, files: [&str; 3]) {
        self.version += 1;
        let version = format!("..{}", self.version);
        let directory = self.dir.join(&version);
        std::fs::create_dir(&directory).unwrap();
        for (name, text) in ["tls.crt", "tls.key", "ca.crt"].into_iter().zip(files) {
            std::fs::write(directory.join(name), text).unwrap();
        }
        std::os::unix::fs::symlink(&version, self.dir.join("..data_tmp")).unwrap();
        std::fs::rename(self.dir.join("..data_tmp"), self.dir.join("..data")).unwrap();
        if self.version > 1 {
            let before = self.dir.join(format!("..{}", self.version - 1));
            std::fs::remove_dir_all(before).unwrap();
        }
    }

    fn files(&self) -> TlsFiles {
        TlsFiles {
            cert: self.dir.join("tls.crt"),
            key: self.dir.join("tls.key"),
            ca: self.dir.join("ca.crt"),
            names: TlsNames::shared(NAME),
        }
    }
}

/// Returns the certificate that a server presents to a new connection.
async fn leaf(endpoint: &Endpoint, ca: &str, pair: &(String, String)) -> Vec<u8> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(authority.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![der(&pair.0)],
            PrivateKeyDer::from_pem_slice(pair.1.as_bytes()).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = tokio::net::TcpStream::connect(endpoint.to_string())
        .await
        .unwrap();
    let stream = TlsConnector::from(Arc::new(config))
        .connect(NAME.try_into().unwrap(), stream)
        .await
        .unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

fn der(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

async fn answers(worker: &Worker) -> bool {
    match worker.decode().generate(ask(1)).await {
        Ok(stream) => {
            stream
                .into_inner()
                .all(|event| async move { event.is_ok() })
                .await
        }
        Err(_) => false,
    }
}

/// Waits until the condition holds, for as long as a change may take.
async fn in_time<F: Future<Output = bool>>(mut holds: impl FnMut() -> F) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < PATIENCE, "it takes too long");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_stream_goes_on_while_both_ends_get_new_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let ca = ours.issuer.pem();
    let (first, second) = (ours.sign(NAME), ours.sign(NAME));
    let mut mount = Mount::new(dir.path(), "tls", [&first.0, &first.1, &ca]);
    let endpoint = served(&mount.files());
    let worker = dialled(&endpoint, Some(&mount.files()));
    let mut stream = worker
        .decode()
        .generate(ask(8_000))
        .await
        .unwrap()
        .into_inner();
    assert!(stream.next().await.unwrap().is_ok());
    assert_eq!(leaf(&endpoint, &ca, &first).await, der(&first.0).to_vec());

    mount.swap([&second.0, &second.1, &ca]);
    in_time(|| async { leaf(&endpoint, &ca, &first).await == der(&second.0).to_vec() }).await;
    assert!(answers(&dialled(&endpoint, Some(&mount.files()))).await);
    // The stream's start and end are events too.
    assert_eq!(stream.map(Result::unwrap).count().await, 8_001);
}

#[tokio::test]
async fn an_authority_takes_the_place_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (
        Authority::new(dir.path(), "old"),
        Authority::new(dir.path(), "new"),
    );
    let (old_ca, new_ca) = (old.issuer.pem(), new.issuer.pem());
    let both = format!("{old_ca}{new_ca}");
    let (old_pair, new_pair) = (old.sign(NAME), new.sign(NAME));
    let mut server = Mount::new(dir.path(), "server", [&old_pair.0, &old_pair.1, &old_ca]);
    let endpoint = served(&server.files());
    let old_client = Mount::new(dir.path(), "old-client", [&old_pair.0, &old_pair.1, &both]);
    let new_client = Mount::new(dir.path(), "new-client", [&new_pair.0, &new_pair.1, &both]);
    let [old_client, new_client] = [old_client, new_client].map(|mount| mount.files());
    assert!(answers(&dialled(&endpoint, Some(&old_client))).await);
    assert!(!answers(&dialled(&endpoint, Some(&new_client))).await);
    // Both are trusted while one replaces the other.
    server.swap([&old_pair.0, &old_pair.1, &both]);
    in_time(|| async { answers(&dialled(&endpoint, Some(&new_client))).await }).await;
    let kept = dialled(&endpoint, Some(&old_client));
    assert!(answers(&kept).await);
    // The old one is no longer trusted for new connections.
    server.swap([&new_pair.0, &new_pair.1, &new_ca]);
    in_time(|| async { !answers(&dialled(&endpoint, Some(&old_client))).await }).await;
    assert!(answers(&dialled(&endpoint, Some(&new_client))).await);
    assert!(answers(&kept).await, "an open connection goes on");
}

#[tokio::test]
async fn certificates_in_memory_are_replaced_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (
        Authority::new(dir.path(), "old"),
        Authority::new(dir.path(), "new"),
    );
    let (old_ca, new_ca) = (old.issuer.pem(), new.issuer.pem());
    let (first, second) = (old.sign(NAME), new.sign(NAME));
    let operator = old.sign("operator.hearth");
    let names = TlsNames::shared(NAME);
    let server = Tls::from_pem(&first.0, &first.1, &old_ca, &names).unwrap();
    let endpoint = serve_with(server.clone());
    let client = Tls::from_pem(&operator.0, &operator.1, &old_ca, &names).unwrap();
    assert!(answers(&dial_with(&endpoint, Some(client.clone()))).await);
    server.replace(&second.0, &second.1, &new_ca).unwrap();
    assert!(!answers(&dial_with(&endpoint, Some(client.clone()))).await);
    let operator = new.sign("operator.hearth");
    client.replace(&operator.0, &operator.1, &new_ca).unwrap();
    assert!(answers(&dial_with(&endpoint, Some(client))).await);
}

/// Captured log lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn count(&self, words: &str) -> usize {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.matches(words).count()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// On one thread, so that everything logged is captured here.
#[tokio::test(flavor = "current_thread")]
async fn files_that_are_being_written_change_nothing_and_are_complained_of_once() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone());
    let _guard = tracing::subscriber::set_default(subscriber.finish());
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let ca = ours.issuer.pem();
    let files = TlsFiles {
        names: TlsNames::shared(NAME),
        ..ours.issue("server", NAME)
    };
    let first = std::fs::read_to_string(&files.cert).unwrap();
    let client = ours.sign(NAME);
    let endpoint = served(&files);
    let (cert, key) = ours.sign(NAME);
    // Half of the certificate, then all of it with the previous key, then the key.
    std::fs::write(&files.cert, &cert[..cert.len() / 2]).unwrap();
    let began = Instant::now();
    while began.elapsed() < LATEST {
        assert_eq!(leaf(&endpoint, &ca, &client).await, der(&first).to_vec());
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(log.count("keeping the previous"), 1);
    std::fs::write(&files.cert, &cert).unwrap();
    in_time(|| async {
        assert_eq!(leaf(&endpoint, &ca, &client).await, der(&first).to_vec());
        log.count("does not belong to the certificate") == 1
    })
    .await;
    std::fs::write(&files.key, &key).unwrap();
    in_time(|| async { leaf(&endpoint, &ca, &client).await == der(&cert).to_vec() }).await;
    assert_eq!(log.count("keeping the previous"), 2);
}
