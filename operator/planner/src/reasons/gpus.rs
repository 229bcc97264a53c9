//! Sentences about GPUs: those that ranks run on, and the rest.

use hearth_crds::{
    Activations, DENSE_SLOTS, GpuProfile, NodeProfileStatus, PlanRank, PlanRole, PlanRouting,
    RankDevice, ResidencyPolicy, Strategy, format_bytes,
};

use crate::draft::{Draft, ranks_of};
use crate::gpus::{GpuLack, NodeOffer, unusable};
use crate::node_ranks::{DenseModules, Device, Devices};
use crate::place::{NoRoom, Objection, Refused};

use super::peers;

/// Devices of the ranks, in a few words.
pub(super) fn devices(draft: &Draft<'_>, ranks: &[PlanRank]) -> String {
    match draft.peers() {
        0 => apart(draft, ranks).to_owned(),
        _ => peers::devices(draft, ranks),
    }
}

/// Devices of ranks that each read their prompts alone.
fn apart(draft: &Draft<'_>, ranks: &[PlanRank]) -> &'static str {
    let placed = draft.placement.ranks.iter().find(|ranks| ranks.count() > 0);
    let has_host_experts = placed.filter(|ranks| ranks.devices.has_host_experts());
    if let Some(ranks) = has_host_experts {
        return with_host_experts(ranks.devices);
    }
    let on_gpu = |role| ranks_of(ranks, role).any(PlanRank::is_on_gpu);
    let has_prefill = ranks_of(ranks, PlanRole::Prefill).next().is_some();
    match (on_gpu(PlanRole::Prefill), on_gpu(PlanRole::Decode)) {
        (true, true) => "prefill and decode on GPUs",
        (true, false) => "prefill on GPUs, decode on CPUs",
        (false, true) if has_prefill => "decode on GPUs, prefill on CPUs",
        (false, true) => "decode on GPUs",
        (false, false) if draft.nodes.iter().any(|node| !node.gpus.is_empty()) => "on its CPUs",
        (false, false) => "no GPU",
    }
}

fn with_host_experts(devices: Devices) -> &'static str {
    match (devices.prefill, devices.decode) {
        (Device::StreamingGpu(_), Device::GpuAndCpus) => {
            "prefill streams its experts to a GPU, decode has attention on a GPU and experts on CPUs"
        }
        (Device::StreamingGpu(_), _) => "prefill streams its experts to a GPU, decode on CPUs",
        (Device::Gpu, _) => "prefill on GPUs, decode with attention on a GPU and experts on CPUs",
        (Device::Cpus | Device::GpuAndCpus, _) => {
            "decode has attention on a GPU and experts on CPUs"
        }
    }
}

/// One line for each rank that has GPUs.
pub(super) fn used(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    for rank in ranks {
        let Some((_, node)) = draft.node_of(rank) else {
            continue;
        };
        let computes_on = node
            .gpus
            .iter()
            .find(|gpu| rank.device() == RankDevice::Gpu(&gpu.uuid));
        why.extend(computes_on.map(|gpu| on_gpu(draft, rank, node, gpu)));
    }
    why.extend(activations(draft, ranks));
}

