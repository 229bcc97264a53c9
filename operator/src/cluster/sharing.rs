//! Deployments that end their workers for others: who may, who asks whom, and since when.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use hearth_controller_core::age::age;
use hearth_controller_core::conditions::{self, DECODE_READY};
use hearth_controller_core::key::Key;
use hearth_controller_core::ledger::holdings;
use hearth_controller_core::observed::{Asker, Neighbour, PodRole, PodView};
use hearth_controller_core::preload::preloaded_since;
use hearth_controller_core::validate::progress_deadline;
use hearth_crds::{InferenceDeployment, InferenceDeploymentStatus, PlanRole};
use jiff::{SignedDuration, Timestamp};

use crate::cluster::cache::{State, Touched};

/// Time for which one that asks nobody any more keeps its turn: others may not be ready for a moment.
const KEEPS_TURN: SignedDuration = SignedDuration::from_secs(60);

/// What is known of sharing. It is in memory alone: an operator that starts is asked anew.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Deployments whose workers may end for others, are ending, or are starting and may then, by uid.
    givers: HashMap<Arc<str>, Giver>,
    /// Those that ask.
    askers: HashMap<Key, Asked>,
    /// Nodes that the workers of some will have once others have ended theirs: kept when some of these have gone, since that room is not
    /// for anybody.
    awaited: HashMap<Key, BTreeSet<String>>,
    /// When the nodes of some were taken again, which their status does not say yet; by uid.
    begun: HashMap<Arc<str>, Timestamp>,
}

#[derive(Clone, Copy, Debug)]
struct Giver {
    priority: i32,
    keeps: bool,
    is_leaving: bool,
    is_ready: bool,
    preloaded_since: Option<Timestamp>,
    starting_since: Option<Timestamp>,
    /// Time from then on after which nobody counts on them any more.
    longest_start: Duration,
}

impl Giver {
    /// Whether its workers may end now if nobody waits for them.
    fn has_some(&self) -> bool {
        self.is_ready || self.is_leaving || self.preloaded_since.is_some()
    }

    /// Whether its workers are starting and may yet become ready.
    fn may_start(&self, now: Timestamp) -> bool {
        let since = self.starting_since;
        since.is_some_and(|since| age(since, now) < self.longest_start)
    }

    /// Whether its workers may end now. Those that somebody waits for may not before they are ready, however they were started.
    fn may_end(&self, idle_s: Option<f64>) -> bool {
        self.is_ready || self.is_leaving || idle_s.is_some_and(|idle_s| idle_s > 0.0)
    }
}

#[derive(Debug)]
struct Asked {
    priority: i32,
    since: Timestamp,
    /// When it last asked anybody.
    last: Timestamp,
    of: BTreeSet<Key>,
}

impl Sharing {
    /// Notes whether a deployment's workers may end for others; returns whether they may from now on.
    pub(crate) fn note(&mut self, uid: &Arc<str>, deployment: &InferenceDeployment) -> bool {
        let status = deployment.status.as_ref();
        let is_leaving = status.is_some_and(InferenceDeploymentStatus::is_at_zero);
        let is_ready =
            conditions::of(status, DECODE_READY).is_some_and(|ready| ready.status == "True");
        if !is_leaving {
            self.begun.remove(uid);
        }
        let spec = &deployment.spec;
        // Workers that an autoscaler ends make room, too, but for nobody in particular.
        let may_end = spec.may_rest() || (spec.may_be_emptied() && is_leaving);
        let giver = Giver {
            priority: spec.priority,
            keeps: spec.autoscaling.keep,
            is_leaving,
            is_ready,
            preloaded_since: preloaded_since(status),
            starting_since: conditions::starting_since(status),
            longest_start: progress_deadline(deployment),
        };
        let is_starting = giver.starting_since.is_some();
        if !may_end || spec.suspend || !(giver.has_some() || is_starting) {
            self.givers.remove(uid);
            return false;
        }
        let before = self.givers.insert(Arc::clone(uid), giver);
        giver.has_some() && !before.is_some_and(|before| before.has_some())
    }

