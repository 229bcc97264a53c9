//! Configuration of a gateway. The environment is not read here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use hearth_transport::spans::Tracer;
use hearth_transport::{Endpoint, Tls};

use crate::cors::CorsOrigin;
use crate::tools::ToolFormat;

/// Everything a gateway needs to know.
#[derive(Clone)]
pub struct GatewayConfig {
    /// The name that requests give as `model`.
    pub served_name: String,
    /// Directory with config.json, tokenizer.json and, for chat, a chat template. Weights are not read.
    pub model_dir: PathBuf,
    /// Decode workers; at least one, unless members may change.
    pub decode: Vec<Endpoint>,
    /// Prefill workers; if empty, decode workers compute prompts themselves.
    pub prefill: Vec<Endpoint>,
    /// Whether workers join and leave at run time ([`crate::router::WorkerPool::set_members`]): it may then start
    /// without any.
    pub has_changing_members: bool,
    /// Maximum tokens of prompt and answer together; `None` for the model's own limit. Workers may lower it.
    pub context_length: Option<u32>,
    /// Format of tool calls; `None` to detect it from the chat template, then the architecture.
    pub tool_format: Option<ToolFormat>,
    /// Queueing and choice of workers.
    pub routing: Routing,
    /// Size and time limits.
    pub limits: Limits,
    /// A file with one API key per line (`#` begins a comment), or a directory of such files; read again when it
    /// changes. `None` if no key is required.
    pub api_keys: Option<PathBuf>,
    /// Mutual TLS towards the workers; `None` for plaintext.
    pub worker_tls: Option<Tls>,
    /// HTTPS for clients; `None` for plain HTTP.
    pub https: Option<HttpsFiles>,
    /// Origins whose web pages may use the endpoint from a browser; if empty, no page may.
    pub cors_origins: Vec<CorsOrigin>,
    /// Predictions of the plan, for `/metrics`.
    pub predicted: Predicted,
    /// Takes the spans of requests.
    pub tracer: Tracer,
}

/// Certificate and key of the HTTPS endpoint, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpsFiles {
    /// The certificate, followed by intermediate ones.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Times that the planner predicted; shown beside the measured ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predicted {
    /// Time to first token, in seconds.
    pub ttft_seconds: Option<f64>,
    /// Time per output token, in seconds.
    pub tpot_seconds: Option<f64>,
}

/// Queueing and choice of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Number of new tokens below which the decode worker computes a prompt itself, in chunks.
    pub chunked_below_tokens: u32,
    /// Time without decoding after which a prompt is read by all peers of its prefill worker; `None`: always.
    pub together_after_quiet: Option<Duration>,
    /// Number of requests (choices) that may wait for a worker, however few workers there are; beyond it, 429.
    pub max_queue: usize,
    /// Number of requests that may wait for each one that the decode workers compute at a time, where that is more.
    pub queued_per_slot: usize,
    /// Longest wait, for a slot or for a pool that is starting.
    pub queue_timeout: Duration,
    /// Longest wait of a request that arrives while no decode worker is ready, where they end for want of requests; `None`: the
    /// same.
    pub hold_timeout: Option<Duration>,
    /// Requests that a decode worker is given beyond its batch, so that the next is at hand when a slot
    /// is free. `None`: as many as its batch.
    pub ahead_per_worker: Option<u32>,
    /// Time that a stream whose worker died waits for one with the same numerics before it takes another.
    pub same_numerics_wait: Duration,
    /// Attempts of one request that may end without a new token before the request fails: it may itself be what
    /// breaks each worker.
    pub max_fruitless_attempts: u32,
    /// Time between two probes of a healthy worker.
    pub look_interval: Duration,
    /// Time after which a worker that sent nothing, neither a token nor the answer to a probe, is considered hung: its
    /// streams move. Probes are answered on a separate thread from the computation, so a long step is not silence.
    pub hang_after: Duration,
    /// Fingerprint of the model that workers must serve; `None` for any model.
    pub model_fingerprint: Option<String>,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            chunked_below_tokens: 2048,
            together_after_quiet: None,
            max_queue: 256,
            queued_per_slot: 0,
            queue_timeout: Duration::from_secs(120),
            hold_timeout: None,
            ahead_per_worker: None,
            same_numerics_wait: Duration::from_secs(30),
            max_fruitless_attempts: 5,
            look_interval: Duration::from_secs(1),
            hang_after: Duration::from_secs(3),
            model_fingerprint: None,
        }
    }
}

