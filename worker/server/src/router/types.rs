//! What is said about workers, and asked of them.

use hearth_transport::Endpoint;
use hearth_transport::v1::{Placement, StatsResponse};

/// What a worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates tokens.
    Decode,
}

impl Role {
    /// Metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A member of a pool, for as long as it is one: one that leaves and joins again later is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId(pub(super) u64);

/// Where a worker is, and what for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRoute {
    /// Its rank, until it tells its name itself.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Its address.
    pub endpoint: Endpoint,
}

impl WorkerRoute {
    /// A worker that is known by its address alone.
    pub fn at(role: Role, endpoint: Endpoint) -> Self {
        Self {
            name: endpoint.to_string(),
            role,
            endpoint,
        }
    }

    /// Whether both are one member: whatever they are called.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.role == other.role && self.endpoint == other.endpoint
    }
}

/// How a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Has not answered yet.
    Starting,
    /// Takes requests.
    Ready,
    /// A call failed; it is looked at before it gets another.
    Suspect,
    /// Does not answer.
    Lost,
    /// Its connection stands, and nothing comes: the process stands still.
    Hung,
    /// Finishes what it has and takes nothing new.
    Draining,
    /// Serves another model than this gateway.
    OtherModel,
    /// Is no member any more, and finishes the streams that it has.
    Leaving,
}

impl Health {
    /// Word for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Lost => "lost",
            Self::Hung => "hung",
            Self::Draining => "draining",
            Self::OtherModel => "serves another model",
            Self::Leaving => "leaving",
        }
    }
}

/// What a request that was begun elsewhere needs of workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The same weights: demanded.
    pub fingerprint: String,
    /// Numerics of the worker that writes the answer; the same bits are waited for, for a while.
    pub numerics: String,
    /// Numerics of the worker that reads the prompt, which may be the same one; likewise.
    pub prompt_numerics: String,
}

impl Pin {
    /// Whether a prefill worker must read the prompt: the one that writes the answer would read it in other bits.
    pub(super) fn needs_reader(&self) -> bool {
        self.prompt_numerics != self.numerics
    }
}

/// A request's wish for workers.
#[derive(Clone, Copy, Debug)]
pub struct Want<'a> {
    /// The prompt.
    pub prompt: &'a [u32],
    /// Pin of a request that was begun elsewhere.
    pub pin: Option<&'a Pin>,
    /// Whether workers of the pin's numerics were waited for before: others are as good at once.
    pub takes_others: bool,
    /// Whether a worker was tried: it does not queue again.
    pub was_tried: bool,
    /// The worker that just failed it.
    pub avoid: Option<WorkerId>,
    /// The decode worker is to read the prompt by itself, unless other bits are pinned.
    pub alone: bool,
    /// Whether the request was let in with its first choice: no bound of the queue refuses it. How many of one request wait
    /// is up to [`WorkerPool::share`](super::WorkerPool::share).
    pub is_admitted: bool,
}

/// Why no worker was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcquireError {
    /// The queue is full.
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// Most that may.
        limit: usize,
    },
    /// The wait ran out with workers at work.
    TimedOut,
    /// The wait ran out with no worker ready.
    NotReady {
        /// Decode workers of the pool; 0: none has joined.
        workers: usize,
    },
    /// The gateway ends, and no worker is left.
    Ending,
}

/// A worker as `/ready` and `/metrics` show it.
#[derive(Clone, Debug)]
pub struct WorkerView {
    /// Its own name, else its route's.
    pub name: String,
    /// Its address.
    pub endpoint: Endpoint,
    /// Its role.
    pub role: Role,
    /// Its health.
    pub health: Health,
    /// Requests that this gateway has there.
    pub in_flight: u32,
    /// Its last figures.
    pub stats: StatsResponse,
    /// The plan it was started by.
    pub plan_generation: u64,
    /// Tokens of prompt and answer that it takes; 0: unknown.
    pub context_length: u32,
    /// What it got of its machine; `None` for a worker that has not told.
    pub placement: Option<Placement>,
}
