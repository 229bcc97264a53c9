//! Plans whose routed experts stay in the node's memory while the rest of the model is on a GPU.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    GpuProfile, InferencePlanSpec, NodeProfileStatus, PlanRank, PlanRingLength, PlanRouting,
    ResidencyPolicy,
};
use hearth_planner::{GpuOffer, PlanError, PlanInput, plan};
use support::{
    GIB, claims, dense_1_7b, gpu, laptop, plan_input_here, plugin, qwen3_30b, server, small_vm,
    spec,
};

/// Context that leaves room for both workers on 8 GiB.
const SHORT: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\n";

fn planned(yaml: &str, profile: NodeProfileStatus) -> Result<InferencePlanSpec, PlanError> {
    let spec = match yaml.starts_with("model:") {
        true => serde_norway::from_str(yaml).unwrap(),
        false => spec(yaml),
    };
    plan(&plan_input_here(&spec, &qwen3_30b(), &[profile]))
}

/// A plan for a node of a cluster whose device plugin offers nothing.
fn planned_in_cluster(yaml: &str, profile: NodeProfileStatus) -> InferencePlanSpec {
    let (plugin, claimable) = (BTreeMap::new(), BTreeMap::new());
    let (spec, facts) = (serde_norway::from_str(yaml).unwrap(), qwen3_30b());
    let profiles = [profile];
    let input = PlanInput {
        gpus: GpuOffer::Cluster {
            plugin: &plugin,
            claimable: &claimable,
        },
        ..plan_input_here(&spec, &facts, &profiles)
    };
    plan(&input).unwrap()
}

fn rank<'a>(plan: &'a InferencePlanSpec, name: &str) -> &'a PlanRank {
    plan.rank(name).unwrap()
}

fn policy(rank: &PlanRank) -> ResidencyPolicy {
    rank.residency.as_ref().unwrap().policy
}

#[track_caller]
fn assert_line(lines: &[String], begin: &str, part: &str) {
    let found = lines
        .iter()
        .any(|line| line.starts_with(begin) && line.contains(part));
    assert!(found, "{begin} … {part} in {lines:#?}");
}

/// A device without a driver, computed by CPUs, with measured rates.
fn virtual_device(gib: u64) -> GpuProfile {
    GpuProfile {
        uuid: hearth_crds::VIRTUAL_UUID.to_owned(),
        name: "virtual".to_owned(),
        memory_bytes: gib * GIB,
        free_bytes: gib * GIB,
        read_gbps: 500.0,
        bf16_gflops: 50_000.0,
        copy_gbps: 20.0,
        copy_beside_reads_gbps: 15.0,
        operation_us: 5.0,
        virtual_device: Some(format!("virtual:memory={gib}Gi,copy=1GB/s")),
        ..GpuProfile::default()
    }
}

#[test]
fn auto_streams_prompts_and_splits_decode_where_the_model_does_not_fit() {
    let plan = planned(SHORT, laptop(40 * GIB)).unwrap();
    let (prefill, decode) = (rank(&plan, "prefill-0"), rank(&plan, "decode-0"));
    assert_eq!(policy(prefill), ResidencyPolicy::StreamLoading);
    assert_eq!(policy(decode), ResidencyPolicy::HostExperts);
    let facts = qwen3_30b();
    for rank in [prefill, decode] {
        let residency = rank.residency.as_ref().unwrap();
        assert_eq!(residency.host_bytes, facts.bytes.routed_experts);
        assert_eq!(rank.host_weight_bytes(), facts.bytes.routed_experts);
        let kv_bytes = rank.kv.as_ref().unwrap().memory_bytes;
        let dense_bytes = facts.bytes.total() - facts.bytes.routed_experts;
        assert!(rank.gpu_memory_bytes > dense_bytes + kv_bytes, "{rank:?}");
    }
    let on_gpu = prefill.gpu_memory_bytes + decode.gpu_memory_bytes;
    assert!(on_gpu <= 7 * GIB, "{on_gpu}");
    assert_eq!(prefill.chunk_tokens, 2048, "a prompt is one pass");
    assert!(prefill.residency.as_ref().unwrap().ring_slots >= Some(2));
    // The CPUs of the node compute experts; the GPU's threads only load them.
    assert!(decode.threads > prefill.threads, "{decode:?}");
    assert_eq!(plan.min_version, 2);
    let below = plan.routing.chunked_below_tokens;
    assert!((1..2048).contains(&below), "{below}");
    assert_line(&plan.why, "experts of prefill-0", "25.2 GB/s (estimated");
    assert_line(&plan.why, "ring of prefill-0", "slots of");
    assert_line(&plan.why, "experts of decode-0", "whose CPUs read them");
    assert_line(&plan.why, &format!("prompts below {below}"), "chunks take");
    assert_line(&plan.why, "prefill-0 on RTX 4060", "dense modules");

    // The same machine without its GPU is slower at both.
    let mut cpus = laptop(40 * GIB);
    cpus.gpus.clear();
    let without = planned(SHORT, cpus).unwrap();
    assert!(plan.predicted.tpot_ms < without.predicted.tpot_ms);
    assert!(plan.predicted.ttft_ms < without.predicted.ttft_ms);
    assert_eq!(without.min_version, 0);
}

