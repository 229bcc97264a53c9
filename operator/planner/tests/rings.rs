//! Plans of piped rings.
#![allow(clippy::unwrap_used)] // a test that cannot plan has failed

mod support;

use std::time::{Duration, Instant};

use hearth_crds::{
    InferencePlanSpec, ModelFacts, NodeProfileStatus, PlanStrategy, RING_VERSION, ResidencyPolicy,
};
use hearth_planner::{Advice, PlanError, plan};
use proptest::prelude::*;
use support::advice::followed;
use support::rings::{check, machine, members};
use support::{
    GIB, MIB, deepseek_v3, demo_model, gpu, plan_input, plan_input_here, qwen3_30b, spec,
};

/// Three boxes of which none holds Qwen3-30B-A3B with its 29 GiB, and a spec that fits them together.
fn boxes() -> Vec<NodeProfileStatus> {
    vec![
        machine("attic", 8, 14),
        machine("cellar", 4, 10),
        machine("office", 6, 12),
    ]
}

const RING: &str = "strategy: PipedRing\n";

fn ring(yaml: &str, facts: &ModelFacts, nodes: &[NodeProfileStatus]) -> InferencePlanSpec {
    let spec = spec(yaml);
    let plan = plan(&plan_input(&spec, facts, nodes)).unwrap();
    check(&plan, facts, nodes);
    plan
}

#[test]
fn a_model_that_no_box_holds_is_on_a_ring_of_them() {
    let plan = ring(RING, &qwen3_30b(), &boxes());
    assert_eq!(plan.strategy, PlanStrategy::PipedRing);
    let nodes: Vec<&str> = members(&plan).iter().map(|rank| &*rank.node).collect();
    assert_eq!(nodes.len(), 3, "{nodes:?}");
    for rank in members(&plan) {
        let residency = rank.residency.as_ref().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::Resident, "{}", rank.name);
        assert_eq!(residency.budget_bytes, residency.weight_bytes);
    }
    let total: u64 = members(&plan)
        .iter()
        .filter_map(|rank| Some(rank.residency.as_ref()?.weight_bytes))
        .sum();
    assert!(total.abs_diff(qwen3_30b().bytes.total()) < MIB);
    assert!(plan.predicted.tpot_ms > 0.0 && plan.predicted.ttft_ms > plan.predicted.tpot_ms);
    let said = [plan.why, plan.not_chosen].concat().join("\n");
    insta::assert_snapshot!(said);
}

#[test]
fn a_link_that_cannot_be_is_taken_for_unmeasured() {
    let says = |nodes: &[NodeProfileStatus]| {
        let plan = ring(RING, &qwen3_30b(), nodes);
        let mut why = plan.why.into_iter();
        why.find(|line| line.contains("links were not measured"))
    };
    assert_eq!(says(&boxes()), None);
    let odd = |gbps, rtt_us| {
        let mut nodes = boxes();
        for link in nodes.iter_mut().flat_map(|node| &mut node.links) {
            (link.gbps, link.rtt_us) = (gbps, rtt_us);
        }
        nodes
    };
    let mut unmeasured = boxes();
    for node in &mut unmeasured {
        node.links.clear();
    }
    let said = says(&unmeasured).unwrap();
    for (gbps, rtt_us) in [
        (0.0, 300.0),
        (-1.0, 300.0),
        (f64::NAN, 300.0),
        (f64::INFINITY, 300.0),
        (1e300, 300.0),
        (1e-300, 300.0),
        (0.117, f64::NAN),
        (0.117, f64::INFINITY),
        (0.117, -1.0),
    ] {
        let nodes = odd(gbps, rtt_us);
        assert_eq!(says(&nodes).as_ref(), Some(&said), "{gbps} GB/s, {rtt_us}");
    }
    // What one end measured is enough.
    let mut nodes = boxes();
    nodes[0].links.clear();
    nodes[1].links[0].gbps = f64::NAN;
    let line = says(&nodes).unwrap();
    assert!(!line.contains("office"), "{line}");
}

