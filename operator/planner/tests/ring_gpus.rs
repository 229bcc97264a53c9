//! Plans of rings whose members are GPUs, too.
#![allow(clippy::unwrap_used)] // a test that cannot plan has failed

mod support;

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    Activations, GpuProfile, InferenceDeploymentSpec, InferencePlanSpec, MemoryQuantity,
    NodeProfileStatus, PlanActivations, PlanRank, PlanRole, PlanStrategy,
};
use hearth_planner::{Advice, GpuOffer, PlanError, PlanInput, plan};
use support::advice::followed;
use support::rings::{check, machine, members};
use support::{
    GIB, MIB, claims, demo_model, dense_1_7b, gpu, plan_input, plan_input_here, plugin, qwen3_30b,
    spec,
};

const RING: &str = "strategy: PipedRing\n";

/// A box whose memory holds all of Qwen3-30B-A3B, with GPUs.
fn attic(gpus: Vec<GpuProfile>) -> NodeProfileStatus {
    NodeProfileStatus {
        gpus,
        ..machine("attic", 8, 48)
    }
}

/// The ring that these nodes make by themselves, with all their GPUs.
fn ring(yaml: &str, nodes: &[NodeProfileStatus]) -> InferencePlanSpec {
    ring_of(yaml, nodes, GpuOffer::Machine)
}

fn ring_of(yaml: &str, nodes: &[NodeProfileStatus], gpus: GpuOffer<'_>) -> InferencePlanSpec {
    let (spec, facts) = (spec(&format!("{RING}{yaml}")), qwen3_30b());
    let plan = plan(&PlanInput {
        gpus,
        ..plan_input(&spec, &facts, nodes)
    })
    .unwrap();
    assert_eq!(plan.strategy, PlanStrategy::PipedRing);
    check(&plan, &facts, nodes);
    plan
}

/// The members of a plan on GPUs.
fn on_gpus(plan: &InferencePlanSpec) -> Vec<&PlanRank> {
    let members = members(plan).into_iter();
    members.filter(|rank| rank.is_on_gpu()).collect()
}

fn layers(rank: &PlanRank) -> u32 {
    let windows = rank.ring.iter().flat_map(|ring| &ring.windows);
    windows.map(|window| window.layers).sum()
}

fn has_line(lines: &[String], begin: &str, part: &str) -> bool {
    lines
        .iter()
        .any(|line| line.starts_with(begin) && line.contains(part))
}

#[test]
fn a_gpu_takes_the_layers_that_it_has_room_for_and_the_cpus_beside_it_the_others() {
    // A third of the model.
    let nodes = [attic(vec![gpu("RTX 3080", 1, 12)])];
    let plan = ring("", &nodes);
    let members = members(&plan);
    assert_eq!(members.len(), 2, "{:#?}", plan.why);
    let [on_gpu] = on_gpus(&plan)[..] else {
        panic!("{:#?}", plan.why);
    };
    let on_cpus = members.iter().find(|rank| !rank.is_on_gpu()).unwrap();
    assert!(layers(on_gpu) >= 12 && layers(on_cpus) > layers(on_gpu));
    assert_eq!(on_gpu.device_name, nodes[0].gpus[0].uuid);
    assert_eq!((on_gpu.gpus, on_cpus.gpus), (1, 0));
    assert_eq!(on_gpu.activations, PlanActivations::BF16);
    assert_eq!(on_cpus.activations, PlanActivations::F32);
    assert!(on_gpu.threads <= hearth_crds::GPU_RANK_THREADS);
    // Each has the KV of its own layers, for the same number of tokens.
    let kv_a_layer = |rank: &PlanRank| {
        let kv_bytes = rank.kv.as_ref().unwrap().memory_bytes;
        kv_bytes / u64::from(layers(rank))
    };
    assert_eq!(kv_a_layer(on_gpu), kv_a_layer(on_cpus));

    let without = ring("prefill: {gpusPerWorker: 0}\n", &nodes);
    assert!(on_gpus(&without).is_empty());
    assert!(
        plan.predicted.tpot_ms < 0.85 * without.predicted.tpot_ms,
        "{} ms and {} ms",
        plan.predicted.tpot_ms,
        without.predicted.tpot_ms
    );
    assert!(plan.predicted.ttft_ms < without.predicted.ttft_ms);
    let said = [plan.why, plan.not_chosen].concat().join("\n");
    insta::assert_snapshot!(said);
}

