//! Finds a model source's facts and the nodes that have it, or the steps to learn them.

pub(crate) mod builtin;
pub(crate) mod fetched;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferencePlan, ModelFacts, ModelSource};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube_core::ResourceExt;

use self::fetched::{Download, fetched};
use crate::age::is_older;
use crate::build::{BuildContext, inspect_pod, model_key, source_digest};
use crate::candidates::{Candidates, is_lost};
use crate::cause::{Cause, cause, last_words, node_of, quoted};
use crate::conditions::{self, MODEL_READY, SUSPENDED};
use crate::decision::{Grace, PodEnd};
use crate::observed::{Observed, PodRole, PodView};
use crate::plan_record::{
    model_commit_of, model_facts, model_key_of, model_nodes, source_digest_of,
};

/// Maximum number of nodes whose directory is inspected, or on which a model is fetched.
const MOST_NODES: usize = 16;
/// Time after which a mount that has not succeeded is given up.
const MOUNT_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for other nodes once a model was found somewhere.
const OTHERS_PATIENCE: Duration = Duration::from_secs(60);
/// Time after which a failed inspection is repeated: the model may have been put there since.
const LOOK_AGAIN: Duration = Duration::from_secs(300);

/// Reason of ModelReady when the model was not found on any node.
pub(crate) const NOT_FOUND: &str = "ModelNotFound";

/// A model that can be planned.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Model {
    /// Facts that placement needs.
    pub(crate) facts: ModelFacts,
    /// The nodes that have it; `None`: every node.
    pub(crate) nodes: Option<BTreeSet<String>>,
    /// Its name in the nodes' stores, if it is fetched.
    pub(crate) key: Option<String>,
    /// The commit that its nodes have, if it is of a hub and one has told.
    pub(crate) commit: Option<String>,
}

/// State of knowledge about the model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ModelState {
    /// Known well enough to plan with.
    Known(Box<Model>),
    /// Not known yet, or not found, with the cause.
    Unknown(Cause),
}

/// Current knowledge about the model, and the actions to learn more.
#[derive(Clone, Debug)]
pub(crate) struct ModelStep {
    pub(crate) state: ModelState,
    pub(crate) create: Vec<Pod>,
    pub(crate) end: Vec<PodEnd>,
    pub(crate) fetch_on: Vec<String>,
    /// The commit of it that its plans record.
    pub(crate) commit: Option<String>,
    /// What is there of it: on a node that has it, else on the one that is furthest along.
    pub(crate) download: Option<Download>,
    /// The fetch that is furthest along, also while other nodes have the model.
    pub(crate) fetching: Option<Download>,
    pub(crate) look_again: Option<Duration>,
}

impl ModelStep {
    pub(crate) fn of(state: ModelState) -> Self {
        Self {
            state,
            create: Vec::new(),
            end: Vec::new(),
            fetch_on: Vec::new(),
            commit: None,
            download: None,
            fetching: None,
            look_again: None,
        }
    }
}

impl ModelStep {
    /// The same, and what another search takes to have the model on the nodes that it wants.
    #[must_use]
    pub(crate) fn and(mut self, other: &Self) -> Self {
        let is_new = |pod: &&Pod| self.create.iter().all(|it| it.name_any() != pod.name_any());
        let create: Vec<Pod> = other.create.iter().filter(is_new).cloned().collect();
        self.create.extend(create);
        // What either still needs stays.
        self.end.retain(|end| other.end.contains(end));
        for node in &other.fetch_on {
            if !self.fetch_on.contains(node) {
                self.fetch_on.push(node.clone());
            }
        }
        self.fetching = self.fetching.or_else(|| other.fetching.clone());
        let both = [self.look_again, other.look_again];
        self.look_again = both.into_iter().flatten().min();
        self
    }
}

/// Nodes that are wanted beyond those known to have a model.
#[derive(Clone, Debug)]
pub(crate) struct More<'a> {
    /// The model as it is known.
    pub(crate) known: &'a Model,
    /// The nodes of the plan that would be made if all of them had it, and those that could not fetch it; empty: there is no such plan.
    pub(crate) draft: Vec<String>,
}

/// The search for the model of one deployment.
#[derive(Debug)]
pub(crate) struct Search<'a> {
    observed: &'a Observed,
    candidates: Candidates,
    step: ModelStep,
}

/// Result of looking at more nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Widened {
    /// The model is known, with the nodes that have it by now.
    Known,
    /// It is on its way to sufficient nodes; until then it counts as unknown.
    Coming,
    /// It does not come to sufficient nodes, and this is why.
    Failed(Cause),
    /// Nothing more is known.
    Nothing,
}