#[test]
fn members_that_compute_other_bits_are_told() {
    let says = |plan: &InferencePlanSpec| {
        let mut why = plan.why.iter();
        why.any(|line| line.contains("no single machine's"))
    };
    assert!(!says(&ring(RING, &qwen3_30b(), &boxes())));
    let mut nodes = boxes();
    nodes[1].isa = hearth_crds::IsaProfile::default();
    let plan = ring(RING, &qwen3_30b(), &nodes);
    assert!(says(&plan), "{:#?}", plan.why);
}

#[test]
fn the_order_of_profiles_does_not_matter() {
    let forward = ring(RING, &qwen3_30b(), &boxes());
    let mut turned = boxes();
    turned.reverse();
    assert_eq!(forward, ring(RING, &qwen3_30b(), &turned));
}

#[test]
fn a_node_that_would_drag_is_left_out() {
    let mut nodes = boxes();
    nodes[0].memory.available_bytes = 40 * GIB;
    nodes[0].numa_nodes[0].memory_bytes = 40 * GIB;
    let plan = ring(RING, &qwen3_30b(), &nodes);
    // Each hop of gigabit Ethernet takes longer than what another machine computes.
    assert_eq!(members(&plan).len(), 1, "{:#?}", plan.why);
    assert!(
        plan.why[0].starts_with("attic alone is faster than any ring"),
        "{:?}",
        plan.why
    );
    let left_out = |node: &str| {
        let begin = format!("{node} in the ring: predicted TPOT");
        plan.not_chosen.iter().any(|line| line.starts_with(&begin))
    };
    assert!(
        left_out("cellar") && left_out("office"),
        "{:#?}",
        plan.not_chosen
    );
}

#[test]
fn auto_makes_a_ring_only_where_no_node_holds_the_model() {
    let facts = qwen3_30b();
    // No box has room for so much KV, even if it reads nearly all weights from its disk.
    let yaml = |strategy: &str| {
        let text = format!(
            "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: 4096}}\ndecode: {{kvCache: {{memory: 10Gi}}}}\nstrategy: {strategy}\n"
        );
        serde_norway::from_str(&text).unwrap()
    };
    let nodes = [
        machine("attic", 8, 9),
        machine("cellar", 4, 9),
        machine("office", 6, 9),
    ];
    let (auto, hybrid) = (yaml("Auto"), yaml("Hybrid"));
    let error = plan(&plan_input(&hybrid, &facts, &nodes))
        .unwrap_err()
        .to_string();
    assert!(error.contains("needs"), "{error}");
    let ring = plan(&plan_input(&auto, &facts, &nodes)).unwrap();
    assert_eq!(ring.strategy, PlanStrategy::PipedRing);
    check(&ring, &facts, &nodes);
    assert!(
        ring.why[0].contains("no node holds the model"),
        "{:?}",
        ring.why
    );
    // Where one does, nothing changes.
    let held = spec("");
    let large = [machine("attic", 8, 64), machine("cellar", 4, 9)];
    let plan = plan(&plan_input(&held, &facts, &large)).unwrap();
    assert_eq!(plan.strategy, PlanStrategy::Hybrid);
}

