//! A virtual device, to try, test and measure without a GPU what a plan does with one.
//!
//! It has memory of a fixed size: weights are copied into it, and the KV cache, activations and the experts' working room
//! are taken out of it, to the byte. What does not fit is refused as a GPU refuses it. It has lanes, as a GPU has streams,
//! and marks in them: one for computation, two for copies of weights and of rows to it, which share a link, and one for copies
//! of KV and rows to the host.
//!
//! In exact mode the CPU's kernels compute, so tokens are those of the CPU; nothing is claimed about time. In modelled mode
//! nothing is computed, and operations take the time that given rates say.
//!
//! **Invariant**: no operation writes a tensor whose bytes were not taken from the device's memory.
//! **Invariant**: in either mode, a weight is read only behind a mark of its copy, and a slot is filled only behind the
//! operations that read it.
#![forbid(unsafe_code)]

mod attention;
mod device;
mod elementwise;
mod experts;
mod lanes;
mod linear;
mod link;
mod memory;
mod options;
mod routing;
mod sampling;
mod slots;
mod tensor;
mod work;

pub use device::{VirtualBackend, cause_of_loss};
pub use experts::VirtualExpertSum;
pub use lanes::{LATE_US, LaneUse, VirtualMark};
pub use options::{CopyModel, Modelled, RoutingModel, VirtualMode, VirtualOptions};
pub use sampling::VirtualTokens;
pub use slots::VirtualSlot;
pub use tensor::{
    VirtualHostCopy, VirtualIncoming, VirtualKv, VirtualTensor, VirtualVector, VirtualWeight,
};
