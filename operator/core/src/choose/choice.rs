//! The choice that this module makes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::InferencePlan;

use super::new_plan::{Refusal, lacks_nodes};
use crate::cause::Cause;
use crate::key::Key;
use crate::observed::Observed;
use crate::plan_record::PlanStatusChange;

/// The plan to run, and the obstacles to a better one.
#[derive(Clone, Debug)]
pub(crate) struct PlanChoice {
    /// The plan to run.
    pub(crate) target: Option<Arc<InferencePlan>>,
    /// Whether it does not exist yet.
    pub(crate) is_new: bool,
    /// Status changes of existing plans.
    pub(crate) plan_statuses: Vec<PlanStatusChange>,
    /// Reason why there is no plan for the current spec.
    pub(crate) refusal: Option<Cause>,
    /// Whether the planner found no place for the ranks on the nodes that have the model.
    pub(crate) wants_nodes: bool,
    /// Trouble with the target that no other plan can resolve.
    pub(crate) trouble: Option<Cause>,
    /// Time after which to reconsider the target even if nothing is reported.
    pub(crate) look_again: Option<Duration>,
    /// Other deployments whose workers are to end, so that this one's have room.
    pub(crate) asks: Vec<Key>,
    /// Nodes that its workers will have once these have ended.
    pub(crate) awaits: BTreeSet<String>,
    /// Whether it would have room if others ended theirs, be they asked for that or not.
    pub(crate) others_have_room: bool,
    /// Whether the target's workers are not made before these have ended.
    pub(crate) waits_for_place: bool,
    /// Reason why it does not change to the operator's worker image yet.
    pub(crate) held: Option<Cause>,
}

impl PlanChoice {
    /// Reconsiders after this time at the latest.
    pub(crate) fn look_again_after(&mut self, time: Duration) {
        self.look_again = self.look_again.into_iter().chain([time]).min();
    }
}

/// Keeps the target, because no plan can be made for what the spec asks.
pub(crate) fn refuse(choice: &mut PlanChoice, observed: &Observed, refusal: &Refusal) {
    choice.refusal = Some(refusal.cause());
    choice.wants_nodes = lacks_nodes(&refusal.error) && !observed.nodes.is_empty();
}

/// Keeps the target, because other numbers of workers have no place beside those that stay. Another node could help.
pub(crate) fn refuse_number(choice: &mut PlanChoice, cause: Cause) {
    choice.refusal = Some(cause);
    choice.wants_nodes = true;
}
