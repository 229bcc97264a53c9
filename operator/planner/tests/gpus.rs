//! Plans with GPUs: which rank runs on which GPU, the reasons given for unused ones, and refusals.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    ComputeCapability, GpuProfile, InferencePlanSpec, NodeProfileStatus, PlanActivations, PlanRank,
    ResidencyPolicy,
};
use hearth_planner::{Advice, PlanError, plan};
use support::{
    GIB, claims, demo_model, dense_1_7b, gpu, laptop, plan_input, plan_input_here, plugin, server,
    small_vm, spec,
};

/// The small machine with GPUs.
fn here(gpus: Vec<GpuProfile>) -> NodeProfileStatus {
    NodeProfileStatus { gpus, ..small_vm() }
}

fn rank<'a>(plan: &'a InferencePlanSpec, name: &str) -> &'a PlanRank {
    plan.rank(name).unwrap()
}

fn has_line(lines: &[String], begin: &str, part: &str) -> bool {
    lines
        .iter()
        .any(|line| line.starts_with(begin) && line.contains(part))
}

#[test]
fn auto_puts_both_workers_on_a_gpu_that_holds_them() {
    let profiles = [here(vec![gpu("NVIDIA L4", 1, 24)])];
    let facts = dense_1_7b();
    let plan = plan(&plan_input_here(
        &spec("decode: {maxBatch: 2}\n"),
        &facts,
        &profiles,
    ))
    .unwrap();
    for name in ["prefill-0", "decode-0"] {
        let rank = rank(&plan, name);
        let uuid = &profiles[0].gpus[0].uuid;
        assert_eq!((&rank.device_name, rank.gpus), (uuid, 1), "{name}");
        assert_eq!(rank.gpu_uuids.as_slice(), std::slice::from_ref(uuid));
        let residency = rank.residency.as_ref().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::Resident);
        let kv_bytes = rank.kv.as_ref().unwrap().memory_bytes;
        assert!(rank.gpu_memory_bytes > residency.weight_bytes + kv_bytes);
        assert_eq!((rank.host_weight_bytes(), rank.host_kv_bytes()), (0, 0));
    }
    assert_eq!(rank(&plan, "gateway-0").device_name, "cpu");
    assert_eq!(plan.routing.chunked_below_tokens, 256);
    insta::assert_yaml_snapshot!(plan);
}

#[test]
fn decode_stays_on_the_cpu_where_a_gpu_holds_one_worker_only() {
    let profiles = [here(vec![gpu("NVIDIA RTX 2000", 1, 8)])];
    let facts = dense_1_7b();
    let plan = plan(&plan_input_here(&spec(""), &facts, &profiles)).unwrap();
    assert!(rank(&plan, "prefill-0").is_on_gpu());
    let decode = rank(&plan, "decode-0");
    assert_eq!((decode.device_name.as_str(), decode.gpus), ("cpu", 0));
    assert!(decode.host_weight_bytes() > 0);
    assert!(has_line(
        &plan.not_chosen,
        "prefill and decode on GPUs: ",
        " GiB left"
    ));
    assert!(has_line(
        &plan.why,
        "prefill-0 on NVIDIA RTX 2000 of here",
        "7 GiB free"
    ));
    // The same machine without the GPU takes longer to the first token, and the same time per output token.
    let without = hearth_planner::plan(&plan_input_here(&spec(""), &facts, &[small_vm()])).unwrap();
    assert!(plan.predicted.ttft_ms < without.predicted.ttft_ms);
    assert_eq!(plan.predicted.tpot_ms, without.predicted.tpot_ms);
}

/// The plan for a machine with these GPUs and a spec with these activations.
fn with_activations(gpus: &[GpuProfile], word: &str) -> InferencePlanSpec {
    let mut asked = spec("decode: {maxBatch: 2}\n");
    asked.model.activations = serde_json::from_value(word.into()).unwrap();
    let profiles = [here(gpus.to_vec())];
    plan(&plan_input_here(&asked, &dense_1_7b(), &profiles)).unwrap()
}

