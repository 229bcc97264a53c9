//! Sentences about routed experts that stay in the node's memory while the rest of the model is on a GPU.

use hearth_crds::{
    DualBatch, ExpertCache, PlanMlaForm, PlanRank, PlanRole, PlanRouting, ResidencyPolicy,
    format_bytes,
};

use crate::cpus::format_cpu_list;
use crate::disks;
use crate::draft::{Draft, ranks_of};
use crate::link::LinkRates;
use crate::node_ranks::DenseModules;
use crate::predict::{ExpertsAt, Step};
use crate::reasons::ms;

fn has_policy(rank: &PlanRank, policy: ResidencyPolicy) -> bool {
    let residency = rank.residency.as_ref();
    residency.is_some_and(|residency| residency.policy == policy)
}

/// What is streamed, at which rate, through how many slots, and what CPUs compute.
pub(super) fn used(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    for rank in ranks {
        if has_policy(rank, ResidencyPolicy::StreamLoading) {
            why.extend(streamed(draft, rank));
            why.extend(turning_point(draft, rank));
            if rank.role == PlanRole::Prefill {
                why.extend(mla_form(draft, rank));
            }
            why.extend(far_from_gpu(draft, ranks, rank));
        }
        if has_policy(rank, ResidencyPolicy::HostExperts) {
            why.extend(on_host(draft, rank));
            why.extend(cache(draft, rank));
            why.extend(dual_batch(draft, rank));
        }
    }
}

fn streamed(draft: &Draft<'_>, rank: &PlanRank) -> Option<String> {
    let slot = draft.slot_of(rank)?;
    let link = LinkRates::of(slot.gpu)?;
    let facts = draft.demand.facts;
    let rate = match slot.gpu.copy_gbps {
        measured if measured > 0.0 => "measured",
        _ => "estimated from its PCIe link",
    };
    let predictor = draft.predictor_of(rank)?;
    let tokens = rank.predicted.as_ref()?.prompt_tokens?;
    let step = Step::of_prompt(tokens);
    let ExpertsAt::Ring {
        slots,
        dense,
        copy_gbps,
    } = predictor.experts_at
    else {
        return None;
    };
    let time = predictor.streamed(step, slots.at(tokens), dense, copy_gbps);
    let with_dense = match dense {
        DenseModules::Stay => String::new(),
        DenseModules::Stream => format!(
            ", and {} of dense modules with them, which have no room beside the rest,",
            format_bytes(facts.streamed_dense_bytes())
        ),
    };
    let alone = match rank.peers {
        Some(_) => "read alone, ",
        None => "",
    };
    Some(format!(
        "experts of {}: {}{with_dense} stream from the memory of {} to {} at {:.1} GB/s ({rate}; {:.1} beside decode); {alone}a prompt of {tokens} tokens takes {}, {} of copies beside {} of computation",
        rank.name,
        format_bytes(facts.bytes.routed_experts),
        rank.node,
        slot.gpu.name,
        link.alone_gbps,
        link.beside_decode_gbps,
        ms(time.total_ms),
        ms(time.copy_ms),
        ms(time.compute_ms),
    ))
}

/// Says where the experts that a rank streams are not in the memory next to its GPU: they come from where the ranks beside
/// it have them, which compute with them, in the same copy.
fn far_from_gpu(draft: &Draft<'_>, ranks: &[PlanRank], rank: &PlanRank) -> Option<String> {
    let (_, node) = draft.node_of(rank)?;
    let gpu = draft.slot_of(rank)?.gpu;
    let near = gpu.numa_node.filter(|_| node.numa_nodes.len() > 1)?;
    let mut beside = ranks_of(ranks, PlanRole::Decode).filter(|other| other.node == rank.node);
    let holder = beside.find(|other| !other.numa_nodes.is_empty());
    let at = &holder.unwrap_or(rank).numa_nodes;
    if *at == [near] || at.is_empty() {
        return None;
    }
    Some(format!(
        "experts of {} lie in the memory of NUMA node {} and {} is attached to NUMA node {near}: copies from the others cross the link between them, and may be slower",
        rank.name,
        format_cpu_list(at),
        gpu.name
    ))
}

