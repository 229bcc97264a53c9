//! Sentences about GPUs that read prompts together.

use hearth_crds::{
    DurationText, PlanExpertParallel, PlanKvGather, PlanPeers, PlanRank, PlanRole, PlanRouting,
    format_bytes,
};

use crate::draft::{Draft, ranks_of};
use crate::reasons::ms;

/// Which ranks read prompts together and what each has, how long that takes, and when they do.
pub(super) fn used(
    draft: &Draft<'_>,
    ranks: &[PlanRank],
    routing: &PlanRouting,
    why: &mut Vec<String>,
) {
    let members: Vec<&PlanRank> = ranks.iter().filter(|rank| rank.peers.is_some()).collect();
    let [head, _, ..] = members.as_slice() else {
        return;
    };
    why.extend(group(draft, &members));
    why.extend(times(draft, head));
    why.extend(kv(draft, &members));
    why.extend(when(draft, routing, &members));
}

fn group(draft: &Draft<'_>, members: &[&PlanRank]) -> Option<String> {
    let peers = members.first()?.peers.as_ref()?;
    let each = members.iter().map(|rank| {
        let gpu = draft.slot_of(rank).map_or("-", |slot| &slot.gpu.name);
        format!("{} on {gpu} of {}", rank.name, rank.node)
    });
    let facts = draft.demand.facts;
    let experts = draft.demand.experts_of_share(peers.ranks);
    let of = facts.experts;
    let follower_bytes = share_bytes(draft, members.last()?)?;
    let way = match peers.experts {
        PlanExpertParallel::SmallEp => {
            "all rows go to all of them and come back summed (SmallEP)".to_owned()
        }
        PlanExpertParallel::Ep if peers.ranks > facts.experts_per_token => format!(
            "rows go to the GPUs of the {} experts that a token chooses (EP), which is less than all rows to all {} GPUs",
            facts.experts_per_token, peers.ranks
        ),
        PlanExpertParallel::Ep => format!(
            "rows go to the GPUs of the {} experts that a token chooses (EP): sums of {} GPUs would have other bits than those of one",
            facts.experts_per_token, peers.ranks
        ),
    };
    Some(format!(
        "{} GPUs read prompts together: {}; each computes its part of the tokens and streams at most {experts} of a layer's {of} experts, a follower {} from its node's memory; {way}",
        peers.ranks,
        each.collect::<Vec<_>>().join(", "),
        format_bytes(follower_bytes),
    ))
}

/// Bytes of weights that a follower reads from its node's memory for a prompt that all read: without the experts for which it
/// stands in.
fn share_bytes(draft: &Draft<'_>, rank: &PlanRank) -> Option<u64> {
    let (facts, peers) = (draft.demand.facts, rank.peers.as_ref()?);
    let host_bytes = rank.residency.as_ref()?.host_bytes;
    if !peers.stands_in {
        return Some(host_bytes);
    }
    let own = u64::from(draft.demand.experts_of_share(peers.ranks));
    let own_bytes = own * u64::from(facts.routed_layers()) * facts.expert_bytes();
    Some(host_bytes.saturating_sub(facts.bytes.routed_experts) + own_bytes)
}

/// Who reads prompts while a peer is lost.
fn without_one(members: &[&PlanRank], peers: &PlanPeers) -> String {
    let stands_in = |rank: &&&PlanRank| rank.peers.as_ref().is_some_and(|own| own.stands_in);
    let stand_ins: Vec<&str> = members
        .iter()
        .filter(stands_in)
        .map(|rank| &*rank.name)
        .collect();
    let name = &members[0].name;
    let left = (stand_ins.len() + 1).min(members.len() - 1);
    let sizes = match (peers.experts, left) {
        (PlanExpertParallel::SmallEp, 4..) => "4 or 2 of those that are left",
        (PlanExpertParallel::SmallEp, _) => "2 of those that are left",
        (PlanExpertParallel::Ep, _) => "those that are left",
    };
    match stand_ins.as_slice() {
        [] => format!("without all of them {name} reads prompts alone"),
        _ if left < 2 => format!("without one of them {name} reads prompts alone"),
        all if all.len() + 1 == members.len() => {
            format!("without one of them {sizes} read on, or {name} alone")
        }
        some => format!(
            "without one of them {sizes} read on, of {name}, {}, whose nodes have all experts in memory, or {name} alone",
            some.join(", ")
        ),
    }
}

