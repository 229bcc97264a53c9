//! The whole choice against all rings, by the simulator.

use std::time::Instant;

use super::by_hand::{self, GIB, device, equal_layers, problem};
use crate::halda::testing::{
    Compared, choice_against_all_rings, problem_of, small_problem, small_problems_by_head,
    tight_problems_by_head,
};
use crate::halda::{Choice, Dropped, Limits, choose};
use crate::ring_error::RingError;
use crate::ring_problem::{Layer, Problem};

/// Fewer simulations than the default, so that it is no enumeration.
const LIMITS: Limits = Limits {
    splits: 3000,
    programs: 80,
    nodes: 1600,
    simulations: 6000,
};

#[test]
fn the_choice_is_near_the_fastest_of_all_rings() {
    let (mut none, mut in_rounds, mut with_dropped) = (0, 0, 0);
    let mut worst = 1.0_f64;
    for seed in 10_000..11_000 {
        let problem = small_problem(seed);
        let compared = choice_against_all_rings(std::slice::from_ref(&problem), LIMITS);
        let Some(ratio) = ratio(&compared, seed) else {
            none += 1;
            continue;
        };
        let (_, choice) = compared.choice.unwrap();
        check(&problem, &choice);
        worst = worst.max(ratio);
        in_rounds += u32::from(choice.rounds > 1);
        with_dropped += u32::from(!choice.dropped.is_empty());
    }
    assert!(
        worst < 1.02,
        "the worst choice takes {worst} times the fastest"
    );
    // All that there is to choose occurs.
    assert!(
        none > 20 && in_rounds > 90 && with_dropped > 100,
        "{none} without a ring, {in_rounds} in rounds, {with_dropped} with a device that was dropped, {worst}"
    );
}

/// All heads share the limits of one choice, which are the planner's.
#[test]
fn the_head_is_one_of_a_ring_near_the_fastest_of_all_heads() {
    let (mut none, mut not_first) = (0, 0);
    for seed in 20_000..21_000 {
        let problems = small_problems_by_head(seed);
        let compared = choice_against_all_rings(&problems, Limits::default());
        if ratio(&compared, seed).is_none() {
            none += 1;
            continue;
        }
        let (head, choice) = compared.choice.unwrap();
        check(&problems[head], &choice);
        let limits = Limits::default();
        assert!(
            choice.effort.simulations <= limits.simulations,
            "seed {seed}: {:?}",
            choice.effort
        );
        not_first += u32::from(head > 0);
    }
    assert!(none > 20 && not_first > 300);
}

/// What is refused without a search has no ring, and what has one is found, on slow disks with hardly enough memory.
#[test]
fn what_has_no_room_is_refused_at_once() {
    let (mut refused, mut fit) = (0, 0);
    for seed in 30_000..30_150 {
        let devices = 1 + seed as usize % 4;
        let problems = tight_problems_by_head(seed, devices, 8);
        for problem in &problems {
            let compared = choice_against_all_rings(std::slice::from_ref(problem), LIMITS);
            let has_ring = ratio(&compared, seed).is_some();
            assert!(problem.may_have_room() || !has_ring, "seed {seed}");
            refused += u32::from(!problem.may_have_room());
            fit += u32::from(has_ring);
        }
    }
    assert!(refused > 50 && fit > 50, "{refused} refused, {fit} fit");
}

/// Also where weights pass through memory and KV must have room there.
#[test]
fn room_alone_says_whether_layers_that_are_alike_have_a_ring_which_is_found() {
    let (mut refused, mut fit) = (0, 0);
    for seed in 40_000..40_400 {
        let mut problem = small_problem(seed);
        let rooms = (0..problem.devices.len()).map(|device| problem.room_bytes(device));
        let layer_bytes = rooms.sum::<u64>() / problem.layers.len() as u64;
        let alike = Layer {
            kv_bytes: layer_bytes * (6 + seed % 8) / 12,
            ..problem.layers[0]
        };
        problem.layers.fill(alike);
        let compared = choice_against_all_rings(std::slice::from_ref(&problem), LIMITS);
        let has_ring = compared.fastest_ms.is_some();
        assert_eq!(problem.may_have_room(), has_ring, "seed {seed}");
        assert_eq!(compared.choice.is_ok(), has_ring, "seed {seed}");
        *(if has_ring { &mut fit } else { &mut refused }) += 1;
    }
    assert!(refused > 50 && fit > 50, "{refused} refused, {fit} fit");
}

