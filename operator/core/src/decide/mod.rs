//! One reconcile, from observation to decision: validate → model → plan → Pods → status. Pure.

mod deadline;
mod running;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{
    DurationText, FieldError, InferenceDeployment, InferenceDeploymentStatus, InferencePlan,
    InferencePlanStatus, PlanRole,
};
use kube_core::ResourceExt;

use crate::age::age;
use crate::build::{
    Beside, BuildContext, DesiredPod, deployment_of_plan, objects, rank_pods, unwanted,
};
use crate::candidates::{away, next_judgement, rooms};
use crate::cause::node_of;
use crate::choose::scale::{differ_in_numbers_alone, rollout_of};
use crate::choose::{self, PlanChoice};
use crate::decision::{Decision, Marks};
use crate::events::transitions;
use crate::follow::{Followed, follow, with_numbers};
use crate::model::{ModelStep, Search};
use crate::names::{
    ANNOTATION_CERTIFICATE, ANNOTATION_PLAN_GENERATION, ANNOTATION_ROUTED, ANNOTATION_ROUTES,
    OUTCOME_FAILED, OUTCOME_SERVING,
};
use crate::observed::forbidden::Quota;
use crate::observed::{Observed, PodRole, PodView};
use crate::plan_record::{
    PlanStatusChange, has_served, model_key_of, passes_turn, source_digest_of,
};
use crate::preload::PRELOADED;
use crate::rollout::ends::Ends;
use crate::rollout::{self, RolloutInput, Steps, Want};
use crate::scaling::{self, resolved};
use crate::status::{self, StatusInput};
use crate::turns::{LONGEST_TURN, is_no_images_fault};
use crate::validate::{progress_deadline, serves, validate};
use crate::zero::{Zero, must_move, zero};

/// Age below which a plan's trouble passes no turn on: it may resolve itself.
const TURN_PATIENCE: Duration = Duration::from_secs(60);

/// Decides what one deployment needs now.
pub fn decide(observed: &Observed) -> Decision {
    let deployment = &observed.deployment;
    let namespace = deployment.namespace().unwrap_or_default();
    let validity = validate(observed);
    if deployment.metadata.deletion_timestamp.is_some() {
        return Decision {
            status: deployment.status.clone().unwrap_or_default(),
            ..Decision::default()
        };
    }
    if !serves(&observed.settings, &namespace) {
        let errors = validity.err().unwrap_or_default();
        return refused(observed, &errors);
    }
    let is_emptied = deployment.spec.is_emptied();
    let observed = &*resolved(observed);
    let status = deployment.status.as_ref();
    let was_at_zero = status.is_some_and(InferenceDeploymentStatus::is_at_zero);
    let mut followed = follow(observed, validity.is_ok() && !was_at_zero);
    let observed = &*with_numbers(observed, &followed);
    let mut zero = zero(observed, validity.is_ok(), is_emptied);
    let is_lowered = validity.is_ok() && !zero.is_reached && followed.start_with_fewer(observed);
    let lowered = is_lowered.then(|| with_numbers(observed, &followed));
    let observed = lowered.as_deref().unwrap_or(observed);
    let mut search = validity.is_ok().then(|| Search::of(observed));
    let mut choice = choose::rest::keep(observed);
    let mut is_at_rest = deployment.spec.suspend || zero.is_reached;
    let preloaded = search
        .as_mut()
        .filter(|_| zero.preloads)
        .map(|search| choose::with_room(observed, search));
    if let Some(Err(why)) = &preloaded {
        zero.kept = Some(why.clone());
    }
    if let Some(Ok(preloaded)) = preloaded {
        zero.leave(observed.now, PRELOADED);
        is_at_rest = false;
        choice = preloaded;
    } else if !is_at_rest || (zero.is_reached && must_move(observed)) {
        let chosen = choose::choose(observed, search.as_mut());
        if is_at_rest && chosen.is_new {
            zero.leave(observed.now, "the node of a gateway is left");
            is_at_rest = false;
        } else if chosen.others_have_room && zero.yields(observed) {
            is_at_rest = true;
        }
        if !is_at_rest {
            choice = chosen;
            followed.ask(&mut choice);
        }
    }
    let model = search.map(|search| match is_at_rest {
        true => search.at_rest(observed),
        false => followed.and(search.into_step()),
    });
    let mut reconcile = Reconcile {
        observed,
        invalid: validity.err().unwrap_or_default(),
        choice,
        followed,
        zero,
        decision: Decision::default(),
    };
    reconcile.look_again(reconcile.followed.look_again);
    reconcile.look_again(reconcile.zero.look_again);
    reconcile.model(model.as_ref());
    reconcile.run(model.as_ref());
    reconcile.scaler();
    reconcile.decision
}

