//! Tests of which changes alter digests, and that digests are the same in every version.

use std::collections::BTreeMap;

use hearth_crds::{
    EndpointType, InferenceDeployment, InferencePlanSpec, Pinning, PlanActivations,
    PlanExpertParallel, PlanKvGather, PlanMlaForm, PlanPeers, PlanRank, PlanRing, PlanRingLength,
    PlanRole, PlanWindow, ResidencyPolicy, SecretRef, TolerationSpec,
};
use serde_json::json;

use super::DesiredPod;
use super::tests::pods_of;
use crate::names::ANNOTATION_PLAN;
use crate::observed::Settings;
use crate::testing::samples::{deployment, deployment_of, plan, settings};

pub(super) fn hashes(
    settings: &Settings,
    deployment: &InferenceDeployment,
    plan: &InferencePlanSpec,
) -> Vec<String> {
    let pods = pods_of(settings, deployment, plan);
    let digest = |pod: DesiredPod| pod.name.rsplit('-').next().map(str::to_owned);
    pods.into_iter().filter_map(digest).collect()
}

/// A change that reaches Pods, and the ranks whose Pods it reaches.
type Change = (
    &'static str,
    fn(&mut Settings, &mut InferenceDeployment, &mut InferencePlanSpec),
    &'static [usize],
);

const ALL: &[usize] = &[0, 1, 2, 3];

