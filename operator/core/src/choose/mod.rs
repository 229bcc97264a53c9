//! Chooses the plan to run: the existing one, a new one, or an older one that served.

mod choice;
mod existing;
mod gpu_room;
pub(crate) mod lost_gpus;
mod new_plan;
pub(crate) mod refusals;
mod renew;
pub(crate) mod rest;
pub(crate) mod scale;
pub(crate) mod stand_in;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferenceDeployment, InferencePlan, InferencePlanStatus, PlanRank, ServedSpec};

pub(crate) use self::choice::PlanChoice;
use self::choice::{refuse, refuse_number};
pub(crate) use self::existing::{in_force, lost_words, unneeded, way_back, worker_nodes_of};
use self::existing::{is_of_source, is_same_work, nodes_of};
use self::new_plan::{is_made_for, lacks_nodes, made};
use self::refusals::Refusals;
use self::scale::scaled;
use crate::build::deployment_of_plan;
use crate::candidates::{Candidates, is_lost, is_to_be_left};
use crate::cause::Cause;
use crate::conditions::NODES_TAKEN;
use crate::model::{Model, Search, Widened, model_of_plan};
use crate::observed::{FetchView, Holding, Observed};
use crate::plan_record::{PlanStatusChange, has_failed, instead_of};
use crate::sharing::{Who, in_the_way, in_the_way_in_time};

/// Time after which one that finds no room looks again for others that could make some.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(10);

/// Chooses for the model that `search` finds; `search` is `None` if the spec is invalid. If the nodes that are known
/// to have the model do not suffice, others are searched, and what is found there counts at once.
pub(crate) fn choose(observed: &Observed, search: Option<&mut Search<'_>>) -> PlanChoice {
    let Some(search) = search else {
        return choose_for(observed, None);
    };
    let mut choice = choose_among_nodes(observed, search);
    match rest::taken_gpus(observed, &choice) {
        Some(taken) => wait_for_gpus(observed, taken, &mut choice),
        None => ask_others(observed, search.known(), &mut choice),
    }
    choice
}

/// Same as [`choose`] where nodes have room for the workers now that nobody else is about to get; else why not, and nobody is asked for
/// any.
///
/// # Errors
/// What keeps the workers from starting, in words.
pub(crate) fn with_room(
    observed: &Observed,
    search: &mut Search<'_>,
) -> Result<PlanChoice, String> {
    let is_awaited = |choice: &PlanChoice| {
        let target = choice.target.as_deref();
        target.is_some_and(|plan| {
            let mut nodes = worker_nodes_of(plan);
            nodes.any(|node| observed.awaited_nodes.contains(node))
        })
    };
    let mut choice = choose_among_nodes(observed, search);
    if is_awaited(&choice) {
        choice = choose_among_nodes(&without_awaited(observed), search);
    }
    if let Some((_, trouble)) = rest::taken_gpus(observed, &choice) {
        return Err(trouble.message);
    }
    let awaited = || {
        let nodes: Vec<&str> = observed.awaited_nodes.iter().map(String::as_str).collect();
        format!("others are about to start on {}", nodes.join(" and "))
    };
    if let Some(obstacle) = choice.refusal.as_ref().or(choice.trouble.as_ref()) {
        let words = &obstacle.message;
        return Err(match observed.awaited_nodes.is_empty() {
            true => words.clone(),
            false => format!("{}; {words}", awaited()),
        });
    }
    match choice.target {
        None => Err("its model is being looked for".to_owned()),
        Some(_) if is_awaited(&choice) => Err(awaited()),
        Some(_) => Ok(choice),
    }
}

/// The cluster as it is for one that leaves to others the nodes that they wait for.
fn without_awaited(observed: &Observed) -> Observed {
    let mut left = observed.clone();
    for name in &observed.awaited_nodes {
        let Some(node) = observed.nodes.get(name) else {
            continue;
        };
        let everything = Holding {
            cpu_millis: node.cpu_millis,
            memory_bytes: node.memory_bytes,
            gpus: node.gpus,
            claimed_gpus: observed.claimable.get(name).cloned().unwrap_or_default(),
            ..Holding::default()
        };
        left.held_by_others.insert(name.clone(), everything);
    }
    left
}

