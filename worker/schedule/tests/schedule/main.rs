//! The scheduler's rules one by one, arbitrary calls in arbitrary order, and whole traces in virtual time.

#![allow(clippy::unwrap_used)] // A test may panic.

mod ahead;
mod refusals;
mod rules;
mod simulation;
mod simulator;
mod steps;
