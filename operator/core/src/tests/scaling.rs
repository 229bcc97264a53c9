//! Numbers of workers: who changes them, within which bounds, and what an autoscaler is told.

use std::sync::Arc;

use crate::conditions::{PLANNED, READY};
use crate::decide::decide;
use crate::decision::ScalerStep;
use crate::ledger::holdings::of_deployment;
use crate::observed::{ContainerView, PodRole};
use crate::testing::{GIB, node};
use crate::tests::fake_cluster::FakeCluster;
use crate::tests::shared_gpus::of_spec;

use hearth_crds::{InferencePoolScalerStatus, PlanRole};
use kube_core::ResourceExt;

fn count(cluster: &FakeCluster, role: PlanRole) -> usize {
    let pods = cluster.observed.pods.iter();
    pods.filter(|pod| pod.role == PodRole::Rank(role)).count()
}

/// A spec with that many decode workers of that batch, whose plans are given up after a minute without progress.
fn decoders(replicas: u32, max_batch: u32) -> String {
    format!(
        "decode: {{replicas: {replicas}, maxBatch: {max_batch}}}\nrollout: {{progressDeadline: 1m}}\n"
    )
}

#[test]
fn an_autoscaler_s_number_is_kept_within_its_bounds_and_the_status_says_so() {
    let mut cluster = FakeCluster::new("");
    for (asked, kept, words) in [
        (1, 1, None),
        (
            5,
            2,
            Some("; 5 decode workers are requested, but spec.decode.scaling.maxReplicas is 2"),
        ),
        (2, 2, None),
    ] {
        let scaling = "{mode: External, minReplicas: 1, maxReplicas: 2}";
        cluster.change(&format!(
            "decode: {{replicas: {asked}, scaling: {scaling}}}\n"
        ));
        cluster.settle();
        assert_eq!(count(&cluster, PlanRole::Decode), kept, "{asked}");
        assert_eq!(cluster.status().replicas, Some(kept as u32), "{asked}");
        let message = &cluster.condition(PLANNED).message;
        match words {
            Some(words) => assert!(message.contains(words), "{message}"),
            None => assert!(!message.contains("asked for"), "{message}"),
        }
    }
    cluster.change("decode: {replicas: 1, scaling: {mode: External, minReplicas: 2}}\n");
    cluster.settle();
    let message = &cluster.condition(PLANNED).message;
    let words = "1 decode workers are requested, but spec.decode.scaling.minReplicas is 2";
    assert!(message.contains(words), "{message}");
}

/// The first worker of a node requests the memory for the weights that all there map.
#[test]
fn who_shared_weights_with_a_worker_that_is_not_needed_any_more_goes_on_as_it_is() {
    let numbers = |prefill: u32, decode: u32| {
        format!("prefill: {{replicas: {prefill}}}\ndecode: {{replicas: {decode}}}\n")
    };
    let mut cluster = FakeCluster::new(&numbers(1, 1));
    // Beside the gateway and what stays free, for one worker.
    for name in ["attic", "office"] {
        cluster.node(name, |node| node.cpu_millis = 800);
    }
    let cellar = node("cellar", 4, 4 * GIB);
    let nodes = &mut cluster.observed.nodes;
    nodes.insert(cellar.name.clone(), Arc::new(cellar));
    cluster.node("cellar", |node| node.is_ready = false);
    cluster.settle();
    cluster.node("cellar", |node| node.is_ready = true);
    for (prefill, decode) in [(1, 2), (2, 2)] {
        cluster.change(&numbers(prefill, decode));
        cluster.settle();
    }
    let pod = |cluster: &FakeCluster, rank: &str| {
        let mut pods = cluster.observed.pods.iter();
        let pod = pods.find(|pod| pod.rank == rank).expect("its Pod");
        (pod.node.clone(), pod.uid.clone(), pod.memory_bytes)
    };
    let [first, second] = ["decode-1", "prefill-1"].map(|rank| pod(&cluster, rank));
    assert_eq!((&*first.0, &*second.0), ("cellar", "cellar"));
    assert!(first.2 > second.2, "{first:?} {second:?}");
    cluster.change(&numbers(2, 1));
    cluster.settle();
    assert_eq!(pod(&cluster, "prefill-1"), second);
    assert_eq!(cluster.says(READY), ("True", "Serving"));
    let pods = cluster.observed.pods.iter().map(|pod| &**pod);
    let held = of_deployment(pods, &cluster.observed.plans, None)["cellar"].memory_bytes;
    // A successor of its own requests the weights' memory, too.
    cluster.observed.pods.retain(|pod| pod.rank != "prefill-1");
    cluster.settle();
    let successor = pod(&cluster, "prefill-1");
    assert!(
        successor.1 != second.1 && successor.2 > second.2,
        "{successor:?} {second:?}"
    );
    assert_eq!(held, successor.2, "the ledger has counted it all the while");
}

