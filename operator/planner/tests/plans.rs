//! Whole plans for several machines, and the text of every refusal.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use hearth_crds::{ModelFacts, Pinning, PlanRole, PlanRouting, ResidencyPolicy};
use hearth_planner::{Advice, CpuOffer, CpuRoom, PlanError, PlanInput, plan};
use support::{
    GIB, MIB, cpu_rooms, demo_model, dense_1_7b, laptop, plan_input, plan_input_here, qwen3_30b,
    server, small_vm, spec,
};

#[test]
fn demo_on_two_cores() {
    let mut spec = spec("prefill: {replicas: 1}\ndecode: {replicas: 1, maxBatch: 8}\n");
    spec.model.context_length = Some(2048);
    let plan = plan(&plan_input(&spec, &demo_model(), &[small_vm()])).unwrap();
    let names: Vec<&str> = plan.ranks.iter().map(|rank| rank.name.as_str()).collect();
    assert_eq!(names, ["gateway-0", "prefill-0", "decode-0"]);
    // 6 layers × (64 + 16) elements × 2 bytes.
    assert_eq!(plan.model.kv_bytes_per_token, 960);
    assert_eq!(
        plan.rank("decode-0")
            .unwrap()
            .kv
            .as_ref()
            .unwrap()
            .memory_bytes,
        8 * 2048 * 960
    );
    insta::assert_yaml_snapshot!(plan);
}

#[test]
fn moe_on_a_two_socket_server() {
    let spec = spec(
        "decode: {maxBatch: 16}\nplacement: {pinning: Exclusive}\nobjectives: {timePerOutputToken: 50ms}\n",
    );
    let plan = plan(&plan_input(&spec, &qwen3_30b(), &[server()])).unwrap();
    insta::assert_yaml_snapshot!(plan);
}

#[test]
fn moe_on_an_eight_gib_laptop_is_prefetched_and_misses_its_objectives() {
    let spec = spec("objectives: {timeToFirstToken: 1s, timePerOutputToken: 50ms}\n");
    let plan = plan(&plan_input(&spec, &qwen3_30b(), &[laptop(7 * GIB)])).unwrap();
    let residency = plan.rank("decode-0").unwrap().residency.as_ref().unwrap();
    assert_eq!(residency.policy, ResidencyPolicy::MmapPrefetch);
    assert_eq!(
        plan.why
            .iter()
            .filter(|line| line.starts_with("warning: objective "))
            .count(),
        2
    );
    assert!(
        plan.not_chosen
            .iter()
            .any(|line| line.starts_with("RTX 4060 Laptop of office")),
        "{:?}",
        plan.not_chosen
    );
    insta::assert_yaml_snapshot!(plan);
}

#[test]
fn exclusive_workers_have_a_window_each_over_prefetched_weights() {
    let facts = qwen3_30b();
    let windows = |pinning: &str| {
        let spec = spec(&format!("placement: {{pinning: {pinning}}}\n"));
        let plan = plan(&plan_input(&spec, &facts, &[laptop(9 * GIB)])).unwrap();
        let of = |name| {
            let residency = plan.rank(name).unwrap().residency.clone().unwrap();
            assert_eq!(residency.policy, ResidencyPolicy::MmapPrefetch);
            residency.budget_bytes
        };
        (of("prefill-0"), of("decode-0"), plan)
    };
    let (shared, same, _) = windows("Shared");
    assert_eq!(shared, same);
    // Each gets half of what a shared window would be, without what a prefill worker keeps for receivers: their memory
    // limits include all of it.
    let (prefill, decode, plan) = windows("Exclusive");
    let scratch = |name| plan.rank(name).unwrap().scratch_bytes;
    let unread = scratch("prefill-0") - scratch("decode-0");
    assert!(unread > 0);
    let half = (shared - unread) / 2;
    assert_eq!((prefill, decode), (half, half));
    let told = |line: &String| line.contains(" for each of its exclusive workers fit beside");
    assert!(plan.why.iter().any(told), "{:?}", plan.why);
}

