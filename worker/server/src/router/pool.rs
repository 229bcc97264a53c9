//! The workers, what is known of them, and the queue in front of them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_transport::v1::{DescribeRequest, DescribeResponse, StatsRequest, StatsResponse};
use hearth_transport::{Clients, Endpoint, RpcError, RpcErrorKind, TransportError, Worker};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::policy::{Candidate, Place, choose_decode, choose_place, choose_prefill};
use super::prefix::{PrefixKey, PrefixMemory};
use super::types::{AcquireError, Health, Pin, Role, Want, WorkerView};
use crate::config::Routing;

/// First and longest pause between looks at a worker that does not answer.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// Looks without an answer after which streams are taken away from a worker whose connection still stands.
const LOST_AFTER_LOOKS: u32 = 3;
/// Assumed of a worker that does not tell.
const DEFAULT_BATCH: u32 = 16;

struct Member {
    role: Role,
    worker: Worker,
    /// Counts losses; streams watch it.
    epoch: watch::Sender<u64>,
    poke: Notify,
    state: Mutex<MemberState>,
}

struct MemberState {
    health: Health,
    description: DescribeResponse,
    stats: StatsResponse,
    failures: u32,
    silences: u32,
    in_flight: u32,
    prefixes: PrefixMemory,
}

impl Member {
    fn lock(&self) -> MutexGuard<'_, MemberState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The pools of one gateway.
pub struct Pool {
    members: Vec<Arc<Member>>,
    routing: Routing,
    changed: watch::Sender<()>,
    turn: AtomicUsize,
    waiting: AtomicUsize,
    /// First come, first served.
    turnstile: tokio::sync::Mutex<()>,
}

/// A place on a decode worker; given back when dropped.
pub struct Lease {
    pool: Arc<Pool>,
    /// Index of the worker.
    pub index: usize,
    /// The connection to it.
    pub worker: Worker,
    /// What a continuation elsewhere needs.
    pub pin: Pin,
    kv_layout: String,
    /// Prompt tokens that this gateway has not sent there before.
    new_tokens: u32,
    epoch: watch::Receiver<u64>,
}

/// A prefill worker for one request; given back when dropped.
pub struct PrefillLease {
    pool: Arc<Pool>,
    /// Index of the worker.
    pub index: usize,
    /// Where the decode worker finds it.
    pub endpoint: Endpoint,
}

impl Pool {
    /// The pool of these workers, and the tasks that look after them for as long as the pool is alive.
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// [`TransportError`] for an address or certificates that cannot be used.
    pub fn start(
        clients: &Clients,
        decode: &[Endpoint],
        prefill: &[Endpoint],
        routing: Routing,
    ) -> Result<Arc<Self>, TransportError> {
        let roles = decode
            .iter()
            .map(|endpoint| (Role::Decode, endpoint))
            .chain(prefill.iter().map(|endpoint| (Role::Prefill, endpoint)));
        let members = roles
            .map(|(role, endpoint)| {
                Ok(Arc::new(Member {
                    role,
                    worker: clients.worker(endpoint)?,
                    epoch: watch::Sender::new(0),
                    poke: Notify::new(),
                    state: Mutex::new(MemberState {
                        health: Health::Starting,
                        description: DescribeResponse::default(),
                        stats: StatsResponse::default(),
                        failures: 0,
                        silences: 0,
                        in_flight: 0,
                        prefixes: PrefixMemory::default(),
                    }),
                }))
            })
            .collect::<Result<Vec<_>, TransportError>>()?;
        let look_timeout = routing.look_timeout;
        let pool = Arc::new(Self {
            members,
            routing,
            changed: watch::Sender::new(()),
            turn: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            turnstile: tokio::sync::Mutex::new(()),
        });
        for member in &pool.members {
            // The task holds the pool weakly, so that it ends with it.
            let pool = Arc::downgrade(&pool);
            let member = member.clone();
            tokio::spawn(async move {
                let mut pause = BACKOFF.0;
                loop {
                    let look = timeout(look_timeout, look_at(&member.worker)).await;
                    let Some(pool) = pool.upgrade() else { return };
                    let wait = pool.note_look(&member, look, &mut pause);
                    drop(pool);
                    let _ = timeout(wait, member.poke.notified()).await;
                }
            });
        }
        Ok(pool)
    }

