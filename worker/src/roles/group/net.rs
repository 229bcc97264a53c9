//! A group whose ranks are processes, over gRPC.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_parallel::{Group, GroupError, Mailbox, Message, Op, Tag};
use hearth_transport::{Clients, Endpoint, v1};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;

use super::link::{self, Outgoing};
use super::way::Way;
use v1::sign::Sign;

/// Whoever waits for a message asks for it again within this time.
const ASK_PATIENCE: Duration = Duration::from_secs(2);

/// A member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Name of its rank in the plan.
    pub(super) name: String,
    /// Name of the node that it runs on; empty: unknown.
    pub(super) node: String,
    /// Where it serves.
    pub(super) endpoint: Endpoint,
}

impl Member {
    /// As others are told of it.
    pub(super) fn told(&self) -> v1::Member {
        v1::Member {
            name: self.name.clone(),
            endpoint: self.endpoint.to_string(),
            node: self.node.clone(),
        }
    }
}

/// One member's view of a group, for one epoch.
pub(super) struct NetGroup {
    pub(super) epoch: u64,
    rank: usize,
    members: Arc<[Member]>,
    /// Most bytes of messages that may wait here.
    waiting_bytes: usize,
    mailbox: Arc<Mailbox>,
    /// Cancelled once the mailbox has ended.
    over: CancellationToken,
    clients: Clients,
    runtime: Handle,
    links: Mutex<HashMap<usize, Link>>,
    /// Members whose way to this one is open.
    heard: Mutex<HashSet<usize>>,
    /// Set once this member begins nothing more.
    is_retiring: AtomicBool,
    /// What other members have said last of what they do.
    beats: Arc<Mutex<HashMap<usize, v1::Beat>>>,
    /// The message that this rank waits for.
    awaited: Mutex<Option<Awaited>>,
}

/// The way to another member, open until this is dropped.
struct Link {
    /// Parcels of messages that were counted before: no more wait here than are to wait at the receiver.
    messages: mpsc::UnboundedSender<v1::Parcel>,
    /// Takes what is said last, ahead of all that waits.
    last: oneshot::Sender<v1::Parcel>,
    way: Arc<Way>,
    task: AbortOnDropHandle<()>,
}

/// A message that somebody waits for.
#[derive(Clone, Copy)]
struct Awaited {
    from: usize,
    tag: Tag,
    since: Instant,
    /// When it was asked for last: a pass may be given up.
    asked: Instant,
}

impl NetGroup {
    /// The group of `members` as rank `rank` sees it, in which at most `waiting_bytes` of messages may wait. Must be called within
    /// a runtime.
    pub(super) fn new(
        epoch: u64,
        rank: usize,
        members: Vec<Member>,
        waiting_bytes: usize,
        clients: Clients,
    ) -> Self {
        Self {
            epoch,
            rank,
            waiting_bytes,
            mailbox: Arc::new(Mailbox::new(waiting_bytes)),
            over: CancellationToken::new(),
            clients,
            runtime: Handle::current(),
            links: Mutex::default(),
            heard: Mutex::default(),
            is_retiring: AtomicBool::new(false),
            beats: Arc::default(),
            awaited: Mutex::default(),
            members: members.into(),
        }
    }

    /// Opens the way to a member with a request to join; `joined` receives its answer.
    ///
    /// # Errors
    /// [`GroupError::Unfit`] if its address is none.
    pub(super) fn invite(
        &self,
        to: usize,
        join: v1::Join,
        joined: impl FnMut(Result<v1::Joined, Status>) + Send + 'static,
    ) -> Result<(), GroupError> {
        let link = self.open(to, Some(join), joined)?;
        self.links().insert(to, link);
        Ok(())
    }

    /// What other members have said last of what they do, and this one's own ways.
    pub(super) fn beats(&self) -> Vec<(usize, v1::Beat)> {
        let own = v1::Beat {
            ways: self.ways(),
            ..v1::Beat::default()
        };
        let mut beats = vec![(self.rank, own)];
        let others = lock(&self.beats);
        beats.extend(others.iter().map(|(rank, beat)| (*rank, beat.clone())));
        beats
    }

    /// Ways from this member on which something has not arrived yet.
    pub(super) fn ways(&self) -> Vec<v1::Way> {
        let links = self.links();
        let told = links.iter().filter_map(|(to, link)| link.way.told(*to));
        told.collect()
    }

    /// The member that this one waits for, and for how long.
    pub(super) fn awaited(&self) -> Option<(usize, Duration)> {
        let awaited = (*lock(&self.awaited))?;
        let is_asked = awaited.asked.elapsed() < ASK_PATIENCE;
        is_asked.then(|| (awaited.from, awaited.since.elapsed()))
    }

    /// Most bytes of messages that may wait here.
    pub(super) fn most_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// Whether a member opens its way to this one: each does so once.
    pub(super) fn hears(&self, from: usize) -> bool {
        lock(&self.heard).insert(from)
    }

