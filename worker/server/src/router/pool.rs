//! The workers, their joining and leaving, and the queue in front of them.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use hearth_transport::{Clients, Endpoint, TransportError, Worker};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::member::{Member, MemberState};
use super::prefix::PrefixKey;
use super::quiet::LastDecoded;
use super::types::{AcquireError, Health, Pin, Role, Want, WorkerId, WorkerRoute, WorkerView};
use crate::config::Routing;

mod route;

pub use route::Route;

/// Batch size assumed for a worker that reports none.
const DEFAULT_BATCH: u32 = 16;
/// Time without a ready worker after which requests that have not begun no longer wait in a gateway that is shutting
/// down. A worker may restart in place within it. The gateway does not learn of new workers: the kubelet does not
/// refresh the volume with the routes of a Pod that is being deleted.
const LEFT_AFTER: Duration = Duration::from_secs(30);

/// The pools of one gateway. Members may join and leave at any time.
pub struct WorkerPool {
    clients: Clients,
    /// Members in the order in which they joined; one that left stays until its last stream has ended.
    members: RwLock<Vec<Kept>>,
    next_id: AtomicU64,
    routing: Routing,
    changed: watch::Sender<()>,
    turn: AtomicUsize,
    waiting: AtomicUsize,
    /// Number of requests that wait beyond the bound of the queue.
    waiting_admitted: AtomicUsize,
    decoded: LastDecoded,
    /// Makes the queue first come, first served.
    turnstile: tokio::sync::Mutex<()>,
    /// Cancelled when the gateway shuts down.
    ending: CancellationToken,
}

/// A member with the task that watches it.
struct Kept {
    member: Arc<Member>,
    _looks: AbortOnDropHandle<()>,
}

/// A slot on a decode worker; released when dropped.
pub struct Lease {
    pool: Arc<WorkerPool>,
    member: Arc<Member>,
    /// The connection to it.
    pub worker: Worker,
    /// Requirements for continuing elsewhere.
    pub pin: Pin,
    epoch: watch::Receiver<u64>,
}

/// A prefill worker for one request; released when dropped.
pub struct PrefillLease {
    pool: Arc<WorkerPool>,
    member: Arc<Member>,
    epoch: watch::Receiver<u64>,
    numerics: String,
}

impl WorkerPool {
    /// Creates the pool of these workers, and starts the tasks that watch them for as long as the pool is alive.
    /// Needs a tokio runtime.
    ///
    /// # Errors
    /// [`TransportError`] for an address or certificates that cannot be used.
    pub fn start(
        clients: &Clients,
        members: &[WorkerRoute],
        routing: Routing,
    ) -> Result<Arc<Self>, TransportError> {
        let pool = Arc::new(Self {
            clients: clients.clone(),
            members: RwLock::default(),
            next_id: AtomicU64::new(0),
            routing,
            changed: watch::Sender::new(()),
            turn: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            waiting_admitted: AtomicUsize::new(0),
            decoded: LastDecoded::default(),
            turnstile: tokio::sync::Mutex::new(()),
            ending: CancellationToken::new(),
        });
        pool.set_members(members)?;
        Ok(pool)
    }

    /// Makes `wanted` the members. A worker is identified by role and address: one that stays keeps all that it has.
    /// One that is no longer named gets no new requests; its streams go on until they end, or until it dies and they
    /// move, and then its connection is dropped.
    ///
    /// # Errors
    /// [`TransportError`] for an address that cannot be used; the members are unchanged.
    pub fn set_members(self: &Arc<Self>, wanted: &[WorkerRoute]) -> Result<(), TransportError> {
        let mut kept = self.members.write().unwrap_or_else(PoisonError::into_inner);
        let mut joining: Vec<Member> = Vec::new();
        for route in wanted {
            let is_known = kept.iter().any(|kept| kept.member.route.is_same(route))
                || joining.iter().any(|member| member.route.is_same(route));
            if !is_known {
                let id = WorkerId(self.next_id.fetch_add(1, Ordering::Relaxed));
                let worker = self.clients.worker(&route.endpoint)?;
                joining.push(Member::new(id, route.clone(), worker));
            }
        }
        for Kept { member, .. } in kept.iter() {
            let is_leaving = !wanted.iter().any(|route| route.is_same(&member.route));
            let was_leaving = std::mem::replace(&mut member.lock().is_leaving, is_leaving);
            if is_leaving != was_leaving {
                log(&member.route, if is_leaving { "leaves" } else { "is back" });
                member.poke();
            }
        }
        for member in joining {
            log(&member.route, "joins");
            let member = Arc::new(member);
            let looks = member
                .clone()
                .watch_over(Arc::downgrade(self), self.routing.hang_after);
            kept.push(Kept {
                member,
                _looks: AbortOnDropHandle::new(tokio::spawn(looks)),
            });
        }
        self.drop_gone(&mut kept);
        drop(kept);
        self.tell();
        Ok(())
    }

