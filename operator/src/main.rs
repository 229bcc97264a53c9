//! `hearth`: serves an InferenceDeployment on this machine, and shows what it would do and does.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod chat;
mod cli;
mod http;
mod logs;
mod plan;
mod ports;
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
