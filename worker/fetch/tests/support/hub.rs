//! A hub with one repository: it lists the files of each commit, hands out small ones itself, and redirects to another
//! server for large ones, as the public hub does.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::Response;
use http::{HeaderMap, Method, StatusCode, Uri, header};
use serde_json::json;

use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::{Fault, Seen, Shared, respond, sha256};

/// Where small files lie, and on the other server large ones, while it redirects as with Xet.
const RESOLVED: &str = "/api/resolve-cache/models";
const BRIDGE: &str = "/xet-bridge";
/// Smallest file that git only names, in bytes.
const LARGE_BYTES: usize = 10_000;

/// One request to the hub or to the server of its large files.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Whether it was to the server of large files.
    pub is_large: bool,
    /// Whether it was for the head alone.
    pub is_head: bool,
    pub path: String,
    pub headers: Seen,
}

/// A hub with a repository.
#[derive(Clone)]
pub struct HubServer {
    address: SocketAddr,
    state: Arc<Hub>,
    /// What listens at its two addresses; nothing while it is away.
    servers: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

struct Hub {
    repo: String,
    /// Address of the server of large files.
    large: SocketAddr,
    inner: Mutex<Inner>,
    /// Counters and pace of all bodies.
    shared: Arc<Mutex<Shared>>,
}

impl Hub {
    /// Notes a request.
    fn note(&self, is_large: bool, is_head: bool, path: &str, headers: &Seen) {
        self.inner.lock().unwrap().asked.push(Asked {
            is_large,
            is_head,
            path: path.to_owned(),
            headers: headers.clone(),
        });
    }
}

#[derive(Default)]
struct Inner {
    /// Files by commit.
    commits: BTreeMap<String, BTreeMap<String, Bytes>>,
    /// The commit that `main` is.
    main: String,
    /// Answers of the next requests for a list, and for files wherever they are.
    list_faults: VecDeque<Fault>,
    file_faults: VecDeque<Fault>,
    /// Answers of the next requests for the head of a file alone.
    head_faults: VecDeque<Fault>,
    asked: Vec<Asked>,
    /// The only `Authorization` that it accepts.
    opened_by: Option<String>,
    /// Whether everybody may read the list all the same.
    lists_to_all: bool,
    /// Replaces the list.
    list: Option<String>,
    /// Lets files be asked for by their own name, without a checksum in the address.
    etag: Option<String>,
    /// Whether it redirects for every file, as the public hub does where files are stored with Xet.
    has_xet: bool,
}

impl HubServer {
    /// Starts a hub with this repository (`owner/name`), of which `files` are the first commit.
    pub async fn start(repo: &str, files: &[(&str, &[u8])]) -> Self {
        Self::start_at("127.0.0.1", repo, files).await
    }

    /// Starts at this address, on any free ports.
    pub async fn start_at(address: &str, repo: &str, files: &[(&str, &[u8])]) -> Self {
        let listen = async || TcpListener::bind((address, 0)).await.unwrap();
        let (own, large) = (listen().await, listen().await);
        let state = Arc::new(Hub {
            repo: repo.to_owned(),
            large: large.local_addr().unwrap(),
            inner: Mutex::default(),
            shared: Arc::new(Mutex::new(Shared::of(Bytes::new()))),
        });
        let hub = Self {
            address: own.local_addr().unwrap(),
            state,
            servers: Arc::default(),
        };
        hub.push(files);
        hub.serve(own, large);
        hub
    }

    fn serve(&self, own: TcpListener, large: TcpListener) {
        let state = || Arc::clone(&self.state);
        let small = Router::new().fallback(answer).with_state(state());
        let blobs = Router::new().fallback(answer_large).with_state(state());
        let servers = [(own, small), (large, blobs)].map(|(listener, router)| {
            tokio::spawn(async move { axum::serve(listener, router).await.unwrap() })
        });
        self.servers.lock().unwrap().extend(servers);
    }

    /// Cuts all connections, and accepts no others until it comes back.
    pub fn go_away(&self) {
        self.state.shared.lock().unwrap().is_away = true;
        for server in self.servers.lock().unwrap().drain(..) {
            server.abort();
        }
    }

