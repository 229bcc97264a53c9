//! The service of a member: takes messages of the group that it belongs to now.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use futures::Stream;
use hearth_crds::MOST_WAITING_BYTES;
use hearth_parallel::{Group, StageProgress, Tag};
use hearth_transport::{Clients, v1};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Request, Response, Status, Streaming};
use v1::parcel::Parcel as Content;

use super::link::{self, BEAT_PERIOD, SILENCE};
use super::net::NetGroup;
use super::terms::{Agreed, Terms, VERSION, Work};
use super::way;

/// Metadata of a refusal: the epoch that the member knows, which is not older than the one that it refuses.
pub(super) const EPOCH: &str = "hearth-epoch";
/// The latest epoch that a head may give: milliseconds of 280,000 years, so that there is always a next one. A head whose clock
/// is behind the members' epoch is told that one and goes on from it.
const LATEST_EPOCH: u64 = 1 << 53;

/// Implements `hearth.v1.Group`; clones are the same member.
#[derive(Clone)]
pub(in crate::roles) struct Membership(Arc<State>);

struct State {
    /// The group that was formed last.
    current: watch::Sender<Option<Arc<NetGroup>>>,
    /// Epoch and names of the group before it.
    before: Mutex<(u64, Vec<String>)>,
    /// What a member that is not the head agrees to.
    follower: Option<Follower>,
    /// Set once this rank is about to end.
    has_left: AtomicBool,
    /// Set once the head is to end, and finishes its requests.
    head_drains: AtomicBool,
    /// At the head, what the others said of themselves when the group was formed last.
    members: Mutex<Vec<v1::MemberPlacement>>,
    /// At a head: what is slow now.
    slow: Mutex<Option<String>>,
    /// At a head: name of the member without which no group has formed.
    missing: Mutex<Option<String>>,
}

/// A member that joins when the head asks it to.
pub(super) struct Follower {
    pub(super) terms: Terms,
    pub(super) numerics: String,
    /// What its process got of its machine.
    pub(super) placement: Box<dyn Fn() -> v1::Placement + Send + Sync>,
    pub(super) clients: Clients,
    /// What its thread computes.
    pub(super) progress: StageProgress,
    /// Receives each group that it has joined.
    pub(super) joined: Mutex<Sender<JoinedGroup>>,
}

/// A group that was joined, for the thread that is to compute for it.
pub(super) struct JoinedGroup {
    pub(super) group: Arc<NetGroup>,
    pub(super) work: Work,
    /// Tells that the thread has taken it: it may still be computing for the group before.
    pub(super) taken: oneshot::Sender<()>,
}

impl Membership {
    /// The head: it forms groups, and joins none.
    pub(super) fn of_head() -> Self {
        Self(Arc::new(State {
            current: watch::Sender::new(None),
            before: Mutex::default(),
            follower: None,
            has_left: AtomicBool::new(false),
            head_drains: AtomicBool::new(false),
            members: Mutex::default(),
            slow: Mutex::default(),
            missing: Mutex::default(),
        }))
    }

    pub(super) fn of_follower(follower: Follower) -> Self {
        Self(Arc::new(State {
            current: watch::Sender::new(None),
            before: Mutex::default(),
            follower: Some(follower),
            has_left: AtomicBool::new(false),
            head_drains: AtomicBool::new(false),
            members: Mutex::default(),
            slow: Mutex::default(),
            missing: Mutex::default(),
        }))
    }

