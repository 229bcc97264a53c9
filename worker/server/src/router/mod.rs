//! Which worker answers: the pool and its health, the queue in front of it, the policy.
//!
//! **Invariants**
//! - The policy is pure: it sees numbers and gives an index.
//! - A worker is chosen only after it has described itself since it was last lost.
//! - Members join and leave at any time; who left keeps its streams and gets no other.
//! - A request that was once accepted is never turned away by the queue again: failover goes past it.

mod member;
mod policy;
mod pool;
mod prefix;
mod types;

pub use policy::{Candidate, Place, choose_decode, choose_place, choose_prefill};
pub use pool::{Lease, Pool, PrefillLease, Route};
pub use types::{AcquireError, Health, Pin, Role, Want, WorkerId, WorkerRoute, WorkerView};
