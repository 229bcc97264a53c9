//! Assignment of ranks to GPUs: a rank on a GPU has its KV cache, its working memory and its weights on that one GPU, or
//! of the weights all but the routed experts.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    Activations, ComputeCapability, DENSE_SLOTS, GpuProfile, LEAST_RING_SLOTS, NodeProfileStatus,
    PlanActivations, PlanRole, format_bytes,
};

use crate::link::LinkRates;
use crate::memory::{BLOCK_TOKENS, Demand, GpuNeed};
use crate::node_ranks::{Device, NodeRanks};
use crate::ring::RingLengths;

/// Compute capability that the engine's kernels need: bf16 on tensor cores.
pub(crate) const LEAST_CAPABILITY: ComputeCapability = ComputeCapability { major: 8, minor: 0 };
/// Minimum of a GPU's memory that is left to the driver and other programs.
const LEAST_RESERVE_BYTES: u64 = 512 << 20;
/// Inverse of the share of a GPU's memory that is left free: fragmentation grows with the memory allocated.
const RESERVE_SHARE: u64 = 32;

/// Source of the GPUs that ranks may use.
#[derive(Clone, Copy, Debug)]
pub enum GpuOffer<'a> {
    /// One machine: every GPU that its profile shows. As many ranks share a GPU as fit its free memory.
    Machine,
    /// A cluster, where a GPU is given to one container, and so to one rank or to two of one Pod. Virtual devices that
    /// no device plugin hands out are shared as on one machine.
    Cluster {
        /// GPUs that device plugins can still allocate, by node; 0 for a node that is missing. The plugin picks the
        /// GPU, so a plan must fit on each GPU of the node.
        plugin: &'a BTreeMap<String, u32>,
        /// UUIDs that can still be claimed, by node: dynamic resource allocation, which allocates exactly the GPU that a
        /// claim names. A node in this map has no other GPUs.
        claimable: &'a BTreeMap<String, BTreeSet<String>>,
    },
}

/// Source of the GPUs of one node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NodeOffer<'a> {
    Machine,
    Plugin(u32),
    Claims(&'a BTreeSet<String>),
}

impl<'a> GpuOffer<'a> {
    pub(crate) fn at(self, node: &NodeProfileStatus) -> NodeOffer<'a> {
        let mut gpus = node.gpus.iter();
        let virtual_device = gpus.find(|gpu| gpu.virtual_device.is_some());
        match self {
            Self::Cluster { plugin, claimable } => {
                match (virtual_device, claimable.get(&node.node)) {
                    (Some(gpu), _) if gpu.is_shared() => NodeOffer::Machine,
                    (None, Some(uuids)) => NodeOffer::Claims(uuids),
                    (Some(_), _) | (None, None) => {
                        NodeOffer::Plugin(plugin.get(&node.node).copied().unwrap_or(0))
                    }
                }
            }
            Self::Machine => NodeOffer::Machine,
        }
    }
}

impl NodeOffer<'_> {
    /// GPUs that are still available on the node; `None` if only their memory is the limit.
    pub(crate) fn count(self) -> Option<u32> {
        match self {
            Self::Machine => None,
            Self::Plugin(free) => Some(free),
            Self::Claims(uuids) => Some(u32::try_from(uuids.len()).unwrap_or(u32::MAX)),
        }
    }
}

/// The share of a GPU that one rank is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GpuSlot<'a> {
    pub gpu: &'a GpuProfile,
    pub device: Device,
    /// Bytes of this GPU that all its ranks may use together.
    pub usable_bytes: u64,
    pub kv_bytes: u64,
    /// Weights that stay, ring, KV and working memory.
    pub memory_bytes: u64,
    /// Lengths of the ring that experts are streamed through; `None` without one.
    pub ring: Option<RingLengths>,
    /// Bytes that ring and working room share; 0 without a ring.
    pub ring_room_bytes: u64,
    /// Experts that a cache in the memory left could hold, which `memory_bytes` does not include.
    pub cache_room_slots: u32,
    /// Ranks of the same role on the same GPU, including this one.
    pub sharing: u32,
    /// What the rank needs at least.
    pub need: GpuNeed,
}