#[test]
fn a_node_without_memory_for_the_experts_does_not_stream_them() {
    let plan = planned(SHORT, laptop(20 * GIB)).unwrap();
    assert!(!plan.ranks.iter().any(PlanRank::is_on_gpu));
    assert_eq!(
        policy(rank(&plan, "decode-0")),
        ResidencyPolicy::MmapPrefetch
    );
}

#[test]
fn decode_stays_on_cpus_that_are_faster_without_the_gpu() {
    let machine = NodeProfileStatus {
        gpus: vec![gpu("NVIDIA L4", 1, 24)],
        ..server()
    };
    let plan = planned("", machine).unwrap();
    assert_eq!(
        policy(rank(&plan, "prefill-0")),
        ResidencyPolicy::StreamLoading
    );
    assert_eq!(policy(rank(&plan, "decode-0")), ResidencyPolicy::Resident);
    assert_line(
        &plan.not_chosen,
        "experts of prefill streamed to a GPU, those of decode on CPUs beside it",
        "on the CPUs alone",
    );
    // The one copy in the node's memory is the decode worker's too.
    let facts = qwen3_30b();
    assert_eq!(
        rank(&plan, "decode-0").host_weight_bytes(),
        facts.bytes.total()
    );
}

#[test]
fn prompts_are_not_streamed_where_a_prefill_rank_on_the_cpus_is_sooner() {
    // A link so slow that no prompt of the context is worth its copies, where CPUs read prompts; a decode rank of one
    // thread is slower still.
    let with_link = |pcie_gbps: f64| {
        let mut machine = laptop(40 * GIB);
        machine.gpus[0].pcie_gbps = pcie_gbps;
        planned(SHORT, machine).unwrap()
    };
    let streamed_ms = |plan: &InferencePlanSpec| {
        let prefill = rank(plan, "prefill-0");
        (policy(prefill) == ResidencyPolicy::StreamLoading).then_some(plan.predicted.ttft_ms)
    };
    let mut instead = laptop(40 * GIB);
    instead.gpus[0].pcie_gbps = 0.01;
    let on_cpus = planned(SHORT, instead).unwrap();
    assert_eq!(streamed_ms(&on_cpus), None, "{:#?}", on_cpus.not_chosen);
    assert_line(
        &on_cpus.not_chosen,
        "experts of prefill streamed",
        "no prompt of up to 2048 tokens",
    );
    let mut chosen = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0].map(with_link);
    let first = chosen.iter().position(|plan| streamed_ms(plan).is_some());
    let first = first.expect("a link that is fast enough");
    // Whatever is faster than a link that pays, pays.
    for plan in &mut chosen[first..] {
        assert!(streamed_ms(plan).is_some(), "{:#?}", plan.not_chosen);
    }
}

