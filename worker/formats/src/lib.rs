//! Model files: safetensors, config.json, tokenizer, chat template; bytes become typed views.
//!
//! **Invariant:** nothing here knows how a model computes. A file is checked whole before any of it is used: every
//! offset lies in the file, every shape fits its bytes, every dimension is bounded, so that later layers
//! may trust sizes. Weights are handed out as slices of the mapped file, never copied or altered.
//!
//! **Invariant:** no input panics. Each error names the file or field, the value, and what to do.

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