/// Neither the memory nor the GPU holds the model, and both together do.
#[test]
fn auto_says_how_a_box_becomes_a_ring_of_its_cpus_and_its_gpu() {
    let box_of = |memory_gib, gpus| NodeProfileStatus {
        gpus,
        ..machine("attic", 8, memory_gib)
    };
    let facts = qwen3_30b();
    let auto = |yaml: &str, node: &NodeProfileStatus| {
        let (spec, nodes) = (spec(yaml), [node.clone()]);
        plan(&plan_input_here(&spec, &facts, &nodes))
    };
    let words =
        "spec.strategy is Auto, which makes none of a single node's CPUs and GPUs: write PipedRing";
    // It reads from its disk what it has no room for.
    let with_gpu = box_of(26, vec![gpu("RTX 3080", 1, 12)]);
    let ring = ring("", std::slice::from_ref(&with_gpu));
    assert_eq!(members(&ring).len(), 2);
    let plan = auto("", &with_gpu).unwrap();
    assert!(plan.predicted.tpot_ms > ring.predicted.tpot_ms);
    let begin = "a piped ring over attic: predicted TPOT ";
    assert!(
        has_line(&plan.not_chosen, begin, words),
        "{:#?}",
        plan.not_chosen
    );
    let of_two = auto("prefill: {replicas: 1}\ndecode: {replicas: 2}\n", &with_gpu).unwrap();
    let both = format!(
        "{words}; spec.prefill.replicas is 1: a ring reads prompts itself: remove it; spec.decode.replicas is 2: "
    );
    assert!(
        has_line(&of_two.not_chosen, "a piped ring over attic", &both),
        "{:#?}",
        of_two.not_chosen
    );
    // Without a GPU, or with one that no worker may use, there is nothing to propose.
    let bare = box_of(26, Vec::new());
    for (yaml, node) in [("", &bare), ("prefill: {gpusPerWorker: 0}\n", &with_gpu)] {
        let plan = auto(yaml, node).unwrap();
        assert!(
            !has_line(&plan.not_chosen, "", words),
            "{:#?}",
            plan.not_chosen
        );
    }
}

#[test]
fn gpus_are_used_unless_the_spec_says_that_no_worker_uses_one() {
    let nodes = [attic(vec![gpu("RTX 3080", 1, 12)])];
    let plan = ring("prefill: {gpusPerWorker: 0}\n", &nodes);
    assert!(has_line(
        &plan.not_chosen,
        "GPUs of attic: spec.prefill.gpusPerWorker is 0",
        ""
    ));
    // Exactly what there would be without them.
    let bare = ring("", &[attic(Vec::new())]);
    assert_eq!(plan.ranks, bare.ranks);
    assert_eq!(plan.predicted, bare.predicted);
}

#[test]
fn the_whole_model_is_on_a_gpu_that_holds_it() {
    let nodes = [attic(vec![gpu("A6000", 1, 48)]), machine("cellar", 4, 40)];
    let plan = ring("", &nodes);
    let members = members(&plan);
    assert_eq!(members.len(), 1, "{:#?}", plan.why);
    assert!(members[0].is_on_gpu());
    assert_eq!(members[0].role, PlanRole::Decode);
    assert!(has_line(&plan.why, "A6000 of attic alone is faster", ""));
    assert!(has_line(&plan.not_chosen, "CPUs of attic in the ring", ""));
    assert!(has_line(&plan.not_chosen, "cellar in the ring", ""));
}

#[test]
fn gpus_of_several_nodes_are_in_one_ring_and_members_of_a_node_are_neighbours() {
    let nodes = [
        NodeProfileStatus {
            gpus: vec![gpu("RTX 3080", 1, 12), gpu("RTX 3080", 2, 12)],
            ..machine("attic", 8, 12)
        },
        NodeProfileStatus {
            gpus: vec![gpu("RTX 4060", 3, 8)],
            ..machine("cellar", 4, 10)
        },
    ];
    let plan = ring("", &nodes);
    assert_eq!(on_gpus(&plan).len(), 3, "{:#?}", plan.why);
    let on: Vec<&str> = members(&plan).iter().map(|rank| &*rank.node).collect();
    let moves = on.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert_eq!(moves, 1, "{on:?}");
    let uuids: BTreeSet<&str> = on_gpus(&plan).iter().map(|r| &*r.gpu_uuids[0]).collect();
    assert_eq!(uuids.len(), 3);
    assert!(has_line(&plan.why, "RTX 3080 2 of attic: layer", ""));
    assert!(!plan.why.iter().any(|line| line.contains("not measured")));
    let without = ring("prefill: {gpusPerWorker: 0}\n", &nodes);
    assert!(plan.predicted.tpot_ms < without.predicted.tpot_ms);
}

