//! Mutual TLS: both ends present a certificate from the same authority, and each may require the other's name.
//!
//! Certificates change while a process runs. Files are checked for changes as connections are made, and each new
//! connection uses the latest certificates; open connections keep the ones they were made with.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{
        CertificateDer, DnsName, IpAddr, PrivateKeyDer, ServerName,
        pem::{self, PemObject},
    },
    server::{NoServerSessionStorage, WebPkiClientVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};

use crate::identity::NamedClients;

/// Time between two checks of the files.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Protocol of both ends: HTTP/2 only.
const PROTOCOL: &[u8] = b"h2";

/// Name in the operator's certificate: a server with a name of its own accepts clients with that name, and the
/// operator.
pub const OPERATOR_NAME: &str = "operator.hearth";

/// Paths of a process's certificates, and the names that it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM: this process's certificate, followed by intermediate ones.
    pub cert: PathBuf,
    /// PEM: the private key of that certificate.
    pub key: PathBuf,
    /// PEM: the authorities that signed the certificates of both ends; several while one replaces another.
    pub ca: PathBuf,
    /// Names required of the other end.
    pub names: TlsNames,
}

/// Names required in the other end's certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsNames {
    /// DNS name of a server, whatever address is dialled; `None` requires the dialled host.
    pub server: Option<String>,
    /// DNS names of which a client must carry one; if empty, any certificate from the authority is accepted.
    pub clients: Vec<String>,
}

impl TlsNames {
    /// Names for a process among others that all carry `name`; the operator may call it too.
    pub fn shared(name: &str) -> Self {
        Self {
            server: Some(name.to_owned()),
            clients: vec![name.to_owned(), OPERATOR_NAME.to_owned()],
        }
    }

    /// Names for a server that only the operator may call.
    pub fn for_operator() -> Self {
        Self {
            server: None,
            clients: vec![OPERATOR_NAME.to_owned()],
        }
    }
}

/// Reason certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("cannot read the TLS {what} {path}: {reason}")]
    Read {
        /// `certificate`, `key` or `authority`.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The system's error.
        reason: io::Error,
    },
    /// The file does not hold what it should.
    #[error("the TLS {what} {path} is not usable: {detail}")]
    Content {
        /// `certificate`, `key` or `authority`.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// The problem.
        detail: String,
    },
    /// Key and certificate do not belong together.
    #[error("the TLS key {key} does not belong to the certificate {cert}: {detail}")]
    Pair {
        /// Path of the certificate.
        cert: PathBuf,
        /// Path of the key.
        key: PathBuf,
        /// The library's error.
        detail: String,
    },
    /// A name that no certificate can carry.
    #[error("the TLS name {name:?} is not a DNS name\n  write one as in my-model.default.hearth")]
    Name {
        /// The name.
        name: String,
    },
}

/// Checks that `cert`, a PEM file with a certificate and intermediate ones, and `key`, a PEM file with a private key,
/// can be read and belong together.
///
/// # Errors
/// [`TlsError`] naming the file.
pub fn check_pair(cert: &Path, key: &Path) -> Result<(), TlsError> {
    let source = Source {
        cert: cert.to_owned(),
        key: key.to_owned(),
        ca: PathBuf::new(),
        is_files: true,
    };
    let pem = Pem {
        cert: read("certificate", cert)?,
        key: read("key", key)?,
        ca: Vec::new(),
    };
    identity(&source, &pem, &aws_lc_rs::default_provider()).map(drop)
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|reason| TlsError::Read {
        what,
        path: path.to_owned(),
        reason,
    })
}

/// Validated certificates of this process. Clones share them and see their changes.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
    /// Name that servers must carry.
    server_name: Option<ServerName<'static>>,
}

struct Shared {
    client_names: Vec<ServerName<'static>>,
    source: Source,
    state: Mutex<State>,
}

/// Paths of the certificates; for certificates in memory, placeholder names.
struct Source {
    cert: PathBuf,
    key: PathBuf,
    ca: PathBuf,
    is_files: bool,
}

struct State {
    pem: Pem,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    looked: Instant,
    /// Error of the last check, if it failed, so that it is logged only once.
    complaint: Option<String>,
}

/// PEM data of the certificates in use.
#[derive(PartialEq, Eq)]
struct Pem {
    cert: Vec<u8>,
    key: Vec<u8>,
    ca: Vec<u8>,
}