#[test]
fn auto_makes_a_ring_where_a_node_would_read_from_its_disk_and_be_slower() {
    let (facts, auto) = (qwen3_30b(), spec(""));
    let ring = plan(&plan_input(&auto, &facts, &boxes())).unwrap();
    assert_eq!(ring.strategy, PlanStrategy::PipedRing, "{:#?}", ring.why);
    check(&ring, &facts, &boxes());
    let alone = &ring.not_chosen[0];
    assert!(
        alone.contains("alone: ") && alone.contains("are read from its disk: predicted TPOT"),
        "{alone}"
    );
    let hybrid = plan(&plan_input(&spec("strategy: Hybrid\n"), &facts, &boxes())).unwrap();
    assert!(hybrid.ranks.iter().any(|rank| rank.disk_weight_bytes() > 0));
    assert!(hybrid.predicted.tpot_ms > 1.2 * ring.predicted.tpot_ms);
    let says = |plan: &InferencePlanSpec, words: &str| {
        let mut lines = plan.not_chosen.iter();
        lines.any(|line| line.contains(words))
    };
    assert!(says(&hybrid, "spec.strategy is Hybrid; Auto compares both"));

    // Links that take longer than a disk.
    let mut apart = boxes();
    for link in apart.iter_mut().flat_map(|node| &mut node.links) {
        link.rtt_us = 4e6;
    }
    let alone = plan(&plan_input(&auto, &facts, &apart)).unwrap();
    assert_eq!(alone.strategy, PlanStrategy::Hybrid);
    assert!(says(&alone, "a piped ring: "), "{:#?}", alone.not_chosen);
    // What rings lack is not dropped without a word.
    let two = spec("decode: {replicas: 2}\n");
    if let Ok(alone) = plan(&plan_input(&two, &facts, &boxes())) {
        assert_eq!(alone.strategy, PlanStrategy::Hybrid);
        assert!(
            says(&alone, "spec.decode.replicas is 2"),
            "{:#?}",
            alone.not_chosen
        );
    }
    let quiet = spec("prefill: {chunkedBelowTokens: 64}\n");
    let alone = plan(&plan_input(&quiet, &facts, &boxes())).unwrap();
    assert_eq!(alone.strategy, PlanStrategy::Hybrid);
    assert!(
        says(&alone, "spec.prefill.chunkedBelowTokens has no effect"),
        "{:#?}",
        alone.not_chosen
    );
}

#[test]
fn a_node_without_room_for_a_layer_is_left_out_and_told() {
    let mut nodes = boxes();
    let mut full = machine("shed", 16, 64);
    full.memory.available_bytes = 300 * MIB;
    nodes.push(full);
    let plan = ring(RING, &qwen3_30b(), &nodes);
    assert!(plan.ranks.iter().all(|rank| rank.node != "shed"));
    assert!(
        plan.not_chosen
            .iter()
            .any(|line| line.starts_with("shed: a layer takes ")),
        "{:#?}",
        plan.not_chosen
    );
}

#[test]
fn what_no_ring_has_room_for_is_said_with_a_change_that_fits() {
    let refused = |yaml: &str, nodes: &[NodeProfileStatus]| {
        let spec: hearth_crds::InferenceDeploymentSpec = serde_norway::from_str(yaml).unwrap();
        let error = plan(&plan_input(&spec, &qwen3_30b(), nodes)).unwrap_err();
        error.to_string()
    };
    let yaml = |kv: &str, context: u32| {
        format!(
            "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: {context}}}\ndecode: {{kvCache: {{{kv}}}}}\nstrategy: PipedRing\n"
        )
    };
    let error = refused(&yaml("memory: 32Gi", 4096), &boxes());
    assert!(
        error.starts_with("the model fits no ring of the nodes: weights take ")
            && error.contains("KV 32 GiB (spec.decode.kvCache.memory)")
            && error.contains("attic ")
            && error.contains("lower spec.decode.kvCache.memory to "),
        "{error}"
    );
    let said = error.split("kvCache.memory to ").nth(1).unwrap();
    let said = said.split([',', '\n']).next().unwrap();
    let plan_with = |memory: &str| {
        let smaller = yaml(&format!("memory: {memory}"), 4096);
        let spec: hearth_crds::InferenceDeploymentSpec = serde_norway::from_str(&smaller).unwrap();
        plan(&plan_input(&spec, &qwen3_30b(), &boxes()))
    };
    plan_with(said).expect("what was suggested fits");
    let bytes = said.parse::<hearth_crds::MemoryQuantity>().unwrap().bytes();
    plan_with(&(bytes + bytes / 8).to_string()).expect_err("it is nearly the largest that does");
}

/// Most time of a refusal, in any build: what is looked for is bounded.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);

/// Weights pass through the memory of all of them, beside as much KV as has room.
#[test]
fn sixteen_nodes_are_refused_with_the_largest_kv_that_fits() {
    refused_with_the_largest_kv(&qwen3_30b(), &sixteen(2), "32Gi");
}