#[test]
fn the_ring_shrinks_as_prompts_need_its_memory_and_to_two_slots_past_the_turning_point() {
    let of = |context: u32| {
        let yaml = format!(
            "model: {{source: {{builtin: {{name: hearth-demo}}}}, contextLength: {context}}}\nstrategy: Hybrid\nprefill: {{mode: StreamLoading}}\ndecode: {{maxBatch: 1}}\n"
        );
        let machine = NodeProfileStatus {
            gpus: vec![gpu("NVIDIA RTX 2000", 1, 8)],
            ..server()
        };
        planned(&yaml, machine).unwrap()
    };
    let mut points = Vec::new();
    for context in [1024, 8192, 16_384, 20_480, 21_504] {
        let plan = of(context);
        let residency = rank(&plan, "prefill-0").residency.clone().unwrap();
        assert_eq!(residency.ring_slots, Some(128), "a short prompt has room");
        let line = plan.why.iter().find(|l| l.contains("ring of prefill-0"));
        let line = line.unwrap_or_else(|| panic!("{:#?}", plan.why));
        let lengths = residency.ring_lengths;
        if lengths.is_empty() {
            assert!(line.contains("all 128 experts of a layer"), "{line}");
            continue;
        }
        assert_eq!(lengths[0].slots, 128, "{line}");
        assert_eq!(lengths[lengths.len() - 1].prompt_tokens, context, "{line}");
        let longer = |pair: &[PlanRingLength]| {
            pair[0].prompt_tokens < pair[1].prompt_tokens && pair[0].slots > pair[1].slots
        };
        assert!(lengths.windows(2).all(longer), "{line}");
        for length in &lengths {
            let words = format!("{} up to {}", length.slots, length.prompt_tokens);
            assert!(line.contains(&words), "{words}: {line}");
        }
        let Some((_, point)) = line.split_once("turning point is ") else {
            continue;
        };
        let point: u32 = point.split(' ').next().unwrap().parse().unwrap();
        let beyond = lengths.iter().filter(|length| length.prompt_tokens > point);
        assert!(beyond.clone().count() > 0, "{line}");
        assert!(beyond.clone().all(|length| length.slots == 2), "{line}");
        points.push(point);
    }
    // It follows from the rates, and not from the longest prompt.
    assert!(points.len() >= 2, "{points:?}");
    assert!(points.iter().all(|point| *point == points[0]), "{points:?}");
}

#[test]
fn a_gpu_that_computes_other_bits_caches_experts_only_where_the_spec_allows_it() {
    let of = |word: &str| {
        let yaml = format!("{SHORT}decode: {{expertCache: \"{word}\"}}\n");
        let machine = NodeProfileStatus {
            gpus: vec![gpu("NVIDIA RTX 4090", 1, 24)],
            ..laptop(40 * GIB)
        };
        planned(&yaml, machine).unwrap()
    };
    let cache = |plan: &InferencePlanSpec| {
        let residency = rank(plan, "decode-0").residency.clone().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::HostExperts);
        residency.cache_slots
    };
    let [auto, on, off] = ["Auto", "On", "Off"].map(of);
    assert_eq!((cache(&auto), cache(&off)), (None, None));
    assert!(cache(&on).is_some_and(|slots| slots > 0), "{:#?}", on.why);
    let says = |plan: &InferencePlanSpec, words: &str| {
        let mut lines = plan.why.iter().chain(&plan.not_chosen);
        assert!(lines.any(|line| line.contains(words)), "{words}: {plan:#?}");
    };
    says(&auto, "spec.decode.expertCache: \"On\" allows that");
    says(&on, "experts on the GPU of decode-0, in the");
    says(
        &off,
        "no cache of experts on the GPU of decode-0, as the spec says",
    );
}