/// Decision for a deployment in a namespace that is not served: it gets its status, and nothing else is touched.
fn refused(observed: &Observed, errors: &[FieldError]) -> Decision {
    let choice = PlanChoice {
        target: None,
        ..choose::rest::keep(observed)
    };
    let status = status::write(&StatusInput {
        observed,
        invalid: errors,
        model: None,
        choice: &choice,
        decided: &[],
        zero: observed
            .deployment
            .status
            .as_ref()
            .and_then(|status| status.scale_to_zero.as_ref()),
        kept: None,
        wants: &[],
        progress: None,
        left: &observed.pods,
        created_routes: &[],
        is_late: false,
        given_up: None,
    });
    Decision {
        events: transitions(observed.deployment.status.as_ref(), &status, false),
        status,
        ..Decision::default()
    }
}

struct Reconcile<'a> {
    observed: &'a Observed,
    invalid: Vec<FieldError>,
    choice: PlanChoice,
    followed: Followed,
    zero: Zero,
    decision: Decision,
}

impl Reconcile<'_> {
    fn model(&mut self, step: Option<&ModelStep>) {
        let Some(step) = step else {
            return;
        };
        let decision = &mut self.decision;
        decision.create_pods.extend(step.create.iter().cloned());
        decision.delete_pods.extend(step.end.iter().cloned());
        decision.fetch_on.clone_from(&step.fetch_on);
        decision.fetch_commit.clone_from(&step.commit);
        self.look_again(step.look_again);
    }

    fn run(&mut self, model: Option<&ModelStep>) {
        self.decision.plan_statuses = std::mem::take(&mut self.choice.plan_statuses);
        self.decision.asks = std::mem::take(&mut self.choice.asks);
        self.decision.awaits = std::mem::take(&mut self.choice.awaits);
        self.look_again(self.choice.look_again);
        if self.choice.held.is_some() {
            self.decision.waits_for_turn = true;
            let comes = self.observed.turn_comes_at;
            self.look_again(comes.map(|at| age(self.observed.now, at)));
        }
        let Some(target) = self.choice.target.clone() else {
            return self.tell(model, &[], None);
        };
        if self.choice.is_new {
            self.decision.create_plan = Some((*target).clone());
        }
        let deployment = self.effective(&target);
        let model_key = model_key_of(&target);
        let context = BuildContext {
            settings: &self.observed.settings,
            deployment: &deployment,
            model_key: model_key.as_deref(),
        };
        let is_suspended = self.observed.deployment.spec.suspend;
        let mut built = match is_suspended {
            true => Vec::new(),
            false => self.as_running(rank_pods(&context, &target.spec)),
        };
        if self.zero.is_reached {
            built.retain(|pod| pod.role == PlanRole::Gateway);
        }
        let wants: Vec<Want> = built.iter().map(Want::of).collect();
        self.objects(&context, &target, &wants);
        let pods: Vec<Cow<'_, PodView>> = self.workers().map(|pod| self.as_held(pod)).collect();
        let pods: Vec<&PodView> = pods.iter().map(|pod| &**pod).collect();
        let mut steps = rollout::step(&RolloutInput {
            wants: &wants,
            pods: &pods,
            rooms: &rooms(self.observed),
            away: &away(self.observed),
            compatible_generations: &self.compatible_generations(&target),
            begun_generations: &begun_generations(self.observed, &target),
            ends: &Ends::of(&target),
            quota: self.quota(&target, &wants),
            short_for: self.short_for(&target, &wants),
            now: self.observed.now,
        });
        if is_suspended {
            (steps.progress.is_serving, steps.progress.is_complete) = (false, pods.is_empty());
        }
        steps.progress.is_serving &= !self.zero.is_reached;
        if self.choice.waits_for_place {
            let is_gateway = |index: usize| built[index].role == PlanRole::Gateway;
            steps.create.retain(|(index, _)| is_gateway(*index));
        }
        let planned = target.spec.ranks.iter().map(|rank| &*rank.node);
        let nodes = planned.chain(pods.iter().map(|pod| node_of(pod)));
        let judged = next_judgement(self.observed, nodes);
        self.look_again(judged);
        self.make(&built, &steps);
        self.mark_pods(&wants, &target, &steps);
        self.record_ends(&wants, &target, &steps);
        self.decision.delete_pods.extend(steps.end.iter().cloned());
        self.look_again(steps.look_again);
        if has_served(&target) && steps.progress.is_complete {
            self.decision.delete_plans = choose::unneeded(self.observed, &target);
        }
        self.tell(model, &wants, Some(&steps));
    }

    /// Decides about the scaler, which an invalid spec leaves as it is.
    fn scaler(&mut self) {
        if self.invalid.is_empty() {
            self.decision.scaler = scaling::step(self.observed, &self.decision.status);
        }
    }

    fn workers(&self) -> impl Iterator<Item = &PodView> {
        let pods = self.observed.pods.iter().map(|pod| &**pod);
        pods.filter(|pod| pod.role != PodRole::Inspect)
    }

    /// The deployment as the plan was made for it, with the current values of the fields that need no new plan.
    fn effective(&self, target: &InferencePlan) -> InferenceDeployment {
        let now = &self.observed.deployment;
        let mut deployment = deployment_of_plan(now, target);
        if self.invalid.is_empty() {
            deployment.spec.endpoint = now.spec.endpoint.clone();
            deployment.spec.rollout = now.spec.rollout.clone();
        }
        deployment.spec.suspend = now.spec.suspend;
        let status = deployment.status.get_or_insert_default();
        status.scale_to_zero.clone_from(&self.zero.told);
        deployment
    }

    fn objects(&mut self, context: &BuildContext<'_>, target: &InferencePlan, wants: &[Want]) {
        let is_wanted = |pod: &&PodView| wants.iter().any(|want| want.name == pod.name);
        let others = self.workers().filter(|pod| !is_wanted(pod));
        let beside = Beside::of(others, &self.observed.plans);
        let wanted = objects(context, &target.spec, beside);
        let name = self.observed.deployment.name_any();
        self.decision.remove_objects = unwanted(&name, &wanted);
        self.decision.objects = wanted;
    }

    /// Generations of plans whose gateways may send requests to the target's workers.
    fn compatible_generations(&self, target: &InferencePlan) -> BTreeSet<u64> {
        let plans = self.observed.plans.iter();
        plans
            .filter(|plan| plan.spec.model == target.spec.model && is_same_source(plan, target))
            .map(|plan| plan.spec.generation)
            .chain([target.spec.generation])
            .collect()
    }

    fn make(&mut self, built: &[DesiredPod], steps: &Steps) {
        for (index, routes) in &steps.create {
            let template = built[*index].claim_template.iter().cloned();
            self.decision.create_templates.extend(template);
            let mut pod = built[*index].pod.clone();
            let annotations = pod.metadata.annotations.get_or_insert_default();
            if let Some(routes) = routes {
                annotations.insert(ANNOTATION_ROUTES.to_owned(), routes.clone());
            }
            if let Some(serial) = &self.observed.certificate {
                annotations.insert(ANNOTATION_CERTIFICATE.to_owned(), serial.clone());
            }
            self.decision.create_pods.push(pod);
        }
    }

    fn mark_pods(&mut self, wants: &[Want], target: &InferencePlan, steps: &Steps) {
        let mut marks: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
        let mut mark = |pod: &str, key: &str, value: &str| {
            let annotations = marks.entry(pod.to_owned()).or_default();
            annotations.push((key.to_owned(), value.to_owned()));
        };
        let now = self.observed.now.to_string();
        for (name, routes) in &steps.routes {
            let pod = self.workers().find(|pod| pod.name == *name);
            let annotation = pod.and_then(|pod| pod.routes_annotation.as_deref());
            mark(name, annotation.unwrap_or(ANNOTATION_ROUTES), routes);
            mark(name, ANNOTATION_ROUTED, &now);
        }
        let generation = target.spec.generation;
        for pod in self.workers() {
            if steps.end.iter().any(|end| end.name == pod.name) || pod.is_deleting {
                continue;
            }
            if let Some(serial) = &self.observed.certificate
                && *serial != pod.certificate
            {
                mark(&pod.name, ANNOTATION_CERTIFICATE, serial);
            }
            // A kept Pod belongs to the plan that keeps it, once that plan serves.
            let is_kept = wants.iter().any(|want| want.name == pod.name);
            if is_kept && steps.progress.is_complete && pod.plan_generation != generation {
                mark(
                    &pod.name,
                    ANNOTATION_PLAN_GENERATION,
                    &generation.to_string(),
                );
            }
        }
        let marks = marks
            .into_iter()
            .map(|(name, annotations)| Marks { name, annotations });
        self.decision.mark_pods = marks.collect();
    }

    fn quota(&self, target: &InferencePlan, wants: &[Want]) -> Quota {
        let forbidden = self.observed.forbidden.as_ref();
        forbidden.map_or(Quota::Free, |it| {
            it.quota(
                target.spec.generation,
                Want::counted(wants),
                self.observed.now,
            )
        })
    }

    /// See [`RolloutInput::short_for`].
    fn short_for(&self, target: &InferencePlan, wants: &[Want]) -> Option<Duration> {
        let forbidden = self.observed.forbidden.as_ref();
        let forbidden = forbidden.filter(|_| !has_served(target))?;
        let generation = target.spec.generation;
        forbidden.is_short_for(generation, Want::counted(wants), self.observed.now)
    }

    /// Records in the plan's status which of its Pods ended, before they are created again.
    fn record_ends(&mut self, wants: &[Want], target: &InferencePlan, steps: &Steps) {
        let before = Ends::of(target);
        let is_wanted = |name: &str| wants.iter().any(|want| want.name == name);
        let mut ends = before.clone();
        ends.keep(is_wanted);
        let is_ended = |pod: &&PodView| {
            let is_over = pod.has_ended();
            is_over && is_wanted(&pod.name) && steps.end.iter().any(|end| end.uid == pod.uid)
        };
        for pod in self.workers().filter(is_ended) {
            ends.take(pod, self.observed.now);
        }
        if ends != before {
            let ended_pods = Some(ends.to_status());
            self.change_status(
                target,
                InferencePlanStatus {
                    ended_pods,
                    ..InferencePlanStatus::default()
                },
            );
        }
    }

    /// Records the target's outcome, then writes the status with its transitions.
    fn tell(&mut self, model: Option<&ModelStep>, wants: &[Want], steps: Option<&Steps>) {
        let target = self.choice.target.clone();
        let left = target.as_ref().and_then(|plan| self.time_left(plan, steps));
        let is_late = left == Some(Duration::ZERO);
        // A plan that has served outlasts a temporary shortage in a quota.
        let has_yet_to_serve = left.is_some();
        let mut given_up = None;
        if let (Some(plan), Some(steps)) = (&target, steps) {
            if steps.progress.is_serving && !has_served(plan) && !self.choice.is_new {
                let outcome = Some(OUTCOME_SERVING.to_owned());
                self.change_status(
                    plan,
                    InferencePlanStatus {
                        outcome,
                        ..InferencePlanStatus::default()
                    },
                );
            } else if has_yet_to_serve
                && (is_late || self.is_in_vain(plan, wants))
                && self.may_be_given_up(plan)
            {
                let why = match is_late {
                    true => self.why_late(wants, steps),
                    false => self.why_in_vain(),
                };
                self.change_status(
                    plan,
                    InferencePlanStatus {
                        outcome: Some(OUTCOME_FAILED.to_owned()),
                        message: Some(why.clone()),
                        ..InferencePlanStatus::default()
                    },
                );
                given_up = Some(why);
            }
        }
        self.look_again(left.filter(|left| !left.is_zero()));
        if let (Some(plan), Some(steps)) = (&target, steps) {
            self.pass_turn(plan, wants, steps, given_up.is_some());
        }
        let status = status::write(&StatusInput {
            observed: self.observed,
            invalid: &self.invalid,
            model,
            choice: &self.choice,
            decided: &self.followed.told(),
            zero: self.zero.told.as_ref(),
            kept: self.zero.kept.as_deref(),
            wants,
            progress: steps.map(|steps| steps.progress),
            left: &self.left(steps),
            created_routes: &steps.map_or_else(Vec::new, |steps| steps.created_routes(wants)),
            is_late,
            given_up: given_up.as_deref(),
        });
        let old = self.observed.deployment.status.as_ref();
        let numbers_alone = self.changes_numbers_alone(old);
        self.decision.events = transitions(old, &status, numbers_alone);
        self.decision.status = status;
    }

    /// Whether the target was made for what the plan in the old status was, apart from the numbers of workers.
    fn changes_numbers_alone(&self, old: Option<&InferenceDeploymentStatus>) -> bool {
        let before = || {
            let told = old?.plan.as_ref()?;
            let mut plans = self.observed.plans.iter();
            plans.find(|plan| plan.spec.generation == told.generation)
        };
        match (before(), &self.choice.target) {
            (Some(before), Some(target)) => {
                before.spec.generation != target.spec.generation
                    && differ_in_numbers_alone(before, target)
            }
            _ => false,
        }
    }

    /// Passes the turn on to other deployments if something other than its image has kept a plan from serving for a
    /// while, or if it is given up early with no evidence against the image: its owner's deadline is no measure for
    /// others.
    fn pass_turn(
        &mut self,
        plan: &InferencePlan,
        wants: &[Want],
        steps: &Steps,
        is_given_up: bool,
    ) {
        let is_under_way =
            !has_served(plan) && !self.choice.is_new && !self.observed.deployment.spec.suspend;
        let made = plan.metadata.creation_timestamp.as_ref();
        let Some(made) = made.filter(|_| is_under_way) else {
            return;
        };
        let cause = status::first_cause(self.observed, wants, steps.progress.mode);
        let trouble = cause.filter(|cause| cause.is_trouble);
        let age = self.observed.now.duration_since(made.0);
        let borne = Duration::try_from(age).unwrap_or_default();
        if trouble.is_some() && !is_given_up && borne < TURN_PATIENCE {
            return self.look_again(Some(TURN_PATIENCE - borne));
        }
        let reason = match trouble {
            Some(cause) if is_no_images_fault(cause.reason) => cause.reason,
            None if is_given_up && age < LONGEST_TURN => "ProgressDeadlineExceeded",
            _ => "",
        };
        if passes_turn(plan) != reason {
            let passes_turn = Some(reason.to_owned());
            self.change_status(
                plan,
                InferencePlanStatus {
                    passes_turn,
                    ..InferencePlanStatus::default()
                },
            );
        }
    }

    /// The Pods as they will be after the steps: a Pod that is about to end must not count as ready.
    fn left(&self, steps: Option<&Steps>) -> Vec<Arc<PodView>> {
        let mut pods = self.observed.pods.clone();
        let Some(steps) = steps else {
            return pods;
        };
        for pod in &mut pods {
            let routes = steps.routes.iter().find(|(name, _)| *name == pod.name);
            let is_ended = steps.end.iter().any(|end| end.name == pod.name);
            if routes.is_some() || is_ended {
                let pod = Arc::make_mut(pod);
                pod.is_deleting |= is_ended;
                if let Some((_, routes)) = routes {
                    pod.routes.clone_from(routes);
                }
            }
        }
        pods
    }

    /// Whether the old Pods ended for room in a ResourceQuota that has none for the target either, so that nothing
    /// serves.
    fn is_in_vain(&self, plan: &InferencePlan, wants: &[Want]) -> bool {
        let forbidden = self.observed.forbidden.as_ref();
        let is_wanted = |pod: &PodView| wants.iter().any(|want| want.name == pod.name);
        let mut workers = self.workers();
        let has_old = workers.any(|pod| pod.is_ready && !pod.role.is_gateway() && !is_wanted(pod));
        !has_old
            && forbidden.is_some_and(|it| {
                it.was_made_room_in_vain(plan.spec.generation, Want::counted(wants))
            })
    }

    fn why_in_vain(&self) -> String {
        let forbidden = self.observed.forbidden.as_ref();
        let words = forbidden.map_or("", |it| &*it.words);
        let words = crate::cause::quoted(words);
        format!("the namespace's quota has no room for it alone either: {words}")
    }

    fn why_late(&self, wants: &[Want], steps: &Steps) -> String {
        let cause = status::first_cause(self.observed, wants, steps.progress.mode);
        let words = cause.map_or(String::new(), |cause| format!(": {}", cause.message));
        let deadline = DurationText::new(progress_deadline(&self.observed.deployment));
        format!("no progress for {deadline}{words}")
    }

    fn change_status(&mut self, plan: &InferencePlan, status: InferencePlanStatus) {
        let changes = &mut self.decision.plan_statuses;
        let name = plan.name_any();
        match changes.iter_mut().find(|change| change.name == name) {
            Some(change) => change.status.merge(status),
            None => changes.push(PlanStatusChange::of(plan, status)),
        }
    }

    fn look_again(&mut self, after: Option<Duration>) {
        let both = [self.decision.requeue_after, after];
        self.decision.requeue_after = both.into_iter().flatten().min();
    }
}

/// Generations of the earlier plans of the target's rollout.
fn begun_generations(observed: &Observed, target: &InferencePlan) -> BTreeSet<u64> {
    let plans = rollout_of(observed, target).into_iter();
    let generations = plans.map(|plan| plan.spec.generation);
    generations
        .filter(|generation| *generation != target.spec.generation)
        .collect()
}

fn is_same_source(a: &Arc<InferencePlan>, b: &InferencePlan) -> bool {
    source_digest_of(a) == source_digest_of(b)
}