    /// Notes that the nodes of a deployment's plan are taken again.
    pub(crate) fn begin(&mut self, uid: &Arc<str>, now: Timestamp) {
        self.begun.insert(Arc::clone(uid), now);
    }

    /// Forgets a deployment; returns those that it asked.
    pub(crate) fn forget(&mut self, key: &Key, uid: &str) -> Vec<Key> {
        self.givers.remove(uid);
        self.begun.remove(uid);
        self.awaited.remove(key);
        let asked = self.askers.remove(key);
        asked.into_iter().flat_map(|asked| asked.of).collect()
    }
}

impl State {
    /// Records whom a deployment asks to end its workers. Those that are asked from now on, or no longer, are affected.
    pub(crate) fn ask(
        &mut self,
        asker: &Key,
        priority: i32,
        of: &[Key],
        now: Timestamp,
    ) -> Touched {
        let askers = &mut self.sharing.askers;
        askers.retain(|key, it| key == asker || !it.of.is_empty() || now - KEEPS_TURN < it.last);
        let of: BTreeSet<Key> = of.iter().cloned().collect();
        if of.is_empty() && !askers.contains_key(asker) {
            return Touched::default();
        }
        let asked = askers.entry(asker.clone()).or_insert_with(|| Asked {
            priority,
            since: now,
            last: now,
            of: BTreeSet::new(),
        });
        if !of.is_empty() {
            if asked.of.is_empty() && now - KEEPS_TURN >= asked.last {
                asked.since = now;
            }
            asked.last = now;
        }
        let keys = match asked.priority == priority {
            true => asked.of.symmetric_difference(&of).cloned().collect(),
            false => asked.of.union(&of).cloned().collect(),
        };
        (asked.priority, asked.of) = (priority, of);
        Touched {
            keys,
            waiting: false,
        }
    }

    /// Whether a deployment may have to look for room: it has none yet, waits for some, or has a pool that does not grow for want of it.
    fn seeks_room(&self, key: &Key, uid: &str, deployment: &InferenceDeployment) -> bool {
        let status = deployment.status.as_ref();
        let mut pools = status.iter().flat_map(|status| &status.pool_statuses);
        let is_limited = pools.any(|pool| {
            let autoscaling = pool.autoscaling.as_ref();
            autoscaling.is_some_and(|it| it.limited_by.is_some())
        });
        let is_placed = self.plans.of(uid).next().is_some() && !self.suspended.contains(uid);
        !is_placed || is_limited || self.is_waiting(key)
    }

    /// Those that ask a deployment to end its workers.
    pub(crate) fn askers_of(&self, asked: &Key) -> Vec<Asker> {
        let askers = self.sharing.askers.iter();
        let mut askers: Vec<Asker> = askers
            .filter(|(_, it)| it.of.contains(asked))
            .map(|(key, it)| Asker {
                key: key.clone(),
                priority: it.priority,
                since: it.since,
            })
            .collect();
        askers.sort_by(|a, b| a.key.cmp(&b.key));
        askers
    }

    /// Records the nodes that a deployment's workers will have once others have ended theirs.
    pub(crate) fn awaits(&mut self, key: &Key, nodes: &BTreeSet<String>) {
        match nodes.is_empty() {
            true => self.sharing.awaited.remove(key),
            false => self.sharing.awaited.insert(key.clone(), nodes.clone()),
        };
    }

    /// Nodes that others than `deployment` wait for, if its workers may start without a request.
    pub(crate) fn awaited_nodes(
        &self,
        key: &Key,
        deployment: &InferenceDeployment,
    ) -> BTreeSet<String> {
        let is_at_zero = deployment
            .status
            .as_ref()
            .is_some_and(InferenceDeploymentStatus::is_at_zero);
        if !deployment.spec.autoscaling.preload || !is_at_zero {
            return BTreeSet::new();
        }
        let awaited = self.sharing.awaited.iter();
        let others = awaited.filter(|(other, _)| *other != key);
        others
            .flat_map(|(_, nodes)| nodes.iter().cloned())
            .collect()
    }