#[test]
fn half_batches_are_chosen_where_they_are_faster_and_obeyed_where_they_are_asked_for() {
    let of = |word: &str, batch: u32| {
        let yaml = format!("{SHORT}decode: {{dualBatch: \"{word}\", maxBatch: {batch}}}\n");
        let plan = planned(&yaml, laptop(40 * GIB)).unwrap();
        let decode = rank(&plan, "decode-0");
        (decode.dual_batch, plan.predicted.tokens_per_second)
    };
    let (on, off, auto) = (of("On", 4), of("Off", 4), of("Auto", 4));
    assert!(on.0 && !off.0);
    // Two percent are within the error of a prediction.
    assert_eq!(auto.0, on.1 * 0.98 > off.1, "{on:?} {off:?} {auto:?}");
    assert!(auto.1 >= on.1.min(off.1));
    assert!(!of("Auto", 1).0, "one stream is no two halves");
    // A GPU as slow as the CPUs leaves them idle for half of the time.
    let slow = |word: &str| {
        let mut machine = laptop(40 * GIB);
        machine.gpus[0].read_gbps = 40.0;
        let yaml = format!(
            "{SHORT}prefill: {{mode: Chunked}}\ndecode: {{dualBatch: \"{word}\", maxBatch: 2}}\n"
        );
        planned(&yaml, machine).unwrap()
    };
    let (on, auto) = (slow("On"), slow("Auto"));
    assert!(rank(&on, "decode-0").dual_batch);
    assert_line(
        &on.why,
        "dual batch in decode-0, as the spec says",
        "two halves",
    );
    assert_eq!(
        auto.routing.chunked_below_tokens,
        PlanRouting::ALWAYS_CHUNKED
    );
}

#[test]
fn a_virtual_device_is_held_by_nobody_and_has_no_driver() {
    let machine = NodeProfileStatus {
        gpus: vec![virtual_device(8)],
        ..laptop(40 * GIB)
    };
    let text = machine.gpus[0].virtual_device.clone();
    let plan = planned(SHORT, machine).unwrap();
    for name in ["prefill-0", "decode-0"] {
        let rank = rank(&plan, name);
        assert_eq!(rank.virtual_device, text, "{name}");
        assert_eq!((rank.device_name.as_str(), rank.gpus), ("VIRTUAL-0", 0));
        assert_eq!(rank.gpu_budget_bytes(), rank.gpu_memory_bytes);
    }
    assert_eq!(plan.min_version, 2);
    assert_line(
        &plan.why,
        "experts of prefill-0",
        "20.0 GB/s (measured; 15.0 beside decode)",
    );
}

/// Where a device plugin would give a GPU to one rank alone, virtual devices are shared, unless it hands these out, too.
#[test]
fn a_virtual_device_is_shared_in_a_cluster_as_on_one_machine_unless_it_is_handed_out() {
    let mut machine = NodeProfileStatus {
        gpus: vec![virtual_device(8)],
        ..laptop(40 * GIB)
    };
    let alone = planned(SHORT, machine.clone()).unwrap();
    let shared = planned_in_cluster(SHORT, machine.clone());
    assert_eq!(alone.ranks, shared.ranks);
    assert_eq!(pods(&shared), [(None, 0), (None, 0)]);

    machine.gpus[0].from_device_plugin = true;
    let one = BTreeMap::from([(machine.node.clone(), 1)]);
    let handed_out = with_gpus(SHORT, &machine, plugin(&one));
    assert_eq!(pods(&handed_out), [(Some("decode-0"), 0), (None, 1)]);
    for name in ["prefill-0", "decode-0"] {
        let [alone, handed_out] = [&alone, &handed_out].map(|plan| rank(plan, name));
        assert_eq!(handed_out.virtual_device, alone.virtual_device, "{name}");
        assert_eq!(
            handed_out.gpu_memory_bytes, alone.gpu_memory_bytes,
            "{name}"
        );
        assert_eq!(handed_out.virtual_memory_bytes(), alone.gpu_memory_bytes);
    }
    // Another one has it.
    let none = BTreeMap::from([(machine.node.clone(), 0)]);
    let without = with_gpus(SHORT, &machine, plugin(&none));
    assert!(
        !without.ranks.iter().any(PlanRank::is_on_gpu),
        "{without:#?}"
    );
    assert_eq!(pods(&without), [(None, 0), (None, 0)]);
}

/// A plan for a node of a cluster with these GPUs that can be had there.
fn with_gpus(yaml: &str, profile: &NodeProfileStatus, offer: GpuOffer<'_>) -> InferencePlanSpec {
    let (spec, facts) = (serde_norway::from_str(yaml).unwrap(), qwen3_30b());
    let profiles = std::slice::from_ref(profile);
    let input = PlanInput {
        gpus: offer,
        ..plan_input_here(&spec, &facts, profiles)
    };
    plan(&input).unwrap()
}