    /// Takes a message that has come.
    pub(super) fn take(&self, from: usize, tag: Tag, bytes: Vec<u8>) {
        let message = Message { from, tag, bytes };
        let has_room = match self.rank {
            0 => self.mailbox.put(message),
            _ => self.mailbox.put_for_stage(message),
        };
        if !has_room {
            self.lose(from, "it sends more than anybody takes");
        }
    }

    /// Tells the others that this member, the head, is to end.
    pub(super) fn say_draining(&self) {
        for link in self.links().values() {
            // Whoever took it is gone.
            let _ = link.messages.send(link::draining());
        }
    }

    /// Begins nothing more: whoever asks for the next message is told to leave.
    pub(super) fn retire(&self) {
        self.is_retiring.store(true, Ordering::Relaxed);
    }

    /// Whether it begins nothing more.
    pub(super) fn is_retiring(&self) -> bool {
        self.is_retiring.load(Ordering::Relaxed)
    }

    /// Records that this member leaves: those to whom its ways are open learn whom it has lost, if that is why.
    pub(super) fn leave(&self) {
        self.end(GroupError::Left);
        let lost = self.loss_told();
        for (_, link) in self.links().drain() {
            if let Some((rank, why)) = &lost {
                // Whoever took it is gone.
                let _ = link.last.send(link::farewell(*rank, why.clone()));
                // The way ends once that has come, or its receiver is silent.
                drop(link.task.detach());
            }
        }
    }

    fn end(&self, error: GroupError) {
        self.mailbox.end(error);
        self.over.cancel();
    }

    /// Whom this member loses whose way to another has ended.
    pub(super) fn loss(&self, to: usize, status: &Status) -> GroupError {
        loss(&self.members, (self.rank, to), status)
    }

    /// Takes the farewell of a member that leaves because it has lost another.
    pub(super) fn left_for(&self, from: usize, farewell: &v1::Farewell) {
        let lost = Some(farewell.lost as usize);
        self.end(blamed(
            &self.members,
            (self.rank, from),
            lost,
            &farewell.why,
        ));
    }

    /// The member that this one has lost, and why; `None` if the group is over for another reason, or is not.
    fn loss_told(&self) -> Option<(usize, String)> {
        let GroupError::Lost { member, why } = self.lost()? else {
            return None;
        };
        let rank = (0..self.size()).find(|rank| self.name(*rank) == member);
        Some((rank?, why))
    }

    /// Name in the plan of the member that this one has lost.
    pub(super) fn lost_member(&self) -> Option<String> {
        let (rank, _) = self.loss_told()?;
        Some(self.members[rank].name.clone())
    }

    /// Waits until this group is over.
    pub(super) async fn over(&self) {
        self.over.cancelled().await;
    }

    /// What another member is told once this group is over: whom this one has lost, and why.
    pub(super) fn farewell(&self) -> Option<Status> {
        let over = self.lost()?;
        if let Some((rank, why)) = self.loss_told() {
            let mut status = Status::aborted(why);
            status.metadata_mut().insert(link::LOST, rank.into());
            return Some(status);
        }
        Some(match over {
            GroupError::Left => Status::unavailable(link::LEFT),
            error => Status::aborted(error.to_string()),
        })
    }

    fn open(
        &self,
        to: usize,
        join: Option<v1::Join>,
        mut joined: impl FnMut(Result<v1::Joined, Status>) + Send + 'static,
    ) -> Result<Link, GroupError> {
        // Followers send from a thread of their own.
        let _within = self.runtime.enter();
        let worker = self.clients.worker(&self.members[to].endpoint);
        let worker = worker.map_err(|error| GroupError::Unfit {
            member: self.name(to),
            why: error.to_string(),
        })?;
        let (messages, waiting) = mpsc::unbounded_channel();
        let (last, said_last) = oneshot::channel();
        let outgoing = Outgoing {
            messages: waiting,
            last: said_last,
        };
        let first = link::hello(self.epoch, self.rank, join);
        let (mailbox, over) = (Arc::clone(&self.mailbox), self.over.clone());
        let (members, own) = (Arc::clone(&self.members), self.rank);
        let way = Arc::new(Way::default());
        let (arrives, beats) = (Arc::clone(&way), Arc::clone(&self.beats));
        let task = self.runtime.spawn(async move {
            let signs = |sign| match sign {
                Sign::Joined(member) => joined(Ok(member)),
                Sign::Received(v1::Received { bytes }) => arrives.arrived(bytes),
                Sign::Beat(beat) => drop(lock(&beats).insert(to, beat)),
            };
            let ended = link::run(worker, first, outgoing, signs).await;
            if let Err(status) = ended {
                let error = loss(&members, (own, to), &status);
                joined(Err(status));
                mailbox.end(error);
                over.cancel();
            }
        });
        Ok(Link {
            messages,
            last,
            way,
            task: AbortOnDropHandle::new(task),
        })
    }