#[test]
fn more_beyond_the_bound_makes_no_other_plan() {
    let spec = |asked: u32| {
        format!("decode: {{replicas: {asked}, scaling: {{mode: External, maxReplicas: 2}}}}\n")
    };
    let mut cluster = FakeCluster::new(&spec(3));
    cluster.settle();
    let ranks = cluster.ranks();
    // A plan that is made anew would be a different one by now.
    for name in ["attic", "office"] {
        cluster.node(name, |node| {
            let profile = node.profile.as_mut().unwrap();
            profile.memory.available_bytes /= 2;
            profile.memory.read_all_threads_gbps *= 3.0;
        });
    }
    cluster.change(&spec(60));
    cluster.settle();
    assert_eq!(cluster.observed.plans.len(), 1);
    assert_eq!(cluster.ranks(), ranks);
    assert_eq!(cluster.status().observed_generation, Some(2));
}

#[test]
fn the_scale_subresource_counts_the_pods_of_all_plans() {
    let mut cluster = FakeCluster::new("decode: {replicas: 2}\n");
    cluster.settle();
    assert_eq!(cluster.status().replicas, Some(2));
    let selector = "hearth.dev/deployment=demo,hearth.dev/role=decode";
    assert_eq!(cluster.status().selector.as_deref(), Some(selector));
    cluster.change("decode: {replicas: 2, maxBatch: 3}\n");
    let mut most = 0;
    for _ in 0..20 {
        cluster.reconcile();
        cluster.turn();
        most = most.max(cluster.status().replicas.unwrap());
    }
    assert_eq!(most, 4, "two of the old plan beside two of the new one");
    assert_eq!(cluster.status().replicas, Some(2));
    // A Pod that has ended does not count.
    cluster.pod("demo-decode-0", |pod| pod.phase = "Failed".to_owned());
    cluster.reconcile();
    assert_eq!(cluster.status().replicas, Some(1));
}

#[test]
fn the_deprecated_range_is_refused_by_its_own_name_and_old_work_goes_on() {
    let mut cluster = FakeCluster::new("decode: {replicas: 2}\n");
    cluster.settle();
    cluster.change("decode: {minReplicas: 1, maxReplicas: 4}\n");
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("False", "InvalidSpec"));
    let message = &cluster.condition(PLANNED).message;
    let words =
        "spec.decode.maxReplicas is 4: bounds are deprecated here: write spec.decode.replicas: 1";
    assert!(message.contains(words), "{message}");
    assert_eq!(cluster.condition(READY).status, "True");
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
}

/// Makes the autoscaler of the prefill workers ask for this many.
fn ask(cluster: &mut FakeCluster, replicas: u32) {
    let scaler = cluster.observed.scaler.as_mut().expect("a scaler");
    scaler.replicas = replicas;
    scaler.generation = scaler.generation.map(|generation| generation + 1);
}

/// Uids of all Pods, the gateway's among them.
fn uids(cluster: &FakeCluster) -> Vec<String> {
    let pods = cluster.observed.pods.iter();
    pods.map(|pod| pod.uid.clone()).collect()
}

