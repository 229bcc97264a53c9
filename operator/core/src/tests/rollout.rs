//! Rollouts, one for each of the rules.

use std::collections::BTreeSet;

use super::sim::{PACE, Sim, is_quiet, rooms, want};
use crate::decision::Grace;
use crate::rollout::{Mode, Steps, Want};

/// One node, one gateway, one decode worker of 400 MiB.
fn plan(gateway: &str, decode: &str) -> Vec<Want> {
    vec![
        want("gateway-0", gateway, "office", 50),
        want("decode-0", decode, "office", 400),
    ]
}

/// A cluster in which `wants` run.
fn running(mib: u64, wants: &[Want]) -> Sim {
    let mut sim = Sim::new(rooms(&[("office", mib)]), PACE);
    let modes = sim.settle(wants, |_, _| {});
    assert_eq!(modes, [Mode::Alone]);
    sim.generation = 2;
    sim
}

/// Watches the invariants of every step of an undisturbed change from `old` to `new`.
pub(super) fn watch<'a>(old: &'a [Want], new: &'a [Want]) -> impl FnMut(&Sim, &Steps) + use<'a> {
    let mut has_surged_only = true;
    move |sim, steps| {
        sim.assert_capacity();
        assert!(sim.open_gateways().next().is_some(), "no gateway is ready");
        has_surged_only &= steps.progress.mode != Mode::OldDownFirst;
        if has_surged_only {
            assert!(
                sim.serves(old) || sim.serves(new),
                "no whole plan is served: {:#?}",
                sim.pods
            );
        }
    }
}

#[test]
fn the_first_plan_is_made_at_once() {
    let wants = plan("a", "a");
    let mut sim = Sim::new(rooms(&[("office", 500)]), PACE);
    let steps = sim.reconcile(&wants);
    assert_eq!(steps.create.len(), 2);
    sim.turn();
    sim.settle(&wants, |sim, _| sim.assert_capacity());
    assert!(sim.serves(&wants));
    assert!(
        is_quiet(&sim.decide(&wants)),
        "a settled cluster is left alone"
    );
}

#[test]
fn another_model_surges_where_both_fit() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes, [Mode::Surge, Mode::Alone]);
    assert!(sim.serves(&new));
}

#[test]
fn the_new_gateway_waits_for_the_new_workers_in_a_surge() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    let mut order = Vec::new();
    sim.settle(&new, |sim, steps| {
        order.extend(
            steps
                .create
                .iter()
                .map(|(index, _)| format!("+{}", new[*index].rank)),
        );
        order.extend(steps.end.iter().map(|end| format!("-{}", end.name)));
        let _ = sim;
    });
    order.dedup();
    // Each step is looked at before and after the cluster's turn.
    let mut seen = BTreeSet::new();
    order.retain(|step| seen.insert(step.clone()));
    assert_eq!(
        order,
        [
            "+decode-0",
            "+gateway-0",
            "-demo-gateway-0-a",
            "-demo-decode-0-a"
        ]
    );
}

#[test]
fn another_model_goes_old_down_first_where_both_do_not_fit() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(600, &old);
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes[0], Mode::OldDownFirst);
    assert!(sim.serves(&new));
}

/// The nodes have room for both; the namespace's quota has room for no more Pods than run, or for one more.
#[test]
fn a_full_quota_turns_a_surge_round() {
    for most_pods in [2, 3] {
        let (old, new) = (plan("a", "a"), plan("b", "b"));
        let mut sim = running(1000, &old);
        sim.most_pods = Some(most_pods);
        let modes = sim.settle(&new, |sim, _| sim.assert_capacity());
        assert!(
            modes.contains(&Mode::OldDownFirst),
            "{most_pods}: {modes:?}"
        );
        assert!(sim.serves(&new));
    }
}

#[test]
fn one_gpu_forces_old_down_first() {
    let (mut old, mut new) = (plan("a", "a"), plan("b", "b"));
    (old[1].gpus, new[1].gpus) = (1, 1);
    let mut sim = running(5000, &old);
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes[0], Mode::OldDownFirst);
}