/// The lengths of the ring, and the prompt length from which on a longer one would save nothing.
fn turning_point(draft: &Draft<'_>, rank: &PlanRank) -> Option<String> {
    let demand = &draft.demand;
    let slot = draft.slot_of(rank)?;
    let ring = slot.ring?;
    let (of_layer, experts) = match (rank.role, &rank.peers) {
        (PlanRole::Stage, Some(peers)) => {
            ("its share of a layer", demand.experts_of_share(peers.ranks))
        }
        _ => ("a layer", demand.facts.experts),
    };
    let one = format_bytes(demand.slot_bytes());
    let context = demand.context_length;
    let room = format_bytes(slot.ring_room_bytes);
    let lengths = match ring.lengths() {
        [only] if only.slots >= experts => {
            return Some(format!(
                "ring of {}: {} slots of {one}, shared by all layers: all {experts} experts of {of_layer}, as the longest prompt of {context} tokens needs {} beside them",
                rank.name,
                only.slots,
                format_bytes(demand.flight_bytes(context))
            ));
        }
        lengths => lengths
            .iter()
            .map(|length| format!("{} up to {}", length.slots, length.prompt_tokens)),
    };
    let lengths = lengths.collect::<Vec<_>>().join(", ");
    let turning = match draft.estimator.turning_point_tokens(slot.gpu) {
        point if point >= context => {
            "an expert of the longest prompt still takes longer to copy than to compute".to_owned()
        }
        point => format!(
            "the turning point is {point} tokens: in longer prompts an expert computes longer than its copy takes, so that 2 slots hide all copies"
        ),
    };
    Some(format!(
        "ring of {}: slots of {one} by tokens of the prompt: {lengths}; ring and prompt share {room}, and {turning}",
        rank.name
    ))
}

/// The form of latent attention, with the times of both.
fn mla_form(draft: &Draft<'_>, rank: &PlanRank) -> Option<String> {
    let choice = draft.estimator.mla_choice(&draft.slot_of(rank)?)?;
    let context = draft.demand.context_length;
    let [absorbed, expanded] = [choice.absorbed_ms, choice.expanded_ms].map(ms);
    Some(match choice.form {
        PlanMlaForm::Absorbed => format!(
            "latent attention of {} is absorbed: the longest prompt of {context} tokens takes {absorbed} beside its routed experts, and {expanded} with expanded keys and values",
            rank.name
        ),
        PlanMlaForm::Expanded => format!(
            "latent attention of {} is expanded: the longest prompt of {context} tokens takes {expanded} beside its routed experts, and {absorbed} absorbed; answers are written absorbed, so one that comes back in a prompt is read again",
            rank.name
        ),
    })
}

fn on_host(draft: &Draft<'_>, rank: &PlanRank) -> Option<String> {
    let predictor = draft.predictor_of(rank)?;
    let context = draft.estimator.stream_tokens();
    let parts = predictor.hybrid(Step::of_streams(1, context));
    let ExpertsAt::Host { rates, .. } = predictor.experts_at else {
        return None;
    };
    let gpu = draft.slot_of(rank)?.gpu;
    let origin = match gpu.exchange_us {
        us if us > 0.0 => format!(
            "measured: {us:.0} µs a layer, and {:.1} µs an operation",
            gpu.operation_us
        ),
        _ => "estimated".to_owned(),
    };
    let routed = format_bytes(draft.demand.facts.bytes.routed_experts);
    let at_a_time = rank.residency.as_ref()?.host_budget_bytes;
    let stay = match at_a_time {
        Some(bytes) => format!(
            "{} of {routed} are in the memory of {} at a time and the others read from the disk at {} GB/s, {} of a token if all are chosen equally often; its",
            format_bytes(bytes),
            rank.node,
            disk_rate(rates.disk_gbps),
            ms(parts.disk_ms)
        ),
        None => format!("{routed} stay in the memory of {}, whose", rank.node),
    };
    Some(format!(
        "experts of {}: {stay} CPUs read them at {:.1} GB/s: of a token's {}, {} are theirs, {} the GPU's and {} the way between ({origin})",
        rank.name,
        rates.read_gbps,
        ms(parts.total_ms()),
        ms(parts.host_ms),
        ms(parts.device_ms + parts.beside_ms),
        ms(parts.exchange_ms),
    ))
}

