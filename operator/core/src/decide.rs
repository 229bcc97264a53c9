//! One reconcile, from what was read to what is wanted: validate → model → plan → Pods → status. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{DurationText, FieldError, InferenceDeployment, InferencePlan};
use jiff::Timestamp;
use kube_core::ResourceExt;

use crate::build::{
    BuildContext, DesiredPod, ROLE_INSPECT, deployment_of_plan, model_key_of, objects, rank_pods,
};
use crate::candidates::{Candidates, away, is_down, next_judgement, rooms};
use crate::cause::node_of;
use crate::choose::{self, Choice};
use crate::decision::{Decision, Marks};
use crate::events::transitions;
use crate::model::{self, Model, ModelState, ModelStep, More};
use crate::names::{
    ANNOTATION_CERTIFICATE, ANNOTATION_ENDS, ANNOTATION_OUTCOME, ANNOTATION_OUTCOME_MESSAGE,
    ANNOTATION_PLAN_GENERATION, ANNOTATION_ROUTES, ANNOTATION_TURN, OUTCOME_FAILED,
    OUTCOME_SERVING,
};
use crate::observed::forbidden::Quota;
use crate::observed::{FetchView, Observed, PodView};
use crate::plan_annotations;
use crate::rollout::ends::{Ended, Ends};
use crate::rollout::{self, RolloutInput, Steps, Want};
use crate::status::{self, StatusInput};
use crate::turns::{LONGEST_TURN, is_no_images_fault};
use crate::validate::{progress_deadline, serves, validate};

/// Trouble with a younger plan passes no turn on: it may pass by itself.
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
    let (model, choice) = match &validity {
        Ok(_) => {
            let (step, choice) = plan(observed);
            (Some(step), choice)
        }
        Err(_) => (None, choose::choose(observed, None)),
    };
    let mut reconcile = Reconcile {
        observed,
        invalid: validity.err().unwrap_or_default(),
        choice,
        decision: Decision::default(),
    };
    reconcile.model(model.as_ref());
    reconcile.run(model.as_ref());
    reconcile.decision
}

/// A deployment of a namespace that is not served gets its status, and nothing else is touched.
fn refused(observed: &Observed, errors: &[FieldError]) -> Decision {
    let choice = Choice {
        target: None,
        is_new: false,
        marks: Vec::new(),
        refusal: None,
        wants_nodes: false,
        trouble: None,
        look_again: None,
        held: None,
    };
    let status = status::write(&StatusInput {
        observed,
        invalid: errors,
        model: None,
        choice: &choice,
        wants: &[],
        progress: None,
        left: &observed.pods,
        is_late: false,
        given_up: None,
    });
    Decision {
        events: transitions(observed.deployment.status.as_ref(), &status),
        status,
        ..Decision::default()
    }
}

/// The model, then the plan. Where the nodes that have the model do not suffice, others are asked for it.
fn plan(observed: &Observed) -> (ModelStep, Choice) {
    let candidates = Candidates::of(observed, &observed.deployment.spec.placement);
    let step = model::find(observed, &candidates, None);
    let mut choice = choose::choose(observed, known(&step));
    let Some(model) = known(&step).filter(|model| model.nodes.is_some()) else {
        return (step, choice);
    };
    if !choice.wants_nodes || choice.is_new {
        return (step, choice);
    }
    let more = More {
        known: model,
        draft: choose::draft_nodes(observed, model),
    };
    let mut wider = model::find(observed, &candidates, Some(&more));
    if let ModelState::Unknown(cause) = &wider.state {
        if choice.target.is_none() && !more.draft.is_empty() && !cause.is_trouble {
            // It will do where it is on its way to.
            choice.refusal = None;
        } else {
            // What is known stays known while more is looked for.
            wider.state = step.state;
        }
        return (wider, choice);
    }
    let again = choose::choose(observed, known(&wider));
    (wider, again)
}

fn known(step: &ModelStep) -> Option<&Model> {
    match &step.state {
        ModelState::Known(model) => Some(model),
        ModelState::Unknown(_) => None,
    }
}

