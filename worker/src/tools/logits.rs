//! `hearth-worker logits`: writes every position's logits, for comparison with other engines.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use hearth_kernels::Backend;
use hearth_model::Model;
use safetensors::tensor::{Dtype, TensorView};

use super::session::Session;
use crate::cli::ModelArgs;
use crate::device::on_device;
use crate::environment::Environment;
use crate::load::{self, LoadOptions};

/// Arguments of `logits`.
#[derive(Args)]
pub(crate) struct LogitsArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, comma separated
    #[arg(long, value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// Where to write tensor `logits` [T, V] float32
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
    /// Prompt tokens per step (default: all at once); the logits are the same bits either way
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunk: Option<u32>,
}

/// Computes the logits and writes them.
pub(crate) fn run(args: &LogitsArgs, environment: &Environment) -> anyhow::Result<()> {
    args.model.must_compute("logits")?;
    let options = LoadOptions::from_args(&args.model, environment)?;
    let loaded = load::open(&args.model.model, options, &mut |_| {})?;
    on_device!(loaded, loaded => compute(args, &loaded.model))
}

fn compute<B: Backend>(args: &LogitsArgs, model: &Model<B>) -> anyhow::Result<()> {
    let vocab = model.config().vocab_size;
    let mut session = Session::new(model, 1, args.tokens.len(), args.model.kv_dtype())?;
    let chunk = args.chunk.map_or(args.tokens.len(), |chunk| chunk as usize);
    let mut logits = Vec::with_capacity(args.tokens.len() * vocab);
    for tokens in args.tokens.chunks(chunk) {
        logits.extend(session.step(&[(0, tokens)], true)?);
    }
    write(&args.out, args.tokens.len(), vocab, &logits)?;
    crate::logging::say(format_args!(
        "{} positions × {vocab} logits in {}",
        args.tokens.len(),
        args.out.display()
    ));
    Ok(())
}

/// Writes a safetensors file with this single tensor.
fn write(path: &Path, rows: usize, vocab: usize, logits: &[f32]) -> anyhow::Result<()> {
    let bytes: Vec<u8> = logits
        .iter()
        .flat_map(|logit| logit.to_le_bytes())
        .collect();
    let view = TensorView::new(Dtype::F32, vec![rows, vocab], &bytes)?;
    safetensors::serialize_to_file([("logits", view)], None, path)
        .with_context(|| format!("--out {} cannot be written", path.display()))
}