    /// Is there again, at the same addresses.
    pub async fn come_back(&self) {
        let listen = async |address| TcpListener::bind(address).await.unwrap();
        let (own, large) = (listen(self.address).await, listen(self.state.large).await);
        self.state.shared.lock().unwrap().is_away = false;
        self.serve(own, large);
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Makes these files the newest commit of `main`; returns its name.
    pub fn push(&self, files: &[(&str, &[u8])]) -> String {
        let files: BTreeMap<String, Bytes> = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), Bytes::copy_from_slice(bytes)))
            .collect();
        let names: Vec<String> = files
            .iter()
            .map(|(name, bytes)| format!("{name} {}", sha256(bytes)))
            .collect();
        let commit = sha256(names.join("\n").as_bytes())[..40].to_owned();
        let mut inner = self.state.inner.lock().unwrap();
        inner.commits.insert(commit.clone(), files);
        inner.main.clone_from(&commit);
        commit
    }

    /// Replaces the bytes of a file of the newest commit, whose list stays what it was.
    pub fn swap(&self, name: &str, bytes: &[u8]) {
        let mut inner = self.state.inner.lock().unwrap();
        if inner.list.is_none() {
            let list = listing(&self.state.repo, &inner, &inner.main).to_string();
            inner.list = Some(list);
        }
        let main = inner.main.clone();
        let files = inner.commits.get_mut(&main).unwrap();
        files.insert(name.to_owned(), Bytes::copy_from_slice(bytes));
        inner.etag = Some("\"swapped\"".to_owned());
    }

    /// Answers with this list from now on.
    pub fn list(&self, text: &str) {
        self.state.inner.lock().unwrap().list = Some(text.to_owned());
    }

    /// The list of the newest commit.
    pub fn listing(&self) -> serde_json::Value {
        let inner = self.state.inner.lock().unwrap();
        listing(&self.state.repo, &inner, &inner.main)
    }

    pub fn list_faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state.inner.lock().unwrap().list_faults.extend(faults);
    }

    pub fn file_faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state.inner.lock().unwrap().file_faults.extend(faults);
    }

    pub fn head_faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.state.inner.lock().unwrap().head_faults.extend(faults);
    }

    /// Answers only requests with this `Authorization` from now on. The server of large files needs none.
    pub fn open_by(&self, authorization: &str) {
        self.state.inner.lock().unwrap().opened_by = Some(authorization.to_owned());
    }

    /// The same, and shows its list to everybody, as the public hub does of a gated repository.
    pub fn gate_by(&self, authorization: &str) {
        self.open_by(authorization);
        self.state.inner.lock().unwrap().lists_to_all = true;
    }

    /// Redirects for every file from now on: for small ones with a path of its own, for large ones to another host, which does so
    /// once more. Answers offer Xet's own protocol, as those of the public hub.
    pub fn store_with_xet(&self) {
        self.state.inner.lock().unwrap().has_xet = true;
    }

    /// Pauses for this long after each piece.
    pub fn pace(&self, pace: Duration) {
        self.state.shared.lock().unwrap().pace = pace;
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.state.inner.lock().unwrap().asked.clone()
    }

    /// Bytes of files handed to connections.
    pub fn sent_bytes(&self) -> usize {
        self.state.shared.lock().unwrap().sent_bytes
    }
}