    /// Waits for workers until `deadline`, which is the queue's for new requests and the request's own for those that
    /// were begun. Includes a prefill worker if the policy wants one, or the pinned numerics need one.
    ///
    /// # Errors
    /// [`AcquireError`]; never [`AcquireError::QueueFull`] for a request that was tried, or one that is admitted.
    pub async fn acquire(
        self: &Arc<Self>,
        want: Want<'_>,
        deadline: Instant,
    ) -> Result<Route, AcquireError> {
        let key = PrefixKey::of(want.prompt);
        if want.was_tried {
            return self.wait_for_worker(&want, &key, deadline).await;
        }
        if let Ok(_turn) = self.turnstile.try_lock()
            && let Some(route) = self.try_acquire(&want, &key, false)
        {
            return Ok(route);
        }
        let _waiting = match want.is_admitted {
            true => Waiting::enter(&self.waiting_admitted, usize::MAX)?,
            false => Waiting::enter(&self.waiting, self.queue_bound())?,
        };
        let out_of_time = |_| self.wait_error();
        let _first = timeout_at(deadline, self.turnstile.lock())
            .await
            .map_err(out_of_time)?;
        let route = self.wait_for_worker(&want, &key, deadline).await?;
        let turn = route.decode.member.line.enter();
        Ok(Route { turn, ..route })
    }

    /// Longest wait of a request that arrives now and finds no ready decode worker, where they end for want of requests; else
    /// `None`.
    pub fn hold(&self) -> Option<Duration> {
        let hold = self.routing.hold_timeout;
        hold.filter(|_| self.count(Role::Decode).0 == 0)
    }

    /// Notes that the gateway is shutting down and takes no new connections.
    pub fn end(&self) {
        self.ending.cancel();
    }

    /// Returns when the gateway is shutting down and no decode worker has been ready for long enough, with the error
    /// for waiting requests. When a node is drained, both are stopped together; another gateway has other workers.
    pub async fn left(&self) -> AcquireError {
        self.ending.cancelled().await;
        self.deserted(LEFT_AFTER).await;
        AcquireError::Ending
    }

    /// Returns when no decode worker has been ready for `patience`, with the error for waiting requests.
    pub async fn deserted(&self, patience: Duration) -> AcquireError {
        let mut changed = self.changed.subscribe();
        let mut until = None;
        loop {
            changed.mark_unchanged();
            until = match self.count(Role::Decode) {
                (0, workers) => {
                    let until = *until.get_or_insert_with(|| Instant::now() + patience);
                    if Instant::now() >= until {
                        return AcquireError::NotReady { workers };
                    }
                    Some(until)
                }
                _ => None,
            };
            let change = changed.changed();
            match until {
                Some(until) => drop(timeout_at(until, change).await),
                None => drop(change.await),
            }
        }
    }

    /// Notes that a call to this worker failed like a broken connection: it gets no other until it answers a probe.
    pub fn suspect(&self, id: WorkerId) {
        let members = self.members();
        let Some(member) = members.iter().find(|member| member.id == id) else {
            return;
        };
        let mut state = member.lock();
        if state.health == Health::Ready {
            state.health = Health::Suspect;
            // By the next probe it may be another process.
            state.prefixes.forget();
            drop(state);
            self.tell();
        }
        member.poke();
    }

    /// Returns all workers, including those that left for as long as they have streams.
    pub fn views(&self) -> Vec<WorkerView> {
        self.members().iter().map(|member| member.view()).collect()
    }

