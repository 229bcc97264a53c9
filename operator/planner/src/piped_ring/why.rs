//! A ring in sentences: what each member does, and what was left out.

use hearth_crds::{PlanPrediction, PlanRank, PlanRole, format_bytes};

use super::members::{Member, Members};
use super::problem::UNMEASURED_LINK;
use super::write::Kept;
use super::{Chosen, RingPlanning, too_old};
use crate::draft::{Draft, ranks_of};
use crate::halda::{Dropped, Share};
use crate::link::measured_link;
use crate::numerics::of_rank;
use crate::sentences::{NO_RING, gateways, moment, ms, objectives};

/// Most slower rings that are told.
const MOST_ALTERNATIVES: usize = 3;

/// Returns `(why, notChosen)`.
pub(super) fn write(
    planning: &RingPlanning<'_>,
    (chosen, kept): (&Chosen<'_>, &[Kept]),
    (draft, ranks): (&Draft<'_>, &[PlanRank]),
    predicted: &PlanPrediction,
    instead: &str,
) -> (Vec<String>, Vec<String>) {
    let mut why = Vec::new();
    topology(chosen, instead, &mut why);
    gateways(ranks, &mut why);
    moment(draft.nodes, draft.demand.facts, ranks, &mut why);
    if !chosen.members.too_old.is_empty() {
        why.push(format!("warning: {}", too_old(&chosen.members.too_old)));
    }
    members((chosen, kept), ranks, &mut why);
    kv(planning, kept, &mut why);
    prompts(planning, ranks, predicted, &mut why);
    links(chosen, &mut why);
    numerics(draft, ranks, &mut why);
    objectives(&planning.input.spec.objectives, predicted, &mut why);
    let mut not_chosen = Vec::new();
    left_out(chosen, &mut not_chosen);
    alternatives(chosen, &mut not_chosen);
    not_chosen.extend(chosen.left_out.iter().cloned());
    if not_chosen.is_empty() {
        not_chosen.push(match chosen.size() {
            1 => NO_RING.to_owned(),
            size => format!(
                "another ring over these {size} members: no other split of the layers, order or number of rounds was found that fits"
            ),
        });
    }
    (why, not_chosen)
}

fn names(chosen: &Chosen<'_>, order: &[usize]) -> String {
    let names = order.iter().map(|at| &*chosen.members.all[*at].name);
    names.collect::<Vec<_>>().join(", ")
}

fn topology(chosen: &Chosen<'_>, instead: &str, why: &mut Vec<String>) {
    let choice = &chosen.choice;
    let over = names(chosen, &choice.order);
    if chosen.size() == 1 {
        let alone = match chosen.is_only {
            true => "alone, since nothing else can be a member of a ring",
            false if over.starts_with("CPUs ") => "alone are faster than any ring",
            false => "alone is faster than any ring",
        };
        why.push(format!(
            "{over} {alone}: predicted TPOT {}",
            ms(choice.tpot_ms)
        ));
        return;
    }
    let rounds = match choice.rounds {
        1 => "once around for each token".to_owned(),
        rounds => format!(
            "{rounds} times around for each token, {} layers a round",
            choice.layers_a_round
        ),
    };
    why.push(format!(
        "piped ring over {over} ({instead}): {rounds}, predicted TPOT {}",
        ms(choice.tpot_ms)
    ));
}

fn members((chosen, kept): (&Chosen<'_>, &[Kept]), ranks: &[PlanRank], why: &mut Vec<String>) {
    let workers = ranks.iter().filter(|rank| rank.role != PlanRole::Gateway);
    for ((place, kept), rank) in kept.iter().enumerate().zip(workers) {
        let windows: Vec<String> = chosen
            .windows(place)
            .map(|window| match window.layers.len() {
                1 => window.layers.start.to_string(),
                _ => format!("{}-{}", window.layers.start, window.layers.end - 1),
            })
            .collect();
        let embedding_bytes = chosen.members.layers.ends.bytes.embedding;
        // Of mapped weights, the embedding is in memory by rows.
        let rows_of_bytes = match place {
            0 if kept.budget_bytes < kept.weight_bytes => embedding_bytes,
            _ => 0,
        };
        let counted_bytes = kept.weight_bytes - rows_of_bytes;
        let weights = format_bytes(counted_bytes);
        let rows = match rows_of_bytes {
            0 => String::new(),
            bytes => format!(
                "; the embedding's {} stay on disk, of which tokens read rows",
                format_bytes(bytes)
            ),
        };
        let memory = match counted_bytes.saturating_sub(kept.budget_bytes) {
            0 if rank.is_on_gpu() => format!(
                "all {weights} of their weights on it, {} of its memory in all{}",
                format_bytes(rank.gpu_memory_bytes),
                match rank.activations.is_exact() {
                    true => "",
                    false => ", activations rounded to bf16",
                }
            ),
            0 => format!("all {weights} of their weights in memory"),
            _ => format!(
                "{} of their {weights} in memory{}",
                format_bytes(kept.budget_bytes),
                match kept.read_ahead_bytes {
                    Some(bytes) => format!(
                        ", {} of it for what is read from disk for each token, ahead of its use",
                        format_bytes(bytes)
                    ),
                    None => read_as_chosen(&chosen.choice.shares[chosen.choice.order[place]]),
                }
            ),
        };
        let ends = match place {
            0 => ", embedding and output head",
            _ => "",
        };
        why.push(format!(
            "{}: layer{} {}{ends}, {memory}{rows}",
            chosen.member(place).name,
            if chosen.layers(place) == 1 { "" } else { "s" },
            windows.join(", ")
        ));
    }
}

/// What a member with experts reads for each token.
fn read_as_chosen(share: &Share) -> String {
    match share.overflow_bytes.saturating_sub(share.expert_bytes) {
        0 => ", other experts read from disk as they are chosen".to_owned(),
        beyond => format!(
            ", experts read from disk as they are chosen, and for each token {} of the others",
            format_bytes(beyond)
        ),
    }
}

fn kv(planning: &RingPlanning<'_>, kept: &[Kept], why: &mut Vec<String>) {
    let bytes: u64 = kept.iter().map(|kept| kept.kv_bytes).sum();
    let tokens = bytes / planning.demand.kv_bytes_per_token.max(1);
    let place = match kept.len() {
        1 => "",
        _ => " over the ring, each member's layers at home",
    };
    why.push(format!(
        "KV: {tokens} tokens, {}{place}",
        format_bytes(bytes)
    ));
}

fn prompts(
    planning: &RingPlanning<'_>,
    ranks: &[PlanRank],
    predicted: &PlanPrediction,
    why: &mut Vec<String>,
) {
    let Some(head) = ranks_of(ranks, PlanRole::Decode).next() else {
        return;
    };
    let (reader, no_workers) = match head.ring {
        Some(_) => ("the ring", "; a ring has no prefill workers"),
        None => (
            "the decode worker",
            "; there are no prefill workers beside it",
        ),
    };
    let workers = match planning.input.spec.prefill.planned_replicas() {
        0 => "",
        _ => no_workers,
    };
    let longest = head.idle_chunk_tokens.unwrap_or(head.chunk_tokens);
    let shorter = match head.idle_chunk_tokens {
        Some(_) => format!(" ({} while streams decode)", head.chunk_tokens),
        None => String::new(),
    };
    let flights = match head.ring.as_ref().map(|ring| ring.flight_tokens) {
        Some(tokens) if tokens < longest => format!(", in flights of {tokens}"),
        _ => String::new(),
    };
    why.push(format!(
        "prompts are read by {reader} itself in chunks of {longest} tokens{shorter}{flights}: predicted TTFT {} at {} tokens{workers}",
        ms(predicted.ttft_ms),
        predicted.ttft_prompt_tokens
    ));
}

fn links(chosen: &Chosen<'_>, why: &mut Vec<String>) {
    let order = &chosen.choice.order;
    let next = order.iter().skip(1).chain(order.first());
    let mut unmeasured: Vec<String> = Vec::new();
    for (from, to) in order.iter().zip(next) {
        let [from, to] = [from, to].map(|at| chosen.members.all[*at].node);
        if from.node != to.node && measured_link(from, to).is_none() {
            unmeasured.push(format!("{} to {}", from.node, to.node));
        }
    }
    if !unmeasured.is_empty() {
        why.push(format!(
            "warning: links were not measured and are taken for {} GB/s and {} ms: {}",
            UNMEASURED_LINK.gbps,
            UNMEASURED_LINK.latency_ms,
            unmeasured.join(", ")
        ));
    }
}

/// Says where members compute other bits than each other: then no machine alone gives the ring's.
fn numerics(draft: &Draft<'_>, ranks: &[PlanRank], why: &mut Vec<String>) {
    let workers = ranks.iter().filter(|rank| rank.role != PlanRole::Gateway);
    let of = |rank| Some((of_rank(draft.node_of(rank)?.1, rank), &rank.node));
    let kinds: Vec<_> = workers.filter_map(of).collect();
    if kinds.windows(2).any(|pair| pair[0].0 != pair[1].0) {
        let kinds = kinds
            .iter()
            .map(|(kind, node)| format!("{node} with {kind}"));
        why.push(format!(
            "{} compute with different bits: answers are those of this ring, the same each time, and no single machine's",
            kinds.collect::<Vec<_>>().join(", ")
        ));
    }
}

fn left_out(chosen: &Chosen<'_>, not_chosen: &mut Vec<String>) {
    not_chosen.extend(with_dropped(chosen, |_| true));
}

/// What devices that were dropped would have made of a ring.
fn with_dropped(chosen: &Chosen<'_>, is_meant: impl Fn(&Member<'_>) -> bool) -> Vec<String> {
    let dropped = chosen.choice.dropped.iter();
    let meant = dropped.filter(|dropped| is_meant(&chosen.members.all[dropped.device]));
    let (mut told, mut names) = (Vec::new(), Vec::new());
    for dropped in meant {
        match with_one(chosen, dropped) {
            Some(words) => told.push(words),
            None => names.push(&*chosen.members.all[dropped.device].name),
        }
    }
    if !names.is_empty() {
        // Of many devices, not all sets are tried.
        told.push(format!(
            "{} in the ring: no split of the layers was found with {}",
            names.join(", "),
            if names.len() > 1 { "any of them" } else { "it" }
        ));
    }
    told
}

/// What a device that was dropped would have made of a ring; `None` if no split with it was found.
fn with_one(chosen: &Chosen<'_>, dropped: &Dropped) -> Option<String> {
    let tpot_ms = chosen.choice.tpot_ms;
    let name = &chosen.members.all[dropped.device].name;
    let ttft = dropped.with_ttft_ms.map_or_else(String::new, ttft);
    let with_ms = dropped.with_tpot_ms?;
    // Less than a thousandth faster is no reason to have one more machine that may fail.
    Some(match with_ms <= tpot_ms {
        true => format!(
            "{name} in the ring: no faster, predicted TPOT {}{ttft}",
            ms(with_ms)
        ),
        false => format!(
            "{name} in the ring: {}{ttft}",
            tpot_against(with_ms, tpot_ms)
        ),
    })
}

/// The time per token of a ring that was not chosen, against that of the one that was.
fn tpot_against(other_ms: f64, chosen_ms: f64) -> String {
    let [other, chosen] = [other_ms, chosen_ms].map(ms);
    match other == chosen {
        true => format!("predicted TPOT {other}, too"),
        false => format!("predicted TPOT {other} against {chosen}"),
    }
}

/// The end of a sentence about a ring that was not chosen. Its flights are the longest, and not those of least time.
fn ttft(ttft_ms: f64) -> String {
    format!(", TTFT {}", ms(ttft_ms))
}

/// What GPUs that a choice left out would have made of its ring.
pub(super) fn unused_gpus(chosen: &Chosen<'_>) -> Vec<String> {
    with_dropped(chosen, |member| member.gpu.is_some())
}

/// What is said of GPUs with which no ring has room, while one of the CPUs alone has.
pub(super) fn no_room_beside_gpus(all: &Members<'_>) -> String {
    let gpus = all.all.iter().filter(|member| member.gpu.is_some());
    let names: Vec<&str> = gpus.map(|member| &*member.name).collect();
    format!(
        "{} in the ring: no split of the layers was found that fits beside {} in the nodes' memory",
        names.join(", "),
        match names.len() {
            1 => "its process",
            _ => "their processes",
        }
    )
}

/// The end of a sentence about a ring with GPUs, which names those that are not in it.
pub(super) fn left_out_gpus(all: &Members<'_>, ring: &Chosen<'_>) -> String {
    let gpus = all.all.iter().filter_map(|member| {
        let room = member.gpu.as_ref()?;
        (!ring.uses(room.gpu)).then_some(&*member.name)
    });
    match &*gpus.collect::<Vec<_>>() {
        [] => String::new(),
        names => format!("; it has no use for {}", names.join(", ")),
    }
}

/// What `other` members would have done instead of the chosen ring's; `None` if no ring of them fits.
pub(super) fn other_ring(what: &str, other: Option<&Chosen<'_>>, chosen: &Chosen<'_>) -> String {
    match other {
        Some(other) => format!(
            "{what} ({}): {}{}",
            names(other, &other.choice.order),
            tpot_against(other.choice.tpot_ms, chosen.choice.tpot_ms),
            ttft(other.choice.ttft_ms)
        ),
        None => format!("{what}: they have no room"),
    }
}

fn alternatives(chosen: &Chosen<'_>, not_chosen: &mut Vec<String>) {
    let choice = &chosen.choice;
    // One worker passes its layers in one round.
    let others = choice.alternatives.iter();
    let others = others.filter(|other| other.order.len() > 1 || other.rounds == 1);
    for other in others.take(MOST_ALTERNATIVES) {
        let rounds = match other.rounds {
            1 => "once around".to_owned(),
            rounds => format!("{rounds} times around"),
        };
        not_chosen.push(format!(
            "{} over {}, {rounds}: {}{}",
            match other.order.len() {
                1 => "one worker",
                _ => "piped ring",
            },
            names(chosen, &other.order),
            tpot_against(other.tpot_ms, choice.tpot_ms),
            ttft(other.ttft_ms)
        ));
    }
}