/// A device plugin that restarts: what has a GPU keeps it, and the rest is replaced beside it.
#[test]
fn gpus_that_are_not_offered_for_a_while_end_no_pod_that_has_one() {
    let (mut old, mut new) = (plan("a", "a"), plan("b", "a"));
    (old[1].gpus, new[1].gpus) = (1, 1);
    let mut sim = running(5000, &old);
    for room in sim.rooms.values_mut() {
        room.gpus = 0;
    }
    let modes = sim.settle(&new, |sim, _| assert!(sim.open_gateways().next().is_some()));
    assert_eq!(modes[0], Mode::Surge);
    assert!(sim.serves(&new));
}

#[test]
fn the_same_exclusive_cpus_force_old_down_first() {
    let (mut old, mut new) = (plan("a", "a"), plan("b", "b"));
    old[1].exclusive_cpus = vec![0, 1];
    new[1].exclusive_cpus = vec![1, 2];
    let mut sim = running(5000, &old);
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes[0], Mode::OldDownFirst);
}

#[test]
fn a_kept_gateway_routes_to_old_workers_until_the_new_ones_are_ready() {
    let (old, new) = (plan("a", "a"), plan("a", "b"));
    let mut sim = running(1000, &old);
    sim.compatible_generations = BTreeSet::from([1, 2]);
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes, [Mode::Surge, Mode::Alone]);
    assert!(sim.serves(&new));
    assert!(!sim.pods["demo-gateway-0-a"].view.routes.is_empty());
}

#[test]
fn a_worker_is_ended_only_after_its_gateway_was_told() {
    for mib in [600, 1000] {
        let (old, new) = (plan("a", "a"), plan("a", "b"));
        let mut sim = running(mib, &old);
        let address = format!("{}:9400", sim.pods["demo-decode-0-a"].view.ip);
        let mut is_ended = false;
        while !is_ended {
            let told = sim.pods["demo-gateway-0-a"].view.routes.clone();
            let steps = sim.reconcile(&new);
            is_ended = steps.end.iter().any(|end| end.name == "demo-decode-0-a");
            assert!(
                !(is_ended && told.contains(&address)),
                "it is ended while it is routed to"
            );
            sim.turn();
        }
    }
}

#[test]
fn the_old_gateway_stays_while_a_new_worker_is_down_again() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    while !sim.pods.contains_key("demo-gateway-0-b") {
        sim.reconcile(&new);
        sim.turn();
    }
    sim.broken.insert("b".to_owned());
    sim.pods.remove("demo-decode-0-b");
    for _ in 0..20 {
        sim.reconcile(&new);
        sim.turn();
        assert!(sim.serves(&old), "what ran goes on");
    }
}

#[test]
fn a_kept_gateway_holds_requests_while_the_old_worker_makes_room() {
    let (old, new) = (plan("a", "a"), plan("a", "b"));
    let mut sim = running(600, &old);
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes, [Mode::OldDownFirst, Mode::Alone]);
}

#[test]
fn scaling_up_touches_nothing_that_runs() {
    let old = plan("a", "a");
    let mut new = old.clone();
    new.push(want("decode-1", "a", "office", 400));
    let mut sim = running(1000, &old);
    let modes = sim.settle(&new, |sim, steps| {
        watch(&old, &new)(sim, steps);
        assert!(steps.end.is_empty());
    });
    assert_eq!(modes, [Mode::Alone]);
}

#[test]
fn scaling_down_ends_the_surplus_alone() {
    let new = plan("a", "a");
    let mut old = new.clone();
    old.push(want("decode-1", "a", "office", 400));
    let mut sim = running(1000, &old);
    let mut ended = BTreeSet::new();
    sim.settle(&new, |sim, steps| {
        watch(&old, &new)(sim, steps);
        ended.extend(steps.end.iter().map(|end| end.name.clone()));
    });
    assert_eq!(ended.into_iter().collect::<Vec<_>>(), ["demo-decode-1-a"]);
}

