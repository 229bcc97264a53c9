//! Boxes for rings, and what every plan of a ring must keep.

use hearth_crds::{
    InferencePlanSpec, LinkProfile, ModelFacts, NodeProfileStatus, PlanRank, PlanRing, PlanRole,
    RING_VERSION, ResidencyPolicy,
};

use super::{GIB, MIB, Machine};

/// A box with `gib` GiB of free memory; all boxes are linked by gigabit Ethernet.
pub fn machine(name: &'static str, cores: u32, gib: u64) -> NodeProfileStatus {
    let mut profile = Machine {
        name,
        sockets: 1,
        cores,
        smt: 1,
        available_bytes: gib * GIB,
        one_thread_gbps: 12.0,
        socket_gbps: 36.0,
        core_gflops: 60.0,
    }
    .profile();
    profile.links = ["attic", "cellar", "office"]
        .iter()
        .filter(|peer| **peer != name)
        .map(|peer| LinkProfile {
            peer: (*peer).to_owned(),
            gbps: 0.117,
            rtt_us: 300.0,
        })
        .collect();
    profile
}

pub fn members(plan: &InferencePlanSpec) -> Vec<&PlanRank> {
    match plan.group_of("decode-0") {
        members if members.is_empty() => {
            let mut heads = plan.ranks.iter();
            vec![heads.find(|rank| rank.role == PlanRole::Decode).unwrap()]
        }
        members => members,
    }
}

/// What workers check of a ring, and that no node is promised more memory than it has.
pub fn check(plan: &InferencePlanSpec, facts: &ModelFacts, nodes: &[NodeProfileStatus]) {
    let in_ring = plan.group_of("decode-0").into_iter();
    let rings: Vec<(&PlanRank, &PlanRing)> = in_ring
        .map(|rank| (rank, rank.ring.as_ref().unwrap()))
        .collect();
    let mut layers = Vec::new();
    for (place, (rank, ring)) in rings.iter().enumerate() {
        assert_eq!(ring.place as usize, place);
        let role = match place {
            0 => PlanRole::Decode,
            _ => PlanRole::Stage,
        };
        assert_eq!(rank.role, role);
        assert_eq!(ring.head, "decode-0");
        assert!(!ring.windows.is_empty(), "{} has no layer", rank.name);
        for window in &ring.windows {
            layers.extend(window.first_layer..window.first_layer + window.layers);
        }
    }
    if !rings.is_empty() {
        assert_eq!(plan.min_version, RING_VERSION);
        assert_eq!(rings[0].1.windows[0].first_layer, 0, "the head begins");
        layers.sort_unstable();
        assert_eq!(layers, (0..facts.layers).collect::<Vec<_>>());
    }
    let context_bytes = u64::from(plan.model.context_length) * plan.model.kv_bytes_per_token;
    let kv: u64 = members(plan)
        .iter()
        .filter_map(|rank| Some(rank.kv.as_ref()?.memory_bytes))
        .sum();
    assert!(
        kv >= context_bytes,
        "one context has room: {kv} of {context_bytes}"
    );
    for node in nodes {
        let here = || plan.ranks.iter().filter(|rank| rank.node == node.node);
        let bytes: u64 = here()
            .map(|rank| {
                if let Some(residency) = &rank.residency {
                    // Of the embedding, which only a head has, rows are read as they are needed.
                    let is_head = rank.ring.as_ref().is_some_and(|ring| ring.place == 0);
                    let embedding_bytes = if is_head { facts.bytes.embedding } else { 0 };
                    let passing_bytes = residency.weight_bytes - embedding_bytes;
                    let least = passing_bytes.min(2 * facts.largest_layer_bytes);
                    let window = residency.budget_bytes;
                    assert!(window >= least, "{}: a window of {window}", rank.name);
                }
                rank.host_weight_bytes() + rank.host_kv_bytes() + rank.scratch_bytes
            })
            .sum();
        let available = node.memory.available_bytes;
        let reserve = (available / 20).max(128 * MIB);
        assert!(
            bytes <= available - reserve,
            "{} is promised {bytes} of {available}",
            node.node
        );
        check_gpus(plan, node);
    }
}

/// That each GPU has at most one member, which keeps all of its layers there.
fn check_gpus(plan: &InferencePlanSpec, node: &NodeProfileStatus) {
    let here = || plan.ranks.iter().filter(|rank| rank.node == node.node);
    for gpu in &node.gpus {
        let mut on_it = here().filter(|rank| rank.gpu_uuids.contains(&gpu.uuid));
        let Some(rank) = on_it.next() else {
            continue;
        };
        assert_eq!(on_it.next(), None, "one member on {}", gpu.uuid);
        let residency = rank.residency.as_ref().unwrap();
        assert_eq!(residency.policy, ResidencyPolicy::Resident);
        assert_eq!(residency.budget_bytes, residency.weight_bytes);
        let memory = rank.device_memory.unwrap();
        let kv_bytes = rank.kv.as_ref().unwrap().memory_bytes;
        assert_eq!(memory.kv_bytes, kv_bytes);
        assert!(memory.weights_bytes >= residency.weight_bytes);
        let parts = memory.weights_bytes + memory.kv_bytes + memory.working_bytes;
        assert_eq!(rank.gpu_memory_bytes, parts, "{}", rank.name);
        assert!(
            parts <= gpu.memory_bytes,
            "{} is promised {parts}",
            gpu.name
        );
    }
}
