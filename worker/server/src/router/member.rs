//! One worker as its pool sees it, and the task that watches it.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use hearth_transport::v1::{DescribeRequest, DescribeResponse, StatsRequest, StatsResponse};
use hearth_transport::{RpcError, RpcErrorKind, Worker};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::line::Line;
use super::pool::WorkerPool;
use super::prefix::PrefixMemory;
use super::types::{Health, Role, WorkerId, WorkerRoute, WorkerView};

/// First and longest pause between probes of a worker that does not answer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// Longest such pause while requests wait.
const BACKOFF_WAITED_FOR: Duration = Duration::from_millis(100);
/// Number of failed probes in a row after which a worker counts as lost.
const LOST_AFTER_LOOKS: u32 = 3;

/// Outcome of a probe.
enum ProbeOutcome {
    Well(Box<(DescribeResponse, StatsResponse)>),
    Failed(RpcError),
    /// Neither an answer nor a token arrived for longer than a working process may be silent.
    Silent,
}

/// A worker of a pool.
pub(super) struct Member {
    pub(super) id: WorkerId,
    pub(super) route: WorkerRoute,
    pub(super) worker: Worker,
    /// Counts hangs; streams watch it.
    pub(super) epoch: watch::Sender<u64>,
    /// Requests that come to it from the queue.
    pub(super) line: Line,
    poke: Notify,
    state: Mutex<MemberState>,
}

/// State of a worker that changes.
pub(super) struct MemberState {
    pub(super) health: Health,
    pub(super) description: DescribeResponse,
    pub(super) stats: StatsResponse,
    /// Whether it is no longer a member: it keeps its streams, and gets no others.
    pub(super) is_leaving: bool,
    pub(super) in_flight: u32,
    pub(super) prefixes: PrefixMemory,
    failures: u32,
    /// Time of the worker's last sign of life; `None` before its first.
    heard: Option<Instant>,
}

impl MemberState {
    /// Whether it may be given a request.
    pub(super) fn is_open(&self) -> bool {
        self.health == Health::Ready && !self.is_leaving
    }

    /// Whether it left, and has no streams any more.
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
            line: Line::default(),
            poke: Notify::new(),
            state: Mutex::new(MemberState {
                health: Health::Starting,
                description: DescribeResponse::default(),
                stats: StatsResponse::default(),
                is_leaving: false,
                in_flight: 0,
                prefixes: PrefixMemory::default(),
                failures: 0,
                heard: None,
            }),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MemberState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is(&self, role: Role) -> bool {
        self.route.role == role
    }