    /// Waits for a decode worker until `deadline`, which is the queue's for new requests and the request's own
    /// for those that were begun.
    ///
    /// # Errors
    /// [`AcquireError`]; never [`AcquireError::QueueFull`] for a request with a pin.
    pub async fn acquire(
        self: &Arc<Self>,
        want: Want<'_>,
        deadline: Instant,
    ) -> Result<Lease, AcquireError> {
        let key = PrefixKey::of(want.tokens);
        if want.pin.is_some() {
            return self.wait_for_worker(&want, &key, deadline).await;
        }
        if let Ok(_turn) = self.turnstile.try_lock()
            && let Some(lease) = self.try_acquire(&want, &key, false)
        {
            return Ok(lease);
        }
        let _waiting = Waiting::enter(&self.waiting, self.routing.max_queue)?;
        let out_of_time = |_| self.wait_error();
        let _turn = timeout_at(deadline, self.turnstile.lock())
            .await
            .map_err(out_of_time)?;
        self.wait_for_worker(&want, &key, deadline).await
    }

    /// A prefill worker for the request at `lease`, when the policy wants one.
    pub fn acquire_prefill(self: &Arc<Self>, lease: &Lease) -> Option<PrefillLease> {
        let ready: Vec<(usize, u32)> = self
            .members
            .iter()
            .enumerate()
            .filter(|(_, member)| member.role == Role::Prefill)
            .filter_map(|(index, member)| {
                let state = member.lock();
                let fits = state.health == Health::Ready
                    && state.description.model_fingerprint == lease.pin.fingerprint
                    && state.description.kv_layout == lease.kv_layout;
                fits.then_some((index, state.in_flight))
            })
            .collect();
        let place = choose_place(
            lease.new_tokens,
            self.routing.chunked_below_tokens,
            !ready.is_empty(),
        );
        if place == Place::Decode {
            return None;
        }
        let index = choose_prefill(&ready, self.turn.fetch_add(1, Ordering::Relaxed))?;
        self.members[index].lock().in_flight += 1;
        Some(PrefillLease {
            pool: self.clone(),
            index,
            endpoint: self.members[index].worker.endpoint().clone(),
        })
    }

    /// A call to this worker failed as a broken connection does: it gets no other before it has answered a look.
    pub fn suspect(&self, index: usize) {
        let Some(member) = self.members.get(index) else {
            return;
        };
        let mut state = member.lock();
        if state.health == Health::Ready {
            state.health = Health::Suspect;
            // It may be another process by the next look.
            state.prefixes.forget();
            drop(state);
            self.changed.send_replace(());
        }
        member.poke.notify_one();
    }

    /// All workers.
    pub fn views(&self) -> Vec<WorkerView> {
        self.members
            .iter()
            .map(|member| {
                let state = member.lock();
                let name = match state.description.name.as_str() {
                    "" => member.worker.endpoint().to_string(),
                    name => name.to_owned(),
                };
                WorkerView {
                    name,
                    role: member.role,
                    health: state.health,
                    in_flight: state.in_flight,
                    stats: state.stats,
                    plan_generation: state.description.plan_generation,
                    context_length: state.description.context_length,
                }
            })
            .collect()
    }

    /// Requests that wait for a worker.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Ready and all workers of a role.
    pub fn count(&self, role: Role) -> (usize, usize) {
        let of_role = || {
            self.members
                .iter()
                .filter(move |member| member.role == role)
        };
        let ready = of_role()
            .filter(|member| member.lock().health == Health::Ready)
            .count();
        (ready, of_role().count())
    }

    /// The least context length that a decode worker told; `None` before one did.
    pub fn context_length(&self) -> Option<u32> {
        self.members
            .iter()
            .filter(|member| member.role == Role::Decode)
            .map(|member| member.lock().description.context_length)
            .filter(|tokens| *tokens > 0)
            .min()
    }

    async fn wait_for_worker(
        self: &Arc<Self>,
        want: &Want<'_>,
        key: &PrefixKey,
        deadline: Instant,
    ) -> Result<Lease, AcquireError> {
        let mut changed = self.changed.subscribe();
        let other_numerics_at = Instant::now() + self.routing.same_numerics_wait;
        loop {
            changed.mark_unchanged();
            let any_numerics = Instant::now() >= other_numerics_at;
            if let Some(lease) = self.try_acquire(want, key, any_numerics) {
                return Ok(lease);
            }
            let until = if any_numerics {
                deadline
            } else {
                deadline.min(other_numerics_at)
            };
            let woken = timeout_at(until, changed.changed()).await;
            if woken.is_err() && Instant::now() >= deadline {
                return Err(self.wait_error());
            }
        }
    }