/// The rate of a disk in GB/s, and that it was assumed where it was not measured.
fn disk_rate(measured_gbps: f64) -> String {
    match measured_gbps > 0.0 {
        true => format!("{measured_gbps:.1}"),
        false => format!("{} (assumed: it was not measured)", disks::UNMEASURED_GBPS),
    }
}

fn cache(draft: &Draft<'_>, rank: &PlanRank) -> Option<String> {
    let choice = draft.host_choice_of(rank)?;
    let slot = draft.slot_of(rank)?;
    let room = slot.cache_room_slots;
    if rank.has_expert_budget() {
        return Some(format!(
            "no cache of experts on the GPU of {}: copies to it need all experts in the memory of {}",
            rank.name, rank.node
        ));
    }
    let times = format!(
        "a token takes {} with it and {} without",
        ms(choice.cached_ms),
        ms(choice.uncached_ms)
    );
    match (
        draft.input.spec.decode.expert_cache.unwrap_or_default(),
        &slot.gpu.virtual_device,
    ) {
        (ExpertCache::Off, _) => {
            return Some(format!(
                "no cache of experts on the GPU of {}, as the spec says",
                rank.name
            ));
        }
        (ExpertCache::Auto, None) => {
            return Some(format!(
                "no cache of experts on the GPU of {}: it computes other bits than the CPUs do, and which of them computes an expert would depend on what was cached; spec.decode.expertCache: \"On\" allows that",
                rank.name
            ));
        }
        (ExpertCache::On, _) | (ExpertCache::Auto, Some(_)) => {}
    }
    Some(match choice.cache_slots {
        0 => format!(
            "no cache of experts on the GPU of {}: {room} of {} would fit, and {times}",
            rank.name,
            draft.demand.all_experts()
        ),
        slots => format!(
            "cache of {slots} of {} experts on the GPU of {}, in the {} that are left there: {times}",
            draft.demand.all_experts(),
            rank.name,
            format_bytes(u64::from(slots) * draft.demand.slot_bytes())
        ),
    })
}

fn dual_batch(draft: &Draft<'_>, rank: &PlanRank) -> Option<String> {
    let choice = draft.host_choice_of(rank)?;
    let batch = rank.max_batch;
    let asked = match draft.input.spec.decode.dual_batch {
        DualBatch::Auto => "",
        DualBatch::On | DualBatch::Off => ", as the spec says",
    };
    let what = match rank.dual_batch {
        true => "dual batch",
        false => "no dual batch",
    };
    if choice.halves_ms.is_infinite() {
        return Some(format!(
            "{what} in {}{asked}: one stream is no two halves",
            rank.name
        ));
    }
    Some(format!(
        "{what} in {}{asked}: a step of {batch} streams takes {} in two halves, one on the GPU while the other is in its experts, and {} as a whole",
        rank.name,
        ms(choice.halves_ms),
        ms(choice.whole_ms)
    ))
}

/// Explains the prompt length, in tokens, from which a prefill rank that streams takes a prompt.
pub(super) fn route(draft: &Draft<'_>, ranks: &[PlanRank], routing: &PlanRouting) -> String {
    let below = routing.chunked_below_tokens;
    if below == PlanRouting::ALWAYS_CHUNKED {
        return format!(
            "all prompts are prefilled by the decode rank: each of up to {} tokens is predicted to be faster in chunks",
            draft.demand.context_length
        );
    }
    let begin = format!("prompts below {below} tokens are prefilled by the decode rank");
    if draft.input.spec.prefill.chunked_below_tokens.is_some() {
        return format!("{begin}: spec.prefill.chunkedBelowTokens says so");
    }
    let times = |tokens: u32| {
        let prefill = ranks_of(ranks, PlanRole::Prefill).next();
        let decode = ranks_of(ranks, PlanRole::Decode).next();
        let streamed_ms = draft.prefill_ttft_ms(prefill?, tokens)?;
        let chunked_ms = draft.chunked_ttft_ms(decode?, tokens)?;
        Some((streamed_ms, chunked_ms))
    };
    match times(below) {
        Some((streamed_ms, chunked_ms)) if streamed_ms < chunked_ms => format!(
            "{begin}: at {below} tokens chunks take {} and streaming the experts {}",
            ms(chunked_ms),
            ms(streamed_ms)
        ),
        _ => format!(
            "{begin}, the others by the prefill rank, as spec.prefill.mode says: every prompt is predicted to be faster in chunks"
        ),
    }
}
