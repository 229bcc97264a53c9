//! The plan in sentences: one line for each decision, and one for each alternative with the number that ruled it out.

mod experts;
mod gpus;
mod peers;

use std::collections::BTreeSet;

use hearth_crds::{
    NumaPolicy, Pinning, PlanPrediction, PlanRank, PlanRole, PlanRouting, PrefillMode, Strategy,
    format_bytes,
};

use crate::cpus::{CpuLack, core_count, format_cpu_list};
use crate::disks;
use crate::draft::{Draft, ranks_of};
use crate::estimator::UNMEASURED_HOP;
use crate::gpus::usable_count;
use crate::link::measured_link;
use crate::memory::PREFILL_BATCH;
use crate::node_ranks::NodeRanks;
use crate::place::Cost;
use crate::sentences::{NO_RING, RING_OF_ONE_NODE, gateways, moment, ms, objectives};

/// Returns `(why, notChosen)`.
pub(crate) fn write(
    draft: &Draft<'_>,
    ranks: &[PlanRank],
    routing: &PlanRouting,
    predicted: &PlanPrediction,
) -> (Vec<String>, Vec<String>) {
    let mut why = Vec::new();
    topology(draft, ranks, &mut why);
    gateways(ranks, &mut why);
    moment(draft.nodes, draft.demand.facts, ranks, &mut why);
    weights(draft, ranks, &mut why);
    unmeasured_disks(draft, ranks, &mut why);
    kv(draft, ranks, &mut why);
    cpus(draft, ranks, &mut why);
    gpus::used(draft, ranks, &mut why);
    experts::used(draft, ranks, &mut why);
    peers::used(draft, ranks, routing, &mut why);
    route(draft, ranks, routing, &mut why);
    unmeasured_links(draft, ranks, &mut why);
    objectives(&draft.input.spec.objectives, predicted, &mut why);
    let mut not_chosen = Vec::new();
    gpus::not_chosen(draft, ranks, &mut not_chosen);
    rings(draft, ranks, &mut not_chosen);
    prefill_alternatives(draft, ranks, predicted, &mut not_chosen);
    pinning_alternative(draft, predicted, &mut not_chosen);
    (why, not_chosen)
}

/// Names of ranks as a person would list them: `decode-0`, `decode-0 to decode-3`.
fn names(ranks: &[&PlanRank]) -> String {
    match ranks {
        [] => String::new(),
        [one] => one.name.clone(),
        [first, .., last] => format!("{} to {}", first.name, last.name),
    }
}

