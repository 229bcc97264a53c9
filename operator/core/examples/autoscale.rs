//! Load of five shapes against fixed pools, an autoscaler of CPU use and Hearth's own, alone and through planner and rollout: a table
//! as CSV, and the course of some. `docs/benchmarks/autoscale.py` runs it and draws the plots.

use std::process::ExitCode;

use hearth_controller_core::autoscale::queueing::StepTime;
use hearth_controller_core::testing::traffic::planned::Planned;
use hearth_controller_core::testing::traffic::rules::{Auto, Fixed, Hpa};
use hearth_controller_core::testing::traffic::shapes::Shape;
use hearth_controller_core::testing::traffic::{Outcome, World, simulate};

/// Times as measured on the Zen 4 machine of docs/benchmarks.md (Qwen3-MoE in FP8, one thread): 256 prompt tokens in 1783 ms,
/// steps of 19.5 ms with one stream and 89.7 ms with eight. `start_s` is a parameter.
fn world(start_s: f64) -> World {
    World {
        prefill_ms_per_token: 1783.0 / 256.0,
        step: StepTime::through(19.5, 8.0, 89.7),
        slots_per_worker: 6,
        start_s,
        max: 8,
        ttft_ms: 6000.0,
        tpot_ms: 75.0,
    }
}

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<f64>());
    let (Ok(start_s), Ok(seed), None) = (
        numbers.next().unwrap_or(Ok(30.0)),
        numbers.next().unwrap_or(Ok(1.0)),
        numbers.next(),
    ) else {
        eprintln!("usage: autoscale [SECONDS UNTIL A WORKER IS READY] [SEED]");
        return ExitCode::from(2);
    };
    println!("kind,shape,rule,setting,requests,kept,worker_hours");
    let mut courses = Vec::new();
    for shape in Shape::ALL {
        let requests = shape.requests(seed as u64, 2.0);
        let told = |rule: &str, setting: String, outcome: &Outcome| {
            let (name, all, kept) = (shape.name(), outcome.requests, outcome.kept);
            let hours = outcome.worker_hours;
            println!("outcome,{name},{rule},{setting},{all},{kept},{hours:.3}");
        };
        let auto = simulate(world(start_s), &requests, &mut Auto::default());
        told("Auto", String::new(), &auto);
        courses.push((shape, "Auto", auto));
        let mut planned = Planned::new(world(start_s));
        let through = simulate(world(start_s), &requests, &mut planned);
        told("planned", String::new(), &through);
        if !planned.moved.is_empty() {
            let moved = planned.moved.join(", ");
            eprintln!("{}: {moved} were moved or replaced", shape.name());
            return ExitCode::FAILURE;
        }
        for target in (10..=100).step_by(5) {
            let hpa = simulate(
                world(start_s),
                &requests,
                &mut Hpa::new(f64::from(target) / 100.0),
            );
            told("HPA", target.to_string(), &hpa);
            if target == 80 {
                courses.push((shape, "HPA", hpa));
            }
        }
        for prefill in 1..=world(start_s).max {
            for decode in 1..=world(start_s).max {
                let fixed = simulate(world(start_s), &requests, &mut Fixed([prefill, decode]));
                told("fixed", format!("{prefill}+{decode}"), &fixed);
            }
        }
    }
    println!("kind,shape,rule,seconds,prefill,decode,unanswered");
    for (shape, rule, outcome) in courses {
        for (at_s, prefill, decode, open) in outcome.course {
            println!(
                "course,{},{rule},{at_s:.0},{prefill},{decode},{open}",
                shape.name()
            );
        }
    }
    ExitCode::SUCCESS
}
