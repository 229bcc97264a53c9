//! Ranks that run one model together: the topology axis below the engine.
//!
//! A [`Group`] lets ranks send each other bytes by [`Tag`]. A [`Route`] says which rank
//! computes which window of layers. In a ring (prima.cpp, section 3.1), the head runs a [`hearth_model::Model`] whose
//! [`hearth_model::OtherRanks`] is a [`RingHead`], and each other rank a [`Stage`], which computes what it is sent.
//!
//! Ranks that share a pass have all layers, and a share of its rows and of each layer's experts (OSDI '26, section 3.2): the head's
//! model has [`GroupPeers`], and each other rank is a [`Follower`].
//!
//! **Invariant**: a rank's result is a function of what it is sent. Activations travel in f32, unrounded, so that a group
//! gives the bits of one process.
//!
//! **Invariant**: a member that is lost ends every wait with an error that names it.
#![forbid(unsafe_code)]

mod attendance;
mod epochs;
mod group;
mod local;
mod mailbox;
mod pace;
mod peers;
mod progress;
mod ring;
mod route;
mod rows;
mod stage;
mod stream;

pub use attendance::Attendance;
pub use group::{Formed, Former, Group, GroupError, Message, Op, Tag, Wanted};
pub use local::{LocalGroup, OneGroup};
pub use mailbox::Mailbox;
pub use pace::{LOST_PATIENCE, Pace, Times, lost_after};
pub use peers::{Follower, GroupPeers};
pub use progress::{PassPart, StageProgress};
pub use ring::RingHead;
pub use route::{Leg, Route};
pub use stage::{Stage, StageError};
