//! Models behind a URL and of a hub: the nodes that should have one, and its progress there.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use hearth_crds::{format_bytes, format_remaining};

use crate::build::{model_key, source_digest};
use crate::candidates::{Candidates, is_lost};
use crate::cause::{Cause, quoted};
use crate::model::{Model, ModelState, ModelStep, More, known, nowhere};
use crate::observed::{FetchView, Observed, StoredCopy};
use crate::plan_record::source_digest_of;

/// Maximum number of nodes that are tried one after another while a model cannot be fetched.
const FIRST_FETCHES: usize = 4;
/// Interval at which agents are asked about a fetch.
const FETCH_POLL: Duration = Duration::from_secs(2);

/// Progress of a fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Download {
    pub(crate) bytes: u64,
    pub(crate) total_bytes: u64,
    /// Rate over the last few seconds; 0 if nothing arrives.
    pub(crate) bytes_per_second: u64,
    /// The node that gives it; `None` for its source.
    pub(crate) from_node: Option<String>,
}

impl Download {
    /// A model that is there.
    fn all_of(bytes: u64) -> Self {
        Self {
            bytes,
            total_bytes: bytes,
            bytes_per_second: 0,
            from_node: None,
        }
    }
}

/// A model behind a URL: fetched on one node to learn its facts, then wherever a plan wants it.
pub(crate) fn fetched(
    observed: &Observed,
    candidates: &Candidates,
    told: Option<&Model>,
    more: Option<&More<'_>>,
) -> ModelStep {
    let in_use = in_use(observed);
    if let (Some(model), None) = (told, more) {
        let mut step = ModelStep::of(ModelState::Known(Box::new(model.clone())));
        step.download = here(observed, &in_use);
        step.fetch_on = in_use;
        return step;
    }
    let (told, wanted) = match more {
        Some(more) => (Some(more.known), more.draft.clone()),
        None => (None, first_fetch(observed, candidates)),
    };
    let mut step = ModelStep::of(ModelState::Unknown(nowhere(candidates)));
    step.state = fetch_verdict(observed, &wanted, told, candidates);
    step.fetching = furthest(observed, &wanted).map(|(_, download)| download);
    step.download = here(observed, &wanted).or_else(|| step.fetching.clone());
    step.look_again = (!wanted.is_empty()).then_some(FETCH_POLL);
    step.fetch_on = wanted;
    for name in in_use {
        if !step.fetch_on.contains(&name) {
            step.fetch_on.push(name);
        }
    }
    step
}

/// Nodes on which a plan for the source, the running one or an earlier one, has workers.
fn in_use(observed: &Observed) -> Vec<String> {
    let deployment = &observed.deployment;
    let source = &deployment.spec.model.source;
    let digest = source_digest(source, model_key(deployment, source).as_deref());
    let plans = observed.plans.iter();
    let of_source = plans.filter(|plan| source_digest_of(plan) == digest);
    let ranks = of_source.flat_map(|plan| &plan.spec.ranks);
    let nodes: BTreeSet<&String> = ranks.map(|rank| &rank.node).collect();
    let here = nodes.into_iter().filter(|name| !is_lost(observed, name));
    here.cloned().collect()
}

/// Nodes on which the model is fetched to learn its facts: those that have it or are fetching it come before the node
/// with the most memory; the next one follows if a node cannot fetch it. Of agents that have not answered, as those of an operator
/// that has just started, the nodes' profiles say it.
fn first_fetch(observed: &Observed, candidates: &Candidates) -> Vec<String> {
    let rank = |name: &&String| {
        let stored = observed.stored.get(*name);
        let progress = match (observed.fetches.get(*name), stored) {
            (Some(FetchView::Failed(_)), _) => 2,
            (Some(FetchView::Ready { .. }), _) => 0,
            (Some(FetchView::Fetching { .. }), _) => 1,
            (Some(FetchView::Unknown(_)) | None, Some(StoredCopy::Whole)) => 0,
            (Some(FetchView::Unknown(_)) | None, Some(StoredCopy::Coming)) => 1,
            (Some(FetchView::Unknown(_)) | None, None) => 2,
        };
        let memory_bytes = candidates.free[*name].memory.available_bytes;
        (progress, Reverse(memory_bytes))
    };
    let mut names: Vec<&String> = candidates.free.keys().collect();
    names.sort_by_key(rank);
    let mut asked = Vec::new();
    for name in names.into_iter().take(FIRST_FETCHES) {
        asked.push(name.clone());
        let view = observed.fetches.get(name);
        if !matches!(view, Some(FetchView::Failed(_) | FetchView::Unknown(_))) {
            break;
        }
    }
    asked
}

