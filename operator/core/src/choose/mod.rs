//! Which plan is to run: the one that is there, a new one, or an older one that served.

pub(crate) mod refusals;
mod renew;
pub(crate) mod scale;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferencePlan, InferencePlanSpec, ModelFacts,
    PlanPrediction,
};
use hearth_planner::{CpuOffer, GpuOffer, PlanError, PlanInput};
use kube_core::ResourceExt;
use serde::Serialize;
use sha2::{Digest, Sha256};

use self::refusals::Refusals;
use self::scale::in_place;
use crate::build::{
    BuildContext, deployment_of_plan, model_key, model_path, plan_object, source_digest,
    spec_of_plan,
};
use crate::candidates::{Candidates, is_lost, is_to_be_left};
use crate::cause::Cause;
use crate::decision::Marks;
use crate::model::{Model, annotations_of, told_by};
use crate::names::{ANNOTATION_INPUTS, ANNOTATION_SOURCE, ANNOTATION_SPEC};
use crate::observed::Observed;
use crate::plan_annotations::{annotation, has_failed, has_served};

/// What is to run, and what stands in the way of something better.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    /// The plan that is to run.
    pub(crate) target: Option<Arc<InferencePlan>>,
    /// It is not there yet.
    pub(crate) is_new: bool,
    pub(crate) marks: Vec<Marks>,
    /// Why there is no plan for the spec as it is.
    pub(crate) refusal: Option<Cause>,
    /// The planner found no place for the ranks on the nodes that have the model.
    pub(crate) wants_nodes: bool,
    /// What is wrong with the target that cannot be helped.
    pub(crate) trouble: Option<Cause>,
    /// When the target is to be looked at again though nothing is reported.
    pub(crate) look_again: Option<Duration>,
    /// Why it does not change to the operator's worker image yet.
    pub(crate) held: Option<Cause>,
}

/// Chooses. `wanted` is the model of the spec as it is; `None` while it is not known, or when the spec is no good.
pub(crate) fn choose(observed: &Observed, wanted: Option<&Model>) -> Choice {
    let newest = observed.plans.last();
    let mut choice = Choice {
        target: in_force(observed),
        is_new: false,
        marks: Vec::new(),
        refusal: None,
        wants_nodes: false,
        trouble: None,
        look_again: None,
        held: None,
    };
    let deployment = &observed.deployment;
    if let Some(model) = wanted
        && newest.is_none_or(|plan| !is_made_for(plan, deployment, &model.facts))
    {
        let image = renew::image_of_next(observed);
        match made(observed, deployment, model, image, &Refusals::new()) {
            Ok(plan) => {
                let plan = scaled(observed, newest, plan, &model.facts);
                take(&mut choice, newest, plan);
            }
            Err(error) => refuse(&mut choice, observed, &error),
        }
    }
    if !choice.is_new {
        move_on(observed, &mut choice, wanted);
    }
    if !choice.is_new {
        renew::renew(observed, &mut choice);
    }
    choice
}

/// The newest plan that served before `plan` and whose nodes are all there.
pub(crate) fn way_back<'a>(
    observed: &'a Observed,
    plan: &InferencePlan,
) -> Option<&'a Arc<InferencePlan>> {
    let older = observed
        .plans
        .iter()
        .rev()
        .filter(|older| older.spec.generation < plan.spec.generation);
    let is_whole = |older: &&Arc<InferencePlan>| {
        let mut ranks = older.spec.ranks.iter();
        has_served(older) && ranks.all(|rank| !is_lost(observed, &rank.node))
    };
    older.into_iter().find(is_whole)
}

/// Plans that nothing needs once `target` serves: all but the target, the one that served before it, and the newest,
/// which tells what was tried last.
pub(crate) fn unneeded(observed: &Observed, target: &InferencePlan) -> Vec<String> {
    let generation = target.spec.generation;
    let newest = observed.plans.last().map_or(0, |plan| plan.spec.generation);
    let served_before = observed
        .plans
        .iter()
        .filter(|plan| plan.spec.generation < generation && has_served(plan))
        .map(|plan| plan.spec.generation)
        .max();
    let is_needed = |plan: &&Arc<InferencePlan>| {
        let it = plan.spec.generation;
        it == generation || it == newest || Some(it) == served_before
    };
    observed
        .plans
        .iter()
        .filter(|plan| !is_needed(plan))
        .map(|plan| plan.name_any())
        .collect()
}

