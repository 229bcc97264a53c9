//! A plan as a person reads it.

use comfy_table::{ContentArrangement, Table, presets};
use hearth_crds::{InferencePlanSpec, PlanRank, PlanRole, ResidencyPolicy};

use hearth_planner::format_cpu_list;

use crate::ui::{bytes, milliseconds};

/// The plan in a few words.
pub(crate) fn headline(plan: &InferencePlanSpec) -> String {
    let mut nodes: Vec<&str> = plan.ranks.iter().map(|rank| rank.node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    format!(
        "{} on {}, TTFT {} at {} tokens, TPOT {}",
        format!("{:?}", plan.strategy).to_lowercase(),
        nodes.join(", "),
        milliseconds(plan.predicted.ttft_ms),
        plan.predicted.ttft_prompt_tokens,
        milliseconds(plan.predicted.tpot_ms),
    )
}

/// One line a rank.
pub(crate) fn ranks(plan: &InferencePlanSpec) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "ROLE",
        "RANK",
        "NODE",
        "CPUS",
        "NUMA",
        "DEVICE",
        "WEIGHTS",
        "KV",
        "PREDICTED",
    ]);
    let mut copies: Vec<&str> = Vec::new();
    for rank in &plan.ranks {
        let weights = weights(rank, copies.contains(&rank.node.as_str()));
        if rank.residency.is_some() {
            copies.push(&rank.node);
        }
        table.add_row([
            rank.role.as_str().to_owned(),
            rank.index.to_string(),
            rank.node.clone(),
            format_cpu_list(&rank.cpus),
            if rank.numa_nodes.is_empty() {
                "any".to_owned()
            } else {
                format_cpu_list(&rank.numa_nodes)
            },
            rank.device.clone(),
            weights,
            rank.kv
                .as_ref()
                .map_or_else(|| "-".to_owned(), |kv| bytes(kv.memory_bytes)),
            predicted(rank),
        ]);
    }
    let text = table.to_string();
    text.lines()
        .map(str::trim_end)
        .collect::<Vec<_>>()
        .join("\n")
}

/// The whole plan: ranks, why, and what was not chosen.
pub(crate) fn plan(plan: &InferencePlanSpec) -> String {
    let mut text = format!(
        "plan {}: {}\n\n{}\n",
        plan.generation,
        headline(plan),
        ranks(plan)
    );
    for (title, lines) in [("Why", &plan.why), ("Not chosen", &plan.not_chosen)] {
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}\n"));
            for line in lines {
                text.push_str(&format!("  {line}\n"));
            }
        }
    }
    text
}

fn weights(rank: &PlanRank, copy_exists: bool) -> String {
    match &rank.residency {
        None => "-".to_owned(),
        Some(_) if copy_exists => "same copy".to_owned(),
        Some(residency) => match residency.policy {
            ResidencyPolicy::Resident => format!("mapped {}", bytes(residency.weight_bytes)),
            ResidencyPolicy::MmapPrefetch => {
                format!(
                    "{} of {} at a time",
                    bytes(residency.budget_bytes),
                    bytes(residency.weight_bytes)
                )
            }
        },
    }
}

fn predicted(rank: &PlanRank) -> String {
    let Some(predicted) = &rank.predicted else {
        return "-".to_owned();
    };
    match (
        rank.role,
        predicted.ttft_ms,
        predicted.prompt_tokens,
        predicted.tpot_ms,
    ) {
        (PlanRole::Prefill, Some(ttft_ms), Some(tokens), _) => {
            format!("TTFT {} at {tokens} tokens", milliseconds(ttft_ms))
        }
        (_, _, _, Some(tpot_ms)) => format!("TPOT {} at batch 1", milliseconds(tpot_ms)),
        _ => format!("{:.0} tokens/s", predicted.tokens_per_second),
    }
}
