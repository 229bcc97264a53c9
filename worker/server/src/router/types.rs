//! Descriptions of workers, and requirements on them.

use hearth_transport::Endpoint;
use hearth_transport::v1::{MemberPlacement, Placement, StatsResponse};

/// Purpose of a worker.
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

/// A member of a pool, for as long as it is one: a worker that leaves and joins again gets a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkerId(pub(super) u64);

/// Address and role of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRoute {
    /// Name of its rank, until the worker reports its own.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Its address.
    pub endpoint: Endpoint,
}

impl WorkerRoute {
    /// Creates the route of a worker that is known only by its address.
    pub fn at(role: Role, endpoint: Endpoint) -> Self {
        Self {
            name: endpoint.to_string(),
            role,
            endpoint,
        }
    }

    /// Whether both are the same member, whatever their names.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.role == other.role && self.endpoint == other.endpoint
    }
}

/// State of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Has not answered yet.
    Starting,
    /// Takes requests.
    Ready,
    /// A call failed; it is probed before it gets another.
    Suspect,
    /// Does not answer.
    Lost,
    /// Its connection is open, but nothing arrives: the process is stuck.
    Hung,
    /// Finishes its requests and takes no new ones.
    Draining,
    /// Serves another model than this gateway.
    OtherModel,
    /// Is no longer a member, and finishes its streams.
    Leaving,
}

impl Health {
    /// Human-readable name.
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

/// Requirements on workers for a request that was begun elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Fingerprint of the weights; required.
    pub fingerprint: String,
    /// Numerics of the worker that writes the answer; a worker with the same ones is waited for, for a while.
    pub numerics: String,
    /// Numerics of the worker that reads the prompt, which may be the same worker; likewise.
    pub prompt_numerics: String,
}

impl Pin {
    /// Whether a prefill worker must read the prompt, since the one that writes the answer has other numerics.
    pub(super) fn needs_reader(&self) -> bool {
        self.prompt_numerics != self.numerics
    }
}

/// A request's requirements on its workers.
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
    /// Whether the decode worker is to read the prompt itself, unless other numerics are pinned.
    pub alone: bool,
    /// Whether the request was admitted with its first choice: no limit of the queue refuses it. The number of waiting
    /// choices of one request is bounded by [`WorkerPool::share`](super::WorkerPool::share).
    pub is_admitted: bool,
}

/// Reason no worker was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcquireError {
    /// The queue is full.
    QueueFull {
        /// Number of waiting requests.
        waiting: usize,
        /// Maximum number of them.
        limit: usize,
    },
    /// The wait ran out while workers were busy.
    TimedOut,
    /// The wait ran out with no worker ready.
    NotReady {
        /// Number of decode workers in the pool; 0 if none has joined.
        workers: usize,
    },
    /// The gateway is shutting down, and no worker is left.
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
    /// Number of requests that this gateway has on it.
    pub in_flight: u32,
    /// Its latest statistics.
    pub stats: StatsResponse,
    /// Generation of the plan that it was started with.
    pub plan_generation: u64,
    /// Maximum tokens of prompt and answer; 0 if unknown.
    pub context_length: u32,
    /// Resources that it got from its machine; `None` if it has not reported them.
    pub placement: Option<Placement>,
    /// What became of the group of ranks that it leads; empty: it has lost no member, or leads none.
    pub group: String,
    /// The member of that group that its requests wait for; empty: they wait for none.
    pub waits_for: String,
    /// The other members of that group, and what each had got of its machine when it joined.
    pub members: Vec<MemberPlacement>,
}
