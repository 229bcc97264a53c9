//! Replaces the existing Pods with those that the target plan wants, one safe step at a time.
//!
//! Pure and stateless: each reconcile decides from what it sees, so a reconcile may be repeated, late, or the last one
//! before a restart.
//!
//! - Pods whose rank and digest the target wants are kept. The rest are extra.
//! - Without extras, everything that is missing is created.
//! - **Surge**, if the extras and the whole target fit the nodes: the workers are created; when all are ready, the
//!   gateway is created; when it is ready, the old gateway is deleted; when it is gone, its workers are deleted.
//! - **Old down first**, if they do not fit, or if the namespace's quota has room for either but not for both: the
//!   gateway is created (it sends requests to the old workers if they serve the same model, and holds them otherwise);
//!   when it is ready, the old gateway is deleted; when it is gone, the old workers are deleted; when they are gone,
//!   the new ones are created.
//! - If there are several gateways, all must be ready before an old one is deleted. Where there is no room for that,
//!   the old ones make room one after the other, but none while a new one is starting.
//! - An old gateway of the same model is deleted while old workers are there for its requests, or after the last of them
//!   is gone, but not while that is ending: a kubelet gives a Pod that is being deleted no new routes. One whose own workers
//!   are not there has time to read its routes to the target's before.
//! - A node whose kubelet is away keeps what the target wants there: its containers may well be running. Unwanted Pods
//!   there are deleted when the target serves, or when the node has been away for long; on a node that has left the
//!   cluster, at once.
//! - A gateway that is kept continues with the extras that it routes to until the target's workers are ready (Surge)
//!   or the extras must make room (old down first). No Pod is deleted while a gateway that will stay routes to it, except
//!   that old workers make room for a gateway of the target that has no other place.
//! - The head of a group has routes to its members. The members of a group that is replaced stay as long as its head.
//! - Where a quota admits some members of a group that has never served and not all, those that it admitted end, and none is
//!   created until all are worth another try.
//! - An extra worker is deleted at once while it is not ready if its plan differs from the target only in numbers of
//!   workers.

pub(crate) mod ends;
mod groups;
mod need;
mod routing;
mod want;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use self::ends::Ends;
use self::need::Need;
pub(crate) use self::want::Want;
use crate::age::{age, is_older};
use crate::cause::node_of;
use crate::decision::{Grace, PodEnd};
use crate::observed::forbidden::Quota;
use crate::observed::{PodView, Requests};
use crate::routes::{is_gateway, leads, text};

/// Minimum age of a waiting Pod before it is created again because its form would be different now.
const REFORM_AFTER: Duration = Duration::from_secs(10);

/// Minimum age of a Pod that the scheduler finds no room for before others make room for it: what is short may be held
/// for a moment only, such as by a second operator during an upgrade.
const REFUSED_FOR: Duration = Duration::from_secs(10);

/// Input of one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RolloutInput<'a> {
    /// The Pods that the target wants.
    pub(crate) wants: &'a [Want],
    /// The deployment's gateways and workers.
    pub(crate) pods: &'a [&'a PodView],
    /// Resources that each Ready node can hold.
    pub(crate) rooms: &'a BTreeMap<String, Requests>,
    /// Nodes that are in the cluster but not Ready, with whether they are no longer waited for. Any other node has
    /// left.
    pub(crate) away: &'a BTreeMap<String, bool>,
    /// Generations of plans that serve the same model in the same way: their gateways can use the target's workers.
    pub(crate) compatible_generations: &'a BTreeSet<u64>,
    /// Generations of plans that have not served and that the target replaces with other numbers of workers.
    pub(crate) begun_generations: &'a BTreeSet<u64>,
    /// Pods of the target that ended as a whole and were created again.
    pub(crate) ends: &'a Ends,
    pub(crate) quota: Quota,
    /// Time for which a quota is known not to admit all of the target's Pods, which have never served: its groups wait.
    pub(crate) short_for: Option<Duration>,
    pub(crate) now: Timestamp,
}

/// Pause before a rollout looks again for room.
const ROOM_AGAIN: Duration = Duration::from_secs(2);

/// Mode of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nothing else is there.
    Alone,
    /// Beside what it replaces.
    Surge,
    /// After what it replaces has made room.
    OldDownFirst,
}

/// Progress of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) mode: Mode,
    /// Whether every Pod of the target is ready.
    pub(crate) is_serving: bool,
    /// Whether, in addition, nothing else is there.
    pub(crate) is_complete: bool,
}

