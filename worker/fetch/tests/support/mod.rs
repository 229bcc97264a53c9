//! A file server and a hub that misbehave on demand, and archives.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)] // Each test uses a part of it, and may panic.

pub mod hub;
pub mod proxy;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::Response;
use futures::StreamExt;
use http::{HeaderMap, StatusCode, header};

/// Bytes sent at a time.
const PIECE_BYTES: usize = 8 << 10;

/// Misbehaviour of the server in one request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Ends the connection after this many bytes of the body.
    CutAfter(usize),
    /// Sends this many bytes of the body and then nothing, with the connection open.
    StallAfter(usize),
    /// Sends the whole file, whatever range was asked for.
    IgnoreRange,
    /// Combines `IgnoreRange` and `CutAfter`.
    IgnoreRangeAndCutAfter(usize),
    /// Sends no Content-Length.
    Chunked,
    /// Announces a shorter file in Content-Range than it sends.
    TooLong,
    /// Announces this length, and sends as much: less of the file, or zeros after it.
    Claim(usize),
    /// Sends one wrong byte in the middle.
    Spoil,
    /// Answers with this status and these headers.
    Status(u16, Vec<(&'static str, String)>),
}

/// One request as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub range: Option<String>,
    pub if_range: Option<String>,
    pub authorization: Option<String>,
    pub referer: Option<String>,
}

/// A server with one file under every path.
#[derive(Clone)]
pub struct FileServer {
    address: SocketAddr,
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    file: Bytes,
    etag: Option<String>,
    /// Faults of the next requests, one each; after them the server behaves.
    faults: VecDeque<Fault>,
    /// Pause after each piece of every answer.
    pace: Duration,
    seen: Vec<Seen>,
    sent_bytes: usize,
    /// The only `Authorization` that it accepts.
    opened_by: Option<String>,
    /// Whether it cuts every connection.
    is_away: bool,
}

impl FileServer {
    pub async fn start(file: impl Into<Bytes>) -> Self {
        Self::start_at("127.0.0.1", file).await
    }

    /// Starts at this address, on any free port.
    pub async fn start_at(address: &str, file: impl Into<Bytes>) -> Self {
        let shared = Arc::new(Mutex::new(Shared::of(file.into())));
        let router = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&shared));
        let listener = tokio::net::TcpListener::bind((address, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, shared }
    }

    pub fn url(&self) -> String {
        format!("http://{}/models/model.tar", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.shared.lock().unwrap().faults.extend(faults);
    }

    pub fn replace(&self, file: impl Into<Bytes>, etag: Option<&str>) {
        let mut shared = self.shared.lock().unwrap();
        shared.file = file.into();
        shared.etag = etag.map(str::to_owned);
    }

    /// Answers only requests with this `Authorization` from now on.
    pub fn open_by(&self, authorization: &str) {
        self.shared.lock().unwrap().opened_by = Some(authorization.to_owned());
    }

    /// Pauses for this long after each piece.
    pub fn pace(&self, pace: Duration) {
        self.shared.lock().unwrap().pace = pace;
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.lock().unwrap().seen.clone()
    }

    /// Bytes of bodies handed to the connection.
    pub fn sent_bytes(&self) -> usize {
        self.shared.lock().unwrap().sent_bytes
    }
}

impl Seen {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name| {
            let value = headers.get(name)?;
            Some(value.to_str().unwrap().to_owned())
        };
        Self {
            range: text(header::RANGE),
            if_range: text(header::IF_RANGE),
            authorization: text(header::AUTHORIZATION),
            referer: text(header::REFERER),
        }
    }
}

impl Shared {
    fn of(file: Bytes) -> Self {
        Self {
            file,
            etag: Some("\"one\"".to_owned()),
            faults: VecDeque::new(),
            pace: Duration::ZERO,
            seen: Vec::new(),
            sent_bytes: 0,
            opened_by: None,
            is_away: false,
        }
    }

    fn opens_to(&self, seen: &Seen) -> bool {
        self.opened_by.is_none() || self.opened_by == seen.authorization
    }
}

async fn answer(State(shared): State<Arc<Mutex<Shared>>>, headers: HeaderMap) -> Response {
    let seen = Seen::of(&headers);
    let (file, etag, fault, pace) = {
        let mut shared = shared.lock().unwrap();
        shared.seen.push(seen.clone());
        let fault = shared.faults.pop_front();
        (shared.file.clone(), shared.etag.clone(), fault, shared.pace)
    };
    if !shared.lock().unwrap().opens_to(&seen) {
        let response = Response::builder().status(StatusCode::UNAUTHORIZED);
        return response.body(Body::empty()).unwrap();
    }
    respond(&shared, seen, file, etag, fault, pace)
}

