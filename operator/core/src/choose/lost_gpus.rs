//! GPUs that no longer answer although their nodes are Ready.
//!
//! A worker that loses its GPU ends with an exit code of its own. If a process that was restarted ends so, this deployment's
//! plans leave the GPU out, and record it: the Pods that show it are gone with the plan before. It counts as lost until its node
//! was away or was measured anew, which a reset, a repair or a new GPU comes with, or for [`LOST_FOR`].

use std::time::Duration;

use hearth_crds::{DEVICE_LOST_EXIT_CODE, InferencePlan, LostGpu, NodeProfileStatus};
use jiff::Timestamp;

use crate::age::age;
use crate::cause::{Cause, last_words, node_of};
use crate::observed::{ContainerEnd, NodeView, Observed, PodView};

/// Time after which a new plan may try a GPU again.
const LOST_FOR: Duration = Duration::from_secs(3600);

/// GPUs that are lost now: those that plans record, and those that Pods show.
pub(crate) fn known(observed: &Observed) -> Vec<LostGpu> {
    let recorded = observed
        .plans
        .iter()
        .filter_map(|plan| plan.spec.inputs.as_ref());
    let recorded = recorded.flat_map(|inputs| &inputs.lost_gpus);
    let recorded = recorded.filter(|gpu| is_lost_still(observed, gpu)).cloned();
    let shown = observed
        .pods
        .iter()
        .filter_map(|pod| shown_by(observed, pod));
    let mut known: Vec<LostGpu> = Vec::new();
    for gpu in recorded.chain(shown) {
        if !known.iter().any(|other| is_same(other, &gpu)) {
            known.push(gpu);
        }
    }
    known
}

/// Marks lost GPUs in the profiles, so that no rank is planned onto them.
pub(crate) fn leave_out(lost: &[LostGpu], profiles: &mut [NodeProfileStatus]) {
    for profile in profiles {
        for gpu in &mut profile.gpus {
            let mut lost = lost.iter();
            let found = lost.find(|lost| lost.node == profile.node && lost.uuid == gpu.uuid);
            if let Some(found) = found {
                gpu.obstacle = Some(format!("it is lost: {}", found.message));
            }
        }
    }
}

/// A sentence for each lost GPU.
pub(crate) fn sentences(lost: &[LostGpu]) -> impl Iterator<Item = String> {
    lost.iter().map(|gpu| {
        let LostGpu {
            node,
            uuid,
            message,
            at_seconds: _,
        } = gpu;
        format!("GPU {uuid} of {node} is lost: {message}")
    })
}

/// Trouble with `target` if it computes on a lost GPU.
pub(super) fn trouble(observed: &Observed, target: &InferencePlan) -> Option<Cause> {
    let mut lost = known(observed);
    lost.retain(|gpu| {
        let mut ranks = target.spec.ranks.iter();
        ranks.any(|rank| rank.node == gpu.node && rank.device().gpu_uuid() == Some(&*gpu.uuid))
    });
    let told: Vec<String> = sentences(&lost).collect();
    (!told.is_empty()).then(|| Cause::trouble("GpuLost", told.join("; ")))
}

fn is_same(one: &LostGpu, other: &LostGpu) -> bool {
    (&one.node, &one.uuid) == (&other.node, &other.uuid)
}

fn is_lost_still(observed: &Observed, gpu: &LostGpu) -> bool {
    let Some(node) = observed.nodes.get(&gpu.node) else {
        return false;
    };
    let Ok(at) = Timestamp::from_second(gpu.at_seconds) else {
        return false;
    };
    let is_later = |time: Option<Timestamp>| time.is_some_and(|time| time > at);
    age(at, observed.now) < LOST_FOR && !is_later(node.ready_since) && !is_later(measured(node))
}

fn measured(node: &NodeView) -> Option<Timestamp> {
    node.profile.as_ref()?.measured_at.parse().ok()
}

/// The GPU of the plan that a Pod has lost for good.
fn shown_by(observed: &Observed, pod: &PodView) -> Option<LostGpu> {
    let end = lasting_loss(pod)?;
    let mut plans = observed.plans.iter();
    let plan = plans.find(|plan| plan.spec.generation == pod.plan_generation)?;
    let mut ranks = plan.spec.ranks.iter();
    let rank = ranks.find(|rank| rank.name == pod.rank && rank.node == node_of(pod))?;
    let words = last_words(&end.message);
    // A supervisor of two ranks says which one has noticed.
    let is_named = |(name, _): (&str, _)| {
        let rest = words.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(": "))
    };
    let message = match pod.ranks().any(is_named) {
        true => words,
        false => format!("{}: {words}", rank.name),
    };
    Some(LostGpu {
        node: rank.node.clone(),
        uuid: rank.device().gpu_uuid()?.to_owned(),
        message,
        at_seconds: observed.now.as_second(),
    })
}

/// The end of a restarted container that has lost its device: one that can be opened again goes on without a new plan.
fn lasting_loss(pod: &PodView) -> Option<&ContainerEnd> {
    let container = pod.container.as_ref()?;
    let end = container.last_end.as_ref()?;
    let is_loss = end.exit_code == i32::from(DEVICE_LOST_EXIT_CODE);
    let was_restarted = container.restarts > 0 && container.running_since.is_none();
    (is_loss && was_restarted && !pod.is_ready).then_some(end)
}