#[test]
fn gpus_that_cannot_be_members_are_left_out_with_the_reason() {
    let small = GpuProfile {
        free_bytes: GIB,
        ..gpu("GT 1030", 1, 2)
    };
    let broken = GpuProfile {
        obstacle: Some("its driver does not answer".to_owned()),
        ..gpu("L4", 2, 24)
    };
    let nodes = [attic(vec![small, broken])];
    let plan = ring("", &nodes);
    assert!(on_gpus(&plan).is_empty());
    let lines = &plan.not_chosen;
    assert!(
        has_line(lines, "GT 1030 of attic: a layer takes ", "working room"),
        "{lines:#?}"
    );
    assert!(has_line(
        lines,
        "L4 of attic cannot be used: its driver does not answer",
        ""
    ));
    // One that would drag: slower than the CPUs.
    let slow = GpuProfile {
        read_gbps: 4.0,
        bf16_gflops: 100.0,
        ..gpu("Quadro", 1, 12)
    };
    let plan = ring("", &[attic(vec![slow])]);
    assert!(on_gpus(&plan).is_empty());
    assert!(
        has_line(&plan.not_chosen, "Quadro of attic in the ring: ", ""),
        "{:#?}",
        plan.not_chosen
    );
    assert_eq!(plan.ranks, ring("", &[attic(Vec::new())]).ranks);
}

#[test]
fn a_gpus_process_needs_memory_of_its_node() {
    // Less than the processes of a GPU's member and the gateway take.
    let tiny = NodeProfileStatus {
        gpus: vec![gpu("RTX 3080", 1, 12)],
        ..machine("attic", 8, 1)
    };
    let mut starved = tiny.clone();
    starved.memory.available_bytes = 600 << 20;
    let nodes = |first: NodeProfileStatus| [first, machine("cellar", 8, 48)];
    let plan = ring("", &nodes(starved));
    assert!(on_gpus(&plan).is_empty());
    assert!(
        has_line(&plan.not_chosen, "RTX 3080 of attic: ", "of its memory"),
        "{:#?}",
        plan.not_chosen
    );
    // With a little more, the GPU is a member without its node's CPUs.
    let plan = ring("", &nodes(tiny));
    let of_attic: Vec<bool> = members(&plan)
        .iter()
        .filter(|rank| rank.node == "attic")
        .map(|rank| rank.is_on_gpu())
        .collect();
    assert_eq!(of_attic, [true], "{:#?}", plan.why);
}

#[test]
fn a_cluster_gives_the_gpus_that_it_has_left() {
    let nodes = [attic(vec![gpu("L4", 1, 12), gpu("L4", 2, 12)])];
    for free in 0..=2 {
        let free = BTreeMap::from([("attic".to_owned(), free)]);
        let plan = ring_of("", &nodes, plugin(&free));
        let held: u32 = plan.ranks.iter().map(|rank| rank.gpus).sum();
        assert_eq!(held, free["attic"]);
        assert_eq!(on_gpus(&plan).len(), held as usize);
        let is_told = has_line(&plan.not_chosen, "", "GPUs of attic are taken");
        assert_eq!(is_told, held < 2, "{:#?}", plan.not_chosen);
        assert!(plan.ranks.iter().all(|rank| !rank.claims_gpus));
    }
    let uuid = nodes[0].gpus[1].uuid.clone();
    let one = BTreeMap::from([("attic".to_owned(), BTreeSet::from([uuid.clone()]))]);
    let plan = ring_of("", &nodes, claims(&one));
    let [rank] = on_gpus(&plan)[..] else {
        panic!("{:#?}", plan.why);
    };
    assert!(rank.claims_gpus);
    assert_eq!(rank.gpu_uuids, [uuid]);
}

#[test]
fn a_virtual_device_is_a_member_that_holds_no_gpu() {
    let virtual_device = GpuProfile {
        virtual_device: Some("virtual:memory=12Gi".to_owned()),
        compute_capability: None,
        free_bytes: 12 * GIB,
        ..gpu("virtual", 1, 12)
    };
    let text = virtual_device.virtual_device.clone();
    let plan = ring("", &[attic(vec![virtual_device])]);
    let [rank] = on_gpus(&plan)[..] else {
        panic!("{:#?}", plan.why);
    };
    assert_eq!((rank.gpus, &rank.virtual_device), (0, &text));
    assert_eq!(rank.activations, PlanActivations::F32);
    // The CPUs' kernels compute for it.
    assert!(!plan.why.iter().any(|line| line.contains("different bits")));
}