/// Size and time limits of the HTTP side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of a request's body; beyond it, 413.
    pub body_bytes: usize,
    /// Maximum bytes of a request's line and headers; beyond it, 431.
    pub header_bytes: usize,
    /// Maximum number of headers of a request; beyond it, 431.
    pub headers: usize,
    /// Time for the headers of a request to arrive, and for a new client to send anything.
    pub header_timeout: Duration,
    /// Time for the body of a request to arrive; beyond it, 408.
    pub body_timeout: Duration,
    /// Time for the next byte of a body; beyond it, 408.
    pub body_stall: Duration,
    /// Time for a whole answer, waiting included; beyond it, 504 or an error at the end of the stream.
    pub request_timeout: Duration,
    /// Maximum number of open connections.
    pub connections: usize,
    /// Time that a connection is kept between an answer and the next request. Longer than the proxies in front of the
    /// gateway keep theirs: the side that closes first must be the one that knows of every request under way.
    pub keep_alive: Duration,
    /// Time after which a client that reads nothing of its answer is disconnected, and its work ends.
    pub client_stall: Duration,
    /// Maximum bytes of answers that wait for clients, in total.
    pub backlog_bytes: usize,
    /// Time for streams in flight to finish once the gateway is told to stop.
    pub drain_grace: Duration,
    /// Time that an idle connection is kept once the gateway is told to stop: a client that uses it within that time
    /// gets its answer, which tells it that the connection ends.
    pub drain_idle: Duration,
    /// Time for which requests on new connections are still answered once the gateway is told to stop, while others are: of clients
    /// that have not learnt yet that another takes its place. After it they are refused with 503.
    pub drain_late: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 8 << 20,
            header_bytes: 64 << 10,
            headers: 100,
            header_timeout: Duration::from_secs(15),
            body_timeout: Duration::from_secs(60),
            body_stall: Duration::from_secs(10),
            request_timeout: Duration::from_secs(3600),
            connections: 4096,
            keep_alive: Duration::from_secs(120),
            client_stall: Duration::from_secs(30),
            backlog_bytes: 16 << 20,
            drain_grace: Duration::from_secs(30),
            drain_idle: Duration::from_secs(2),
            drain_late: Duration::ZERO,
        }
    }
}

impl GatewayConfig {
    /// Creates a configuration with the defaults, for one model and its decode workers.
    pub fn new(
        served_name: impl Into<String>,
        model_dir: impl Into<PathBuf>,
        decode: Vec<Endpoint>,
    ) -> Self {
        Self {
            served_name: served_name.into(),
            model_dir: model_dir.into(),
            decode,
            prefill: Vec::new(),
            has_changing_members: false,
            context_length: None,
            tool_format: None,
            routing: Routing::default(),
            limits: Limits::default(),
            api_keys: None,
            worker_tls: None,
            https: None,
            cors_origins: Vec::new(),
            predicted: Predicted::default(),
            tracer: Tracer::default(),
        }
    }
}

/// Reason a gateway cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A model's file cannot be used.
    #[error(transparent)]
    Format(#[from] hearth_formats::FormatError),
    /// A worker's address or certificates cannot be used.
    #[error(transparent)]
    Transport(#[from] hearth_transport::TransportError),
    /// No decode worker was given.
    #[error("the gateway has no decode worker\n  name at least one")]
    NoWorkers,
    /// The requested context is longer than the model's.
    #[error(
        "contextLength is {asked}: the model's own limit is {limit} tokens (max_position_embeddings)\n  lower it to {limit} or less"
    )]
    ContextTooLong {
        /// The requested length.
        asked: u32,
        /// The model's limit.
        limit: u32,
    },
    /// A file of API keys cannot be read.
    #[error("{}: {source}\n  give a file with one API key per line, or a directory of such files", path.display())]
    ApiKeys {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file or directory holds no API key.
    #[error("{} holds no API key\n  write one key a line; lines that begin with # are comments", path.display())]
    NoApiKeys {
        /// The file or directory.
        path: PathBuf,
    },
    /// Certificate or key of the HTTPS endpoint cannot be used.
    #[error("{}: {problem}\n  give a PEM file with the {what} of the HTTPS endpoint", path.display())]
    Https {
        /// The file.
        path: PathBuf,
        /// Expected content.
        what: &'static str,
        /// Problem with the content.
        problem: String,
    },
    /// The listening socket failed.
    #[error("listening on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
}
