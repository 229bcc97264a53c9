//! The engine's device boundary, and its CPU implementation.
//!
//! The model reaches a device only through [`Backend`]. The scalar kernels in
//! `reference` are the specification; each kernel under `arch` has a test against them.
//!
//! **Invariant**: every operation is batch-invariant. An output row is a function of its own input row,
//! its absolute position and the weights, with one fixed accumulation order, whatever else is
//! in the batch and however the rows were chunked.

pub mod affinity;
pub mod checks;
pub mod compose;
pub mod convert;
pub mod error;
pub mod expert_sum;
pub mod host;
pub mod kv;
pub mod ops;
pub mod params;
pub mod probe;
pub mod reference;
pub mod sampling;
pub mod thread_pool;
pub mod trace;

mod arch;
mod cpu;

pub use arch::Isa;
pub use convert::quantize_fp8_block;
pub use cpu::{CpuBackend, CpuExpertSum, CpuKv, CpuOptions, CpuTensor};
pub use error::KernelError;
pub use host::{BlockScales, DType, HostMatrix, SCALE_BLOCK, StorageFormat};
pub use kv::{BlockId, KvDType, KvLayout};
pub use ops::Backend;
pub use params::{
    AttentionSpec, ExpertCall, ExpertProducts, ExpertWeights, Heads, Latents, MlaHeads, RopeLayout,
    RopeTable, RouterScore, RouterSpec, Routing, Span,
};
pub use probe::{PeakGflops, peak_gflops, read_bandwidth_gbps};
pub use sampling::{SampleFault, SampleSpec};
