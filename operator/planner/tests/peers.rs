//! Plans whose GPUs read prompts together.
#![allow(clippy::unwrap_used)] // a test that cannot plan has failed

mod support;

use std::collections::BTreeMap;

use hearth_crds::{
    ComputeCapability, GpuProfile, InferenceDeploymentSpec, InferencePlanSpec, LinkProfile,
    NodeProfileStatus, PEERS_VERSION, PlanExpertParallel, PlanKvGather, PlanRank, PlanRole,
    RING_VERSION, ResidencyPolicy,
};
use hearth_planner::{Advice, GpuOffer, PlanError, PlanInput, plan};
use support::{GIB, dense_1_7b, gpu, laptop, plan_input_here, plugin, qwen3_30b, spec};

/// A context beside which both a prefill and a decode rank have room on 8 GiB.
const SHORT: &str = "model: {source: {builtin: {name: hearth-demo}}, contextLength: 2048}\n";
const TOGETHER: &str = "prefill: {mode: DistributedStreamLoading}\n";
const FOUR: &str = "prefill: {mode: DistributedStreamLoading, gpusPerWorker: 4}\n";

/// A laptop of a name with so much memory and so many GPUs of 8 GiB.
fn node(name: &str, memory_gib: u64, gpus: u32) -> NodeProfileStatus {
    let number = name.len() as u32 * 10;
    let links = ["attic", "cellar", "office"].into_iter();
    NodeProfileStatus {
        node: name.to_owned(),
        gpus: (0..gpus)
            .map(|n| gpu(&format!("RTX {n}"), number + n, 8))
            .collect(),
        links: links
            .filter(|peer| *peer != name)
            .map(|peer| LinkProfile {
                peer: peer.to_owned(),
                gbps: 1.1,
                rtt_us: 100.0,
            })
            .collect(),
        ..laptop(memory_gib * GIB)
    }
}

fn planned(
    yaml: &str,
    nodes: &[NodeProfileStatus],
    gpus: GpuOffer<'_>,
) -> Result<InferencePlanSpec, PlanError> {
    let (spec, facts) = (
        serde_norway::from_str(&format!("{SHORT}{yaml}")).unwrap(),
        qwen3_30b(),
    );
    plan(&PlanInput {
        gpus,
        ..plan_input_here(&spec, &facts, nodes)
    })
}

fn here(yaml: &str, nodes: &[NodeProfileStatus]) -> InferencePlanSpec {
    planned(yaml, nodes, GpuOffer::Machine).unwrap()
}

fn rank<'a>(plan: &'a InferencePlanSpec, name: &str) -> &'a PlanRank {
    plan.rank(name).unwrap()
}

/// The members of the only group, checked for what workers need of a plan.
fn members(plan: &InferencePlanSpec) -> Vec<&PlanRank> {
    let members = plan.group_of("prefill-0");
    let head = members[0];
    assert_eq!(
        (head.name.as_str(), head.role),
        ("prefill-0", PlanRole::Prefill)
    );
    assert_eq!(plan.min_version, PEERS_VERSION);
    for (place, member) in members.iter().enumerate() {
        let peers = member.peers.as_ref().unwrap();
        assert_eq!(
            (peers.place as usize, peers.ranks as usize),
            (place, members.len())
        );
        assert_eq!(place > 0, member.role == PlanRole::Stage, "{member:?}");
        let residency = member.residency.as_ref().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::StreamLoading);
        assert_eq!(member.kv, head.kv, "caches have the same blocks");
        assert_eq!(member.mla_form, head.mla_form);
        assert_eq!(member.activations, head.activations);
        let others = members.iter().filter(|other| other.name != member.name);
        for other in others {
            assert_ne!(member.device(), other.device(), "a GPU is one peer's");
        }
    }
    members
}

#[track_caller]
fn assert_line(lines: &[String], begin: &str, part: &str) {
    let found = lines
        .iter()
        .any(|line| line.starts_with(begin) && line.contains(part));
    assert!(found, "{begin} … {part} in {lines:#?}");
}

