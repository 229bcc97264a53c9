//! The head's side of a group: asks all members to join, again after each loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_parallel::{Formed, Former, Group, GroupError};
use hearth_transport::{Clients, v1};
use tokio::runtime::Handle;
use tonic::{Code, Status};

use super::membership::{EPOCH, Membership};
use super::net::{Member, NetGroup};

/// Time before members that do not answer are asked again.
const RETRY_PERIOD: Duration = Duration::from_millis(100);

/// Forms groups of processes.
pub(super) struct NetFormer {
    members: Vec<Member>,
    /// What all of them must agree to.
    join: v1::Join,
    clients: Clients,
    membership: Membership,
    runtime: Handle,
    /// Number of the group that was formed last, or a later one that a member knows.
    last_epoch: AtomicU64,
}

impl NetFormer {
    /// What forms groups of `members`, the first of which is this one. Must be called within a runtime.
    pub(super) fn new(
        members: Vec<Member>,
        join: v1::Join,
        clients: Clients,
        membership: Membership,
    ) -> Self {
        Self {
            members,
            join,
            clients,
            membership,
            runtime: Handle::current(),
            last_epoch: AtomicU64::new(0),
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
        deadline: Instant,
    ) -> Result<Option<Vec<String>>, GroupError> {
        let (sender, answers) = channel();
        for rank in 1..self.members.len() {
            let join = v1::Join {
                rank: rank as u32,
                ..self.join.clone()
            };
            let sender = sender.clone();
            // After the last answer nobody listens.
            group.invite(rank, join, move |answer| drop(sender.send((rank, answer))))?;
        }
        drop(sender);
        let mut numerics = vec![String::new(); self.members.len() - 1];
        for _ in 1..self.members.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let (rank, answer) = match answers.recv_timeout(left) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
            };
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
        tracing::debug!(
            member = group.name(rank),
            reason = status.message(),
            "not there yet"
        );
        Ok(())
    }
}

impl Former for NetFormer {
    fn form(&self, patience: Duration) -> Result<Option<Formed>, GroupError> {
        let deadline = Instant::now() + patience;
        let _within = self.runtime.enter();
        let group = Arc::new(NetGroup::new(
            self.next_epoch(),
            0,
            self.members.clone(),
            self.join.waiting_bytes as usize,
            self.clients.clone(),
        ));
        self.membership.enter(&group);
        match self.invite(&group, deadline) {
            Ok(Some(numerics)) => {
                tracing::info!(
                    epoch = group.epoch,
                    members = group.size(),
                    "a group has formed"
                );
                Ok(Some(Formed { group, numerics }))
            }
            Ok(None) => {
                group.leave();
                let left = deadline.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(RETRY_PERIOD));
                Ok(None)
            }
            Err(error) => {
                group.leave();
                Err(error)
            }
        }
    }
}