#[test]
fn another_number_replaces_no_gateway_wherever_the_workers_run() {
    let gateway = |cluster: &FakeCluster| -> Vec<(String, String)> {
        let pods = cluster.observed.pods.iter();
        let gateways = pods.filter(|pod| pod.role.is_gateway());
        let told = gateways.map(|pod| (pod.uid.clone(), pod.name.clone()));
        told.collect()
    };
    let on_cpus = ["replicas: 1", "replicas: 2", "replicas: 2", "replicas: 1"];
    let on_gpus = (["mode: Chunked"; 4], &["attic", "office"][..]);
    for (prefill, gpus) in [(on_cpus, &[][..]), on_gpus] {
        let spec = |step: usize, decode: u32| {
            let prefill = prefill[step];
            format!("prefill: {{{prefill}}}\ndecode: {{replicas: {decode}}}\n")
        };
        let mut cluster = of_spec(&spec(0, 1), gpus);
        // The planner would choose another threshold today.
        let plan = cluster.observed.plans.last_mut().expect("a plan");
        Arc::make_mut(plan).spec.routing.chunked_below_tokens = 77;
        cluster.settle();
        let before = gateway(&cluster);
        assert_eq!(before.len(), 1);
        for (step, decode) in [(1, 2), (2, 1), (3, 2)] {
            cluster.change(&spec(step, decode));
            cluster.settle();
            let plan = cluster.observed.plans.last().expect("a plan");
            let workers: Vec<_> = plan.spec.ranks_of(PlanRole::Decode).collect();
            assert_eq!(workers.len(), decode as usize);
            assert!(
                workers
                    .iter()
                    .all(|rank| rank.is_on_gpu() != gpus.is_empty())
            );
            assert_eq!(gateway(&cluster), before, "{gpus:?}, step {step}");
        }
    }
}

#[test]
fn prefill_workers_follow_their_scaler() {
    let spec = "prefill: {replicas: 2, scaling: {mode: External, maxReplicas: 3}}\n";
    let mut cluster = FakeCluster::new(spec);
    let decision = cluster.reconcile();
    let Some(ScalerStep::Create(made)) = &decision.scaler else {
        panic!("{:?}", decision.scaler);
    };
    assert_eq!(made.metadata.name.as_deref(), Some("demo-prefill"));
    assert_eq!((&*made.spec.deployment, made.spec.replicas), ("demo", 2));
    let owners = made.metadata.owner_references.as_ref().unwrap();
    assert_eq!((&*owners[0].name, &*owners[0].uid), ("demo", "0b1c"));
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Prefill), 2);
    let told = |generation, replicas, desired_replicas| InferencePoolScalerStatus {
        observed_generation: Some(generation),
        replicas,
        desired_replicas,
        selector: "hearth.dev/deployment=demo,hearth.dev/role=prefill".to_owned(),
    };
    let status = |cluster: &FakeCluster| cluster.observed.scaler.clone().unwrap().status;
    assert_eq!(status(&cluster), Some(told(1, 2, 2)));

    // What runs stays where it is.
    let before = uids(&cluster);
    ask(&mut cluster, 3);
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Prefill), 3);
    assert_eq!(status(&cluster), Some(told(2, 3, 3)));
    let after = uids(&cluster);
    assert!(
        before.iter().all(|uid| after.contains(uid)),
        "{before:?} {after:?}"
    );

    // Beyond the bound nothing happens, and both objects say so.
    ask(&mut cluster, 60);
    cluster.settle();
    assert_eq!(uids(&cluster), after);
    assert_eq!(status(&cluster), Some(told(3, 3, 3)));
    let message = &cluster.condition(PLANNED).message;
    let words = "60 prefill workers are requested, but spec.prefill.scaling.maxReplicas is 3";
    assert!(message.contains(words), "{message}");

    // The deployment's number no longer counts.
    cluster.change("prefill: {replicas: 1, scaling: {mode: External, maxReplicas: 3}}\n");
    cluster.settle();
    assert_eq!(uids(&cluster), after);
}

#[test]
fn a_scaler_that_somebody_deletes_comes_again_with_what_is_in_force() {
    let mut cluster = FakeCluster::new("prefill: {scaling: {mode: External}}\n");
    cluster.settle();
    ask(&mut cluster, 3);
    cluster.settle();
    let before = uids(&cluster);
    cluster.observed.scaler = None;
    cluster.settle();
    let scaler = cluster.observed.scaler.clone().expect("it is recreated");
    assert_eq!(scaler.replicas, 3);
    assert_eq!(uids(&cluster), before);
}

