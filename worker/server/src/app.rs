//! What all handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{SystemTime, UNIX_EPOCH};

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
    pub(crate) backlog: Arc<Backlog>,
    pub(crate) keys: Option<ApiKeys>,
    pub(crate) cors_origins: Vec<CorsOrigin>,
    pub(crate) routing: Routing,
    pub(crate) limits: Limits,
    /// Unix time in seconds of the start.
    pub(crate) created: u64,
    /// No new requests are taken.
    pub(crate) is_draining: AtomicBool,
    /// The time for streams in flight is over.
    pub(crate) closing: CancellationToken,
    /// Requests that had not been answered by then.
    pub(crate) cut_off: AtomicU64,
}

impl App {
    /// Tokens of prompt and answer together: the model's, or less where the workers hold less.
    pub(crate) fn context_length(&self) -> u32 {
        let own = self.model.context_length;
        self.pool
            .context_length()
            .map_or(own, |workers| own.min(workers))
    }
}

/// Unix time in seconds.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
