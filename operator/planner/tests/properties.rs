//! What holds for every machine and every spec.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use hearth_crds::{InferencePlanSpec, NodeProfileSpec, Pinning, PlanRole};
use hearth_planner::{Advice, PlanError, plan};
use proptest::prelude::*;
use support::{MIB, Machine, demo_model, dense_1_7b, qwen3_30b, request, spec};

fn machine() -> impl Strategy<Value = NodeProfileSpec> {
    (
        1_u32..=2,
        1_u32..=12,
        1_u32..=2,
        200_u64..40_000,
        2.0_f64..50.0,
        1.0_f64..6.0,
        1.0_f64..600.0,
    )
        .prop_map(
            |(sockets, cores, smt, available_mib, one_thread_gbps, times, core_gflops)| {
                Machine {
                    name: "node",
                    sockets,
                    cores,
                    smt,
                    available_bytes: available_mib * MIB,
                    one_thread_gbps,
                    socket_gbps: one_thread_gbps * times,
                    core_gflops,
                }
                .profile()
            },
        )
}

fn deployment() -> impl Strategy<Value = hearth_crds::InferenceDeploymentSpec> {
    let pinning = prop_oneof![Just("Exclusive"), Just("Shared"), Just("None")];
    let numa = prop_oneof![Just("Compact"), Just("Spread"), Just("Any")];
    let kv = prop_oneof![3 => Just(None), 1 => (1_u64..20_000).prop_map(Some)];
    (1_u32..=64, 1_u32..=3, 0_u32..=2, 16_u32..4096, pinning, numa, kv).prop_map(
        |(batch, decode, prefill, context, pinning, numa, kv)| {
            let prefill = if prefill == 0 { "mode: Chunked".to_owned() } else { format!("replicas: {prefill}") };
            let kv = kv.map(|mib| format!(", kvCache: {{memory: {mib}Mi}}")).unwrap_or_default();
            let mut spec = spec(&format!(
                "prefill: {{{prefill}}}\ndecode: {{replicas: {decode}, maxBatch: {batch}{kv}}}\nplacement: {{pinning: {pinning}, numa: {numa}}}\n"
            ));
            spec.model.context_length = Some(context);
            spec
        },
    )
}

/// Memory of each node: the weights once, and all else of every rank, within what is available.
fn assert_memory_fits(plan: &InferencePlanSpec, profiles: &[NodeProfileSpec]) {
    let mut used: BTreeMap<&str, u64> = BTreeMap::new();
    let mut weights: BTreeMap<&str, u64> = BTreeMap::new();
    for rank in &plan.ranks {
        let kv = rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes);
        *used.entry(&rank.node).or_default() += kv + rank.scratch_bytes;
        if let Some(residency) = &rank.residency {
            let once = weights.entry(&rank.node).or_default();
            *once = (*once).max(residency.budget_bytes);
        }
    }
    for profile in profiles {
        let node = profile.node.as_str();
        let total = used.get(node).unwrap_or(&0) + weights.get(node).unwrap_or(&0);
        assert!(
            total <= profile.memory.available_bytes,
            "{total} of {} on {node}",
            profile.memory.available_bytes
        );
    }
}

