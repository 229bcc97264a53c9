//! Shared blocks and one file per architecture, generic over the backend.
//!
//! A model is a `Decoder`: a declarative description of blocks, made by one file per architecture under
//! `arch`. [`Model`] runs any of them; [`modules`] lists their weights by module, which is the grain at which a
//! [`Residency`] policy brings weights to where they are used.
//!
//! **Invariant**: no block knows where its weights lie, how they are stored or which device runs them. Weights come by
//! [`Residency::acquire`], computation goes through [`hearth_kernels::Backend`].
//!
//! **Invariant**: a row's result is a function of its tokens, its positions and the weights. Nothing here looks at the size of the batch
//! or at the bounds of a chunk; routed experts are summed in the order of their index.
#![forbid(unsafe_code)]

mod arch;
mod batch;
mod blocks;
mod decoder;
mod error;
mod model;
mod module;
mod observer;
mod residency;

pub use batch::Batch;
pub use blocks::rope::{rope_table, yarn_softmax_factor};
pub use error::{ModelError, ResidencyError};
pub use model::{Model, kv_layout, modules};
pub use module::{ModuleId, ModuleSpec, ModuleWeights, TensorShape, TensorSpec};
pub use observer::Observer;
pub use residency::{Guard, Release, Residency, ResidencyStats};