impl GpuSlot<'_> {
    /// Precision of activations on this GPU, if the spec asks for `asked`.
    pub(crate) fn activations(&self, asked: Activations) -> PlanActivations {
        activations_on(self.gpu, asked)
    }
}

/// Precision of activations on a GPU, if the spec asks for `asked`. For a virtual one the CPUs' kernels compute, which
/// round nothing.
pub(crate) fn activations_on(gpu: &GpuProfile, asked: Activations) -> PlanActivations {
    match (asked, &gpu.virtual_device) {
        (Activations::F32, _) | (_, Some(_)) => PlanActivations::F32,
        (Activations::Auto | Activations::BF16, None) => PlanActivations::BF16,
    }
}

/// GPU slots of a node's ranks; empty for a role that runs on CPUs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct GpuSlots<'a> {
    pub prefill: Vec<GpuSlot<'a>>,
    pub decode: Vec<GpuSlot<'a>>,
    /// Those of followers of peers.
    pub stages: Vec<GpuSlot<'a>>,
}

impl<'a> GpuSlots<'a> {
    pub(crate) fn of(&self, role: PlanRole) -> &[GpuSlot<'a>] {
        match role {
            PlanRole::Gateway => &[],
            PlanRole::Prefill => &self.prefill,
            PlanRole::Decode => &self.decode,
            PlanRole::Stage => &self.stages,
        }
    }
}

/// Shortage of GPUs on a node for the ranks placed there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuLack {
    /// Fewer GPUs available than needed.
    Count { node: String, needs: u32, free: u32 },
    /// No GPU that this engine supports, with the reason.
    Unusable { node: String, why: String },
    /// Too little memory on the GPU with the most left.
    Memory(Box<GpuShortage>),
}

impl GpuLack {
    /// Whether less is lacking than with `other`.
    pub(crate) fn is_nearer_than(&self, other: &Self) -> bool {
        let rank = |lack: &Self| match lack {
            Self::Memory(short) => (0, short.needs_bytes.saturating_sub(short.free_bytes)),
            Self::Count { free: 0, .. } => (3, 0),
            Self::Count { free, .. } => (1, u64::MAX - u64::from(*free)),
            Self::Unusable { .. } => (2, 0),
        };
        rank(self) < rank(other)
    }
}

/// Memory that a rank needs on a GPU, and the memory that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GpuShortage {
    pub node: String,
    pub gpu: String,
    pub role: PlanRole,
    pub needs_bytes: u64,
    pub free_bytes: u64,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub working_bytes: u64,
    /// The smallest ring of slots; 0 where no experts are streamed.
    pub ring_bytes: u64,
    /// Slots of dense modules; 0 where these stay.
    pub dense_slots_bytes: u64,
}

/// Returns the reason that the engine cannot compute on a GPU; `None` if it can.
pub(crate) fn unusable(gpu: &GpuProfile) -> Option<String> {
    if let Some(obstacle) = &gpu.obstacle {
        return Some(obstacle.clone());
    }
    match gpu.compute_capability {
        None if gpu.virtual_device.is_some() => None,
        None => {
            Some("its compute capability is unknown: the profile was made without NVML".to_owned())
        }
        Some(has) if has < LEAST_CAPABILITY => Some(format!(
            "it has compute capability {has}, and this engine's kernels need {LEAST_CAPABILITY}"
        )),
        Some(_) if gpu.memory_bytes == 0 => Some("its memory size is unknown".to_owned()),
        Some(_) if gpu.read_gbps <= 0.0 || gpu.bf16_gflops <= 0.0 => Some(
            "the driver does not report its clocks and bus width, so nothing can be predicted"
                .to_owned(),
        ),
        Some(_) => None,
    }
}

/// A GPU with the memory that is left for ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GpuRoom<'a> {
    pub gpu: &'a GpuProfile,
    /// Bytes that its ranks may use together.
    pub usable_bytes: u64,
    left_bytes: u64,
}

