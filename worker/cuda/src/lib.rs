//! The CUDA backend: every operation of the engine on one NVIDIA GPU.
//!
//! The architecture, top-down: [`CudaBackend`] implements [`hearth_kernels::Backend`] (`backend/`, one file per
//! operation group) by pushing commands into a queue (`queue/`: streams, recorded steps, CUDA graphs) that run kernels
//! (`compile/`: NVRTC and its cache on disk; `../kernels/*.cu`: the kernels themselves) on memory (`memory/`: a pool
//! under a hard budget, pinned memory, uploads from mapped files) of a device (`driver/`). For a trace, `recorder` marks
//! what the queue launches and what is copied to slots.
//!
//! **Invariant**: batch-invariant numerics. Each output element has one accumulation order, whichever kernel computes
//! it; the rules are in `kernels/README.md`.
//!
//! **Invariant**: libcuda and libnvrtc are loaded when the first GPU is requested. Nothing here runs before that.

mod backend;
mod compile;
mod driver;
mod memory;
mod queue;
mod recorder;

pub use backend::{
    Activations, CopyRates, CudaBackend, CudaBank, CudaChosen, CudaExpertSum, CudaHostCopy,
    CudaIncoming, CudaKv, CudaMark, CudaOptions, CudaSlot, CudaTensor, CudaTokens, CudaVector,
    CudaWeight,
};
pub use compile::{
    CompileReport, SOURCES, Variant, all_variants, compile_all, compile_one, obstacle,
};
pub use driver::{DeviceInfo, devices};
pub use memory::CopyWays;