#[test]
fn activations_and_pinning_are_those_of_the_spec() {
    let nodes = [attic(vec![gpu("RTX 3080", 1, 12)])];
    let rounded = ring("", &nodes);
    assert!(has_line(&rounded.why, "attic with ", "different bits"));
    assert_eq!(on_gpus(&rounded)[0].activations, PlanActivations::BF16);
    // Products with unrounded ones take longer, on a GPU that is limited by them.
    let (mut spec, facts) = (spec(RING), dense_1_7b());
    let [auto, exact] = [Activations::Auto, Activations::F32].map(|asked| {
        spec.model.activations = asked;
        plan(&plan_input_here(&spec, &facts, &nodes)).unwrap()
    });
    assert_eq!(on_gpus(&exact)[0].activations, PlanActivations::F32);
    assert!(exact.predicted.ttft_ms > auto.predicted.ttft_ms);

    let own = ring("placement: {pinning: Exclusive}\n", &nodes);
    let mut cpus: Vec<u32> = members(&own).iter().flat_map(|r| r.cpus.clone()).collect();
    let all = cpus.len();
    cpus.sort_unstable();
    cpus.dedup();
    assert_eq!(cpus.len(), all, "no CPU is two members'");
    assert_eq!(on_gpus(&own)[0].cpus.len(), 1);
}

/// Two boxes with a GPU each, whose disks were not measured: all that they hold must fit in their memory.
fn two_boxes(memory_gib: u64) -> [NodeProfileStatus; 2] {
    let mut nodes = [
        NodeProfileStatus {
            gpus: vec![gpu("RTX 3080", 1, 12)],
            ..machine("attic", 8, memory_gib)
        },
        NodeProfileStatus {
            gpus: vec![gpu("RTX 4060", 2, 8)],
            ..machine("cellar", 4, memory_gib)
        },
    ];
    for node in &mut nodes {
        node.disks.clear();
        node.memory.total_bytes = 32 * GIB;
    }
    nodes
}

/// The refusal of a ring, with its advice, of which each piece was followed and fits.
fn refused(
    change: impl FnOnce(&mut InferenceDeploymentSpec),
    nodes: &[NodeProfileStatus],
) -> (String, Vec<Advice>) {
    let (mut spec, facts) = (spec(RING), qwen3_30b());
    change(&mut spec);
    let error = plan(&plan_input_here(&spec, &facts, nodes)).unwrap_err();
    let text = error.to_string();
    let PlanError::NoRoomInRing { advice, .. } = error else {
        panic!("{text}");
    };
    for advice in &advice {
        let Some((spec, nodes)) = followed(advice, (&spec, nodes)) else {
            continue;
        };
        let planned = plan(&plan_input_here(&spec, &facts, &nodes));
        let planned = planned.unwrap_or_else(|still| panic!("{text}\nafter {advice}: {still}"));
        check(&planned, &facts, &nodes);
    }
    (text, advice)
}

const MEMBERS: [&str; 4] = [
    "CPUs of attic",
    "RTX 3080 of attic",
    "CPUs of cellar",
    "RTX 4060 of cellar",
];