#[test]
fn compact_keeps_a_rank_on_one_numa_node() {
    let spec = spec("placement: {numa: Compact, pinning: Exclusive}\n");
    let plan = plan(&plan_input(&spec, &dense_1_7b(), &[server()])).unwrap();
    let decode = plan.rank("decode-0").unwrap();
    let prefill = plan.rank("prefill-0").unwrap();
    assert_eq!(decode.numa_nodes.len(), 1);
    assert!(decode.cpus.iter().all(|cpu| !prefill.cpus.contains(cpu)));
    // Both threads of a core stay together.
    assert!(
        decode
            .cpus
            .iter()
            .all(|cpu| *cpu >= 32 || decode.cpus.contains(&(cpu + 32)))
    );
    assert_eq!(decode.cpus.len(), 2 * decode.threads as usize);
}

#[test]
fn chunked_has_no_prefill_rank() {
    let spec = spec("prefill: {mode: Chunked}\n");
    let plan = plan(&plan_input(&spec, &demo_model(), &[small_vm()])).unwrap();
    assert_eq!(plan.ranks_of(PlanRole::Prefill).count(), 0);
    assert_eq!(
        plan.routing.chunked_below_tokens,
        PlanRouting::ALWAYS_CHUNKED
    );
    assert!(plan.predicted.ttft_ms > 0.0);
}

#[test]
fn workers_of_a_pool_share_their_numerics_or_the_plan_says_so() {
    let spec = spec("prefill: {replicas: 2}\ndecode: {replicas: 2}\n");
    let (mut old, mut new, mut newer) = (small_vm(), small_vm(), small_vm());
    (old.node, new.node, newer.node) = ("attic".into(), "cellar".into(), "den".into());
    (new.isa.avx512vbmi, newer.isa.avx512vbmi) = (true, true);
    old.isa.avx512f = false;
    let facts = dense_1_7b();
    // The three differ only in their kernels, and one rank on each would be the fastest.
    let alike = plan(&plan_input(
        &spec,
        &facts,
        &[old.clone(), new.clone(), newer],
    ))
    .unwrap();
    for role in [PlanRole::Prefill, PlanRole::Decode] {
        let on_old = alike.ranks_of(role).filter(|rank| rank.node == "attic");
        assert!([0, 2].contains(&on_old.count()), "{role:?} is mixed");
    }
    assert!(alike.mixed_numerics.is_empty());
    // Each has memory for one decode worker in addition to the weights: mixing is the only option, and the plan says
    // what it means.
    let spec =
        self::spec("prefill: {mode: Chunked}\ndecode: {replicas: 2, kvCache: {memory: 2Gi}}\n");
    for node in [&mut old, &mut new] {
        node.memory.available_bytes = 6 << 30;
        node.numa_nodes[0].free_bytes = 6 << 30;
    }
    let mixed = plan(&plan_input(&spec, &facts, &[old, new])).unwrap();
    let expected = "decode-1 with AVX-512; decode-0 with AVX2: \
                    a stream that moves between them goes on, and its later tokens may be others";
    assert_eq!(mixed.mixed_numerics, [expected]);
    assert!(mixed.why.iter().any(|line| line == expected));
}

#[test]
fn replicas_spread_over_nodes_and_keep_their_order() {
    let spec = spec("prefill: {replicas: 2}\ndecode: {replicas: 3}\n");
    let (mut a, mut b) = (small_vm(), small_vm());
    (a.node, b.node) = ("attic".into(), "cellar".into());
    let facts = dense_1_7b();
    let forward = plan(&plan_input(&spec, &facts, &[a.clone(), b.clone()])).unwrap();
    let names: Vec<&str> = forward
        .ranks
        .iter()
        .map(|rank| rank.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "gateway-0",
            "prefill-0",
            "prefill-1",
            "decode-0",
            "decode-1",
            "decode-2"
        ]
    );
    for node in ["attic", "cellar"] {
        assert!(
            forward
                .ranks_of(PlanRole::Decode)
                .any(|rank| rank.node == node),
            "no decode rank on {node}"
        );
    }
    assert_eq!(
        forward,
        plan(&plan_input(&spec, &facts, &[b, a])).unwrap(),
        "the order of profiles matters"
    );
}

