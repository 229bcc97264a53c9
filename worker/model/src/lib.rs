//! Shared blocks and one file per architecture, generic over the backend.
//!
//! A model is a `Decoder`: a declarative description of blocks, built by one file per architecture under
//! `arch`. [`Model`] runs any of them, step by step over a [`Flight`] that may wait between two modules;
//! [`Model::forward`] is the plain program of these steps. [`modules`] lists the weights by module, the granularity at
//! which a [`Residency`] policy brings weights to where they are used.
//!
//! **Invariant**: no block knows where its weights are, how they are stored or which device runs them. Weights are
//! obtained from [`Residency::acquire`], and all computation goes through [`hearth_kernels::Backend`].
//!
//! **Invariant**: a row's result is a function of its tokens, its positions and the weights. Nothing here depends on
//! batch size or chunk boundaries; the outputs of routed experts are added in the order of
//! [`hearth_kernels::expert_sum`].
#![forbid(unsafe_code)]

mod arch;
mod batch;
mod blocks;
mod context_parallel;
mod decoder;
mod error;
mod experts;
mod flight;
mod gather;
mod model;
mod module;
mod observer;
mod part;
mod peering;
mod peers;
mod programs;
mod residency;
mod shares;
mod sites;
mod steps;
mod wire;

pub use batch::{Batch, PassSpec, Rows};
pub use blocks::mla::EXPANSION_TILE_ROWS;
pub use blocks::rope::{rope_table, yarn_softmax_factor};
pub use error::{ModelError, PANICKED, ResidencyError};
pub use experts::CACHED_STEP_ROWS;
pub use flight::{Flight, PASS_TILES};
pub use model::{ExpansionRoom, Model, kv_layout, modules};
pub use module::{ModuleId, ModuleSpec, ModuleWeights, TensorShape, TensorSpec, tensors};
pub use observer::Observer;
pub use part::{Away, OtherRanks, Part};
pub use peering::{ExpertParallel, Sharing};
pub use peers::{Exchange, Exchanged, GroupRows, Membership, Peers, SentKv};
pub use residency::{ExpertCache, Guard, Kept, Release, Residency, ResidencyStats, StreamedStats};
pub use shares::{ExpertShare, modules_of};
pub use sites::Sites;