const CHANGES: &[Change] = &[
    ("image", |s, _, _| s.worker_image = "x:2".to_owned(), ALL),
    (
        "the plan's image",
        |_, _, p| p.worker_image = Some("x:2".to_owned()),
        ALL,
    ),
    (
        "pull policy",
        |s, _, _| s.pull_policy = "Always".to_owned(),
        &[],
    ),
    (
        "pull secret",
        |s, _, _| s.pull_secrets = vec!["regcred".to_owned()],
        &[],
    ),
    (
        "passing taints",
        |s, _, _| s.nodes.passing_taints.clear(),
        &[],
    ),
    (
        "owner",
        |_, d, _| d.metadata.uid = Some("another".to_owned()),
        ALL,
    ),
    (
        "toleration",
        |_, d, _| {
            d.spec.placement.tolerations = vec![TolerationSpec {
                key: Some("gpu".to_owned()),
                ..TolerationSpec::default()
            }];
        },
        ALL,
    ),
    (
        "API keys",
        |_, d, _| {
            d.spec.endpoint.api_keys_secret_ref = Some(SecretRef {
                name: "keys".to_owned(),
            });
        },
        &[0],
    ),
    (
        "connections",
        |_, d, _| d.spec.endpoint.keep_alive = "10m".parse().ok(),
        &[0],
    ),
    (
        "source",
        |_, d, _| {
            d.spec.model.source =
                serde_json::from_value(json!({"hostPath": {"path": "/models/x"}})).expect("source");
        },
        ALL,
    ),
    ("another model", |_, _, p| p.model.parameter_count += 1, ALL),
    (
        "served name",
        |_, _, p| p.model.served_name = "x".to_owned(),
        &[0],
    ),
    ("context", |_, _, p| p.model.context_length = 4096, ALL),
    ("routing", |_, _, p| p.routing.max_queue = 512, &[0]),
    ("node", |_, _, p| p.ranks[3].node = "c".to_owned(), &[3]),
    ("CPUs", |_, _, p| p.ranks[2].cpus = vec![0], &[2]),
    (
        "NUMA nodes",
        |_, _, p| p.ranks[2].numa_nodes = vec![1],
        &[2],
    ),
    ("threads", |_, _, p| p.ranks[2].threads = 1, &[2]),
    (
        "pinning",
        |_, _, p| p.ranks[2].pinning = Pinning::Exclusive,
        &[2],
    ),
    ("GPUs", |_, _, p| p.ranks[1].gpus = 1, &[1]),
    (
        "runtime class of Pods without GPUs",
        |s, d, _| {
            s.gpu_runtime_class = Some("nvidia".to_owned());
            d.spec.pod_template.runtime_class_name = Some("other".to_owned());
        },
        &[],
    ),
    (
        "KV",
        |_, _, p| {
            if let Some(kv) = &mut p.ranks[2].kv {
                kv.memory_bytes *= 2;
            }
        },
        &[2],
    ),
    (
        "residency",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[1].residency {
                residency.policy = ResidencyPolicy::MmapPrefetch;
            }
        },
        &[1],
    ),
    (
        "slots of the ring",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[1].residency {
                residency.ring_slots = Some(16);
            }
        },
        &[1],
    ),
    (
        "lengths of the ring",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[1].residency {
                residency.ring_lengths = vec![PlanRingLength {
                    prompt_tokens: 64,
                    slots: 8,
                }];
            }
        },
        &[1],
    ),
    (
        "dense modules that stream",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[1].residency {
                residency.streams_dense = true;
            }
        },
        &[1],
    ),
    (
        "cached experts",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[2].residency {
                residency.cache_slots = Some(16);
            }
        },
        &[2],
    ),
    (
        "experts in the node's memory",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[1].residency {
                residency.host_bytes = 1 << 20;
            }
        },
        &[1],
    ),
    (
        "experts in memory at a time",
        |_, _, p| {
            if let Some(residency) = &mut p.ranks[2].residency {
                residency.host_budget_bytes = Some(1 << 20);
            }
        },
        &[2],
    ),
    ("half batches", |_, _, p| p.ranks[2].dual_batch = true, &[2]),
    (
        "virtual device",
        |_, _, p| p.ranks[1].virtual_device = Some("virtual:memory=1Gi".to_owned()),
        &[1],
    ),
    (
        "expanded latents",
        |_, _, p| p.ranks[1].mla_form = PlanMlaForm::Expanded,
        &[1],
    ),
    (
        "rounded activations",
        |_, _, p| p.ranks[1].activations = PlanActivations::BF16,
        &[1],
    ),
    ("batch", |_, _, p| p.ranks[2].max_batch = 9, &[2]),
    ("chunk", |_, _, p| p.ranks[2].chunk_tokens = 16, &[2]),
    (
        "read ahead",
        |_, _, p| {
            let residency = p.ranks[2].residency.as_mut();
            residency.unwrap().read_ahead_bytes = Some(1 << 20);
        },
        &[2],
    ),
    (
        "idle chunk",
        |_, _, p| p.ranks[2].idle_chunk_tokens = Some(512),
        &[2],
    ),
    ("scratch", |_, _, p| p.ranks[2].scratch_bytes += 1, &[2]),
];

#[test]
fn a_digest_changes_with_everything_that_matters_and_only_then() {
    let before = hashes(&settings(), &deployment(), &plan());
    for (what, change, reached) in CHANGES {
        let (mut settings, mut deployment, mut plan) = (settings(), deployment(), plan());
        change(&mut settings, &mut deployment, &mut plan);
        let after = hashes(&settings, &deployment, &plan);
        let differing: Vec<usize> = (0..before.len())
            .filter(|&n| before[n] != after[n])
            .collect();
        assert_eq!(&differing, reached, "{what}");
    }
}