/// Three dense layers, then experts.
#[test]
fn sixteen_nodes_are_refused_at_once_for_unequal_layers_too() {
    refused_with_the_largest_kv(&deepseek_v3(), &sixteen(24), "512Gi");
    let mut without_disks = sixteen(52);
    for node in &mut without_disks {
        node.disks.clear();
    }
    refused_with_the_largest_kv(&deepseek_v3(), &without_disks, "256Gi");
}

/// Nodes with so many GiB.
fn sixteen(gib: u64) -> Vec<NodeProfileStatus> {
    let names: [&'static str; 16] = [
        "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p",
    ];
    names.map(|name| machine(name, 4, gib)).to_vec()
}

fn refused_with_the_largest_kv(facts: &ModelFacts, nodes: &[NodeProfileStatus], kv: &str) {
    let plan_with = |kv: &str| {
        let yaml = format!("{RING}decode: {{kvCache: {{memory: {kv}}}}}\n");
        plan(&plan_input(&spec(&yaml), facts, nodes))
    };
    let begin = Instant::now();
    let refused = plan_with(kv).unwrap_err();
    let took = begin.elapsed();
    println!("refused in {took:?}");
    assert!(took < REFUSED_WITHIN, "{took:?}");
    let PlanError::NoRoomInRing { advice, .. } = &refused else {
        panic!("{refused}");
    };
    let kv_bytes = advice.iter().find_map(|advice| match advice {
        Advice::KvMemory(bytes) => Some(*bytes),
        _ => None,
    });
    let kv_bytes = kv_bytes.unwrap_or_else(|| panic!("{refused}"));
    plan_with(&kv_bytes.to_string()).expect("what was suggested fits");
    plan_with(&(kv_bytes + kv_bytes / 8).to_string()).expect_err("it is nearly the largest");
}

#[test]
fn a_node_that_nothing_can_be_in_a_ring_with_is_told_so_by_all_sentences() {
    let nodes = [machine("attic", 8, 48)];
    let lines = |yaml: &str| {
        let plan = plan(&plan_input(&spec(yaml), &qwen3_30b(), &nodes)).unwrap();
        [plan.why, plan.not_chosen].concat()
    };
    let asked = lines(RING);
    assert!(
        asked[0].starts_with("attic alone, since nothing else can be a member of a ring: "),
        "{asked:#?}"
    );
    const NO_RING: &str =
        "piped ring: it takes two members, each a GPU or the CPUs of a node, and there is one";
    assert!(asked.iter().any(|line| line == NO_RING), "{asked:#?}");
    let other: Vec<&String> = asked
        .iter()
        .filter(|line| line.contains("ring") && *line != NO_RING)
        .collect();
    assert_eq!(other, [&asked[0]]);
    // Auto says the same.
    assert!(lines("").iter().any(|line| line == NO_RING));
}

#[test]
fn a_node_with_a_gpu_is_told_that_a_ring_is_to_be_asked_for() {
    let nodes = [NodeProfileStatus {
        gpus: vec![gpu("RTX 3080", 1, 12)],
        ..machine("attic", 8, 48)
    }];
    let not_chosen = |yaml: &str| {
        let spec = spec(yaml);
        let plan = plan(&plan_input_here(&spec, &qwen3_30b(), &nodes)).unwrap();
        assert_eq!(plan.strategy, PlanStrategy::Hybrid);
        plan.not_chosen.join("\n")
    };
    let said = not_chosen("");
    assert!(
        said.contains("of one node alone, only strategy PipedRing makes one"),
        "{said}"
    );
    let said = not_chosen("prefill: {gpusPerWorker: 0}\n");
    assert!(said.contains("it takes two members"), "{said}");
}