/// Bytes of a GPU's memory that the planner may assign: all of a virtual device's, which has no other users.
fn usable_bytes(gpu: &GpuProfile, bytes: u64) -> u64 {
    match gpu.virtual_device {
        Some(_) => bytes,
        None => bytes.saturating_sub(LEAST_RESERVE_BYTES.max(bytes / RESERVE_SHARE)),
    }
}

/// GPUs of `node` that ranks may be assigned to, the one with the most memory first.
///
/// # Errors
/// The reason that there is no usable GPU.
pub(crate) fn gpu_rooms<'a>(
    node: &'a NodeProfileStatus,
    offer: GpuOffer<'_>,
) -> Result<Vec<GpuRoom<'a>>, String> {
    let mut reasons = node.gpus.iter().filter_map(|gpu| {
        unusable(gpu).map(|why| format!("{} of {} cannot be used: {why}", gpu.name, node.node))
    });
    let gpus = node.gpus.iter();
    let offer = offer.at(node);
    let (usable, memory): (Vec<&GpuProfile>, fn(&GpuProfile) -> u64) = match offer {
        NodeOffer::Machine => (
            gpus.filter(|gpu| unusable(gpu).is_none()).collect(),
            |gpu| gpu.free_bytes,
        ),
        // Any of them may be allocated, as a whole GPU: its current user has to release it first.
        NodeOffer::Plugin(_) => match reasons.next() {
            Some(why) => return Err(why),
            None => (gpus.collect(), |gpu| match gpu.virtual_device {
                // What shared it before it was handed out is no user of the plugin's.
                Some(_) => gpu.free_bytes,
                None => gpu.memory_bytes,
            }),
        },
        NodeOffer::Claims(uuids) => (
            gpus.filter(|gpu| uuids.contains(&gpu.uuid) && unusable(gpu).is_none())
                .collect(),
            |gpu| gpu.memory_bytes,
        ),
    };
    if usable.is_empty() {
        let none = || match offer.count() {
            None | Some(0) => format!("the profile of {} shows no GPU", node.node),
            Some(offered) => format!(
                "{offered} that {} offers are not in its profile: its agent cannot see them (chart value agent.runtimeClassName)",
                node.node
            ),
        };
        return Err(reasons.next().unwrap_or_else(none));
    }
    let least = usable.iter().map(|gpu| memory(gpu)).min().unwrap_or(0);
    let mut rooms: Vec<GpuRoom<'a>> = usable
        .into_iter()
        .map(|gpu| {
            let bytes = match offer {
                NodeOffer::Machine | NodeOffer::Claims(_) => memory(gpu),
                NodeOffer::Plugin(_) => least,
            };
            let bytes = usable_bytes(gpu, bytes);
            GpuRoom {
                gpu,
                usable_bytes: bytes,
                left_bytes: bytes,
            }
        })
        .collect();
    rooms.sort_by_key(|room| (Reverse(memory(room.gpu)), room.gpu.uuid.clone()));
    Ok(rooms)
}

/// Number of GPUs of `node` that ranks could be assigned to, memory aside.
pub(crate) fn usable_count(node: &NodeProfileStatus, offer: GpuOffer<'_>) -> u32 {
    let known = gpu_rooms(node, offer).map_or(0, |rooms| rooms.len());
    let known = u32::try_from(known).unwrap_or(u32::MAX);
    offer.at(node).count().map_or(known, |free| free.min(known))
}

/// What the spec says about the GPUs of ranks.
#[derive(Clone, Copy)]
pub(crate) struct GpuRules<'a> {
    /// GPUs that a prefill rank holds; it computes on one of them.
    pub per_prefill: u32,
    /// Whether a prefill rank, or a follower of peers, and a decode rank may be in one container, for which a GPU that is given
    /// to one is shared.
    pub may_share: bool,
    /// The tokens of the longest prompt that a GPU streams faster through a longer ring.
    pub gains_until: &'a dyn Fn(&GpuProfile) -> u32,
}

