//! The head's side of a group: asks all members to join, again after each loss.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_parallel::{Formed, Former, Group, GroupError};
use hearth_transport::{Clients, v1};
use tokio::runtime::Handle;
use tonic::{Code, Status};

use super::addresses::Addresses;
use super::membership::{EPOCH, Membership};
use super::net::{Member, NetGroup};

/// Time before members that do not answer are asked again.
const RETRY_PERIOD: Duration = Duration::from_millis(100);
/// Time between two lines of the log on a member that is missing.
const SAY_PERIOD: Duration = Duration::from_secs(30);

/// Forms groups of processes.
pub(super) struct NetFormer {
    /// Names of the members by rank.
    names: Vec<String>,
    addresses: Addresses,
    /// What all of them must agree to.
    join: v1::Join,
    clients: Clients,
    membership: Membership,
    runtime: Handle,
    /// Number of the group that was formed last, or a later one that a member knows.
    last_epoch: AtomicU64,
    /// Since when a member has been missing, and when that was said last.
    missing: Mutex<Option<(Instant, Instant)>>,
}

impl NetFormer {
    /// What forms groups of members with these names, the first of which is this one's. Must be called within a runtime.
    pub(super) fn new(
        (names, addresses): (Vec<String>, Addresses),
        join: v1::Join,
        clients: Clients,
        membership: Membership,
    ) -> Self {
        Self {
            names,
            addresses,
            join,
            clients,
            membership,
            runtime: Handle::current(),
            last_epoch: AtomicU64::new(0),
            missing: Mutex::default(),
        }
    }

    /// Says which member is missing and why, at first quietly: most are back within a moment.
    fn miss(&self, member: &str, why: &str) {
        tracing::debug!(member, why, "not there yet");
        let now = Instant::now();
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, said) = missing.get_or_insert((now, now));
        if now.duration_since(*said) >= SAY_PERIOD {
            *said = now;
            let seconds = now.duration_since(*since).as_secs();
            tracing::warn!(member, why, seconds, "the group is waiting for a member");
        }
    }

    /// A number that is greater than those of groups before, also of another process of this head. Where the clock went back,
    /// members say which one they know.
    fn next_epoch(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now_ms = now.map_or(0, |since| since.as_millis() as u64);
        let epoch = now_ms.max(self.last_epoch.load(Ordering::Relaxed).saturating_add(1));
        self.last_epoch.store(epoch, Ordering::Relaxed);
        epoch
    }

    /// Asks all members to join a group: their numerics; `None` if not all have, for now.
    fn invite(
        &self,
        group: &Arc<NetGroup>,
        members: &[v1::Member],
        deadline: Instant,
    ) -> Result<Option<Vec<String>>, GroupError> {
        let (sender, answers) = channel();
        let size = members.len();
        for rank in 1..size {
            let join = v1::Join {
                rank: rank as u32,
                members: members.to_vec(),
                ..self.join.clone()
            };
            let sender = sender.clone();
            // After the last answer nobody listens.
            group.invite(rank, join, move |answer| drop(sender.send((rank, answer))))?;
        }
        drop(sender);
        let mut numerics = vec![String::new(); size - 1];
        let mut silent: Vec<usize> = (1..size).collect();
        while !silent.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, answer) = match answers.recv_timeout(left) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    self.miss(&group.name(silent[0]), "it has not answered yet");
                    return Ok(None);
                }
            };
            silent.retain(|other| *other != rank);
            match answer {
                Ok(joined) => numerics[rank - 1] = joined.numerics,
                Err(status) => return self.refused(group, rank, &status).map(|()| None),
            }
        }
        Ok(Some(numerics))
    }

    /// Notes why a member has not joined.
    fn refused(&self, group: &NetGroup, rank: usize, status: &Status) -> Result<(), GroupError> {
        if status.code() == Code::FailedPrecondition {
            return Err(GroupError::Unfit {
                member: group.name(rank),
                why: status.message().to_owned(),
            });
        }
        let known = status.metadata().get(EPOCH);
        if let Some(epoch) = known.and_then(|known| known.to_str().ok()?.parse().ok()) {
            self.last_epoch.fetch_max(epoch, Ordering::Relaxed);
        }
        self.miss(&group.name(rank), status.message());
        Ok(())
    }
}

impl Former for NetFormer {
    fn form(&self, patience: Duration) -> Result<Option<Formed>, GroupError> {
        let deadline = Instant::now() + patience;
        let later = || {
            let left = deadline.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(RETRY_PERIOD));
            Ok(None)
        };
        if self.membership.has_left() {
            return later();
        }
        let members = match self.addresses.of(&self.names) {
            Ok(Ok(members)) => members,
            Ok(Err(name)) => {
                self.miss(&name, "it has no address yet");
                return later();
            }
            Err(error) => {
                self.miss("all", &format!("{error:#}"));
                return later();
            }
        };
        let _within = self.runtime.enter();
        let told: Vec<v1::Member> = members.iter().map(Member::told).collect();
        let group = Arc::new(NetGroup::new(
            self.next_epoch(),
            0,
            members,
            self.join.waiting_bytes as usize,
            self.clients.clone(),
        ));
        if let Err(known) = self.membership.enter(&group) {
            self.last_epoch.fetch_max(known, Ordering::Relaxed);
            return later();
        }
        match self.invite(&group, &told, deadline) {
            Ok(Some(numerics)) => {
                tracing::info!(
                    epoch = group.epoch,
                    members = group.size(),
                    "a group has formed"
                );
                *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Ok(Some(Formed { group, numerics }))
            }
            Ok(None) => {
                group.leave();
                later()
            }
            Err(error) => {
                group.leave();
                Err(error)
            }
        }
    }
}
