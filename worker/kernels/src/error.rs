//! What can go wrong at the device boundary.

/// An operation that a backend could not carry out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Operands whose shapes do not fit each other; a fault of the caller.
    #[error("{op}: {detail}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// Which operand, with its shape and the expected one.
        detail: String,
    },
    /// The device has too little memory.
    #[error(
        "{device} has too little memory for {what} ({needed_bytes} bytes)\n  give it more memory, or choose a smaller model, KV cache or batch"
    )]
    OutOfMemory {
        /// Which device.
        device: String,
        /// What was to be allocated.
        what: String,
        /// How much it needed.
        needed_bytes: u64,
    },
    /// An instruction set was asked for that this CPU does not have.
    #[error(
        "--isa {asked} is not available on this CPU (it has {available})\n  use --isa auto, or one of those"
    )]
    IsaUnavailable {
        /// The instruction set that was asked for.
        asked: String,
        /// Those that the CPU has, comma separated.
        available: String,
    },
    /// The device itself reported a fault.
    #[error("{device}: {detail}")]
    Device {
        /// Which device.
        device: String,
        /// What it said.
        detail: String,
    },
}
