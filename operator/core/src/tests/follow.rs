//! Pools that follow the load, in a simulated cluster.

use std::time::Duration;

use hearth_crds::{PlanRole, PoolAutoscaling};

use crate::conditions::{PLANNED, PROGRESSING, READY};
use crate::observed::{Demand, Neighbour, PodRole};
use crate::testing::MIB;
use crate::testing::samples::steady;
use crate::tests::fake_cluster::FakeCluster;
use crate::tests::sharing::{empty, fill, neighbour_everywhere};

const DECODE: &str = "decode: {scaling: {mode: Auto, minReplicas: 1, maxReplicas: 2}}\n";
const BOTH: &str = "prefill: {scaling: {mode: Auto, maxReplicas: 2}}\ndecode: {scaling: {mode: Auto, maxReplicas: 2}}\n\
                    objectives: {timeToFirstToken: 3s, timePerOutputToken: 500ms}\n";

/// A steady load of that many requests a second, of prompts that take a second and answers that take five.
fn load(arrivals_per_s: f64) -> Option<Demand> {
    Some(Demand {
        prefill_ms_per_token: Some(4.0),
        step_ms: Some(50.0),
        step_tokens: Some(1.0),
        ..steady(arrivals_per_s)
    })
}

fn count(cluster: &FakeCluster, role: PlanRole) -> usize {
    let pods = cluster.observed.pods.iter();
    pods.filter(|pod| pod.role == PodRole::Rank(role) && !pod.is_deleting)
        .count()
}

fn told(cluster: &FakeCluster, pool: &str) -> PoolAutoscaling {
    let pool = cluster.status().pool(pool).expect("a pool");
    pool.autoscaling.clone().expect("a pool that follows")
}

/// Reconciles every five seconds for this long; returns how often the status changed.
fn go_on(cluster: &mut FakeCluster, seconds: u64) -> usize {
    let mut writes = 0;
    for _ in 0..seconds / 5 {
        let before = cluster.status().clone();
        cluster.reconcile();
        writes += usize::from(*cluster.status() != before);
        cluster.turn();
        cluster.pass(Duration::from_secs(4));
        assert_eq!(cluster.condition(READY).status, "True");
    }
    writes
}

/// Events about numbers and plans since the last call, with their messages.
fn scaled(cluster: &mut FakeCluster) -> Vec<String> {
    let events = std::mem::take(&mut cluster.events);
    let scaled = events
        .into_iter()
        .filter(|it| it.reason.starts_with("Scaled") || it.reason.starts_with("Plan"));
    scaled
        .map(|it| format!("{}: {}", it.reason, it.message))
        .collect()
}

/// Uids of all Pods, the gateway's among them.
fn uids(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| pod.uid.clone()).collect()
}

#[test]
fn a_pool_grows_with_its_load_and_shrinks_with_it_and_says_why_once() {
    let mut cluster = FakeCluster::new(DECODE);
    cluster.observed.demand = load(0.1);
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 1);
    let first = uids(&cluster);
    scaled(&mut cluster);

    cluster.observed.demand = load(2.0);
    go_on(&mut cluster, 60);
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    let events = scaled(&mut cluster);
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(
        events[0].starts_with("ScaledDecode: 1 to 2 decode workers: 2.00 requests/s"),
        "{events:?}"
    );
    let decided = told(&cluster, "decode");
    assert_eq!((decided.replicas, decided.limited_by.clone()), (2, None));
    assert!(
        decided.reason.starts_with("1 to 2: 2.00 requests/s"),
        "{decided:?}"
    );
    // Nobody was moved, and while nothing changes nothing is written.
    let now = uids(&cluster);
    assert!(
        first.iter().all(|uid| now.contains(uid)),
        "{first:?} {now:?}"
    );
    assert_eq!(go_on(&mut cluster, 600), 0);

    // The load goes, and the operator is another one halfway: it goes on from what the status says once it has seen for itself.
    cluster.observed.demand = load(0.1);
    go_on(&mut cluster, 40);
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    let since = told(&cluster, "decode").fewer_since;
    assert!(since.is_some());
    cluster.observed.demand = None;
    go_on(&mut cluster, 30);
    cluster.observed.demand = Some(Demand {
        span_s: 20.0,
        arrivals: 2.0,
        ..load(0.1).unwrap()
    });
    go_on(&mut cluster, 60);
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    assert_eq!(told(&cluster, "decode").fewer_since, since);
    cluster.observed.demand = load(0.1);
    go_on(&mut cluster, 30);
    assert_eq!(count(&cluster, PlanRole::Decode), 1);
    let events = scaled(&mut cluster);
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(
        events[0].starts_with("ScaledDecode: 2 to 1 decode workers: 1 sufficed for 60 s"),
        "{events:?}"
    );
    assert_eq!(uids(&cluster), first);
    assert_eq!(go_on(&mut cluster, 600), 0);
}