impl<'a> Search<'a> {
    /// Starts from what the plans record of the model, or by inspecting the nodes.
    pub(crate) fn of(observed: &'a Observed) -> Self {
        let candidates = Candidates::of(observed, &observed.deployment.spec.placement);
        let step = find(observed, &candidates, None);
        Self {
            observed,
            candidates,
            step,
        }
    }

    /// The model, as far as it is known.
    pub(crate) fn known(&self) -> Option<&Model> {
        match &self.step.state {
            ModelState::Known(model) => Some(model),
            ModelState::Unknown(_) => None,
        }
    }

    /// Looks at nodes beyond those that are known to have the model. A model that is fetched, is so on the nodes of
    /// `draft`, those of the plan that would be made if all had it, among others. `can_wait`: nothing is running that could continue, and the
    /// draft would do.
    pub(crate) fn widen(&mut self, draft: Vec<String>, can_wait: bool) -> Widened {
        let Some(known) = self.known() else {
            return Widened::Nothing;
        };
        let more = More { known, draft };
        let mut wider = find(self.observed, &self.candidates, Some(&more));
        let widened = match &wider.state {
            ModelState::Known(_) => Widened::Known,
            ModelState::Unknown(cause) if can_wait && !cause.is_trouble => Widened::Coming,
            ModelState::Unknown(cause) if can_wait => Widened::Failed(cause.clone()),
            ModelState::Unknown(_) => Widened::Nothing,
        };
        if matches!(widened, Widened::Nothing | Widened::Failed(_)) {
            // What is known stays known while the search continues.
            wider.state = self.step.state.clone();
        }
        self.step = wider;
        widened
    }

    /// Returns the step for a suspended deployment: nothing more is looked for, and what was fetched stays.
    pub(crate) fn at_rest(self, observed: &Observed) -> ModelStep {
        let mut step = self.step;
        if let ModelState::Unknown(cause) = &mut step.state
            && !cause.is_trouble
        {
            let message = "the model is looked for when the deployment is resumed";
            *cause = Cause::waiting(SUSPENDED, message.to_owned());
            step.fetch_on.clear();
        }
        step.create.clear();
        step.look_again = None;
        step.end = end_inspections(observed, |_| true);
        step
    }

    /// Returns what is known, and the actions to learn more.
    pub(crate) fn into_step(self) -> ModelStep {
        self.step
    }
}

/// Looks for the model of the spec among `candidates`; with `more`, at nodes beyond those that are known to have it too.
fn find(observed: &Observed, candidates: &Candidates, more: Option<&More<'_>>) -> ModelStep {
    let source = &observed.deployment.spec.model.source;
    let key = model_key(&observed.deployment, source);
    let digest = source_digest(source, key.as_deref());
    if let Some(builtin) = &source.builtin {
        // A plan's record is for the image that it has.
        let told = model_of_plans(&observed.plans, &digest).map(|model| model.facts);
        let state = match told.or_else(|| builtin::facts(&builtin.name)) {
            Some(facts) => known(facts, None, None),
            None => ModelState::Unknown(Cause::trouble(
                NOT_FOUND,
                format!("no model {} comes with this version", builtin.name),
            )),
        };
        let mut step = ModelStep::of(state);
        step.end = end_inspections(observed, |_| true);
        return step;
    }
    let told = model_of_plans(&observed.plans, &digest);
    let mut step = if source.is_fetched() {
        let mut step = fetched(observed, candidates, told.as_ref(), more);
        step.commit = told.and_then(|model| model.commit);
        if let ModelState::Known(model) = &mut step.state {
            let commit = step.commit.as_ref().or(observed.fetched_commit.as_ref());
            model.commit = commit.cloned();
        }
        step
    } else {
        inspected(observed, candidates, told.as_ref(), more.is_some())
    };
    let strangers = end_inspections(observed, |pod| pod.source != digest);
    step.end.extend(strangers);
    keep_refusal(observed, &mut step);
    step
}

/// The model as a plan records it.
pub(crate) fn model_of_plan(plan: &InferencePlan) -> Option<Model> {
    let facts = model_facts(plan)?;
    let nodes = model_nodes(plan).into_iter().map(str::to_owned);
    let nodes = Some(nodes.collect()).filter(|nodes: &BTreeSet<String>| !nodes.is_empty());
    let key = model_key_of(plan);
    let commit = model_commit_of(plan).map(str::to_owned);
    Some(Model {
        facts,
        nodes,
        key,
        commit,
    })
}

pub(crate) fn known(
    facts: ModelFacts,
    nodes: Option<BTreeSet<String>>,
    key: Option<String>,
) -> ModelState {
    ModelState::Known(Box::new(Model {
        facts,
        nodes,
        key,
        commit: None,
    }))
}