    /// Notes that this rank waits for a message, or still does.
    fn awaits(&self, from: usize, tag: Tag) {
        let (mut awaited, asked) = (lock(&self.awaited), Instant::now());
        let since = match &*awaited {
            Some(before) if (before.from, before.tag) == (from, tag) => before.since,
            _ => asked,
        };
        *awaited = Some(Awaited {
            from,
            tag,
            since,
            asked,
        });
    }

    fn links(&self) -> MutexGuard<'_, HashMap<usize, Link>> {
        lock(&self.links)
    }

    /// The way to a member, which is opened with the first message.
    fn way(&self, to: usize) -> Result<(Arc<Way>, mpsc::UnboundedSender<v1::Parcel>), GroupError> {
        let mut links = self.links();
        let link = match links.get(&to) {
            Some(link) => link,
            None => {
                let link = self.open(to, None, |_| {})?;
                links.entry(to).or_insert(link)
            }
        };
        Ok((Arc::clone(&link.way), link.messages.clone()))
    }
}

/// A member's name in messages to people.
fn name(members: &[Member], rank: usize) -> String {
    match members.get(rank) {
        Some(member) if member.node.is_empty() => {
            format!("{} ({})", member.name, member.endpoint)
        }
        Some(member) => format!("{} on {} ({})", member.name, member.node, member.endpoint),
        None => format!("rank {rank}"),
    }
}

/// Whom a member loses whose way to another has ended: that one, or whom it has lost itself.
fn loss(members: &[Member], ranks: (usize, usize), status: &Status) -> GroupError {
    let told = status.metadata().get(link::LOST);
    let told = told.and_then(|rank| rank.to_str().ok()?.parse::<usize>().ok());
    blamed(members, ranks, told, status.message())
}

/// Whom the member `own` loses where `other` has left, which says that it has lost `told`.
fn blamed(
    members: &[Member],
    (own, other): (usize, usize),
    told: Option<usize>,
    why: &str,
) -> GroupError {
    let (lost, why) = match told {
        Some(rank) if rank == own => (other, format!("it has lost this rank: {why}")),
        Some(rank) if rank < members.len() && rank != other => {
            (rank, format!("{why}, says {}", name(members, other)))
        }
        _ => (other, why.to_owned()),
    };
    GroupError::Lost {
        member: name(members, lost),
        why,
    }
}

/// Each of these is changed as a whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Group for NetGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn name(&self, rank: usize) -> String {
        name(&self.members, rank)
    }

    fn send(&self, to: usize, tag: Tag, bytes: Vec<u8>) -> Result<(), GroupError> {
        if let Some(error) = self.mailbox.ended() {
            return Err(error);
        }
        let (way, messages) = self.way(to)?;
        way.send(bytes.len(), self.waiting_bytes, || self.mailbox.ended())?;
        // Pieces of a message follow each other, whatever other threads send.
        let _one_at_a_time = self.links();
        for piece in link::pieces(tag, &bytes, way.piece_bytes()) {
            // Whoever took them says why it does not any more.
            let _ = messages.send(piece);
        }
        Ok(())
    }

    fn recv(
        &self,
        from: usize,
        tag: Tag,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, GroupError> {
        self.awaits(from, tag);
        let name = |rank| self.name(rank);
        let taken = self.mailbox.take(from, tag, patience, name);
        if !matches!(taken, Ok(None)) {
            *lock(&self.awaited) = None;
        }
        taken
    }

    fn next(&self, op: Op, patience: Duration) -> Result<Option<Message>, GroupError> {
        match self.is_retiring() {
            true => Err(GroupError::Left),
            false => self.mailbox.next(op, patience),
        }
    }

    fn forget(&self, before_pass: u64) {
        self.mailbox.forget(before_pass);
    }

    fn lost(&self) -> Option<GroupError> {
        self.mailbox.ended()
    }

    fn lose(&self, member: usize, why: &str) {
        self.end(GroupError::Lost {
            member: self.name(member),
            why: why.to_owned(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_lost_whom_another_has_lost() {
        let members = ["decode-0", "stage-0", "stage-1"].map(|name| Member {
            name: name.to_owned(),
            node: "attic".to_owned(),
            endpoint: "127.0.0.1:1".parse().expect("an address"),
        });
        let told = |lost: Option<&'static str>| {
            let mut status = Status::aborted("it is silent");
            if let Some(lost) = lost {
                let rank = lost.parse().expect("a value");
                status.metadata_mut().insert(link::LOST, rank);
            }
            loss(&members, (0, 2), &status).to_string()
        };
        let of = |name: &str, why: &str| {
            format!("{name} on attic (127.0.0.1:1) is lost to its group: {why}")
        };
        let says = "it is silent, says stage-1 on attic (127.0.0.1:1)";
        assert_eq!(told(Some("1")), of("stage-0", says));
        let own = "it has lost this rank: it is silent";
        assert_eq!(told(Some("0")), of("stage-1", own));
        for lost in [None, Some("2"), Some("3"), Some("x")] {
            assert_eq!(told(lost), of("stage-1", "it is silent"));
        }
    }
}
