//! The operator's decisions, separate from how it reads and writes: everything here follows from what was observed.
//!
//! [`decide::decide`] turns one [`observed::Observed`] into one [`decision::Decision`], through these stages in order:
//! `validate` → `model` → `choose` → [`build`] → `rollout` → `status` → `events`.
//!
//! **Invariants**
//! - No client, no runtime, no clock and no randomness: `layers.txt` forbids the crates that would bring one, and the time is
//!   a field of what was observed.
//! - The same observation gives the same decision.

#![forbid(unsafe_code)]

pub mod age;
pub mod autoscale;
pub mod build;
pub mod calls;
pub mod candidates;
mod cause;
mod choose;
pub mod conditions;
pub mod decide;
pub mod decision;
mod events;
mod follow;
pub mod host_paths;
pub mod key;
pub mod ledger;
mod model;
pub mod names;
pub mod observed;
pub mod plan_record;
pub mod preload;
pub mod quantity;
mod rollout;
pub mod routes;
pub mod scaling;
mod sharing;
pub mod status;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod turns;
pub mod validate;
mod zero;