#[test]
fn a_refusal_names_disks_to_measure_and_memory_to_free_with_which_a_ring_fits() {
    let mut unmeasured = [machine("attic", 8, 9), machine("cellar", 4, 9)];
    for node in &mut unmeasured {
        node.disks.clear();
        node.memory.total_bytes = 32 * GIB;
    }
    let whole = spec(RING);
    let plan_on = |nodes: &[NodeProfileStatus]| plan(&plan_input(&whole, &qwen3_30b(), nodes));
    let error = plan_on(&unmeasured).unwrap_err().to_string();
    assert!(
        error.contains("the disks of attic, cellar were not measured, so that all of their layers"),
        "{error}"
    );
    // One line says it, one that these are remedies, and each of two has its own.
    assert!(error.lines().count() <= 4, "{error}");
    let Err(PlanError::NoRoomInRing { advice, .. }) = plan_on(&unmeasured) else {
        panic!("{error}");
    };
    let mut told = Vec::new();
    for advice in &advice {
        let mut nodes = unmeasured.clone();
        match advice {
            Advice::MeasureDisks(names) => {
                told.push(names.clone());
                for node in &mut nodes {
                    node.disks = boxes()[0].disks.clone();
                }
            }
            Advice::FreeMemoryOf(name, bytes) => {
                told.push(name.clone());
                let node = nodes.iter_mut().find(|node| node.node == *name).unwrap();
                node.memory.available_bytes += bytes;
                assert!(node.memory.available_bytes <= node.memory.total_bytes);
            }
            _ => panic!("{error}"),
        }
        plan_on(&nodes).unwrap_or_else(|still| panic!("{error}\nafter {advice}: {still}"));
    }
    assert_eq!(told, ["attic, cellar", "cellar"]);
    // Of a machine that others use little of, nothing can be freed.
    for node in &mut unmeasured {
        node.memory.total_bytes = 10 * GIB;
    }
    let error = plan_on(&unmeasured).unwrap_err().to_string();
    assert!(
        error.contains("measure the disks of attic, cellar")
            && error.contains("add a node, or use a smaller model")
            && !error.contains("free "),
        "{error}"
    );
    // What reads from them nevertheless says so.
    let hybrid = spec("strategy: Hybrid\n");
    let plan_of = |nodes: &[NodeProfileStatus]| {
        plan(&plan_input(&hybrid, &qwen3_30b(), nodes)).map(|plan| plan.why.join("\n"))
    };
    let why = plan_of(&unmeasured).unwrap();
    assert!(why.contains("disks that were not measured"), "{why}");
    for node in &mut unmeasured {
        node.disks = boxes()[0].disks.clone();
    }
    let why = plan_of(&unmeasured).unwrap();
    assert!(!why.contains("not measured"), "{why}");
}

#[test]
fn a_refusal_for_want_of_a_head_says_so_and_how_much_memory_helps() {
    let mut spec = spec(&format!("{RING}decode: {{kvCache: {{memory: 256Mi}}}}\n"));
    spec.model.context_length = Some(2048);
    let small = |name: &'static str, mib: u64| {
        let mut node = machine(name, 2, 1);
        node.memory.available_bytes = mib << 20;
        node.memory.total_bytes = mib << 20;
        node.disks.clear();
        node
    };
    let nodes_of = |mib: u64| {
        let others = ["n1", "n2", "n3", "n4", "n5"].map(|name| small(name, 300));
        [&others[..], &[small("n6", mib)]].concat()
    };
    for mib in [300, 340] {
        let nodes = nodes_of(mib);
        let error = plan(&plan_input(&spec, &demo_model(), &nodes)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("no node has room for the head"), "{text}");
        assert!(text.contains("most is free on n6"), "{text}");
        let PlanError::NoRoomInRing { advice, .. } = error else {
            panic!("{text}");
        };
        let [.., more @ Advice::MoreMemoryOf(name, bytes)] = &advice[..] else {
            panic!("{text}");
        };
        assert_eq!(name, "n6");
        let (spec, enough) = followed(more, (&spec, &nodes)).unwrap();
        plan(&plan_input(&spec, &demo_model(), &enough)).unwrap();
        let less = nodes_of(mib + (bytes >> 20) * 7 / 8 - 2);
        plan(&plan_input(&spec, &demo_model(), &less)).unwrap_err();
    }
}