#[test]
fn a_scaler_goes_with_its_mode_and_then_the_deployment_has_the_number() {
    let mut cluster = FakeCluster::new("prefill: {scaling: {mode: External}}\n");
    cluster.settle();
    ask(&mut cluster, 3);
    cluster.settle();
    // A rejected spec does not affect it.
    cluster.change("prefill: {replicas: 2}\ndecode: {maxBatch: 0}\n");
    cluster.settle();
    assert!(cluster.observed.scaler.is_some());
    assert_eq!(count(&cluster, PlanRole::Prefill), 3);
    cluster.change("prefill: {replicas: 2}\n");
    cluster.settle();
    assert_eq!(cluster.observed.scaler, None);
    assert_eq!(count(&cluster, PlanRole::Prefill), 2);
    // When it comes back, it starts with the deployment's number.
    cluster.change("prefill: {replicas: 2, scaling: {mode: External, minReplicas: 2}}\n");
    cluster.settle();
    let scaler = cluster.observed.scaler.clone().unwrap();
    assert_eq!(scaler.replicas, 2);
}

#[test]
fn a_scaler_of_a_deployment_that_scales_nothing_else_is_not_made() {
    for spec in [
        "",
        "prefill: {scaling: {}}\n",
        "decode: {scaling: {mode: External}}\n",
    ] {
        let mut cluster = FakeCluster::new(spec);
        cluster.settle();
        assert_eq!(cluster.observed.scaler, None, "{spec}");
    }
}

/// Reconciles for this many seconds.
fn go_on(cluster: &mut FakeCluster, seconds: u32) {
    for _ in 0..seconds {
        cluster.turn();
        cluster.reconcile();
        assert_eq!(cluster.condition(READY).status, "True");
    }
}

#[test]
fn another_number_in_the_middle_of_a_rollout_joins_it() {
    let mut cluster = FakeCluster::new("decode: {replicas: 2}\n");
    cluster.settle();
    let old = uids(&cluster);
    cluster.change("decode: {replicas: 2, maxBatch: 3}\n");
    cluster.broken_from = 2;
    go_on(&mut cluster, 3);
    let of_plan = |cluster: &FakeCluster, generation: u64| -> Vec<String> {
        let pods = cluster.observed.pods.iter();
        let pods = pods.filter(|pod| pod.plan_generation == generation && !pod.is_deleting);
        pods.map(|pod| pod.uid.clone()).collect()
    };
    let begun = of_plan(&cluster, 2);
    assert!(!begun.is_empty());
    for (replicas, more) in [(3, 1), (4, 2), (3, 1)] {
        cluster.change(&format!("decode: {{replicas: {replicas}, maxBatch: 3}}\n"));
        go_on(&mut cluster, 3);
        // What the rollout has begun stays, as does all that serves; the difference comes and goes.
        assert_eq!(of_plan(&cluster, 2), begun, "{replicas}");
        let now = uids(&cluster);
        assert!(old.iter().all(|uid| now.contains(uid)), "{old:?} {now:?}");
        assert_eq!(now.len(), old.len() + begun.len() + more, "{replicas}");
    }
    cluster.broken_from = u64::MAX;
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 3);
    let now = uids(&cluster);
    assert!(
        begun.iter().all(|uid| now.contains(uid)),
        "{begun:?} {now:?}"
    );
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
}

#[test]
fn an_autoscaler_that_keeps_asking_does_not_keep_a_broken_plan() {
    let spec = |replicas: u32| {
        format!(
            "decode: {{replicas: {replicas}, maxBatch: 3}}\nrollout: {{progressDeadline: 1m}}\n"
        )
    };
    let mut cluster = FakeCluster::new("decode: {replicas: 1}\n");
    cluster.settle();
    cluster.broken_from = 2;
    for round in 0..8 {
        cluster.change(&spec(1 + round % 2));
        go_on(&mut cluster, 10);
    }
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    let message = &cluster.condition(PLANNED).message;
    assert!(message.contains("no progress for 1m"), "{message}");
}