#[test]
fn a_ring_is_replaced_as_a_whole() {
    let in_ring = |window: u32| {
        let mut plan = plan();
        for (place, n) in [(0, 2), (1, 3)] {
            let rank = &mut plan.ranks[n];
            rank.ring = Some(PlanRing {
                head: "decode-0".to_owned(),
                place,
                windows: vec![PlanWindow {
                    first_layer: place * window,
                    layers: window,
                }],
                flight_tokens: 64,
            });
            if place > 0 {
                (rank.name, rank.role) = ("stage-0".to_owned(), PlanRole::Stage);
            }
        }
        plan
    };
    let hashes = |plan: &InferencePlanSpec| hashes(&settings(), &deployment(), plan);
    let before = hashes(&in_ring(2));
    let mut moved = in_ring(2);
    moved.ranks[3].node = "c".to_owned();
    let mut longer_flights = in_ring(2);
    for n in [2, 3] {
        longer_flights.ranks[n].ring.as_mut().unwrap().flight_tokens = 128;
    }
    for after in [hashes(&in_ring(3)), hashes(&moved), hashes(&longer_flights)] {
        let differs: Vec<bool> = (0..4).map(|n| before[n] != after[n]).collect();
        assert_eq!(differs, [false, false, true, true]);
    }
    // Members on GPUs alone have a runtime class, and the others go with them.
    let mut on_gpu = in_ring(2);
    on_gpu.ranks[3].gpus = 1;
    let before = hashes(&on_gpu);
    let mut other = deployment();
    other.spec.pod_template.runtime_class_name = Some("other".to_owned());
    let after = self::hashes(&settings(), &other, &on_gpu);
    let differs: Vec<bool> = (0..4).map(|n| before[n] != after[n]).collect();
    assert_eq!(differs, [false, false, true, true]);
}

/// The plan with a follower of its prefill rank, among so many peers, in the Pod of `in_pod_of` if that is a rank.
fn with_peers(ranks: u32, in_pod_of: Option<&str>) -> InferencePlanSpec {
    let mut plan = plan();
    let prefill = plan.ranks[1].clone();
    plan.ranks.push(PlanRank {
        name: "stage-0".to_owned(),
        role: PlanRole::Stage,
        in_pod_of: in_pod_of.map(str::to_owned),
        ..prefill
    });
    for (place, n) in [(0, 1), (1, 4)] {
        plan.ranks[n].peers = Some(PlanPeers {
            head: "prefill-0".to_owned(),
            place,
            ranks,
            experts: PlanExpertParallel::SmallEp,
            stands_in: false,
            kv: PlanKvGather::Direct,
        });
    }
    plan
}

#[test]
fn peers_are_replaced_as_a_whole_and_their_head_gets_the_others() {
    let of = |ranks: u32| with_peers(ranks, None);
    let hashes = |plan: &InferencePlanSpec| hashes(&settings(), &deployment(), plan);
    let mut moved = of(2);
    moved.ranks[4].threads += 1;
    let before = hashes(&of(2));
    for after in [hashes(&of(3)), hashes(&moved)] {
        let differs: Vec<bool> = (0..5).map(|n| before[n] != after[n]).collect();
        assert_eq!(differs, [false, true, false, false, true]);
    }
    let mut stands_in = of(2);
    let peers = stands_in.ranks[4].peers.as_mut().expect("peers");
    peers.stands_in = true;
    assert_ne!(before[4], hashes(&stands_in)[4]);
    let pods = pods_of(&settings(), &deployment(), &of(2));
    assert_eq!(pods[1].group, ["prefill-0", "stage-0"]);
    let pod = serde_json::to_string(&pods[1].pod).expect("JSON");
    assert!(pod.contains("\"--routes\""), "{pod}");
}

#[test]
fn the_pod_of_a_decode_rank_is_replaced_with_the_peers_of_its_second_rank() {
    let of = |ranks: u32| with_peers(ranks, Some("decode-0"));
    let hashes = |plan: &InferencePlanSpec| hashes(&settings(), &deployment(), plan);
    let before = hashes(&of(2));
    assert_eq!(before.len(), 4, "the follower has no Pod of its own");
    let mut moved = of(2);
    moved.ranks[1].threads += 1;
    for after in [hashes(&of(4)), hashes(&moved)] {
        let differs: Vec<bool> = (0..4).map(|n| before[n] != after[n]).collect();
        assert_eq!(differs, [false, true, true, false]);
    }
    let pods = pods_of(&settings(), &deployment(), &of(2));
    assert_eq!(pods[1].group, ["prefill-0", "stage-0"]);
    assert!(pods[2].group.is_empty(), "it leads none");
    let pod = serde_json::to_string(&pods[2].pod).expect("JSON");
    assert!(!pod.contains("\"--routes\""), "{pod}");
}

