//! Properties that hold for every machine and every spec.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    ComputeCapability, DualBatch, GpuProfile, InferenceDeploymentSpec, InferencePlanSpec,
    MemoryQuantity, NodeProfileStatus, Pinning, PlanRank, PlanRole, PlanStrategy, PrefillMode,
};
use hearth_planner::{Advice, CpuOffer, CpuRoom, GpuOffer, PlanError, PlanInput, plan};
use proptest::prelude::*;
use support::advice::{followed, write};
use support::{
    GIB, MIB, Machine, cpu_rooms, demo_model, dense_1_7b, gpu, plan_input, plan_input_here,
    qwen3_30b, spec,
};

fn machine() -> impl Strategy<Value = NodeProfileStatus> {
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

/// Up to four GPUs, some of them too old or with little memory left.
fn gpus() -> impl Strategy<Value = Vec<GpuProfile>> {
    let one = (0_u32..4, 2_u64..48, 0_u64..48).prop_map(|(major, gib, used)| GpuProfile {
        compute_capability: Some(ComputeCapability {
            major: 7 + major,
            minor: 0,
        }),
        free_bytes: gib.saturating_sub(used) * GIB,
        ..gpu("GPU", 0, gib)
    });
    prop::collection::vec(one, 0..=4).prop_map(|mut gpus| {
        for (n, gpu) in gpus.iter_mut().enumerate() {
            gpu.uuid = format!("GPU-{n}");
        }
        gpus
    })
}

fn deployment() -> impl Strategy<Value = InferenceDeploymentSpec> {
    let pinning = prop_oneof![Just("Exclusive"), Just("Shared"), Just("None")];
    let numa = prop_oneof![Just("Compact"), Just("Spread"), Just("Any")];
    let kv = prop_oneof![3 => Just(None), 1 => (1_u64..20_000).prop_map(Some)];
    let gpus_per_worker = prop_oneof![3 => Just(None), 1 => (0_u32..=1).prop_map(Some)];
    let gateways = prop_oneof![3 => Just(1), 1 => 2_u32..=4];
    let modes = prop_oneof![
        4 => Just((PrefillMode::Auto, false)),
        1 => Just((PrefillMode::StreamLoading, false)),
        2 => Just((PrefillMode::DistributedStreamLoading, false)),
        1 => Just((PrefillMode::Auto, true)),
    ];
    let rest = (gateways, modes);
    (1_u32..=64, 1_u32..=3, 0_u32..=2, 16_u32..4096, pinning, numa, kv, gpus_per_worker, rest).prop_map(
        |(batch, decode, prefill, context, pinning, numa, kv, gpus_per_worker, (gateways, (streams, halves)))| {
            let prefill = if prefill == 0 { "mode: Chunked".to_owned() } else { format!("replicas: {prefill}") };
            let kv = kv.map(|mib| format!(", kvCache: {{memory: {mib}Mi}}")).unwrap_or_default();
            let mut spec = spec(&format!(
                "prefill: {{{prefill}}}\ndecode: {{replicas: {decode}, maxBatch: {batch}{kv}}}\nplacement: {{pinning: {pinning}, numa: {numa}}}\n"
            ));
            spec.model.context_length = Some(context);
            spec.prefill.gpus_per_worker = gpus_per_worker;
            spec.gateway.replicas = gateways;
            if streams.streams() && prefill.starts_with("replicas") && gpus_per_worker != Some(0) {
                spec.prefill.mode = streams;
            }
            if spec.prefill.mode == PrefillMode::DistributedStreamLoading {
                spec.prefill.replicas = Some(1);
                spec.prefill.gpus_per_worker = gpus_per_worker.map(|_| 2);
            }
            if halves && batch > 1 {
                spec.decode.dual_batch = DualBatch::On;
            }
            spec
        },
    )
}

/// Checks each node's memory: the weights once, or the different ones of followers where no other rank has them, plus everything
/// else of every rank, within what is available.
fn assert_memory_fits(plan: &InferencePlanSpec, profiles: &[NodeProfileStatus]) {
    let mut used: BTreeMap<&str, u64> = BTreeMap::new();
    let mut weights: BTreeMap<&str, u64> = BTreeMap::new();
    for rank in &plan.ranks {
        let own = rank.own_weight_bytes();
        *used.entry(&rank.node).or_default() += rank.host_kv_bytes() + rank.scratch_bytes + own;
        let here = || plan.ranks.iter().filter(|other| other.node == rank.node);
        let has_experts = |rank: &PlanRank| rank.host_weight_bytes() > 0;
        let are_shares = here()
            .filter(|rank| has_experts(rank))
            .all(|rank| rank.role == PlanRole::Stage);
        let once = weights.entry(&rank.node).or_default();
        let bytes = rank.host_weight_bytes() - own;
        *once = if are_shares && rank.peers.is_some() {
            *once + bytes
        } else {
            (*once).max(bytes)
        };
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

/// Checks each GPU's memory: all of every rank on it, within what is free; in a cluster, one rank
/// each, or two in one Pod.
fn assert_gpus_fit(plan: &InferencePlanSpec, profiles: &[NodeProfileStatus], offer: GpuOffer<'_>) {
    for profile in profiles {
        let here = || plan.ranks.iter().filter(|rank| rank.node == profile.node);
        if let GpuOffer::Cluster { plugin, claimable } = offer {
            let held: u32 = here().map(|rank| rank.gpus).sum();
            let claimable = claimable.get(&profile.node);
            let free = claimable.map_or(plugin.get(&profile.node).copied().unwrap_or(0), |uuids| {
                u32::try_from(uuids.len()).unwrap()
            });
            assert!(held <= free, "{held} of {free} on {}", profile.node);
            for rank in here().filter(|rank| rank.is_on_gpu()) {
                assert_eq!(rank.claims_gpus, claimable.is_some());
                assert!(claimable.is_none_or(|uuids| uuids.contains(&rank.device_name)));
            }
        }
        for rank in here().filter(|rank| rank.is_on_gpu()) {
            assert_eq!(
                std::slice::from_ref(&rank.device_name),
                rank.gpu_uuids.as_slice()
            );
            assert!(profile.gpus.iter().any(|gpu| gpu.uuid == rank.device_name));
        }
        for gpu in &profile.gpus {
            let on_it: Vec<_> = here().filter(|rank| rank.device_name == gpu.uuid).collect();
            let used: u64 = on_it.iter().map(|rank| rank.gpu_memory_bytes).sum();
            for rank in &on_it {
                assert_eq!(
                    rank.device_memory.unwrap().sum_bytes(),
                    rank.gpu_memory_bytes
                );
            }
            let least = profile.gpus.iter().map(|gpu| gpu.memory_bytes).min();
            match offer {
                GpuOffer::Machine => assert!(used <= gpu.free_bytes, "{used} on {gpu:?}"),
                GpuOffer::Cluster { claimable, .. } => {
                    let least = match claimable.contains_key(&profile.node) {
                        true => Some(gpu.memory_bytes),
                        false => least,
                    };
                    assert!(Some(used) <= least, "{used} on {gpu:?}");
                    let hosts = on_it.iter().filter(|rank| rank.in_pod_of.is_none());
                    let holder = hosts.clone().next().map(|host| host.name.as_str());
                    let is_there = |rank: &PlanRank| {
                        rank.in_pod_of.is_none() || rank.in_pod_of.as_deref() == holder
                    };
                    assert!(hosts.count() <= 1 && on_it.iter().all(|rank| is_there(rank)));
                    assert!(on_it.len() <= 2, "{on_it:?}");
                }
            }
            let capability = gpu.compute_capability.unwrap();
            assert!(on_it.is_empty() || capability.major >= 8, "{capability}");
        }
    }
}

/// Checks that peers are one group of as many as the plan says, each on a GPU of its own, with caches of one size.
fn assert_peers(plan: &InferencePlanSpec, mode: PrefillMode) {
    let members = plan.group_of("prefill-0");
    let stages = plan
        .ranks_of(PlanRole::Stage)
        .filter(|rank| rank.ring.is_none());
    assert_eq!(stages.count(), members.len().saturating_sub(1));
    assert!(mode != PrefillMode::DistributedStreamLoading || members.len() > 1);
    let mut gpus = BTreeSet::new();
    for (place, member) in members.iter().enumerate() {
        let peers = member.peers.as_ref().unwrap();
        assert_eq!(
            (peers.place as usize, peers.ranks as usize),
            (place, members.len())
        );
        assert!((2..=8).contains(&members.len()));
        assert!(
            gpus.insert((&member.node, &member.device_name)),
            "{member:?}"
        );
        assert_eq!(member.kv, members[0].kv);
        assert!(place > 0 || member.in_pod_of.is_none(), "{member:?}");
    }
}

/// Checks that CPUs exist, that exclusive ones belong to one rank, and that requests stay within what a node can give.
/// On a single machine the gateway may run beside workers that own every core.
fn assert_cpus_fit(plan: &InferencePlanSpec, profiles: &[NodeProfileStatus], offer: CpuOffer<'_>) {
    if let CpuOffer::Requests(rooms) = offer {
        for profile in profiles {
            let here = plan.ranks.iter().filter(|rank| rank.node == profile.node);
            let requested: u64 = here.map(hearth_crds::PlanRank::cpu_millis).sum();
            let free = rooms[&profile.node].free_millis();
            assert!(
                requested <= free,
                "{requested}m of {free}m on {}",
                profile.node
            );
        }
    }
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
            if other.role == PlanRole::Gateway && matches!(offer, CpuOffer::Machine) {
                assert_ne!(other.pinning, Pinning::Exclusive);
                continue;
            }
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
        a in machine(), b in machine(), two in any::<bool>(), deployment in deployment(), model in 0..3_usize,
        gpus in gpus(), offered in prop::option::of(0_u32..=3), requested in prop::option::of(0_u64..6_000),
        claimable in prop::option::of(0_usize..=3)
    ) {
        let facts = [demo_model(), dense_1_7b(), qwen3_30b()][model].clone();
        let mut profiles = vec![a];
        profiles[0].node = "attic".into();
        profiles[0].gpus = gpus;
        let free: BTreeMap<String, u32> = offered.map(|gpus| ("attic".to_owned(), gpus)).into_iter().collect();
        let uuids = claimable.map(|count| {
            let gpus = profiles[0].gpus.iter().take(count).map(|gpu| gpu.uuid.clone());
            ("attic".to_owned(), gpus.collect::<BTreeSet<String>>())
        });
        let uuids: BTreeMap<_, _> = uuids.into_iter().collect();
        let offer = if two || offered.is_some() || claimable.is_some() {
            GpuOffer::Cluster { plugin: &free, claimable: &uuids }
        } else {
            GpuOffer::Machine
        };
        if two {
            profiles.push(NodeProfileStatus { node: "cellar".into(), ..b });
        }
        let rooms = cpu_rooms(&profiles, requested.unwrap_or(0));
        let cpus = if requested.is_some() { CpuOffer::Requests(&rooms) } else { CpuOffer::Machine };
        let plan_input = |deployment, profiles| PlanInput { gpus: offer, cpus, ..plan_input(deployment, &facts, profiles) };
        match plan(&plan_input(&deployment, &profiles)) {
            Ok(made) => {
                assert_gpus_fit(&made, &profiles, offer);
                assert_memory_fits(&made, &profiles);
                assert_cpus_fit(&made, &profiles, cpus);
                prop_assert_eq!(made.ranks_of(PlanRole::Gateway).count(), deployment.gateway.replicas as usize);
                prop_assert_eq!(made.ranks_of(PlanRole::Decode).count() as u32, deployment.decode.planned_replicas());
                let is_ring = made.strategy == PlanStrategy::PipedRing;
                let prefill = if is_ring { 0 } else { deployment.prefill.planned_replicas() };
                prop_assert_eq!(made.ranks_of(PlanRole::Prefill).count() as u32, prefill);
                assert_peers(&made, deployment.prefill.mode);
                let workers = || made.ranks.iter().filter(|rank| rank.role != PlanRole::Gateway);
                let one = u64::from(made.model.context_length) * made.model.kv_bytes_per_token;
                let of_ring: u64 = workers().map(|rank| rank.kv.as_ref().unwrap().memory_bytes).sum();
                for rank in workers() {
                    // The members of a ring have the KV of their own layers.
                    let kv = if is_ring { of_ring } else { rank.kv.as_ref().unwrap().memory_bytes };
                    prop_assert!(kv >= one, "{} cannot hold one stream", rank.name);
                }
                let numbers = [made.predicted.ttft_ms, made.predicted.tpot_ms, made.predicted.tokens_per_second];
                prop_assert!(numbers.iter().all(|n| n.is_finite() && *n > 0.0), "{numbers:?}");
                prop_assert!(!made.why.is_empty() && !made.not_chosen.is_empty());
                let again = plan(&plan_input(&deployment, &profiles)).unwrap();
                prop_assert_eq!(serde_json::to_string(&made).unwrap(), serde_json::to_string(&again).unwrap());
                let read: InferencePlanSpec = serde_json::from_str(&serde_json::to_string(&made).unwrap()).unwrap();
                prop_assert_eq!(read, made);
            }
            Err(error) => {
                let text = error.to_string();
                prop_assert!(text.chars().any(|c| c.is_ascii_digit()), "no number in: {text}");
                prop_assert_eq!(text.lines().count(), 2, "{}", text);
                follow(&error, (&deployment, &profiles, &rooms), |spec, profiles, rooms| {
                    let cpus = if requested.is_some() { CpuOffer::Requests(rooms) } else { CpuOffer::Machine };
                    plan(&PlanInput { gpus: offer, cpus, ..support::plan_input(spec, &facts, profiles) })
                });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn refusals_of_rings_help(
        machines in prop::collection::vec((machine(), gpus(), any::<bool>(), 0_u64..32), 1..=3),
        context in 16_u32..4096, kv in prop::option::of(1_u64..60_000), model in 0..3_usize
    ) {
        let facts = [demo_model(), dense_1_7b(), qwen3_30b()][model].clone();
        let nodes = machines.into_iter().zip(["attic", "cellar", "office"]);
        let nodes: Vec<NodeProfileStatus> = nodes
            .map(|((mut node, mut gpus, has_disk, used_gib), name)| {
                for gpu in &mut gpus {
                    gpu.uuid = format!("{}-{name}", gpu.uuid);
                }
                node.memory.total_bytes = node.memory.available_bytes + used_gib * GIB;
                node.disks.retain(|_| has_disk);
                NodeProfileStatus { node: name.into(), gpus, ..node }
            })
            .collect();
        let mut spec = spec("strategy: PipedRing\n");
        spec.model.context_length = Some(context);
        spec.decode.kv_cache.memory = kv.map(|mib| MemoryQuantity::from_bytes(mib * MIB));
        let plan = |spec: &_, nodes: &[NodeProfileStatus]| plan(&plan_input_here(spec, &facts, nodes));
        let Err(error) = plan(&spec, &nodes) else {
            return Ok(());
        };
        let PlanError::NoRoomInRing { advice, .. } = &error else {
            // A budget that does not hold the context, or no CPU for a member.
            return Ok(());
        };
        prop_assert!(!advice.is_empty());
        for node in &nodes {
            prop_assert!(error.to_string().contains(&node.node), "{error}");
        }
        for advice in advice {
            if let Some((spec, nodes)) = followed(advice, (&spec, &nodes)) {
                let planned = plan(&spec, &nodes);
                prop_assert!(planned.is_ok(), "{error}\nafter {advice}: {}", planned.unwrap_err());
                support::rings::check(&planned.unwrap(), &facts, &nodes);
            }
        }
    }
}

type Rooms = BTreeMap<String, CpuRoom>;

/// Applies the advice of a refusal, one piece at a time, and expects a plan.
fn follow(
    error: &PlanError,
    (deployment, profiles, rooms): (&InferenceDeploymentSpec, &[NodeProfileStatus], &Rooms),
    plan: impl Fn(
        &InferenceDeploymentSpec,
        &[NodeProfileStatus],
        &Rooms,
    ) -> Result<InferencePlanSpec, PlanError>,
) {
    let (advice, node) = match error {
        PlanError::InsufficientMemory { advice, node, .. }
        | PlanError::TooFewCores { advice, node, .. }
        | PlanError::InsufficientCpu { advice, node, .. } => (advice, node.as_str()),
        PlanError::InsufficientGpuMemory { advice, .. } => (advice, ""),
        PlanError::TooFewPeers {
            advice: Some(advice),
            ..
        } => (&vec![advice.clone()], ""),
        _ => return,
    };
    assert!(!advice.is_empty());
    for advice in advice {
        let (mut changed, mut machines) = (deployment.clone(), profiles.to_vec());
        let mut rooms = rooms.clone();
        match advice {
            Advice::FreeCpu(millis) => {
                let room = rooms.get_mut(node).unwrap();
                room.allocatable_millis += millis;
                // This covers only the failing rank; a later rank may lack more, or memory.
                let planned = plan(&changed, &machines, &rooms);
                assert!(planned.as_ref().err() != Some(error), "{error}");
                continue;
            }
            // A different machine cannot be simulated by changing this one.
            Advice::MoreCores(cores) => {
                assert!(*cores > 0, "{error}");
                continue;
            }
            Advice::FreeGpuMemory(bytes) => {
                for gpu in machines.iter_mut().flat_map(|machine| &mut machine.gpus) {
                    gpu.free_bytes += bytes;
                    gpu.memory_bytes += bytes;
                }
                // This covers only the failing rank; a later rank may lack more, or host memory.
                let planned = plan(&changed, &machines, &rooms);
                assert!(planned.as_ref().err() != Some(error), "{error}");
                continue;
            }
            Advice::FreeMemory(bytes) => {
                let machine = machines
                    .iter_mut()
                    .find(|machine| machine.node == node)
                    .unwrap();
                machine.memory.available_bytes += bytes;
                if profiles.len() > 1 {
                    // This covers only the failing rank; a later rank may lack more.
                    let planned = plan(&changed, &machines, &rooms);
                    assert!(planned.as_ref().err() != Some(error), "{error}");
                    continue;
                }
            }
            of_spec => write(&mut changed, of_spec),
        }
        let planned = plan(&changed, &machines, &rooms);
        assert!(
            planned.is_ok(),
            "{error}\nafter {advice}: {}",
            planned.unwrap_err()
        );
    }
}