fn model_of_plans(plans: &[Arc<InferencePlan>], digest: &str) -> Option<Model> {
    let is_of_source = |plan: &&Arc<InferencePlan>| source_digest_of(plan) == digest;
    plans
        .iter()
        .rev()
        .filter(is_of_source)
        .find_map(|plan| model_of_plan(plan))
}

fn inspections(observed: &Observed) -> impl Iterator<Item = &Arc<PodView>> {
    observed
        .pods
        .iter()
        .filter(|pod| pod.role == PodRole::Inspect)
}

fn end_inspections(observed: &Observed, which: impl Fn(&PodView) -> bool) -> Vec<PodEnd> {
    inspections(observed)
        .filter(|pod| which(pod) && !pod.is_deleting)
        .map(|pod| end_of(pod))
        .collect()
}

/// Deletion of an inspect Pod, which holds nothing that needs grace.
fn end_of(pod: &PodView) -> PodEnd {
    PodEnd {
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        grace: Grace::None,
    }
}

/// Keeps reporting a model as not found, instead of as being looked for each time the search is repeated.
fn keep_refusal(observed: &Observed, step: &mut ModelStep) {
    let ModelState::Unknown(cause) = &mut step.state else {
        return;
    };
    let deployment = &observed.deployment;
    let old = conditions::of(deployment.status.as_ref(), MODEL_READY).filter(|old| {
        old.reason == NOT_FOUND && old.observed_generation == deployment.metadata.generation
    });
    if let (Some(old), false) = (old, cause.is_trouble) {
        *cause = Cause::trouble(NOT_FOUND, old.message.clone());
    }
}

/// Results of the inspections so far.
#[derive(Default)]
struct Looks {
    found: Vec<(String, ModelFacts)>,
    missing: Vec<(String, String)>,
    waiting: Vec<(Option<Timestamp>, Cause)>,
}

fn inspected(
    observed: &Observed,
    candidates: &Candidates,
    told: Option<&Model>,
    more: bool,
) -> ModelStep {
    if let (Some(model), false) = (told, more) {
        let mut step = ModelStep::of(ModelState::Known(Box::new(model.clone())));
        step.end = end_inspections(observed, |_| true);
        return step;
    }
    let source = &observed.deployment.spec.model.source;
    if let Some(claim) = &source.persistent_volume_claim
        && observed.claim_modes == ["ReadWriteOncePod"]
    {
        return ModelStep::of(ModelState::Unknown(Cause::trouble(
            "ClaimNotShared",
            format!(
                "the claim {} is ReadWriteOncePod, for one Pod alone, and a deployment has several: name a claim that is \
                 ReadWriteOnce, ReadOnlyMany or ReadWriteMany",
                claim.claim_name
            ),
        )));
    }
    let has_it = |name: &str| {
        let nodes = told.and_then(|model| model.nodes.as_ref());
        nodes.is_some_and(|nodes| nodes.contains(name))
    };
    let targets: Vec<Option<&str>> = if source.persistent_volume_claim.is_some() {
        vec![None]
    } else {
        let names = candidates.free.keys().filter(|name| !has_it(name));
        names
            .take(MOST_NODES)
            .map(|name| Some(name.as_str()))
            .collect()
    };
    let mut step = ModelStep::of(ModelState::Unknown(nowhere(candidates)));
    let mut looks = Looks::default();
    for target in targets {
        look(observed, target, &mut looks, &mut step);
    }
    let now = observed.now;
    let is_late = |created: &Option<Timestamp>| is_older(*created, now, OTHERS_PATIENCE);
    let has_any = told.is_some() || !looks.found.is_empty();
    let waits = looks
        .waiting
        .iter()
        .filter(|(created, _)| !(has_any && is_late(created)))
        .count();
    if waits > 0 {
        step.look_again = Some(MOUNT_PATIENCE);
    }
    step.state = verdict(source, told, looks, waits > 0, candidates);
    if let ModelState::Known(model) = &mut step.state
        && is_mounted_anywhere(observed)
    {
        model.nodes = None;
    }
    step
}

/// Whether the model's claim can be mounted by Pods of any node; a claim for one node stays where it is mounted.
fn is_mounted_anywhere(observed: &Observed) -> bool {
    let mut modes = observed.claim_modes.iter();
    modes.any(|mode| matches!(mode.as_str(), "ReadOnlyMany" | "ReadWriteMany"))
}

