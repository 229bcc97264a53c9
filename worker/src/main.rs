//! `hearth-worker`: a single process of a plan (gateway, prefill, decode), and the tools that work on a model.

use std::process::ExitCode;

use clap::Parser;

mod allocator;
mod cli;
mod convert;
mod device;
mod environment;
mod load;
mod logging;
mod lost;
mod otlp;
mod roles;
mod signals;
mod tools;
mod trace_file;
mod virtual_device;

fn main() -> ExitCode {
    signals::end_when_told();
    allocator::return_large_buffers();
    let cli = cli::Cli::parse();
    let environment = environment::Environment::read(|name| std::env::var_os(name));
    logging::init(&environment);
    signals::explain_bus_errors();
    match cli.run(&environment) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::say_last(logging::sentence(&error));
            lost::exit_code(&error)
        }
    }
}
