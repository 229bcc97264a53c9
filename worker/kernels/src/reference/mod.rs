//! The specification: scalar kernels over plain slices, one straightforward loop each, with products summed in
//! f64 so that the result is correct except for the last bit. They are never optimised;
//! fast kernels are tested against them.
//!
//! Callers are responsible for shapes here: these functions panic on slices of the wrong length, and
//! [`CpuBackend`](crate::CpuBackend) checks shapes before it calls them.

mod attention;
mod dequant;
mod expert_sum;
mod ffn;
mod linear;
mod mla;
mod norm;
mod rope;
mod router;

pub use attention::attention_head;
pub use dequant::{dequant, dequant_row};
pub use expert_sum::expert_sum;
pub use ffn::{expert, silu, silu_mul};
pub use linear::{linear, linear_row};
pub use mla::{expand_latents, mla_absorb, mla_expand};
pub use norm::rms_norm;
pub use rope::{rope, rope_head};
pub use router::route_token;
