//! Pure function from deployment spec, model facts and node profiles to a plan.
//!
//! [`plan`] makes every choice (ranks, nodes, CPUs, NUMA nodes, residency, KV budgets, chunk sizes, routing) and
//! explains it with numbers; the operator and `hearth up` execute the plan and choose nothing. What does not fit is
//! rejected with the numbers and a change that would fit.
//!
//! Architecture invariant: no clock, no randomness, no I/O, no kube: the same input gives the same
//! plan, byte for byte.

#![forbid(unsafe_code)]

mod advice;
mod candidates;
mod checks;
mod cpus;
mod disks;
mod draft;
mod error;
mod estimator;
mod expert_parallel;
mod gpus;
pub mod halda;
mod host_experts;
mod hybrid;
mod input;
mod latents;
mod link;
#[cfg(test)]
mod measured;
mod memory;
mod node_ranks;
mod numerics;
mod operations;
mod peer_ranks;
mod peers;
mod piped_ring;
mod place;
mod plan;
mod predict;
mod reasons;
mod ring;
mod ring_error;
mod ring_problem;
mod ring_simulator;
mod routing;
mod sentences;
mod stream_loading;
mod write;

pub use cpus::{CpuOffer, CpuRoom, format_cpu_list};
pub use error::{Advice, AskedBy, PlanError};
pub use gpus::GpuOffer;
pub use input::PlanInput;
pub use link::LINK_EFFICIENCY;
pub use memory::LEAST_RESERVE_BYTES;
pub use numerics::mixed_pools;
pub use plan::{check_model, check_spec, plan};
pub use predict::{
    COMPUTE_EFFICIENCY, GPU_COMPUTE_EFFICIENCY, GPU_EXACT_COMPUTE_EFFICIENCY,
    GPU_LAYER_OVERHEAD_MS, GPU_READ_EFFICIENCY, LAYER_OVERHEAD_MS, PAGE_CACHE_EFFICIENCY,
    READ_EFFICIENCY,
};