#[test]
fn two_gpus_of_a_machine_read_prompts_together() {
    let plan = here(TOGETHER, &[node("office", 40, 2)]);
    let members = members(&plan);
    assert_eq!(members.len(), 2);
    let facts = qwen3_30b();
    let host_bytes = |rank: &PlanRank| rank.residency.as_ref().unwrap().host_bytes;
    // The head can read a prompt alone; a follower has its own experts.
    assert_eq!(host_bytes(members[0]), facts.bytes.routed_experts);
    assert_eq!(host_bytes(members[1]), facts.bytes.routed_experts / 2);
    let ring = |rank: &PlanRank| rank.residency.as_ref().unwrap().ring_slots.unwrap();
    assert!(ring(members[1]) <= facts.experts / 2, "{:?}", members[1]);
    let experts = |rank: &PlanRank| rank.peers.as_ref().unwrap().experts;
    assert_eq!(experts(members[0]), PlanExpertParallel::SmallEp);
    assert_eq!(plan.routing.together_after_quiet_ms, Some(0));
    let quiet = "prefill: {mode: DistributedStreamLoading, quietWindow: 1m}\n";
    let quiet = here(quiet, &[node("office", 40, 2)]);
    assert_eq!(quiet.routing.together_after_quiet_ms, Some(60_000));
    // Decode is where it would be without peers, on a GPU that it shares with one of them.
    let decode = rank(&plan, "decode-0");
    assert_eq!(
        decode.residency.as_ref().unwrap().policy,
        ResidencyPolicy::HostExperts
    );
    assert!(members.iter().any(|rank| rank.device() == decode.device()));
    for gpu in &node("office", 40, 2).gpus {
        let on_it = plan
            .ranks
            .iter()
            .filter(|rank| rank.device_name == gpu.uuid);
        let used: u64 = on_it.map(|rank| rank.gpu_memory_bytes).sum();
        assert!(used <= gpu.free_bytes, "{used}");
    }
    assert_line(
        &plan.why,
        "hybrid on office",
        "2 GPUs that read prompts together",
    );
    assert_line(
        &plan.why,
        "2 GPUs read prompts together: prefill-0 on RTX",
        "stage-0 on RTX",
    );
    assert_line(
        &plan.why,
        "a prompt of 2048 tokens takes",
        "by prefill-0 alone",
    );
    assert_line(
        &plan.why,
        "prompts of prefill-0 are read together",
        "as spec.prefill.mode says",
    );
}

/// How rows come to experts, which is the same at all members.
fn way(members: &[&PlanRank]) -> PlanExpertParallel {
    let of = |rank: &PlanRank| rank.peers.as_ref().unwrap().experts;
    let way = of(members[0]);
    assert!(members.iter().all(|rank| of(rank) == way), "{members:?}");
    way
}

#[test]
fn any_number_of_gpus_reads_together_by_a_way_that_keeps_the_bits() {
    for asked in 2..=8 {
        let yaml = format!("prefill: {{mode: DistributedStreamLoading, gpusPerWorker: {asked}}}\n");
        let plan = here(&yaml, &[node("office", 60, 8)]);
        let members = members(&plan);
        assert_eq!(members.len(), asked);
        let (want, words) = match asked {
            2 | 4 | 8 => (PlanExpertParallel::SmallEp, "come back summed (SmallEP)"),
            _ => (PlanExpertParallel::Ep, "(EP): sums of "),
        };
        assert_eq!(way(&members), want, "{asked}");
        assert_line(
            &plan.why,
            &format!("{asked} GPUs read prompts together"),
            words,
        );
    }
    let three = "prefill: {mode: DistributedStreamLoading, gpusPerWorker: 3}\n";
    let three = here(three, &[node("office", 60, 3)]);
    assert_line(
        &three.why,
        "prompts of prefill-0",
        "without one of them those that are left read on, or prefill-0 alone",
    );
}

/// Milliseconds that a prompt of the whole context takes all peers, as the plan says it.
fn together_ms(plan: &InferencePlanSpec) -> f64 {
    let mut told = plan
        .why
        .iter()
        .filter_map(|line| line.strip_prefix("a prompt of 2048 tokens takes "));
    let (time, _) = told.next().unwrap().split_once(" together").unwrap();
    let (number, unit) = time.split_once(' ').unwrap();
    let number: f64 = number.parse().unwrap();
    match unit {
        "s" => number * 1e3,
        _ => number,
    }
}