impl Tls {
    /// Reads and checks the files: each holds what it should, and the key belongs to the certificate. They are read
    /// again as connections are made, at most every two seconds. If files have become unusable, or are being
    /// written, the previous certificates stay in use.
    ///
    /// # Errors
    /// [`TlsError`] naming the file.
    pub fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let source = Source {
            cert: files.cert.clone(),
            key: files.key.clone(),
            ca: files.ca.clone(),
            is_files: true,
        };
        let pem = source.read()?;
        Self::with(source, pem, &files.names)
    }

    /// Reads PEM data: a certificate (followed by intermediate ones), its key, and the authorities.
    ///
    /// # Errors
    /// [`TlsError`] naming the unusable one.
    pub fn from_pem(cert: &str, key: &str, ca: &str, names: &TlsNames) -> Result<Self, TlsError> {
        Self::with(Source::in_memory(), Pem::of(cert, key, ca), names)
    }

    /// Uses other PEM data for new connections from now on; for certificates from [`Tls::from_pem`] that expire.
    /// Certificates from [`Tls::read`] follow their files and are not replaced.
    ///
    /// # Errors
    /// [`TlsError`] naming the unusable one; the previous certificates stay in use.
    pub fn replace(&self, cert: &str, key: &str, ca: &str) -> Result<(), TlsError> {
        let mut state = self.lock();
        let pem = Pem::of(cert, key, ca);
        if !self.shared.source.is_files && pem != state.pem {
            let (server, client) = self.shared.configs(&pem)?;
            state.pem = pem;
            (state.server, state.client) = (server, client);
        }
        Ok(())
    }

    /// Presents another certificate from the authorities, with its key, in new connections from now on; for a process
    /// with certificates from [`Tls::read`] that is given a name of its own. If the files change, they apply again.
    ///
    /// # Errors
    /// [`TlsError`] naming the unusable one; the previous certificate stays in use.
    pub fn adopt(&self, cert: &str, key: &str) -> Result<(), TlsError> {
        let mut state = self.newest();
        let source = Source::in_memory();
        let pem = Pem {
            ca: state.pem.ca.clone(),
            ..Pem::of(cert, key, "")
        };
        (state.server, state.client) = configs(&source, &pem, &self.shared.client_names)?;
        Ok(())
    }

    /// Returns these certificates for connections to servers that carry `name`.
    ///
    /// # Errors
    /// [`TlsError::Name`].
    pub fn expecting(&self, name: &str) -> Result<Self, TlsError> {
        Ok(Self {
            shared: Arc::clone(&self.shared),
            server_name: Some(dns_name(name)?),
        })
    }

    /// Returns another certificate from the same authorities, with its key, for connections apart from this process's
    /// usual ones, with names of their own.
    ///
    /// # Errors
    /// [`TlsError`] naming the unusable one.
    pub fn beside(&self, cert: &str, key: &str, names: &TlsNames) -> Result<Self, TlsError> {
        let pem = Pem {
            ca: self.newest().pem.ca.clone(),
            ..Pem::of(cert, key, "")
        };
        Self::with(Source::in_memory(), pem, names)
    }

    fn with(source: Source, pem: Pem, names: &TlsNames) -> Result<Self, TlsError> {
        let TlsNames { server, clients } = names;
        let server_name = server.as_deref().map(dns_name).transpose()?;
        let client_names = clients
            .iter()
            .map(|name| dns_name(name))
            .collect::<Result<Vec<_>, _>>()?;
        let (server, client) = configs(&source, &pem, &client_names)?;
        Ok(Self {
            server_name,
            shared: Arc::new(Shared {
                client_names,
                source,
                state: Mutex::new(State {
                    pem,
                    server,
                    client,
                    looked: Instant::now(),
                    complaint: None,
                }),
            }),
        })
    }

    /// Acceptor for a server's next connection: callers without a certificate from the authority, or with none of the
    /// names, are rejected.
    pub(crate) fn acceptor(&self) -> tokio_rustls::TlsAcceptor {
        self.newest().server.clone().into()
    }

    /// Connector for a client's next connection.
    pub(crate) fn connector(&self) -> tokio_rustls::TlsConnector {
        self.newest().client.clone().into()
    }

    /// Returns the name that a server at `host` must carry.
    pub(crate) fn server_name(&self, host: &str) -> io::Result<ServerName<'static>> {
        match &self.server_name {
            Some(name) => Ok(name.clone()),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the certificates, after checking the files if the last check was a while ago.
    fn newest(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        if self.shared.source.is_files && state.looked.elapsed() >= LOOK_EVERY {
            state.looked = Instant::now();
            match self.shared.look(&mut state) {
                Ok(()) => state.complaint = None,
                Err(error) => {
                    let complaint = Some(error.to_string());
                    if state.complaint != complaint {
                        tracing::warn!(%error, "keeping the previous TLS certificates");
                        state.complaint = complaint;
                    }
                }
            }
        }
        state
    }
}

