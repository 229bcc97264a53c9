//! `hearth-worker profile`.

use std::path::PathBuf;

use clap::Args;
use hearth_profiler::ProfileOptions;

/// Arguments of `profile`.
#[derive(Args)]
pub(crate) struct ProfileArgs {
    /// Print the profile as JSON (the spec of a NodeProfile)
    #[arg(long)]
    json: bool,
    /// Measure the disk that holds this directory
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
}

/// Measures and prints.
pub(crate) fn run(args: &ProfileArgs) -> anyhow::Result<()> {
    let profile = hearth_profiler::profile(&ProfileOptions {
        disk: args.disk.clone(),
        ..ProfileOptions::default()
    })?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&profile)?);
    } else {
        print!("{}", hearth_profiler::summary(&profile));
    }
    Ok(())
}
