//! Mutual TLS: both ends show a certificate of the same authority, and each may ask for the other's name.
//!
//! Certificates change while a process runs. Those of files are looked at again as connections are made, and each new
//! connection uses the newest ones; open connections go on with what they were made with.

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

/// Time between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Protocol of both ends: HTTP/2 and nothing else.
const PROTOCOL: &[u8] = b"h2";

/// Name in the operator's certificate: with a name of its own a server lets in its like, and the operator.
pub const OPERATOR_NAME: &str = "operator.hearth";

/// Where the certificates of a process lie, and whose it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// PEM: this process's certificate, then intermediate ones.
    pub cert: PathBuf,
    /// PEM: the private key of that certificate.
    pub key: PathBuf,
    /// PEM: the authorities that signed the certificates of both ends; several while one takes another's place.
    pub ca: PathBuf,
    /// Names that the other end must carry.
    pub names: TlsNames,
}

/// Names that the other end's certificate must carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsNames {
    /// DNS name of a server, whatever address is dialled; `None`: the host that is dialled.
    pub server: Option<String>,
    /// DNS names of which a client must carry one; empty: any certificate of the authority will do.
    pub clients: Vec<String>,
}

impl TlsNames {
    /// Names of a process among others that all carry `name`; the operator may call it too.
    pub fn shared(name: &str) -> Self {
        Self {
            server: Some(name.to_owned()),
            clients: vec![name.to_owned(), OPERATOR_NAME.to_owned()],
        }
    }

    /// Names of a server that the operator alone may call.
    pub fn for_operator() -> Self {
        Self {
            server: None,
            clients: vec![OPERATOR_NAME.to_owned()],
        }
    }
}

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The file cannot be read.
    #[error("cannot read the TLS {what} {path}: {reason}")]
    Read {
        /// `certificate`, `key` or `authority`.
        what: &'static str,
        /// File.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// The file holds something else.
    #[error("the TLS {what} {path} is not usable: {detail}")]
    Content {
        /// `certificate`, `key` or `authority`.
        what: &'static str,
        /// File.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// Key and certificate are of different pairs.
    #[error("the TLS key {key} does not belong to the certificate {cert}: {detail}")]
    Pair {
        /// File.
        cert: PathBuf,
        /// File.
        key: PathBuf,
        /// The library's reason.
        detail: String,
    },
    /// A name that no certificate can carry.
    #[error("the TLS name {name:?} is not a DNS name\n  write one as in my-model.default.hearth")]
    Name {
        /// The name.
        name: String,
    },
}

/// Checks that `cert`, a PEM file with a certificate and intermediate ones, and `key`, one with a private key, can be
/// read and belong together.
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

/// Checked certificates of this process. Clones share them, and their changes.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
    /// That servers must carry.
    server_name: Option<ServerName<'static>>,
}

struct Shared {
    client_names: Vec<ServerName<'static>>,
    source: Source,
    state: Mutex<State>,
}

/// Where the certificates come from; for memory, words that stand for the paths.
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
    /// Why the last look changed nothing, if it failed: said once.
    complaint: Option<String>,
}

/// What the certificates in use were made of.
#[derive(PartialEq, Eq)]
struct Pem {
    cert: Vec<u8>,
    key: Vec<u8>,
    ca: Vec<u8>,
}

impl Tls {
    /// Reads and checks the files: each holds what it should, and the key belongs to the certificate. They are read
    /// again as connections are made, at most every two seconds. Files that have become unusable, or are being
    /// written, leave the certificates as they were.
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

    /// Reads PEM that the caller holds: its certificate (then intermediate ones), the key of that, and the authorities.
    ///
    /// # Errors
    /// [`TlsError`] saying which of them is unusable.
    pub fn from_pem(cert: &str, key: &str, ca: &str, names: &TlsNames) -> Result<Self, TlsError> {
        Self::with(Source::in_memory(), Pem::of(cert, key, ca), names)
    }

    /// Uses other PEM for new connections from now on; [`Tls::from_pem`]'s counterpart for certificates that expire.
    /// Those of [`Tls::read`] follow their files, and take no others.
    ///
    /// # Errors
    /// [`TlsError`] saying which of them is unusable; those of before stay in use.
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

    /// Shows another certificate of the authorities, with its key, in new connections from now on; [`Tls::read`]'s
    /// counterpart for a process that is given a name of its own. When the files change, they count again.
    ///
    /// # Errors
    /// [`TlsError`] saying which of them is unusable; that of before stays in use.
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

    /// These certificates, for connections to servers that carry `name`.
    ///
    /// # Errors
    /// [`TlsError::Name`].
    pub fn expecting(&self, name: &str) -> Result<Self, TlsError> {
        Ok(Self {
            shared: Arc::clone(&self.shared),
            server_name: Some(dns_name(name)?),
        })
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

    /// Acceptor of a server's next connection: callers without a certificate of the authority, or of none of the names, are
    /// refused.
    pub(crate) fn acceptor(&self) -> tokio_rustls::TlsAcceptor {
        self.newest().server.clone().into()
    }

    /// Connector of a client's next connection.
    pub(crate) fn connector(&self) -> tokio_rustls::TlsConnector {
        self.newest().client.clone().into()
    }

    /// The name that a server at `host` must carry.
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

    /// The certificates, after a look at the files when the last one was a while ago.
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
    // A resumed session would not show its certificate again. Connections last; handshakes are few.
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

/// Certificate and key, which belong together.
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

/// The certificates in a file's bytes, one at least.
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
    // An address is written like a name and is none.
    if IpAddr::try_from(name).is_ok() {
        return Err(TlsError::Name {
            name: name.to_owned(),
        });
    }
    let parsed = DnsName::try_from(name.to_owned()).map_err(wrong)?;
    Ok(ServerName::DnsName(parsed))
}
