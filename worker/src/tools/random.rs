//! `hearth-worker random`: a random-weight checkpoint of any supported architecture and size, for benchmarks.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use hearth_formats::{ModelConfig, RandomCheckpoint, write_random};
use hearth_model::{modules, tensors};

/// Arguments of `random`.
#[derive(Args)]
pub(crate) struct RandomArgs {
    /// A config.json in the published style
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// How matrices are stored
    #[arg(long, value_enum)]
    dtype: DTypeArg,
    /// Directory to write config.json and safetensors into
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Seed that makes the weights reproducible
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DTypeArg {
    /// bfloat16
    Bf16,
    /// FP8 E4M3 with 128×128 scales; embeddings, routers, norms and head stay bfloat16, as DeepSeek publishes them
    Fp8,
}

/// Size of one shard in bytes, typical of large published checkpoints.
const SHARD_BYTES: u64 = 4 << 30;

/// Writes the checkpoint.
pub(crate) fn run(args: &RandomArgs) -> anyhow::Result<()> {
    let json = std::fs::read_to_string(&args.config)
        .with_context(|| format!("--config {} cannot be read", args.config.display()))?;
    let config = ModelConfig::parse(&json)?;
    let tensors = tensors(&modules(&config)?);
    let checkpoint = RandomCheckpoint {
        config_json: &json,
        tensors: &tensors,
        fp8: args.dtype == DTypeArg::Fp8,
        seed: args.seed,
        max_shard_bytes: SHARD_BYTES,
    };
    let bytes = write_random(&args.out, &checkpoint, &mut |_, _| {})?;
    crate::logging::say(format_args!(
        "{} tensors, {:.2} GiB in {}",
        tensors.len(),
        bytes as f64 / (1u64 << 30) as f64,
        args.out.display()
    ));
    Ok(())
}
