//! What members of rings keep in memory where that is short.
#![allow(clippy::unwrap_used)] // a test that cannot plan has failed

mod support;

use hearth_crds::{
    InferenceDeploymentSpec, InferencePlanSpec, NodeProfileStatus, PlanResidency, ResidencyPolicy,
};
use hearth_planner::{Advice, PlanError, plan};
use support::advice::followed;
use support::rings::{check, machine, members};
use support::{GIB, MIB, demo_model, gpu, plan_input, plan_input_here, qwen3_30b, spec};

const RING: &str = "strategy: PipedRing\n";

/// Members that drop what leaves their memory read it again, whatever is free beside them.
#[test]
fn experts_without_room_cost_as_much_on_one_machine_as_in_pods() {
    let nodes = [machine("attic", 8, 14), machine("cellar", 4, 14)];
    let (facts, spec) = (qwen3_30b(), spec(RING));
    let in_pods = plan(&plan_input(&spec, &facts, &nodes)).unwrap();
    let here = plan(&plan_input_here(&spec, &facts, &nodes)).unwrap();
    let short = members(&in_pods);
    let mut short = short
        .iter()
        .filter_map(|rank| rank.residency.as_ref())
        .filter(|residency| residency.budget_bytes < residency.weight_bytes);
    assert!(short.next().is_some(), "{:#?}", in_pods.why);
    let ratio = here.predicted.tpot_ms / in_pods.predicted.tpot_ms;
    assert!((ratio - 1.0).abs() < 0.01, "{ratio}");
}

/// A ring's plan for a model with an embedding of so many bytes.
fn with_embedding(embedding_bytes: u64, nodes: &[NodeProfileStatus]) -> InferencePlanSpec {
    let mut facts = qwen3_30b();
    facts.parameter_count += embedding_bytes - facts.bytes.embedding;
    facts.bytes.embedding = embedding_bytes;
    let plan = plan(&plan_input(&spec(RING), &facts, nodes)).unwrap();
    check(&plan, &facts, nodes);
    plan
}

fn of_head(plan: &InferencePlanSpec) -> &PlanResidency {
    members(plan)[0].residency.as_ref().unwrap()
}

#[test]
fn an_embedding_takes_memory_only_where_all_weights_are_in_it() {
    let (small, large) = (GIB, 7 * GIB);
    // Where weights are read for each token, and where all of them have room but the embedding.
    for (gib, fits) in [(14, false), (19, true)] {
        let nodes = [machine("attic", 8, gib), machine("cellar", 8, gib)];
        let plans = [small, large].map(|bytes| with_embedding(bytes, &nodes));
        let [less, more] = plans.each_ref().map(|plan| plan.predicted.tpot_ms);
        assert!((more / less - 1.0).abs() < 0.01, "{gib} GiB: {less} {more}");
        let head = of_head(&plans[1]);
        assert_eq!(head.policy, ResidencyPolicy::MmapPrefetch, "{gib} GiB");
        let mapped_bytes = head.weight_bytes - large;
        assert_eq!(head.budget_bytes == mapped_bytes, fits, "{head:?}");
        assert!(head.budget_bytes <= mapped_bytes, "{head:?}");
    }
    // A disk that was not measured is not read for each token, so that the embedding must be in memory, too.
    let mut nodes = [machine("attic", 8, 20), machine("cellar", 8, 20)];
    for node in &mut nodes {
        node.disks.clear();
    }
    let plan = with_embedding(small, &nodes);
    let head = of_head(&plan);
    assert_eq!(head.policy, ResidencyPolicy::Resident);
    assert_eq!(head.budget_bytes, head.weight_bytes);
}

/// A head needs more than others, and who could do without them is not short of much more.
#[test]
fn a_refusal_names_the_head_that_was_tried_and_who_could_serve_alone() {
    let mut nodes = [machine("attic", 8, 4), machine("cellar", 8, 6)];
    for node in &mut nodes {
        node.disks.clear();
        node.memory.total_bytes = 64 * GIB;
    }
    let (facts, spec) = (qwen3_30b(), spec(RING));
    let error = plan(&plan_input(&spec, &facts, &nodes)).unwrap_err();
    let text = error.to_string();
    let head = "each was tried as the head; with attic as it, there is room for attic ";
    assert!(text.contains(head), "{text}");
    let begin = text.rfind("; with ").unwrap();
    let words = &text[begin + "; with ".len()..];
    let (mib, rest) = words
        .split_once(" MiB more, cellar could serve the model alone")
        .unwrap();
    assert!(rest.starts_with('\n'), "{text}");
    nodes[1].memory.available_bytes += mib.parse::<u64>().unwrap() * MIB;
    let alone = plan(&plan_input(&spec, &facts, &nodes[1..])).unwrap();
    assert_eq!(alone.nodes(), ["cellar"]);
}

