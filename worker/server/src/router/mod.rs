//! Choice of the worker that answers: the pool and its health, the queue in front of it, the policy.
//!
//! **Invariants**
//! - The policy is pure: it takes numbers and returns an index.
//! - A worker is chosen only after it has described itself since it was last lost.
//! - Members join and leave at any time; one that left keeps its streams and gets no others.
//! - A request that was once accepted is never rejected by the queue again: failover bypasses it.

mod line;
mod member;
mod policy;
mod pool;
mod prefix;
mod quiet;
mod types;

pub use line::Turn;
pub use policy::{Candidate, PrefillRoute, choose_decode, choose_prefill, choose_prefill_route};
pub use pool::{Lease, PrefillLease, Route, WorkerPool};
pub use types::{AcquireError, Health, Pin, Role, Want, WorkerId, WorkerRoute, WorkerView};