fn topology(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let mut nodes: Vec<&str> = ranks.iter().map(|rank| rank.node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let devices = gpus::devices(draft, ranks);
    why.push(match (draft.nodes.len(), nodes.as_slice()) {
        (1, [node]) => format!("hybrid on {node}: one node, {devices}"),
        (count, [node]) => {
            format!("hybrid on {node}: the fastest of {count} nodes for this model, {devices}")
        }
        (_, nodes) => format!("hybrid over {}: {devices}", nodes.join(", ")),
    });
}

/// Disks that are read again and again, of which nobody knows how fast they are.
fn unmeasured_disks(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let reading = ranks.iter().filter(|rank| rank.disk_weight_bytes() > 0);
    let nodes = reading.filter_map(|rank| draft.node_of(rank));
    let unmeasured: BTreeSet<&str> = nodes
        .filter(|(_, node)| node.disks.iter().all(|disk| disk.read_gbps <= 0.0))
        .map(|(_, node)| &*node.node)
        .collect();
    if !unmeasured.is_empty() {
        let nodes: Vec<&str> = unmeasured.into_iter().collect();
        why.push(format!(
            "warning: weights are read from disks that were not measured, and are taken for {} GB/s: {}: measure them ({})",
            disks::UNMEASURED_GBPS,
            nodes.join(", "),
            disks::REMEDY
        ));
    }
}

/// Links that prompts' KV or the rows of GPUs that read together cross, of which nobody knows how fast they are.
fn unmeasured_links(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let mut unmeasured = BTreeSet::new();
    for from in ranks_of(ranks, PlanRole::Prefill) {
        let is_peer = |rank: &&PlanRank| from.peers.is_some() && rank.peers.is_some();
        let ends = ranks.iter();
        let ends = ends.filter(|rank| rank.role == PlanRole::Decode || is_peer(rank));
        for to in ends.filter(|rank| rank.node != from.node) {
            if let (Some((_, a)), Some((_, b))) = (draft.node_of(from), draft.node_of(to))
                && measured_link(a, b).is_none()
            {
                let (first, second) = ((&a.node).min(&b.node), (&a.node).max(&b.node));
                unmeasured.insert(format!("{first} to {second}"));
            }
        }
    }
    if !unmeasured.is_empty() {
        let links: Vec<String> = unmeasured.into_iter().collect();
        why.push(format!(
            "warning: links were not measured and are taken for {} GB/s and {} ms: {}",
            UNMEASURED_HOP.gbps,
            UNMEASURED_HOP.latency_ms,
            links.join(", ")
        ));
    }
}

fn weights(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let total = draft.demand.facts.bytes.total();
    for (n, node) in draft.nodes.iter().enumerate() {
        let Some(budget) = &draft.placement.budgets[n] else {
            continue;
        };
        let workers = ranks
            .iter()
            .filter(|r| r.node == node.node && r.role.is_worker() && !r.is_on_gpu())
            .count();
        if workers == 0 {
            continue;
        }
        let free = format_bytes(budget.free_bytes);
        if budget.weight_budget_bytes >= total {
            let copy = if workers > 1 {
                "one copy mapped by all ranks"
            } else {
                "mapped once"
            };
            why.push(format!(
                "weights resident on {}: {} fit in its {free}, {copy}",
                node.node,
                format_bytes(total)
            ));
        } else {
            let each = if draft.demand.exclusive && workers > 1 {
                " for each of its exclusive workers"
            } else {
                ""
            };
            why.push(format!(
                "weights mapped with prefetch on {}: of {} only {}{each} fit beside KV and processes in its {free}",
                node.node,
                format_bytes(total),
                format_bytes(budget.weight_budget_bytes)
            ));
        }
    }
}

fn kv(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let demand = &draft.demand;
    let (batch, context) = (demand.max_batch, demand.context_length);
    if draft.input.spec.model.context_length.is_none() {
        let max = demand.facts.max_context;
        why.push(format!(
            "context {context}: the spec sets none and the model supports {max}"
        ));
    }
    for decode in ranks_of(ranks, PlanRole::Decode) {
        let (Some(kv), Some((n, _))) = (&decode.kv, draft.node_of(decode)) else {
            continue;
        };
        let wanted = draft.placement.budgets[n]
            .as_ref()
            .map_or(0, |budget| budget.decode_kv_wanted_bytes);
        let size = format_bytes(kv.memory_bytes);
        let per_token = format_bytes(demand.kv_bytes_per_token);
        let name = &decode.name;
        why.push(if demand.kv_memory_bytes.is_some() {
            let tokens = kv.memory_bytes / demand.kv_bytes_per_token.max(1);
            format!("KV of {name} {size}: the spec says so; it holds {tokens} tokens of {per_token}")
        } else if kv.memory_bytes < wanted {
            let tokens = kv.memory_bytes / demand.kv_bytes_per_token.max(1);
            format!(
                "KV of {name} {size}: {batch} streams × {context} tokens would need {}; {tokens} tokens fit, further requests are queued",
                format_bytes(wanted)
            )
        } else {
            format!("KV of {name} {size}: {batch} streams × {context} tokens × {per_token}")
        });
    }
    if let Some(kv) = ranks_of(ranks, PlanRole::Prefill).find_map(|rank| rank.kv.as_ref()) {
        let prompts = kv.memory_bytes / demand.kv_bytes(context).max(1);
        let prompts = prompts.min(u64::from(PREFILL_BATCH));
        let size = format_bytes(kv.memory_bytes);
        why.push(format!(
            "KV of each prefill rank {size}: {prompts} {} of {context} tokens in progress",
            if prompts == 1 { "prompt" } else { "prompts" }
        ));
    }
}

fn cpus(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let placement = &draft.input.spec.placement;
    for (n, node) in draft.nodes.iter().enumerate() {
        let here = |role| {
            ranks_of(ranks, role)
                .filter(|rank| rank.node == node.node && !rank.is_on_gpu())
                .collect::<Vec<_>>()
        };
        let (decode, prefill) = (here(PlanRole::Decode), here(PlanRole::Prefill));
        if draft.placement.ranks[n].count() == 0 {
            continue;
        }
        let cores = core_count(node);
        if let ([first_decode, ..], [first_prefill, ..]) = (decode.as_slice(), prefill.as_slice()) {
            let shared: Vec<u32> = first_decode
                .cpus
                .iter()
                .copied()
                .filter(|cpu| first_prefill.cpus.contains(cpu))
                .collect();
            let both = format!("{} and {}", names(&prefill), names(&decode));
            if !shared.is_empty() {
                why.push(format!(
                    "{both} share CPUs {} of {}: {cores} cores, and whichever has work uses them all",
                    format_cpu_list(&shared),
                    node.node
                ));
            } else {
                why.push(format!(
                    "{both} have dedicated CPUs on {}: {} threads for prefill, {} for decode",
                    node.node, first_prefill.threads, first_decode.threads
                ));
            }
        }
        if let (Pinning::Exclusive, Some(room)) = (placement.pinning, draft.estimator.cpu_room(n)) {
            let own = ranks.iter().filter(|rank| rank.node == node.node);
            let own: usize = own.map(|rank| rank.exclusive_cpus().len()).sum();
            why.push(format!(
                "CPUs on {}: {own} dedicated to its workers; of {}m allocatable, other Pods request {}m and {}m are kept free",
                node.node, room.allocatable_millis, room.requested_millis, room.reserve_millis
            ));
        }
        if node.numa_nodes.len() > 1 {
            let numa = match placement.numa {
                NumaPolicy::Compact => "threads of a rank stay on as few NUMA nodes as possible",
                NumaPolicy::Spread => {
                    "threads of a rank are spread evenly, to use the bandwidth of all"
                }
                NumaPolicy::Any => "threads are not bound",
            };
            why.push(format!(
                "{} NUMA nodes on {}: {numa} (numa: {:?})",
                node.numa_nodes.len(),
                node.node,
                placement.numa
            ));
        }
    }
}

fn route(draft: &Draft<'_>, ranks: &[PlanRank], routing: &PlanRouting, why: &mut Vec<String>) {
    let chunk = ranks_of(ranks, PlanRole::Decode)
        .map(|rank| rank.chunk_tokens)
        .max()
        .unwrap_or(0);
    if ranks_of(ranks, PlanRole::Prefill).next().is_none() {
        why.push(format!("no prefill rank: spec.prefill.mode is Chunked; decode ranks prefill {chunk} tokens per step"));
        return;
    }
    if draft.streams_prompts() {
        why.push(experts::route(draft, ranks, routing));
        return;
    }
    if draft.input.spec.prefill.chunked_below_tokens.is_some() {
        why.push(format!(
            "prompts below {} tokens are prefilled by the decode rank: spec.prefill.chunkedBelowTokens says so",
            routing.chunked_below_tokens
        ));
        return;
    }
    if ranks_of(ranks, PlanRole::Prefill).any(PlanRank::is_on_gpu) {
        gpus::route(ranks, routing, why);
        return;
    }
    why.push(format!(
        "prompts below {} tokens are prefilled by the decode rank: on CPUs both ranks read the weights equally fast, and below \
         that the KV transfer costs more than it saves (2048 is the figure where prefill has a GPU)",
        routing.chunked_below_tokens
    ));
}

fn rings(draft: &Draft<'_>, ranks: &[PlanRank], not_chosen: &mut Vec<String>) {
    if let [node] = draft.nodes {
        let may_use_gpus = draft.input.spec.prefill.gpus_per_worker != Some(0);
        let has_gpus = may_use_gpus && usable_count(node, draft.estimator.gpus()) > 0;
        not_chosen.push(match has_gpus {
            false => NO_RING.to_owned(),
            true => format!(
                "{RING_OF_ONE_NODE} of {}: of one node alone, only strategy PipedRing makes one",
                node.node
            ),
        });
        return;
    }
    if ranks.iter().any(|rank| rank.disk_weight_bytes() > 0) {
        // With Auto one is planned to compare.
        if draft.input.spec.strategy == Strategy::Hybrid {
            not_chosen.push(
                "a piped ring, so that no node reads from its disk what it has no room for: spec.strategy is Hybrid; Auto compares both".to_owned(),
            );
        }
        return;
    }
    let total = format_bytes(draft.demand.facts.bytes.total());
    not_chosen.push(format!(
        "piped ring over {} nodes: the weights ({total}) fit on one node, and each additional node would add a round trip to every token",
        draft.nodes.len()
    ));
}

fn prefill_alternatives(
    draft: &Draft<'_>,
    ranks: &[PlanRank],
    predicted: &PlanPrediction,
    not_chosen: &mut Vec<String>,
) {
    let Some(decode) = ranks_of(ranks, PlanRole::Decode).next() else {
        return;
    };
    let tokens = predicted.ttft_prompt_tokens;
    if draft.input.spec.prefill.mode == PrefillMode::Chunked {
        not_chosen.push("a prefill rank: spec.prefill.mode is Chunked".to_owned());
        return;
    }
    if let Some(chunked_ms) = draft.chunked_ttft_ms(decode, tokens) {
        not_chosen.push(format!(
            "chunked prefill only: a prompt of {tokens} tokens would stall running streams for {} over {} steps (with a prefill rank: TTFT {})",
            ms(chunked_ms),
            tokens.div_ceil(decode.chunk_tokens.max(1)),
            ms(predicted.ttft_ms)
        ));
    }
}

fn pinning_alternative(
    draft: &Draft<'_>,
    predicted: &PlanPrediction,
    not_chosen: &mut Vec<String>,
) {
    if draft.input.spec.placement.pinning == Pinning::Exclusive {
        return;
    }
    let mut spec = draft.input.spec.clone();
    spec.placement.pinning = Pinning::Exclusive;
    for (n, ranks) in draft
        .placement
        .ranks
        .iter()
        .enumerate()
        .filter(|(_, ranks)| ranks.decode_on_cpus() > 0)
    {
        let exclusive = draft.estimator.with_spec(&spec);
        let line = match exclusive.cpu_lack(n, *ranks) {
            None => {
                let tpot = exclusive.decode_ms(n, NodeRanks { ..*ranks });
                format!(
                    "predicted TPOT {} against {}",
                    ms(tpot),
                    ms(predicted.tpot_ms)
                )
            }
            Some(CpuLack::Cores { workers, cores, .. }) => {
                format!("{workers} workers need {workers} whole cores and there are {cores}")
            }
            Some(CpuLack::Requests {
                needs_millis,
                free_millis,
            }) => format!("Pods would request {needs_millis}m CPU and {free_millis}m are free"),
        };
        not_chosen.push(format!(
            "pinning Exclusive on {}: {line}",
            draft.nodes[n].node
        ));
    }
}
