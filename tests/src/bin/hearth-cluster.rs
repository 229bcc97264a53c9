//! Manual control of the test cluster.
//!
//!     hearth-cluster up [NODES]    a cluster with DNS, metrics and a fake GPU on its last node, until Ctrl-C
//!     hearth-cluster down          removes what runs that were killed have left
//!     hearth-cluster keep ID [--nodes]    for the harness: tears the cluster ID down when standard input ends

#![forbid(unsafe_code)]

use std::io::Read;
use std::process::ExitCode;

use hearth_tests::cluster::{Cluster, Options, keep, sweep};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["up"] => up(2),
        ["up", nodes] if nodes.parse::<usize>().is_ok_and(|nodes| nodes <= 9) => {
            up(nodes.parse().unwrap_or_default())
        }
        ["down"] => sweep(),
        ["keep", id] => keep(id, false),
        ["keep", id, "--nodes"] => keep(id, true),
        _ => {
            eprintln!("usage: hearth-cluster up [NODES, 0 to 9] | down");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a cluster and holds it until standard input ends or the process is killed, which the keeper notices.
fn up(nodes: usize) -> anyhow::Result<()> {
    let options = Options {
        nodes,
        controllers: true,
        dns: nodes > 0,
        metrics_server: nodes > 0,
        fake_gpu: (nodes > 0).then_some(nodes).into_iter().collect(),
        audit: true,
        breaks: true,
        ..Options::default()
    };
    let cluster = Cluster::start(&options).map_err(|skip| anyhow::anyhow!("{skip}"))?;
    println!("export KUBECONFIG={}", cluster.kubeconfig().display());
    eprintln!("logs: {}", cluster.logs().display());
    eprintln!("Ctrl-C removes the cluster.");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