/// Assigns the ranks of a node to its GPUs: each to the one with the most memory left, prefill ranks first, and no two peers to
/// one. The memory left after that becomes KV cache.
pub(crate) fn assign_slots<'a>(
    node: &'a NodeProfileStatus,
    ranks: NodeRanks,
    demand: &Demand<'_>,
    offer: GpuOffer<'_>,
    rules: GpuRules<'_>,
) -> Result<GpuSlots<'a>, GpuLack> {
    let is_own = offer.at(node).count().is_some();
    let pairs = pairs(node, ranks, offer, rules)?;
    if ranks.on_gpus() == 0 {
        return Ok(GpuSlots::default());
    }
    let mut rooms = gpu_rooms(node, offer).map_err(|why| GpuLack::Unusable {
        node: node.node.clone(),
        why,
    })?;
    let needs = match is_own {
        true => ranks.on_gpus() - pairs,
        false => ranks.in_group(),
    };
    if rooms.len() < needs as usize {
        return Err(GpuLack::Count {
            node: node.node.clone(),
            needs,
            free: u32::try_from(rooms.len()).unwrap_or(u32::MAX),
        });
    }
    let mut taken: Vec<(PlanRole, usize)> = Vec::new();
    for role in [PlanRole::Prefill, PlanRole::Decode, PlanRole::Stage] {
        for i in 0..ranks.gpu_ranks(role) {
            let guest_of = sharing_with(role, ranks).filter(|_| is_own && i < pairs);
            let host = guest_of.and_then(|host| {
                let mut hosts = taken.iter().filter(|(other, _)| *other == host);
                hosts.nth(i as usize).map(|(_, n)| *n)
            });
            let used: Vec<usize> = match (host, is_own) {
                (Some(host), _) => (0..rooms.len()).filter(|n| *n != host).collect(),
                (None, true) => taken.iter().map(|(_, n)| *n).collect(),
                (None, false) => peers_of(role, &taken, ranks),
            };
            let wanted = (role, ranks.devices.of(role));
            taken.push((role, take(node, &mut rooms, &used, wanted, demand)?));
        }
    }
    Ok(divided(&rooms, &taken, (ranks, rules.gains_until), demand))
}

/// The role whose ranks a rank may share its GPU with where that is given to one container: decode ranks with prefill ranks, or
/// followers of peers with decode ranks. The head of peers shares none, since its container reads where the others are.
fn sharing_with(role: PlanRole, ranks: NodeRanks) -> Option<PlanRole> {
    match (role, ranks.peers) {
        (PlanRole::Decode, 0) => Some(PlanRole::Prefill),
        (PlanRole::Stage, _) => Some(PlanRole::Decode),
        _ => None,
    }
}

/// The GPUs of the other peers, of which a rank of theirs has none.
fn peers_of(role: PlanRole, taken: &[(PlanRole, usize)], ranks: NodeRanks) -> Vec<usize> {
    let is_peer = |role: PlanRole| ranks.peers > 0 && role != PlanRole::Decode;
    let peers = taken
        .iter()
        .filter(|(other, _)| is_peer(role) && is_peer(*other));
    peers.map(|(_, n)| *n).collect()
}

/// The number of ranks that share a GPU with one of [`sharing_with`]'s role, the first with the first: as few as the number of
/// GPUs allows. Only ranks share one of which each leaves the routed experts in the node's memory.
fn pairs(
    node: &NodeProfileStatus,
    ranks: NodeRanks,
    offer: GpuOffer<'_>,
    rules: GpuRules<'_>,
) -> Result<u32, GpuLack> {
    let Some(free) = offer.at(node).count() else {
        return Ok(0);
    };
    let held = ranks.prefill.saturating_mul(rules.per_prefill);
    let needs = held
        .saturating_add(ranks.gpu_ranks(PlanRole::Decode))
        .saturating_add(ranks.gpu_ranks(PlanRole::Stage));
    let devices = (ranks.devices.prefill, ranks.devices.decode);
    let most = match devices {
        (Device::StreamingGpu(_), Device::GpuAndCpus) if rules.may_share => match ranks.peers {
            0 => ranks.prefill.min(ranks.decode),
            _ => ranks.followers.min(ranks.decode),
        },
        _ => 0,
    };
    let pairs = needs.saturating_sub(free).min(most);
    match needs - pairs {
        needs if needs > free => Err(GpuLack::Count {
            node: node.node.clone(),
            needs,
            free,
        }),
        _ => Ok(pairs),
    }
}