#[test]
fn the_head_of_a_ring_alone_gets_the_others_and_their_addresses() {
    let (settings, deployment, mut plan) = (settings(), deployment(), plan());
    for (place, n) in [(0, 2), (1, 3)] {
        plan.ranks[n].ring = Some(PlanRing {
            head: "decode-0".to_owned(),
            place,
            windows: Vec::new(),
            flight_tokens: 64,
        });
    }
    (plan.ranks[3].name, plan.ranks[3].role) = ("stage-0".to_owned(), PlanRole::Stage);
    let pods = pods_of(&settings, &deployment, &plan);
    let names = |n: usize| {
        let notes = pods[n].pod.metadata.annotations.clone().unwrap_or_default();
        let slice: InferencePlanSpec = serde_json::from_str(&notes[ANNOTATION_PLAN]).expect("plan");
        let names = slice.ranks.into_iter().map(|rank| rank.name);
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(2), ["decode-0", "stage-0"]);
    assert_eq!(names(3), ["stage-0"]);
    let reads_routes = |n: usize| {
        let pod = serde_json::to_string(&pods[n].pod).expect("JSON");
        pod.contains("\"--routes\"") && pod.contains("routes.json\"")
    };
    assert_eq!([0, 1, 2, 3].map(reads_routes), [true, false, true, false]);
}

#[test]
fn a_digest_outlives_its_plan() {
    let before = hashes(&settings(), &deployment(), &plan());
    let mut later = plan();
    later.generation = 7;
    later.predicted.tpot_ms = 3.0;
    later.ranks[2].predicted = None;
    later.objectives.time_per_output_token = Some("50ms".parse().expect("duration"));
    later.why.clear();
    let mut deployment = deployment();
    deployment.metadata.generation = Some(9);
    deployment.metadata.resource_version = Some("77".to_owned());
    deployment.metadata.labels = Some(BTreeMap::from([("team".to_owned(), "x".to_owned())]));
    deployment.spec.decode.replicas = Some(3);
    deployment.spec.endpoint.type_ = EndpointType::NodePort;
    assert_eq!(before, hashes(&settings(), &deployment, &later));
}

/// These never change: a version with other digests restarts every worker of every cluster that is upgraded to it.
#[test]
fn digests_are_the_same_in_every_version() {
    assert_eq!(
        hashes(&settings(), &deployment(), &plan()),
        ["34ccec1d", "014a1483", "ef045af5", "47f246e4"]
    );
    let sha256 = "0123456789abcdef".repeat(4);
    let sources = [
        json!({"hostPath": {"path": "/models/x"}}),
        json!({"persistentVolumeClaim": {"claimName": "c", "path": "a/b"}}),
        json!({"http": {"url": "https://nas.lan/m.tar", "sha256": sha256}}),
    ];
    let mut rich = plan();
    rich.ranks[1].gpus = 1;
    rich.ranks[1].gpu_uuids = vec!["GPU-1".to_owned()];
    rich.ranks[1].gpu_memory_bytes = 1 << 30;
    let of_source = |source| hashes(&settings(), &deployment_of(source), &rich)[1].clone();
    assert_eq!(sources.map(of_source), ["aad82b46", "4ac9ff4a", "5a3d09cf"]);
}

#[test]
fn a_form_tells_what_a_digest_does_not() {
    let form = |settings: &Settings| pods_of(settings, &deployment(), &plan())[1].form.clone();
    let with_secret = Settings {
        pull_secrets: vec!["regcred".to_owned()],
        ..settings()
    };
    assert_ne!(form(&settings()), form(&with_secret));
}
