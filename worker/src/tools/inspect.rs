//! `hearth-worker inspect`: writes a model's facts as the container's termination message.
//!
//! A kubelet keeps at most 4,096 bytes of a container's termination message. A model that cannot be served is rejected
//! here, before anything is planned for it.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

use super::facts;
use crate::logging;

/// Size limit of a termination message in bytes.
const REPORT_BYTES: usize = 4096;

/// Arguments of `inspect`.
#[derive(Args)]
pub(crate) struct InspectArgs {
    /// Directory with config.json and safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// File for the facts as JSON, or for what is wrong with the model
    #[arg(long, value_name = "FILE")]
    report: PathBuf,
}

/// Reads the model and writes the report.
pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let outcome = inspect(&args.model);
    let text = match &outcome {
        Ok(json) => json.clone(),
        Err(error) => clip(&logging::sentence(error)).to_owned(),
    };
    // Written in place: the file may be a mount, which cannot be replaced by renaming.
    std::fs::write(&args.report, text)
        .with_context(|| format!("--report {} cannot be written", args.report.display()))?;
    outcome.map(drop)
}

fn inspect(directory: &Path) -> anyhow::Result<String> {
    let json = serde_json::to_string(&facts::read(directory, true)?)?;
    if json.len() > REPORT_BYTES {
        bail!(
            "the facts of {} take {} bytes, and a report holds {REPORT_BYTES}\n  shorten the names in its config.json",
            directory.display(),
            json.len()
        );
    }
    Ok(json)
}

/// Clips a text to the size of a report.
fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(REPORT_BYTES)]
}
