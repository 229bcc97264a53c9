//! Model files: safetensors, config.json, tokenizer, chat template; bytes become typed views.
//!
//! **Invariant:** nothing here knows how a model computes. A file is checked whole before any of it is used: every
//! offset lies in the file, every shape fits its bytes, every dimension is bounded, so that later layers
//! may trust sizes. Weights are handed out as slices of the mapped file, never copied or altered.
//!
//! **Invariant:** no input panics. Each error names the file or field, the value, and what to do.

mod checkpoint;
mod config;
mod error;
pub mod safetensors;

pub use checkpoint::{Checkpoint, CheckpointFile, TensorInfo};
pub use config::{
    Architecture, AttentionConfig, Fp8Config, ModelConfig, MoeConfig, RopeConfig, RopeScaling,
    ScoreFunction,
};
pub use error::FormatError;
pub use hearth_kernels::{BlockScales, DType, HostMatrix, SCALE_BLOCK};
