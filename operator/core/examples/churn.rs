//! Deployments of mixed sizes that come, change and go on unequal nodes: how long plans take, and how much of the nodes they book
//! against first fit. Ends with an error if anything is ever booked twice. `docs/benchmarks/churn.sh` runs it.

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hearth_controller_core::testing::churn::{Churn, Figures, Mix, Setting, Utilisation};

/// Numbers that may be given, in this order, and what they are otherwise.
const NUMBERS: [(&str, usize); 7] = [
    ("STEPS", 10_000),
    ("DEPLOYMENTS", 200),
    ("NODES", 50),
    ("SEED", 1),
    ("RINGS_PER_MILLE", 0),
    ("RESTS", 0),
    ("BROKEN_PERCENT", 0),
];

fn main() -> ExitCode {
    let mut given = std::env::args().skip(1);
    let mut numbers = NUMBERS.map(|(_, number)| number);
    for number in &mut numbers {
        let Some(text) = given.next() else { break };
        match text.parse() {
            Ok(given) => *number = given,
            Err(_) => return usage(),
        }
    }
    if given.next().is_some() {
        return usage();
    }
    let [
        steps,
        deployments,
        nodes,
        seed,
        rings_per_mille,
        rests,
        broken_percent,
    ] = numbers;
    let has_first_fit = rests == 0 && broken_percent == 0;
    let setting = Setting {
        nodes,
        deployments,
        mix: Mix {
            rings_per_mille,
            rests: rests > 0,
            broken_percent,
        },
        retries: 2,
        step: Duration::from_secs(15),
        times_planner: true,
    };
    let build = if cfg!(debug_assertions) {
        "dev"
    } else {
        "release"
    };
    println!(
        "{steps} steps, {deployments} deployments on {nodes} nodes, seed {seed}, {rings_per_mille} of a thousand of them rings; a {build} build"
    );
    let mut churn = Churn::new(seed as u64, setting, has_first_fit, watch);
    for step in 1..=steps {
        if let Err(why) = churn.step() {
            eprintln!("booked twice: {why}");
            return ExitCode::FAILURE;
        }
        if step % 1000 == 0 {
            eprintln!("{step} steps in {:.0} s", watch().as_secs_f64());
        }
    }
    println!("nothing is booked twice after any step");
    if rests > 0 {
        let preloads = churn.figures().preloads;
        println!("workers started without a request {preloads} times");
    }
    times(churn.figures());
    if let Some(first_fit) = churn.first_fit() {
        shares(&churn.figures().utilisation, first_fit);
    }
    ExitCode::SUCCESS
}

fn usage() -> ExitCode {
    let names = NUMBERS.map(|(name, number)| format!("[{name}: {number}]"));
    eprintln!("usage: churn {}", names.join(" "));
    ExitCode::from(2)
}

/// Time since the first call.
// A benchmark measures time; decisions do not.
#[allow(clippy::disallowed_methods)]
fn watch() -> Duration {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    BEGAN.get_or_init(Instant::now).elapsed()
}

fn times(figures: &Figures) {
    println!("what, number, median ms, p99 ms, max ms, more than 50 ms");
    let rows = [
        ("plans, the planner alone", &figures.plans_ms),
        ("rings, the planner alone", &figures.ring_plans_ms),
        (
            "decisions that made a plan",
            &figures.decisions_with_plan_ms,
        ),
        (
            "decisions that found no room",
            &figures.decisions_without_room_ms,
        ),
        ("other decisions", &figures.other_decisions_ms),
    ];
    for (what, ms) in rows {
        let mut ms = ms.clone();
        ms.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let at = (ms.len() as f64 * part).ceil() as usize;
            ms.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let slow = ms.iter().filter(|ms| **ms > 50.0).count();
        println!(
            "{what}, {}, {:.2}, {:.2}, {:.2}, {slow}",
            ms.len(),
            at(0.5),
            at(0.99),
            at(1.0)
        );
    }
    println!(
        "plans that the planner alone does not make again: {}",
        figures.differ
    );
}

fn shares(hearth: &Utilisation, first_fit: &Utilisation) {
    println!("what, Hearth, first fit, ratio");
    let of = |it: &Utilisation| [it.memory(), it.gpu_memory(), it.both(), it.placed()];
    let names = [
        "share of the nodes' memory",
        "share of the GPUs' memory",
        "share of both",
        "deployments with a place",
    ];
    let shares = of(hearth).into_iter().zip(of(first_fit));
    for (what, (ours, theirs)) in names.into_iter().zip(shares) {
        println!("{what}, {ours:.4}, {theirs:.4}, {:.4}", ours / theirs);
    }
}