fn listing(repo: &str, inner: &Inner, commit: &str) -> serde_json::Value {
    let siblings: Vec<_> = inner.commits[commit]
        .iter()
        .map(|(name, bytes)| {
            let mut sibling = json!({
                "rfilename": name, "size": bytes.len(), "blobId": git_blob(bytes),
            });
            if bytes.len() >= LARGE_BYTES {
                sibling["lfs"] =
                    json!({"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134});
            }
            sibling
        })
        .collect();
    json!({"id": repo, "private": false, "sha": commit, "siblings": siblings})
}

fn refusal(status: StatusCode, code: &'static str) -> Response {
    let response = Response::builder().status(status);
    let response = response.header("x-error-code", code);
    response.body(Body::empty()).unwrap()
}

/// The file has another path.
fn moved(to: &str) -> Response {
    let response = Response::builder().status(StatusCode::TEMPORARY_REDIRECT);
    let response = response.header(header::LOCATION, to);
    response.body(Body::empty()).unwrap()
}

/// Where a large file is: on another host.
fn stored_elsewhere(
    hub: &Hub,
    (commit, name): (&str, &str),
    digits: &str,
    has_xet: bool,
) -> Response {
    let host = match has_xet {
        true => format!("localhost:{}", hub.large.port()),
        false => hub.large.to_string(),
    };
    let to = format!("http://{host}/{commit}/{name}?signature=secret");
    let response = Response::builder().status(StatusCode::FOUND);
    let response = response.header(header::LOCATION, to);
    let mut response = response.header("x-linked-etag", format!("\"{digits}\""));
    if has_xet {
        let token = format!("/api/models/{}/xet-read-token/{commit}", hub.repo);
        response = response.header("x-xet-hash", digits);
        response = response.header("x-xet-refresh-route", &token);
        response = response.header(header::LINK, format!("<{token}>; rel=\"xet-auth\""));
    }
    response.body(Body::empty()).unwrap()
}

/// The list of files that is asked for, or why there is none.
fn list(hub: &Hub, uri: &Uri) -> Result<String, &'static str> {
    let inner = hub.inner.lock().unwrap();
    let before = format!("/api/models/{}/revision/", hub.repo);
    let revision = uri.path().strip_prefix(&before).ok_or("RepoNotFound")?;
    let commit = match revision {
        "main" => &inner.main,
        other => other,
    };
    if !inner.commits.contains_key(commit) {
        return Err("RevisionNotFound");
    }
    assert_eq!(uri.query(), Some("blobs=true"));
    let list = listing(&hub.repo, &inner, commit).to_string();
    Ok(inner.list.clone().unwrap_or(list))
}

async fn answer(
    State(hub): State<Arc<Hub>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let is_head = method == Method::HEAD;
    let seen = Seen::of(&headers);
    let path = uri.path().to_owned();
    let is_list = path.starts_with("/api/models/");
    hub.note(false, is_head, &path, &seen);
    let (fault, is_open) = {
        let mut inner = hub.inner.lock().unwrap();
        let fault = match is_list {
            true => inner.list_faults.pop_front(),
            false => None,
        };
        let is_open = inner.opened_by.is_none()
            || inner.opened_by == seen.authorization
            || (is_list && inner.lists_to_all);
        (fault, is_open)
    };
    if !is_open {
        return refusal(StatusCode::UNAUTHORIZED, "GatedRepo");
    }
    if is_list {
        return match list(&hub, &uri) {
            Ok(list) => respond(&hub.shared, seen, list.into(), None, fault, Duration::ZERO),
            Err(code) => refusal(StatusCode::NOT_FOUND, code),
        };
    }
    let (of_hub, resolved) = (
        format!("/{}/resolve/", hub.repo),
        format!("{RESOLVED}/{}/", hub.repo),
    );
    let rest = path.strip_prefix(&of_hub);
    let Some((commit, name)) = rest
        .or(path.strip_prefix(&resolved))
        .and_then(|rest| rest.split_once('/'))
    else {
        return refusal(StatusCode::NOT_FOUND, "RepoNotFound");
    };
    let (large, has_xet) = {
        let inner = hub.inner.lock().unwrap();
        let files = inner.commits.get(commit);
        let Some(bytes) = files.and_then(|files| files.get(name)) else {
            return refusal(StatusCode::NOT_FOUND, "EntryNotFound");
        };
        let large = (bytes.len() >= LARGE_BYTES).then(|| sha256(bytes));
        (large, inner.has_xet)
    };
    if let Some(digits) = &large {
        return stored_elsewhere(&hub, (commit, name), digits, has_xet);
    }
    if has_xet && rest.is_some() {
        return moved(&format!("{resolved}{commit}/{name}?etag=secret"));
    }
    match is_head {
        true => head(&hub, commit, name),
        false => file(&hub, seen, commit, name),
    }
}

async fn answer_large(
    State(hub): State<Arc<Hub>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    let is_head = method == Method::HEAD;
    let seen = Seen::of(&headers);
    let path = uri.path().to_owned();
    hub.note(true, is_head, &path, &seen);
    let bridged = path.strip_prefix(BRIDGE);
    if bridged.is_none() && hub.inner.lock().unwrap().has_xet {
        return moved(&format!("{BRIDGE}{path}?signature=secret"));
    }
    let path = bridged.unwrap_or(&path);
    let (commit, name) = path[1..].split_once('/').unwrap();
    match is_head {
        true => head(&hub, commit, name),
        false => file(&hub, seen, commit, name),
    }
}

/// Answers a request for the head of a file.
fn head(hub: &Hub, commit: &str, name: &str) -> Response {
    let mut inner = hub.inner.lock().unwrap();
    let length = inner.commits[commit][name].len();
    let response = Response::builder();
    let response = match inner.head_faults.pop_front() {
        Some(Fault::Status(status, _)) => response.status(status),
        Some(Fault::Claim(length)) => response.header(header::CONTENT_LENGTH, length),
        Some(_) => response,
        None => response.header(header::CONTENT_LENGTH, length),
    };
    response.body(Body::empty()).unwrap()
}

fn file(hub: &Hub, seen: Seen, commit: &str, name: &str) -> Response {
    let (bytes, etag, fault) = {
        let mut inner = hub.inner.lock().unwrap();
        let bytes = inner.commits[commit][name].clone();
        let etag = inner.etag.clone();
        let etag = etag.unwrap_or_else(|| format!("\"{}\"", &sha256(&bytes)[..8]));
        (bytes, etag, inner.file_faults.pop_front())
    };
    let pace = hub.shared.lock().unwrap().pace;
    respond(&hub.shared, seen, bytes, Some(etag), fault, pace)
}

/// Git's name of a file.
pub fn git_blob(bytes: &[u8]) -> String {
    use sha1::Digest;
    let mut digest = sha1::Sha1::new();
    digest.update(format!("blob {}\0", bytes.len()));
    digest.update(bytes);
    let digest = digest.finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