#[test]
fn both_pools_follow_and_a_flapping_load_does_not_make_them_flap() {
    let mut cluster = FakeCluster::new(BOTH);
    cluster.settle();
    scaled(&mut cluster);
    for _ in 0..20 {
        cluster.observed.demand = load(2.0);
        go_on(&mut cluster, 30);
        cluster.observed.demand = load(0.1);
        go_on(&mut cluster, 30);
    }
    let events = scaled(&mut cluster);
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!(count(&cluster, PlanRole::Prefill), 2);
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    assert!(
        events
            .iter()
            .any(|it| it.starts_with("ScaledPrefill: 1 to 2")),
        "{events:?}"
    );
}

/// First tokens that come late, on a busy decode worker: whoever reads the prompts needs more workers. Where a tenth of them are handed
/// over, these alone may be the late ones.
#[test]
fn the_pool_that_reads_the_prompts_grows_by_their_first_tokens() {
    let late = Demand {
        running: Some(6.0),
        ttft_p90_ms: Some(4000.0),
        ..steady(2.0)
    };
    // Shares of prompts and of their tokens, the measured milliseconds a token, and what becomes of the pools.
    for (handed_over, handed_over_tokens, prefill_ms, numbers) in [
        (0.9, 0.95, Some(4.0), [2, 1]),
        (0.4, 0.5, Some(0.1), [1, 1]),
        (0.2, 0.3, Some(0.1), [1, 1]),
        (0.05, 0.3, Some(0.1), [1, 2]),
        (0.0, 0.0, None, [1, 2]),
    ] {
        let mut cluster = FakeCluster::new(
            "prefill: {scaling: {mode: Auto, maxReplicas: 2}}\ndecode: {maxBatch: 256, scaling: {mode: Auto, maxReplicas: 2}}\n\
             objectives: {timeToFirstToken: 2s}\n",
        );
        cluster.settle();
        cluster.observed.demand = Some(Demand {
            handed_over: Some(handed_over),
            handed_over_tokens: Some(handed_over_tokens),
            prefill_ms_per_token: prefill_ms,
            ..late.clone()
        });
        go_on(&mut cluster, 60);
        let both = [PlanRole::Prefill, PlanRole::Decode].map(|role| count(&cluster, role));
        assert_eq!(both, numbers, "{handed_over}: {:?}", scaled(&mut cluster));
    }
}

/// Others read the prompts since.
#[test]
fn prefill_workers_that_read_nothing_end() {
    let mut cluster = FakeCluster::new(BOTH);
    cluster.settle();
    cluster.observed.demand = load(2.0);
    go_on(&mut cluster, 60);
    assert_eq!(count(&cluster, PlanRole::Prefill), 2);
    cluster.observed.demand = Some(Demand {
        handed_over: Some(0.0),
        handed_over_tokens: Some(0.0),
        prefill_ms_per_token: None,
        ..load(2.0).unwrap()
    });
    go_on(&mut cluster, 600);
    assert_eq!(count(&cluster, PlanRole::Prefill), 1);
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
}

#[test]
fn what_is_not_seen_changes_no_number() {
    let mut cluster = FakeCluster::new(DECODE);
    cluster.settle();
    cluster.observed.demand = load(2.0);
    go_on(&mut cluster, 60);
    let old = Some(Demand {
        age_s: 60.0,
        ..load(0.0).unwrap()
    });
    for unseen in [None, old] {
        cluster.observed.demand = unseen;
        go_on(&mut cluster, 1200);
        assert_eq!(count(&cluster, PlanRole::Decode), 2);
    }
}

/// Nobody would change the spec to have the number tried again.
#[test]
fn a_worker_that_does_not_come_up_is_waited_for_beside_those_that_serve() {
    let mut cluster = FakeCluster::new(&format!("{DECODE}rollout: {{progressDeadline: 1m}}\n"));
    cluster.settle();
    let before = uids(&cluster);
    cluster.broken_from = 2;
    for _ in 0..2 {
        cluster.observed.demand = load(2.0);
        go_on(&mut cluster, 600);
        assert_eq!(count(&cluster, PlanRole::Decode), 2);
        assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
        assert_eq!(
            cluster.says(PROGRESSING),
            ("False", "ProgressDeadlineExceeded")
        );
        // It is not asked for any more, and then again.
        cluster.observed.demand = load(0.1);
        go_on(&mut cluster, 600);
        assert_eq!(uids(&cluster), before);
    }
    cluster.observed.demand = load(2.0);
    go_on(&mut cluster, 600);
    cluster.broken_from = u64::MAX;
    go_on(&mut cluster, 60);
    assert_eq!(told(&cluster, "decode").replicas, 2);
    assert_eq!(cluster.says(PROGRESSING), ("False", "Complete"));
    let ready = cluster.observed.pods.iter().filter(|pod| pod.is_ready);
    assert_eq!(
        ready.count(),
        4,
        "a gateway, a prefill worker and both decode workers"
    );
}