/// The newest plan, unless it was given up: then the newest that served.
fn in_force(observed: &Observed) -> Option<Arc<InferencePlan>> {
    let newest = observed.plans.last()?;
    if !has_failed(newest) {
        return Some(newest.clone());
    }
    let served = || observed.plans.iter().rev().find(|plan| has_served(plan));
    let older = way_back(observed, newest).or_else(served);
    Some(older.unwrap_or(newest).clone())
}

pub(crate) fn next_generation(observed: &Observed) -> u64 {
    observed.plans.last().map_or(0, |plan| plan.spec.generation) + 1
}

/// Whether a plan was made for this spec and this model. The words in which another version of the operator noted that
/// do not count, but what they say.
fn is_made_for(plan: &InferencePlan, deployment: &InferenceDeployment, facts: &ModelFacts) -> bool {
    if annotation(plan, ANNOTATION_INPUTS) == inputs(&deployment.spec, facts) {
        return true;
    }
    let (Some(mut then), Some(told)) = (spec_of_plan(plan), told_by(plan)) else {
        return false;
    };
    // A plan shows no secrets of URLs; the key of the model tells them apart.
    let mut now = deployment.spec.clone();
    (now.model, then.model) = (now.model.shown(), then.model.shown());
    let key = model_key(deployment, &deployment.spec.model.source);
    told.key == key && Inputs::of(&then, &told.facts) == Inputs::of(&now, facts)
}

/// What a plan follows from, apart from the nodes.
#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inputs<'a> {
    model: &'a hearth_crds::ModelSpec,
    strategy: hearth_crds::Strategy,
    prefill: &'a hearth_crds::PrefillSpec,
    decode: &'a hearth_crds::DecodeSpec,
    placement: &'a hearth_crds::PlacementSpec,
    objectives: &'a hearth_crds::ObjectivesSpec,
    facts: &'a ModelFacts,
}

impl<'a> Inputs<'a> {
    fn of(spec: &'a InferenceDeploymentSpec, facts: &'a ModelFacts) -> Self {
        // A field that is added to the spec is to be thought of here.
        let InferenceDeploymentSpec {
            model,
            strategy,
            prefill,
            decode,
            placement,
            objectives,
            autoscaling: _,
            endpoint: _,
            rollout: _,
        } = spec;
        Self {
            model,
            strategy: *strategy,
            prefill,
            decode,
            placement,
            objectives,
            facts,
        }
    }
}

