//! Rollouts between any two plans, at any pace and with any disturbances.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::rollout::watch;
use super::sim::{PACE, Pace, Sim, rooms, want};
use crate::rollout::Want;

const NODES: [&str; 3] = ["attic", "den", "office"];

/// A plan: node, memory and version of each worker; equal versions in two plans are the same Pod.
fn any_plan() -> impl Strategy<Value = Vec<Want>> {
    let worker = (0..NODES.len(), 1_u64..4, 0..3_u32, 0..4_u32);
    let workers = prop::collection::vec(worker, 1..4);
    (0..NODES.len(), 0..2_u32, workers).prop_map(|(node, version, workers)| {
        let mut wants = vec![want(
            "gateway-0",
            &format!("n{node}v{version}"),
            NODES[node],
            50,
        )];
        let mut gpu_is_given = [false; NODES.len()];
        for (index, (node, size, version, gpu)) in workers.into_iter().enumerate() {
            let role = if index == 1 {
                "prefill-0".to_owned()
            } else {
                format!("decode-{}", index / 2)
            };
            let gpus = u32::from(gpu == 0 && !gpu_is_given[node]);
            gpu_is_given[node] |= gpus > 0;
            let hash = format!("n{node}s{size}v{version}g{gpus}");
            let mut worker = want(&role, &hash, NODES[node], size * 100);
            worker.gpus = gpus;
            wants.push(worker);
        }
        wants
    })
}

fn any_pace() -> impl Strategy<Value = Pace> {
    (0..6_u32, 0..4_u32, 1..6_u32, 1..8_u32).prop_map(
        |(worker_start, gateway_start, worker_end, gateway_end)| Pace {
            worker_start,
            gateway_start,
            worker_end,
            gateway_end,
        },
    )
}

/// Nodes that can hold each plan by itself and one more gateway, plus `slack` MiB.
fn roomy(plans: &[&[Want]], slack: u64) -> Sim {
    let need = |node: &str| {
        let of = |wants: &[Want]| -> u64 {
            let here = wants.iter().filter(|want| want.node == node);
            here.map(|want| want.memory_bytes >> 20).sum()
        };
        plans.iter().map(|wants| of(wants)).max().unwrap_or(0)
    };
    let sizes: Vec<(&str, u64)> = NODES
        .iter()
        .map(|node| (*node, need(node) + 50 + slack))
        .collect();
    Sim::new(rooms(&sizes), PACE)
}

/// Events in a cluster between two reconciles.
#[derive(Clone, Debug)]
enum Weather {
    Nothing,
    Crash(usize),
    Fail(usize),
    Vanish(usize),
    Lose(usize),
    BringBack,
    Retarget,
}

fn any_weather() -> impl Strategy<Value = Vec<Weather>> {
    let one = prop_oneof![
        6 => Just(Weather::Nothing),
        1 => (0..8_usize).prop_map(Weather::Crash),
        1 => (0..8_usize).prop_map(Weather::Fail),
        1 => (0..8_usize).prop_map(Weather::Vanish),
        1 => (0..NODES.len()).prop_map(Weather::Lose),
        1 => Just(Weather::BringBack),
        1 => Just(Weather::Retarget),
    ];
    prop::collection::vec(one, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_change_in_calm_weather_drops_nothing(
        old in any_plan(),
        new in any_plan(),
        pace in any_pace(),
        slack in prop_oneof![Just(0_u64), 0..400_u64, Just(2000)],
        is_kindred: bool,
    ) {
        let mut sim = roomy(&[&old, &new], slack);
        sim.pace = pace;
        sim.settle(&old, |sim, _| sim.assert_capacity());
        sim.generation = 2;
        if is_kindred || old[0] == new[0] {
            sim.compatible_generations = BTreeSet::from([1, 2]);
        }
        sim.settle(&new, watch(&old, &new));
        prop_assert!(sim.serves(&new));
        prop_assert_eq!(sim.pods.len(), new.len());
    }

    #[test]
    fn a_change_of_mind_at_any_moment_leaves_a_gateway(
        old in any_plan(),
        new in any_plan(),
        pace in any_pace(),
        slack in 0..400_u64,
        reconciles in 0..20_usize,
    ) {
        let mut sim = roomy(&[&old, &new], slack + 50);
        sim.pace = pace;
        sim.settle(&old, |_, _| {});
        sim.generation = 2;
        for _ in 0..reconciles {
            sim.reconcile(&new);
            sim.turn();
        }
        sim.generation = 3;
        sim.settle(&old, |sim, _| {
            assert!(sim.open_gateways().next().is_some(), "no gateway is ready");
        });
        prop_assert!(sim.serves(&old));
    }

    #[test]
    fn any_weather_ends_in_the_plan(
        old in any_plan(),
        new in any_plan(),
        pace in any_pace(),
        slack in 0..600_u64,
        weather in any_weather(),
    ) {
        let mut sim = roomy(&[&old, &new], slack);
        sim.pace = pace;
        let plans = [old, new];
        let mut target = 0;
        for event in weather {
            let name = |index: usize| sim.pods.keys().nth(index).cloned().unwrap_or_default();
            match event {
                Weather::Nothing => {}
                Weather::Crash(index) => { let name = name(index); sim.crash(&name) }
                Weather::Fail(index) => { let name = name(index); sim.fail(&name) }
                Weather::Vanish(index) => { let name = name(index); sim.pods.remove(&name); }
                Weather::Lose(index) => sim.lose(NODES[index]),
                Weather::BringBack => sim.bring_back(),
                Weather::Retarget => {
                    target = 1 - target;
                    sim.generation += 1;
                }
            }
            sim.reconcile(&plans[target]);
            sim.turn();
        }
        sim.bring_back();
        sim.settle(&plans[target], |_, _| {});
        prop_assert!(sim.serves(&plans[target]));
    }
}
