//! Model files as typed views of their bytes: safetensors, config.json, tokenizer, chat template.
//!
//! **Invariant:** nothing here knows how a model computes. A file is checked whole before any of it is used: every
//! offset lies within the file, every shape matches its bytes, every dimension is bounded, so later layers
//! may trust sizes. Weights are handed out as slices of the mapped file, never copied or altered.
//!
//! **Invariant:** only this crate knows how the scales of a matrix are named. Others ask [`Checkpoint::parts`],
//! [`Checkpoint::stored_bytes`] and [`Checkpoint::unused`].
//!
//! **Invariant:** no input causes a panic. Each error names the file or field, the value, and the remedy.

mod chat_template;
mod checkpoint;
mod config;
mod detokenize;
mod error;
mod file;
mod generation;
mod random;
pub mod safetensors;
mod token_bound;
mod tokenizer;
mod writer;

pub use chat_template::{ChatTemplate, Clock};
pub use checkpoint::{Checkpoint, CheckpointFile, TensorInfo};
pub use config::{
    Architecture, AttentionConfig, Fp8Config, ModelConfig, MoeConfig, RopeConfig, RopeScaling,
    ScoreFunction,
};
pub use detokenize::StreamDecoder;
pub use error::FormatError;
pub use file::{MAX_CONFIG_BYTES, read_file};
pub use generation::GenerationConfig;
pub use hearth_kernels::{BlockScales, DType, HostMatrix, SCALE_BLOCK};
pub use random::{RandomCheckpoint, TensorKind, write_random};
pub use tokenizer::{Encoded, Tokenizer};
pub use writer::{CheckpointWriter, TensorPlan};