/// The Pod in which each worker is, and the GPUs that it holds.
fn pods(plan: &InferencePlanSpec) -> [(Option<&str>, u32); 2] {
    ["prefill-0", "decode-0"].map(|name| {
        let rank = rank(plan, name);
        (rank.in_pod_of.as_deref(), rank.gpus)
    })
}

/// A GPU goes to one container: both workers on it are in one Pod, with the shares that they would have on a machine.
#[test]
fn one_gpu_of_a_cluster_serves_both_workers_in_one_pod() {
    let machine = laptop(40 * GIB);
    let here = planned(SHORT, machine.clone()).unwrap();
    assert_eq!(pods(&here), [(None, 1), (None, 1)]);
    let free = BTreeMap::from([(machine.node.clone(), 1)]);
    let uuids = BTreeSet::from([machine.gpus[0].uuid.clone()]);
    let uuids = BTreeMap::from([(machine.node.clone(), uuids)]);
    for offer in [plugin(&free), claims(&uuids)] {
        let shared = with_gpus(SHORT, &machine, offer);
        assert_eq!(pods(&shared), [(Some("decode-0"), 0), (None, 1)]);
        let [prefill, decode] = ["prefill-0", "decode-0"].map(|name| rank(&shared, name));
        assert_eq!(policy(prefill), ResidencyPolicy::StreamLoading);
        assert_eq!(policy(decode), ResidencyPolicy::HostExperts);
        assert_eq!(prefill.device(), decode.device());
        let on_gpu = prefill.gpu_memory_bytes + decode.gpu_memory_bytes;
        assert!(on_gpu <= machine.gpus[0].memory_bytes, "{on_gpu}");
        assert_eq!(shared.min_version, 2);
        assert_line(
            &shared.why,
            "prefill-0 on RTX 4060",
            "runs in the Pod of decode-0",
        );
    }
}

#[test]
fn workers_share_no_gpu_where_each_can_have_its_own_or_a_pod_cannot_hold_both() {
    let mut machine = laptop(40 * GIB);
    machine.gpus.push(GpuProfile {
        uuid: "GPU-second".to_owned(),
        ..machine.gpus[0].clone()
    });
    let free = |count: u32| BTreeMap::from([(machine.node.clone(), count)]);
    let own = with_gpus(SHORT, &machine, plugin(&free(2)));
    assert_eq!(pods(&own), [(None, 1), (None, 1)]);
    assert_ne!(
        rank(&own, "prefill-0").device(),
        rank(&own, "decode-0").device()
    );
    let alone = |more: &str| {
        let plan = with_gpus(&format!("{SHORT}{more}"), &machine, plugin(&free(1)));
        let held: u32 = plan.ranks.iter().map(|rank| rank.gpus).sum();
        plan.ranks.iter().all(|rank| rank.in_pod_of.is_none()) && held <= 1
    };
    assert!(!alone(""));
    assert!(alone("placement: {pinning: Exclusive}\n"));
    assert!(alone("prefill: {scaling: {mode: External}}\n"));
}