#[test]
fn a_gateway_that_finds_no_room_gets_it_from_the_workers_that_go() {
    // 50 + 400 of 460: not even the gateway fits beside them.
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(460, &old);
    let modes = sim.settle(&new, |sim, _| {
        sim.assert_capacity();
        assert!(sim.open_gateways().next().is_some());
    });
    assert_eq!(modes[0], Mode::OldDownFirst);
}

#[test]
fn less_room_than_was_reckoned_turns_a_surge_round() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    sim.hidden_bytes = 200 << 20;
    let modes = sim.settle(&new, |sim, _| {
        assert!(sim.open_gateways().next().is_some());
    });
    assert!(modes.contains(&Mode::OldDownFirst), "{modes:?}");
    assert!(sim.serves(&new));
}

#[test]
fn a_moment_without_room_ends_nothing() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    sim.hidden_bytes = 200 << 20;
    sim.reconcile(&new);
    sim.turn();
    let steps = sim.reconcile(&new);
    assert!(is_quiet(&steps) && steps.look_again.is_some(), "{steps:?}");
    sim.hidden_bytes = 0;
    let modes = sim.settle(&new, watch(&old, &new));
    assert_eq!(modes, [Mode::Surge, Mode::Alone]);
}

#[test]
fn a_broken_plan_goes_no_further_than_its_workers_and_the_way_back_is_short() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    sim.broken.insert("b".to_owned());
    for _ in 0..50 {
        let steps = sim.reconcile(&new);
        assert!(!steps.progress.is_serving);
        sim.turn();
        assert!(sim.serves(&old), "what ran goes on");
    }
    sim.settle(&old, |sim, _| assert!(sim.serves(&old)));
    assert_eq!(sim.pods.len(), 2);
}

/// The kubelet may signal a process before it handles signals.
#[test]
fn what_never_served_gets_only_time_to_exit_and_what_did_all_that_it_asks_for() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    let graces = |sim: &mut Sim, to: &[Want]| {
        let mut graces = Vec::new();
        sim.settle(to, |_, steps| {
            graces.extend(steps.end.iter().map(|end| end.grace));
        });
        graces
    };
    // A change that is reverted while its worker starts.
    assert!(!sim.reconcile(&new).create.is_empty());
    let back = graces(&mut sim, &old);
    assert!(!back.is_empty() && back.iter().all(|grace| *grace == Grace::Exit));
    let forth = graces(&mut sim, &new);
    assert!(!forth.is_empty() && forth.iter().all(|grace| *grace == Grace::Whole));
}

#[test]
fn a_pod_that_failed_is_made_again_after_a_while() {
    let wants = plan("a", "a");
    let mut sim = running(1000, &wants);
    let before = sim.pods["demo-decode-0-a"].view.uid.clone();
    sim.fail("demo-decode-0-a");
    assert!(sim.decide(&wants).look_again.is_some());
    sim.settle(&wants, |_, _| {});
    assert_ne!(sim.pods["demo-decode-0-a"].view.uid, before);
    // One that fails as soon as it is created waits.
    sim.pods.remove("demo-decode-0-a");
    sim.reconcile(&wants);
    sim.fail("demo-decode-0-a");
    assert!(sim.decide(&wants).end.is_empty());
}

/// `old` on node attic, `new` on node office.
fn moving() -> (Vec<Want>, Vec<Want>, Sim) {
    let old = vec![
        want("gateway-0", "a", "attic", 50),
        want("decode-0", "a", "attic", 400),
    ];
    let new = plan("b", "b");
    let mut sim = Sim::new(rooms(&[("attic", 600), ("office", 600)]), PACE);
    sim.settle(&old, |_, _| {});
    (old, new, sim)
}

