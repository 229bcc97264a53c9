//! Many deployments on a control plane of its own: `hearth-scale [DEPLOYMENTS [NODES [IDLE_SECONDS [FOREIGN_PODS]]]]`, by
//! default 1000 on 300, 600 s, and 5000 Pods of somebody else's.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use hearth_tests::cluster::Options;
use hearth_tests::operator::{Scale, Stand};

fn main() -> ExitCode {
    let numbers: Vec<usize> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.parse().ok())
        .collect();
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
    ExitCode::SUCCESS
}