fn times(draft: &Draft<'_>, head: &PlanRank) -> Option<String> {
    let tokens = draft.long_prompt_tokens();
    let time = draft.together(tokens)?;
    Some(format!(
        "a prompt of {tokens} tokens takes {} together, {} of copies beside {} of computation and {} between the GPUs, and {} by {} alone",
        ms(draft.together_ttft_ms(head, tokens)?),
        ms(time.copy_ms),
        ms(time.compute_ms),
        ms(time.exchange_ms),
        ms(draft.alone_ttft_ms(head, tokens)?),
        head.name
    ))
}

/// How keys and values come to all, where that is a question: some of them are on one node, and others elsewhere.
fn kv(draft: &Draft<'_>, members: &[&PlanRank]) -> Option<String> {
    let on_node = |node: &str| members.iter().filter(|rank| rank.node == node).count();
    let largest = members.iter().map(|rank| on_node(&rank.node)).max()?;
    if largest == 1 || largest == members.len() {
        return None;
    }
    let tokens = draft.long_prompt_tokens();
    let exchange_ms = |gather| Some(draft.gathered(tokens, gather)?.exchange_ms);
    let direct = ms(exchange_ms(PlanKvGather::Direct)?);
    let passed_on = ms(exchange_ms(PlanKvGather::PassedOn)?);
    Some(match members.first()?.peers.as_ref()?.kv {
        PlanKvGather::PassedOn => format!(
            "keys and values go to one GPU of each other node, which passes them on: with them {tokens} tokens take {passed_on} between the GPUs, and {direct} if each GPU sent its own to each other"
        ),
        PlanKvGather::Direct => format!(
            "keys and values go from each GPU to each other: with them {tokens} tokens take {direct} between the GPUs, and {passed_on} if each went to a node once and was passed on there"
        ),
    })
}

fn when(draft: &Draft<'_>, routing: &PlanRouting, members: &[&PlanRank]) -> Option<String> {
    let head = members.first()?;
    let quiet = std::time::Duration::from_millis(routing.together_after_quiet_ms?);
    let prefill = &draft.input.spec.prefill;
    let name = &head.name;
    let without = without_one(members, head.peers.as_ref()?);
    Some(match (quiet.is_zero(), prefill.quiet_window) {
        (true, None) => {
            format!("prompts of {name} are read together, as spec.prefill.mode says; {without}")
        }
        (true, Some(_)) => {
            format!(
                "prompts of {name} are read together, as spec.prefill.quietWindow says; {without}"
            )
        }
        (false, _) => {
            let window = DurationText::new(quiet);
            let source = match prefill.quiet_window {
                Some(_) => "as spec.prefill.quietWindow says",
                None => "the default of spec.prefill.quietWindow",
            };
            format!(
                "prompts of {name} are read together once no answer was written for {window}, {source}, and otherwise by {name} alone, so that answers are not held up; {without}"
            )
        }
    })
}

/// Devices of a plan with peers, in a few words.
pub(super) fn devices(draft: &Draft<'_>, ranks: &[PlanRank]) -> String {
    let has_gpu = ranks_of(ranks, PlanRole::Decode).any(PlanRank::is_on_gpu);
    let decode = match has_gpu {
        true => "decode has attention on a GPU and experts on CPUs",
        false => "decode on CPUs",
    };
    let peers = draft.peers();
    format!("prefill streams its experts to {peers} GPUs that read prompts together, {decode}")
}
