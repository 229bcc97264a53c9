//! Deployments that share nodes: one that finds no room asks others to end their workers, which start again with the next request.
//!
//! Only workers that may end for want of requests (`decode.scaling.minReplicas: 0`) end for others, and for one whose workers never
//! end only if its priority is higher. Whoever is ready keeps its workers for a while: a start must be worth it. Then it gives way
//! where it is idle, and where it is not, to a higher priority, and to an equal one that has waited for long. One that keeps its workers
//! (`autoscaling.keep`) gives way to a higher priority alone. Its workers drain: what they have begun they finish, and what arrives is
//! held by its gateways until it has a place again, for which it asks in turn.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;
use std::time::Duration;

use hearth_crds::InferenceDeploymentSpec;

use crate::age::age;
use crate::key::Key;
use crate::observed::{Asker, Neighbour, Observed};

/// Time without a request after which workers are idle enough to end for others.
pub(crate) const IDLE: Duration = Duration::from_secs(10);
/// Time for which another of the same priority waits for workers that are never idle.
const TURN: Duration = Duration::from_secs(120);
/// The highest `spec.priority` that there is.
const HIGHEST_PRIORITY: i32 = 1000;
/// Most others of whom each is tried without.
const MOST: usize = 8;

/// Workers that are ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awake {
    /// For how long they have been.
    pub(crate) ready_for: Duration,
    /// For how long there has been no request.
    pub(crate) idle: Duration,
}

/// For whom ready workers end first, and the time until they do if nothing arrives; `None` if nobody asks, or they stay.
pub(crate) fn gives_way(observed: &Observed, awake: Awake) -> Option<(&Asker, Duration)> {
    let own = observed.deployment.spec.priority;
    let left = |asker: &Asker| {
        let until_idle = IDLE.saturating_sub(awake.idle);
        let until_turn = match asker.priority.cmp(&own) {
            Ordering::Less => until_idle,
            Ordering::Equal => TURN.saturating_sub(age(asker.since, observed.now)),
            Ordering::Greater => Duration::ZERO,
        };
        let residence = observed.settings.nodes.min_residence;
        let until_worth = residence.saturating_sub(awake.ready_for);
        until_worth.max(until_idle.min(until_turn))
    };
    let askers = may_take(observed).map(|asker| (asker, left(asker)));
    askers.min_by_key(|(asker, left)| (*left, Reverse(asker.priority)))
}

/// For whom workers end at once that nobody has needed since they started.
pub(crate) fn comes_first(observed: &Observed) -> Option<&Asker> {
    may_take(observed).max_by_key(|asker| (asker.priority, Reverse(asker.since)))
}

/// Those who ask and may be given this one's place.
fn may_take(observed: &Observed) -> impl Iterator<Item = &Asker> {
    let spec = &observed.deployment.spec;
    let is_kept_from = |asker: &Asker| spec.autoscaling.keep && asker.priority <= spec.priority;
    let askers = observed.askers.iter();
    askers.filter(move |asker| !is_kept_from(asker))
}

/// Others whose workers are where those of one have to be that finds no room.
#[derive(Debug)]
pub(crate) struct InTheWay {
    /// Who they are.
    pub(crate) who: Who,
    /// Nodes that its workers will have once theirs have ended, those with room for them now among them; empty as long as some of them
    /// keep theirs.
    pub(crate) nodes: BTreeSet<String>,
}

/// Who must end their workers for one that finds no room.
#[derive(Debug)]
pub(crate) enum Who {
    /// These will, once they may.
    Asked(Vec<Key>),
    /// These do not at this one's priority, and the others do not suffice.
    Kept {
        /// Who they are.
        by: Vec<Key>,
        /// The highest of their priorities.
        priority: i32,
        /// Whether each of them keeps its workers from everybody of that priority; else some would end them for one that gives back.
        keep: bool,
    },
}