fn inputs(spec: &InferenceDeploymentSpec, facts: &ModelFacts) -> String {
    let text = serde_json::to_string(&Inputs::of(spec, facts)).unwrap_or_default();
    let digest = Sha256::digest(text.as_bytes());
    digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The next plan for the spec of `deployment`.
pub(crate) fn made(
    observed: &Observed,
    deployment: &InferenceDeployment,
    model: &Model,
    image: &str,
    refusals: &Refusals,
) -> Result<InferencePlan, Box<Refusal>> {
    let spec = &deployment.spec;
    let candidates = Candidates::of(observed, &spec.placement);
    let candidates = match &model.nodes {
        Some(nodes) => candidates.only(|name| nodes.contains(name), "does not have the model"),
        None => candidates,
    };
    let candidates = candidates.only(
        |name| !refusals.contains_key(name),
        "refused a worker of the plan before",
    );
    let context = BuildContext {
        settings: &observed.settings,
        deployment,
        model_key: model.key.as_deref(),
    };
    let generation = next_generation(observed);
    let profiles: Vec<_> = candidates.free.values().cloned().collect();
    let planned = hearth_planner::plan(&PlanInput {
        name: &deployment.name_any(),
        namespace: &deployment.namespace().unwrap_or_default(),
        generation,
        spec,
        facts: &model.facts,
        model_path: &model_path(&context, &spec.model.source),
        profiles: &profiles,
        gpus: GpuOffer::Cluster {
            plugin: &candidates.gpus_free,
            claimable: &candidates.claimable,
        },
        cpus: CpuOffer::Requests(&candidates.cpu_rooms),
    });
    let mut planned = planned.map_err(|error| Box::new(Refusal { error, candidates }))?;
    planned.worker_image = Some(image.to_owned());
    let mut annotations = annotations_of(&spec.model.source, model);
    annotations.insert(ANNOTATION_INPUTS.to_owned(), inputs(spec, &model.facts));
    let mut plan = plan_object(&context, planned, annotations);
    refusals::remember(&mut plan, refusals);
    Ok(plan)
}

/// The nodes that a plan of the spec would be for, if every node had the model; empty where none fits.
pub(crate) fn draft_nodes(observed: &Observed, model: &Model) -> Vec<String> {
    let everywhere = Model {
        nodes: None,
        ..model.clone()
    };
    let image = renew::image_of_next(observed);
    let none = Refusals::new();
    let plan = made(observed, &observed.deployment, &everywhere, image, &none);
    let nodes: BTreeSet<String> = match &plan {
        Ok(plan) => nodes_of(plan).map(str::to_owned).collect(),
        Err(_) => BTreeSet::new(),
    };
    nodes.into_iter().collect()
}

/// `plan`, unless the newest plan needs no more than another number of decode workers.
fn scaled(
    observed: &Observed,
    newest: Option<&Arc<InferencePlan>>,
    mut plan: InferencePlan,
    facts: &ModelFacts,
) -> InferencePlan {
    let Some(newest) = newest.filter(|newest| !has_failed(newest)) else {
        return plan;
    };
    let spec = &observed.deployment.spec;
    let before = deployment_of_plan(&observed.deployment, newest);
    let but_for_number = |spec: &InferenceDeploymentSpec| {
        let mut spec = spec.clone();
        spec.decode.replicas = None;
        inputs(&spec, facts)
    };
    if but_for_number(spec) != but_for_number(&before.spec) {
        return plan;
    }
    let free = Candidates::of(observed, &spec.placement);
    if let Some(in_place) = in_place(&newest.spec, &plan.spec, &free) {
        plan.spec = in_place;
    }
    plan
}

/// The planner's answer with what was offered to it.
pub(crate) struct Refusal {
    error: PlanError,
    candidates: Candidates,
}

impl Refusal {
    fn cause(&self) -> Cause {
        let reason = match &self.error {
            PlanError::Unsupported(_) => "Unsupported",
            PlanError::NoNodes(_) => "NoNodes",
            PlanError::BadProfile { .. } => "BadProfile",
            PlanError::InsufficientMemory { .. } => "InsufficientMemory",
            PlanError::KvBudgetTooSmall { .. } | PlanError::KvBudgetTiny { .. } => {
                "KvBudgetTooSmall"
            }
            PlanError::ContextTooLong { .. } => "ContextTooLong",
            PlanError::TooFewCores { .. } => "TooFewCores",
            PlanError::InsufficientCpu { .. } => "InsufficientCpu",
            PlanError::TooFewGpus { .. } => "TooFewGpus",
            PlanError::NoUsableGpu { .. } => "NoUsableGpu",
            PlanError::InsufficientGpuMemory { .. } => "InsufficientGpuMemory",
        };
        let words = match &self.error {
            PlanError::NoNodes(_) => "no node can take the workers".to_owned(),
            error => one_line(&error.to_string()),
        };
        let left_out = match &self.error {
            error if lacks_nodes(error) => self.candidates.left_out_sentence(),
            _ => None,
        };
        let message = match left_out {
            Some(left_out) => format!("{words}; {left_out}"),
            None if self.candidates.free.is_empty() => {
                format!("{words}: the cluster has none that is measured")
            }
            None => words,
        };
        Cause::trouble(reason, message)
    }
}

/// Whether another node could help.
fn lacks_nodes(error: &PlanError) -> bool {
    matches!(
        error,
        PlanError::NoNodes(_)
            | PlanError::InsufficientMemory { .. }
            | PlanError::TooFewCores { .. }
            | PlanError::InsufficientCpu { .. }
            | PlanError::TooFewGpus { .. }
            | PlanError::NoUsableGpu { .. }
            | PlanError::InsufficientGpuMemory { .. }
    )
}

/// Two lines, what is wrong and what to do, as one sentence.
pub(crate) fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.join("; ")
}