/// Answers a request for a file, with a fault.
fn respond(
    shared: &Arc<Mutex<Shared>>,
    seen: Seen,
    file: Bytes,
    etag: Option<String>,
    fault: Option<Fault>,
    pace: Duration,
) -> Response {
    if let Some(Fault::Status(status, headers)) = fault {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(name, value);
        }
        return response.body(Body::empty()).unwrap();
    }
    let total = file.len();
    let is_same = seen.if_range.is_none() || seen.if_range == etag;
    let first = seen
        .range
        .filter(|_| {
            is_same
                && !matches!(
                    fault,
                    Some(Fault::IgnoreRange | Fault::IgnoreRangeAndCutAfter(_))
                )
        })
        .map(|range| {
            let (first, last) = range
                .strip_prefix("bytes=")
                .unwrap()
                .split_once('-')
                .unwrap();
            let end = last.parse().map_or(total, |last: usize| last + 1);
            (first.parse::<usize>().unwrap(), end.min(total))
        });
    let mut response = Response::builder().header(header::ACCEPT_RANGES, "bytes");
    if let Some(etag) = etag {
        response = response.header(header::ETAG, etag);
    }
    let body = match first {
        Some((first, _)) if first >= total => {
            let response = response
                .status(StatusCode::RANGE_NOT_SATISFIABLE)
                .header(header::CONTENT_RANGE, format!("bytes */{total}"));
            return response.body(Body::empty()).unwrap();
        }
        Some((first, end)) => {
            let claimed = match fault {
                Some(Fault::TooLong) => total - 1000,
                _ => total,
            };
            let range = format!("bytes {first}-{}/{claimed}", end.min(claimed) - 1);
            response = response
                .status(StatusCode::PARTIAL_CONTENT)
                .header(header::CONTENT_RANGE, range);
            file.slice(first..end)
        }
        None => file,
    };
    let body = wrong(body, fault.as_ref());
    if !matches!(fault, Some(Fault::Chunked)) {
        response = response.header(header::CONTENT_LENGTH, body.len());
    }
    let shared = Arc::clone(shared);
    response.body(stream(shared, body, fault, pace)).unwrap()
}

/// The body as a server sends it that has another file, or mistakes its length.
fn wrong(body: Bytes, fault: Option<&Fault>) -> Bytes {
    let mut bytes = body.to_vec();
    match fault {
        Some(Fault::Claim(length)) => bytes.resize(*length, 0),
        Some(Fault::Spoil) => {
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 1;
            }
        }
        _ => return body,
    }
    bytes.into()
}

fn stream(shared: Arc<Mutex<Shared>>, body: Bytes, fault: Option<Fault>, pace: Duration) -> Body {
    let (end, then) = match fault {
        Some(Fault::CutAfter(bytes) | Fault::IgnoreRangeAndCutAfter(bytes)) => {
            (bytes.min(body.len()), Some(true))
        }
        Some(Fault::StallAfter(bytes)) => (bytes.min(body.len()), Some(false)),
        _ => (body.len(), None),
    };
    let pieces = futures::stream::unfold(0, move |at| {
        let (shared, body) = (Arc::clone(&shared), body.clone());
        async move {
            if shared.lock().unwrap().is_away {
                return Some((Err(std::io::Error::other("away")), at));
            }
            if at < end {
                tokio::time::sleep(pace).await;
                let next = (at + PIECE_BYTES).min(end);
                shared.lock().unwrap().sent_bytes += next - at;
                return Some((Ok(body.slice(at..next)), next));
            }
            match then {
                None => None,
                Some(true) => {
                    // Lets what was sent before arrive.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    Some((Err(std::io::Error::other("cut")), at))
                }
                Some(false) => std::future::pending().await,
            }
        }
    });
    Body::from_stream(pieces.boxed())
}

/// Returns incompressible bytes.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(next());
    }
    bytes.truncate(len);
    bytes
}

/// Packs files into a tar.
pub fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o600);
        builder.append_data(&mut header, name, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Packs a made-up model with this many bytes of weights into a tar.
pub fn model_tar(weights_bytes: usize) -> Vec<u8> {
    tar_of(&[
        ("config.json", b"{\"model_type\":\"llama\"}"),
        ("model.safetensors", &noise(weights_bytes, 7)),
    ])
}

/// SHA-256 in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    let digest = sha2::Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