impl InTheWay {
    /// What the one that finds no room says about them.
    pub(crate) fn words(&self, observed: &Observed) -> String {
        let names = |keys: &[Key]| {
            let names: BTreeSet<String> = keys.iter().map(|key| called(observed, key)).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            names.join(" and ")
        };
        let (by, priority, keep) = match &self.who {
            Who::Asked(asked) => {
                return format!("it waits until {} can end its workers", names(asked));
            }
            Who::Kept { by, priority, keep } => (names(by), *priority, *keep),
        };
        let spec = &observed.deployment.spec;
        let (verb, why, remedy) = match keep {
            true => ("kept", "", ", or without their autoscaling.keep"),
            false if spec.may_rest() => ("taken", ", as this one has autoscaling.keep", ""),
            false => ("taken", ", as the workers of this one end for nobody", ""),
        };
        match priority < HIGHEST_PRIORITY {
            true => format!(
                "the place is {verb} by {by}, whose workers end for this deployment only if the spec.priority of this one is above {priority}{why}"
            ),
            false => format!(
                "the place is {verb} by {by}, whose spec.priority {priority} is the highest: these workers end for this deployment only if they are unloaded{remedy}{why}"
            ),
        }
    }
}

/// Others that must end their workers so that `fits` has a plan, the nodes of whose workers it gives: those that are ending already, then
/// idle ones of low priority, the least recently used first, then those of low priority. `None` if all of them together would not do.
/// Those whose workers are starting are left out.
pub(crate) fn in_the_way(
    observed: &Observed,
    fits: &dyn Fn(&Observed) -> Option<BTreeSet<String>>,
) -> Option<InTheWay> {
    let mut others = ordered(observed);
    others.retain(|it| !it.is_starting);
    in_the_way_of(observed, others, fits)
}

/// Same as [`in_the_way`], with those that are starting as the last ones: for a place for which it is worth waiting until they may end.
pub(crate) fn in_the_way_in_time(
    observed: &Observed,
    fits: &dyn Fn(&Observed) -> Option<BTreeSet<String>>,
) -> Option<InTheWay> {
    in_the_way_of(observed, ordered(observed), fits)
}

fn in_the_way_of(
    observed: &Observed,
    others: Vec<&Neighbour>,
    fits: &dyn Fn(&Observed) -> Option<BTreeSet<String>>,
) -> Option<InTheWay> {
    let spec = &observed.deployment.spec;
    // Whoever keeps its workers gives nothing back.
    let gives_back = spec.may_rest() && !spec.autoscaling.keep;
    let may_ask =
        |it: &&Neighbour| it.is_leaving || it.priority < spec.priority || (gives_back && !it.keeps);
    let (askable, mut kept): (Vec<&Neighbour>, Vec<&Neighbour>) =
        others.into_iter().partition(may_ask);
    if let Some((asked, nodes)) = fewest(observed, &askable, fits) {
        // Nobody ends workers in vain while another stays busy, and nobody waits meanwhile for the room that there is.
        let staying: Vec<&Neighbour> = asked.iter().copied().filter(|it| stays(it, spec)).collect();
        let (asked, nodes) = match staying.is_empty() {
            true => (asked, nodes),
            false => (staying, BTreeSet::new()),
        };
        let who = Who::Asked(keys(&asked));
        return Some(InTheWay { who, nodes });
    }
    if kept.is_empty() {
        return None;
    }
    // The least priority that would do is told.
    kept.sort_by_key(|it| it.priority);
    let (needed, _) = fewest(observed, &[askable, kept].concat(), fits)?;
    let by: Vec<&Neighbour> = needed.into_iter().filter(|it| !may_ask(it)).collect();
    let priority = by.iter().map(|it| it.priority).max()?;
    let who = Who::Kept {
        by: keys(&by),
        priority,
        keep: by.iter().all(|it| it.keeps),
    };
    Some(InTheWay {
        who,
        nodes: BTreeSet::new(),
    })
}

/// Others that must end their workers so that `fits` has a plan for a pool that grows: only those that nobody has needed since they
/// were started without a request, and those that are ending already, which are not asked. `None` if they would not do.
pub(crate) fn unneeded_in_the_way(
    observed: &Observed,
    fits: &dyn Fn(&Observed) -> Option<BTreeSet<String>>,
) -> Option<(InTheWay, Vec<Key>)> {
    let own = observed.deployment.spec.priority;
    let is_unneeded = |it: &Neighbour| {
        let started_s = it.preloaded_since.map(|since| age(since, observed.now));
        !it.is_starting && started_s.is_some_and(|started| it.idle_s >= Some(started.as_secs_f64()))
    };
    let may_ask =
        |it: &&Neighbour| it.is_leaving || (is_unneeded(it) && (!it.keeps || it.priority < own));
    let unneeded: Vec<&Neighbour> = ordered(observed).into_iter().filter(may_ask).collect();
    let (needed, nodes) = fewest(observed, &unneeded, fits)?;
    let who = Who::Asked(keys(&needed));
    let asks: Vec<&Neighbour> = needed.into_iter().filter(|it| !it.is_leaving).collect();
    Some((InTheWay { who, nodes }, keys(&asks)))
}