#[test]
fn a_context_too_long_for_memory_names_one_that_fits() {
    let mut spec = spec("decode: {maxBatch: 1}\n");
    spec.model.context_length = Some(65_536);
    let facts = dense_1_7b();
    let error = plan(&plan_input(&spec, &facts, &[laptop(6 * GIB)])).unwrap_err();
    insta::assert_snapshot!(error);
    let PlanError::InsufficientMemory {
        advice,
        needs_bytes,
        free_bytes,
        ..
    } = error
    else {
        panic!()
    };
    assert!(needs_bytes > free_bytes);
    let Advice::ContextLength(tokens) = advice[0] else {
        panic!("{advice:?}")
    };
    spec.model.context_length = Some(tokens);
    plan(&plan_input(&spec, &facts, &[laptop(6 * GIB)])).unwrap();
}

#[test]
fn a_model_too_large_for_any_spec_names_the_memory_it_lacks() {
    let spec = spec("");
    let error = plan(&plan_input(&spec, &qwen3_30b(), &[laptop(GIB)])).unwrap_err();
    insta::assert_snapshot!(error);
    let PlanError::InsufficientMemory { advice, .. } = error else {
        panic!()
    };
    let Advice::FreeMemory(bytes) = advice[0] else {
        panic!("{advice:?}")
    };
    plan(&plan_input(&spec, &qwen3_30b(), &[laptop(GIB + bytes)])).unwrap();
}

