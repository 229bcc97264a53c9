//! Workers that the scheduler or a kubelet refuses: the nodes that refuse them, and the record of these nodes in a
//! plan that leaves them out.
//!
//! The planner considers requests, taints and labels. Whatever else the scheduler considers, such as a volume that is
//! tied to another node, or the kubelet, such as its topology policy, shows only in what they report about a Pod.
//! Nodes that refused a worker are left out of the next plan, which records them, so that the number of attempts is
//! bounded.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_crds::{InferencePlan, NodeRefusal};

use crate::age::age;
use crate::cause::{node_of, quoted, scheduler_words};
use crate::names::ANNOTATION_REFUSALS;
use crate::observed::{Observed, PodRole, PodView};
use crate::plan_record::{annotation, has_served};
use crate::rollout::ends::{Ends, is_rejected};

/// Time for which a worker is refused before its plan is reconsidered.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same while workers of another plan are on the node, which may be about to make room.
const PATIENCE_WITH_OTHERS: Duration = Duration::from_secs(150);
/// Maximum number of nodes that are left out; beyond that, the last plan stays and waits.
const MOST_NODES: usize = 4;

/// Nodes that refuse workers, each with who refused which worker, and the message.
pub(crate) type Refusals = BTreeMap<String, String>;

/// Nodes that have refused workers of `target` for long enough.
pub(crate) fn standing(observed: &Observed, target: &InferencePlan) -> Refusals {
    let refused = pods(observed, target);
    let standing = refused.filter(|(_, left)| left.is_zero());
    standing
        .map(|(pod, _)| (pod.wanted_node.clone(), words_of(pod)))
        .collect()
}

fn words_of(pod: &PodView) -> String {
    let rank = &pod.rank;
    match &pod.unschedulable {
        Some(words) if pod.node.is_empty() => {
            let words = scheduler_words(words);
            format!("the scheduler refused {rank} there ({words})")
        }
        _ => {
            let words = quoted(&pod.message);
            format!("its kubelet refused {rank} ({}: {words})", pod.reason)
        }
    }
}

/// Time until the next refusal has lasted long enough.
pub(crate) fn look_again(observed: &Observed, target: &InferencePlan) -> Option<Duration> {
    let left = pods(observed, target).map(|(_, left)| left);
    left.filter(|left| !left.is_zero()).min()
}

/// The nodes that a plan leaves out because they refused workers of earlier plans.
pub(crate) fn left_out(plan: &InferencePlan) -> Refusals {
    match &plan.spec.inputs {
        Some(inputs) => {
            let refusals = inputs.refusals.iter();
            refusals
                .map(|it| (it.node.clone(), it.message.clone()))
                .collect()
        }
        None => serde_json::from_str(annotation(plan, ANNOTATION_REFUSALS)).unwrap_or_default(),
    }
}

/// Nodes for the plan after `target` to leave out: those that `target` leaves out, or none once it has served, which
/// shows that there is no need to.
pub(crate) fn refusals_for_next(target: &InferencePlan) -> Refusals {
    match has_served(target) {
        true => Refusals::new(),
        false => left_out(target),
    }
}

/// Extensions of `told` by `new`: by all of it, then by each entry alone; without those that would leave out too many
/// nodes, or no more than before.
pub(crate) fn ways_out(told: &Refusals, new: &Refusals) -> Vec<Refusals> {
    let with = |more: &Refusals| {
        let mut all = told.clone();
        all.extend(more.clone());
        all
    };
    let single =
        |(node, words): (&String, &String)| with(&Refusals::from([(node.clone(), words.clone())]));
    let mut ways = vec![with(new)];
    ways.extend(new.iter().map(single));
    ways.retain(|way| way.len() > told.len() && way.len() <= MOST_NODES);
    ways.dedup();
    ways
}

/// Converts refusals into the form in which a plan's inputs store them.
pub(crate) fn as_inputs(refusals: &Refusals) -> Vec<NodeRefusal> {
    let refusals = refusals.iter();
    refusals
        .map(|(node, message)| NodeRefusal {
            node: node.clone(),
            message: message.clone(),
        })
        .collect()
}

/// Sentences in which a plan reports the nodes that it leaves out, one for each.
pub(crate) fn sentences(refusals: &Refusals) -> impl Iterator<Item = String> {
    let refusals = refusals.iter();
    refusals.map(|(node, told)| format!("{node} is left out: {told}"))
}

/// Workers of `target` that the scheduler refuses, or that a kubelet has rejected more than once, with the patience
/// left for each. A missing claim is not a node's fault.
fn pods<'a>(
    observed: &'a Observed,
    target: &'a InferencePlan,
) -> impl Iterator<Item = (&'a PodView, Duration)> {
    let generation = target.spec.generation;
    let is_about_node = |words: &str| {
        let words = words.to_ascii_lowercase();
        !words.contains("persistentvolumeclaim")
    };
    let ends = Ends::of(target);
    let refused_since = move |pod: &PodView| {
        let words = pod.unschedulable.as_deref();
        if pod.node.is_empty() && words.is_some_and(is_about_node) {
            return Some(pod.created);
        }
        let ended = ends.get(&pod.name).filter(|_| is_rejected(pod))?;
        Some(Some(ended.first()))
    };
    let workers = observed.pods.iter().map(|pod| &**pod).filter(move |pod| {
        pod.plan_generation == generation
            && pod.role != PodRole::Inspect
            && !has_served(target)
            && !pod.is_deleting
    });
    let refused = workers.filter_map(move |pod| Some((pod, refused_since(pod)?)));
    refused.map(move |(pod, since)| {
        let mut others = observed.pods.iter();
        let has_others = others.any(|other| {
            other.role != PodRole::Inspect
                && other.plan_generation != generation
                && node_of(other) == pod.wanted_node
        });
        let patience = if has_others {
            PATIENCE_WITH_OTHERS
        } else {
            PATIENCE
        };
        let since = since.unwrap_or(observed.now);
        (pod, patience.saturating_sub(age(since, observed.now)))
    })
}
