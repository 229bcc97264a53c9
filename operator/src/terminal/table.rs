//! Tables, and plans formatted for people.

use clap::ValueEnum;
use comfy_table::{ContentArrangement, Table, presets};
use hearth_crds::{InferencePlanSpec, PlanRank, PlanRole, RankDevice, ResidencyPolicy};
use hearth_planner::format_cpu_list;
use serde::Serialize;

use crate::terminal::ui::{self, bytes, milliseconds};

/// How a table may be printed instead.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people
    #[default]
    Table,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

impl OutputFormat {
    /// Prints `data` for programs, or the lines of `table` for people.
    ///
    /// # Errors
    /// Those of [`ui::print_data`].
    pub(crate) fn print(
        self,
        data: &impl Serialize,
        table: impl FnOnce() -> String,
    ) -> anyhow::Result<()> {
        let text = match self {
            Self::Table => table(),
            Self::Json => serde_json::to_string_pretty(data)?,
            Self::Yaml => serde_norway::to_string(data)?,
        };
        ui::print_data(&format!("{}\n", text.trim_end_matches('\n')))
    }
}

/// Columns without lines between them. What would break the line of a cell is shown as a space, except in the last one: nothing there
/// looks like another row.
pub(crate) fn plain<R: IntoIterator<Item = String>>(
    header: &[&str],
    rows: impl Iterator<Item = R>,
) -> String {
    let is_break = |sign: char| {
        let is_line = matches!(sign, '\n' | '\r' | '\u{b}' | '\u{c}');
        is_line || matches!(sign, '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().copied());
    for row in rows {
        let mut cells: Vec<String> = row.into_iter().collect();
        if let Some((_, before)) = cells.split_last_mut() {
            for cell in before {
                *cell = cell.replace(is_break, " ");
            }
        }
        table.add_row(cells);
    }
    let text = table.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n")
}

/// Time since a moment, in seconds since 1970, in the largest unit that fits: `3d`, `2m`.
pub(crate) fn age(since_s: i64) -> String {
    let seconds = jiff::Timestamp::now().as_second().saturating_sub(since_s);
    match seconds.max(0) {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7200 => format!("{}m", seconds / 60),
        seconds @ 7200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// One-line summary of the plan.
pub(crate) fn headline(plan: &InferencePlanSpec) -> String {
    format!(
        "{} on {}, TTFT {} at {} tokens, TPOT {}",
        plan.topology(),
        plan.nodes().join(", "),
        milliseconds(plan.predicted.ttft_ms),
        plan.predicted.ttft_prompt_tokens,
        milliseconds(plan.predicted.tpot_ms),
    )
}

/// Table with one line per rank.
pub(crate) fn ranks(plan: &InferencePlanSpec) -> String {
    let header = [
        "ROLE",
        "RANK",
        "NODE",
        "CPUS",
        "NUMA",
        "DEVICE",
        "WEIGHTS",
        "KV",
        "PREDICTED",
    ];
    let mut copies: Vec<&str> = Vec::new();
    let rows = plan.ranks.iter().map(|rank| {
        let weights = weights(rank, copies.contains(&rank.node.as_str()));
        if rank.host_weight_bytes() > 0 && !rank.has_expert_budget() {
            copies.push(&rank.node);
        }
        [
            rank.role.as_str().to_owned(),
            rank.index.to_string(),
            rank.node.clone(),
            format_cpu_list(&rank.cpus),
            if rank.numa_nodes.is_empty() {
                "any".to_owned()
            } else {
                format_cpu_list(&rank.numa_nodes)
            },
            device(rank),
            weights,
            rank.kv
                .as_ref()
                .map_or_else(|| "-".to_owned(), |kv| bytes(kv.memory_bytes)),
            predicted(rank),
        ]
    });
    plain(&header, rows)
}

/// The whole plan: ranks, reasons, and alternatives not chosen.
pub(crate) fn plan(plan: &InferencePlanSpec) -> String {
    let mut text = format!(
        "plan {}: {}\n\n{}\n",
        plan.generation,
        headline(plan),
        ranks(plan)
    );
    text.push_str(&reasons(plan));
    text
}

/// Why the plan is as it is, and what was not chosen; each with a blank line before it.
pub(crate) fn reasons(plan: &InferencePlanSpec) -> String {
    let mut text = String::new();
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

/// `cpu`, or the start of a GPU's UUID, enough to tell GPUs apart, with the rank's share of its memory.
pub(crate) fn device(rank: &PlanRank) -> String {
    match rank.device() {
        RankDevice::Cpus => RankDevice::Cpus.name().to_owned(),
        RankDevice::Gpu(uuid) => {
            let begin: Vec<&str> = uuid.splitn(3, '-').take(2).collect();
            format!("{} {}", begin.join("-"), bytes(rank.gpu_memory_bytes))
        }
    }
}

fn weights(rank: &PlanRank, copy_exists: bool) -> String {
    match &rank.residency {
        None => "-".to_owned(),
        Some(residency) => match residency.policy {
            ResidencyPolicy::StreamLoading => format!(
                "copied {}, streamed {} by {}{} slots",
                bytes(residency.weight_bytes.saturating_sub(residency.host_bytes)),
                bytes(residency.host_bytes),
                residency.ring_slots.unwrap_or(0),
                match residency.ring_lengths.last() {
                    Some(shortest) => format!(" to {}", shortest.slots),
                    None => String::new(),
                }
            ),
            ResidencyPolicy::HostExperts => format!(
                "copied {}, on CPUs {}{}",
                bytes(residency.weight_bytes.saturating_sub(residency.host_bytes)),
                match residency.host_budget_bytes {
                    Some(at_a_time) => format!("{} at a time of ", bytes(at_a_time)),
                    None => String::new(),
                },
                bytes(residency.host_bytes)
            ),
            ResidencyPolicy::Resident | ResidencyPolicy::MmapPrefetch if rank.is_on_gpu() => {
                format!("copied {}", bytes(residency.weight_bytes))
            }
            ResidencyPolicy::Resident | ResidencyPolicy::MmapPrefetch if copy_exists => {
                "same copy".to_owned()
            }
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
    // A follower takes no requests itself.
    if let Some(peers) = rank.peers.as_ref().filter(|peers| peers.place > 0) {
        return format!("reads with {}", peers.head);
    }
    let Some(predicted) = &rank.predicted else {
        return "-".to_owned();
    };
    let ttft = || {
        let (ms, tokens) = (predicted.ttft_ms?, predicted.prompt_tokens?);
        Some(format!("TTFT {} at {tokens} tokens", milliseconds(ms)))
    };
    let tpot = || {
        let ms = predicted.tpot_ms?;
        Some(format!("TPOT {} at batch 1", milliseconds(ms)))
    };
    let latency = match rank.role {
        PlanRole::Gateway | PlanRole::Stage => None,
        PlanRole::Prefill => ttft(),
        PlanRole::Decode => tpot(),
    };
    latency.unwrap_or_else(|| format!("{:.0} tokens/s", predicted.tokens_per_second))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn no_cell_looks_like_another_row() {
        let row = ["http://nas/m\nforged\u{2028}x\ry", "why\n  remedy"].map(str::to_owned);
        let text = plain(&["MODEL", "MESSAGE"], [row].into_iter());
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[1]
                .trim_start()
                .starts_with("http://nas/m forged x y  "),
            "{text}"
        );
        assert_eq!(lines[2].trim(), "remedy");
    }

    /// A worker as written in a plan.
    fn rank(role: &str, device: &Value) -> Value {
        let mut rank = json!({
            "name": format!("{}-0", role.to_lowercase()), "role": role, "index": 0, "node": "here", "cpus": [0, 1],
            "numaNodes": [], "threads": 2, "pinning": "Shared", "maxBatch": 2, "chunkTokens": 256, "scratchBytes": 0,
            "residency": {"policy": "Resident", "weightBytes": 3 << 20, "budgetBytes": 3 << 20},
        });
        for (name, value) in device.as_object().into_iter().flatten() {
            rank[name] = value.clone();
        }
        rank
    }

    #[test]
    fn a_rank_whose_experts_are_on_the_host_says_what_is_copied_and_what_is_not() {
        let device = |policy: &str, slots: &str| {
            json!({"device": "VIRTUAL-0", "gpuUuids": ["VIRTUAL-0"], "gpuMemoryBytes": 5_u64 << 30, "residency":
                {"policy": policy, "weightBytes": 3 << 20, "budgetBytes": 2 << 20, "hostBytes": 2 << 20, slots: 4}})
        };
        for (rank, says) in [
            (
                rank("Prefill", &device("StreamLoading", "ringSlots")),
                "copied 1 MiB, streamed 2 MiB by 4 slots",
            ),
            (
                rank("Decode", &device("HostExperts", "cacheSlots")),
                "copied 1 MiB, on CPUs 2 MiB",
            ),
        ] {
            let rank: PlanRank = serde_json::from_value(rank).expect("a rank");
            assert_eq!(weights(&rank, true), says);
        }
    }

    #[test]
    fn a_follower_of_peers_says_with_whom_it_reads() {
        let peers = |place: u32| {
            json!({"device": "cpu",
                "peers": {"head": "prefill-0", "place": place, "ranks": 2, "experts": "SmallEp"},
                "predicted": {"ttftMs": 1.0, "promptTokens": 64, "tokensPerSecond": 1.0}})
        };
        for (rank, says) in [
            (rank("Stage", &peers(1)), "reads with prefill-0"),
            (rank("Prefill", &peers(0)), "TTFT 1.0 ms at 64 tokens"),
        ] {
            let rank: PlanRank = serde_json::from_value(rank).expect("a rank");
            assert_eq!(predicted(&rank), says);
        }
    }

    #[test]
    fn a_rank_on_a_gpu_says_which_and_how_much_of_it() {
        let uuid = "GPU-8f3c0d11-2222-3333-4444-555555555555";
        let gpu =
            json!({"device": uuid, "gpus": 1, "gpuUuids": [uuid], "gpuMemoryBytes": 5_u64 << 30});
        let plan = json!({
            "generation": 1, "deployment": {"name": "demo", "namespace": "default"}, "strategy": "Hybrid",
            "model": {"servedName": "m", "path": "/m", "source": "m", "architecture": "qwen3", "parameterCount": 1,
                "weightBytes": 3 << 20, "contextLength": 16, "layers": 1, "kvBytesPerToken": 1, "dtype": "BF16"},
            "ranks": [rank("Prefill", &gpu), rank("Decode", &json!({"device": "cpu"}))],
            "routing": {"chunkedBelowTokens": 32, "maxQueue": 1, "queueTimeoutMs": 1},
            "predicted": {"ttftMs": 1.0, "ttftPromptTokens": 1, "tpotMs": 1.0, "tokensPerSecond": 1.0},
            "why": [], "notChosen": [],
        });
        let plan: InferencePlanSpec = serde_json::from_value(plan).expect("a plan");
        let table = ranks(&plan);
        let line = |role: &str| table.lines().find(|line| line.trim().starts_with(role));
        let (prefill, decode) = (
            line("prefill").expect("prefill"),
            line("decode").expect("decode"),
        );
        assert!(prefill.contains(" GPU-8f3c0d11 5 GiB "), "{table}");
        assert!(prefill.contains(" copied 3 MiB "), "{table}");
        // A rank on CPUs cannot share the copy on the GPU.
        assert!(
            decode.contains(" cpu ") && decode.contains(" mapped 3 MiB "),
            "{table}"
        );
    }
}