#[test]
fn what_a_lost_node_held_ends_when_the_plan_without_it_serves() {
    let (_, new, mut sim) = moving();
    sim.lose("attic");
    let steps = sim.reconcile(&new);
    assert_eq!(steps.progress.mode, Mode::Alone);
    assert_eq!(steps.create.len(), 2);
    let mut ended = BTreeSet::new();
    sim.settle(&new, |_, steps| {
        assert!(steps.progress.is_serving || steps.end.is_empty());
        assert!(
            steps.end.iter().all(|end| end.grace != Grace::None),
            "streams may go on there"
        );
        ended.extend(steps.end.iter().map(|end| end.name.clone()));
    });
    assert_eq!(ended.len(), 2);
    assert_eq!(
        sim.pods.len(),
        4,
        "until their kubelet is back, or nobody waits for it"
    );
    sim.is_patience_over = true;
    sim.settle(&new, |_, _| {});
    assert_eq!(sim.pods.len(), 2);
}

#[test]
fn what_nobody_waits_for_goes_though_nothing_else_serves() {
    let (_, new, mut sim) = moving();
    sim.lose("attic");
    sim.is_patience_over = true;
    sim.broken.insert("b".to_owned());
    let steps = sim.reconcile(&new);
    assert!(steps.end.len() == 2 && steps.end.iter().all(|end| end.grace == Grace::None));
}

#[test]
fn what_a_node_held_that_has_left_goes_at_once() {
    let (_, new, mut sim) = moving();
    sim.rooms.remove("attic");
    let steps = sim.reconcile(&new);
    assert_eq!(steps.create.len(), 2);
    assert!(steps.end.len() == 2 && steps.end.iter().all(|end| end.grace == Grace::None));
}

#[test]
fn nothing_that_is_wanted_ends_while_its_node_is_away() {
    let (old, _, mut sim) = moving();
    let uids = |sim: &Sim| -> Vec<String> {
        sim.pods
            .values()
            .map(|paper| paper.view.uid.clone())
            .collect()
    };
    let before = uids(&sim);
    sim.lose("attic");
    sim.lose("office");
    for is_patience_over in [false, true] {
        sim.is_patience_over = is_patience_over;
        for _ in 0..10 {
            let steps = sim.reconcile(&old);
            assert!(is_quiet(&steps) && !steps.progress.is_serving, "{steps:?}");
            sim.turn();
        }
    }
    sim.bring_back();
    sim.settle(&old, |_, _| {});
    assert_eq!(uids(&sim), before);
}

#[test]
fn a_gateway_keeps_its_route_to_a_node_that_is_away() {
    let old = vec![
        want("gateway-0", "a", "office", 50),
        want("decode-0", "a", "attic", 400),
    ];
    let new = vec![old[0].clone(), want("decode-0", "b", "office", 400)];
    let mut sim = Sim::new(rooms(&[("attic", 600), ("office", 600)]), PACE);
    sim.settle(&old, |_, _| {});
    let old_address = sim.pods["demo-decode-0-a"].view.ip.clone();
    let knows_old = |sim: &Sim| {
        let gateway = &sim.pods["demo-gateway-0-a"].view;
        gateway.routes.contains(&old_address)
    };
    sim.lose("attic");
    sim.reconcile(&old);
    assert!(knows_old(&sim));
    sim.generation = 2;
    sim.settle(&new, |sim, _| {
        let is_new_up = sim
            .pods
            .get("demo-decode-0-b")
            .is_some_and(|it| it.view.is_ready);
        assert!(is_new_up || knows_old(sim), "streams to it may go on");
    });
    assert!(!knows_old(&sim));
}