/// How many times as long as the fastest ring the chosen one takes, which must be near; `None` if none fits, as the error
/// must say.
fn ratio(compared: &Compared, seed: u64) -> Option<f64> {
    let choice = &compared.choice;
    let Some(ratio) = compared.ratio() else {
        assert!(
            matches!(choice, Err(RingError::NoRoom { .. })),
            "seed {seed}: {choice:?}"
        );
        return None;
    };
    assert!(
        ratio < 1.05,
        "seed {seed}: {ratio} times the fastest, {choice:?}"
    );
    Some(ratio)
}

/// Checks that a choice is a ring: each layer once and in order, the head first, whole rounds alike, and all in memory that
/// must be.
fn check(problem: &Problem, choice: &Choice) {
    let covered: Vec<usize> = choice
        .windows
        .iter()
        .flat_map(|w| w.layers.clone())
        .collect();
    assert!(covered.into_iter().eq(0..problem.layers.len()));
    assert_eq!(choice.order[0], 0);
    for (round, windows) in choice
        .windows
        .chunk_by(|a, b| a.round == b.round)
        .enumerate()
    {
        let devices: Vec<usize> = windows.iter().map(|window| window.device).collect();
        let layers: usize = windows.iter().map(|window| window.layers.len()).sum();
        assert!(
            windows
                .iter()
                .all(|w| w.round == round && !w.layers.is_empty())
        );
        if round + 1 < choice.rounds {
            assert_eq!(layers, choice.layers_a_round);
        }
        if layers == choice.layers_a_round {
            assert_eq!(devices, choice.order);
        } else {
            assert!(choice.order.starts_with(&devices));
        }
    }
    let in_ring = |device: usize| choice.order.contains(&device);
    for (device, share) in choice.shares.iter().enumerate() {
        assert_eq!(share.cpu_layers + share.gpu_layers > 0, in_ring(device));
        assert_eq!(
            choice
                .dropped
                .iter()
                .any(|dropped| dropped.device == device),
            !in_ring(device)
        );
        assert!(share.gpu_bytes <= problem.gpu_room_bytes(device));
        assert!(share.kv_bytes <= problem.room_bytes(device));
        assert!(share.overflow_bytes == 0 || !problem.devices[device].must_fit);
    }
    assert!(choice.ttft_ms.is_finite() && choice.ttft_ms > 0.0);
}

/// The limits bound the work; how long that takes is printed, and a matter of benchmarks.
#[test]
fn eight_devices_and_eighty_layers_stay_within_the_limits() {
    let limits = Limits::default();
    for seed in 0..4 {
        let problem = problem_of(seed, 8, 80);
        let begin = Instant::now();
        let choice = choose(&problem, limits).unwrap();
        println!("seed {seed}: {:?}, {:?}", begin.elapsed(), choice.effort);
        check(&problem, &choice);
        assert!(
            choice.effort.programs <= limits.programs,
            "{:?}",
            choice.effort
        );
        assert!(
            choice.effort.simulations <= limits.simulations,
            "{:?}",
            choice.effort
        );
    }
}