    /// Other deployments whose workers may end for one that may have to look for room, now or once they have started; `idle_s` has the
    /// seconds since the last request of those whose gateways are read.
    pub(crate) fn neighbours(
        &self,
        (key, uid): (&Key, &str),
        deployment: &InferenceDeployment,
        idle_s: &BTreeMap<Key, f64>,
        now: Timestamp,
    ) -> Vec<Neighbour> {
        if !self.seeks_room(key, uid, deployment) {
            return Vec::new();
        }
        let others = self
            .sharing
            .givers
            .iter()
            .filter(|(other, _)| ***other != *uid);
        let mut neighbours: Vec<Neighbour> = others
            .filter_map(|(other, giver)| self.neighbour(other, giver, idle_s, now))
            .collect();
        neighbours.sort_by(|a, b| a.key.cmp(&b.key));
        neighbours
    }

    /// One whose workers may end, now or once they have started.
    fn neighbour(
        &self,
        uid: &Arc<str>,
        giver: &Giver,
        idle_s: &BTreeMap<Key, f64>,
        now: Timestamp,
    ) -> Option<Neighbour> {
        let key = self.keys.get(uid)?.clone();
        let idle_s = idle_s.get(&key).copied();
        let pods = self.pods_of(uid).map(|row| &*row.value);
        let workers: Vec<&PodView> = pods.filter(|pod| is_worker(pod)).collect();
        // Its nodes were taken again, which its status does not say yet.
        let has_begun = giver.is_leaving && !self.suspended.contains(uid);
        let begun = self.sharing.begun.get(uid).filter(|_| has_begun);
        if begun.is_some_and(|since| age(*since, now) >= giver.longest_start) {
            return None;
        }
        let may_end = giver.may_end(idle_s) && !has_begun && !workers.is_empty();
        if !may_end && !has_begun && !giver.may_start(now) {
            return None;
        }
        let plans = self.plans_of(uid);
        // Not all of those that are starting may have been made.
        let ahead = self.plan_ahead(uid, &plans).filter(|_| !may_end);
        let ahead = ahead.map(|plan| {
            let mut spec = plan.spec.clone();
            spec.ranks.retain(|rank| rank.role != PlanRole::Gateway);
            spec
        });
        Some(Neighbour {
            priority: giver.priority,
            keeps: giver.keeps,
            idle_s,
            preloaded_since: giver.preloaded_since,
            is_leaving: giver.is_leaving && !has_begun,
            is_starting: !may_end,
            holding: holdings::of_deployment(workers.into_iter(), &plans, ahead.as_ref()),
            key,
        })
    }
}