/// Each more takes a part of the copies, and what they exchange takes longer.
#[test]
fn as_many_gpus_read_together_as_read_a_prompt_soonest() {
    let with_link = |gpus: u32, pcie_gbps: f64| {
        let mut node = node("office", 60, gpus);
        for gpu in &mut node.gpus {
            gpu.pcie_gbps = pcie_gbps;
        }
        node
    };
    let mut chosen = Vec::new();
    for (gpus, pcie_gbps) in [
        (2, 25.0),
        (3, 1.0),
        (3, 100.0),
        (4, 25.0),
        (7, 1.0),
        (8, 25.0),
    ] {
        let office = with_link(gpus, pcie_gbps);
        let plan = here(TOGETHER, std::slice::from_ref(&office));
        let peers = members(&plan).len() as u32;
        chosen.push((gpus, pcie_gbps, peers));
        for other in 2..=gpus {
            let yaml =
                format!("prefill: {{mode: DistributedStreamLoading, gpusPerWorker: {other}}}\n");
            let other_ms = together_ms(&here(&yaml, std::slice::from_ref(&office)));
            assert!(
                together_ms(&plan) <= other_ms,
                "{peers} and {other} of {gpus}"
            );
        }
        let told = plan.not_chosen.iter().any(|line| {
            line.contains("GPUs reading prompts together: a prompt of 2048 tokens would take")
                && line.ends_with(&format!(" on {peers}"))
        });
        assert_eq!(told, gpus > 2, "{:#?}", plan.not_chosen);
    }
    // A slow link makes a third one pay, and a fast one does not.
    assert!(chosen.contains(&(3, 1.0, 3)), "{chosen:?}");
    assert!(chosen.contains(&(3, 100.0, 2)), "{chosen:?}");
}

/// Beside a rank that has all experts in memory, a follower can have them too.
#[test]
fn followers_stand_in_for_lost_ones_where_all_experts_are_in_memory_anyway() {
    let facts = qwen3_30b();
    let stand_ins = |plan: &InferencePlanSpec| {
        let followers = members(plan).into_iter().skip(1);
        let told = followers.map(|rank| {
            let stands_in = rank.peers.as_ref().unwrap().stands_in;
            let bytes = rank.residency.as_ref().unwrap().host_bytes;
            let experts = facts.bytes.routed_experts;
            let has = if stands_in { experts } else { experts / 4 };
            assert!(bytes.abs_diff(has) < experts / 64, "{rank:?}");
            (rank.node.clone(), stands_in)
        });
        told.collect::<Vec<_>>()
    };
    let plan = here(FOUR, &[node("office", 60, 4)]);
    let office = |stands_in| ("office".to_owned(), stands_in);
    assert_eq!(stand_ins(&plan), [office(true), office(true), office(true)]);
    assert_line(
        &plan.why,
        "prompts of prefill-0 are read together",
        "without one of them 2 of those that are left read on, or prefill-0 alone",
    );
    // Two shares have room there, and all experts have not.
    let plan = here(FOUR, &[node("attic", 18, 2), node("office", 60, 2)]);
    let attic = || ("attic".to_owned(), false);
    let mut told = stand_ins(&plan);
    told.sort();
    assert_eq!(told, [attic(), attic(), office(true)]);
    assert_line(&plan.why, "prompts of prefill-0", "of prefill-0, stage-");
    // Without the other one, the head is alone.
    let two = here(TOGETHER, &[node("office", 60, 2)]);
    assert!(!members(&two)[1].peers.as_ref().unwrap().stands_in);
}

#[test]
fn rows_go_to_the_experts_that_they_choose_where_these_are_fewer_than_the_gpus() {
    let mut facts = qwen3_30b();
    facts.experts_per_token = 4;
    let mut spec: InferenceDeploymentSpec =
        serde_norway::from_str(&format!("{SHORT}{TOGETHER}")).unwrap();
    for (gpus, way) in [
        (4, PlanExpertParallel::SmallEp),
        (8, PlanExpertParallel::Ep),
    ] {
        spec.prefill.gpus_per_worker = Some(gpus);
        let nodes = [node("office", 60, gpus)];
        let plan = plan(&plan_input_here(&spec, &facts, &nodes)).unwrap();
        let peers = rank(&plan, "stage-0").peers.clone().unwrap();
        assert_eq!((peers.ranks, peers.experts), (gpus, way));
    }
}

#[test]
fn a_node_that_holds_a_share_of_the_experts_has_a_follower() {
    let nodes = [node("attic", 18, 1), node("office", 40, 1)];
    let plan = here(TOGETHER, &nodes);
    let members = members(&plan);
    let at: Vec<&str> = members.iter().map(|rank| rank.node.as_str()).collect();
    assert_eq!(at, ["office", "attic"]);
    // All experts do not fit there, and half of them do.
    let facts = qwen3_30b();
    assert_eq!(
        members[1].host_weight_bytes(),
        facts.bytes.routed_experts / 2
    );
    let too_small = [node("attic", 8, 1), node("office", 40, 1)];
    let refused = planned(TOGETHER, &too_small, GpuOffer::Machine).unwrap_err();
    let PlanError::InsufficientMemory {
        what, node, advice, ..
    } = &refused
    else {
        panic!("{refused}");
    };
    assert_eq!((what.as_str(), node.as_str()), ("stage-0", "attic"));
    assert!(advice.contains(&Advice::ReadAlone(false)), "{refused}");
}