    /// What the other members had got of their machines when the group was formed last.
    pub(in crate::roles) fn members(&self) -> Vec<v1::MemberPlacement> {
        let members = self.0.members.lock();
        members.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes what the members of a new group say of themselves.
    pub(super) fn note_members(&self, members: Vec<v1::MemberPlacement>) {
        let noted = self.0.members.lock();
        *noted.unwrap_or_else(PoisonError::into_inner) = members;
    }

    /// Tells the others, now and in later groups, that this rank, the head, is to end once its requests have: those that are told
    /// to end, too, go on until then.
    pub(in crate::roles) fn drain(&self) {
        self.0.head_drains.store(true, Ordering::Relaxed);
        if let Some(group) = self.0.current.borrow().as_ref() {
            group.say_draining();
        }
    }

    /// Whether the head is to end once its requests have.
    pub(super) fn head_drains(&self) -> bool {
        self.0.head_drains.load(Ordering::Relaxed)
    }

    /// Leaves its group for good once the part of a pass is over that it computes now.
    pub(super) fn retire(&self) {
        self.0.has_left.store(true, Ordering::Relaxed);
        if let Some(group) = self.0.current.borrow().as_ref() {
            group.retire();
        }
    }

    /// Leaves its group for good, so that no stream of it is open: the others learn that this rank is about to end.
    pub(in crate::roles) fn leave(&self) {
        self.0.has_left.store(true, Ordering::Relaxed);
        if let Some(group) = self.0.current.borrow().as_ref() {
            group.leave();
        }
    }

    /// What is slow in the group of this head, in words; `None`: nothing.
    pub(in crate::roles) fn slow(&self) -> Option<String> {
        let slow = self.0.slow.lock();
        slow.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets what is slow.
    pub(super) fn set_slow(&self, slow: Option<String>) {
        *self.0.slow.lock().unwrap_or_else(PoisonError::into_inner) = slow;
    }

    /// Name of the member without which the group of this head does not form, or that it has lost; `None`: none.
    pub(in crate::roles) fn missing(&self) -> Option<String> {
        let missing = self.0.missing.lock();
        let missing = missing.unwrap_or_else(PoisonError::into_inner).clone();
        let current = self.0.current.borrow();
        missing.or_else(|| current.as_ref()?.lost_member())
    }

    /// Sets which member is missing.
    pub(super) fn set_missing(&self, missing: Option<String>) {
        let noted = self.0.missing.lock();
        *noted.unwrap_or_else(PoisonError::into_inner) = missing;
    }

    /// A sign of life with what this rank does in a group.
    fn beat(&self, group: &NetGroup) -> v1::Sign {
        let now = self.0.follower.as_ref().and_then(|f| f.progress.now());
        let work = now.map(|(part, times)| v1::Work {
            pass: part.pass,
            first_layer: part.layers.start as u32,
            end_layer: part.layers.end as u32,
            rows: part.rows as u32,
            times: Some(way::told(&times)),
        });
        let ways = group.ways();
        sign(v1::sign::Sign::Beat(v1::Beat {
            work,
            ways,
            ..v1::Beat::default()
        }))
    }

    /// Whether it has left for good.
    pub(super) fn has_left(&self) -> bool {
        self.0.has_left.load(Ordering::Relaxed)
    }

    /// Whether nobody needs this rank: it belongs to no group that can go on.
    pub(super) fn is_alone(&self) -> bool {
        let current = self.0.current.borrow();
        current.as_ref().is_none_or(|group| group.lost().is_some())
    }

    /// Belongs to this group from now on, and to none before.
    ///
    /// # Errors
    /// The epoch that it knows, if the group's is not later.
    pub(super) fn enter(&self, group: &Arc<NetGroup>) -> Result<(), u64> {
        let mut known = 0;
        let is_later = self.0.current.send_if_modified(|current| {
            known = current.as_ref().map_or(0, |current| current.epoch);
            let is_later = group.epoch > known;
            if is_later && let Some(before) = current.replace(Arc::clone(group)) {
                // Until it is known who is missing from this group.
                if self.0.follower.is_none()
                    && let Some(lost) = before.lost_member()
                {
                    self.set_missing(Some(lost));
                }
                self.note_before(&before);
                before.leave();
            }
            is_later
        });
        if self.has_left() {
            group.leave();
        }
        is_later.then_some(()).ok_or(known)
    }

    /// Joins a group that the head forms.
    fn join(
        &self,
        epoch: u64,
        from: usize,
        asked: &v1::Join,
    ) -> Result<(Arc<NetGroup>, oneshot::Receiver<()>), Status> {
        let Some(follower) = &self.0.follower else {
            return Err(Status::failed_precondition(
                "this rank is the head of its group",
            ));
        };
        if from != 0 {
            return Err(Status::permission_denied(format!(
                "rank {from} is not the head, which alone forms groups"
            )));
        }
        let Agreed { work, members } = follower
            .terms
            .agree(asked)
            .map_err(Status::failed_precondition)?;
        if epoch > LATEST_EPOCH {
            return Err(Status::failed_precondition(format!(
                "epoch {epoch} is later than any clock says: set the clock of the head's node"
            )));
        }
        if asked.waiting_bytes > MOST_WAITING_BYTES {
            return Err(Status::failed_precondition(format!(
                "{} bytes of messages may wait at a member in its longest pass, and a member takes {MOST_WAITING_BYTES}: \
                 plan a shorter context",
                asked.waiting_bytes
            )));
        }
        let group = Arc::new(NetGroup::new(
            epoch,
            asked.rank as usize,
            members,
            asked.waiting_bytes as usize,
            follower.clients.clone(),
        ));
        self.enter(&group)
            .map_err(|known| stale(epoch, known, [&group.name(0), &group.name(group.rank())]))?;
        let joined = follower.joined.lock();
        let joined = joined.unwrap_or_else(PoisonError::into_inner);
        let (taken, is_taken) = oneshot::channel();
        let given = JoinedGroup {
            group: Arc::clone(&group),
            work,
            taken,
        };
        match joined.send(given) {
            Ok(()) => Ok((group, is_taken)),
            Err(_) => Err(Status::unavailable("this rank is about to end")),
        }
    }

    /// The group of an epoch. The head asks all members to join before any sends a message, but its invitation may come later.
    async fn group(&self, epoch: u64, from: usize) -> Result<Arc<NetGroup>, Status> {
        let mut current = self.0.current.subscribe();
        let is_known = |group: &Option<Arc<NetGroup>>| {
            group.as_ref().is_some_and(|group| group.epoch >= epoch)
        };
        let known = timeout(SILENCE, current.wait_for(is_known)).await;
        match known.map(|group| group.map(|group| group.clone())) {
            Ok(Ok(Some(group))) if group.epoch == epoch => Ok(group),
            Ok(Ok(Some(group))) => {
                let names = [&self.name_of(epoch, from), &group.name(group.rank())];
                Err(stale(epoch, group.epoch, names.map(String::as_str)))
            }
            _ => Err(Status::unavailable(format!(
                "this rank has not joined epoch {epoch}"
            ))),
        }
    }

    fn note_before(&self, group: &NetGroup) {
        let names = (0..group.size()).map(|rank| group.name(rank)).collect();
        let noted = self.0.before.lock();
        *noted.unwrap_or_else(PoisonError::into_inner) = (group.epoch, names);
    }

    /// Name of a member of the group before this one, or its rank in an earlier one.
    fn name_of(&self, epoch: u64, rank: usize) -> String {
        let before = self.0.before.lock();
        let before = before.unwrap_or_else(PoisonError::into_inner);
        let names = (before.0 == epoch).then_some(&before.1);
        let name = names.and_then(|names| names.get(rank));
        name.map_or_else(|| format!("rank {rank}"), String::clone)
    }
}

/// Refuses an epoch that is not newer than the one that is known: names who asks, and this rank.
fn stale(epoch: u64, known: u64, [from, to]: [&str; 2]) -> Status {
    let mut status = Status::aborted(format!(
        "epoch {epoch} of {from} is over: {to} is in epoch {known}"
    ));
    status.metadata_mut().insert(EPOCH, known.into());
    status
}

#[tonic::async_trait]
impl v1::group_server::Group for Membership {
    type ExchangeStream = Pin<Box<dyn Stream<Item = Result<v1::Sign, Status>> + Send>>;

    async fn exchange(
        &self,
        request: Request<Streaming<v1::Parcel>>,
    ) -> Result<Response<Self::ExchangeStream>, Status> {
        let mut parcels = request.into_inner();
        let first = timeout(SILENCE, parcels.message()).await;
        let silent = |_| Status::deadline_exceeded("a member that says nothing");
        let Some(v1::Parcel {
            parcel: Some(Content::Hello(hello)),
        }) = first.map_err(silent)??
        else {
            return Err(Status::invalid_argument("the first parcel is a hello"));
        };
        let from = hello.from as usize;
        let (group, is_taken) = match &hello.join {
            Some(join) => {
                let (group, is_taken) = self.join(hello.epoch, from, join)?;
                (group, Some(is_taken))
            }
            None => (self.group(hello.epoch, from).await?, None),
        };
        if from >= group.size() || from == group.rank() {
            let size = group.size();
            return Err(Status::invalid_argument(format!(
                "rank {from} is no other one of the {size} members"
            )));
        }
        if !group.hears(from) {
            return Err(Status::already_exists(format!(
                "rank {from} has opened its way here already"
            )));
        }
        let (received, arrives) = watch::channel(0);
        let (reading, state) = (Arc::clone(&group), Arc::clone(&self.0));
        tokio::spawn(async move {
            let Err(why) = read(parcels, &reading, from, (&state.head_drains, &received)).await;
            reading.lose(from, &why);
        });
        let signs = self.clone().signs(group, is_taken, arrives);
        Ok(Response::new(Box::pin(signs)))
    }
}

impl Membership {
    /// What this rank says to a member whose way here is open: that it has joined once `is_taken` tells so, how much `arrives`, and that it
    /// lives, until the group is over.
    fn signs(
        self,
        group: Arc<NetGroup>,
        is_taken: Option<oneshot::Receiver<()>>,
        mut arrives: watch::Receiver<u64>,
    ) -> impl Stream<Item = Result<v1::Sign, Status>> + Send {
        async_stream::stream! {
            if let Some(mut is_taken) = is_taken {
                // Until the thread has taken it, beats say that this process lives.
                while timeout(BEAT_PERIOD, &mut is_taken).await.is_err() {
                    yield Ok(self.beat(&group));
                }
                let follower = self.0.follower.as_ref();
                yield Ok(sign(v1::sign::Sign::Joined(v1::Joined {
                    numerics: follower.map(|own| own.numerics.clone()).unwrap_or_default(),
                    version: VERSION.to_owned(),
                    placement: follower.map(|own| (own.placement)()),
                })));
            }
            let mut next_beat = Instant::now();
            loop {
                if let Some(why) = group.farewell() {
                    yield Err(why);
                    return;
                }
                // Once it is read to its end, only beats are left.
                let is_read = arrives.has_changed().is_err();
                tokio::select! {
                    () = group.over() => continue,
                    Ok(()) = arrives.changed(), if !is_read => {}
                    () = sleep_until(next_beat) => {
                        next_beat = Instant::now() + BEAT_PERIOD;
                        yield Ok(self.beat(&group));
                    }
                }
                let bytes = *arrives.borrow_and_update();
                yield Ok(sign(v1::sign::Sign::Received(v1::Received { bytes })));
            }
        }
    }
}

fn sign(sign: v1::sign::Sign) -> v1::Sign {
    v1::Sign { sign: Some(sign) }
}

/// Takes what a member sends until it is lost, and returns why; `received` tells how much has come, at the latest when a message is
/// complete.
async fn read(
    mut parcels: Streaming<v1::Parcel>,
    group: &NetGroup,
    from: usize,
    (head_drains, received): (&AtomicBool, &watch::Sender<u64>),
) -> Result<std::convert::Infallible, String> {
    let mut message: Option<(Tag, Vec<u8>)> = None;
    loop {
        let parcel = timeout(SILENCE, parcels.message()).await;
        // Whoever sends beats into a group that is over must not keep this end's connections open.
        if group.lost().is_some() {
            return Err("the group is over".to_owned());
        }
        let parcel = parcel.map_err(|_| format!("it has said nothing for {SILENCE:?}"))?;
        let parcel = match parcel {
            Ok(Some(parcel)) => parcel,
            // Had it lost another, it would have said so.
            Ok(None) => return Err(link::LEFT.to_owned()),
            Err(status) => return Err(status.message().to_owned()),
        };
        let piece = match parcel.parcel {
            Some(Content::Piece(piece)) => piece,
            Some(Content::Beat(beat)) => {
                head_drains.fetch_or(beat.draining && from == 0, Ordering::Relaxed);
                continue;
            }
            Some(Content::Farewell(farewell)) => {
                group.left_for(from, &farewell);
                return Err(farewell.why);
            }
            Some(Content::Hello(_)) | None => return Err("it says hello again".to_owned()),
        };
        let tag = link::tag(&piece).ok_or("it sends what this version does not know")?;
        let (of, mut bytes) = message.take().unwrap_or((tag, Vec::new()));
        if of != tag {
            return Err(format!("it sends {tag:?} in the middle of {of:?}"));
        }
        bytes.extend(&piece.data);
        if bytes.len() > group.most_bytes() {
            return Err(format!(
                "it sends a message of over {} bytes",
                group.most_bytes()
            ));
        }
        let (len, is_last) = (piece.data.len() as u64, !piece.more);
        received.send_if_modified(|bytes| {
            *bytes += len + u64::from(is_last);
            is_last
        });
        match piece.more {
            true => message = Some((tag, bytes)),
            false => group.take(from, tag, bytes),
        }
    }
}