fn assert_cpus_fit(plan: &InferencePlanSpec, profiles: &[NodeProfileSpec]) {
    for rank in &plan.ranks {
        let profile = profiles
            .iter()
            .find(|profile| profile.node == rank.node)
            .unwrap();
        assert!(
            !rank.cpus.is_empty() && rank.threads >= 1,
            "{} has no CPU",
            rank.name
        );
        for cpu in &rank.cpus {
            assert!(
                profile.cpus.iter().any(|known| known.id == *cpu),
                "{} has CPU {cpu}",
                rank.name
            );
        }
        assert!(rank.cpus.is_sorted() && rank.threads as usize <= rank.cpus.len());
        for other in plan
            .ranks
            .iter()
            .filter(|other| other.name != rank.name && other.node == rank.node)
        {
            let overlap = rank.cpus.iter().any(|cpu| other.cpus.contains(cpu));
            assert!(
                !(overlap && rank.pinning == Pinning::Exclusive),
                "{} and {} overlap",
                rank.name,
                other.name
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn plans_never_overcommit_and_refusals_help(
        a in machine(), b in machine(), two in any::<bool>(), deployment in deployment(), model in 0..3_usize
    ) {
        let facts = [demo_model(), dense_1_7b(), qwen3_30b()][model].clone();
        let mut profiles = vec![a];
        profiles[0].node = "attic".into();
        if two {
            profiles.push(NodeProfileSpec { node: "cellar".into(), ..b });
        }
        match plan(&request(&deployment, &facts, &profiles)) {
            Ok(made) => {
                assert_memory_fits(&made, &profiles);
                assert_cpus_fit(&made, &profiles);
                prop_assert_eq!(made.ranks_of(PlanRole::Gateway).count(), 1);
                prop_assert_eq!(made.ranks_of(PlanRole::Decode).count() as u32, deployment.decode.planned_replicas());
                prop_assert_eq!(made.ranks_of(PlanRole::Prefill).count() as u32, deployment.prefill.planned_replicas());
                for rank in made.ranks.iter().filter(|rank| rank.role != PlanRole::Gateway) {
                    let kv = rank.kv.as_ref().unwrap().memory_bytes;
                    let one = u64::from(made.model.context_length) * made.model.kv_bytes_per_token;
                    prop_assert!(kv >= one, "{} cannot hold one stream", rank.name);
                }
                let numbers = [made.predicted.ttft_ms, made.predicted.tpot_ms, made.predicted.tokens_per_second];
                prop_assert!(numbers.iter().all(|n| n.is_finite() && *n > 0.0), "{numbers:?}");
                prop_assert!(!made.why.is_empty() && !made.not_chosen.is_empty());
                let again = plan(&request(&deployment, &facts, &profiles)).unwrap();
                prop_assert_eq!(serde_json::to_string(&made).unwrap(), serde_json::to_string(&again).unwrap());
                let read: InferencePlanSpec = serde_json::from_str(&serde_json::to_string(&made).unwrap()).unwrap();
                prop_assert_eq!(read, made);
            }
            Err(error) => {
                let text = error.to_string();
                prop_assert!(text.chars().any(|c| c.is_ascii_digit()), "no number in: {text}");
                prop_assert_eq!(text.lines().count(), 2, "{}", text);
                follow(&error, &deployment, &facts, &profiles);
            }
        }
    }
}

/// Does what a refusal says, each advice by itself, and expects a plan (or, with Exclusive, want of cores only).
fn follow(
    error: &PlanError,
    deployment: &hearth_crds::InferenceDeploymentSpec,
    facts: &hearth_crds::ModelFacts,
    profiles: &[NodeProfileSpec],
) {
    let PlanError::InsufficientMemory { advice, node, .. } = error else {
        return;
    };
    assert!(!advice.is_empty());
    for advice in advice {
        let (mut changed, mut machines) = (deployment.clone(), profiles.to_vec());
        match advice {
            Advice::ContextLength(tokens) => changed.model.context_length = Some(*tokens),
            Advice::RemoveKvMemory => changed.decode.kv_cache.memory = None,
            Advice::KvMemory(bytes) => {
                changed.decode.kv_cache.memory =
                    Some(hearth_crds::MemoryQuantity::from_bytes(*bytes));
            }
            Advice::DecodeReplicas(replicas) => changed.decode.replicas = Some(*replicas),
            Advice::Chunked => {
                changed.prefill.replicas = None;
                changed.prefill.mode = hearth_crds::PrefillMode::Chunked;
            }
            Advice::FreeMemory(bytes) => {
                let machine = machines
                    .iter_mut()
                    .find(|machine| &machine.node == node)
                    .unwrap();
                machine.memory.available_bytes += bytes;
                if profiles.len() > 1 {
                    // It is what the rank at fault lacks; a later rank may lack more.
                    let planned = plan(&request(&changed, facts, &machines));
                    assert!(planned.as_ref().err() != Some(error), "{error}");
                    continue;
                }
            }
        }
        let planned = plan(&request(&changed, facts, &machines));
        assert!(
            planned.is_ok(),
            "{error}\nafter {advice}: {}",
            planned.unwrap_err()
        );
    }
}
