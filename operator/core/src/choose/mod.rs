//! Chooses the plan to run: the existing one, a new one, or an older one that served.

pub(crate) mod refusals;
mod renew;
pub(crate) mod rest;
pub(crate) mod scale;
pub(crate) mod stand_in;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferencePlan, InferencePlanSpec,
    InferencePlanStatus, ModelFacts, PlanInputs, PlanPrediction, PodTemplateSpec, ServedSpec,
};
use hearth_planner::{CpuOffer, GpuOffer, PlanError, PlanInput};
use kube_core::ResourceExt;
use serde::Serialize;
use sha2::{Digest, Sha256};

use self::refusals::Refusals;
use self::scale::scaled;
use crate::build::{
    BuildContext, deployment_of_plan, kept_spec, model_key, model_path, plan_object, source_digest,
};
use crate::candidates::{Candidates, is_lost, is_to_be_left};
use crate::cause::Cause;
use crate::model::{Model, Search, Widened, model_of_plan};
use crate::observed::Observed;
use crate::plan_record::{
    PlanStatusChange, has_failed, has_served, inputs_digest, instead_of, source_digest_of,
    spec_of_plan,
};

/// The plan to run, and the obstacles to a better one.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
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
    /// Reason why it does not change to the operator's worker image yet.
    pub(crate) held: Option<Cause>,
}

/// Chooses for the model that `search` finds; `search` is `None` if the spec is invalid. If the nodes that are known
/// to have the model do not suffice, others are searched, and what is found there counts at once.
pub(crate) fn choose(observed: &Observed, search: Option<&mut Search<'_>>) -> Choice {
    let Some(search) = search else {
        return choose_for(observed, None);
    };
    let mut choice = choose_for(observed, search.known());
    let Some(model) = search.known().filter(|model| model.nodes.is_some()) else {
        return choice;
    };
    if !choice.wants_nodes || choice.is_new {
        return choice;
    }
    let draft = draft_nodes(observed, model);
    let can_wait = choice.target.is_none() && !draft.is_empty();
    match search.widen(draft, can_wait) {
        Widened::Known => choose_for(observed, search.known()),
        Widened::Coming => {
            choice.refusal = None;
            choice
        }
        Widened::Nothing => choice,
    }
}

/// Chooses for a model of the current spec; `wanted` is `None` while it is unknown, or if the spec is invalid.
fn choose_for(observed: &Observed, wanted: Option<&Model>) -> Choice {
    let newest = observed.plans.last();
    let mut choice = rest::keep(observed);
    let deployment = &observed.deployment;
    if let Some(given_up) = stand_in::given_up(observed).filter(|_| wanted.is_some()) {
        stand_in::choose(observed, &mut choice, given_up);
    } else if let Some(model) = wanted
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

/// The newest plan that served before `plan` and that has no lost nodes.
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
/// which records what was tried last.
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

/// The newest plan; if it was given up, the newest that served, preferably one without lost nodes.
pub(crate) fn in_force(observed: &Observed) -> Option<Arc<InferencePlan>> {
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

/// Whether a plan was made for this spec and this model. If another version of the operator encoded its inputs
/// differently, their meaning counts, not the encoding.
fn is_made_for(plan: &InferencePlan, deployment: &InferenceDeployment, facts: &ModelFacts) -> bool {
    if inputs_digest(plan) == inputs(&deployment.spec, facts) {
        return true;
    }
    let (Some(mut then), Some(told)) = (spec_of_plan(plan), model_of_plan(plan)) else {
        return false;
    };
    // A plan stores no secrets of URLs; the model's key distinguishes them.
    let mut now = deployment.spec.clone();
    (now.model, then.model) = (now.model.shown(), then.model.shown());
    let key = model_key(deployment, &deployment.spec.model.source);
    told.key == key && Inputs::of(&then, &told.facts) == Inputs::of(&now, facts)
}

/// Inputs of a plan, apart from the nodes.
#[derive(PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Inputs<'a> {
    model: &'a hearth_crds::ModelSpec,
    strategy: hearth_crds::Strategy,
    prefill: &'a hearth_crds::PrefillSpec,
    decode: &'a hearth_crds::DecodeSpec,
    placement: &'a hearth_crds::PlacementSpec,
    objectives: &'a hearth_crds::ObjectivesSpec,
    #[serde(skip_serializing_if = "hearth_crds::GatewaySpec::is_default")]
    gateway: &'a hearth_crds::GatewaySpec,
    #[serde(skip_serializing_if = "PodTemplateSpec::is_empty")]
    pod_template: &'a PodTemplateSpec,
    #[serde(skip_serializing_if = "Option::is_none")]
    facts: Option<&'a ModelFacts>,
}

impl<'a> Inputs<'a> {
    fn of(spec: &'a InferenceDeploymentSpec, facts: impl Into<Option<&'a ModelFacts>>) -> Self {
        // A field that is added to the spec must be considered here.
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
            gateway,
            pod_template,
            suspend: _,
        } = spec;
        Self {
            model,
            strategy: *strategy,
            prefill,
            decode,
            placement,
            objectives,
            gateway,
            pod_template,
            facts: facts.into(),
        }
    }
}

