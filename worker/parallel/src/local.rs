//! A group whose ranks are threads of one process.
//!
//! Mailboxes have no limit of bytes. All ranks are one program's, which trusts itself, and what waits is that of passes: one that begins
//! drops those before it, and each of its messages is sent once.

use std::sync::Arc;
use std::time::Duration;

use crate::{Formed, Former, Group, GroupError, Mailbox, Message, Op, Tag, Wanted};

/// One rank of a group of threads. When it is dropped, it is lost to the others.
pub struct LocalGroup {
    rank: usize,
    mailboxes: Arc<[Mailbox]>,
}

impl LocalGroup {
    /// Forms a group of `size` ranks, in order.
    pub fn of(size: usize) -> Vec<Self> {
        let mailboxes: Arc<[Mailbox]> = (0..size).map(|_| Mailbox::new(usize::MAX)).collect();
        let rank = |rank| Self {
            rank,
            mailboxes: Arc::clone(&mailboxes),
        };
        (0..size).map(rank).collect()
    }
}

impl Group for LocalGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.mailboxes.len()
    }

    fn name(&self, rank: usize) -> String {
        format!("rank {rank}")
    }

    fn send(&self, to: usize, tag: Tag, bytes: Vec<u8>) -> Result<(), GroupError> {
        if let Some(error) = self.mailboxes[self.rank].ended() {
            return Err(error);
        }
        let message = Message {
            from: self.rank,
            tag,
            bytes,
        };
        let has_room = match to {
            0 => self.mailboxes[to].put(message),
            _ => self.mailboxes[to].put_for_stage(message),
        };
        if !has_room {
            self.lose(to, "it takes less than it is sent");
        }
        Ok(())
    }

    fn recv(
        &self,
        from: usize,
        tag: Tag,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, GroupError> {
        self.mailboxes[self.rank].take(from, tag, patience, |rank| self.name(rank))
    }

    fn next(&self, op: Op, patience: Duration) -> Result<Option<Message>, GroupError> {
        self.mailboxes[self.rank].next(op, patience)
    }

    fn forget(&self, before_pass: u64) {
        self.mailboxes[self.rank].forget(before_pass);
    }

    fn lost(&self) -> Option<GroupError> {
        self.mailboxes[self.rank].ended()
    }

    fn lose(&self, member: usize, why: &str) {
        self.mailboxes[self.rank].end(GroupError::Lost {
            member: self.name(member),
            why: why.to_owned(),
        });
    }
}

/// Forms the one group that there is, of threads: it has no epochs, and members of one program have the same numerics.
pub struct OneGroup(pub Arc<dyn Group>);

impl Former for OneGroup {
    fn form(&self, _: Duration, _: &Wanted<'_>) -> Result<Option<Formed>, GroupError> {
        Ok(Some(Formed::whole(Arc::clone(&self.0), Vec::new())))
    }
}

impl Drop for LocalGroup {
    fn drop(&mut self) {
        for (rank, mailbox) in self.mailboxes.iter().enumerate() {
            mailbox.end(match rank == self.rank {
                true => GroupError::Left,
                false => GroupError::Lost {
                    member: self.name(self.rank),
                    why: "its thread has ended".into(),
                },
            });
        }
    }
}
