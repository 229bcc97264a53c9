//! Plans that leave other programs the memory that they took while a node was watched.
//!
//! A plan lasts longer than the moment that it is made in: what other programs of a node took for a while, they may take
//! again. So a plan does without it where it can, and says so where it cannot.

use hearth_crds::{
    InferencePlanSpec, MemoryProfile, NodeProfileStatus, PlanStrategy, format_bytes,
};

use super::plan_with;
use crate::error::PlanError;
use crate::input::PlanInput;

/// Computes the plan.
///
/// Pure and deterministic; the order of `profiles` does not matter. `endpoint` of each rank is `None`: the executor
/// fills it in before publishing the plan.
///
/// Of a node's memory it counts on the least that was available while the node was watched; on what is available now only
/// where there is no plan otherwise, or one that would read weights from a disk or over more nodes for it.
///
/// # Errors
/// [`PlanError`] with the numbers that do not fit and a change that has been tried and does.
pub fn plan(input: &PlanInput<'_>) -> Result<InferencePlanSpec, PlanError> {
    if input.profiles.iter().all(|node| taken_bytes(node) == 0) {
        return plan_with(input);
    }
    let prudent: Vec<NodeProfileStatus> = input.profiles.iter().map(without_taken).collect();
    let prudent = PlanInput {
        profiles: &prudent,
        ..*input
    };
    let left = plan_with(&prudent).ok();
    let now = match &left {
        Some(left) if is_at_home(left) => None,
        // A plan that is slower at all times is too much for what happens now and then.
        Some(_) => plan_with(input).ok().filter(is_at_home),
        None => Some(plan_with(input)?),
    };
    if let (None, Some(mut plan)) = (&now, left) {
        let told = told(input, &plan, |bytes, of| {
            format!("{bytes} of the memory {of}: they are left to them")
        });
        plan.why.extend(told);
        return Ok(plan);
    }
    let mut plan = match now {
        Some(plan) => plan,
        None => plan_with(input)?,
    };
    let told = told(input, &plan, |bytes, of| {
        format!(
            "warning: {bytes} of the memory {of}: the plan counts on them too, since it would not fit otherwise, or be slower at all times"
        )
    });
    plan.why.extend(told);
    Ok(plan)
}

/// Whether one node at a time holds all weights that it computes with.
fn is_at_home(plan: &InferencePlanSpec) -> bool {
    let mut ranks = plan.ranks.iter();
    plan.strategy == PlanStrategy::Hybrid && ranks.all(|rank| rank.disk_weight_bytes() == 0)
}

/// Bytes that other programs took for a while: what is available now and was not at all times. A tenth of the memory comes
/// and goes on any machine.
fn taken_bytes(node: &NodeProfileStatus) -> u64 {
    let MemoryProfile {
        total_bytes,
        available_bytes,
        least_available_bytes,
        ..
    } = node.memory;
    let least = least_available_bytes.unwrap_or(available_bytes);
    let taken = available_bytes.saturating_sub(least);
    match taken > total_bytes / 10 {
        true => taken,
        false => 0,
    }
}

/// The node with so much less memory.
fn without_taken(node: &NodeProfileStatus) -> NodeProfileStatus {
    let mut node = node.clone();
    let before = node.memory.available_bytes;
    let after = before - taken_bytes(&node);
    node.memory.available_bytes = after;
    for numa in &mut node.numa_nodes {
        let free = u128::from(numa.free_bytes) * u128::from(after) / u128::from(before.max(1));
        numa.free_bytes = u64::try_from(free).unwrap_or(u64::MAX);
    }
    node
}

/// A sentence for each node of the plan of which others took memory, made of the bytes and of whose they were.
fn told(
    input: &PlanInput<'_>,
    plan: &InferencePlanSpec,
    sentence: impl Fn(String, String) -> String,
) -> Vec<String> {
    let has_ranks = |node: &&NodeProfileStatus| plan.ranks.iter().any(|it| it.node == node.node);
    let nodes = input.profiles.iter().filter(has_ranks);
    let mut taken: Vec<(&NodeProfileStatus, u64)> = nodes
        .map(|node| (node, taken_bytes(node)))
        .filter(|(_, bytes)| *bytes > 0)
        .collect();
    taken.sort_by(|(a, _), (b, _)| a.node.cmp(&b.node));
    let told = taken.into_iter().map(|(node, bytes)| {
        let of = format!(
            "of {} were taken by other programs within the last {}",
            node.node,
            span(node.memory.least_over_seconds)
        );
        sentence(format_bytes(bytes), of)
    });
    told.collect()
}

/// Seconds in words: `day`, `3 hours`, `20 minutes`.
fn span(seconds: u32) -> String {
    let of = |count: u32, unit: &str| match count {
        0 | 1 => unit.to_owned(),
        count => format!("{count} {unit}s"),
    };
    match seconds / 60 {
        minutes @ 0..=59 => of(minutes, "minute"),
        minutes @ 60..=1439 => of(minutes / 60, "hour"),
        minutes => of(minutes / 1440, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::span;

    #[test]
    fn spans_are_told_in_the_largest_unit() {
        for (seconds, told) in [
            (0, "minute"),
            (150, "2 minutes"),
            (3600, "hour"),
            (86_399, "23 hours"),
            (86_400, "day"),
        ] {
            assert_eq!(span(seconds), told);
        }
    }
}
