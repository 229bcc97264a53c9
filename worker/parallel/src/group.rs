//! What ranks of one group send each other.

use std::sync::Arc;
use std::time::Duration;

use hearth_model::Exchanged;

/// A group of ranks that run one model, from its forming to the loss of a member: what is called an epoch. Messages of another
/// epoch do not reach it.
pub trait Group: Send + Sync {
    /// This rank, from 0; the head is 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// A rank's name in messages to people.
    fn name(&self, rank: usize) -> String;

    /// Sends a message. It does not wait for the receiver to take it; between processes it waits while more is under way than may wait at
    /// the receiver, as it is where passes are given up one after the other over a slow link.
    ///
    /// # Errors
    /// [`GroupError`] if a member is lost.
    fn send(&self, to: usize, tag: Tag, bytes: Vec<u8>) -> Result<(), GroupError>;

    /// Waits up to `patience` for the message of this tag; `None` if it has not come.
    ///
    /// # Errors
    /// [`GroupError`] if a member is lost, or reports that it failed in the same pass.
    fn recv(
        &self,
        from: usize,
        tag: Tag,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, GroupError>;

    /// Waits up to `patience` for the message of this kind that came first, from whomever; `None` if there is none.
    ///
    /// # Errors
    /// [`GroupError`] if a member is lost.
    fn next(&self, op: Op, patience: Duration) -> Result<Option<Message>, GroupError>;

    /// Drops messages of passes before this one.
    fn forget(&self, before_pass: u64);

    /// Why the group cannot go on; `None` while it can.
    fn lost(&self) -> Option<GroupError>;

    /// Records that a member does not do as it should: this rank's group is over.
    fn lose(&self, member: usize, why: &str);
}

/// A group, and what its members said of themselves when it was formed.
#[derive(Clone)]
pub struct Formed {
    /// The group, as its head sees it.
    pub group: Arc<dyn Group>,
    /// Place in the plan of each rank: as its number, unless some are left out.
    pub places: Vec<usize>,
    /// Numerics of each member but the head, by rank.
    pub numerics: Vec<String>,
    /// Set where some are left out: how many ranks are together, and who is missing and why.
    pub short: Option<String>,
}

impl Formed {
    /// A group of all members, with their numerics but the head's.
    pub fn whole(group: Arc<dyn Group>, numerics: Vec<String>) -> Self {
        Self {
            places: (0..group.size()).collect(),
            group,
            numerics,
            short: None,
        }
    }
}

/// Of which members a group may be formed.
pub struct Wanted<'a> {
    /// Whether so many ranks do what all would; 1 where the head can do without the others.
    pub fits: &'a dyn Fn(usize) -> bool,
    /// Numerics of each member but the head, by place, if they are known: whoever has others is left out where that is possible.
    pub numerics: Option<&'a [String]>,
}

impl Wanted<'_> {
    /// All members and no fewer, whatever their numerics.
    pub const ALL: Self = Self {
        fits: &|_| false,
        numerics: None,
    };

    /// Whether it may be formed of fewer than all.
    pub fn may_be_short(&self) -> bool {
        (self.fits)(1)
    }
}

/// What forms a group, again and again: each one is an epoch of its own.
pub trait Former: Send + Sync {
    /// Waits up to `patience` for all members, or for longer where they did not answer within it before; `None` if some have not come.
    /// Where fewer do, too, it forms a group of the most of those that have come; `None` if these are no more than are together already,
    /// who then stay so.
    ///
    /// # Errors
    /// [`GroupError`] if a member does not fit that cannot be left out: waiting longer would not help.
    fn form(&self, patience: Duration, wanted: &Wanted<'_>) -> Result<Option<Formed>, GroupError>;
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// The residual stream of a flight, on its way to a layer.
    Stream,
    /// The text of an error: the sender could not do its part of a pass.
    Fault,
    /// The rows of a pass that the head begins.
    Pass,
    /// What ranks that share a pass exchange in a layer.
    Exchange(Exchanged),
}

/// Which message it is among those that two ranks exchange in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag {
    /// Number of the pass, as the head counts them.
    pub pass: u64,
    /// Number of the flight within it.
    pub flight: u32,
    /// Layer that it is for; the number of layers behind the last.
    pub layer: u32,
    /// What it is.
    pub op: Op,
}

/// A message that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its sender.
    pub from: usize,
    /// Its tag.
    pub tag: Tag,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// A group cannot go on, or a member could not do its part of a pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// A member is gone, or silent, or does not do as it should: this epoch is over.
    #[error("{member} is lost to its group: {why}")]
    Lost {
        /// The member's name.
        member: String,
        /// What is known of it.
        why: String,
    },
    /// A member could not do its part of a pass; the group goes on.
    #[error("{member}: {why}")]
    Fault {
        /// The member's name.
        member: String,
        /// Its error.
        why: String,
    },
    /// A member does not fit the others: another model, plan or version.
    #[error("{member} does not fit its group: {why}")]
    Unfit {
        /// The member's name.
        member: String,
        /// What differs, and what to do.
        why: String,
    },
    /// This rank has left the group.
    #[error("the group was left")]
    Left,
}