fn inputs<'a>(
    spec: &'a InferenceDeploymentSpec,
    facts: impl Into<Option<&'a ModelFacts>>,
) -> String {
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
    planned.why.extend(refusals::sentences(refusals));
    planned.inputs = Some(PlanInputs {
        digest: inputs(spec, &model.facts),
        deployment_spec: kept_spec(spec),
        model_facts: serde_json::to_value(&model.facts).unwrap_or_default(),
        model_nodes: model.nodes.iter().flatten().cloned().collect(),
        source_digest: source_digest(&spec.model.source, model.key.as_deref()),
        model_key: model.key.clone(),
        refusals: refusals::as_inputs(refusals),
        instead_of: None,
    });
    Ok(plan_object(&context, planned))
}

/// The nodes of the plan that the spec would get if every node had the model; empty if none fits.
fn draft_nodes(observed: &Observed, model: &Model) -> Vec<String> {
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

/// The planner's error, with the candidates that it was offered.
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
                format!("{words}: no node of the cluster has been measured")
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

/// Joins two lines, the problem and the remedy, into one sentence.
pub(crate) fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.join("; ")
}

pub(crate) fn refuse(choice: &mut Choice, observed: &Observed, refusal: &Refusal) {
    choice.refusal = Some(refusal.cause());
    choice.wants_nodes = lacks_nodes(&refusal.error) && !observed.nodes.is_empty();
}

/// Makes `plan` the target. If it does the same work as the newest plan, that one stays and only records the new spec.
fn take(choice: &mut Choice, newest: Option<&Arc<InferencePlan>>, plan: InferencePlan) {
    if let Some(newest) = newest
        && !has_failed(newest)
        && is_same_work(newest, &plan)
    {
        let served = plan.spec.inputs.map(|inputs| ServedSpec {
            digest: inputs.digest,
            deployment_spec: inputs.deployment_spec,
        });
        let status = InferencePlanStatus {
            serves: served,
            ..InferencePlanStatus::default()
        };
        let change = PlanStatusChange::of(newest, status);
        // Its Pods are built from that spec from now on.
        let mut kept = (**newest).clone();
        kept.status = Some(change.status.clone());
        choice.plan_statuses.push(change);
        choice.target = Some(Arc::new(kept));
        return;
    }
    choice.target = Some(Arc::new(plan));
    choice.is_new = true;
}

fn is_same_work(old: &InferencePlan, new: &InferencePlan) -> bool {
    let (mut old_work, new_work) = (work(&old.spec), work(&new.spec));
    // Plans of operators that did not record it.
    let image = old_work.worker_image.take();
    old_work.worker_image = image.or_else(|| new_work.worker_image.clone());
    source_digest_of(old) == source_digest_of(new)
        && old_work == new_work
        && is_same_template(old, new)
}

