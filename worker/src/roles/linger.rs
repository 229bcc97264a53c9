//! `hearth-worker linger`: a pause before a process is told to stop.
//!
//! When a Pod is deleted, its address is removed from the Service and its processes are told to stop at the same
//! time. A gateway that closes its port at once would refuse clients whose node has not seen the change yet. As a
//! container's preStop hook, this command delays the stop for as long as that takes; an image without a shell has no
//! other way to wait.

use std::time::Duration;

use clap::Args;

use crate::signals;

/// Arguments of `linger`.
#[derive(Args)]
pub(crate) struct LingerArgs {
    /// How long to wait
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(..=3600))]
    seconds: u32,
}

/// Waits; returns at once on SIGTERM.
pub(crate) fn run(args: &LingerArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(u64::from(args.seconds))) => {}
            () = signals::termination() => {}
        }
    });
    Ok(())
}