/// Finds the model's state: known once it is on all of the `asked` nodes, or on one while nothing is known yet.
fn fetch_verdict(
    observed: &Observed,
    asked: &[String],
    told: Option<&Model>,
    candidates: &Candidates,
) -> ModelState {
    let mut nodes = told
        .and_then(|model| model.nodes.clone())
        .unwrap_or_default();
    let mut facts = told.map(|model| model.facts.clone());
    let mut is_waiting = false;
    let (mut failed, mut silent) = (Vec::new(), Vec::new());
    for name in asked {
        match observed.fetches.get(name) {
            Some(FetchView::Ready { facts: read, .. }) => {
                nodes.insert(name.clone());
                facts.get_or_insert_with(|| (**read).clone());
            }
            Some(FetchView::Fetching { .. }) => is_waiting = true,
            Some(FetchView::Failed(why)) => failed.push(format!("{name}: {}", quoted(why))),
            Some(FetchView::Unknown(why)) => silent.push(format!("{name}: {}", quoted(why))),
            None => {
                is_waiting = true;
                silent.push(format!("{name}: its agent is being asked"));
            }
        }
    }
    // A plan that needs two nodes is not made when only one of them has it.
    let has_more = told.is_none_or(|told| told.nodes.as_ref() != Some(&nodes));
    if let (Some(facts), true, false) = (facts, has_more, is_waiting) {
        let deployment = &observed.deployment;
        let key = model_key(deployment, &deployment.spec.model.source);
        return known(facts, Some(nodes), key);
    }
    if let Some(mut progress) = progress(observed, asked) {
        if !failed.is_empty() {
            progress += &format!("; it failed on {}", failed.join("; "));
        }
        return ModelState::Unknown(Cause::waiting("Downloading", progress));
    }
    let may_come = is_waiting || failed.len() < FIRST_FETCHES;
    let cause = if let (Some(first), true) = (silent.first(), may_come) {
        Cause::waiting(
            "WaitingForAgent",
            format!("the model is to be fetched on {first}"),
        )
    } else if !failed.is_empty() {
        Cause::trouble(
            "DownloadFailed",
            format!("the model cannot be fetched; {}", failed.join("; ")),
        )
    } else {
        nowhere(candidates)
    };
    ModelState::Unknown(cause)
}

/// The fetch that is furthest along.
fn furthest<'a>(observed: &'a Observed, asked: &'a [String]) -> Option<(&'a str, Download)> {
    let mut best: Option<(&str, Download)> = None;
    for name in asked {
        if let Some(FetchView::Fetching {
            bytes,
            total_bytes,
            bytes_per_second,
            from_node,
        }) = observed.fetches.get(name)
            && best.as_ref().is_none_or(|(_, best)| *bytes > best.bytes)
        {
            let download = Download {
                bytes: *bytes,
                total_bytes: *total_bytes,
                bytes_per_second: *bytes_per_second,
                from_node: from_node.clone(),
            };
            best = Some((name, download));
        }
    }
    best
}

/// Whole percent of a download; `None` while its size is unknown.
pub(crate) fn percent(download: &Download) -> Option<u32> {
    let percent =
        (u128::from(download.bytes) * 100).checked_div(u128::from(download.total_bytes))?;
    u32::try_from(percent.min(100)).ok()
}

/// Describes the progress; changes with each whole percent, not with each byte.
fn progress(observed: &Observed, asked: &[String]) -> Option<String> {
    let (node, download) = furthest(observed, asked)?;
    let Some(percent) = percent(&download) else {
        return Some(format!("the download has begun on {node}"));
    };
    let giver = download.from_node.as_ref();
    let from = giver.map_or_else(String::new, |giver| format!(" from {giver} over the LAN"));
    let words = fetch_words(observed, &download).unwrap_or_default();
    let rate = words.find(", ").map_or("", |at| &words[at..]);
    Some(format!(
        "{} of {} on {node}{from}{rate}",
        percent_words(percent),
        format_bytes(download.total_bytes),
    ))
}

/// Share, giver, rate and remaining time of a download that is not complete: `43 % from attic, 110.5 MiB/s, 3 min left`, without
/// a giver if the source is. They change with each whole percent, as the status does, not with each byte.
pub(crate) fn fetch_words(observed: &Observed, download: &Download) -> Option<String> {
    let percent = percent(download).filter(|_| download.bytes < download.total_bytes)?;
    let giver = download.from_node.as_ref();
    let giver = giver.map_or_else(String::new, |giver| format!(" from {giver}"));
    let mut words = percent_words(percent) + &giver;
    let status = observed.deployment.status.as_ref();
    let told = status.and_then(|status| status.model.as_ref());
    // Until a rate is known, the first one is waited for.
    let same = told.and_then(|told| told.fetch.clone());
    let has_rate = |same: &String| {
        let rest = same.strip_prefix(&words);
        rest.is_some_and(|rest| rest.starts_with(", "))
    };
    if let Some(same) = same.filter(has_rate) {
        return Some(same);
    }
    if download.bytes_per_second > 0 {
        words += &format!(", {}/s", format_bytes(download.bytes_per_second));
    }
    let (bytes, total_bytes) = (download.bytes, download.total_bytes);
    if let Some(left) = format_remaining(bytes, total_bytes, download.bytes_per_second) {
        words += &format!(", {left} left");
    }
    Some(words)
}

fn percent_words(percent: u32) -> String {
    format!("{percent} %")
}

/// The model on one of the nodes that have it.
fn here(observed: &Observed, asked: &[String]) -> Option<Download> {
    asked
        .iter()
        .find_map(|name| match observed.fetches.get(name) {
            Some(FetchView::Ready { bytes, .. }) => Some(Download::all_of(*bytes)),
            _ => None,
        })
}