#[test]
fn a_refusal_says_what_each_node_and_gpu_had_and_what_fits() {
    let (text, advice) = refused(|_| {}, &two_boxes(5));
    insta::assert_snapshot!(text, @r"
    the model fits no ring of the nodes: weights take 28.8 GiB, and KV 768 MiB (one context of 8192 tokens)
      each was tried as the head; with CPUs of attic as it, there is room for CPUs of attic 4.0 GiB (of 4.8 GiB, the rest for processes and gateways), RTX 3080 of attic 9.7 GiB (of 10.5 GiB, the rest for activations and padding), CPUs of cellar 4.1 GiB (of 4.8 GiB, the rest for processes), RTX 4060 of cellar 5.7 GiB (of 6.5 GiB, the rest for activations and padding); the disks of attic, cellar were not measured, so that all of their layers must fit; with 21600 MiB more, cellar could serve the model alone
      measure the disks of attic, cellar, from which layers may be read at 0.2 GB/s and more (hearth-worker profile --disk DIRECTORY --probe-disk; in a cluster the agent says why it has not), or free 7344 MiB on cellar, add a node, or use a smaller model
    ");
    assert!(matches!(
        &advice[..],
        [Advice::MeasureDisks(_), Advice::FreeMemoryOf(..)]
    ));
}

#[test]
fn gpus_without_room_are_named_and_cpus_that_are_used_are_not_called_full() {
    let small = |name: &'static str, mib: u64, gpu_number: Option<u32>| {
        let gpu = gpu_number.map(|number| GpuProfile {
            virtual_device: Some("virtual:memory=1Gi".to_owned()),
            compute_capability: None,
            memory_bytes: 30 * MIB,
            free_bytes: 30 * MIB,
            ..gpu("virtual", number, 1)
        });
        let mut node = machine(name, 2, 1);
        node.memory.available_bytes = mib * MIB;
        node.memory.total_bytes = mib * MIB;
        node.gpus = gpu.into_iter().collect();
        node
    };
    let nodes = [
        small("attic", 420, Some(1)),
        small("cellar", 350, Some(2)),
        small("office", 300, None),
    ];
    let mut full = 0;
    for kv_mib in [64, 72, 80, 84, 88] {
        let yaml = format!("{RING}decode: {{kvCache: {{memory: {kv_mib}Mi}}}}\n");
        let mut spec = spec(&yaml);
        spec.model.context_length = Some(2048);
        let plan = plan(&plan_input_here(&spec, &demo_model(), &nodes)).unwrap();
        let said = plan.not_chosen.join("\n");
        for rank in &plan.ranks {
            assert!(!rank.is_on_gpu());
            let full = format!("CPUs of {}: ", rank.node);
            assert!(!said.contains(&full), "{kv_mib} MiB: {said}");
        }
        for name in ["virtual of attic", "virtual of cellar"] {
            assert!(said.contains(name), "{kv_mib} MiB: {name}: {said}");
        }
        full += u32::from(said.contains("fits beside their processes"));
    }
    assert!(full > 0, "no ring with GPUs has room with the largest KV");
}

#[test]
fn a_refusal_proposes_the_largest_kv_that_fits_beside_the_weights_on_nodes_and_gpus() {
    let nodes = two_boxes(9);
    let long = |spec: &mut InferenceDeploymentSpec| spec.model.context_length = Some(40_960);
    let (text, advice) = refused(long, &nodes);
    for name in MEMBERS {
        assert!(text.contains(&format!("{name} ")), "{name}: {text}");
    }
    let tokens = advice.iter().find_map(|advice| match advice {
        Advice::ContextLength(tokens) => Some(*tokens),
        _ => None,
    });
    let tokens = tokens.unwrap_or_else(|| panic!("{text}"));
    refused(
        |spec| spec.model.context_length = Some(tokens + 1024),
        &nodes,
    );
    let budget = |bytes: u64| {
        move |spec: &mut InferenceDeploymentSpec| {
            spec.decode.kv_cache.memory = Some(MemoryQuantity::from_bytes(bytes));
        }
    };
    let (text, advice) = refused(budget(40 * GIB), &nodes);
    let bytes = advice.iter().find_map(|advice| match advice {
        Advice::KvMemory(bytes) => Some(*bytes),
        _ => None,
    });
    let bytes = bytes.unwrap_or_else(|| panic!("{text}"));
    // A sixteenth is for a number that is easy to read.
    let (more, _) = refused(budget(bytes + bytes / 8), &nodes);
    assert!(
        more.contains("lower spec.decode.kvCache.memory to"),
        "{more}"
    );
}

#[test]
fn where_no_node_and_no_gpu_holds_a_layer_the_refusal_says_why_and_what_fits() {
    let mut nodes = two_boxes(40);
    nodes[1].gpus[0].obstacle = Some("its driver does not answer".to_owned());
    let budget = |spec: &mut InferenceDeploymentSpec| {
        spec.decode.kv_cache.memory = Some(MemoryQuantity::from_bytes(4096 * GIB));
    };
    let (text, advice) = refused(budget, &nodes);
    assert!(matches!(&advice[..], [Advice::KvMemory(_)]), "{text}");
    assert!(text.contains("no member has room for a layer: "), "{text}");
    for part in [
        "RTX 3080 of attic: a layer takes 85.",
        "CPUs of attic: a layer takes 85.",
        "CPUs of cellar: a layer takes 85.",
        "RTX 4060 of cellar cannot be used: its driver does not answer",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