#[test]
fn sixty_one_layers_of_two_kinds_get_a_shorter_last_round() {
    // As DeepSeek-V3 at four bits: three dense layers, then experts of which a token reads few.
    let experts = Layer {
        stored_bytes: 6 * GIB,
        read_bytes: GIB / 3,
        routed_bytes: GIB / 5,
        kv_bytes: 20 << 20,
    };
    let dense = Layer {
        stored_bytes: GIB / 3,
        read_bytes: GIB / 3,
        routed_bytes: 0,
        ..experts
    };
    let mut layers = vec![experts; 61];
    layers[..3].fill(dense);
    let devices = ["a", "b", "c", "d"].map(|name| device(name, 80 * GIB, 60.0, 5.0, &layers));
    let problem = problem(devices.to_vec(), layers);
    let choice = choose(&problem, LIMITS).unwrap();
    check(&problem, &choice);
    // Experts cannot be read ahead, and the rest is little: nothing is gained by rounds. The dense layers hardly count, so
    // the head has more layers than any other.
    assert_eq!(choice.order.len(), 4);
    let layers_of = |device: usize| choice.shares[device].cpu_layers;
    assert!((1..4).all(|device| layers_of(0) > layers_of(device)));

    // The same bytes, all read by each token, two devices with two rounds: 61 is odd.
    let layers = equal_layers(61, GIB / 2);
    let devices = ["a", "b"].map(|name| device(name, 11 * GIB, 30.0, 2.0, &layers));
    let problem = by_hand::problem(devices.to_vec(), layers);
    let choice = choose(&problem, LIMITS).unwrap();
    check(&problem, &choice);
    assert!(choice.rounds > 1, "{choice:?}");
    assert!(choice.tpot_ms < choice.objective_ms);
    assert!(61 % choice.layers_a_round > 0 && choice.layers_a_round > 1);
}

#[test]
fn memory_for_all_layers_means_one_round_without_reads() {
    let layers = equal_layers(32, GIB / 4);
    let devices = ["a", "b"].map(|name| device(name, 6 * GIB, 30.0, 2.0, &layers));
    let choice = choose(&problem(devices.to_vec(), layers), LIMITS).unwrap();
    assert_eq!((choice.rounds, choice.order.len()), (1, 2));
    assert!(choice.shares.iter().all(|share| share.overflow_bytes == 0));
    // Without reads the simulator and the objective are the same sum.
    assert!((choice.tpot_ms - choice.objective_ms).abs() < 1e-6);
    assert!(choice.alternatives.iter().any(|other| other.rounds == 2));
}

#[test]
fn a_device_that_makes_a_token_slower_is_dropped() {
    let layers = equal_layers(32, GIB / 4);
    let mut devices = ["a", "b"]
        .map(|name| device(name, 6 * GIB, 30.0, 2.0, &layers))
        .to_vec();
    devices.push(device("old", 6 * GIB, 3.0, 0.2, &layers));
    let mut problem = problem(devices, layers);
    let choice = choose(&problem, LIMITS).unwrap();
    assert_eq!(choice.order.len(), 2);
    let [
        Dropped {
            device: 2,
            with_tpot_ms: Some(with_ms),
            with_ttft_ms: Some(with_ttft_ms),
        },
    ] = choice.dropped[..]
    else {
        panic!("{:?}", choice.dropped);
    };
    assert!(with_ms > choice.tpot_ms && with_ttft_ms > 0.0);
    // Where memory is short, it helps: what it computes need not be read from disks.
    for device in &mut problem.devices {
        device.memory_bytes = 3 * GIB;
        device.disk_read_gbps = 0.3;
    }
    let choice = choose(&problem, LIMITS).unwrap();
    assert_eq!(choice.dropped, []);
}

#[test]
fn a_slow_disk_never_reads_what_has_no_room() {
    let layers = equal_layers(32, GIB / 4);
    let mut devices = ["a", "b"]
        .map(|name| device(name, 4 * GIB, 30.0, 3.0, &layers))
        .to_vec();
    devices[1].must_fit = true;
    let mut problem = problem(devices, layers);
    let choice = choose(&problem, LIMITS).unwrap();
    check(&problem, &choice);
    assert!(choice.shares[0].overflow_bytes > 0);
    problem.devices[0].must_fit = true;
    let error = choose(&problem, LIMITS).unwrap_err().to_string();
    assert!(
        error.contains("no split of 8.2 GiB") && error.contains("7.6 GiB of memory"),
        "{error}"
    );
}

#[test]
fn the_same_problem_gives_the_same_ring() {
    let problem = problem_of(3, 6, 40);
    assert_eq!(choose(&problem, LIMITS), choose(&problem, LIMITS));
}
