//! A proxy between an operator and the API server that injects the faults a test asks for.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use kube::Client;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Largest body that is forwarded.
const BODY_BYTES: usize = 16 << 20;

/// The write at which the operator is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kill {
    /// Number of the write, counting from 1 since this was requested.
    pub write: u64,
    /// Side of the write: before it reaches the API server, or after it is done but before the operator is told.
    pub side: Side,
}

/// See [`Kill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The write is lost.
    Before,
    /// Its answer is lost.
    After,
}

/// Faults to inject for a while.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Percentage of requests answered with each status.
    pub refused_percent: BTreeMap<u16, u32>,
    /// Whether reads are refused too.
    pub refuse_reads: bool,
    /// Lifetime of watches.
    pub watch_life: Option<Duration>,
    /// Delay of watch events.
    pub watch_delay: Option<Duration>,
    /// Upper bound of a further random delay of each event, so that watches report events out of order.
    pub watch_jitter: Option<Duration>,
    /// Percentage of events that watches lose. A watch that may lose some ends with 410 Gone.
    pub watch_lost_percent: u32,
}

/// A write that was answered.
#[derive(Clone, Debug)]
pub struct Write {
    /// Time of the answer.
    pub at: Instant,
    /// POST, PUT, PATCH or DELETE.
    pub method: Method,
    /// Path of the object.
    pub path: String,
    /// Status of the response; 0 if none was awaited.
    pub code: u16,
}

/// The proxy. It stops when dropped.
pub struct Proxy {
    /// Address that it listens on, plain HTTP.
    pub address: SocketAddr,
    inner: Arc<Inner>,
    task: JoinHandle<()>,
}

struct Inner {
    upstream: Client,
    state: Mutex<Inside>,
    /// State of a fixed pseudo-random sequence.
    dice: AtomicU64,
}

#[derive(Default)]
struct Inside {
    faults: Faults,
    kill: Option<Kill>,
    /// Number of writes since `kill` was set.
    counted: u64,
    victim: Option<u32>,
    writes: Vec<Write>,
    requests: u64,
}

impl Proxy {
    /// Starts it in front of `upstream`.
    ///
    /// # Panics
    /// When no port is available.
    pub async fn start(upstream: Client) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.unwrap_or_else(|error| panic!("no port: {error}"));
        let address = listener.local_addr();
        let address = address.unwrap_or_else(|error| panic!("no address: {error}"));
        let inner = Arc::new(Inner {
            upstream,
            state: Mutex::default(),
            dice: AtomicU64::new(0x9e37_79b9_7f4a_7c15),
        });
        let router = Router::new().fallback(pass).with_state(Arc::clone(&inner));
        let task = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                eprintln!("the proxy ended: {error}");
            }
        });
        Self {
            address,
            inner,
            task,
        }
    }

    /// Kills the process `victim` at a later write.
    pub fn kill(&self, kill: Kill, victim: u32) {
        let mut state = self.inner.lock();
        state.kill = Some(kill);
        state.counted = 0;
        state.victim = Some(victim);
    }

    /// Whether the operator has been killed, which happens once.
    pub fn has_killed(&self) -> bool {
        let state = self.inner.lock();
        state.victim.is_some() && state.kill.is_none()
    }

    /// Injects these faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.inner.lock().faults = faults;
    }

    /// Returns all writes that the API server has answered.
    pub fn writes(&self) -> Vec<Write> {
        self.inner.lock().writes.clone()
    }

    /// Returns the number of writes that the API server has answered.
    pub fn write_count(&self) -> usize {
        self.inner.lock().writes.len()
    }

    /// Returns the number of requests of all kinds, including refused ones.
    pub fn request_count(&self) -> u64 {
        self.inner.lock().requests
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a number below `limit`.
    fn roll(&self, limit: u32) -> u32 {
        let step = |seed: u64| {
            let seed = seed ^ (seed << 13);
            let seed = seed ^ (seed >> 7);
            Some(seed ^ (seed << 17))
        };
        let seed = self
            .dice
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, step);
        let seed = seed.unwrap_or_else(|seed| seed);
        u32::try_from((seed >> 16) % u64::from(limit.max(1))).unwrap_or(0)
    }

    /// Returns the status that refuses this request, if any.
    fn refusal(&self, faults: &Faults, is_write: bool) -> Option<u16> {
        if !is_write && !faults.refuse_reads {
            return None;
        }
        let roll = self.roll(100);
        let mut bound = 0;
        for (code, percent) in &faults.refused_percent {
            bound += percent;
            if roll < bound {
                return Some(*code);
            }
        }
        None
    }

    /// Returns the number of the current write.
    fn number(&self) -> u64 {
        let mut state = self.lock();
        state.counted += 1;
        state.counted
    }

    /// Whether the operator is to be killed at this side of a write; if so, kills it.
    fn is_last(&self, write: u64, side: Side) -> bool {
        let mut state = self.lock();
        if state.kill != Some(Kill { write, side }) {
            return false;
        }
        state.kill = None;
        if let Some(victim) = state.victim.and_then(|pid| {
            let pid = i32::try_from(pid).ok()?;
            rustix::process::Pid::from_raw(pid)
        }) {
            let _ = rustix::process::kill_process(victim, rustix::process::Signal::KILL);
        }
        true
    }
}