/// Reserves the minimum that a rank needs on the GPU with the most memory left (the first if equal), among those with room
/// the one with the fastest link where experts come over it, and then the one beside the most memory; returns its index.
fn take(
    node: &NodeProfileStatus,
    rooms: &mut [GpuRoom<'_>],
    used: &[usize],
    (role, device): (PlanRole, Device),
    demand: &Demand<'_>,
) -> Result<usize, GpuLack> {
    let need = demand.on_gpu(role, device);
    // In steps of a tenth, since measured rates of equal links differ.
    let link_step = |n: usize| {
        let link = LinkRates::of(rooms[n].gpu).filter(|_| device.has_host_experts());
        link.map_or(i32::MIN, |link| {
            (link.alone_gbps.log2() * 7.0).round() as i32
        })
    };
    let has_room = |n: usize| rooms[n].left_bytes >= need.least_bytes();
    let near_bytes = |n: usize| {
        let mut numa = node.numa_nodes.iter();
        let near = numa.find(|numa| Some(numa.id) == rooms[n].gpu.numa_node);
        near.filter(|_| device.has_host_experts())
            .map_or(0, |numa| numa.free_bytes)
    };
    let is_linked = |n: usize| !device.has_host_experts() || link_step(n) > i32::MIN;
    let most = (0..rooms.len())
        .filter(|n| !used.contains(n) && is_linked(*n))
        .min_by_key(|n| {
            let link_step = if has_room(*n) {
                link_step(*n)
            } else {
                i32::MIN
            };
            let near_bytes = if has_room(*n) { near_bytes(*n) } else { 0 };
            let left_bytes = rooms[*n].left_bytes;
            (
                Reverse(link_step),
                Reverse(near_bytes),
                Reverse(left_bytes),
                *n,
            )
        });
    let Some(n) = most else {
        if let Some(room) = rooms.iter().find(|room| LinkRates::of(room.gpu).is_none()) {
            return Err(GpuLack::Unusable {
                node: node.node.clone(),
                why: format!(
                    "the rate of copies to {} of {} is not known: the driver does not report its PCIe link",
                    room.gpu.name, node.node
                ),
            });
        }
        return Err(GpuLack::Unusable {
            node: node.node.clone(),
            why: format!("{} has no further GPU", node.node),
        });
    };
    let room = &mut rooms[n];
    let Some(left) = room.left_bytes.checked_sub(need.least_bytes()) else {
        return Err(GpuLack::Memory(Box::new(GpuShortage {
            node: node.node.clone(),
            gpu: room.gpu.name.clone(),
            role,
            needs_bytes: need.least_bytes(),
            free_bytes: room.left_bytes,
            weights_bytes: need.weights_bytes,
            kv_bytes: need.kv_least_bytes,
            working_bytes: need.working_bytes,
            ring_bytes: need.ring_least_bytes,
            dense_slots_bytes: need.dense_slots_bytes,
        })));
    };
    room.left_bytes = left;
    Ok(n)
}

/// Divides the memory left on the GPUs among their ranks: rings get up to the experts of a layer as far as prompts gain
/// from them, prefill ranks KV up to
/// what they can use, decode ranks share the rest of it in whole blocks, and a cache of experts can have what is left.
fn divided<'a>(
    rooms: &[GpuRoom<'a>],
    taken: &[(PlanRole, usize)],
    (node_ranks, gains_until): (NodeRanks, &dyn Fn(&GpuProfile) -> u32),
    demand: &Demand<'_>,
) -> GpuSlots<'a> {
    let block = demand.kv_bytes(BLOCK_TOKENS).max(1);
    let slot_bytes = demand.slot_bytes();
    let mut slots = GpuSlots::default();
    for (n, room) in rooms.iter().enumerate() {
        let mut left = room.left_bytes;
        for (role, slots_of_role) in [
            (PlanRole::Prefill, &mut slots.prefill),
            (PlanRole::Stage, &mut slots.stages),
            (PlanRole::Decode, &mut slots.decode),
        ] {
            let ranks = taken.iter().filter(|slot| **slot == (role, n)).count() as u64;
            let device = node_ranks.devices.of(role);
            let need = demand.on_gpu(role, device);
            let share = left.checked_div(ranks).unwrap_or(0);
            let (more_ring, ring_room_bytes, ring) = match device {
                Device::StreamingGpu(_) => {
                    // The head of peers reads prompts alone, too.
                    let peers = match role {
                        PlanRole::Stage => node_ranks.peers,
                        PlanRole::Gateway | PlanRole::Prefill | PlanRole::Decode => 0,
                    };
                    let gains_until = gains_until(room.gpu);
                    ring(
                        (share, need),
                        demand.experts_of_share(peers),
                        gains_until,
                        demand,
                    )
                }
                Device::Cpus | Device::Gpu | Device::GpuAndCpus => (0, 0, None),
            };
            let share = (share - more_ring) / block * block;
            let more_kv = share.min(need.kv_best_bytes.saturating_sub(need.kv_least_bytes));
            left -= (more_ring + more_kv) * ranks;
            let cached = match device {
                Device::GpuAndCpus => left.checked_div(ranks).unwrap_or(0) / slot_bytes,
                Device::Cpus | Device::Gpu | Device::StreamingGpu(_) => 0,
            };
            let slot = GpuSlot {
                gpu: room.gpu,
                device,
                usable_bytes: room.usable_bytes,
                kv_bytes: need.kv_least_bytes + more_kv,
                memory_bytes: need.least_bytes() + more_ring + more_kv,
                ring,
                ring_room_bytes,
                cache_room_slots: u32::try_from(cached.min(demand.all_experts())).unwrap_or(0),
                sharing: u32::try_from(ranks).unwrap_or(u32::MAX),
                need,
            };
            slots_of_role.extend((0..ranks).map(|_| slot));
        }
    }
    slots
}

