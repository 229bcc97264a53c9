//! A group whose ranks are processes, over gRPC.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hearth_parallel::{Group, GroupError, Mailbox, Message, Op, Tag};
use hearth_transport::{Clients, Endpoint, v1};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::link;

/// A member of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Name of its rank in the plan.
    pub(super) name: String,
    /// Where it serves.
    pub(super) endpoint: Endpoint,
}

impl Member {
    /// As others are told of it.
    pub(super) fn told(&self) -> v1::Member {
        v1::Member {
            name: self.name.clone(),
            endpoint: self.endpoint.to_string(),
        }
    }
}

/// One member's view of a group, for one epoch.
pub(super) struct NetGroup {
    pub(super) epoch: u64,
    rank: usize,
    members: Vec<Member>,
    /// Most bytes of messages that may wait here.
    waiting_bytes: usize,
    mailbox: Arc<Mailbox>,
    clients: Clients,
    runtime: Handle,
    links: Mutex<HashMap<usize, Link>>,
    /// Members whose way to this one is open.
    heard: Mutex<HashSet<usize>>,
}

/// The way to another member, open until this is dropped.
struct Link {
    messages: mpsc::UnboundedSender<v1::Parcel>,
    _task: AbortOnDropHandle<()>,
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
            clients,
            runtime: Handle::current(),
            links: Mutex::default(),
            heard: Mutex::default(),
            members,
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
        joined: impl FnMut(Result<v1::Joined, tonic::Status>) + Send + 'static,
    ) -> Result<(), GroupError> {
        let link = self.open(to, Some(join), joined)?;
        self.links().insert(to, link);
        Ok(())
    }

    /// Most bytes of messages that may wait here.
    pub(super) fn most_bytes(&self) -> usize {
        self.waiting_bytes
    }

    /// Whether a member opens its way to this one: each does so once.
    pub(super) fn hears(&self, from: usize) -> bool {
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.insert(from)
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

    /// Records that this member leaves.
    pub(super) fn leave(&self) {
        self.mailbox.end(GroupError::Left);
        self.links().clear();
    }

    fn open(
        &self,
        to: usize,
        join: Option<v1::Join>,
        mut joined: impl FnMut(Result<v1::Joined, tonic::Status>) + Send + 'static,
    ) -> Result<Link, GroupError> {
        let (member, name) = (&self.members[to], self.name(to));
        // Followers send from a thread of their own.
        let _within = self.runtime.enter();
        let worker = self.clients.worker(&member.endpoint);
        let worker = worker.map_err(|error| GroupError::Unfit {
            member: name.clone(),
            why: error.to_string(),
        })?;
        let (messages, inbox) = mpsc::unbounded_channel();
        let first = link::hello(self.epoch, self.rank, join);
        let mailbox = Arc::clone(&self.mailbox);
        let task = self.runtime.spawn(async move {
            let ended = link::run(worker, first, inbox, |member| joined(Ok(member))).await;
            if let Err(status) = ended {
                let why = status.message().to_owned();
                joined(Err(status));
                mailbox.end(GroupError::Lost { member: name, why });
            }
        });
        Ok(Link {
            messages,
            _task: AbortOnDropHandle::new(task),
        })
    }

    fn links(&self) -> std::sync::MutexGuard<'_, HashMap<usize, Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Group for NetGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn name(&self, rank: usize) -> String {
        match self.members.get(rank) {
            Some(member) => format!("{} ({})", member.name, member.endpoint),
            None => format!("rank {rank}"),
        }
    }

    fn send(&self, to: usize, tag: Tag, bytes: Vec<u8>) -> Result<(), GroupError> {
        if let Some(error) = self.mailbox.ended() {
            return Err(error);
        }
        let mut links = self.links();
        let link = match links.get(&to) {
            Some(link) => link,
            None => {
                let link = self.open(to, None, |_| {})?;
                links.entry(to).or_insert(link)
            }
        };
        for piece in link::pieces(tag, &bytes) {
            // Whoever took them says why it does not any more.
            let _ = link.messages.send(piece);
        }
        Ok(())
    }

    fn recv(
        &self,
        from: usize,
        tag: Tag,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, GroupError> {
        let name = |rank| self.name(rank);
        self.mailbox.take(from, tag, patience, name)
    }

    fn next(&self, op: Op, patience: Duration) -> Result<Option<Message>, GroupError> {
        self.mailbox.next(op, patience)
    }

    fn forget(&self, before_pass: u64) {
        self.mailbox.forget(before_pass);
    }

    fn lost(&self) -> Option<GroupError> {
        self.mailbox.ended()
    }

    fn lose(&self, member: usize, why: &str) {
        self.mailbox.end(GroupError::Lost {
            member: self.name(member),
            why: why.to_owned(),
        });
    }
}
