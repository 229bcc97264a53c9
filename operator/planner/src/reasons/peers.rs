//! Sentences about GPUs that read prompts together.

use hearth_crds::{
    DurationText, PlanExpertParallel, PlanRank, PlanRole, PlanRouting, format_bytes,
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
    why.extend(when(draft, routing, head));
}

fn group(draft: &Draft<'_>, members: &[&PlanRank]) -> Option<String> {
    let peers = members.first()?.peers.as_ref()?;
    let each = members.iter().map(|rank| {
        let gpu = draft.slot_of(rank).map_or("-", |slot| &slot.gpu.name);
        format!("{} on {gpu} of {}", rank.name, rank.node)
    });
    let follower = members.last()?.residency.as_ref()?;
    let experts = draft.demand.experts_of_share(peers.ranks);
    let of = draft.demand.facts.experts;
    let way = match peers.experts {
        PlanExpertParallel::SmallEp => {
            "all rows go to all of them and come back summed (SmallEP)".to_owned()
        }
        PlanExpertParallel::Ep => format!(
            "rows go to the GPUs of the {} experts that a token chooses (EP), which is less than all rows to all {} GPUs",
            draft.demand.facts.experts_per_token, peers.ranks
        ),
    };
    Some(format!(
        "{} GPUs read prompts together: {}; each computes its part of the tokens and streams at most {experts} of a layer's {of} experts, a follower {} from its node's memory; {way}",
        peers.ranks,
        each.collect::<Vec<_>>().join(", "),
        format_bytes(follower.host_bytes),
    ))
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

fn when(draft: &Draft<'_>, routing: &PlanRouting, head: &PlanRank) -> Option<String> {
    let quiet = std::time::Duration::from_millis(routing.together_after_quiet_ms?);
    let prefill = &draft.input.spec.prefill;
    let name = &head.name;
    let without = format!("without all of them {name} reads prompts alone");
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
