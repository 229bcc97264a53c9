//! Errors at the device boundary.

/// An operation that a backend could not carry out.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Operands whose shapes do not fit each other; the caller's fault.
    #[error("{op}: {detail}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The operand, with its shape and the expected one.
        detail: String,
    },
    /// The device has too little memory.
    #[error(
        "{device} has too little memory for {what} ({needed_bytes} bytes)\n  give it more memory, or choose a smaller model, KV cache, batch or ring of experts"
    )]
    OutOfMemory {
        /// Name of the device.
        device: String,
        /// Description of the allocation.
        what: String,
        /// Size of the allocation, bytes.
        needed_bytes: u64,
    },
    /// The requested instruction set is not available on this CPU.
    #[error(
        "--isa {asked} is not available on this CPU (it has {available})\n  use --isa auto, or one of those"
    )]
    IsaUnavailable {
        /// The requested instruction set.
        asked: String,
        /// Those that the CPU has, comma-separated.
        available: String,
    },
    /// The device no longer answers, to this process or to another.
    #[error(
        "{device} does not answer: {detail}\n  see the kernel's log, reset or replace the device, or do without it (--device cpu; in a deployment spec.prefill.gpusPerWorker: 0)"
    )]
    DeviceLost {
        /// Name of the device.
        device: String,
        /// The device's message.
        detail: String,
    },
    /// The device itself reported a fault.
    #[error("{device}: {detail}")]
    Device {
        /// Name of the device.
        device: String,
        /// The device's message.
        detail: String,
    },
}