fn keys(all: &[&Neighbour]) -> Vec<Key> {
    all.iter().map(|it| it.key.clone()).collect()
}

/// Whether another has requests and does not end its workers for one of that spec before it is idle.
fn stays(it: &Neighbour, spec: &InferenceDeploymentSpec) -> bool {
    !it.is_leaving && is_busy(it) && it.priority > spec.priority
}

fn is_busy(it: &Neighbour) -> bool {
    it.idle_s.unwrap_or_default() < IDLE.as_secs_f64()
}

/// The others in the order in which they are asked.
fn ordered(observed: &Observed) -> Vec<&Neighbour> {
    let spec = &observed.deployment.spec;
    let mut neighbours: Vec<&Neighbour> = observed.neighbours.iter().collect();
    let idle_s = |it: &Neighbour| it.idle_s.unwrap_or_default();
    let order = |it: &Neighbour| {
        (
            !it.is_leaving,
            it.is_starting,
            it.idle_s.is_none(),
            stays(it, spec),
            is_busy(it),
            it.priority,
        )
    };
    neighbours.sort_by(|a, b| {
        let by_idle = idle_s(b).total_cmp(&idle_s(a));
        order(a).cmp(&order(b)).then(by_idle)
    });
    neighbours
}

/// The fewest of the first of `neighbours` without which `fits` has a plan, and the nodes of that plan; `None` if it has none without
/// all of them.
fn fewest<'a>(
    observed: &Observed,
    neighbours: &[&'a Neighbour],
    fits: &dyn Fn(&Observed) -> Option<BTreeSet<String>>,
) -> Option<(Vec<&'a Neighbour>, BTreeSet<String>)> {
    let of_first = |count: usize| fits(&without(observed, &neighbours[..count]));
    // Without any, nothing would change.
    if neighbours.is_empty() {
        return None;
    }
    of_first(neighbours.len())?;
    let (mut too_few, mut count) = (0, neighbours.len());
    while too_few + 1 < count {
        let middle = usize::midpoint(too_few, count);
        match of_first(middle) {
            Some(_) => count = middle,
            None => too_few = middle,
        }
    }
    let mut nodes = of_first(count)?;
    let is_there = |it: &&Neighbour| it.holding.keys().any(|node| nodes.contains(node));
    let there: Vec<&'a Neighbour> = neighbours[..count]
        .iter()
        .copied()
        .filter(is_there)
        .collect();
    let mut asked = neighbours[..count].to_vec();
    if let Some(then) = fits(&without(observed, &there)) {
        (asked, nodes) = (there, then);
    }
    for at in (0..asked.len()).rev().take(MOST) {
        let kept = asked.remove(at);
        let then = (!asked.is_empty()).then(|| fits(&without(observed, &asked)));
        match then.flatten() {
            Some(then) => nodes = then,
            None => asked.insert(at, kept),
        }
    }
    Some((asked, nodes))
}

/// The cluster as it will be when the workers of some others have ended.
fn without(observed: &Observed, neighbours: &[&Neighbour]) -> Observed {
    let mut then = Observed {
        neighbours: Vec::new(),
        ..observed.clone()
    };
    for (node, held) in neighbours.iter().flat_map(|it| &it.holding) {
        if let Some(all) = then.held_by_others.get_mut(node) {
            all.subtract(held);
        }
        let profile = observed
            .nodes
            .get(node)
            .and_then(|view| view.profile.as_ref());
        let gpus = profile.iter().flat_map(|profile| &profile.gpus);
        let is_there = |uuid: &&String| gpus.clone().any(|gpu| gpu.uuid == **uuid);
        if let Some(claimable) = then.claimable.get_mut(node) {
            claimable.extend(held.claimed_gpus.iter().filter(is_there).cloned());
        }
    }
    then
}

/// A deployment as the status names it, which others may read: by its name within its own namespace.
pub(crate) fn called(observed: &Observed, other: &Key) -> String {
    let namespace = observed.deployment.metadata.namespace.as_deref();
    match namespace == Some(&other.namespace) {
        true => other.name.to_string(),
        false => "a deployment of another namespace".to_owned(),
    }
}