/// The activations of both workers, and the line about them.
fn activations(gpus: &[GpuProfile], word: &str) -> (&'static str, String) {
    let plan = with_activations(gpus, word);
    let [prefill, decode] = ["prefill-0", "decode-0"].map(|name| {
        let rank = rank(&plan, name);
        // A plan of an earlier version has no such field and means F32; so does one of this version.
        let json = serde_json::to_value(rank).unwrap();
        let is_rounded = rank.activations == PlanActivations::BF16;
        assert_eq!(json.get("activations").is_some(), is_rounded);
        is_rounded
    });
    let rounding = match (prefill, decode) {
        (true, true) => "both round",
        (true, false) => "prefill rounds",
        (false, true) => "decode rounds",
        (false, false) => "none rounds",
    };
    let line = plan.why.iter().find(|l| l.starts_with("activations "));
    (rounding, line.cloned().unwrap_or_default())
}

/// GPUs round unless the spec forbids it; CPUs, and the virtual devices that they stand in for, never do.
#[test]
fn each_worker_computes_with_the_activations_of_its_device() {
    let both = [gpu("NVIDIA L4", 1, 24)];
    let one = [gpu("NVIDIA RTX 2000", 1, 8)];
    let virtual_one = [GpuProfile {
        virtual_device: Some("virtual:memory=24Gi".to_owned()),
        ..gpu("virtual", 1, 24)
    }];
    let (rounding, line) = activations(&both, "Auto");
    assert_eq!(rounding, "both round");
    assert!(line.contains("of prefill-0, decode-0, but for routers; with"));
    let (rounding, line) = activations(&both, "BF16");
    assert_eq!(rounding, "both round");
    assert!(line.ends_with("as the spec says"), "{line}");
    let (rounding, line) = activations(&both, "F32");
    assert_eq!(rounding, "none rounds");
    assert!(line.contains("F32 in products on GPUs, as the spec says"));
    for word in ["Auto", "BF16"] {
        let (rounding, line) = activations(&one, word);
        assert_eq!(rounding, "prefill rounds");
        assert!(line.contains("of prefill-0, but") && line.contains("what CPUs compute is F32"));
    }
    for gpus in [&virtual_one[..], &[]] {
        for word in ["Auto", "F32"] {
            let none = ("none rounds", String::new());
            assert_eq!(activations(gpus, word), none, "{word}");
        }
        let (rounding, line) = activations(gpus, "BF16");
        assert_eq!(rounding, "none rounds");
        assert!(line.contains("although") && line.contains("CPUs' kernels round nothing"));
    }
}

#[test]
fn rounded_activations_are_predicted_to_read_prompts_faster() {
    let gpus = [gpu("NVIDIA L4", 1, 24)];
    let [exact, rounded] = ["F32", "BF16"].map(|word| with_activations(&gpus, word).predicted);
    assert!(rounded.ttft_ms < exact.ttft_ms);
    assert_eq!(rounded.tpot_ms, exact.tpot_ms);
}

#[test]
fn workers_go_to_the_gpu_with_the_most_memory_left() {
    let gpus = vec![
        gpu("small", 3, 8),
        gpu("large", 2, 12),
        gpu("large too", 1, 12),
    ];
    let facts = dense_1_7b();
    let spec = spec("decode: {maxBatch: 1}\n");
    let device = |gpus: Vec<GpuProfile>, name: &str| {
        let plan = plan(&plan_input_here(&spec, &facts, &[here(gpus)])).unwrap();
        rank(&plan, name).device_name.clone()
    };
    let (first, second) = (gpus[2].uuid.clone(), gpus[1].uuid.clone());
    let mut reversed = gpus.clone();
    reversed.reverse();
    for gpus in [gpus, reversed] {
        assert_eq!(device(gpus.clone(), "prefill-0"), first);
        assert_eq!(device(gpus, "decode-0"), second);
    }
}