/// How activations enter products; `None` where no GPU computes and the spec asks for nothing.
fn activations(draft: &Draft<'_>, ranks: &[PlanRank]) -> Option<String> {
    let workers = || ranks.iter().filter(|rank| rank.role.is_worker());
    let rounding = workers()
        .filter(|rank| !rank.activations.is_exact())
        .map(|rank| rank.name.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    let is_on_real_gpu = |rank: &PlanRank| rank.is_on_gpu() && rank.virtual_device.is_none();
    let uses_cpus = |rank: &PlanRank| {
        let residency = rank.residency.as_ref();
        rank.activations.is_exact()
            || residency.is_some_and(|residency| residency.policy == ResidencyPolicy::HostExperts)
    };
    let on_cpus = match workers().any(uses_cpus) {
        true => "; what CPUs compute is F32",
        false => "",
    };
    match draft.input.spec.model.activations {
        Activations::Auto if rounding.is_empty() => None,
        Activations::Auto => Some(format!(
            "activations are rounded to BF16 in products of {rounding}, but for routers{on_cpus}; with spec.model.activations: F32 none are, at up to three times the work"
        )),
        Activations::BF16 if rounding.is_empty() => Some(
            "activations are F32 although spec.model.activations is BF16: CPUs' kernels round nothing"
                .to_owned(),
        ),
        Activations::BF16 => Some(format!(
            "activations are rounded to BF16 in products of {rounding}, but for routers, as the spec says{on_cpus}"
        )),
        Activations::F32 if workers().any(is_on_real_gpu) => Some(
            "activations are F32 in products on GPUs, as the spec says: up to three times the work of BF16"
                .to_owned(),
        ),
        Activations::F32 => None,
    }
}

fn on_gpu(
    draft: &Draft<'_>,
    rank: &PlanRank,
    node: &NodeProfileStatus,
    gpu: &GpuProfile,
) -> String {
    let slot = draft.slot_of(rank);
    let device = slot.map_or(Device::Gpu, |slot| slot.device);
    let need = draft.demand.on_gpu(rank.role, device);
    let cache_slots = rank.residency.as_ref().and_then(|r| r.cache_slots);
    let cache_bytes = u64::from(cache_slots.unwrap_or(0)) * draft.demand.slot_bytes();
    let weights = match device {
        Device::Cpus | Device::Gpu => "weights",
        Device::StreamingGpu(DenseModules::Stream) => "embedding, head and routers",
        Device::StreamingGpu(DenseModules::Stay) | Device::GpuAndCpus => "dense modules",
    };
    let cache = match device {
        Device::GpuAndCpus if cache_bytes > 0 => {
            format!(", cache of experts {}", format_bytes(cache_bytes))
        }
        Device::StreamingGpu(DenseModules::Stream) => format!(
            ", {DENSE_SLOTS} slots for dense modules {}",
            format_bytes(need.dense_slots_bytes)
        ),
        Device::Cpus | Device::Gpu | Device::GpuAndCpus | Device::StreamingGpu(_) => String::new(),
    };
    let (room, room_bytes) = match slot.filter(|slot| slot.ring.is_some()) {
        Some(slot) => ("the room of ring and prompt", slot.ring_room_bytes),
        None => ("working room", need.working_bytes),
    };
    let kv_bytes = rank.kv.as_ref().map_or(0, |kv| kv.memory_bytes);
    let (free, tail) = match draft.estimator.gpus().at(node) {
        NodeOffer::Machine => (format!("{} free", format_bytes(gpu.free_bytes)), ""),
        NodeOffer::Plugin(_) if node.gpus.len() > 1 => (
            format_bytes(gpu.memory_bytes),
            "; the device plugin may allocate another GPU of the node, and the worker fits on each of them",
        ),
        NodeOffer::Plugin(_) => (format_bytes(gpu.memory_bytes), ""),
        NodeOffer::Claims(_) => (format_bytes(gpu.memory_bytes), "; its claim names this GPU"),
    };
    let capability = match gpu.compute_capability {
        Some(capability) => format!("compute capability {capability}"),
        None => "computed by the CPUs".to_owned(),
    };
    let more = match (&rank.in_pod_of, rank.gpus) {
        (Some(host), _) => format!("; it runs in the Pod of {host}, which holds the GPU for both"),
        (None, held) if held > 1 => {
            format!("; it computes on one of the {held} GPUs that it holds")
        }
        (None, _) => String::new(),
    };
    format!(
        "{} on {} of {} ({}, {capability}): {weights} {}{cache}, KV {} and {room} {} are {} of its {free}{more}{tail}",
        rank.name,
        gpu.name,
        node.node,
        gpu.uuid,
        format_bytes(need.weights_bytes),
        format_bytes(kv_bytes),
        format_bytes(room_bytes),
        format_bytes(rank.gpu_memory_bytes),
    )
}

/// Explains the prompt length, in tokens, from which a prefill rank on a GPU takes a prompt.
pub(super) fn route(ranks: &[PlanRank], routing: &PlanRouting, why: &mut Vec<String>) {
    let below = routing.chunked_below_tokens;
    why.push(if ranks_of(ranks, PlanRole::Decode).any(PlanRank::is_on_gpu) {
        format!(
            "prompts below {below} tokens are prefilled by the decode rank: its GPU takes one step, and the KV transfer costs more"
        )
    } else {
        format!(
            "prompts below {below} tokens are prefilled by the decode rank: below that the KV transfer costs more than the GPU saves"
        )
    });
}

/// One line for each GPU that no rank runs on, and for features that GPUs rule out or that need one.
pub(super) fn not_chosen(draft: &Draft<'_>, ranks: &[PlanRank], lines: &mut Vec<String>) {
    let total = format_bytes(draft.demand.facts.bytes.total());
    for node in draft.nodes {
        for gpu in &node.gpus {
            let is_used = ranks
                .iter()
                .any(|rank| rank.device() == RankDevice::Gpu(&gpu.uuid));
            if !is_used {
                lines.push(format!(
                    "{} of {} ({} free, weights {total}): {}",
                    gpu.name,
                    node.node,
                    format_bytes(gpu.free_bytes),
                    left_out(draft, node, gpu)
                ));
            }
        }
    }
    let has_ranks = ranks.iter().any(PlanRank::is_on_gpu);
    let refusals = draft.refused.iter();
    lines.extend(
        refusals
            .filter(|refused| has_ranks || matches!(refused.why, Objection::Slower(_)))
            .map(refused),
    );
    if !draft.nodes.iter().any(|node| !node.gpus.is_empty()) {
        lines.push("stream-loading prefill: there is no GPU to load the experts onto".to_owned());
    }
    let placed = draft.placement.ranks.iter().find(|ranks| ranks.count() > 0);
    if placed.is_some_and(|ranks| ranks.devices.decode == Device::GpuAndCpus) {
        return;
    }
    lines.push(if has_ranks {
        "dual batch: it overlaps a GPU's attention with the CPU's experts, and here each decode worker runs on one device"
            .to_owned()
    } else {
        "dual batch: it overlaps a GPU's attention with the CPU's experts, and everything runs on CPUs"
            .to_owned()
    });
}

/// Reason that no rank runs on a GPU.
fn left_out(draft: &Draft<'_>, node: &NodeProfileStatus, gpu: &GpuProfile) -> String {
    let spec = draft.input.spec;
    let offer = draft.estimator.gpus().at(node);
    if let Some(why) = unusable(gpu) {
        return why;
    }
    if spec.prefill.gpus_per_worker == Some(0) {
        return "spec.prefill.gpusPerWorker is 0".to_owned();
    }
    match offer {
        NodeOffer::Plugin(0) => {
            return "the node's device plugin has none available: install it, or wait until one is free"
                .to_owned();
        }
        NodeOffer::Claims(uuids) if !uuids.contains(&gpu.uuid) => {
            return "it is claimed by others, or its driver does not offer it".to_owned();
        }
        NodeOffer::Machine | NodeOffer::Plugin(_) | NodeOffer::Claims(_) => {}
    }
    if spec.prefill.gpus_per_worker.is_none() && spec.strategy != Strategy::Auto {
        return format!(
            "strategy {:?} uses GPUs only where spec.prefill.gpusPerWorker is set, and it is not",
            spec.strategy
        );
    }
    let own = draft.refused.iter().rev().find_map(|refused| {
        lack(refused)
            .filter(|lack| matches!(lack, GpuLack::Memory(short) if short.node == node.node))
    });
    match own {
        Some(GpuLack::Memory(short)) => format!(
            "a {} worker needs {} there ({}) and it can give {}",
            short.role.as_str(),
            format_bytes(short.needs_bytes),
            short.breakdown(),
            format_bytes(short.free_bytes)
        ),
        _ => "the ranks that run on GPUs use others".to_owned(),
    }
}

fn lack(refused: &Refused) -> Option<&GpuLack> {
    match &refused.why {
        Objection::NoRoom(NoRoom::Gpus { lack, .. }) => Some(lack),
        Objection::NoRoom(NoRoom::Memory { .. } | NoRoom::Cpus { .. }) | Objection::Slower(_) => {
            None
        }
    }
}

/// Devices that would have been preferred, and the shortage there.
fn refused(refused: &Refused) -> String {
    let Devices { prefill, decode } = refused.devices;
    let which = match (prefill, decode) {
        (Device::StreamingGpu(DenseModules::Stay), Device::GpuAndCpus) => {
            "experts of prefill streamed to a GPU, those of decode on CPUs beside it"
        }
        (Device::StreamingGpu(DenseModules::Stay), _) => {
            "experts of prefill streamed to a GPU, decode on CPUs"
        }
        (Device::StreamingGpu(DenseModules::Stream), Device::GpuAndCpus) => {
            "experts and dense modules of prefill streamed to a GPU, experts of decode on CPUs beside it"
        }
        (Device::StreamingGpu(DenseModules::Stream), _) => {
            "experts and dense modules of prefill streamed to a GPU, decode on CPUs"
        }
        (_, Device::GpuAndCpus) => "experts of decode on CPUs beside a GPU",
        (Device::Gpu, Device::Gpu) => "prefill and decode on GPUs",
        (Device::Gpu, _) => "prefill on a GPU",
        (Device::Cpus | Device::GpuAndCpus, _) => "decode on a GPU",
    };
    let which = match refused.peers {
        0 => which.to_owned(),
        peers => format!("{which}, {peers} GPUs reading prompts together"),
    };
    let no_room = match &refused.why {
        Objection::NoRoom(no_room) => no_room,
        Objection::Slower(why) => return format!("{which}: {why}"),
    };
    let lacks = match no_room {
        NoRoom::Gpus { what, lack } => match lack {
            GpuLack::Memory(short) => format!(
                "with both, a {} worker needs {} ({}) and {} of {} has {} left",
                short.role.as_str(),
                format_bytes(short.needs_bytes),
                short.breakdown(),
                short.gpu,
                short.node,
                format_bytes(short.free_bytes)
            ),
            GpuLack::Count { node, needs, free } => {
                format!("{what} needs one of {needs} GPUs and {node} can give {free}")
            }
            GpuLack::Unusable { why, .. } => why.clone(),
        },
        NoRoom::Memory { what, shortage } => format!(
            "{what} needs {} of the memory of {} beside it, and {} are free",
            format_bytes(shortage.needs_bytes),
            shortage.node,
            format_bytes(shortage.free_bytes)
        ),
        NoRoom::Cpus { .. } => "there is not enough CPU for it".to_owned(),
    };
    format!("{which}: {lacks}")
}
