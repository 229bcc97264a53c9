//! Sentences that plans of every topology have.

use std::collections::BTreeMap;

use hearth_crds::{
    ModelFacts, NodeProfileStatus, ObjectivesSpec, PlanPrediction, PlanRank, PlanRole,
    STREAMED_DENSE_VERSION,
};

/// How the sentence about a ring of a single node begins.
pub(crate) const RING_OF_ONE_NODE: &str = "piped ring over the CPUs and GPUs";
/// Said where one node's CPUs, or one GPU, are all that could be in a ring.
pub(crate) const NO_RING: &str =
    "piped ring: it takes two members, each a GPU or the CPUs of a node, and there is one";

/// Nodes of the gateways if there are several; a single one is on the first decode rank's node.
pub(crate) fn gateways(ranks: &[PlanRank], why: &mut Vec<String>) {
    let all: Vec<&PlanRank> = ranks
        .iter()
        .filter(|rank| rank.role == PlanRole::Gateway)
        .collect();
    let mut nodes: Vec<&str> = all.iter().map(|rank| rank.node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    if all.len() > 1 {
        why.push(format!(
            "{} gateways on {}: while one of them is missing, the others answer new requests",
            all.len(),
            nodes.join(", ")
        ));
    }
}

/// Warns of nodes with ranks that were busy while they were measured, and of nodes whose workers are of an earlier version.
pub(crate) fn moment(
    nodes: &[&NodeProfileStatus],
    facts: &ModelFacts,
    ranks: &[PlanRank],
    why: &mut Vec<String>,
) {
    let is_moe = facts.experts > 0;
    let mut busy: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for node in nodes {
        if is_moe && !node.gpus.is_empty() && node.reads_up_to() < STREAMED_DENSE_VERSION {
            why.push(format!(
                "warning: the workers' image, as the agent of {} has it, is of an earlier version: dense modules that stream, and experts that exceed memory beside a GPU, are not planned",
                node.node
            ));
        }
        if let Some(percent) = node.busy_percent
            && ranks.iter().any(|rank| rank.node == node.node)
        {
            busy.entry(percent).or_default().push(&node.node);
        }
    }
    for (percent, nodes) in busy {
        let (were, them) = match nodes.len() {
            1 => ("it was", "it"),
            _ => ("they were", "them"),
        };
        why.push(format!(
            "warning: other programs had {percent} % of the CPUs of {} while {were} measured: predictions for {them} are too slow",
            nodes.join(", ")
        ));
    }
}

/// Warns of objectives that the prediction misses.
pub(crate) fn objectives(
    asked: &ObjectivesSpec,
    predicted: &PlanPrediction,
    why: &mut Vec<String>,
) {
    if let Some(limit) = asked.time_to_first_token
        && predicted.ttft_ms > limit.as_millis_f64()
    {
        why.push(format!(
            "warning: objective timeToFirstToken {limit} will be missed: predicted {} at {} tokens",
            ms(predicted.ttft_ms),
            predicted.ttft_prompt_tokens
        ));
    }
    if let Some(limit) = asked.time_per_output_token
        && predicted.tpot_ms > limit.as_millis_f64()
    {
        why.push(format!(
            "warning: objective timePerOutputToken {limit} will be missed: predicted {} at batch 1",
            ms(predicted.tpot_ms)
        ));
    }
}

/// Milliseconds in readable form: `0.6 ms`, `41 ms`, `1.4 s`.
pub(crate) fn ms(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}