#[test]
fn a_worker_that_has_no_room_is_asked_for_without_a_plan_and_said_once() {
    let mut cluster = FakeCluster::new(DECODE);
    cluster.settle();
    scaled(&mut cluster);
    for name in ["attic", "office"] {
        cluster.node(name, |node| {
            node.profile.as_mut().unwrap().memory.available_bytes = 100 * MIB;
            node.memory_bytes = 100 * MIB;
        });
    }
    let before = uids(&cluster);
    cluster.observed.demand = load(2.0);
    let writes = go_on(&mut cluster, 600);
    assert_eq!(writes, 1, "{:#?}", cluster.status());
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(uids(&cluster), before);
    let events = std::mem::take(&mut cluster.events);
    let reasons: Vec<_> = events
        .iter()
        .map(|it| (&*it.reason, it.is_warning))
        .collect();
    assert_eq!(reasons, [("ScalingLimited", true)]);
    assert!(
        events[0].message.starts_with("2 decode workers: "),
        "{events:?}"
    );
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    let decided = told(&cluster, "decode");
    assert_eq!(decided.replicas, 1);
    let limit = decided.limited_by.expect("a limit");
    assert!(limit.starts_with("2 decode workers: "), "{limit}");
}

#[test]
fn a_pool_that_grows_has_others_end_that_nobody_needs_and_no_others() {
    let mut cluster = FakeCluster::new(DECODE);
    cluster.observed.demand = load(0.1);
    cluster.settle();
    fill(&mut cluster, Vec::new());
    cluster.observed.demand = load(2.0);
    let started = cluster.observed.now;
    cluster.pass(Duration::from_secs(100));
    let warm = Neighbour {
        preloaded_since: Some(started),
        ..neighbour_everywhere(&cluster, "warm", 0, 500.0)
    };
    let asked_since = Neighbour {
        idle_s: Some(50.0),
        ..warm.clone()
    };
    let kept = Neighbour {
        keeps: true,
        ..warm.clone()
    };
    let leaving = Neighbour {
        is_leaving: true,
        preloaded_since: None,
        ..warm.clone()
    };
    let idle = neighbour_everywhere(&cluster, "idle", -9, 500.0);
    // Whether it waits for that one, and asks it; what is ending already need not be asked, and may be woken.
    for (other, waits, asks) in [
        (&idle, false, 0),
        (&asked_since, false, 0),
        (&kept, false, 0),
        (&leaving, true, 0),
        (&warm, true, 1),
    ] {
        cluster.observed.neighbours = vec![other.clone()];
        let decision = cluster.reconcile();
        assert_eq!(decision.asks.len(), asks, "{other:?}");
        assert_eq!(decision.awaits.is_empty(), !waits, "{other:?}");
        let limit = told(&cluster, "decode").limited_by.expect("a limit");
        let words = "; it waits until warm can end its workers";
        assert_eq!(limit.ends_with(words), waits, "{limit}");
    }
    empty(&mut cluster);
    let decision = cluster.reconcile();
    assert!(decision.asks.is_empty() && decision.awaits.is_empty());
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
}

#[test]
fn the_number_is_hearth_s_until_somebody_else_has_it() {
    let begun = "decode: {replicas: 2, scaling: {mode: Auto, maxReplicas: 3}}\n";
    let mut cluster = FakeCluster::new(begun);
    cluster.settle();
    assert_eq!(
        count(&cluster, PlanRole::Decode),
        2,
        "the number to begin with"
    );
    cluster.change("decode: {replicas: 1, scaling: {mode: Auto, maxReplicas: 3}}\n");
    cluster.settle();
    assert_eq!(
        count(&cluster, PlanRole::Decode),
        2,
        "from then on it does not count"
    );
    // Neither a refused spec nor a suspended deployment changes it.
    cluster.observed.demand = load(4.0);
    cluster.change("decode: {maxBatch: 0, scaling: {mode: Auto, maxReplicas: 3}}\n");
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    cluster.change("decode: {scaling: {mode: Auto, maxReplicas: 3}}\nsuspend: true\n");
    cluster.settle();
    assert_eq!(told(&cluster, "decode").replicas, 2);
    cluster.change("decode: {replicas: 1}\n");
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 1);
    let pool = cluster.status().pool("decode").cloned().unwrap();
    assert_eq!(pool.autoscaling, None);
}

#[test]
fn bounds_that_change_are_obeyed_at_once() {
    let mut cluster = FakeCluster::new("decode: {scaling: {mode: Auto, minReplicas: 2}}\n");
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    cluster.change("decode: {scaling: {mode: Auto, minReplicas: 3}}\n");
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 3);
    cluster.change("decode: {scaling: {mode: Auto, maxReplicas: 1}}\n");
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 1);
    let reason = told(&cluster, "decode").reason;
    assert_eq!(reason, "3 to 1: the bounds are 1 to 1");
}