struct Reconcile<'a> {
    observed: &'a Observed,
    invalid: Vec<FieldError>,
    choice: Choice,
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
        decision.requeue_after = step.look_again;
    }

    fn run(&mut self, model: Option<&ModelStep>) {
        self.decision.mark_plans = std::mem::take(&mut self.choice.marks);
        self.look_again(self.choice.look_again);
        self.decision.waits_for_turn = self.choice.held.is_some();
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
        self.objects(&context, &target);
        let built = rank_pods(&context, &target.spec);
        let wants: Vec<Want> = built.iter().map(Want::of).collect();
        let pods: Vec<&PodView> = self.workers().collect();
        let steps = rollout::step(&RolloutInput {
            wants: &wants,
            pods: &pods,
            rooms: &rooms(self.observed),
            away: &away(self.observed),
            compatible_generations: &self.compatible_generations(&target),
            ends: &Ends::of(&target),
            quota: self.quota(&target, &wants),
            now: self.observed.now,
        });
        let planned = target.spec.ranks.iter().map(|rank| &*rank.node);
        let nodes = planned.chain(pods.iter().map(|pod| node_of(pod)));
        let judged = next_judgement(self.observed, nodes);
        self.look_again(judged);
        self.make(&built, &steps);
        self.mark_pods(&wants, &target, &steps);
        self.annotate_ends(&wants, &target, &steps);
        self.decision.delete_pods.extend(steps.end.iter().cloned());
        self.look_again(steps.look_again);
        if plan_annotations::has_served(&target) && steps.progress.is_complete {
            self.decision.delete_plans = choose::unneeded(self.observed, &target);
        }
        self.tell(model, &wants, Some(&steps));
    }

    fn workers(&self) -> impl Iterator<Item = &PodView> {
        let pods = self.observed.pods.iter().map(|pod| &**pod);
        pods.filter(|pod| pod.role != ROLE_INSPECT)
    }

    /// The deployment as the plan was made for it, with what needs no new plan as it is asked for now.
    fn effective(&self, target: &InferencePlan) -> InferenceDeployment {
        let now = &self.observed.deployment;
        let mut deployment = deployment_of_plan(now, target);
        if self.invalid.is_empty() {
            deployment.spec.endpoint = now.spec.endpoint.clone();
            deployment.spec.rollout = now.spec.rollout.clone();
        }
        deployment
    }

    fn objects(&mut self, context: &BuildContext<'_>, target: &InferencePlan) {
        let wanted = objects(context, &target.spec);
        let name = self.observed.deployment.name_any();
        let is_wanted = |kind: &str, name: &str| {
            wanted.iter().any(|object| {
                object.name_any() == name
                    && object
                        .types
                        .as_ref()
                        .is_some_and(|types| types.kind == kind)
            })
        };
        let possible = [
            ("PodDisruptionBudget", "gateway"),
            ("PodDisruptionBudget", "prefill"),
            ("PodDisruptionBudget", "decode"),
            ("NetworkPolicy", "gateway"),
            ("NetworkPolicy", "workers"),
        ];
        self.decision.remove_objects = possible
            .into_iter()
            .map(|(kind, part)| (kind.to_owned(), format!("{name}-{part}")))
            .filter(|(kind, name)| !is_wanted(kind, name))
            .collect();
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
        for (name, routes) in &steps.routes {
            let pod = self.workers().find(|pod| pod.name == *name);
            let annotation = pod.and_then(|pod| pod.routes_annotation.as_deref());
            mark(name, annotation.unwrap_or(ANNOTATION_ROUTES), routes);
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
            // A Pod that was kept belongs to the plan that keeps it, once that plan serves.
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

    /// Has the plan remember which of its Pods ended, before they are made again.
    fn annotate_ends(&mut self, wants: &[Want], target: &InferencePlan, steps: &Steps) {
        let before = Ends::of(target);
        let is_wanted = |name: &str| wants.iter().any(|want| want.name == name);
        let mut ends = before.clone();
        ends.keep(is_wanted);
        let is_ended = |pod: &&PodView| {
            let is_over = matches!(pod.phase.as_str(), "Failed" | "Succeeded");
            is_over && is_wanted(&pod.name) && steps.end.iter().any(|end| end.uid == pod.uid)
        };
        for pod in self.workers().filter(is_ended) {
            ends.take(pod, self.observed.now);
        }
        if ends != before {
            self.mark_plan(target, vec![(ANNOTATION_ENDS, ends.text())]);
        }
    }

    /// Outcomes of the target, then the status with its transitions.
    fn tell(&mut self, model: Option<&ModelStep>, wants: &[Want], steps: Option<&Steps>) {
        let target = self.choice.target.clone();
        let left = target.as_ref().and_then(|plan| self.time_left(plan, steps));
        let is_late = left == Some(Duration::ZERO);
        // What has served outlasts a quota that is short for a while.
        let has_yet_to_serve = left.is_some();
        let mut given_up = None;
        if let (Some(plan), Some(steps)) = (&target, steps) {
            if steps.progress.is_serving
                && !plan_annotations::has_served(plan)
                && !self.choice.is_new
            {
                self.mark_plan(plan, vec![(ANNOTATION_OUTCOME, OUTCOME_SERVING.to_owned())]);
            } else if has_yet_to_serve
                && (is_late || self.is_in_vain(plan, wants))
                && choose::way_back(self.observed, plan).is_some()
            {
                let why = match is_late {
                    true => self.why_late(wants, steps),
                    false => self.why_in_vain(),
                };
                self.mark_plan(
                    plan,
                    vec![
                        (ANNOTATION_OUTCOME, OUTCOME_FAILED.to_owned()),
                        (ANNOTATION_OUTCOME_MESSAGE, why.clone()),
                    ],
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
            wants,
            progress: steps.map(|steps| steps.progress),
            left: &self.left(steps),
            is_late,
            given_up: given_up.as_deref(),
        });
        let old = self.observed.deployment.status.as_ref();
        self.decision.events = transitions(old, &status);
        self.decision.status = status;
    }

    /// A plan that something else than its image keeps from serving for a while keeps no other deployment from that image.
    /// Neither does one that is given up early with nothing to be said against the image: how long its owner waits is no
    /// measure for others.
    fn pass_turn(
        &mut self,
        plan: &InferencePlan,
        wants: &[Want],
        steps: &Steps,
        is_given_up: bool,
    ) {
        let made = plan.metadata.creation_timestamp.as_ref();
        let Some(made) =
            made.filter(|_| !plan_annotations::has_served(plan) && !self.choice.is_new)
        else {
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
        if plan_annotations::annotation(plan, ANNOTATION_TURN) != reason {
            self.mark_plan(plan, vec![(ANNOTATION_TURN, reason.to_owned())]);
        }
    }

    /// The Pods as they are when the steps are done: Ready is not to be said of what is about to end.
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

    /// How much longer the target may take; `None` when it has served, or does now.
    fn time_left(&self, plan: &InferencePlan, steps: Option<&Steps>) -> Option<Duration> {
        if plan_annotations::has_served(plan)
            || steps.is_some_and(|steps| steps.progress.is_serving)
        {
            return None;
        }
        let deadline = progress_deadline(&self.observed.deployment);
        let Some(made) = plan.metadata.creation_timestamp.as_ref() else {
            return Some(deadline);
        };
        let last = self
            .progressed(plan)
            .map_or(made.0, |last| last.max(made.0));
        let age_ms = self.observed.now.as_millisecond() - last.as_millisecond();
        let age = Duration::from_millis(u64::try_from(age_ms).unwrap_or(0));
        Some(deadline.saturating_sub(age))
    }

    /// When something last went on for the plan: bytes of its model came to one of its nodes, or one of its Pods was made,
    /// placed, set up, started or ready. A worker that loads its model goes on until it says otherwise: it ends itself when
    /// loading stands still, and after that its next start is no progress. Neither is a Pod that is made again because the
    /// one before was rejected or evicted, until it runs for the first time.
    fn progressed(&self, plan: &InferencePlan) -> Option<Timestamp> {
        let observed = self.observed;
        let is_coming = |rank: &hearth_crds::PlanRank| {
            let fetch = observed.fetches.get(&rank.node);
            matches!(fetch, Some(FetchView::Fetching { bytes_per_second, .. }) if *bytes_per_second > 0)
        };
        if plan.spec.ranks.iter().any(is_coming) {
            return Some(observed.now);
        }
        // Of a node that is away nothing new is heard.
        let pods = self.workers().filter(|pod| {
            pod.plan_generation == plan.spec.generation && !is_down(observed, node_of(pod))
        });
        let ends = Ends::of(plan);
        let of_pod = |pod: &PodView| {
            let is_running = |pod: &PodView| {
                let container = pod.container.as_ref();
                container.is_some_and(|container| container.running_since.is_some())
            };
            if let Some(ended) = ends.get(&pod.name)
                && (ended.has_run || !is_running(pod))
            {
                return None;
            }
            let first = pod
                .container
                .as_ref()
                .filter(|container| container.restarts == 0);
            if first.is_some_and(|container| container.is_starting) {
                return Some(observed.now);
            }
            let started = first.and_then(|container| container.running_since);
            let conditions = pod
                .progressed
                .filter(|_| first.is_some() || pod.container.is_none());
            [pod.created, conditions, started]
                .into_iter()
                .flatten()
                .max()
        };
        let ended = ends.all().map(Ended::first);
        pods.filter_map(of_pod).chain(ended).max()
    }

    /// Whether the old has ended for room in a ResourceQuota that has none for the target either, and nobody serves.
    fn is_in_vain(&self, plan: &InferencePlan, wants: &[Want]) -> bool {
        let forbidden = self.observed.forbidden.as_ref();
        let is_wanted = |pod: &PodView| wants.iter().any(|want| want.name == pod.name);
        let mut workers = self.workers();
        let has_old = workers.any(|pod| pod.is_ready && pod.role != "gateway" && !is_wanted(pod));
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
        format!("nothing went on for {deadline}{words}")
    }

    fn mark_plan(&mut self, plan: &InferencePlan, annotations: Vec<(&str, String)>) {
        let name = plan.name_any();
        let annotations = annotations
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        let marks = &mut self.decision.mark_plans;
        match marks.iter_mut().find(|marks| marks.name == name) {
            Some(marks) => marks.annotations.extend(annotations),
            None => marks.push(Marks {
                name,
                annotations: annotations.collect(),
            }),
        }
    }

    fn look_again(&mut self, after: Option<Duration>) {
        let both = [self.decision.requeue_after, after];
        self.decision.requeue_after = both.into_iter().flatten().min();
    }
}

fn is_same_source(a: &Arc<InferencePlan>, b: &InferencePlan) -> bool {
    use crate::names::ANNOTATION_SOURCE;
    a.annotations().get(ANNOTATION_SOURCE) == b.annotations().get(ANNOTATION_SOURCE)
}