pub(crate) fn refuse(choice: &mut Choice, observed: &Observed, refusal: &Refusal) {
    choice.refusal = Some(refusal.cause());
    choice.wants_nodes = lacks_nodes(&refusal.error) && !observed.nodes.is_empty();
}

/// A plan that does what the newest one does takes its place in name only.
fn take(choice: &mut Choice, newest: Option<&Arc<InferencePlan>>, plan: InferencePlan) {
    if let Some(newest) = newest
        && !has_failed(newest)
        && is_same_work(newest, &plan)
    {
        let keys = [ANNOTATION_INPUTS, ANNOTATION_SPEC];
        choice.marks.push(Marks {
            name: newest.name_any(),
            annotations: keys
                .iter()
                .map(|key| ((*key).to_owned(), annotation(&plan, key).to_owned()))
                .collect(),
        });
        // Its Pods are built from the spec of the marks from now on.
        let mut kept = (**newest).clone();
        let annotations = kept.metadata.annotations.get_or_insert_default();
        for key in keys {
            annotations.insert(key.to_owned(), annotation(&plan, key).to_owned());
        }
        choice.target = Some(Arc::new(kept));
        return;
    }
    choice.target = Some(Arc::new(plan));
    choice.is_new = true;
}

fn is_same_work(old: &InferencePlan, new: &InferencePlan) -> bool {
    let (mut old_work, new_work) = (work(&old.spec), work(&new.spec));
    // Plans of operators that did not write it.
    let image = old_work.worker_image.take();
    old_work.worker_image = image.or_else(|| new_work.worker_image.clone());
    annotation(old, ANNOTATION_SOURCE) == annotation(new, ANNOTATION_SOURCE) && old_work == new_work
}

/// The plan without what says nothing about what is run.
fn work(plan: &InferencePlanSpec) -> InferencePlanSpec {
    let mut plan = plan.clone();
    plan.generation = 0;
    plan.why.clear();
    plan.not_chosen.clear();
    plan.predicted = PlanPrediction {
        ttft_ms: 0.0,
        ttft_prompt_tokens: 0,
        tpot_ms: 0.0,
        tokens_per_second: 0.0,
    };
    for rank in &mut plan.ranks {
        rank.predicted = None;
    }
    plan
}

