//! Halda: a model's layers on unequal machines, as a ring that a token passes in one or more rounds (prima.cpp, sections
//! 3.2, 3.3 and A.3).
//!
//! [`choose`] gives each device its windows of layers, on its GPU and its CPUs, so that a token takes the least time. The
//! paper's objective is one integer program for each number of layers a round (`program`); it assumes that nothing is read
//! ahead, so more rounds never help it. Its best splits are therefore ranked, and improved, by a simulator that models
//! reading ahead, which gives the number of rounds and the predictions. Devices that make a token slower are left out (the
//! paper's section A.5).
//!
//! Architecture invariant: pure. Limits count work, not time: the same problem gives the same ring.

mod choice;
mod greedy;
mod polish;
mod program;
mod round;
mod search;
#[cfg(test)]
mod tests;
mod tours;

pub use choice::{Alternative, Choice, Dropped, Effort, Limits};
pub use search::choose;

pub use crate::ring_error::RingError;
pub use crate::ring_problem::{
    Device, Gpu, Head, Layer, LayerTimes, Link, MAX_DEVICES, MAX_LAYERS, Problem, Prompt,
};
pub use crate::ring_simulator::{Share, Window};
