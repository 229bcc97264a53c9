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

fn main() -> ExitCode {
    match cli::Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            ui::print_error(&error);
            ExitCode::FAILURE
        }
    }
}
