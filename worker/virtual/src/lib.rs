//! A virtual device, to try, test and measure without a GPU what a plan does with one.
//!
//! It has memory of a fixed size: weights are copied into it, and the KV cache, activations and the experts' working room
//! are taken out of it, to the byte. What does not fit is refused as a GPU refuses it. The CPU's kernels compute, so tokens are
//! those of the CPU; nothing is claimed about time.
//!
//! **Invariant**: no operation writes a tensor whose bytes were not taken from the device's memory.
#![forbid(unsafe_code)]

mod attention;
mod device;
mod elementwise;
mod experts;
mod linear;
mod memory;
mod slots;
mod tensor;

pub use device::{VirtualBackend, VirtualOptions};
pub use experts::VirtualExpertSum;
pub use slots::VirtualSlot;
pub use tensor::{VirtualKv, VirtualTensor, VirtualVector, VirtualWeight};