/// Actions to take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    /// Indices of wants to create, with their routes (gateways, heads of rings).
    pub(crate) create: Vec<(usize, Option<String>)>,
    /// Gateways and heads of rings whose routes change, by name.
    pub(crate) routes: Vec<(String, String)>,
    pub(crate) end: Vec<PodEnd>,
    pub(crate) progress: Progress,
    pub(crate) look_again: Option<Duration>,
}

/// Decides the next step.
pub(crate) fn step(input: &RolloutInput<'_>) -> Steps {
    let sorted = Sorted::of(input);
    let mode = sorted.mode();
    let create = sorted.create(mode);
    let mut end = sorted.ends_of_the_dead();
    end.extend(sorted.end(mode));
    end.extend(sorted.taken_back());
    let create = create
        .into_iter()
        .map(|index| {
            let want = &input.wants[index];
            let routes = match want.is_gateway() {
                true => Some(sorted.first_routes(mode)),
                false => want.is_group_head().then(|| sorted.group_routes(want)),
            };
            (index, routes.map(|routes| text(&routes)))
        })
        .collect();
    let is_serving = sorted.is_ready(|_| true);
    Steps {
        create,
        routes: sorted.changed_routes(mode),
        end,
        progress: Progress {
            mode,
            is_serving,
            is_complete: is_serving && !sorted.has_extras(),
        },
        look_again: sorted.look_again(mode),
    }
}

/// The Pods, sorted by what happens to them.
struct Sorted<'a> {
    input: RolloutInput<'a>,
    /// Each want's Pod, if it exists and stays.
    made: Vec<Option<&'a PodView>>,
    /// Whether each want's name is taken by a Pod that is about to go.
    is_taken: Vec<bool>,
    /// Unwanted Pods that are not asked to end yet.
    extra: Vec<&'a PodView>,
    /// Pods that are asked to end, wanted or not; they still hold their resources.
    ending: Vec<&'a PodView>,
    /// Pods that have ended, but are still listed.
    over: Vec<&'a PodView>,
    /// Pods created in another form than they would be now, and unable to run as they are.
    stuck: Vec<&'a PodView>,
    /// Pods that are unwanted or asked to end, on nodes that are away.
    absent: Vec<&'a PodView>,
    /// Pods on nodes that have left, or asked to end on nodes that are no longer waited for.
    lost: Vec<&'a PodView>,
}

impl<'a> Sorted<'a> {
    fn of(input: &RolloutInput<'a>) -> Self {
        let mut sorted = Self {
            input: *input,
            made: vec![None; input.wants.len()],
            is_taken: vec![false; input.wants.len()],
            extra: Vec::new(),
            ending: Vec::new(),
            over: Vec::new(),
            stuck: Vec::new(),
            absent: Vec::new(),
            lost: Vec::new(),
        };
        for pod in input.pods {
            sorted.sort(pod);
        }
        sorted
    }

    fn sort(&mut self, pod: &'a PodView) {
        let want = self
            .input
            .wants
            .iter()
            .position(|want| want.name == pod.name);
        let node = node_of(pod);
        let is_over = pod.has_ended();
        let away = self.input.away.get(node);
        let is_left = !node.is_empty() && away.is_none() && !self.input.rooms.contains_key(node);
        if let Some(index) = want {
            self.is_taken[index] = true;
        }
        if is_left || pod.is_deleting && away == Some(&true) {
            self.lost.push(pod);
        } else if is_over {
            self.over.push(pod);
        } else if pod.is_deleting && away.is_none() {
            self.ending.push(pod);
        } else if pod.is_deleting {
            self.absent.push(pod);
        } else if let Some(index) = want {
            if self.is_stuck(pod, &self.input.wants[index]) {
                return self.stuck.push(pod);
            }
            self.is_taken[index] = false;
            self.made[index] = Some(pod);
        } else if away.is_some() {
            self.absent.push(pod);
        } else {
            self.extra.push(pod);
        }
    }

    /// Whether a Pod's container has never run, and another operator, or this one with other settings, created it in
    /// another form: the new form may be what it is waiting for, such as a Secret for its image.
    fn is_stuck(&self, pod: &PodView, want: &Want) -> bool {
        let has_run = pod.container.as_ref().is_some_and(|container| {
            container.waiting.is_none() || container.restarts > 0 || container.last_end.is_some()
        });
        pod.phase == "Pending"
            && !has_run
            && pod.form != want.form
            && is_older(pod.created, self.input.now, REFORM_AFTER)
    }

    fn wants(&self) -> impl Iterator<Item = (usize, &'a Want)> + Clone {
        self.input.wants.iter().enumerate()
    }