/// Two nodes of as many GPUs, whose link carries so much.
fn two_nodes(gpus: u32, gbps: f64) -> Vec<NodeProfileStatus> {
    let mut nodes = vec![node("attic", 60, gpus), node("office", 60, gpus)];
    for link in nodes.iter_mut().flat_map(|node| &mut node.links) {
        link.gbps = gbps;
    }
    nodes
}

#[test]
fn keys_and_values_are_passed_on_where_gpus_share_a_slow_way_to_others() {
    let kv = |plan: &InferencePlanSpec| {
        let of = |rank: &&PlanRank| rank.peers.as_ref().unwrap().kv;
        members(plan).iter().map(of).collect::<Vec<_>>()
    };
    let slow = here(FOUR, &two_nodes(2, 1.1));
    // Followers are told by the head, and are not started anew where the links change.
    let want = [
        PlanKvGather::PassedOn,
        PlanKvGather::Direct,
        PlanKvGather::Direct,
        PlanKvGather::Direct,
    ];
    assert_eq!(kv(&slow), want);
    assert_line(
        &slow.why,
        "keys and values go to one GPU of each other node, which passes them on: with them 2048 tokens take",
        "if each GPU sent its own to each other",
    );
    // A link as fast as the way within a node: two hops take longer than one.
    let fast = here(FOUR, &two_nodes(2, 400.0));
    assert_eq!(kv(&fast), [PlanKvGather::Direct; 4]);
    assert_line(
        &fast.why,
        "keys and values go from each GPU to each other: with them 2048 tokens take",
        "if each went to a node once and was passed on there",
    );
    // On one node, or with one GPU on each, there is nothing to choose.
    let mut plain = vec![here(TOGETHER, &[node("office", 60, 4)])];
    let two = "prefill: {mode: DistributedStreamLoading, gpusPerWorker: 2}\n";
    plain.push(here(two, &two_nodes(1, 0.1)));
    for plan in plain {
        assert!(kv(&plan).iter().all(PlanKvGather::is_direct));
        let said = plan
            .why
            .iter()
            .any(|line| line.starts_with("keys and values go"));
        assert!(!said, "{:#?}", plan.why);
    }
}

#[test]
fn where_a_gpu_is_given_to_one_container_a_follower_is_in_the_pod_of_a_decode_rank() {
    let nodes = [node("attic", 40, 1), node("office", 40, 1)];
    let free = BTreeMap::from(["attic", "office"].map(|name| (name.to_owned(), 1)));
    let plan = planned(TOGETHER, &nodes, plugin(&free)).unwrap();
    let members = members(&plan);
    let decode = rank(&plan, "decode-0");
    assert_eq!(
        (members[0].in_pod_of.as_deref(), members[0].gpus),
        (None, 1)
    );
    assert_ne!(members[0].node, decode.node);
    let pod = (members[1].in_pod_of.as_deref(), members[1].gpus);
    assert_eq!(pod, (Some("decode-0"), 0));
    assert_eq!(members[1].device(), decode.device());
    assert_line(&plan.why, "stage-0 on RTX", "runs in the Pod of decode-0");
    // With a GPU more, each has its own.
    let nodes = [node("attic", 40, 1), node("office", 40, 2)];
    let free = BTreeMap::from([("attic".to_owned(), 1), ("office".to_owned(), 2)]);
    let plan = planned(TOGETHER, &nodes, plugin(&free)).unwrap();
    assert!(plan.ranks.iter().all(|rank| rank.in_pod_of.is_none()));
    assert_eq!(plan.ranks.iter().map(|rank| rank.gpus).sum::<u32>(), 3);
    // Where Pods have CPUs of their own, two ranks share none: decode does without a GPU.
    let nodes = [node("attic", 40, 1), node("office", 40, 1)];
    let free = BTreeMap::from(["attic", "office"].map(|name| (name.to_owned(), 1)));
    let yaml = format!("{TOGETHER}placement: {{pinning: Exclusive}}\n");
    let plan = planned(&yaml, &nodes, plugin(&free)).unwrap();
    assert!(!rank(&plan, "decode-0").is_on_gpu());
    assert!(plan.ranks.iter().all(|rank| rank.in_pod_of.is_none()));
}

