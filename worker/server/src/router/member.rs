//! One worker as its pool knows it, and the task that looks after it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hearth_transport::v1::{DescribeRequest, DescribeResponse, StatsRequest, StatsResponse};
use hearth_transport::{RpcError, RpcErrorKind, Worker};
use tokio::sync::{Notify, watch};
use tokio::time::{error::Elapsed, timeout};

use super::pool::Pool;
use super::prefix::PrefixMemory;
use super::types::{Health, Role, WorkerId, WorkerRoute, WorkerView};

/// First and longest pause between looks at a worker that does not answer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// Looks without an answer after which streams are taken away from a worker whose connection still stands.
const LOST_AFTER_LOOKS: u32 = 3;

type Look = Result<Result<(DescribeResponse, StatsResponse), RpcError>, Elapsed>;

/// A worker of a pool.
pub(super) struct Member {
    pub(super) id: WorkerId,
    pub(super) route: WorkerRoute,
    pub(super) worker: Worker,
    /// Counts losses; streams watch it.
    pub(super) epoch: watch::Sender<u64>,
    poke: Notify,
    state: Mutex<MemberState>,
}

/// What changes about a worker.
pub(super) struct MemberState {
    pub(super) health: Health,
    pub(super) description: DescribeResponse,
    pub(super) stats: StatsResponse,
    /// It is no member any more: it keeps the streams that it has, and gets none.
    pub(super) is_leaving: bool,
    pub(super) in_flight: u32,
    pub(super) prefixes: PrefixMemory,
    failures: u32,
    silences: u32,
}

impl MemberState {
    /// Whether it may be given a request.
    pub(super) fn is_open(&self) -> bool {
        self.health == Health::Ready && !self.is_leaving
    }

    /// It left, and nothing of it is needed any more.
    pub(super) fn is_gone(&self) -> bool {
        self.is_leaving && self.in_flight == 0
    }
}

impl Member {
    pub(super) fn new(id: WorkerId, route: WorkerRoute, worker: Worker) -> Self {
        Self {
            id,
            route,
            worker,
            epoch: watch::Sender::new(0),
            poke: Notify::new(),
            state: Mutex::new(MemberState {
                health: Health::Starting,
                description: DescribeResponse::default(),
                stats: StatsResponse::default(),
                is_leaving: false,
                in_flight: 0,
                prefixes: PrefixMemory::default(),
                failures: 0,
                silences: 0,
            }),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MemberState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is(&self, role: Role) -> bool {
        self.route.role == role
    }

    /// Has it looked at now, not at the end of its interval.
    pub(super) fn poke(&self) {
        self.poke.notify_one();
    }

    pub(super) fn view(&self) -> WorkerView {
        let state = self.lock();
        let name = match state.description.name.as_str() {
            "" => self.route.name.clone(),
            name => name.to_owned(),
        };
        WorkerView {
            name,
            endpoint: self.route.endpoint.clone(),
            role: self.route.role,
            health: if state.is_leaving {
                Health::Leaving
            } else {
                state.health
            },
            in_flight: state.in_flight,
            stats: state.stats,
            plan_generation: state.description.plan_generation,
            context_length: state.description.context_length,
        }
    }

    /// Looks at the worker again and again, for as long as its pool is there.
    pub(super) async fn look_after(self: Arc<Self>, pool: Weak<Pool>, look_timeout: Duration) {
        let mut pause = BACKOFF.0;
        loop {
            let look = timeout(look_timeout, look_at(&self.worker)).await;
            let Some(pool) = pool.upgrade() else { return };
            let wait = self.note(&pool, look, &mut pause);
            drop(pool);
            let _ = timeout(wait, self.poke.notified()).await;
        }
    }

    /// Notes the outcome of a look; gives the pause to the next.
    fn note(&self, pool: &Pool, look: Look, pause: &mut Duration) -> Duration {
        let is_silent = look.is_err();
        let mut state = self.lock();
        let before = state.health;
        match look {
            Ok(Ok((description, stats))) => {
                *pause = BACKOFF.0;
                state.failures = 0;
                state.silences = 0;
                let expected = pool.routing().model_fingerprint.as_ref();
                state.health = match expected {
                    _ if stats.draining => Health::Draining,
                    Some(expected) if description.model_fingerprint != *expected => {
                        Health::OtherModel
                    }
                    _ => Health::Ready,
                };
                state.description = description;
                state.stats = stats;
            }
            failed => {
                let is_gone =
                    matches!(&failed, Ok(Err(error)) if error.kind() == RpcErrorKind::Gone);
                state.failures += 1;
                // Streams of a dead process break by themselves, and those of one that only takes no more calls
                // go on; a process that stands still says nothing at all.
                state.silences += u32::from(is_silent);
                let is_lost = is_gone || state.failures >= LOST_AFTER_LOOKS;
                if state.health != Health::Starting && is_lost {
                    state.health = Health::Lost;
                    state.prefixes.forget();
                }
            }
        }
        let (after, failures, silences) = (state.health, state.failures, state.silences);
        drop(state);
        if after != before {
            tracing::info!(
                worker = self.route.name,
                endpoint = %self.route.endpoint,
                role = self.route.role.as_str(),
                was = before.as_str(),
                is = after.as_str(),
                "worker changed"
            );
            pool.tell();
        }
        if is_silent && silences == LOST_AFTER_LOOKS {
            self.epoch.send_modify(|epoch| *epoch += 1);
        }
        if failures == 0 {
            return pool.routing().look_interval;
        }
        let wait = *pause;
        *pause = (*pause * 2).min(BACKOFF.1);
        wait
    }
}

async fn look_at(worker: &Worker) -> Result<(DescribeResponse, StatsResponse), RpcError> {
    let mut control = worker.control();
    let description = control.describe(DescribeRequest {}).await;
    let description = description
        .map_err(|status| worker.error(&status))?
        .into_inner();
    let stats = control.stats(StatsRequest {}).await;
    let stats = stats.map_err(|status| worker.error(&status))?.into_inner();
    Ok((description, stats))
}