#[test]
fn a_pod_that_waits_in_an_old_form_is_made_anew_and_one_that_runs_is_not() {
    let old = plan("a", "a");
    let mut sim = running(1000, &old);
    let mut new = old.clone();
    new.push(want("decode-1", "x", "office", 400));
    sim.reconcile(&new);
    let waiting = "demo-decode-1-x";
    // Another operator would give both Pods another form.
    new[1].form = "b".to_owned();
    new[2].form = "y".to_owned();
    assert!(sim.decide(&new).end.is_empty(), "not as soon as it is made");
    for _ in 0..3 {
        sim.tick();
    }
    let ended: Vec<String> = sim
        .decide(&new)
        .end
        .into_iter()
        .map(|end| end.name)
        .collect();
    assert_eq!(ended, [waiting]);
}

#[test]
fn a_lost_gateway_is_made_elsewhere_before_the_new_workers_are_ready() {
    let old = vec![
        want("gateway-0", "a", "attic", 50),
        want("decode-0", "a", "office", 400),
    ];
    let new = vec![
        want("gateway-0", "b", "office", 50),
        want("decode-0", "b", "office", 400),
    ];
    let mut sim = Sim::new(rooms(&[("attic", 600), ("office", 1000)]), PACE);
    sim.settle(&old, |_, _| {});
    sim.lose("attic");
    let steps = sim.reconcile(&new);
    assert_eq!(steps.create.len(), 2, "{steps:?}");
}

#[test]
fn a_plan_that_must_wait_for_its_node_waits() {
    let wants = plan("a", "a");
    let mut sim = running(1000, &wants);
    sim.lose("office");
    sim.reconcile(&wants);
    for _ in 0..10 {
        let steps = sim.reconcile(&wants);
        assert!(is_quiet(&steps), "{steps:?}");
        sim.turn();
    }
    sim.bring_back();
    sim.settle(&wants, |_, _| {});
}

#[test]
fn old_gateways_of_the_same_model_may_use_the_new_workers() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    sim.compatible_generations = BTreeSet::from([1, 2]);
    let mut has_used = false;
    sim.settle(&new, |sim, steps| {
        watch(&old, &new)(sim, steps);
        let gateway = sim.pods.get("demo-gateway-0-a");
        let worker = sim.pods.get("demo-decode-0-b");
        if let (Some(gateway), Some(worker)) = (gateway, worker)
            && !worker.view.ip.is_empty()
        {
            has_used |= gateway.view.routes.contains(&worker.view.ip);
        }
    });
    assert!(has_used);
    let mut sim = running(1000, &old);
    sim.compatible_generations = BTreeSet::from([2]);
    sim.settle(&new, |sim, _| {
        let gateway = sim.pods.get("demo-gateway-0-a");
        let worker = sim.pods.get("demo-decode-0-b");
        if let (Some(gateway), Some(worker)) = (gateway, worker)
            && !worker.view.ip.is_empty()
        {
            assert!(
                !gateway.view.routes.contains(&worker.view.ip),
                "another model"
            );
        }
    });
}

/// Others' Pods that are about to end have the room for some seconds.
#[test]
fn an_old_gateway_goes_on_holding_requests_while_others_have_the_room_of_its_next_workers() {
    let (old, new) = (plan("a", "a"), plan("b", "b"));
    let mut sim = running(1000, &old);
    sim.compatible_generations = BTreeSet::from([1, 2]);
    let whole = std::mem::replace(&mut sim.rooms, rooms(&[("office", 300)]));
    let has = |sim: &Sim, want: &Want| sim.pods.contains_key(&want.name);
    let is_open =
        |sim: &Sim, want: &Want| sim.open_gateways().any(|gateway| gateway.name == want.name);
    for _ in 0..20 {
        sim.reconcile(&new);
        if is_open(&sim, &new[0]) {
            break;
        }
        sim.turn();
    }
    assert!(!has(&sim, &old[1]) && !has(&sim, &new[1]));
    assert!(is_open(&sim, &old[0]) && is_open(&sim, &new[0]));
    sim.rooms = whole;
    sim.settle(&new, |sim, _| {
        assert!(is_open(sim, &old[0]) || sim.serves(&new), "{:#?}", sim.pods);
    });
    assert!(!has(&sim, &old[0]));
}