/// Evaluates one inspect Pod: what it found, or the action that follows.
fn look(observed: &Observed, target: Option<&str>, looks: &mut Looks, step: &mut ModelStep) {
    let source = &observed.deployment.spec.model.source;
    let context = BuildContext {
        settings: &observed.settings,
        deployment: &observed.deployment,
        model_key: None,
    };
    let wanted = inspect_pod(&context, source, target);
    let name = wanted.metadata.name.clone().unwrap_or_default();
    let place = target.unwrap_or_default();
    let Some(pod) = inspections(observed).find(|pod| pod.name == name) else {
        step.create.push(wanted);
        let message = match target {
            Some(node) => format!("the model is being looked for on {node}"),
            None => "the model is being looked for in the claim".to_owned(),
        };
        looks
            .waiting
            .push((None, Cause::waiting("Inspecting", message)));
        return;
    };
    let node = match node_of(pod) {
        "" => place,
        node => node,
    };
    if !node.is_empty() && is_lost(observed, node) {
        step.end.push(end_of(pod));
        return;
    }
    if let Some(facts) = facts_of(pod) {
        looks.found.push((node.to_owned(), facts));
        return;
    }
    let why = cause("the look at the model", pod);
    let is_stuck = why.is_trouble && is_older(pod.created, observed.now, MOUNT_PATIENCE);
    match pod.phase.as_str() {
        "Failed" | "Succeeded" => {
            looks.missing.push((node.to_owned(), words_of(pod)));
            repeat(observed, pod, step);
        }
        _ if is_stuck && why.reason == "MountFailed" && target.is_some() => {
            let words = pod.setup_warning.as_deref().unwrap_or_default();
            looks
                .missing
                .push((node.to_owned(), quoted(mount_words(words))));
            repeat(observed, pod, step);
        }
        _ => looks.waiting.push((pod.created, why)),
    }
}

/// The kubelet's message about a missing directory, without volume names and numbers.
fn mount_words(words: &str) -> &str {
    match words.find("hostPath type check failed") {
        Some(start) => &words[start..],
        None => words,
    }
}

fn facts_of(pod: &PodView) -> Option<ModelFacts> {
    if pod.phase != "Succeeded" {
        return None;
    }
    let end = pod.container.as_ref()?.last_end.as_ref()?;
    serde_json::from_str(&end.message).ok()
}

fn words_of(pod: &PodView) -> String {
    let end = pod
        .container
        .as_ref()
        .and_then(|container| container.last_end.as_ref());
    match end.map(|end| last_words(&end.message)) {
        Some(words) if !words.is_empty() => words,
        _ if !pod.message.is_empty() => quoted(&pod.message),
        _ => "the look at the model ended without a word".to_owned(),
    }
}

fn repeat(observed: &Observed, pod: &PodView, step: &mut ModelStep) {
    step.look_again = Some(LOOK_AGAIN);
    if is_older(pod.created, observed.now, LOOK_AGAIN) && !pod.is_deleting {
        step.end.push(end_of(pod));
    }
}

/// Result of all inspections. Nodes whose directories hold different models are not mixed: the larger group counts.
fn verdict(
    source: &ModelSource,
    told: Option<&Model>,
    looks: Looks,
    is_waiting: bool,
    candidates: &Candidates,
) -> ModelState {
    let Looks {
        found,
        missing,
        waiting,
    } = looks;
    if is_waiting {
        let first = waiting.into_iter().next().map(|(_, cause)| cause);
        return ModelState::Unknown(first.unwrap_or_else(|| nowhere(candidates)));
    }
    let facts = match told {
        Some(model) => Some(model.facts.clone()),
        None => most_common(&found),
    };
    if let Some(facts) = facts {
        let same = found
            .into_iter()
            .filter(|(_, other)| other.are_of_the_model_of(&facts));
        let told = told
            .and_then(|model| model.nodes.clone())
            .unwrap_or_default();
        let nodes: BTreeSet<String> = same.map(|(node, _)| node).chain(told).collect();
        return known(facts, Some(nodes), None);
    }
    let Some((_, first)) = missing.first() else {
        return ModelState::Unknown(nowhere(candidates));
    };
    let message = if source.persistent_volume_claim.is_some() {
        format!("the model is not in {}: {first}", source.describe())
    } else {
        let list: Vec<String> = missing
            .iter()
            .map(|(node, why)| format!("{node}: {why}"))
            .collect();
        format!(
            "no node has the model of {}: {}. Put it on a node, or correct the path",
            source.describe(),
            list.join("; ")
        )
    };
    ModelState::Unknown(Cause::trouble(NOT_FOUND, message))
}

fn most_common(found: &[(String, ModelFacts)]) -> Option<ModelFacts> {
    let count = |facts: &ModelFacts| found.iter().filter(|(_, other)| other == facts).count();
    let mut best: Option<&ModelFacts> = None;
    for (_, facts) in found {
        if best.is_none_or(|best| count(facts) > count(best)) {
            best = Some(facts);
        }
    }
    best.cloned()
}

pub(crate) fn nowhere(candidates: &Candidates) -> Cause {
    let why = candidates
        .left_out_sentence()
        .unwrap_or_else(|| "the cluster has no node".to_owned());
    Cause::waiting(
        "NoNodes",
        format!("there is no node to look for the model on; {why}"),
    )
}