    fn try_acquire(
        self: &Arc<Self>,
        want: &Want<'_>,
        key: &PrefixKey,
        any_numerics: bool,
    ) -> Option<Lease> {
        let same =
            |state: &MemberState, pin: &Pin| state.description.model_fingerprint == pin.fingerprint;
        // Other bits are better than none, once no worker is left that would give the same.
        let any_numerics = any_numerics
            || want.pin.is_some_and(|pin| {
                !self.members.iter().any(|member| {
                    member.role == Role::Decode
                        && member.lock().description.numerics == pin.numerics
                })
            });
        let candidates: Vec<Candidate> = self
            .members
            .iter()
            .enumerate()
            .filter(|(_, member)| member.role == Role::Decode)
            .filter_map(|(index, member)| {
                let state = member.lock();
                let fits = state.health == Health::Ready
                    && want.pin.is_none_or(|pin| {
                        same(&state, pin)
                            && (any_numerics || state.description.numerics == pin.numerics)
                    });
                fits.then(|| Candidate {
                    index,
                    in_flight: state.in_flight,
                    capacity: self.capacity(&state),
                    matched_tokens: state.prefixes.matched_tokens(key),
                    is_avoided: want.avoid == Some(index),
                })
            })
            .collect();
        let index = choose_decode(&candidates, self.turn.fetch_add(1, Ordering::Relaxed))?;
        let member = &self.members[index];
        let mut state = member.lock();
        state.in_flight += 1;
        let new_tokens = want.tokens.len() as u32 - state.prefixes.matched_tokens(key);
        state.prefixes.remember(key);
        Some(Lease {
            pool: self.clone(),
            index,
            worker: member.worker.clone(),
            pin: Pin {
                fingerprint: state.description.model_fingerprint.clone(),
                numerics: state.description.numerics.clone(),
            },
            kv_layout: state.description.kv_layout.clone(),
            new_tokens,
            epoch: member.epoch.subscribe(),
        })
    }

    fn capacity(&self, state: &MemberState) -> u32 {
        let batch = match state.description.max_batch {
            0 => DEFAULT_BATCH,
            batch => batch,
        };
        batch.saturating_add(self.routing.ahead_per_worker.unwrap_or(batch))
    }

    fn wait_error(&self) -> AcquireError {
        match self.count(Role::Decode) {
            (0, workers) => AcquireError::NotReady { workers },
            _ => AcquireError::TimedOut,
        }
    }

    fn release(&self, index: usize) {
        let mut state = self.members[index].lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        drop(state);
        self.changed.send_replace(());
    }

    /// Notes the outcome of a look; gives the pause to the next.
    fn note_look(
        &self,
        member: &Member,
        look: Result<
            Result<(DescribeResponse, StatsResponse), RpcError>,
            tokio::time::error::Elapsed,
        >,
        pause: &mut Duration,
    ) -> Duration {
        let is_silent = look.is_err();
        let mut state = member.lock();
        let before = state.health;
        match look {
            Ok(Ok((description, stats))) => {
                *pause = BACKOFF.0;
                state.failures = 0;
                state.silences = 0;
                let expected = self.routing.model_fingerprint.as_ref();
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
                worker = %member.worker.endpoint(),
                role = member.role.as_str(),
                was = before.as_str(),
                is = after.as_str(),
                "worker changed"
            );
            self.changed.send_replace(());
        }
        if is_silent && silences == LOST_AFTER_LOOKS {
            member.epoch.send_modify(|epoch| *epoch += 1);
        }
        if failures == 0 {
            return self.routing.look_interval;
        }
        let wait = *pause;
        *pause = (*pause * 2).min(BACKOFF.1);
        wait
    }
}

impl Lease {
    /// Returns when the worker stopped answering although its connection stands.
    pub async fn lost(&mut self) {
        if self.epoch.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.release(self.index);
    }
}

impl Drop for PrefillLease {
    fn drop(&mut self) {
        self.pool.release(self.index);
    }
}

/// A place in the queue.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(count: &'a AtomicUsize, limit: usize) -> Result<Self, AcquireError> {
        let before = count.fetch_add(1, Ordering::Relaxed);
        let place = Self(count);
        if before >= limit {
            return Err(AcquireError::QueueFull {
                waiting: before,
                limit,
            });
        }
        Ok(place)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
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