#[test]
fn an_explicit_kv_budget_is_kept_or_refused() {
    let kv = |memory: &str| {
        spec(&format!(
            "decode: {{maxBatch: 2, kvCache: {{memory: {memory}}}}}\n"
        ))
    };
    let facts = dense_1_7b();
    let plan_kv = plan(&plan_input(&kv("2Gi"), &facts, &[small_vm()])).unwrap();
    assert_eq!(
        plan_kv
            .rank("decode-0")
            .unwrap()
            .kv
            .as_ref()
            .unwrap()
            .memory_bytes,
        2 * GIB
    );

    let error = plan(&plan_input(&kv("64Mi"), &facts, &[small_vm()])).unwrap_err();
    insta::assert_snapshot!(error, @r"
    spec.decode.kvCache.memory is 64Mi and holds 576 tokens, contextLength is 8192
      raise it to 896Mi, or lower spec.model.contextLength to 576
    ");
    let error = plan(&plan_input(&kv("1Mi"), &facts, &[small_vm()])).unwrap_err();
    insta::assert_snapshot!(error, @r"
    spec.decode.kvCache.memory is 1Mi and holds 0 tokens
      raise it to 896Mi
    ");
    let error = plan(&plan_input(&kv("64Gi"), &facts, &[small_vm()])).unwrap_err();
    let PlanError::InsufficientMemory { advice, .. } = &error else {
        panic!("{error}")
    };
    let Advice::KvMemory(bytes) = advice[0] else {
        panic!("{advice:?}")
    };
    plan(&plan_input(
        &kv(&format!("{}Mi", bytes / MIB)),
        &facts,
        &[small_vm()],
    ))
    .unwrap();
}

#[test]
fn exclusive_on_too_few_cores_says_what_to_write() {
    let exclusive = spec("decode: {replicas: 2}\nplacement: {pinning: Exclusive}\n");
    let error = plan(&plan_input(&exclusive, &demo_model(), &[small_vm()])).unwrap_err();
    insta::assert_snapshot!(error, @r#"
    spec.placement.pinning is "Exclusive" and node here has 2 whole cores for 3 workers (prefill, 2 decode)
      lower spec.decode.replicas to 1, or write spec.prefill.mode: Chunked without prefill replicas, or write spec.placement.pinning: Shared
    "#);
    let chunked = spec("prefill: {mode: Chunked}\nplacement: {pinning: Exclusive}\n");
    let profiles = [small_vm()];
    let facts = demo_model();
    let made = plan(&plan_input(&chunked, &facts, &profiles)).unwrap();
    let (gateway, decode) = (
        made.rank("gateway-0").unwrap(),
        made.rank("decode-0").unwrap(),
    );
    assert_ne!(gateway.cpus, decode.cpus);
    assert_eq!(gateway.pinning, Pinning::Shared);
    assert_eq!(decode.pinning, Pinning::Exclusive);
}

/// Two cores of a cluster node, part of which system Pods and the agent request.
#[test]
fn exclusive_in_a_cluster_takes_whole_cpus_of_what_others_leave() {
    let profiles = [small_vm()];
    let facts = demo_model();
    let rooms = cpu_rooms(&profiles, 250);
    let planned = |yaml: &str, rooms: &BTreeMap<String, CpuRoom>| {
        plan(&PlanInput {
            cpus: CpuOffer::Requests(rooms),
            ..plan_input(&spec(yaml), &facts, &profiles)
        })
    };
    let made = planned(
        "prefill: {mode: Chunked}\nplacement: {pinning: Exclusive}\n",
        &rooms,
    )
    .unwrap();
    let (gateway, decode) = (
        made.rank("gateway-0").unwrap(),
        made.rank("decode-0").unwrap(),
    );
    // The kubelet leaves the first core to the system, and so does the plan.
    assert_eq!(
        (decode.cpus.as_slice(), decode.cpu_millis()),
        (&[1][..], 1000)
    );
    assert_eq!(
        (gateway.cpus.as_slice(), gateway.cpu_millis()),
        (&[0][..], 100)
    );
    assert!(
        made.why
            .iter()
            .any(|line| line.starts_with("CPUs on here: 1 dedicated to") && line.contains("250m")),
        "{:?}",
        made.why
    );

    let error = planned("placement: {pinning: Exclusive}\n", &rooms).unwrap_err();
    insta::assert_snapshot!(error, @r#"
    spec.placement.pinning is "Exclusive" and node here has 1 whole core for 2 workers (prefill, decode): of its 2000m CPU other Pods request 250m, 100m are kept free, and the gateway requests up to 200m
      write spec.prefill.mode: Chunked without prefill replicas, or write spec.placement.pinning: Shared
    "#);
    let crowded = cpu_rooms(&profiles, 1750);
    let error = planned(
        "prefill: {mode: Chunked}\nplacement: {pinning: Exclusive}\n",
        &crowded,
    )
    .unwrap_err();
    insta::assert_snapshot!(error, @r#"
    spec.placement.pinning is "Exclusive" and node here has 0 whole cores for 1 worker (decode): of its 2000m CPU other Pods request 1750m, 100m are kept free, and the gateway requests up to 200m
      free 1050m of CPU requests on the node, or add a node
    "#);
    let error = planned("", &crowded).unwrap_err();
    insta::assert_snapshot!(error, @r#"
    the deployment does not fit the CPU of node here: with it, its Pods would request 600m, and 150m are available: of its 2000m CPU other Pods request 1750m, 100m are kept free
      free 450m of CPU requests on the node, or add a node
    "#);
}

#[test]
fn other_refusals_name_the_field_and_the_value() {
    let mut long = spec("");
    long.model.context_length = Some(8192);
    let error = plan(&plan_input(&long, &demo_model(), &[small_vm()])).unwrap_err();
    insta::assert_snapshot!(error, @r"
    spec.model.contextLength is 8192
      deepseek_v3 supports at most 4096 tokens here: write at most 4096
    ");
    let error = plan(&plan_input(
        &spec("strategy: Interleaved\n"),
        &demo_model(),
        &[small_vm()],
    ))
    .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("spec.strategy is \"Interleaved\"\n"),
        "{error}"
    );
    let mixed = spec("decode: {kvCache: {keyType: F32}}\n");
    let error = plan(&plan_input(&mixed, &demo_model(), &[small_vm()])).unwrap_err();
    assert!(
        error.to_string().contains("write the same type for both"),
        "{error}"
    );
    let error = plan(&plan_input(&spec(""), &demo_model(), &[])).unwrap_err();
    assert!(
        error.to_string().starts_with("there is no profiled node"),
        "{error}"
    );
    let mut broken = small_vm();
    broken.memory.read_all_threads_gbps = f64::NAN;
    let error = plan(&plan_input(&spec(""), &demo_model(), &[broken])).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("the profile of node here reads NaN GB/s"),
        "{error}"
    );
}

#[test]
fn predictions_follow_the_machine() {
    let spec = spec("");
    let facts = qwen3_30b();
    let on = |profile| {
        plan(&plan_input(&spec, &facts, &[profile]))
            .unwrap()
            .predicted
    };
    let (fast, slow) = (on(server()), on(laptop(7 * GIB)));
    assert!(fast.tpot_ms * 5.0 < slow.tpot_ms, "{fast:?} {slow:?}");
    // About 4 GiB are read per token, at 0.87 of 400 GB/s: 3 to 15 ms with 48 layers' overhead.
    assert!((3.0..60.0).contains(&fast.tpot_ms), "{fast:?}");
    assert!(
        fast.tokens_per_second > 1e3 / fast.tpot_ms,
        "a batch must bring more than one stream"
    );
}

#[test]
fn experts_that_a_batch_reads_are_counted_by_expectation() {
    let facts = qwen3_30b();
    assert!((facts.expected_distinct_experts(1) - 8.0).abs() < 1e-9);
    let two = facts.expected_distinct_experts(2);
    assert!((two - (8.0 + 8.0 * 120.0 / 128.0)).abs() < 1e-9, "{two}");
    assert!(facts.expected_distinct_experts(1000) > 127.99);
    assert_eq!(facts.kv_bytes_per_token(2, 2), 48 * 4 * 256 * 2);
    assert_eq!(demo_model().kv_bytes_per_token(2, 2), 960);
}

/// The system evicts what was read longest ago, so never what every step reads.
#[test]
fn what_every_step_reads_is_kept_before_experts() {
    let facts = qwen3_30b();
    let always = facts.step_bytes(0);
    let experts = facts.step_bytes(1) - always;
    let absent = |kept: f64| facts.absent_step_bytes(1, kept as u64);
    let is_near = |found: f64, expected: f64| (found - expected).abs() < 1e-6 * facts.step_bytes(1);
    let routed = facts.bytes.routed_experts as f64;
    for (kept, expected) in [
        (0.0, always + experts),
        (always / 2.0, always / 2.0 + experts),
        (always, experts),
        (always + routed / 4.0, experts * 0.75),
        (always + routed, 0.0),
        (facts.bytes.total() as f64 * 2.0, 0.0),
    ] {
        assert!(is_near(absent(kept), expected), "{kept}: {}", absent(kept));
    }
    // Without experts every part is equally likely to be there.
    let dense = dense_1_7b();
    let half = dense.absent_step_bytes(1, dense.bytes.total() / 2);
    assert!(
        (half / dense.step_bytes(1) - 0.5).abs() < 1e-6,
        "{half} of {}",
        dense.step_bytes(1)
    );
}

/// LRU eviction drops exactly what is read next, so a page cache for less than three quarters of the cycle is of no
/// use.
#[test]
fn a_dense_model_that_is_read_in_a_circle_finds_nothing_in_a_small_page_cache() {
    let dense = dense_1_7b();
    let window = dense.bytes.total() / 5 * 2;
    // Two layers' worth of it is for what is mapped and released; the rest stays.
    let stays = window - 2 * dense.largest_layer_bytes;
    let circle = dense.step_bytes(1) - stays as f64;
    let read = |beside: f64| dense.disk_step_bytes(1, window, stays + beside as u64);
    assert_eq!(read(0.0), circle);
    assert_eq!(read(circle * 0.7), circle);
    let most = read(circle * 0.76);
    assert!(most > 0.0 && most < circle / 2.0, "{most} of {circle}");
    assert_eq!(dense.disk_step_bytes(1, window, u64::MAX), 0.0);
    // Experts are not read in turn.
    let moe = qwen3_30b();
    let (window, kept) = (moe.bytes.total() / 5, moe.bytes.total() / 4);
    let absent = moe.absent_step_bytes(1, kept);
    assert_eq!(moe.disk_step_bytes(1, window, kept), absent);
}

/// Weights that the mapping window releases cost page faults when they are read again, even if they never left the
/// page cache.
#[test]
fn weights_that_are_mapped_again_cost_their_page_faults() {
    let spec = spec("decode: {maxBatch: 1}\nprefill: {mode: Chunked}\n");
    let on = |facts: &ModelFacts, available_bytes: u64| {
        let mut profiles = [small_vm()];
        profiles[0].memory.available_bytes = available_bytes;
        profiles[0].disks[0].cached_bytes = Some(facts.bytes.total());
        let plan = plan(&plan_input_here(&spec, facts, &profiles)).unwrap();
        let rank = plan.rank("decode-0").unwrap();
        assert_eq!(rank.threads, 2);
        let residency = rank.residency.clone().unwrap();
        (plan.predicted.tpot_ms, residency)
    };
    for facts in [dense_1_7b(), qwen3_30b()] {
        let total = facts.bytes.total();
        let (resident_ms, residency) = on(&facts, total * 2);
        assert_eq!(residency.policy, ResidencyPolicy::Resident);
        let mut before_ms = resident_ms;
        for percent in [80, 65] {
            let (tpot_ms, residency) = on(&facts, total / 100 * percent);
            assert_eq!(residency.policy, ResidencyPolicy::MmapPrefetch);
            let mapped = facts.absent_step_bytes(1, residency.budget_bytes);
            // Two threads share the faults (14 ms per GB), one unmaps (8.5).
            let expected_ms = resident_ms + mapped / 1e9 * 15.5;
            assert!(
                (tpot_ms - expected_ms).abs() < 0.01,
                "{tpot_ms} and {expected_ms}"
            );
            assert!(tpot_ms > before_ms, "{tpot_ms} and {before_ms}");
            before_ms = tpot_ms;
        }
    }
}

#[test]
fn pages_that_stay_in_the_page_cache_are_not_read_from_the_disk() {
    let spec = spec("decode: {maxBatch: 1}\n");
    let facts = qwen3_30b();
    let tpot_ms = |input: &PlanInput<'_>| {
        let plan = plan(input).unwrap();
        let residency = plan.rank("decode-0").unwrap().residency.clone().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::MmapPrefetch);
        plan.predicted.tpot_ms
    };
    let mut profiles = [laptop(7 * GIB)];
    profiles[0].gpus.clear();
    let of_a_pod = tpot_ms(&plan_input(&spec, &facts, &profiles));
    // On a machine, reserves and memory that processes do not use hold pages too.
    let here = tpot_ms(&plan_input_here(&spec, &facts, &profiles));
    assert!(here < of_a_pod, "{here} and {of_a_pod}");
    // Pages that others brought in count, up to the size of the model.
    profiles[0].disks[0].cached_bytes = Some(facts.bytes.total() / 2);
    let half = tpot_ms(&plan_input_here(&spec, &facts, &profiles));
    profiles[0].disks[0].cached_bytes = Some(facts.bytes.total() * 2);
    let all = tpot_ms(&plan_input_here(&spec, &facts, &profiles));
    assert!(all < half && half < here, "{all}, {half} and {here}");
    // Memory bandwidth is then the limit: the bytes of a step divided by the rate at which they are read.
    let memory = &profiles[0].memory;
    let least_ms = facts.step_bytes(1) / 1e9 / memory.read_all_threads_gbps * 1e3;
    assert!(
        all > least_ms && all < least_ms * 2.0,
        "{all} and {least_ms}"
    );
}