#[test]
fn too_few_gpus_or_too_little_memory_are_said_with_numbers() {
    let refusal = |yaml: &str, nodes: &[NodeProfileStatus]| {
        planned(yaml, nodes, GpuOffer::Machine).unwrap_err()
    };
    let one = refusal(TOGETHER, &[node("office", 40, 1)]);
    assert_eq!(
        one.to_string(),
        "2 GPUs are to read a prompt together (spec.prefill.mode is DistributedStreamLoading), and workers may use 1 (office 1)\n  \
         add GPUs, or write spec.prefill.mode: StreamLoading"
    );
    let eight = "prefill: {mode: DistributedStreamLoading, gpusPerWorker: 8}\n";
    let few = refusal(eight, &[node("attic", 40, 1), node("office", 40, 3)]);
    assert_eq!(
        few.to_string(),
        "8 GPUs are to read a prompt together (spec.prefill.gpusPerWorker and spec.prefill.mode is DistributedStreamLoading), and workers may use 4 (attic 1, office 3)\n  \
         add GPUs, or lower spec.prefill.gpusPerWorker to 4"
    );
    let mut small = node("office", 40, 2);
    small.gpus[1] = gpu("GTX", 7, 3);
    let refused = refusal(TOGETHER, &[small]);
    let PlanError::InsufficientGpuMemory {
        what, gpu, advice, ..
    } = &refused
    else {
        panic!("{refused}");
    };
    assert_eq!(
        (what.as_str(), gpu.as_str()),
        ("stage-0", "GTX of node office")
    );
    assert!(advice.contains(&Advice::ReadAlone(false)), "{refused}");
}

#[test]
fn what_peers_cannot_do_is_refused() {
    let nodes = [node("office", 40, 2)];
    let dense = spec(TOGETHER);
    let refused = plan(&plan_input_here(&dense, &dense_1_7b(), &nodes)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "spec.prefill.mode is \"DistributedStreamLoading\"\n  qwen3 has no routed experts to stream: write Auto or Chunked"
    );
    for (more, field) in [
        ("gpusPerWorker: 1", "spec.prefill.gpusPerWorker"),
        ("gpusPerWorker: 9", "spec.prefill.gpusPerWorker"),
        ("replicas: 2", "spec.prefill.replicas"),
        ("scaling: {mode: External}", "spec.prefill.scaling.mode"),
        ("scaling: {mode: Auto}", "spec.prefill.scaling.mode"),
    ] {
        let yaml = format!("prefill: {{mode: DistributedStreamLoading, {more}}}\n");
        let refused = planned(&yaml, &nodes, GpuOffer::Machine).unwrap_err();
        assert!(refused.to_string().starts_with(field), "{refused}");
    }
    let ring = "strategy: PipedRing\nprefill: {quietWindow: 1m}\n";
    let refused = planned(ring, &nodes, GpuOffer::Machine).unwrap_err();
    assert!(
        refused.to_string().contains("spec.prefill.quietWindow"),
        "{refused}"
    );
    let ring = format!("strategy: PipedRing\n{TOGETHER}");
    let refused = planned(&ring, &nodes, GpuOffer::Machine).unwrap_err();
    assert!(
        refused.to_string().contains("a ring reads prompts itself"),
        "{refused}"
    );
}

#[test]
fn old_workers_read_no_plans_of_peers() {
    let old = |mut node: NodeProfileStatus| {
        node.reader_version = Some(RING_VERSION);
        node
    };
    let refused = planned(TOGETHER, &[old(node("office", 40, 2))], GpuOffer::Machine);
    let refused = refused.unwrap_err().to_string();
    assert_eq!(
        refused,
        format!(
            "spec.prefill.mode is \"DistributedStreamLoading\"\n  the workers' image of office reads no plans of peers (version {PEERS_VERSION}): renew it, or write StreamLoading"
        )
    );
    // Those that would be too few are no advice either.
    let eight = "prefill: {mode: DistributedStreamLoading, gpusPerWorker: 8}\n";
    let refused = planned(eight, &[old(node("office", 40, 4))], GpuOffer::Machine);
    let PlanError::TooFewPeers { usable, advice, .. } = refused.unwrap_err() else {
        panic!("not too few");
    };
    assert_eq!((usable, advice), (0, Some(Advice::ReadAlone(true))));
    // No rank of the plan is where it is not read.
    let nodes = [old(node("attic", 200, 4)), node("office", 40, 2)];
    let plan = here(TOGETHER, &nodes);
    assert_eq!(members(&plan).len(), 2);
    assert!(plan.ranks.iter().all(|rank| rank.node == "office"));
    let auto = here("", &[old(slowly_linked())]);
    assert!(auto.ranks.iter().all(|rank| rank.peers.is_none()));
    assert_line(&auto.not_chosen, "experts of prefill", "renew it");
}