/// Chooses for the model on the nodes that are known to have it, or on others where these do not suffice.
fn choose_among_nodes(observed: &Observed, search: &mut Search<'_>) -> PlanChoice {
    let mut choice = choose_for(observed, search.known());
    let Some(model) = search.known().filter(|model| model.nodes.is_some()) else {
        return choice;
    };
    if !choice.wants_nodes || choice.is_new {
        return choice;
    }
    let draft = draft(observed, model);
    let of_draft = draft.iter().flat_map(nodes_of).map(str::to_owned);
    // Those that could not fetch it are asked again, as long as they may have workers: nobody else remembers them.
    let candidates = Candidates::of(observed, &observed.deployment.spec.placement);
    let failed = observed.fetches.keys().map(ToString::to_string);
    let failed = failed.filter(|name| {
        let may_have_workers = candidates.free.contains_key(name);
        draft.is_some() && may_have_workers && has_failed_to_fetch(observed, name)
    });
    let nodes: BTreeSet<String> = of_draft.chain(failed).collect();
    let can_wait = choice.target.is_none() && draft.is_some();
    match search.widen(nodes.into_iter().collect(), can_wait) {
        Widened::Known => choose_for(observed, search.known()),
        Widened::Coming => {
            choice.refusal = None;
            choice
        }
        Widened::Failed(mut cause) => {
            // More nodes would do: what keeps the model from them is the obstacle.
            cause.message +=
                &draft.map_or_else(String::new, |plan| members_without(observed, &plan));
            choice.refusal = Some(cause);
            choice
        }
        Widened::Nothing => choice,
    }
}

/// Keeps the plan that would be replaced by one with fewer workers on GPUs where others, who have its place, are about to end theirs, or
/// will be once these are ready.
fn wait_for_gpus(
    observed: &Observed,
    (plan, mut trouble): (Arc<InferencePlan>, Cause),
    choice: &mut PlanChoice,
) {
    let fits = |then: &Observed| {
        let deployment = deployment_of_plan(&then.deployment, &plan);
        let is_free = trouble_of_nodes(then, &plan, &deployment).is_none();
        is_free.then(|| worker_nodes_of(&plan).map(str::to_owned).collect())
    };
    let Some(others) = in_the_way_in_time(observed, &fits) else {
        return;
    };
    let words = others.words(observed);
    let Who::Asked(asks) = others.who else {
        return;
    };
    // One that stays busy may do so for ever.
    if others.nodes.is_empty() {
        return;
    }
    trouble.message += &format!("; {words}");
    *choice = PlanChoice {
        plan_statuses: std::mem::take(&mut choice.plan_statuses),
        trouble: Some(trouble),
        look_again: Some(LOOK_FOR_ROOM),
        asks,
        awaits: others.nodes,
        others_have_room: true,
        waits_for_place: true,
        ..rest::keep(observed)
    };
}

/// Where no node has room, finds out which others could make some by ending their workers, and says so.
fn ask_others(observed: &Observed, wanted: Option<&Model>, choice: &mut PlanChoice) {
    let obstacle = choice.refusal.as_ref().or(choice.trouble.as_ref());
    // The place may be gone although a refusal of the current spec is told first.
    let wants_room = choice.waits_for_place || (obstacle.is_some() && choice.wants_nodes);
    if choice.is_new || !wants_room {
        return;
    }
    if !observed.neighbours.is_empty() {
        // Others become idle without a word to this one.
        choice.look_again_after(LOOK_FOR_ROOM);
    }
    let fits = |then: &Observed| {
        let choice = choose_for(then, wanted);
        let fits = choice.refusal.is_none() && choice.trouble.is_none();
        let target = choice.target.filter(|_| fits)?;
        Some(worker_nodes_of(&target).map(str::to_owned).collect())
    };
    let Some(others) = in_the_way(observed, &fits) else {
        return;
    };
    let obstacle = choice.refusal.as_mut().or(choice.trouble.as_mut());
    if let Some(cause) = obstacle {
        cause.message += &format!("; {}", others.words(observed));
    }
    choice.others_have_room = true;
    choice.awaits = others.nodes;
    if let Who::Asked(asked) = others.who {
        choice.asks = asked;
    }
}