#[test]
fn constants_of_the_routing_policy_are_the_specs() {
    let yaml = format!("{SHORT}prefill: {{chunkedBelowTokens: 777}}\n");
    let plan = planned(&yaml, laptop(40 * GIB)).unwrap();
    assert_eq!(plan.routing.chunked_below_tokens, 777);
    assert_line(&plan.why, "prompts below 777", "chunkedBelowTokens says so");
    let on_cpus = planned("prefill: {chunkedBelowTokens: 100}\n", server()).unwrap();
    assert_eq!(on_cpus.routing.chunked_below_tokens, 100);
    // They say which prompts are streamed, not whether that pays.
    let default = planned(SHORT, laptop(40 * GIB)).unwrap();
    for tokens in [0, 16_777_216] {
        let yaml = format!("{SHORT}prefill: {{chunkedBelowTokens: {tokens}}}\n");
        let plan = planned(&yaml, laptop(40 * GIB)).unwrap();
        let devices = |plan: &InferencePlanSpec| {
            let ranks = plan.ranks.iter().map(|rank| rank.device_name.clone());
            ranks.collect::<Vec<_>>()
        };
        assert_eq!(devices(&plan), devices(&default), "{tokens}");
    }
    let chunked = "prefill: {mode: Chunked, chunkedBelowTokens: 100}\n";
    let error = planned(chunked, server()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    spec.prefill.chunkedBelowTokens has no effect
      spec.prefill.mode is Chunked, so that decode workers read every prompt: remove chunkedBelowTokens, or write mode: Auto
    ");
}

#[test]
fn modes_that_cannot_be_are_refused_with_numbers_and_a_remedy() {
    let error = planned("prefill: {mode: StreamLoading}\n", small_vm()).unwrap_err();
    insta::assert_snapshot!(error, @r"
    prefill-0 needs a GPU (spec.prefill.mode is StreamLoading), and the profile of here shows no GPU
      write spec.prefill.mode: Auto to run on CPUs, or add a GPU of compute capability 8.0 or higher
    ");
    let tiny = |yaml: &str| {
        let machine = NodeProfileStatus {
            gpus: vec![virtual_device(1)],
            ..server()
        };
        planned(yaml, machine).unwrap_err()
    };
    let error = tiny("strategy: Hybrid\nprefill: {mode: StreamLoading}\n").to_string();
    // With the least of all: dense modules stream too.
    assert!(error.contains("a ring of 2 experts"), "{error}");
    assert!(error.contains("2 slots for dense modules"), "{error}");
    assert!(error.contains("1 GiB free"), "{error}");
    assert!(error.contains("spec.prefill.mode: Auto"), "{error}");
    let error = tiny("decode: {dualBatch: \"On\"}\n").to_string();
    assert!(error.contains("spec.decode.dualBatch: Auto"), "{error}");
    let error = tiny("prefill: {mode: StreamLoading}\ndecode: {dualBatch: \"On\"}\n").to_string();
    let both = "write spec.prefill.mode: Auto and spec.decode.dualBatch: Auto to run on CPUs";
    assert!(error.contains(both), "{error}");
    let error = tiny("prefill: {gpusPerWorker: 0}\ndecode: {dualBatch: \"On\"}\n");
    insta::assert_snapshot!(error, @r#"
    spec.decode.dualBatch is "On"
      one half batch is in attention on a GPU, and spec.prefill.gpusPerWorker is 0, so that no worker uses one: remove gpusPerWorker, or write dualBatch: Auto
    "#);

    let dense = |yaml: &str| {
        let facts = dense_1_7b();
        plan(&plan_input_here(&spec(yaml), &facts, &[laptop(40 * GIB)])).unwrap_err()
    };
    insta::assert_snapshot!(dense("prefill: {mode: StreamLoading}\n"), @r#"
    spec.prefill.mode is "StreamLoading"
      qwen3 has no routed experts to stream: write Auto or Chunked
    "#);
    insta::assert_snapshot!(dense("decode: {dualBatch: \"On\"}\n"), @r#"
    spec.decode.dualBatch is "On"
      qwen3 has no routed experts that CPUs could compute meanwhile: write Auto or "Off"
    "#);
    // A link of unknown rate predicts nothing.
    let mut machine = laptop(40 * GIB);
    machine.gpus[0].pcie_gbps = 0.0;
    let error = planned(
        &format!("{SHORT}prefill: {{mode: StreamLoading}}\n"),
        machine,
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the rate of copies to RTX 4060"), "{error}");
}

#[test]
fn answers_stay_on_faster_cpus_where_only_prompts_were_asked_to_stream() {
    let of = |yaml: &str| {
        let machine = NodeProfileStatus {
            gpus: vec![gpu("NVIDIA L4", 1, 24)],
            ..server()
        };
        planned(yaml, machine).unwrap()
    };
    let plan = of("prefill: {mode: StreamLoading}\n");
    assert_eq!(
        policy(rank(&plan, "prefill-0")),
        ResidencyPolicy::StreamLoading
    );
    assert_eq!(policy(rank(&plan, "decode-0")), ResidencyPolicy::Resident);
    let halves = of("prefill: {mode: StreamLoading}\ndecode: {dualBatch: \"On\"}\n");
    let decode = rank(&halves, "decode-0");
    assert_eq!(policy(decode), ResidencyPolicy::HostExperts);
    assert!(decode.dual_batch && halves.predicted.tpot_ms > plan.predicted.tpot_ms);
}
