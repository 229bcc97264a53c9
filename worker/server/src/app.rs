//! Shared state of all handlers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{SystemTime, UNIX_EPOCH};

use hearth_transport::spans::Tracer;
use tokio_util::sync::CancellationToken;

use crate::backlog::Backlog;
use crate::config::{Limits, Routing};
use crate::cors::CorsOrigin;
use crate::keys::ApiKeys;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::router::WorkerPool;

/// The state of a gateway.
pub(crate) struct App {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) pool: Arc<WorkerPool>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tracer: Tracer,
    pub(crate) backlog: Arc<Backlog>,
    pub(crate) keys: Option<ApiKeys>,
    pub(crate) cors_origins: Vec<CorsOrigin>,
    pub(crate) routing: Routing,
    pub(crate) limits: Limits,
    /// Start time, as Unix time in seconds.
    pub(crate) created: u64,
    /// Set once no new requests are taken.
    pub(crate) is_draining: AtomicBool,
    /// Cancelled once the time for streams in flight is over.
    pub(crate) closing: CancellationToken,
    /// Number of requests that had not been answered by then.
    pub(crate) cut_off: AtomicU64,
}

impl App {
    /// Maximum tokens of prompt and answer together: the model's limit, or less if the workers hold less.
    pub(crate) fn context_length(&self) -> u32 {
        let own = self.model.context_length;
        self.pool
            .context_length()
            .map_or(own, |workers| own.min(workers))
    }
}

/// Current Unix time in seconds.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