impl Shared {
    fn look(&self, state: &mut State) -> Result<(), TlsError> {
        let pem = self.source.read()?;
        if pem == state.pem {
            return Ok(());
        }
        (state.server, state.client) = self.configs(&pem)?;
        state.pem = pem;
        tracing::info!(certificate = %self.source.cert.display(), "TLS certificates reloaded");
        Ok(())
    }

    fn configs(&self, pem: &Pem) -> Result<(Arc<ServerConfig>, Arc<ClientConfig>), TlsError> {
        configs(&self.source, pem, &self.client_names)
    }
}

impl Source {
    fn in_memory() -> Self {
        let place = || PathBuf::from("in memory");
        Self {
            cert: place(),
            key: place(),
            ca: place(),
            is_files: false,
        }
    }

    fn read(&self) -> Result<Pem, TlsError> {
        Ok(Pem {
            cert: read("certificate", &self.cert)?,
            key: read("key", &self.key)?,
            ca: read("authority", &self.ca)?,
        })
    }
}

impl Pem {
    fn of(cert: &str, key: &str, ca: &str) -> Self {
        let [cert, key, ca] = [cert, key, ca].map(|text| text.as_bytes().to_vec());
        Self { cert, key, ca }
    }
}

fn configs(
    source: &Source,
    pem: &Pem,
    client_names: &[ServerName<'static>],
) -> Result<(Arc<ServerConfig>, Arc<ClientConfig>), TlsError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let identity = identity(source, pem, &provider)?;
    let bad_authority = |error: &dyn std::fmt::Display| content("authority", &source.ca, error);
    let mut roots = RootCertStore::empty();
    for authority in certificates("authority", &source.ca, &pem.ca)? {
        roots
            .add(authority)
            .map_err(|error| bad_authority(&error))?;
    }
    let roots = Arc::new(roots);
    let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .map_err(|error| bad_authority(&error))?;
    let clients = NamedClients::over(clients, client_names.to_vec());

    let unusable = |error| content("certificate", &source.cert, &error);
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_client_cert_verifier(clients)
        .with_cert_resolver(identity.clone());
    server.alpn_protocols = vec![PROTOCOL.to_vec()];
    // A resumed session would not present its certificate again. Connections are long-lived, so handshakes are rare.
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;

    let mut client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_root_certificates(roots)
        .with_client_cert_resolver(identity);
    client.alpn_protocols = vec![PROTOCOL.to_vec()];
    client.resumption = Resumption::disabled();
    Ok((Arc::new(server), Arc::new(client)))
}

/// Returns the certificate and its matching key.
fn identity(
    source: &Source,
    pem: &Pem,
    provider: &CryptoProvider,
) -> Result<Arc<SingleCertAndKey>, TlsError> {
    let chain = certificates("certificate", &source.cert, &pem.cert)?;
    let key = PrivateKeyDer::from_pem_slice(&pem.key).map_err(|error| {
        let detail = format!("it holds no PEM private key ({error})");
        content("key", &source.key, &detail)
    })?;
    let pair = CertifiedKey::from_der(chain, key, provider).map_err(|error| TlsError::Pair {
        cert: source.cert.clone(),
        key: source.key.clone(),
        detail: error.to_string(),
    })?;
    Ok(Arc::new(pair.into()))
}

/// Parses the certificates in a file's bytes; there must be at least one.
fn certificates(
    what: &'static str,
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let parsed: Result<Vec<_>, pem::Error> = CertificateDer::pem_slice_iter(pem).collect();
    let parsed = parsed.map_err(|error| content(what, path, &error))?;
    if parsed.is_empty() {
        return Err(content(what, path, &"it holds no PEM certificate"));
    }
    Ok(parsed)
}

fn content(what: &'static str, path: &Path, detail: &dyn std::fmt::Display) -> TlsError {
    TlsError::Content {
        what,
        path: path.to_owned(),
        detail: detail.to_string(),
    }
}

fn dns_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    let wrong = |_| TlsError::Name {
        name: name.to_owned(),
    };
    // An address looks like a name but is not one.
    if IpAddr::try_from(name).is_ok() {
        return Err(TlsError::Name {
            name: name.to_owned(),
        });
    }
    let parsed = DnsName::try_from(name.to_owned()).map_err(wrong)?;
    Ok(ServerName::DnsName(parsed))
}
