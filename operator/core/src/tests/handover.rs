//! Rollouts in which the old workers make room: requests always have a gateway, and a worker or the prospect of one.

use std::collections::BTreeSet;
use std::time::Duration;

use super::sim::{PACE, Pace, Sim, rooms, want};
use crate::age::age;
use crate::observed::PodView;
use crate::rollout::{Mode, Want};

/// A cluster in which `wants` run.
fn running(mib: &[(&str, u64)], wants: &[Want]) -> Sim {
    let mut sim = Sim::new(rooms(mib), PACE);
    sim.settle(wants, |_, _| {});
    sim.generation = 2;
    sim
}

#[test]
fn a_new_gateway_of_the_same_model_uses_the_old_workers_until_they_make_room() {
    let of = |hash: &str| {
        vec![
            want("gateway-0", hash, "office", 50),
            want("decode-0", hash, "office", 400),
        ]
    };
    let (old, new) = (of("a"), of("b"));
    for is_compatible in [true, false] {
        let mut sim = running(&[("office", 600)], &old);
        if is_compatible {
            sim.compatible_generations = BTreeSet::from([1, 2]);
        }
        let address = format!("{}:9400", sim.pods["demo-decode-0-a"].view.ip);
        let uses_old = |gateway: &PodView| gateway.routes.contains(&address);
        let mut has_used = false;
        let mut has_ended = false;
        let modes = sim.settle(&new, |sim, steps| {
            sim.assert_capacity();
            has_ended |= steps.end.iter().any(|end| end.name == "demo-decode-0-a");
            let gateways: Vec<&PodView> = sim.open_gateways().collect();
            assert!(!gateways.is_empty());
            let is_replaced = !sim.pods.contains_key("demo-gateway-0-a");
            assert!(
                is_replaced || !is_compatible || gateways.iter().any(|it| uses_old(it)),
                "the old worker is there and gets no requests"
            );
            assert!(
                !(has_ended && gateways.iter().any(|it| uses_old(it))),
                "it is ended while it is routed to"
            );
            let mut gateways = gateways.iter();
            has_used |= gateways.any(|it| it.name == "demo-gateway-0-b" && uses_old(it));
        });
        assert_eq!(modes, [Mode::OldDownFirst, Mode::Alone]);
        assert_eq!(has_used, is_compatible);
    }
}

/// The old workers end first, since the new gateway finds no room. Then the new ones fit beside the old gateway.
#[test]
fn requests_that_an_old_gateway_holds_are_answered_by_the_new_workers() {
    for (ends_first, others) in [
        ("prefill-0", vec![("prefill-0", "office")]),
        (
            "decode-1",
            vec![("decode-1", "office"), ("prefill-0", "attic")],
        ),
    ] {
        let of = |hash: &str, gateway, decode| {
            let others = others
                .iter()
                .map(|(rank, node)| want(rank, hash, node, 100));
            let first = [
                want("gateway-0", hash, "office", gateway),
                want("decode-0", hash, "office", decode),
            ];
            first.into_iter().chain(others).collect::<Vec<_>>()
        };
        let (old, new) = (of("a", 50, 400), of("b", 100, 300));
        let mut sim = running(&[("attic", 200), ("office", 640)], &old);
        sim.compatible_generations = BTreeSet::from([1, 2]);
        let first = sim.reconcile(&new);
        assert_eq!(first.progress.mode, Mode::OldDownFirst);
        assert_eq!(first.end.len(), 2, "both in the office: {:?}", first.end);
        // One of them is gone earlier: the new gateway fits.
        sim.pods.remove(&format!("demo-{ends_first}-a"));
        sim.settle(&new, |sim, steps| {
            sim.assert_capacity();
            let is_ended = steps.end.iter().any(|end| end.name == "demo-gateway-0-a");
            assert!(
                !is_ended || sim.serves(&new),
                "no worker answers what it holds"
            );
        });
    }
}

/// What runs through a gateway goes on at workers that it knows of, and its kubelet may take a while to tell it of new ones.
#[test]
fn an_old_gateway_whose_worker_is_dead_reads_its_routes_to_the_new_one_before_it_ends() {
    let of = |hash: &str| {
        vec![
            want("gateway-0", hash, "office", 50),
            want("decode-0", hash, "office", 400),
        ]
    };
    let (old, new) = (of("a"), of("b"));
    let pace = Pace {
        worker_start: 0,
        gateway_start: 0,
        ..PACE
    };
    for is_dead in [true, false] {
        let mut sim = Sim::new(rooms(&[("office", 2000)]), pace);
        sim.settle(&old, |_, _| {});
        sim.generation = 2;
        sim.compatible_generations = BTreeSet::from([1, 2]);
        if is_dead {
            sim.break_down("demo-decode-0-a");
        }
        let mut read_for = None;
        let modes = sim.settle(&new, |sim, steps| {
            if steps.end.iter().any(|end| end.name == "demo-gateway-0-a") {
                let gateway = &sim.pods["demo-gateway-0-a"].view;
                let address = &sim.pods["demo-decode-0-b"].view.ip;
                assert!(gateway.routes.contains(&format!("{address}:9400")));
                let since = gateway.routed.expect("a time");
                read_for.get_or_insert(age(since, sim.now()));
            }
        });
        assert_eq!(modes, [Mode::Surge, Mode::Alone]);
        let read_for = read_for.expect("it has ended");
        let long = Duration::from_secs(15);
        assert_eq!(read_for >= long, is_dead, "{read_for:?}");
    }
}

#[test]
fn no_new_gateway_routes_to_a_worker_that_makes_room_for_another() {
    let of = |hash: &str| {
        vec![
            want("gateway-0", hash, "attic", 50),
            want("gateway-1", hash, "office", 50),
            want("decode-0", hash, "office", 400),
        ]
    };
    let (old, new) = (of("a"), of("b"));
    let mut sim = running(&[("attic", 200), ("office", 460)], &old);
    sim.compatible_generations = BTreeSet::from([1, 2]);
    let address = format!("{}:9400", sim.pods["demo-decode-0-a"].view.ip);
    let steps = sim.reconcile(&new);
    assert!(steps.end.iter().any(|end| end.name == "demo-decode-0-a"));
    assert!(!sim.pods["demo-gateway-0-b"].view.routes.contains(&address));
    sim.settle(&new, |sim, _| sim.assert_capacity());
}
