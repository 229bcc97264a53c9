//! Halda against all answers to small problems, and how long it takes for large ones: the figures of docs/benchmarks.md.

use std::process::ExitCode;
use std::time::Instant;

use hearth_planner::halda::testing::{
    Compared, Programs, choice_against_all_rings, problem_of, problems_by_head,
    programs_against_all_splits, small_problem, small_problems_by_head, tight_problems_by_head,
};
use hearth_planner::halda::{Limits, Problem, choose_head};

/// Simulations of one choice that is compared: fewer than there are rings of the largest of the small problems.
const SIMULATIONS: usize = 6000;
/// Large problems whose choice is timed.
const TIMED: u64 = 16;

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let (Ok(problems), None) = (numbers.next().unwrap_or(Ok(1000)), numbers.next()) else {
        eprintln!("usage: halda [PROBLEMS]");
        return ExitCode::from(2);
    };
    objective(problems);
    let limits = Limits {
        simulations: SIMULATIONS,
        ..Limits::default()
    };
    let of_one = |seed| choice_against_all_rings(&[small_problem(seed)], limits);
    ratios("the first device as the head", (0..problems).map(of_one));
    // All heads together have the limits of one choice.
    let by_head = |seed| choice_against_all_rings(&small_problems_by_head(seed), Limits::default());
    ratios("any device as the head", (0..problems).map(by_head));
    for (devices, layers) in [(4, 32), (8, 80), (16, 80)] {
        let one = |seed| vec![problem_of(seed, devices, layers)];
        seconds(&format!("{devices} devices and {layers} layers"), &one);
        let by_head = |seed| problems_by_head(seed, devices, layers);
        let what = format!("{devices} devices and {layers} layers, any device as the head");
        seconds(&what, &by_head);
        let tight = |seed| tight_problems_by_head(seed, devices, layers);
        seconds(
            &format!("{what}, on slow disks with hardly enough memory"),
            &tight,
        );
    }
    ExitCode::SUCCESS
}

/// The program's answer against the lowest of all splits.
fn objective(problems: u64) {
    let compared = (0..problems).map(|seed| programs_against_all_splits(&small_problem(seed)));
    let sum = compared.fold(Programs::default(), |sum, programs| Programs {
        all: sum.all + programs.all,
        without_split: sum.without_split + programs.without_split,
        unequal: sum.unequal + programs.unequal,
    });
    println!(
        "objective: {problems} problems, {} programs, {} of them without a split that fits: {} differ from the lowest of all splits",
        sum.all, sum.without_split, sum.unequal
    );
}

/// The chosen ring against the fastest of all.
fn ratios(what: &str, compared: impl Iterator<Item = Compared>) {
    let all: Vec<Compared> = compared.collect();
    let mut ratios: Vec<f64> = all.iter().filter_map(Compared::ratio).collect();
    ratios.sort_by(f64::total_cmp);
    let (Some(worst), Some(equal)) = (
        ratios.last(),
        ratios
            .iter()
            .position(|ratio| *ratio > 1.0 + 1e-9)
            .or(Some(ratios.len())),
    ) else {
        return println!("choice, {what}: no problem has a ring that fits");
    };
    println!(
        "choice, {what}: {} problems, {} without a ring that fits; {equal} times the fastest of all rings, and at most {worst:.4} times its time",
        all.len(),
        all.len() - ratios.len()
    );
}

/// How long a choice takes, and what it comes to: the sum of a token's times over all of the problems.
fn seconds(what: &str, problems: &dyn Fn(u64) -> Vec<Problem>) {
    let mut seconds = Vec::new();
    let (mut refused, mut tokens_ms) = (0, 0.0);
    for seed in 0..TIMED {
        let problems = problems(seed);
        let begin = Instant::now();
        let choice = choose_head(&problems, Limits::default());
        seconds.push(begin.elapsed().as_secs_f64());
        match choice {
            Ok((_, choice)) => tokens_ms += choice.tpot_ms,
            Err(_) => refused += 1,
        }
    }
    seconds.sort_by(f64::total_cmp);
    if let (Some(most), Some(median)) = (seconds.last(), seconds.get(seconds.len() / 2)) {
        println!(
            "time, {what}: {median:.2} s in the median of {TIMED}, {most:.2} s at most; of {refused} of them no ring fits, and a token of the others takes {tokens_ms:.1} ms in all"
        );
    }
}
