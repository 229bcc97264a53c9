//! `hearth-worker inspect`: a model's facts, left where a supervisor reads the last words of a process.
//!
//! A kubelet keeps at most 4,096 bytes of a container's termination message. What cannot be served is refused here,
//! before anything is planned for it.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;

use super::facts;
use crate::logging;

/// What a termination message holds.
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

/// Reads the model and reports.
pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let outcome = inspect(&args.model);
    let text = match &outcome {
        Ok(json) => json.clone(),
        Err(error) => clip(&logging::sentence(error)).to_owned(),
    };
    // In place: the file may be a mount, which cannot be renamed over.
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

/// Clips a text to what a report holds.
fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(REPORT_BYTES)]
}
