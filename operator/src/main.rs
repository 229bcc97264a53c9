//! `hearth`: serves InferenceDeployments, on this machine or as the operator of a cluster, and shows what runs and why.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod archive;
mod chat;
mod cli;
mod controller;
mod http;
mod logs;
mod plan;
mod ports;
mod probe;
mod source;
mod state;
mod status;
mod table;
mod ui;
mod up;
mod worker;

/// The operator keeps many small things for long beside large ones for moments; this allocator keeps them in half of the
/// memory. `.cargo/config.toml` sets it up.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    match cli::Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            ui::print_error(&error);
            ExitCode::FAILURE
        }
    }
}
