//! Numerics of ranks: which ones compute identical bits. A stream that moves between workers of one pool is sure to
//! continue with the same tokens only if they do, so a pool is placed on nodes of one kind if it fits there, and
//! otherwise the plan reports it.

use std::collections::BTreeMap;
use std::fmt;

use hearth_crds::{
    ComputeCapability, IsaProfile, NodeProfileStatus, PlanMlaForm, PlanRank, PlanRole, RankDevice,
    ResidencyPolicy,
};

use crate::cpus::CpuLack;
use crate::estimator::Estimator;
use crate::gpus::GpuLack;
use crate::memory::Demand;
use crate::node_ranks::NodeRanks;
use crate::place::{Cost, Placement, Wanted, place};

/// Arithmetic of a rank, as far as a profile shows it: equal values compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Numerics {
    Reference,
    Avx2,
    Avx512,
    Gpu(Option<ComputeCapability>),
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reference => f.write_str("the reference kernels"),
            Self::Avx2 => f.write_str("AVX2"),
            Self::Avx512 => f.write_str("AVX-512"),
            Self::Gpu(Some(capability)) => write!(f, "a GPU of compute capability {capability}"),
            Self::Gpu(None) => f.write_str("a GPU of unknown kind"),
        }
    }
}

/// Kernels that a worker selects by default: the best ones that the CPUs support.
pub(crate) fn of_cpus(isa: &IsaProfile) -> Numerics {
    if isa.avx512f && isa.avx512bw && isa.avx512vbmi {
        Numerics::Avx512
    } else if isa.avx2 {
        Numerics::Avx2
    } else {
        Numerics::Reference
    }
}

/// The arithmetic of a rank on its node.
pub(crate) fn of_rank(node: &NodeProfileStatus, rank: &PlanRank) -> Numerics {
    match rank.device() {
        RankDevice::Cpus => of_cpus(&node.isa),
        // The CPUs' kernels compute for it.
        RankDevice::Gpu(_) if rank.virtual_device.is_some() => of_cpus(&node.isa),
        RankDevice::Gpu(uuid) => {
            let gpu = node.gpus.iter().find(|gpu| gpu.uuid == uuid);
            Numerics::Gpu(gpu.and_then(|gpu| gpu.compute_capability))
        }
    }
}

/// Returns one line for each pool whose ranks compute different bits. Ranks on nodes without a profile in `nodes` count as equal.
pub fn mixed_pools(nodes: &[&NodeProfileStatus], ranks: &[PlanRank]) -> Vec<String> {
    [PlanRole::Prefill, PlanRole::Decode]
        .into_iter()
        .filter_map(|role| mixed_pool(nodes, ranks, role))
        .collect()
}

/// Whether all peers compute the same bits, so that a prompt has those of one rank, whether one reads it or all.
pub(crate) fn peers_are_alike(nodes: &[&NodeProfileStatus], ranks: &[PlanRank]) -> bool {
    let peers = ranks.iter().filter(|rank| rank.peers.is_some());
    kinds_of(nodes, peers).len() <= 1
}

type Kinds<'a> = BTreeMap<(Numerics, PlanMlaForm), Vec<&'a str>>;

/// Names of ranks by their arithmetic.
fn kinds_of<'a>(
    nodes: &[&NodeProfileStatus],
    ranks: impl Iterator<Item = &'a PlanRank>,
) -> Kinds<'a> {
    let mut kinds = Kinds::new();
    for rank in ranks {
        let Some(node) = nodes.iter().find(|node| node.node == rank.node) else {
            continue;
        };
        let kind = (of_rank(node, rank), rank.mla_form);
        let names = kinds.entry(kind).or_default();
        names.push(&rank.name);
    }
    kinds
}

/// Peers are one pool: each computes a part of a prompt's bits.
fn mixed_pool(nodes: &[&NodeProfileStatus], ranks: &[PlanRank], role: PlanRole) -> Option<String> {
    let is_peer = |rank: &PlanRank| role == PlanRole::Prefill && rank.peers.is_some();
    let ranks = ranks.iter();
    let kinds = kinds_of(
        nodes,
        ranks.filter(|rank| rank.role == role || is_peer(rank)),
    );
    if kinds.len() < 2 {
        return None;
    }
    let parts = kinds.iter().rev().map(|((kind, form), names)| {
        let expanded = match form {
            PlanMlaForm::Absorbed => "",
            PlanMlaForm::Expanded => " and expanded latents",
        };
        format!("{} with {kind}{expanded}", names.join(", "))
    });
    Some(format!(
        "{}: a stream that moves between them goes on, and its later tokens may be others",
        parts.collect::<Vec<_>>().join("; ")
    ))
}

