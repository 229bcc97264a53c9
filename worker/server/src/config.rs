//! What a gateway is told at its start. The environment is not read here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

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
    /// Prefill workers; none: decode workers compute prompts themselves.
    pub prefill: Vec<Endpoint>,
    /// Workers come and go while the gateway runs ([`crate::router::WorkerPool::set_members`]): it may start without any.
    pub has_changing_members: bool,
    /// Tokens of prompt and answer together; `None`: the model's own limit. Workers may lower it.
    pub context_length: Option<u32>,
    /// How tool calls are written; `None`: found from the chat template, then the architecture.
    pub tool_format: Option<ToolFormat>,
    /// Queue and choice of workers.
    pub routing: Routing,
    /// Sizes and times.
    pub limits: Limits,
    /// A file with one API key a line (`#` begins a comment), or a directory of such files; read again when it
    /// changes. `None`: no key is asked.
    pub api_keys: Option<PathBuf>,
    /// Mutual TLS towards the workers; `None`: plain.
    pub worker_tls: Option<Tls>,
    /// HTTPS for clients; `None`: plain HTTP.
    pub https: Option<HttpsFiles>,
    /// Origins whose web pages may use the endpoint from a browser; none: no page may.
    pub cors_origins: Vec<CorsOrigin>,
    /// What the plan promised, for `/metrics`.
    pub predicted: Predicted,
}

/// Certificate and key of the HTTPS endpoint, PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpsFiles {
    /// The certificate, then intermediate ones.
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

/// Queue and choice of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routing {
    /// Prompts with fewer new tokens are computed by the decode worker in chunks.
    pub chunked_below_tokens: u32,
    /// Requests (choices) that may wait for a worker; beyond it, 429.
    pub max_queue: usize,
    /// How long one waits, for a place or for a pool that starts.
    pub queue_timeout: Duration,
    /// Requests that a decode worker is given beyond its batch, so that the next is at hand when a place
    /// is free. `None`: as many as its batch.
    pub ahead_per_worker: Option<u32>,
    /// How long a stream whose worker died waits for one with the same numerics before it takes another.
    pub same_numerics_wait: Duration,
    /// Attempts of one request that may end without a new token before the request fails: it may be what
    /// breaks each worker.
    pub max_fruitless_attempts: u32,
    /// Time between two looks at a worker that is well.
    pub look_interval: Duration,
    /// A worker from which nothing came for as long, neither a token nor the answer to a look, is taken for hung: its
    /// streams move. Looks are answered beside the computation, so that a long step is no silence.
    pub hang_after: Duration,
    /// The model that workers must serve; `None`: whatever they serve.
    pub model_fingerprint: Option<String>,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            chunked_below_tokens: 2048,
            max_queue: 256,
            queue_timeout: Duration::from_secs(120),
            ahead_per_worker: None,
            same_numerics_wait: Duration::from_secs(30),
            max_fruitless_attempts: 5,
            look_interval: Duration::from_secs(1),
            hang_after: Duration::from_secs(3),
            model_fingerprint: None,
        }
    }
}

/// Sizes and times of the HTTP side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's body; beyond it, 413.
    pub body_bytes: usize,
    /// Bytes of a request's line and headers; beyond it, 431.
    pub header_bytes: usize,
    /// Headers of a request; beyond it, 431.
    pub headers: usize,
    /// Time for the headers of a request to arrive, and for a new client to say anything.
    pub header_timeout: Duration,
    /// Time for the body of a request to arrive; beyond it, 408.
    pub body_timeout: Duration,
    /// Time for the next byte of a body; beyond it, 408.
    pub body_stall: Duration,
    /// Time for a whole answer, waiting included; beyond it, 504 or an error at the end of the stream.
    pub request_timeout: Duration,
    /// Connections at the same time.
    pub connections: usize,
    /// How long a connection is kept between an answer and the next request. Longer than the proxies in front of the
    /// gateway keep theirs: whoever closes first must not be the one that does not know of a request under way.
    pub keep_alive: Duration,
    /// A client that takes no byte of its answer for as long is cut off, and its work ends.
    pub client_stall: Duration,
    /// Bytes of answers that may wait for clients, all together.
    pub backlog_bytes: usize,
    /// Time for streams in flight when the gateway is told to end.
    pub drain_grace: Duration,
    /// How long a connection on which nothing is asked is kept once the gateway is told to end: a client that uses
    /// it within that time has its answer, and is told by it that the connection ends.
    pub drain_idle: Duration,
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
        }
    }
}

impl GatewayConfig {
    /// A gateway with the defaults, for one model and its decode workers.
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
        }
    }
}

/// Why a gateway cannot start or go on.
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
    /// The context that was asked for is longer than the model's.
    #[error(
        "contextLength is {asked}: the model's own limit is {limit} tokens (max_position_embeddings)\n  lower it to {limit} or less"
    )]
    ContextTooLong {
        /// Asked for.
        asked: u32,
        /// The model's.
        limit: u32,
    },
    /// A file of API keys cannot be read.
    #[error("{}: {source}\n  give a file with one API key a line, or a directory of such files", path.display())]
    ApiKeys {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// No file of API keys holds any.
    #[error("{} holds no API key\n  write one key a line; lines that begin with # are comments", path.display())]
    NoApiKeys {
        /// The file.
        path: PathBuf,
    },
    /// Certificate or key of the HTTPS endpoint cannot be used.
    #[error("{}: {problem}\n  give a PEM file with the {what} of the HTTPS endpoint", path.display())]
    Https {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The listening socket failed.
    #[error("listening on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's answer.
        source: std::io::Error,
    },
}