    /// Number of requests that wait for a worker.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed) + self.waiting_admitted.load(Ordering::Relaxed)
    }

    /// Number of ready members of a role, and of all.
    pub fn count(&self, role: Role) -> (usize, usize) {
        let (mut ready, mut all) = (0, 0);
        for member in self.members().iter().filter(|member| member.is(role)) {
            let state = member.lock();
            ready += usize::from(state.is_open());
            all += usize::from(!state.is_leaving);
        }
        (ready, all)
    }

    /// Smallest context length that a decode worker reported; `None` until one has.
    pub fn context_length(&self) -> Option<u32> {
        self.members()
            .iter()
            .filter(|member| member.is(Role::Decode))
            .filter_map(|member| {
                let state = member.lock();
                (!state.is_leaving).then_some(state.description.context_length)
            })
            .filter(|tokens| *tokens > 0)
            .min()
    }

    /// Maximum number of choices of one request at workers or in the queue at a time: half of what the workers compute
    /// at a time, so that a request for many choices leaves slots to the others. At least one.
    pub fn share(&self) -> usize {
        match self.slots(MemberState::is_open) {
            0 => DEFAULT_BATCH as usize / 2,
            slots => usize::max(slots / 2, 1),
        }
    }

    /// Notes that a worker decodes now.
    pub(super) fn decodes(&self) {
        self.decoded.now();
    }

    pub(super) fn routing(&self) -> &Routing {
        &self.routing
    }

    /// Wakes waiting requests: a worker may fit that did not before.
    pub(super) fn tell(&self) {
        self.changed.send_replace(());
    }

    /// Number of requests that may wait. It follows the workers as they join and leave, so that nobody replaces a gateway for it.
    fn queue_bound(&self) -> usize {
        let slots = self.slots(|state| !state.is_leaving);
        let routing = &self.routing;
        routing.max_queue.max(routing.queued_per_slot * slots)
    }

    /// Number of requests that those decode workers compute at a time.
    fn slots(&self, counts: impl Fn(&MemberState) -> bool) -> usize {
        let members = self.members();
        let decode = members.iter().filter(|member| member.is(Role::Decode));
        let batches = decode.filter_map(|member| {
            let state = member.lock();
            counts(&state).then(|| batch(&state) as usize)
        });
        batches.sum()
    }

    fn members(&self) -> Vec<Arc<Member>> {
        let kept = self.members.read().unwrap_or_else(PoisonError::into_inner);
        kept.iter().map(|kept| kept.member.clone()).collect()
    }

    /// Drops members that left and have no stream any more, and their connections.
    fn drop_gone(&self, kept: &mut Vec<Kept>) {
        let mut gone = Vec::new();
        kept.retain(|Kept { member, .. }| {
            let is_gone = member.lock().is_gone();
            if is_gone {
                log(&member.route, "has left");
                gone.push(member.route.endpoint.clone());
            }
            !is_gone
        });
        for endpoint in gone {
            let is_used = kept
                .iter()
                .any(|kept| kept.member.route.endpoint == endpoint);
            if !is_used {
                self.clients.forget(&endpoint);
            }
        }
    }

    async fn wait_for_worker(
        self: &Arc<Self>,
        want: &Want<'_>,
        key: &PrefixKey,
        deadline: Instant,
    ) -> Result<Route, AcquireError> {
        let mut changed = self.changed.subscribe();
        let patience = match want.takes_others {
            true => Duration::ZERO,
            false => self.routing.same_numerics_wait,
        };
        let other_numerics_at = (Instant::now() + patience).min(deadline);
        loop {
            changed.mark_unchanged();
            let any_numerics = Instant::now() >= other_numerics_at;
            if let Some(route) = self.try_acquire(want, key, any_numerics) {
                return Ok(route);
            }
            if Instant::now() >= deadline {
                return Err(self.wait_error());
            }
            let until = if any_numerics {
                deadline
            } else {
                other_numerics_at
            };
            let _ = timeout_at(until, changed.changed()).await;
        }
    }

    fn capacity(&self, state: &MemberState) -> u32 {
        let batch = batch(state);
        batch.saturating_add(self.routing.ahead_per_worker.unwrap_or(batch))
    }

    fn wait_error(&self) -> AcquireError {
        match self.count(Role::Decode) {
            (0, workers) => AcquireError::NotReady { workers },
            _ => AcquireError::TimedOut,
        }
    }

    fn release(&self, member: &Member) {
        let mut state = member.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        let is_gone = state.is_gone();
        drop(state);
        if is_gone {
            let mut kept = self.members.write().unwrap_or_else(PoisonError::into_inner);
            self.drop_gone(&mut kept);
        }
        self.tell();
    }
}

/// Number of requests that a worker computes at a time.
fn batch(state: &MemberState) -> u32 {
    match state.description.max_batch {
        0 => DEFAULT_BATCH,
        batch => batch,
    }
}

fn log(route: &WorkerRoute, what: &str) {
    tracing::info!(
        worker = route.name,
        endpoint = %route.endpoint,
        role = route.role.as_str(),
        "worker {what}"
    );
}

impl Lease {
    /// Id of the worker.
    pub fn id(&self) -> WorkerId {
        self.member.id
    }

    /// Notes that something arrived from the worker.
    pub fn heard(&self) {
        self.member.heard();
    }

    /// Notes that a token arrived from the worker.
    pub fn decoded(&self) {
        self.pool.decodes();
    }

    /// Returns when the worker has stopped answering although its connection is open.
    pub async fn lost(&mut self) {
        changed(&mut self.epoch).await;
    }
}

async fn changed(epoch: &mut watch::Receiver<u64>) {
    if epoch.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.release(&self.member);
    }
}

impl PrefillLease {
    /// Id of the worker.
    pub fn id(&self) -> WorkerId {
        self.member.id
    }

    /// Returns when the worker has stopped answering although its connection is open.
    pub async fn lost(&mut self) {
        changed(&mut self.epoch).await;
    }

    /// Address at which the decode worker reaches it.
    pub fn endpoint(&self) -> &Endpoint {
        &self.member.route.endpoint
    }
}

impl Drop for PrefillLease {
    fn drop(&mut self) {
        self.pool.release(&self.member);
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