#[test]
fn workers_that_load_are_progress_whatever_number_is_asked_for_meanwhile() {
    let spec = |replicas: u32| {
        format!(
            "decode: {{replicas: {replicas}, maxBatch: 3}}\nrollout: {{progressDeadline: 1m}}\n"
        )
    };
    let mut cluster = FakeCluster::new("decode: {replicas: 2}\n");
    cluster.settle();
    cluster.change(&spec(2));
    cluster.broken_from = 2;
    go_on(&mut cluster, 3);
    for pod in &mut cluster.observed.pods {
        if pod.plan_generation == 2 {
            Arc::make_mut(pod).container = Some(ContainerView {
                running_since: Some(cluster.observed.now),
                is_starting: true,
                ..ContainerView::default()
            });
        }
    }
    // One worker less adds no Pod: the one that is loading is of the previous plan.
    cluster.change(&spec(1));
    go_on(&mut cluster, 90);
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    let plan = cluster.status().plan.clone().unwrap();
    assert_eq!(plan.generation, 3);
}

#[test]
fn after_a_rollback_the_number_is_that_of_what_serves_and_nothing_is_tried_again() {
    let mut cluster = FakeCluster::new(&decoders(1, 6));
    cluster.settle();
    cluster.broken_from = 2;
    cluster.change(&decoders(1, 3));
    go_on(&mut cluster, 65);
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    let generation = |cluster: &FakeCluster| cluster.status().plan.clone().unwrap().generation;
    assert_eq!(generation(&cluster), 1);
    let before = uids(&cluster);

    // What serves can grow and shrink meanwhile.
    cluster.broken_from = u64::MAX;
    for (replicas, plan) in [(3, 3), (2, 4), (2, 4)] {
        cluster.change(&decoders(replicas, 3));
        cluster.settle();
        assert_eq!(generation(&cluster), plan, "{replicas}");
        assert_eq!(count(&cluster, PlanRole::Decode), replicas as usize);
        assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"), "{replicas}");
        let message = &cluster.condition(PLANNED).message;
        assert!(message.contains("plan 2 was given up"), "{message}");
        let now = uids(&cluster);
        assert!(
            before.iter().all(|uid| now.contains(uid)),
            "{before:?} {now:?}"
        );
        let ranks = cluster.observed.plans.last().unwrap().spec.ranks.clone();
        assert!(ranks.iter().all(|rank| rank.max_batch != 3));
    }
    // Any other change of the spec is tried again.
    cluster.change(&decoders(2, 4));
    cluster.settle();
    assert_eq!(cluster.says(PLANNED), ("True", "Planned"));
    let ranks = cluster.observed.plans.last().unwrap().spec.ranks.clone();
    assert!(ranks.iter().any(|rank| rank.max_batch == 4));
}

#[test]
fn a_number_that_was_asked_for_during_a_rollout_outlasts_its_end() {
    let mut cluster = FakeCluster::new(&decoders(1, 6));
    cluster.settle();
    cluster.broken_from = 2;
    cluster.change(&decoders(1, 3));
    go_on(&mut cluster, 20);
    cluster.change(&decoders(2, 3));
    go_on(&mut cluster, 45);
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    cluster.broken_from = u64::MAX;
    cluster.settle();
    assert_eq!(count(&cluster, PlanRole::Decode), 2);
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
    let newest = cluster.observed.plans.last().unwrap();
    assert_eq!(
        cluster.status().plan.clone().unwrap().name,
        newest.name_any()
    );
    assert!(newest.spec.ranks.iter().all(|rank| rank.max_batch != 3));
    assert!(decide(&cluster.observed).create_plan.is_none());
}

#[test]
fn a_number_that_does_not_come_up_after_a_rollback_is_given_up_once() {
    let mut cluster = FakeCluster::new(&decoders(1, 6));
    cluster.settle();
    cluster.broken_from = 2;
    cluster.change(&decoders(1, 3));
    go_on(&mut cluster, 65);
    cluster.change(&decoders(2, 3));
    go_on(&mut cluster, 200);
    cluster.settle();
    assert_eq!(cluster.status().plan.clone().unwrap().generation, 1);
    assert_eq!(cluster.observed.plans.last().unwrap().spec.generation, 3);
    assert_eq!(cluster.says(PLANNED), ("False", "RolledBack"));
}