/// Whether a Pod ends with the workers: gateways stay.
fn is_worker(pod: &PodView) -> bool {
    pod.role != PodRole::Inspect && !pod.role.is_gateway()
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::testing::samples;
    use hearth_crds::{Condition, InferencePlan, PoolAutoscaling, PoolStatus};

    use super::*;
    use crate::cluster::packed::Packed;
    use crate::cluster::table::Identity;

    /// A deployment that may start without a request, and last ended or started its workers for a reason.
    fn preloading(at_zero: bool, reason: &str) -> InferenceDeployment {
        let mut deployment = hearth_controller_core::testing::deployment(
            "decode: {scaling: {mode: Auto, minReplicas: 0}}\nautoscaling: {preload: true}",
        );
        deployment.status = Some(InferenceDeploymentStatus {
            scale_to_zero: Some(hearth_crds::ScaleToZeroStatus {
                at_zero,
                since: Timestamp::UNIX_EPOCH.to_string(),
                reason: reason.to_owned(),
            }),
            ..InferenceDeploymentStatus::default()
        });
        deployment
    }

    #[test]
    fn nodes_are_awaited_until_the_one_that_waits_has_its_place_whoever_has_gone() {
        let mut state = State::default();
        let key = |name: &str| Key::new("d", name);
        let (a, warm) = (key("a"), key("warm"));
        let deployment = preloading(true, "");
        let awaited = |state: &State, key: &Key| state.awaited_nodes(key, &deployment).len();
        let both = BTreeSet::from(["n1".to_owned(), "n2".to_owned()]);
        let now = Timestamp::UNIX_EPOCH;
        // The first of these has gone, and then it may ask nobody.
        for of in [vec![key("warm"), key("busy")], vec![key("busy")], vec![]] {
            state.awaits(&a, &both);
            state.ask(&a, 0, &of, now);
            assert_eq!((awaited(&state, &warm), awaited(&state, &a)), (2, 0));
        }
        state.awaits(&a, &BTreeSet::new());
        assert_eq!(awaited(&state, &warm), 0);
        state.awaits(&a, &both);
        state.sharing.forget(&a, "uid");
        assert_eq!(awaited(&state, &warm), 0);
    }

    #[test]
    fn workers_that_started_without_a_request_are_asked_for_their_place_while_nobody_waits_for_them()
     {
        let mut sharing = Sharing::default();
        let uid: Arc<str> = "uid".into();
        assert!(!sharing.note(&uid, &preloading(false, "a request has arrived")));
        assert!(sharing.note(&uid, &preloading(false, "nodes have room for them")));
        let giver = sharing.givers[&uid];
        let may_end = [Some(0.0), Some(0.5), None].map(|idle_s| giver.may_end(idle_s));
        assert_eq!(may_end, [false, true, false]);
        sharing.note(&uid, &preloading(true, "there was no request for 5m"));
        assert!(sharing.givers[&uid].may_end(None));
    }

    /// One whose workers end for want of requests and have not been ready since `since`.
    fn woken(since: Timestamp) -> InferenceDeployment {
        let mut deployment = preloading(false, "a request has arrived");
        let status = deployment.status.as_mut().expect("a status");
        status.scale_to_zero.as_mut().expect("woken").since = since.to_string();
        status.conditions = vec![Condition {
            type_: DECODE_READY.to_owned(),
            status: "False".to_owned(),
            last_transition_time: Timestamp::UNIX_EPOCH.to_string(),
            reason: "WorkersNotReady".to_owned(),
            message: String::new(),
            observed_generation: None,
        }];
        deployment
    }

    fn of_uid(key: &Key, uid: &str, owner: &str, version: u64) -> Identity {
        Identity {
            key: key.clone(),
            uid: uid.into(),
            owner: owner.into(),
            version,
        }
    }

    #[test]
    fn one_that_starts_counts_until_its_deadline_and_with_the_workers_that_are_not_made_yet() {
        let mut state = State::default();
        let key = Key::new("default", "demo");
        let put = |state: &mut State, version: u64, deployment: &InferenceDeployment| {
            let read = Packed::new(deployment).map_err(|_| unreachable!());
            state.put_deployment(of_uid(&key, "uid", "", version), read)
        };
        let seconds = |seconds: i64| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        let neighbours = |state: &State, at_s: i64| {
            let asker = (&Key::new("default", "asker"), "asker");
            let none = BTreeMap::new();
            state.neighbours(asker, &preloading(false, ""), &none, seconds(at_s))
        };
        let mut plan = InferencePlan::new("demo-plan-1", samples::plan());
        plan.metadata.namespace = Some("default".to_owned());
        let at_zero = preloading(true, "there was no request for 5m");
        put(&mut state, 1, &at_zero);
        let of_plan = of_uid(&Key::new("default", "demo-plan-1"), "plan", "uid", 1);
        state.put_plan(of_plan, Ok(&plan));
        assert_eq!(neighbours(&state, 1000), []);
        // It has been given its nodes again, and its status is not written yet.
        state.take_again("uid", seconds(1000));
        assert!(neighbours(&state, 1000)[0].is_starting);
        assert_eq!(neighbours(&state, 1599).len(), 1);
        assert_eq!(neighbours(&state, 1600), [], "it never is");

        assert!(!put(&mut state, 2, &woken(seconds(1000))).waiting);
        let found = neighbours(&state, 1100);
        assert!(found[0].is_starting && !found[0].is_leaving);
        let holders: Vec<&String> = found[0].holding.keys().collect();
        assert_eq!(holders, ["a", "b"]);
        assert_eq!(neighbours(&state, 1599).len(), 1);
        assert_eq!(neighbours(&state, 1600), []);
        // Once it is ready, those that wait may ask it.
        let mut ready = woken(seconds(1000));
        let status = ready.status.as_mut().expect("a status");
        status.conditions[0].status = "True".to_owned();
        assert!(put(&mut state, 3, &ready).waiting);
        assert_eq!(neighbours(&state, 1100), [], "its workers are unknown");
    }

    #[test]
    fn a_pool_that_does_not_grow_for_want_of_room_looks_for_some() {
        let mut state = State::default();
        let plan = InferencePlan::new("demo-plan-1", samples::plan());
        let identity = Identity {
            key: Key::new("default", "demo-plan-1"),
            uid: "plan".into(),
            owner: "uid".into(),
            version: 1,
        };
        let (key, mut deployment) = (Key::new("default", "demo"), preloading(false, ""));
        assert!(state.seeks_room(&key, "uid", &deployment), "it has no plan");
        state.put_plan(identity, Ok(&plan));
        assert!(!state.seeks_room(&key, "uid", &deployment));
        let limited = PoolAutoscaling {
            limited_by: Some("2 decode workers: there is no room".to_owned()),
            ..PoolAutoscaling::default()
        };
        let status = deployment.status.as_mut().expect("a status");
        status.pool_statuses = vec![PoolStatus {
            autoscaling: Some(limited),
            ..PoolStatus::default()
        }];
        assert!(state.seeks_room(&key, "uid", &deployment));
    }

    #[test]
    fn who_is_asked_is_told_once_and_learns_when_it_is_over() {
        let mut state = State::default();
        let key = |name: &str| Key::new("default", name);
        let (a, b, c) = (key("a"), key("b"), key("c"));
        let now = Timestamp::UNIX_EPOCH;
        let later = now + jiff::SignedDuration::from_secs(5);
        let of = |all: &[&Key]| all.iter().map(|key| (*key).clone()).collect::<Vec<_>>();
        assert_eq!(state.ask(&a, 0, &of(&[&b]), now).keys, of(&[&b]));
        assert_eq!(state.ask(&a, 0, &of(&[&b]), later).keys, []);
        // It has waited since it first asked anybody.
        assert_eq!(
            state.ask(&a, 0, &of(&[&c]), later).keys,
            [b.clone(), c.clone()]
        );
        assert_eq!(state.askers_of(&b), []);
        let asker = |priority: i32| Asker {
            key: a.clone(),
            priority,
            since: now,
        };
        assert_eq!(state.askers_of(&c), [asker(0)]);
        assert_eq!(state.ask(&a, 3, &of(&[&c]), later).keys, of(&[&c]));
        assert_eq!(state.askers_of(&c), [asker(3)]);
        assert_eq!(state.ask(&a, 3, &[], later).keys, of(&[&c]));
        assert_eq!(state.ask(&a, 3, &[], later), Touched::default());
        // It keeps its turn for a while.
        state.ask(&a, 3, &of(&[&c]), later);
        assert_eq!(state.askers_of(&c), [asker(3)]);
        state.ask(&a, 3, &[], later);
        let much_later = later + SignedDuration::from_secs(61);
        state.ask(&a, 3, &of(&[&c]), much_later);
        assert_eq!(state.askers_of(&c)[0].since, much_later);
        state.ask(&a, 3, &[], much_later);
        assert_eq!(state.askers_of(&c), []);
    }
}