    /// Whether the Pods of all wants that `which` selects are ready.
    fn is_ready(&self, which: impl Fn(&Want) -> bool) -> bool {
        let is_up = |pod: &PodView| pod.is_ready && self.input.rooms.contains_key(node_of(pod));
        self.wants()
            .filter(|(_, want)| which(want))
            .all(|(index, _)| self.made[index].is_some_and(is_up))
    }

    fn workers_are_ready(&self) -> bool {
        self.is_ready(|want| !want.is_gateway())
    }

    fn gateway_is_ready(&self) -> bool {
        self.is_ready(Want::is_gateway)
    }

    /// Wants that have no Pod and can be created.
    fn missing(&self) -> impl Iterator<Item = (usize, &'a Want)> + Clone {
        self.wants().filter(|(index, want)| {
            self.made[*index].is_none()
                && !self.is_taken[*index]
                && !self.is_held_back(want)
                && self.input.rooms.contains_key(&want.node)
        })
    }

    /// Pods that exist although the target does not want them, including those that are about to end.
    fn leftovers(&self) -> impl Iterator<Item = &'a PodView> {
        let ending = self.ending.iter().filter(|pod| !self.is_wanted(pod));
        self.extra.iter().chain(ending).copied()
    }

    fn is_wanted(&self, pod: &PodView) -> bool {
        self.input.wants.iter().any(|want| want.name == pod.name)
    }

    fn has_extras(&self) -> bool {
        self.leftovers().next().is_some()
    }

    /// All Pods that hold resources.
    fn holders(&self) -> impl Iterator<Item = &'a PodView> {
        let made = self.made.iter().flatten();
        made.chain(&self.extra).chain(&self.ending).copied()
    }

    /// The mode of this step. If nothing is missing, there is nothing to make room for.
    fn mode(&self) -> Mode {
        if !self.has_extras() {
            return Mode::Alone;
        }
        let new: Vec<&Want> = self.missing().map(|(_, want)| want).collect();
        if self.fits(&new) && !self.is_crowded() && self.input.quota == Quota::Free {
            Mode::Surge
        } else {
            Mode::OldDownFirst
        }
    }

    /// Whether `new` fit beside everything that exists.
    fn fits(&self, new: &[&Want]) -> bool {
        self.fits_beside(new, |_| true)
    }

    /// Whether `new` fit beside those that exist and `stays` selects.
    fn fits_beside(&self, new: &[&Want], stays: impl Fn(&PodView) -> bool) -> bool {
        let nodes: BTreeSet<&str> = new.iter().map(|want| want.node.as_str()).collect();
        nodes.into_iter().all(|node| {
            let Some(room) = self.input.rooms.get(node) else {
                return false;
            };
            let new = new.iter().filter(|want| want.node == node);
            let mut need = Need::default();
            let fresh = new.fold(true, |fresh, want| {
                let amounts = Requests::new(want.cpu_millis, want.memory_bytes, want.gpus);
                fresh & need.add(amounts, &want.exclusive_cpus, &want.claimed_gpus)
            });
            let old = self
                .holders()
                .filter(|pod| node_of(pod) == node && stays(pod));
            let mut held_gpus = 0;
            let fresh = old.fold(fresh, |fresh, pod| {
                let amounts = Requests::new(pod.cpu_millis, pod.memory_bytes, pod.gpus);
                held_gpus += pod.gpus;
                fresh & need.add(amounts, &pod.exclusive_cpus, &pod.claimed_gpus)
            });
            // While a device plugin restarts, its kubelet offers none, and Pods keep theirs.
            let room = Requests {
                gpus: room.gpus.max(held_gpus),
                ..*room
            };
            fresh && need.is_within(&room)
        })
    }

    /// Whether the scheduler finds less room than was calculated, while there are Pods that could make some.
    fn is_crowded(&self) -> bool {
        let mut made = self.made.iter().flatten();
        made.any(|pod| self.is_refused_for_long(pod) && self.has_leftovers_on(&pod.wanted_node))
    }

    fn is_refused_for_long(&self, pod: &PodView) -> bool {
        is_refused(pod) && is_older(pod.created, self.input.now, REFUSED_FOR)
    }

    fn has_leftovers_on(&self, node: &str) -> bool {
        self.leftovers().any(|pod| node_of(pod) == node)
    }

    fn create(&self, mode: Mode) -> Vec<usize> {
        let missing = self.missing();
        match mode {
            Mode::Alone => missing.map(|(index, _)| index).collect(),
            Mode::Surge => {
                let may_have_gateway =
                    self.workers_are_ready() || !self.has_serving_extra_gateway();
                missing
                    .filter(|(_, want)| !want.is_gateway() || may_have_gateway)
                    .map(|(index, _)| index)
                    .collect()
            }
            Mode::OldDownFirst => match self.blocked_gateway(mode) {
                Some(Place::Namespace) => Vec::new(),
                _ => self.gateways_that_fit(),
            },
        }
    }

    /// Missing gateways, except those for which something on their node must make room.
    fn gateways_that_fit(&self) -> Vec<usize> {
        let (mut indices, mut wants) = (Vec::new(), Vec::new());
        for (index, want) in self.missing().filter(|(_, want)| want.is_gateway()) {
            wants.push(want);
            match self.fits(&wants) || !self.has_leftovers_on(&want.node) {
                true => indices.push(index),
                false => _ = wants.pop(),
            }
        }
        indices
    }

    fn has_serving_extra_gateway(&self) -> bool {
        self.extra.iter().any(|pod| is_gateway(pod) && pod.is_ready)
    }

    /// Deletions of Pods that have ended, that cannot run, or that are on nodes that are away or have left.
    fn ends_of_the_dead(&self) -> Vec<PodEnd> {
        let now = self.input.now;
        let over = self.over.iter().filter(|pod| {
            let wait = self.input.ends.remake_after(&pod.name);
            !pod.is_deleting && (!self.is_wanted(pod) || is_older(pod.created, now, wait))
        });
        let mut ends: Vec<PodEnd> = over
            .chain(&self.lost)
            .map(|pod| end_of(pod, Grace::None))
            .collect();
        ends.extend(self.stuck.iter().map(|pod| end_of(pod, grace_of(pod))));
        // A kubelet that comes back lets their streams end.
        let has_place = self.is_ready(|_| true);
        for pod in self.absent.iter().filter(|pod| !pod.is_deleting) {
            let is_forgotten = self.input.away.get(node_of(pod)) == Some(&true);
            if has_place || is_forgotten {
                let grace = match is_forgotten {
                    true => Grace::None,
                    false => Grace::Whole,
                };
                ends.push(end_of(pod, grace));
            }
        }
        ends
    }

    /// Deletions of extras that are no longer needed.
    fn end(&self, mode: Mode) -> Vec<PodEnd> {
        if mode == Mode::Alone {
            return Vec::new();
        }
        let gateways = self.leftovers().any(is_gateway);
        let blocked = self.blocked_gateway(mode);
        let may_go = |pod: &PodView| {
            if let Some(place) = blocked {
                return self.is_in_way(pod, place) && self.may_unblock(pod, place);
            }
            if !self.gateway_is_ready() {
                return false;
            }
            match mode {
                Mode::Alone => false,
                _ if is_gateway(pod) && (self.workers_are_ready() || !pod.is_ready) => {
                    self.reads_for(pod, mode).is_none()
                }
                _ if is_gateway(pod) => mode == Mode::OldDownFirst && !self.holds_requests(pod),
                _ => !gateways && !self.is_routed(pod),
            }
        };
        let goes = |pod: &PodView| self.is_useless(pod) || may_go(pod);
        let ended = self.extra.iter().filter(|pod| {
            let mut heads = self.extra.iter().filter(|head| leads(head, pod));
            goes(pod) && heads.all(|head| goes(head)) && !self.may_answer(pod, mode)
        });
        ended.map(|pod| end_of(pod, grace_of(pod))).collect()
    }

    /// Whether a head whose node is away for a moment may still answer through this member of its group. Where the target
    /// waits for the member's room, a node that is away is more likely to be gone.
    fn may_answer(&self, pod: &PodView, mode: Mode) -> bool {
        let is_forgotten = |head: &PodView| self.input.away.get(node_of(head)) == Some(&true);
        let mut heads = self.absent.iter().filter(|head| leads(head, pod));
        mode == Mode::Surge
            && !self.is_ready(|_| true)
            && heads.any(|head| !head.is_deleting && !is_forgotten(head))
    }

    /// Whether nothing is lost with an unwanted worker: another number of workers was requested before it was ready.
    /// It would hold room that others need.
    fn is_useless(&self, pod: &PodView) -> bool {
        let is_of_rollout = self.input.begun_generations.contains(&pod.plan_generation);
        is_of_rollout && !is_gateway(pod) && !pod.is_ready
    }

    /// Whether a Pod is about to make room for a gateway of the target.
    fn makes_room(&self, pod: &PodView, mode: Mode) -> bool {
        self.blocked_gateway(mode)
            .is_some_and(|place| self.is_in_way(pod, place))
    }

    /// Whether a Pod must end for a place to have more room: it is there, or heads a group whose members there end with it.
    fn is_in_way(&self, pod: &PodView, place: Place<'_>) -> bool {
        let mut others = self.extra.iter();
        place.has(pod) || others.any(|other| leads(pod, other) && place.has(other))
    }

    /// Place in which the target's gateway finds no room beside what must go.
    fn blocked_gateway(&self, mode: Mode) -> Option<Place<'a>> {
        if mode != Mode::OldDownFirst {
            return None;
        }
        let missing = self.missing().map(|(_, want)| want);
        let is_missing = |want: &Want| missing.clone().any(|missing| missing.name == want.name);
        let mut gateways = self.wants().filter(|(_, want)| want.is_gateway());
        if self.input.quota == Quota::Full && gateways.clone().any(|(_, want)| is_missing(want)) {
            return Some(Place::Namespace);
        }
        let (_, gateway) = gateways.find(|(index, want)| {
            let is_refused = self.made[*index].is_some_and(|pod| self.is_refused_for_long(pod));
            (is_refused || is_missing(want) && !self.fits(&[want]))
                && self.has_leftovers_on(&want.node)
        })?;
        Some(Place::Node(&gateway.node))
    }

    /// Whether a Pod may end to make room: workers first, then, when none is left there, gateways: one after the
    /// other, and none while one of the target is starting, so that some gateway holds requests as long as there are
    /// several.
    fn may_unblock(&self, pod: &PodView, place: Place<'_>) -> bool {
        if !is_gateway(pod) {
            return true;
        }
        let mut leftovers = self.leftovers().filter(|other| place.has(other));
        let is_before = |other: &PodView| other.is_deleting || other.name < pod.name;
        let has_to_wait = leftovers.any(|other| !is_gateway(other) || is_before(other));
        let mut made = self.made.iter().flatten();
        let is_starting = |pod: &PodView| is_gateway(pod) && !pod.is_ready && !is_refused(pod);
        let is_next = !self.gateways_that_fit().is_empty();
        !has_to_wait && !is_next && !made.any(|pod| is_starting(pod))
    }

    /// Whether the target has workers to come that others may make room for, without a word to this one.
    fn waits_for_room(&self, mode: Mode) -> bool {
        let mut missing = self.missing();
        mode == Mode::OldDownFirst && missing.any(|(_, want)| !want.is_gateway())
    }

    fn look_again(&self, mode: Mode) -> Option<Duration> {
        let has_old_form = |(index, want): (usize, &Want)| {
            self.made[index].is_some_and(|pod| pod.phase == "Pending" && pod.form != want.form)
        };
        let over = self.over.iter().filter(|pod| self.is_wanted(pod));
        let remade = over.map(|pod| {
            let created = pod.created.unwrap_or(self.input.now);
            let wait = self.input.ends.remake_after(&pod.name);
            wait.saturating_sub(age(created, self.input.now))
        });
        let reformed = self.wants().any(has_old_form).then_some(REFORM_AFTER);
        let mut made = self.made.iter().flatten();
        let refused = made.find(|pod| is_refused(pod) && !self.is_refused_for_long(pod));
        let refused = refused.map(|pod| {
            let created = pod.created.unwrap_or(self.input.now);
            REFUSED_FOR.saturating_sub(age(created, self.input.now))
        });
        let others = reformed
            .into_iter()
            .chain(refused)
            .chain(self.input.short_for)
            .chain(self.waits_for_room(mode).then_some(ROOM_AGAIN))
            .chain(
                self.extra
                    .iter()
                    .filter(|pod| is_gateway(pod))
                    .filter_map(|pod| self.reads_for(pod, mode)),
            );
        let soonest = remade.chain(others).min();
        soonest.map(|wait| wait.max(Duration::from_secs(1)))
    }
}

/// Place in which room must be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place<'a> {
    /// A node.
    Node(&'a str),
    /// The quota of the namespace.
    Namespace,
}

impl Place<'_> {
    fn has(self, pod: &PodView) -> bool {
        match self {
            Self::Node(node) => node_of(pod) == node,
            Self::Namespace => true,
        }
    }
}

fn end_of(pod: &PodView, grace: Grace) -> PodEnd {
    PodEnd {
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        grace,
    }
}

/// Grace period of a Pod whose kubelet is there.
fn grace_of(pod: &PodView) -> Grace {
    let container = pod.container.as_ref();
    let has_begun = container.is_some_and(|c| c.running_since.is_some() && !c.is_starting);
    match has_begun {
        true => Grace::Whole,
        false => Grace::Exit,
    }
}

/// Whether the scheduler found too little of some resource for it.
fn is_refused(pod: &PodView) -> bool {
    let words = pod.unschedulable.as_deref();
    pod.node.is_empty() && words.is_some_and(|words| words.contains("Insufficient"))
}