/// Whether the Pods of both plans have the same template: a template with which they do not become ready is rolled
/// back, too.
fn is_same_template(old: &InferencePlan, new: &InferencePlan) -> bool {
    match (spec_of_plan(old), spec_of_plan(new)) {
        (Some(old), Some(new)) => old.pod_template == new.pod_template,
        // Plans of operators that did not record it.
        _ => true,
    }
}

/// The plan without the fields that have no effect on what runs.
fn work(plan: &InferencePlanSpec) -> InferencePlanSpec {
    let mut plan = plan.clone();
    plan.generation = 0;
    plan.inputs = None;
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

/// Replans a target whose nodes are lost, closed or too full, from its own spec, where that is possible.
fn move_on(observed: &Observed, choice: &mut Choice, wanted: Option<&Model>) {
    let Some(target) = choice.target.clone() else {
        return;
    };
    let deployment = deployment_of_plan(&observed.deployment, &target);
    let trouble = trouble_of_nodes(observed, &target, &deployment);
    let refused = refusals::standing(observed, &target);
    choice.look_again = refusals::look_again(observed, &target);
    if trouble.is_none() && refused.is_empty() {
        return;
    }
    let Some(known) = model_of_plan(&target) else {
        choice.trouble = trouble;
        return;
    };
    // More nodes may be known to have the model by now.
    let is_same = is_of_source(&target, &observed.deployment);
    let model = wanted
        .filter(|model| is_same && model.facts == known.facts)
        .cloned()
        .unwrap_or(known);
    let image = renew::image_of(observed, &target);
    let told = refusals::refusals_for_next(&target);
    let mut next = made(observed, &deployment, &model, image, &told);
    let is_way_out = |plan: &InferencePlan| is_worth_it(observed, trouble.is_some(), &target, plan);
    // If nothing in the ledger speaks against the nodes, the scheduler knows better.
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
            choice.target = Some(Arc::new(stand_in::of(plan, instead_of(&target))));
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

/// Trouble with the nodes of `target`, which was made for `deployment`; `None` if they are fine.
fn trouble_of_nodes(
    observed: &Observed,
    target: &InferencePlan,
    deployment: &InferenceDeployment,
) -> Option<Cause> {
    let lost = nodes_of(target).find(|node| is_lost(observed, node));
    let closed = nodes_of(target).find_map(|node| {
        let view = observed.nodes.get(node)?;
        let why = is_to_be_left(observed, view, &deployment.spec.placement)?;
        Some((node, why))
    });
    match (lost, closed) {
        (Some(node), _) => Some(Cause::trouble("NodeLost", lost_words(observed, node))),
        (None, Some((node, why))) => {
            let reason = if why == "is cordoned" {
                "NodeCordoned"
            } else {
                "NodeTainted"
            };
            Some(Cause::trouble(reason, format!("{node} {why}")))
        }
        (None, None) if rest::has_lost_its_place(observed, target) => Some(Cause::trouble(
            "NodesTaken",
            "its nodes were given to others while it was suspended".to_owned(),
        )),
        (None, None) => None,
    }
}

/// Cause that is reported while workers are refused and nothing else fits.
fn refusal_trouble(refused: &Refusals) -> Option<Cause> {
    let (node, told) = refused.first_key_value()?;
    let message = format!("{node} does not take its work: {told}");
    Some(Cause::trouble("Unschedulable", message))
}

/// Whether `plan` is worth replacing the target. A plan like the one that runs, or like one that already failed, is
/// not. Without trouble on its nodes, the target is only replaced by a plan that asks the nodes for something else.
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

/// Whether the nodes are asked for less CPU, or for less memory by more than a tenth: small changes in what is free
/// are no reason to start over.
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
    source_digest_of(plan) == source_digest(source, key.as_deref())
}

pub(crate) fn nodes_of(plan: &InferencePlan) -> impl Iterator<Item = &str> {
    plan.spec.ranks.iter().map(|rank| rank.node.as_str())
}

/// Words for a node that is down.
pub(crate) fn lost_words(observed: &Observed, node: &str) -> String {
    match observed.nodes.get(node) {
        Some(_) => format!("node {node} is not Ready"),
        None => format!("node {node} is gone"),
    }
}