    /// Triggers a probe now, not at the end of the interval.
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
            placement: state.description.placement.clone(),
            group: state.description.group.clone(),
            waits_for: state.description.waits_for.clone(),
            members: state.description.members.clone(),
        }
    }

    /// Notes a sign of life: a worker that yields tokens is not hung.
    pub(super) fn heard(&self) {
        self.lock().heard = Some(Instant::now());
    }

    /// Probes the worker repeatedly, for as long as its pool exists.
    pub(super) async fn watch_over(self: Arc<Self>, pool: Weak<WorkerPool>, hang_after: Duration) {
        let looks = || self.probe_repeatedly(pool.clone(), hang_after);
        until_it_ends(looks).await;
    }

    async fn probe_repeatedly(&self, pool: Weak<WorkerPool>, hang_after: Duration) {
        let mut pause = BACKOFF.0;
        loop {
            let outcome = self.probe(hang_after).await;
            let Some(pool) = pool.upgrade() else { return };
            let wait = self.note(&pool, outcome, &mut pause);
            drop(pool);
            let _ = timeout(wait, self.poke.notified()).await;
        }
    }

    /// Probes the worker. The answer comes from threads separate from the computation, however long a step takes.
    async fn probe(&self, hang_after: Duration) -> ProbeOutcome {
        let began = Instant::now();
        let mut probe = pin!(describe(&self.worker));
        loop {
            let heard = self.lock().heard.unwrap_or(began);
            // A worker that has been silent for long still gets some time to answer.
            let until = (heard + hang_after).max(began + hang_after / 2);
            tokio::select! {
                biased;
                answer = &mut probe => return match answer {
                    Ok(well) => ProbeOutcome::Well(Box::new(well)),
                    Err(error) => ProbeOutcome::Failed(error),
                },
                () = sleep_until(until) => {}
            }
            if self.lock().heard.is_none_or(|later| later <= heard) {
                return ProbeOutcome::Silent;
            }
        }
    }

    /// Records the outcome of a probe; returns the pause before the next.
    fn note(&self, pool: &WorkerPool, outcome: ProbeOutcome, pause: &mut Duration) -> Duration {
        let is_silent = matches!(outcome, ProbeOutcome::Silent);
        let mut state = self.lock();
        let before = state.health;
        match outcome {
            ProbeOutcome::Well(well) => {
                let (description, stats) = *well;
                *pause = BACKOFF.0;
                state.failures = 0;
                state.heard = Some(Instant::now());
                let expected = pool.routing().model_fingerprint.as_ref();
                state.health = match expected {
                    _ if stats.draining => Health::Draining,
                    Some(expected) if description.model_fingerprint != *expected => {
                        Health::OtherModel
                    }
                    _ => Health::Ready,
                };
                // Streams of other gateways are noticed by this alone.
                let decoded_before = state.stats.generated_tokens;
                if self.is(Role::Decode)
                    && before == Health::Ready
                    && stats.generated_tokens > decoded_before
                {
                    pool.decodes();
                }
                state.description = description;
                state.stats = stats;
            }
            ProbeOutcome::Silent => {
                state.failures += 1;
                if state.health != Health::Starting {
                    state.health = Health::Hung;
                    state.prefixes.forget();
                }
            }
            ProbeOutcome::Failed(error) => {
                state.failures += 1;
                // Streams of a dead process break by themselves, and those of one that merely refuses calls go on.
                let is_lost =
                    error.kind() == RpcErrorKind::Gone || state.failures >= LOST_AFTER_LOOKS;
                if state.health != Health::Starting && is_lost {
                    state.health = Health::Lost;
                    state.prefixes.forget();
                }
            }
        }
        let (after, failures) = (state.health, state.failures);
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
        if is_silent && before != Health::Hung {
            self.epoch.send_modify(|epoch| *epoch += 1);
        }
        if failures == 0 {
            return pool.routing().look_interval;
        }
        let wait = match pool.waiting() {
            0 => *pause,
            _ => (*pause).min(BACKOFF_WAITED_FOR),
        };
        *pause = (*pause * 2).min(BACKOFF.1);
        wait
    }
}

/// Restarts `work` when it panics: the state of a worker that is no longer watched would never change again.
async fn until_it_ends<F: Future<Output = ()>>(work: impl Fn() -> F) {
    while AssertUnwindSafe(work()).catch_unwind().await.is_err() {
        tracing::error!("watching a worker panicked: restarted");
        sleep(BACKOFF.1).await;
    }
}

async fn describe(worker: &Worker) -> Result<(DescribeResponse, StatsResponse), RpcError> {
    let mut control = worker.control();
    let description = control.describe(DescribeRequest {}).await;
    let description = description
        .map_err(|status| worker.error(&status))?
        .into_inner();
    let stats = control.stats(StatsRequest {}).await;
    let stats = stats.map_err(|status| worker.error(&status))?.into_inner();
    Ok((description, stats))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn looks_that_panic_are_begun_again() {
        let begun = AtomicU32::new(0);
        until_it_ends(|| async {
            assert!(begun.fetch_add(1, Ordering::Relaxed) >= 2, "a fault");
        })
        .await;
        assert_eq!(begun.load(Ordering::Relaxed), 3);
    }
}