#[test]
fn what_a_ring_does_not_have_is_refused_by_field() {
    for (yaml, field) in [
        ("prefill: {mode: StreamLoading}\n", "spec.prefill.mode"),
        (
            "prefill: {gpusPerWorker: 1}\n",
            "spec.prefill.gpusPerWorker",
        ),
        ("prefill: {replicas: 1}\n", "spec.prefill.replicas"),
        (
            "prefill: {chunkedBelowTokens: 64}\n",
            "spec.prefill.chunkedBelowTokens",
        ),
        ("decode: {expertCache: \"On\"}\n", "spec.decode.expertCache"),
        ("decode: {replicas: 2}\n", "spec.decode.replicas"),
        (
            "decode: {scaling: {mode: External, maxReplicas: 2}}\n",
            "spec.decode.scaling.mode",
        ),
        (
            "decode: {scaling: {mode: Auto, maxReplicas: 2}}\n",
            "spec.decode.scaling.mode",
        ),
        ("decode: {dualBatch: \"On\"}\n", "spec.decode.dualBatch"),
    ] {
        let spec = spec(&format!("{RING}{yaml}"));
        let error = plan(&plan_input(&spec, &qwen3_30b(), &boxes())).unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    }
    let spec = spec(RING);
    let small = [machine("attic", 8, 1)];
    let error = plan(&plan_input(&spec, &qwen3_30b(), &small)).unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("the model fits no ring of the nodes")
            && error.contains("there is room for attic 599.9 MiB"),
        "{error}"
    );
    let mut old = boxes();
    for node in &mut old {
        node.reader_version = Some(RING_VERSION - 1);
    }
    let error = plan(&plan_input(&spec, &qwen3_30b(), &old))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("attic, cellar, office: the workers' image"),
        "{error}"
    );
}

#[test]
fn a_node_of_an_earlier_version_is_no_member() {
    let mut nodes = boxes();
    nodes.push(machine("shed", 32, 64));
    nodes[3].reader_version = Some(RING_VERSION - 1);
    let plan = ring(RING, &qwen3_30b(), &nodes);
    assert!(plan.ranks.iter().all(|rank| rank.node != "shed"));
    assert!(
        plan.why
            .iter()
            .any(|line| line.contains("shed: the workers' image"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rings_hold(
        memory_mib in prop::collection::vec(300..3000_u64, 1..5),
        cores in prop::collection::vec(1..9_u32, 4),
        gpu_mib in prop::collection::vec(prop::option::of(200..2500_u64), 4),
        gateways in 1..3_u32,
        is_demo in any::<bool>(),
    ) {
        const NAMES: [&str; 4] = ["a", "b", "c", "d"];
        let facts = match is_demo {
            true => demo_model(),
            false => {
                let mut facts = qwen3_30b();
                // A twentieth of it.
                facts.bytes.attention /= 20;
                facts.bytes.routed_experts /= 20;
                facts.bytes.embedding /= 20;
                facts.bytes.head /= 20;
                facts.bytes.router /= 20;
                facts.largest_layer_bytes /= 20;
                facts
            }
        };
        let nodes: Vec<NodeProfileStatus> = memory_mib
            .iter()
            .enumerate()
            .map(|(n, mib)| {
                let mut node = machine(NAMES[n], cores[n], 1);
                node.memory.available_bytes = mib * MIB;
                node.gpus = gpu_mib[n].into_iter().map(|mib| {
                    let mut gpu = gpu("GPU", n as u32, 4);
                    (gpu.memory_bytes, gpu.free_bytes) = (mib * MIB, mib * MIB);
                    gpu
                }).collect();
                node
            })
            .collect();
        let spec = spec(&format!("{RING}gateway: {{replicas: {gateways}}}\n"));
        if let Ok(made) = plan(&plan_input_here(&spec, &facts, &nodes)) {
            check(&made, &facts, &nodes);
            prop_assert_eq!(&made, &plan(&plan_input_here(&spec, &facts, &nodes)).unwrap());
        }
    }
}