async fn pass(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let is_write = !matches!(*request.method(), Method::GET | Method::HEAD);
    let query = request.uri().query().unwrap_or_default();
    let is_watch = query.contains("watch=true");
    let faults = {
        let mut state = inner.lock();
        state.requests += 1;
        state.faults.clone()
    };
    if let Some(code) = inner.refusal(&faults, is_write) {
        return refuse(code);
    }
    let number = if is_write { inner.number() } else { 0 };
    if is_write && inner.is_last(number, Side::Before) {
        return std::future::pending().await;
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let answer = forward(&inner.upstream, request).await;
    if is_write {
        let code = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
        inner.lock().writes.push(Write {
            at: Instant::now(),
            method,
            path,
            code,
        });
        if inner.is_last(number, Side::After) {
            return std::future::pending().await;
        }
    }
    match answer {
        Ok(answer) if is_watch => broken_watch(inner, answer, &faults),
        Ok(answer) => answer,
        Err(error) => (StatusCode::BAD_GATEWAY, error).into_response(),
    }
}

async fn forward(upstream: &Client, request: Request) -> Result<Response, String> {
    let (mut parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, BODY_BYTES).await;
    let body = body.map_err(|error| error.to_string())?;
    for name in [header::HOST, header::CONTENT_LENGTH, header::CONNECTION] {
        parts.headers.remove(name);
    }
    let request = Request::from_parts(parts, kube::client::Body::from(body));
    let answer = upstream.send(request).await;
    let answer = answer.map_err(|error| error.to_string())?;
    let (mut parts, body) = answer.into_parts();
    parts.headers.remove(header::TRANSFER_ENCODING);
    parts.headers.remove(header::CONNECTION);
    Ok(Response::from_parts(parts, Body::new(body)))
}

/// Event that ends a watch whose client must list again.
const GONE: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"the test has forgotten that version","reason":"Expired","code":410}}
"#;

/// Returns a watch that delivers events late, loses some, or ends early.
fn broken_watch(inner: Arc<Inner>, answer: Response, faults: &Faults) -> Response {
    let Faults {
        watch_life: life,
        watch_delay: delay,
        watch_jitter: jitter,
        watch_lost_percent: lost_percent,
        ..
    } = *faults;
    if life.is_none() && delay.is_none() && jitter.is_none() && lost_percent == 0 {
        return answer;
    }
    let (parts, body) = answer.into_parts();
    let end = Instant::now() + life.unwrap_or(Duration::from_secs(3600));
    let pieces = body.into_data_stream();
    let pieces = pieces.filter_map(move |piece| {
        let (chance, loss) = (inner.roll(1000), inner.roll(100));
        async move {
            let share = f64::from(chance) / 1000.0;
            let wait = delay.unwrap_or_default() + jitter.unwrap_or_default().mul_f64(share);
            tokio::time::sleep(wait).await;
            (loss >= lost_percent).then_some(piece)
        }
    });
    let pieces = pieces.take_until(tokio::time::sleep_until(end.into()));
    let last = (lost_percent > 0).then(|| Ok(GONE.into()));
    let pieces = pieces.chain(futures::stream::iter(last));
    Response::from_parts(parts, Body::from_stream(pieces))
}

fn refuse(code: u16) -> Response {
    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let reason = match code {
        409 => "Conflict",
        429 => "TooManyRequests",
        _ => "InternalError",
    };
    let body = serde_json::json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
        "message": "the test says no",
    });
    let mut response = (status, axum::Json(body)).into_response();
    if code == 429 {
        let wait = header::HeaderValue::from_static("1");
        response.headers_mut().insert(header::RETRY_AFTER, wait);
    }
    response
}