#[test]
fn a_model_too_large_for_the_gpu_runs_on_cpus_and_the_plan_says_by_how_much() {
    let profiles = [NodeProfileStatus {
        gpus: vec![gpu("NVIDIA T400", 1, 4)],
        ..server()
    }];
    let facts = dense_1_7b();
    let plan = plan(&plan_input_here(&spec(""), &facts, &profiles)).unwrap();
    assert!(!plan.ranks.iter().any(PlanRank::is_on_gpu));
    assert!(
        has_line(
            &plan.not_chosen,
            "NVIDIA T400 of tower",
            "a prefill worker needs "
        ),
        "{:#?}",
        plan.not_chosen
    );
}

#[test]
fn old_gpus_and_unknown_ones_are_left_out_with_the_reason() {
    let mut old = gpu("GeForce RTX 2080 Ti", 1, 11);
    old.compute_capability = Some(ComputeCapability { major: 7, minor: 5 });
    let mut unknown = gpu("Some GPU", 2, 24);
    unknown.compute_capability = None;
    let profiles = [here(vec![old, unknown])];
    let facts = demo_model();
    let made = plan(&plan_input_here(&spec(""), &facts, &profiles)).unwrap();
    assert!(!made.ranks.iter().any(PlanRank::is_on_gpu));
    assert!(has_line(
        &made.not_chosen,
        "GeForce RTX 2080 Ti of here",
        "7.5, and this engine's kernels need 8.0"
    ));
    assert!(has_line(
        &made.not_chosen,
        "Some GPU of here",
        "without NVML"
    ));

    let asked = spec("prefill: {gpusPerWorker: 1}\n");
    let error = plan(&plan_input_here(&asked, &facts, &profiles)).unwrap_err();
    insta::assert_snapshot!(error, @r"
    prefill-0 needs a GPU (spec.prefill.gpusPerWorker), and GeForce RTX 2080 Ti of here cannot be used: it has compute capability 7.5, and this engine's kernels need 8.0
      write spec.prefill.gpusPerWorker: 0 to run on CPUs, or add a GPU of compute capability 8.0 or higher
    ");
    let error = plan(&plan_input_here(&asked, &facts, &[small_vm()])).unwrap_err();
    insta::assert_snapshot!(error, @r"
    prefill-0 needs a GPU (spec.prefill.gpusPerWorker), and the profile of here shows no GPU
      write spec.prefill.gpusPerWorker: 0 to run on CPUs, or add a GPU of compute capability 8.0 or higher
    ");
}

#[test]
fn only_auto_takes_gpus_that_nobody_asked_for() {
    let profiles = [here(vec![gpu("NVIDIA L4", 1, 24)])];
    let facts = demo_model();
    for (yaml, on_gpu, says) in [
        (
            "prefill: {gpusPerWorker: 0}\n",
            [false, false],
            "gpusPerWorker is 0",
        ),
        ("strategy: Hybrid\n", [false, false], "and it is not"),
        (
            "strategy: Hybrid\nprefill: {gpusPerWorker: 1}\n",
            [true, false],
            "",
        ),
        (
            "strategy: Auto\nprefill: {gpusPerWorker: 1}\n",
            [true, true],
            "",
        ),
    ] {
        let plan = plan(&plan_input_here(&spec(yaml), &facts, &profiles)).unwrap();
        let found = ["prefill-0", "decode-0"].map(|name| rank(&plan, name).is_on_gpu());
        assert_eq!(found, on_gpu, "{yaml}");
        let is_said = has_line(&plan.not_chosen, "NVIDIA L4 of here", says);
        assert_eq!(is_said, !says.is_empty(), "{yaml}: {:#?}", plan.not_chosen);
    }
    let chunked = spec("prefill: {mode: Chunked}\n");
    let plan = plan(&plan_input_here(&chunked, &facts, &profiles)).unwrap();
    assert!(rank(&plan, "decode-0").is_on_gpu());
}

#[test]
fn a_worker_that_does_not_fit_the_gpu_it_asks_for_is_refused_with_advice_that_helps() {
    let profiles = [here(vec![gpu("NVIDIA RTX 2000", 1, 8)])];
    let facts = dense_1_7b();
    let mut spec = spec("prefill: {gpusPerWorker: 1}\ndecode: {maxBatch: 1}\n");
    spec.model.context_length = Some(65_536);
    let error = plan(&plan_input_here(&spec, &facts, &profiles)).unwrap_err();
    insta::assert_snapshot!(error, @r"
    prefill-0 needs 11.0 GiB of a GPU's memory, NVIDIA RTX 2000 of node here has 6.5 GiB free (weights 3.3 GiB, KV 7 GiB, working room 705.5 MiB)
      lower spec.model.contextLength to 22528, or write spec.prefill.mode: Chunked without prefill replicas, or write spec.prefill.gpusPerWorker: 0 to run on CPUs
    ");
    let PlanError::InsufficientGpuMemory { advice, .. } = error else {
        panic!("{error}")
    };
    let [
        Advice::ContextLength(tokens),
        Advice::Chunked,
        Advice::RunOnCpus(_),
    ] = advice[..]
    else {
        panic!("{advice:?}")
    };
    spec.model.context_length = Some(tokens);
    let fitting = plan(&plan_input_here(&spec, &facts, &profiles)).unwrap();
    assert!(rank(&fitting, "prefill-0").is_on_gpu());
}

#[test]
fn in_a_cluster_each_gpu_is_one_workers_own() {
    let (mut attic, mut office) = (server(), laptop(14 * GIB));
    attic.node = "attic".to_owned();
    office.node = "office".to_owned();
    let profiles = [attic, office];
    let facts = dense_1_7b();
    let spec = spec("prefill: {gpusPerWorker: 1}\n");
    let one = BTreeMap::from([("office".to_owned(), 1)]);
    let mut input = plan_input(&spec, &facts, &profiles);
    input.gpus = plugin(&one);
    let plan = plan(&input).unwrap();
    let prefill = rank(&plan, "prefill-0");
    assert_eq!((prefill.node.as_str(), prefill.gpus), ("office", 1));
    assert_eq!(prefill.device_name, profiles[1].gpus[0].uuid);
    assert!(!rank(&plan, "decode-0").is_on_gpu());
    assert!(has_line(
        &plan.not_chosen,
        "prefill and decode on GPUs: ",
        "office can give 1"
    ));

    let none = BTreeMap::new();
    input.gpus = plugin(&none);
    let refusal = hearth_planner::plan(&input).unwrap_err().to_string();
    assert!(
        refusal.starts_with("prefill-0 needs 1 GPU on one node"),
        "{refusal}"
    );
    assert!(
        refusal.contains("\n  lower spec.prefill.gpusPerWorker"),
        "{refusal}"
    );
}

#[test]
fn a_plan_holds_for_each_gpu_that_the_device_plugin_may_give() {
    let facts = dense_1_7b();
    let spec = spec("prefill: {gpusPerWorker: 1}\n");
    let two = BTreeMap::from([("here".to_owned(), 2)]);
    let mut small = gpu("small", 2, 12);
    // Its current user releases it first: a device plugin allocates whole GPUs.
    small.free_bytes = 0;
    let profiles = [here(vec![gpu("large", 1, 24), small])];
    let mut input = plan_input(&spec, &facts, &profiles);
    input.gpus = plugin(&two);
    let made = plan(&input).unwrap();
    let (prefill, decode) = (rank(&made, "prefill-0"), rank(&made, "decode-0"));
    assert_ne!(prefill.gpu_uuids, decode.gpu_uuids);
    for rank in [prefill, decode] {
        assert!(
            rank.gpu_memory_bytes < 12 * GIB,
            "{}",
            rank.gpu_memory_bytes
        );
    }
    assert!(has_line(
        &made.why,
        "prefill-0 on large of here",
        "may allocate another GPU"
    ));
}

/// A GPU that is held while its worker computes on CPUs is a GPU that no other Pod can use.
#[test]
fn gpus_that_nobody_knows_are_not_held() {
    let facts = dense_1_7b();
    let spec = spec("prefill: {gpusPerWorker: 2}\n");
    let two = BTreeMap::from([("here".to_owned(), 2)]);
    let profiles = [small_vm()];
    let mut input = plan_input(&spec, &facts, &profiles);
    input.gpus = plugin(&two);
    let refusal = plan(&input).unwrap_err();
    insta::assert_snapshot!(refusal, @r"
    prefill-0 needs a GPU (spec.prefill.gpusPerWorker), and 2 that here offers are not in its profile: its agent cannot see them (chart value agent.runtimeClassName)
      write spec.prefill.gpusPerWorker: 0 to run on CPUs, or add a GPU of compute capability 8.0 or higher
    ");
}

/// A claim names one specific GPU, so a plan need not fit on all of them, and GPUs claimed by others are left alone.
#[test]
fn gpus_that_can_be_claimed_are_chosen_by_uuid() {
    let facts = dense_1_7b();
    let spec = spec("prefill: {gpusPerWorker: 1}\n");
    let (large, small, other) = (
        gpu("large", 1, 24),
        gpu("small", 2, 12),
        gpu("other", 3, 80),
    );
    let free = [&large, &small].map(|gpu| gpu.uuid.clone());
    let uuids = BTreeMap::from([("here".to_owned(), BTreeSet::from(free))]);
    let profiles = [here(vec![large.clone(), small, other.clone()])];
    let mut input = plan_input(&spec, &facts, &profiles);
    input.gpus = claims(&uuids);
    let made = plan(&input).unwrap();
    let prefill = rank(&made, "prefill-0");
    assert_eq!(
        (prefill.device_name.as_str(), prefill.gpus),
        (large.uuid.as_str(), 1)
    );
    assert!(prefill.claims_gpus);
    // It may use more than the smallest of them holds.
    assert!(prefill.gpu_memory_bytes > 0);
    assert!(made.ranks.iter().all(|rank| rank.device_name != other.uuid));
    assert!(has_line(
        &made.why,
        "prefill-0 on large of here",
        "its claim names this GPU"
    ));
    assert!(has_line(
        &made.not_chosen,
        "other of here",
        "claimed by others"
    ));

    let none = BTreeMap::from([("here".to_owned(), BTreeSet::new())]);
    input.gpus = claims(&none);
    let refusal = plan(&input).unwrap_err().to_string();
    assert!(refusal.starts_with("prefill-0 needs 1 GPU"), "{refusal}");
}

#[test]
fn a_rank_on_a_gpu_uses_the_cores_beside_it() {
    let mut card = gpu("NVIDIA L4", 1, 24);
    card.numa_node = Some(1);
    let profiles = [NodeProfileStatus {
        gpus: vec![card],
        ..server()
    }];
    let facts = dense_1_7b();
    let plan = plan(&plan_input_here(&spec(""), &facts, &profiles)).unwrap();
    let prefill = rank(&plan, "prefill-0");
    assert_eq!(
        (prefill.numa_nodes.as_slice(), prefill.threads),
        (&[1][..], 4)
    );
    let is_beside = |id: &u32| profiles[0].numa_nodes[1].cpus.contains(id);
    assert!(prefill.cpus.iter().all(is_beside), "{:?}", prefill.cpus);
    // It takes one dedicated core; the decode worker keeps its own where CPUs decode.
    let exclusive =
        spec("strategy: Hybrid\nprefill: {gpusPerWorker: 1}\nplacement: {pinning: Exclusive}\n");
    let plan = hearth_planner::plan(&plan_input_here(&exclusive, &facts, &profiles)).unwrap();
    assert_eq!(rank(&plan, "prefill-0").threads, 1);
    assert_eq!(rank(&plan, "decode-0").threads, 30);
}
