//! What is read of a Pod's copy of the plan.

use hearth_controller_core::observed::SecondRank;
use serde::Deserialize;

/// The part of a Pod's copy of the plan that covers CPUs and GPUs not shown by any request.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Slice {
    generation: u64,
    ranks: Vec<SliceRank>,
}

/// A rank in a Pod's copy of the plan.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SliceRank {
    name: String,
    in_pod_of: Option<String>,
    pub(super) cpus: Vec<u32>,
    pub(super) pinning: String,
    pub(super) claims_gpus: bool,
    pub(super) gpu_uuids: Vec<String>,
}

/// Generation and ranks of a Pod's copy of the plan.
pub(super) fn read_slice(json: &str) -> (u64, SliceRank, Option<SecondRank>) {
    let slice: Slice = serde_json::from_str(json).unwrap_or_default();
    let mut ranks = slice.ranks.into_iter();
    let first = ranks.next().unwrap_or_default();
    let second = ranks
        .next()
        .and_then(|rank| SecondRank::named(rank.name, &first.name, rank.in_pod_of.as_deref()));
    (slice.generation, first, second)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_stage_is_the_second_rank_of_the_pod_that_its_plan_names_alone() {
        let second = |first: &str| {
            let ranks = json!([{"name": first}, {"name": "stage-0", "inPodOf": "decode-0"}]);
            let slice = json!({"generation": 3, "ranks": ranks}).to_string();
            read_slice(&slice).2.map(|second| second.rank)
        };
        assert_eq!(second("decode-0").as_deref(), Some("stage-0"));
        assert_eq!(second("prefill-0"), None, "the head is told of it");
    }
}