/// A plan whose nodes are lost, closed or too full is made again, of its own spec, where that is possible.
fn move_on(observed: &Observed, choice: &mut Choice, wanted: Option<&Model>) {
    let Some(target) = choice.target.clone() else {
        return;
    };
    let deployment = deployment_of_plan(&observed.deployment, &target);
    let lost = nodes_of(&target).find(|node| is_lost(observed, node));
    let closed = nodes_of(&target).find_map(|node| {
        let view = observed.nodes.get(node)?;
        let why = is_to_be_left(observed, view, &deployment.spec.placement)?;
        Some((node, why))
    });
    let trouble = match (lost, closed) {
        (Some(node), _) => Some(Cause::trouble("NodeLost", lost_words(observed, node))),
        (None, Some((node, why))) => {
            let reason = if why == "is cordoned" {
                "NodeCordoned"
            } else {
                "NodeTainted"
            };
            Some(Cause::trouble(reason, format!("{node} {why}")))
        }
        (None, None) => None,
    };
    let refused = refusals::standing(observed, &target);
    choice.look_again = refusals::look_again(observed, &target);
    if trouble.is_none() && refused.is_empty() {
        return;
    }
    let Some(known) = told_by(&target) else {
        choice.trouble = trouble;
        return;
    };
    // More nodes may be known to have it by now.
    let is_same = is_of_source(&target, &observed.deployment);
    let model = wanted
        .filter(|model| is_same && model.facts == known.facts)
        .cloned()
        .unwrap_or(known);
    let image = renew::image_of(observed, &target);
    let told = refusals::told_by(&target);
    let mut next = made(observed, &deployment, &model, image, &told);
    let is_way_out = |plan: &InferencePlan| is_worth_it(observed, trouble.is_some(), &target, plan);
    // Where the ledger shows nothing that speaks against the nodes, the scheduler knows better.
    for way in refusals::ways_out(&told, &refused) {
        if next.as_ref().is_ok_and(is_way_out) {
            break;
        }
        next = match made(observed, &deployment, &model, image, &way) {
            Ok(plan) => Ok(plan),
            Err(refusal) => next.and(Err(refusal)),
        };
    }
    let trouble = trouble.or_else(|| refusal_trouble(&refused));
    match next {
        Ok(plan) if is_worth_it(observed, trouble.is_some(), &target, &plan) => {
            choice.target = Some(Arc::new(plan));
            choice.is_new = true;
        }
        Ok(_) => choice.trouble = trouble,
        Err(refusal) => {
            choice.wants_nodes |= trouble.is_some() && lacks_nodes(&refusal.error);
            choice.trouble = trouble.map(|trouble| {
                let words = refusal.cause().message;
                Cause::trouble(
                    trouble.reason,
                    format!(
                        "{}, and its work fits nowhere else: {words}",
                        trouble.message
                    ),
                )
            });
        }
    }
}

/// What is said while workers are refused and nothing else fits.
fn refusal_trouble(refused: &Refusals) -> Option<Cause> {
    let (node, told) = refused.first_key_value()?;
    let message = format!("{node} does not take its work: {told}");
    Some(Cause::trouble("Unschedulable", message))
}

/// A plan like the one that runs, or like one that failed already, changes nothing. Without trouble on its nodes a
/// plan is only left for one that asks them for something else.
fn is_worth_it(
    observed: &Observed,
    has_trouble: bool,
    target: &InferencePlan,
    plan: &InferencePlan,
) -> bool {
    let is_known_to_fail =
        |newest: &Arc<InferencePlan>| has_failed(newest) && is_same_work(newest, plan);
    let moves = || nodes_of(target).ne(nodes_of(plan)) || needs_less(target, plan);
    !is_same_work(target, plan)
        && !observed.plans.last().is_some_and(is_known_to_fail)
        && (has_trouble || moves())
}

/// Whether nodes are asked for less CPU, or for less memory by a tenth: small changes of what is free are no reason to
/// begin anew.
fn needs_less(target: &InferencePlan, plan: &InferencePlan) -> bool {
    let total = |plan: &InferencePlan| -> u64 {
        let held = |rank: &hearth_crds::PlanRank| rank.host_weight_bytes() + rank.host_kv_bytes();
        plan.spec.ranks.iter().map(held).sum()
    };
    let (old, new) = (total(target), total(plan));
    let cpu_millis = |plan: &InferencePlan| -> u64 {
        let ranks = plan.spec.ranks.iter();
        ranks.map(hearth_crds::PlanRank::cpu_millis).sum()
    };
    new < old - old / 10 || cpu_millis(plan) < cpu_millis(target)
}

fn is_of_source(plan: &InferencePlan, deployment: &InferenceDeployment) -> bool {
    let source = &deployment.spec.model.source;
    let key = model_key(deployment, source);
    annotation(plan, ANNOTATION_SOURCE) == source_digest(source, key.as_deref())
}

pub(crate) fn nodes_of(plan: &InferencePlan) -> impl Iterator<Item = &str> {
    plan.spec.ranks.iter().map(|rank| rank.node.as_str())
}

/// What is wrong with a node that is down.
pub(crate) fn lost_words(observed: &Observed, node: &str) -> String {
    match observed.nodes.get(node) {
        Some(_) => format!("node {node} is not Ready"),
        None => format!("node {node} is gone"),
    }
}