#[test]
fn a_ring_names_its_nodes_in_its_order_and_only_its_own_as_busy() {
    let mut nodes = [
        machine("attic", 8, 3),
        machine("cellar", 8, 30),
        machine("office", 8, 1),
    ];
    for node in &mut nodes {
        node.disks.clear();
        node.busy_percent = Some(40);
    }
    // The head reads the output head, too.
    nodes[0].memory.read_one_thread_gbps /= 4.0;
    nodes[0].memory.read_all_threads_gbps /= 4.0;
    nodes[2].memory.available_bytes = 128 * MIB;
    let (facts, spec) = (qwen3_30b(), spec(RING));
    let plan = plan(&plan_input(&spec, &facts, &nodes)).unwrap();
    assert_eq!(plan.nodes(), ["cellar", "attic"]);
    let topology = &plan.why[0];
    assert!(
        topology.starts_with("piped ring over cellar, attic "),
        "{topology}"
    );
    let is_busy = |line: &&String| line.contains("other programs had");
    let busy: Vec<&String> = plan.why.iter().filter(is_busy).collect();
    assert_eq!(
        busy,
        [
            "warning: other programs had 40 % of the CPUs of attic, cellar while they were measured: predictions for them are too slow"
        ]
    );
}

/// A deployment with 10 GiB of KV for each decode worker.
fn with_kv(fields: &str) -> InferenceDeploymentSpec {
    let text = format!(
        "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: 4096}}\n{fields}"
    );
    let mut spec: InferenceDeploymentSpec = serde_norway::from_str(&text).unwrap();
    spec.decode.kv_cache.memory = Some("10Gi".parse().unwrap());
    spec
}

#[test]
fn what_rules_out_a_ring_is_said_where_no_node_holds_the_model() {
    let facts = qwen3_30b();
    let boxes = || {
        [
            machine("attic", 8, 9),
            machine("cellar", 4, 9),
            machine("office", 6, 9),
        ]
    };
    let mut on_gpus = boxes();
    on_gpus[0].gpus = vec![gpu("RTX 3060", 1, 12)];
    let asked = "prefill: {gpusPerWorker: 1}\ndecode: {replicas: 2}\n";
    for (fields, nodes, said) in [
        (
            "decode: {replicas: 2}\n",
            boxes(),
            &["spec.decode.replicas is 2: a ring is one decode worker"][..],
        ),
        (
            asked,
            on_gpus,
            &[
                "spec.prefill.gpusPerWorker is 1: a ring reads prompts itself: remove gpusPerWorker",
                "spec.decode.replicas is 2",
            ],
        ),
    ] {
        let spec = with_kv(fields);
        let error = plan(&plan_input_here(&spec, &facts, &nodes)).unwrap_err();
        let text = error.to_string();
        for words in said {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        let PlanError::InsufficientMemory { advice, .. } = error else {
            panic!("{text}");
        };
        let ring = advice.last().unwrap();
        assert!(matches!(ring, Advice::Ring(_)), "{text}");
        let (spec, nodes) = followed(ring, (&spec, &nodes)).unwrap();
        let plan = plan(&plan_input_here(&spec, &facts, &nodes)).unwrap();
        assert!(members(&plan).len() > 1, "{text}\n{:#?}", plan.why);
    }
}

#[test]
fn a_ring_is_no_advice_where_a_node_holds_one_worker() {
    let nodes = [machine("attic", 8, 64), machine("cellar", 4, 9)];
    let spec = with_kv("decode: {replicas: 7}\n");
    let error = plan(&plan_input(&spec, &qwen3_30b(), &nodes)).unwrap_err();
    assert!(!error.to_string().contains("ring"), "{error}");
}

/// With more memory, one of them could do without the other.
#[test]
fn a_ring_that_is_asked_for_gets_advice_that_makes_one() {
    let small = |name: &'static str, mib: u64| {
        let mut node = machine(name, 2, 1);
        node.memory.available_bytes = mib * MIB;
        node.memory.total_bytes = 4 * GIB;
        node.disks.clear();
        node
    };
    let (facts, mut spec) = (demo_model(), spec(RING));
    spec.model.context_length = Some(2048);
    for [attic, cellar] in [[140, 140], [300, 140], [300, 250]] {
        let nodes = [small("attic", attic), small("cellar", cellar)];
        let error = plan(&plan_input(&spec, &facts, &nodes)).unwrap_err();
        let text = error.to_string();
        let PlanError::NoRoomInRing { advice, .. } = error else {
            panic!("{text}");
        };
        for advice in &advice {
            let (spec, nodes) = followed(advice, (&spec, &nodes)).unwrap();
            let plan = plan(&plan_input(&spec, &facts, &nodes)).unwrap();
            check(&plan, &facts, &nodes);
            assert_eq!(members(&plan).len(), 2, "{text}\n{:#?}", plan.why);
        }
    }
}