/// A placement in which the CPU ranks of each pool compute the same bits; `None` if `free` already is one, or if
/// none keeps weights in memory on as many nodes. Kinds of nodes with the most ranks in `free` are tried first.
pub(crate) fn alike(
    estimator: &Estimator<'_>,
    demand: &Demand<'_>,
    wanted: Wanted,
    free: &Placement,
) -> Option<Placement> {
    let nodes = estimator.nodes();
    if is_alike(nodes, free) {
        return None;
    }
    let by_ranks = |ranks_of: fn(NodeRanks) -> u32| {
        let mut counts: BTreeMap<Numerics, u32> = BTreeMap::new();
        for (node, ranks) in nodes.iter().zip(&free.ranks) {
            *counts.entry(of_cpus(&node.isa)).or_default() += ranks_of(*ranks);
        }
        let mut kinds: Vec<_> = counts.into_iter().rev().collect();
        kinds.sort_by_key(|(_, ranks)| std::cmp::Reverse(*ranks));
        kinds
    };
    for (decode, _) in by_ranks(NodeRanks::decode_on_cpus) {
        for (prefill, _) in by_ranks(NodeRanks::prefill_on_cpus) {
            let only = Only {
                estimator,
                prefill,
                decode,
            };
            let found = place(nodes, demand, wanted, &only).ok();
            if let Some(found) = found
                .filter(|found| is_alike(nodes, found) && prefetched(found) <= prefetched(free))
            {
                return Some(found);
            }
        }
    }
    None
}

/// Number of nodes that keep only part of the weights in memory.
fn prefetched(placement: &Placement) -> usize {
    let budgets = placement.budgets.iter().flatten();
    budgets
        .filter(|budget| budget.policy == ResidencyPolicy::MmapPrefetch)
        .count()
}

fn is_alike(nodes: &[&NodeProfileStatus], placement: &Placement) -> bool {
    let is_one = |ranks_of: fn(NodeRanks) -> u32| {
        let placed = nodes.iter().zip(&placement.ranks);
        let mut kinds = placed
            .filter(|(_, ranks)| ranks_of(**ranks) > 0)
            .map(|(node, _)| of_cpus(&node.isa));
        let first = kinds.next();
        kinds.all(|kind| Some(kind) == first)
    };
    is_one(NodeRanks::decode_on_cpus) && is_one(NodeRanks::prefill_on_cpus)
}

/// The estimator, restricted to CPUs of one kind for each role.
struct Only<'a> {
    estimator: &'a Estimator<'a>,
    prefill: Numerics,
    decode: Numerics,
}

impl Cost for Only<'_> {
    fn cpu_lack(&self, node: usize, ranks: NodeRanks) -> Option<CpuLack> {
        let kind = of_cpus(&self.estimator.nodes()[node].isa);
        let fits = |ranks: u32, wanted: Numerics| ranks == 0 || kind == wanted;
        if fits(ranks.decode_on_cpus(), self.decode) && fits(ranks.prefill_on_cpus(), self.prefill)
        {
            return self.estimator.cpu_lack(node, ranks);
        }
        // None of its cores is of that kind.
        Some(CpuLack::Cores {
            workers: ranks.count(),
            cores: 0,
            core_cpus: 1,
            gateway_millis: 0,
        })
    }

    fn gpu_lack(&self, node: usize, ranks: NodeRanks) -> Option<GpuLack> {
        self.estimator.gpu_lack(node, ranks)
    }

    fn decode_ms(&self, node: usize, ranks: NodeRanks) -> f64 {
        self.estimator.decode_ms(node, ranks)
    }

    fn prefill_ms(&self, node: usize, ranks: NodeRanks, placed: &[NodeRanks]) -> f64 {
        self.estimator.prefill_ms(node, ranks, placed)
    }

    fn follower_ms(&self, node: usize, ranks: NodeRanks, placed: &[NodeRanks]) -> f64 {
        self.estimator.follower_ms(node, ranks, placed)
    }
}