/// Chooses for a model of the current spec; `wanted` is `None` while it is unknown, or if the spec is invalid.
fn choose_for(observed: &Observed, wanted: Option<&Model>) -> PlanChoice {
    let newest = observed.plans.last();
    let mut choice = rest::keep(observed);
    let deployment = &observed.deployment;
    if let Some(given_up) = stand_in::given_up(observed).filter(|_| wanted.is_some()) {
        stand_in::choose(observed, &mut choice, given_up);
    } else if let Some(model) = wanted
        && newest.is_none_or(|plan| !is_made_for(plan, deployment, &model.facts))
    {
        let image = renew::image_of_next(observed);
        let made = |deployment: &InferenceDeployment| {
            made(observed, deployment, model, image, &Refusals::new())
        };
        let scaled = |plan: InferencePlan| {
            let made = |deployment: &InferenceDeployment| made(deployment).ok();
            scaled(observed, newest, plan, &model.facts, &made)
        };
        match made(deployment).map(scaled) {
            Ok(Ok(plan)) => take(&mut choice, newest, plan),
            Ok(Err(cause)) => refuse_number(&mut choice, cause),
            Err(error) => refuse(&mut choice, observed, &error),
        }
    }
    if !choice.is_new {
        move_on(observed, &mut choice, wanted);
    }
    if !choice.is_new {
        renew::renew(observed, &mut choice);
    }
    let trouble = choice.trouble.as_ref().filter(|_| !choice.is_new);
    if trouble.is_some_and(|cause| cause.reason == NODES_TAKEN) {
        choice.waits_for_place = true;
        choice.look_again_after(LOOK_FOR_ROOM);
    }
    choice
}

/// The plan that would be made if all nodes had the model: without those that could not fetch it, if that is possible; `None` if
/// there is no such plan.
fn draft(observed: &Observed, model: &Model) -> Option<InferencePlan> {
    let image = renew::image_of_next(observed);
    let plan_on = |nodes: Option<BTreeSet<String>>| {
        let there = Model {
            nodes,
            ..model.clone()
        };
        let none = Refusals::new();
        made(observed, &observed.deployment, &there, image, &none).ok()
    };
    let names = observed.nodes.keys();
    let others: BTreeSet<String> = names
        .filter(|name| !has_failed_to_fetch(observed, name))
        .map(|name| name.to_string())
        .collect();
    let is_short = others.len() < observed.nodes.len();
    let without = is_short.then(|| plan_on(Some(others))).flatten();
    without.or_else(|| plan_on(None))
}

fn has_failed_to_fetch(observed: &Observed, node: &str) -> bool {
    matches!(observed.fetches.get(node), Some(FetchView::Failed(_)))
}

/// The members of a group that would be on nodes that cannot fetch the model, in words; empty if there are none.
fn members_without(observed: &Observed, plan: &InferencePlan) -> String {
    let members = plan.spec.ranks.iter().filter(|rank| rank.group().is_some());
    let without = members.filter(|rank| has_failed_to_fetch(observed, &rank.node));
    let names: Vec<String> = without
        .map(|rank| format!("{} on {}", rank.name, rank.node))
        .collect();
    match names.is_empty() {
        true => String::new(),
        false => format!("; the group waits for {}", names.join(", ")),
    }
}

/// Makes `plan` the target. If it does the same work as the newest plan, that one stays and only records the new spec.
fn take(choice: &mut PlanChoice, newest: Option<&Arc<InferencePlan>>, plan: InferencePlan) {
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

/// Replans a target whose nodes are lost, closed or too full, or whose GPUs are lost, from its own spec, where that is
/// possible.
fn move_on(observed: &Observed, choice: &mut PlanChoice, wanted: Option<&Model>) {
    let Some(target) = choice.target.clone() else {
        return;
    };
    let deployment = deployment_of_plan(&observed.deployment, &target);
    let trouble = trouble_of_nodes(observed, &target, &deployment)
        .or_else(|| lost_gpus::trouble(observed, &target));
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
        .filter(|model| is_same && model.facts.are_of_the_model_of(&known.facts))
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
    if rest::has_lost_its_place(observed, target) {
        // Of what it has no workers for it holds nothing, until it has a place on all of its nodes.
        let words = match (lost, closed) {
            (Some(node), _) => lost_words(observed, node),
            (None, Some((node, why))) => format!("{node} {why}"),
            (None, None) => {
                "others were given room of its plan in which it had no workers".to_owned()
            }
        };
        return Some(Cause::trouble(NODES_TAKEN, words));
    }
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
        let held = |rank: &PlanRank| rank.host_weight_bytes() + rank.host_kv_bytes();
        plan.spec.ranks.iter().map(held).sum()
    };
    let (old, new) = (total(target), total(plan));
    let cpu_millis = |plan: &InferencePlan| -> u64 {
        let ranks = plan.spec.ranks.iter();
        ranks.map(PlanRank::cpu_millis).sum()
    };
    new < old - old / 10 || cpu_millis(plan) < cpu_millis(target)
}
