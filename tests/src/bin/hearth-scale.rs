//! Many deployments on a control plane of its own: `hearth-scale [DEPLOYMENTS [NODES [IDLE_SECONDS [FOREIGN_PODS]]]]
//! [--then COMMAND]`, by default 1000 on 300, 600 s, and 5000 Pods that are not Hearth's. At the end the shell runs
//! the command while everything is still there, with `KUBECONFIG` set.

#![forbid(unsafe_code)]

use std::process::{Command, ExitCode};
use std::time::Duration;

use hearth_tests::cluster::Options;
use hearth_tests::operator::{Scale, Stand};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let mut numbers: Vec<usize> = Vec::new();
    let mut then = None;
    while let Some(argument) = arguments.next() {
        match argument.parse() {
            Ok(number) => numbers.push(number),
            Err(_) if argument == "--then" => then = arguments.next(),
            Err(_) => {
                eprintln!(
                    "error: {argument:?} is not a number\n  write hearth-scale [DEPLOYMENTS [NODES [IDLE_SECONDS [FOREIGN_PODS]]]] [--then COMMAND]"
                );
                return ExitCode::FAILURE;
            }
        }
    }
    let number = |index: usize, default: usize| numbers.get(index).copied().unwrap_or(default);
    let scale = Scale {
        deployments: number(0, 1000),
        nodes: number(1, 300),
        idle: Duration::from_secs(number(2, 600) as u64),
        foreign_pods: number(3, 5000),
    };
    let Some(stand) = Stand::start_or_skip(&Options::default()) else {
        return ExitCode::FAILURE;
    };
    println!("{}", scale.run(&stand));
    let Some(command) = then else {
        return ExitCode::SUCCESS;
    };
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &command])
        .env("KUBECONFIG", stand.cluster().kubeconfig());
    match shell.status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(status) => {
            eprintln!("error: {command}: {status}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: sh: {error}");
            ExitCode::FAILURE
        }
    }
}