/// The part of `more_bytes` that a ring for so many experts gets beside its least, what it then shares with the working room,
/// and its lengths.
fn ring(
    (more_bytes, need): (u64, GpuNeed),
    experts: u32,
    gains_until: u32,
    demand: &Demand<'_>,
) -> (u64, u64, Option<RingLengths>) {
    let least = need.ring_least_bytes.saturating_add(need.working_bytes);
    let wanted = demand
        .ring_room_bytes(experts, gains_until)
        .saturating_sub(least);
    let slot_bytes = demand.slot_bytes().max(1);
    let more = match more_bytes >= wanted {
        true => wanted,
        false => more_bytes / slot_bytes * slot_bytes,
    };
    let room_bytes = least.saturating_add(more);
    let ring = demand.ring_lengths(experts, room_bytes, gains_until);
    (more, room_bytes, Some(ring))
}

impl GpuShortage {
    /// Bytes that must be freed on the GPU, including the planner's reserve.
    pub(crate) fn missing_bytes(&self) -> u64 {
        let missing = self.needs_bytes.saturating_sub(self.free_bytes);
        let reserve = if self.free_bytes == 0 {
            LEAST_RESERVE_BYTES
        } else {
            0
        };
        // 32/31 of it still leaves a 32nd free.
        missing
            .saturating_add(missing / (RESERVE_SHARE - 1))
            .saturating_add(reserve + 2)
    }

    /// Breakdown of the bytes, in words.
    pub(crate) fn breakdown(&self) -> String {
        let ring = match (self.ring_bytes, self.dense_slots_bytes) {
            (0, _) => String::new(),
            (ring_bytes, 0) => format!(
                " without routed experts, a ring of {LEAST_RING_SLOTS} of these {}",
                format_bytes(ring_bytes)
            ),
            (ring_bytes, dense_slots_bytes) => format!(
                " of embedding, head and routers, {DENSE_SLOTS} slots for dense modules {}, a ring of {LEAST_RING_SLOTS} experts {}",
                format_bytes(dense_slots_bytes),
                format_bytes(ring_bytes)
            ),
        };
        format!(
            "weights {}{ring}, KV {}, working room {}",
            format_bytes(self.weights_bytes),
            format_bytes(self.kv_bytes),
            format_bytes(self.working_bytes)
        )
    }
}