/// Two GPUs whose experts come slowly, so that half of them are there much sooner.
fn slowly_linked() -> NodeProfileStatus {
    let mut node = node("office", 40, 2);
    for gpu in &mut node.gpus {
        gpu.pcie_gbps = 4.0;
    }
    node
}

#[test]
fn auto_lets_gpus_read_together_where_that_is_much_faster() {
    let alone = here("", &[node("office", 40, 2)]);
    assert!(alone.ranks.iter().all(|rank| rank.peers.is_none()));
    assert_eq!(alone.routing.together_after_quiet_ms, None);
    assert!(alone.min_version < PEERS_VERSION);
    assert_line(
        &alone.not_chosen,
        "experts of prefill streamed to a GPU",
        "2 GPUs reading prompts together: a prompt of 2048 tokens would take",
    );
    let together = here("", &[slowly_linked()]);
    assert_eq!(members(&together).len(), 2);
    assert_eq!(together.routing.together_after_quiet_ms, Some(300_000));
    assert_line(
        &together.why,
        "prompts of prefill-0 are read together once no answer was written for 5m",
        "otherwise by prefill-0 alone",
    );
    let window = here("prefill: {quietWindow: 30s}\n", &[slowly_linked()]);
    assert_eq!(window.routing.together_after_quiet_ms, Some(30_000));
    // Decode keeps the GPU that it has without peers.
    assert!(rank(&together, "decode-0").is_on_gpu());
    for yaml in [
        "prefill: {replicas: 2}\n",
        "prefill: {gpusPerWorker: 1}\n",
        "prefill: {mode: StreamLoading}\n",
        "prefill: {scaling: {mode: External}}\n",
    ] {
        let plan = here(yaml, &[slowly_linked()]);
        assert!(plan.ranks.iter().all(|rank| rank.peers.is_none()), "{yaml}");
    }
}

#[test]
fn gpus_of_different_kinds_read_together_only_where_the_spec_says_so() {
    let mut mixed = slowly_linked();
    mixed.gpus[1].compute_capability = Some(ComputeCapability { major: 9, minor: 0 });
    let auto = here("", std::slice::from_ref(&mixed));
    assert!(auto.ranks.iter().all(|rank| rank.peers.is_none()));
    assert_line(&auto.not_chosen, "experts of prefill", "of different kinds");
    let asked = here(TOGETHER, &[mixed]);
    assert_eq!(members(&asked).len(), 2);
    assert_eq!(asked.mixed_numerics.len(), 1, "{:?}", asked.mixed_numerics);
}

#[test]
fn the_prediction_is_that_of_all_gpus_where_they_read_every_prompt() {
    let ttft = |yaml: &str| {
        let yaml = format!("prefill: {{chunkedBelowTokens: 0, mode: {yaml}}}\n");
        here(&yaml, &[slowly_linked()]).predicted.ttft_ms
    };
    let (together_ms, alone_ms) = (ttft("DistributedStreamLoading"), ttft("StreamLoading"));
    assert!(together_ms < 0.8 * alone_ms, "{together_ms} {alone_ms}");
    // Copies alone are halved; what is exchanged comes on top.
    assert!(together_ms > 0.5 * alone_ms, "{together_ms} {alone_ms}");
}

#[test]
fn a_virtual_device_is_one_gpu() {
    let device = GpuProfile {
        uuid: hearth_crds::VIRTUAL_UUID.to_owned(),
        virtual_device: Some("virtual:memory=8Gi".to_owned()),
        compute_capability: None,
        copy_gbps: 20.0,
        ..gpu("virtual", 0, 8)
    };
    let mut machine = node("office", 40, 0);
    machine.gpus = vec![device];
    let refused = planned(TOGETHER, &[machine], GpuOffer::Machine).unwrap_err();
    assert!(
        matches!(refused, PlanError::TooFewPeers { usable: 1, .. }),
        "{refused}"
    );
}
