//! Halda: a model's layers on unequal machines, as a ring that a token passes in one or more rounds (prima.cpp, sections
//! 3.2, 3.3 and A.3).
//!
//! [`choose`] gives each device its windows of layers, on its GPU and its CPUs, so that a token takes the least time. The
//! paper's objective is one integer program for each number of layers a round (`program`); it assumes that nothing is read
//! ahead, so more rounds never help it. Its best splits are therefore ranked, and improved, by a simulator that models
//! reading ahead, which gives the number of rounds and the predictions. Devices that make a token slower are left out (the
//! paper's section A.5).
//!
//! The paper sorts devices into sets (section 3.2): `M1` to `M3` lack memory and read some weights at each token, by the rules
//! of macOS, of Metal, and of Linux; `M4` has memory enough, or a disk too slow for it. Machines here run Linux, so a device
//! is of `M3` as far as its layers overflow its memory, else of `M4`, and one that must fit is always of `M4`. Which, the
//! program decides itself. Layers on a GPU (the `n` of a window's `w`) take its memory alone (equations 5 and 10), and no
//! disk. A [`Device`] may have a GPU that takes part of its windows ([`Device::gpu`]), as the paper's do. The planner's have
//! none: each GPU has a process of its own, and is a device that must fit, with the GPU's times and memory, beside that of
//! its node's CPUs in the ring, so that two neighbours' windows are the paper's one. The times to copy hidden states to the
//! GPU and back (A.3) are then in its links.
//!
//! Architecture invariant: pure. Limits count work, not time: the same problem gives the same ring.

mod choice;
mod greedy;
mod polish;
mod program;
mod round;
mod search;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod tours;

pub use choice::{Alternative, Choice, Dropped, Effort, Limits};
pub(crate) use search::has_ring;
pub use search::{choose, choose_head};

pub use crate::ring_error::RingError;
pub use crate::ring_problem::{
    Device, Gpu, Head, Layer, LayerTimes, Link, MAX_DEVICES, MAX_LAYERS, Problem, Prompt,
};
pub(crate) use crate::ring_simulator::Simulator;
pub use crate::ring_simulator::{Share, Window};
