//! `hearth-worker`: one process of a plan (gateway, prefill, decode), and the tools that work on a model.

use std::process::ExitCode;

use clap::Parser;

mod cli;
mod convert;
mod device;
mod load;
mod logging;
mod roles;
mod signals;
mod tools;

fn main() -> ExitCode {
    signals::end_when_told();
    let cli = cli::Cli::parse();
    logging::init();
    signals::explain_bus_errors();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::say(format_args!("error: {}", logging::sentence(&error)));
            ExitCode::FAILURE
        }
    }
}
