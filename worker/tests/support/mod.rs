//! The program under test, certificates, and the demo model as an archive.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Each test uses a part of it, and may panic.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use hearth_transport::{ClientOptions, Clients, Endpoint, Tls, TlsFiles, TlsNames, Worker};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SubjectPublicKeyInfo,
};
use tempfile::TempDir;

/// The user in Hearth's images.
pub const USER: u32 = 65532;

pub fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_hearth-worker"))
}

/// Returns the demo model as a tar, in a top-level directory.
pub fn demo_tar() -> Vec<u8> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/hearth-demo");
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_dir_all("hearth-demo", model).unwrap();
    builder.into_inner().unwrap()
}

/// Reports what is not tested on this machine, bypassing the test harness, which shows output only of failed tests.
pub fn skipped(why: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Waits for another process to reach a state.
pub async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !is_so().await {
        assert!(Instant::now() < deadline, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// An authority that stores its certificates below a directory.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: TempDir,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        Self {
            issuer,
            directory: TempDir::new().unwrap(),
        }
    }

    /// Issues a certificate for a name and a given public key; returns it as PEM.
    pub fn sign(&self, name: &str, public_key_pem: &str) -> String {
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let key = SubjectPublicKeyInfo::from_pem(public_key_pem).unwrap();
        params.signed_by(&key, &self.issuer).unwrap().pem()
    }

    /// Directory of the files that [`Self::issue`] writes for a name.
    pub fn place(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Creates a directory with `tls.crt`, `tls.key` and `ca.crt` for a name, and a `token`.
    pub fn issue(&self, name: &str) -> PathBuf {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let directory = self.place(name);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join("token"), "a token\n").unwrap();
        for (file, text) in [
            ("tls.crt", certificate.pem()),
            ("tls.key", key.serialize_pem()),
            ("ca.crt", self.issuer.pem()),
        ] {
            std::fs::write(directory.join(file), text).unwrap();
        }
        directory
    }
}

/// Copies the program to where every user may run it: cargo's directory may be in a home that others cannot access.
fn open_program() -> TempDir {
    let directory = TempDir::new().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(directory.path(), mode).unwrap();
    let copy = directory.path().join("hearth-worker");
    std::fs::copy(env!("CARGO_BIN_EXE_hearth-worker"), copy).unwrap();
    directory
}

/// A running `hearth-worker agent`, killed when dropped.
pub struct Agent {
    child: Child,
    _program: Option<TempDir>,
    pub endpoint: Endpoint,
    pub health: String,
}

/// Options for starting an agent.
pub struct AgentOptions<'a> {
    pub tls: &'a Path,
    pub cache: &'a Path,
    /// User to run as, if not the test's.
    pub user: Option<u32>,
    /// Seconds until failures of this machine's own servers, which count as private, are reported.
    pub private_patience_s: u32,
    /// Variables of its environment.
    pub environment: &'a [(&'a str, String)],
}

impl Agent {
    /// Starts the agent and waits until it serves.
    pub fn start(options: &AgentOptions<'_>) -> Self {
        let health = free_address();
        let (mut command, copy) = match options.user {
            None => (program(), None),
            Some(_) => {
                let copy = open_program();
                (Command::new(copy.path().join("hearth-worker")), Some(copy))
            }
        };
        command
            .args(["agent", "--node", "node-1", "--listen", "127.0.0.1:0"])
            .args(["--health", &health])
            // The tests' servers are on this machine, whose disk may be almost full.
            .args(["--allow-range", "127.0.0.1/32", "--disk-reserve", "0"])
            .arg("--tls-dir")
            .arg(options.tls)
            .env("HEARTH_IDENTITY_TOKEN", options.tls.join("token"))
            .arg("--cache-dir")
            .arg(options.cache)
            // Models that are no longer named are removed at once.
            .args(["--keep-models", "0"])
            // This machine's own servers count as private, and their failures are reported late.
            .args([
                "--private-patience",
                &options.private_patience_s.to_string(),
            ])
            .env("TMPDIR", "/nonexistent")
            .env("HOME", "/nonexistent")
            .envs(
                options
                    .environment
                    .iter()
                    .map(|(name, value)| (name, value)),
            )
            .current_dir("/")
            .stdout(Stdio::piped());
        if let Some(user) = options.user {
            command.uid(user).gid(user);
        }
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let ready: serde_json::Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{error} in {line:?}: the agent did not start"));
        assert_eq!(ready["event"], "ready");
        Self {
            child,
            _program: copy,
            endpoint: ready["endpoint"].as_str().unwrap().parse().unwrap(),
            health,
        }
    }

    /// Opens a separate connection with the given certificates.
    pub fn called_by(&self, certificates: Option<&Path>) -> Worker {
        self.called_as("agent.hearth", certificates)
    }

    /// The same, to an agent that must present this name.
    pub fn called_as(&self, name: &str, certificates: Option<&Path>) -> Worker {
        let tls = certificates.map(|directory| {
            let files = TlsFiles {
                cert: directory.join("tls.crt"),
                key: directory.join("tls.key"),
                ca: directory.join("ca.crt"),
                names: TlsNames {
                    server: Some(name.to_owned()),
                    clients: Vec::new(),
                },
            };
            Tls::read(&files).unwrap()
        });
        let options = ClientOptions {
            tls,
            ..ClientOptions::default()
        };
        Clients::new(options).worker(&self.endpoint).unwrap()
    }

    /// Returns a number from `/proc/PID/status`, in KiB.
    pub fn kib(&self, name: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(path).unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap()
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .unwrap()
    }

    /// Kills it with `kill -9`.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Terminates it like a kubelet does; returns its exit code and the time that it took.
    pub fn terminate(&mut self) -> (Option<i32>, Duration) {
        let began = Instant::now();
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        (status.code(), began.elapsed())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns an address in use by no one else: its host within 127.0.0.0/8 is unique to this process.
pub fn free_address() -> String {
    static NEXT: AtomicU16 = AtomicU16::new(10_000);
    // Linux numbers processes with at most 22 bits.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{middle}.{low}:{port}", 64 | high)
}
