//! Resources that deployments and other Pods hold on the nodes, and rollout turns, as known from the caches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_controller_core::age::is_older;
use hearth_controller_core::key::Key;
use hearth_controller_core::ledger::Charge;
use hearth_controller_core::ledger::holdings;
use hearth_controller_core::observed::Turn;
use hearth_controller_core::observed::forbidden::{Counted, Forbidden};
use hearth_controller_core::observed::{Holding, Others, PodRole, PodView, Sight};
use hearth_controller_core::plan_record::ahead;
use hearth_controller_core::turns::Outcome;
use hearth_crds::InferencePlan;
use jiff::Timestamp;

use crate::cluster::cache::{State, Touched};
use crate::cluster::table::Row;

/// Time for which a plan that was sent but never seen keeps its reservation: its write may have failed unnoticed.
const RESERVATION: Duration = Duration::from_secs(120);

impl State {
    /// Stores the resources that a foreign Pod takes on its node; `None` removes them.
    pub(crate) fn put_charge(&mut self, pod: &Key, charge: Option<Charge>) -> Touched {
        Touched {
            keys: Vec::new(),
            waiting: self.ledger.put(pod, charge),
        }
    }

    /// Sets whether all Pods of the cluster are visible; a change wakes the deployments that wait for room.
    pub(crate) fn see(&mut self, sight: Sight) -> Touched {
        let is_news = self.ledger.sight() != sight;
        if is_news {
            self.ledger.see(sight);
        }
        Touched {
            keys: Vec::new(),
            waiting: is_news,
        }
    }

    /// Foreign Pods that are counted.
    pub(crate) fn charged(&self) -> Vec<Key> {
        self.ledger.keys().collect()
    }

    /// Reserves room for a plan that is about to be written: from now on other plans take it into account.
    pub(crate) fn reserve(&mut self, owner: &str, plan: &InferencePlan) {
        let owner: Arc<str> = owner.into();
        let plan = Arc::new(plan.clone());
        self.reserved
            .insert(Arc::clone(&owner), (plan, Instant::now()));
        self.recount(&owner);
    }

    /// Releases the reservation of a plan that was rejected.
    pub(crate) fn give_back(&mut self, owner: &str) -> Touched {
        let owner: Arc<str> = owner.into();
        self.reserved.remove(&owner);
        self.owned_changed(&owner)
    }

    /// Returns what the Pods of a deployment in `namespace` count towards a ResourceQuota.
    pub(crate) fn counted(&self, owner: &str, namespace: &str) -> Counted {
        let pods = self.pods.of(owner);
        let own = pods.filter(|(key, row)| {
            *key.namespace == *namespace && row.value.role != PodRole::Inspect
        });
        Counted::of_pods(own.map(|(_, row)| &*row.value))
    }

    /// Records that some Pods of a plan are forbidden, whether a gateway is among them, and the deployment's own quota
    /// usage.
    pub(crate) fn forbid(
        &mut self,
        owner: &str,
        generation: u64,
        words: &str,
        has_gateway: bool,
        own: Counted,
    ) -> Touched {
        let before = self.forbidden.remove(owner);
        let forbidden = Forbidden::after(
            before,
            generation,
            words,
            has_gateway,
            own,
            Timestamp::now(),
        );
        let is_dropped = forbidden.is_dropped;
        self.forbidden.insert(owner.into(), forbidden);
        Touched {
            keys: Vec::new(),
            // It may be a new plan, which had a reservation until now.
            waiting: is_dropped && self.recount(&owner.into()),
        }
    }

    /// Records that some Pods of a deployment were created and none was forbidden: its plan keeps its reservation.
    pub(crate) fn allow(&mut self, owner: &str) -> Touched {
        let Some(forbidden) = self.forbidden.get_mut(owner) else {
            return Touched::default();
        };
        forbidden.last = None;
        forbidden.since = None;
        let was_dropped = std::mem::take(&mut forbidden.is_dropped);
        if was_dropped {
            self.recount(&owner.into());
        }
        Touched::default()
    }

    /// Releases the reservations of plans that were never seen, and of those whose Pods are forbidden.
    pub(crate) fn expire_reservations(&mut self) -> Touched {
        let old = self.reserved.iter();
        let old: Vec<Arc<str>> = old
            .filter(|(_, (_, at))| at.elapsed() > RESERVATION)
            .map(|(owner, _)| Arc::clone(owner))
            .collect();
        let mut touched = Touched::default();
        for owner in old {
            self.reserved.remove(&owner);
            touched.merge(self.owned_changed(&owner));
        }
        let now = Timestamp::now();
        let is_due = |forbidden: &Forbidden| {
            let is_forbidden = forbidden.last.is_some() && !forbidden.is_dropped;
            let since = forbidden.since.filter(|_| is_forbidden);
            is_older(since, now, RESERVATION)
        };
        let forbidden = self.forbidden.iter_mut().filter(|(_, it)| is_due(it));
        let dropped: Vec<Arc<str>> = forbidden
            .map(|(owner, forbidden)| {
                forbidden.is_dropped = true;
                Arc::clone(owner)
            })
            .collect();
        for owner in dropped {
            touched.waiting |= self.recount(&owner);
        }
        touched
    }

    /// The deployment that others wait for before they switch to their worker image, and whether its switch has
    /// failed.
    pub(crate) fn turn_holder(&self, now: Timestamp) -> Option<(&Key, bool)> {
        let (owner, outcome) = self.turns.holder(now)?;
        Some((self.keys.get(owner)?, outcome == Outcome::Failed))
    }

    /// Whether a deployment whose newest plan has another worker image may switch to `image` now; if not, also the time
    /// at which the one before it no longer holds it back.
    pub(crate) fn turn(
        &self,
        owner: &str,
        image: &str,
        now: Timestamp,
    ) -> (Turn, Option<Timestamp>) {
        let is_there = |newest: &str| newest == image;
        if self.turns.newest_image(owner).is_none_or(is_there) {
            return (Turn::Free, None);
        }
        if let Some((other, outcome)) = self.turns.on_the_way_to(image, owner, now)
            && let Some(key) = self.keys.get(other)
        {
            let turn = match outcome {
                Outcome::Failed => Turn::HeldBack(key.clone()),
                Outcome::Open | Outcome::Served => Turn::After(key.clone()),
            };
            return (turn, self.turns.passes_at(other));
        }
        // A plan that was sent and not seen yet.
        let begun = self.reserved.iter().find(|(other, (plan, _))| {
            let before = self.turns.newest_image(other);
            &***other != owner
                && plan.spec.worker_image.as_deref() == Some(image)
                && before.is_some_and(|before| before != image)
        });
        let begun = begun.and_then(|(other, _)| self.keys.get(other));
        let turn = begun.map_or(Turn::Free, |key| Turn::After(key.clone()));
        (turn, None)
    }

    /// Requests of foreign Pods.
    pub(crate) fn others(&self) -> Others {
        self.ledger.others()
    }

    /// Resources held by all deployments except this one.
    pub(crate) fn held_by_others(&self, owner: &str) -> BTreeMap<String, Holding> {
        self.holdings.of_others(owner)
    }

    /// Recomputes the resources that a deployment holds and its progress in its turn. Returns whether some node has
    /// more room than before, or another deployment's turn may have come. Pods that name the deployment as controller
    /// without being its own, and Pods without a controller, count as held by others.
    pub(crate) fn recount(&mut self, owner: &Arc<str>) -> bool {
        let plans = self.plans_of(owner);
        let is_suspended = self.suspended.contains(owner);
        let under_way = if is_suspended { &[] } else { &plans[..] };
        let ends_turn = self.turns.set(owner, under_way);
        let ahead = self.plan_ahead(owner, &plans);
        let ahead = ahead.filter(|_| !is_suspended);
        let (ours, foreign): (Vec<_>, Vec<_>) = self
            .pods
            .of(owner)
            .partition(|(key, _)| self.is_ours(owner, key));
        let views = |rows: Vec<(&Key, &Row<PodView>)>| -> Vec<Arc<PodView>> {
            rows.iter().map(|(_, row)| Arc::clone(&row.value)).collect()
        };
        let (ours, foreign) = (views(ours), views(foreign));
        let ahead = ahead.as_ref().map(|plan| &plan.spec);
        let own = holdings::of_deployment(ours.iter().map(|pod| &**pod), &plans, ahead);
        let others = holdings::of_deployment(foreign.iter().map(|pod| &**pod), &[], None);
        let nobody: Arc<str> = format!("{owner}/others").into();
        let has_freed = self.holdings.set(owner, own);
        self.holdings.set(&nobody, others) || has_freed || ends_turn
    }

    /// The Pods of a deployment, ordered by name.
    pub(crate) fn pods_of(&self, owner: &str) -> impl Iterator<Item = &Row<PodView>> {
        let pods = self.pods.of(owner);
        let ours = pods.filter(move |(key, _)| self.is_ours(owner, key));
        ours.map(|(_, row)| row)
    }

    /// Whether an object that names a deployment as its controller is in the deployment's namespace: anyone can write
    /// a uid.
    pub(crate) fn is_ours(&self, owner: &str, object: &Key) -> bool {
        let deployment = self.keys.get(owner);
        deployment.is_some_and(|deployment| deployment.namespace == object.namespace)
    }

    /// The plan that a deployment follows: the one just sent, otherwise the one of those seen.
    pub(crate) fn plan_ahead(
        &self,
        owner: &Arc<str>,
        plans: &[Arc<InferencePlan>],
    ) -> Option<Arc<InferencePlan>> {
        let reserved = self.reserved.get(owner).map(|(plan, _)| Arc::clone(plan));
        let reserved = reserved.filter(|_| self.keys.contains_key(owner));
        let followed = self.followed.get(owner).copied();
        let ahead = reserved.or_else(|| ahead(plans, followed).cloned())?;
        let dropped = self.forbidden.get(owner).filter(|it| it.is_dropped);
        let is_dropped = dropped.is_some_and(|it| it.generation == ahead.spec.generation);
        (!is_dropped).then_some(ahead)
    }
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::names::{OUTCOME_FAILED, OUTCOME_SERVING};
    use hearth_controller_core::testing::samples;
    use hearth_controller_core::testing::{at, deployment};
    use hearth_crds::InferenceDeployment;

    use super::*;
    use crate::cluster::cache::UnreadablePlan;
    use crate::cluster::packed::Packed;
    use crate::cluster::table::Identity;

    fn identity(namespace: &str, name: &str, uid: &str, owner: &str) -> Identity {
        Identity {
            key: Key::new(namespace, name),
            uid: uid.into(),
            owner: owner.into(),
            version: 1,
        }
    }

    fn pod(name: &str) -> PodView {
        PodView {
            name: name.to_owned(),
            uid: name.to_owned(),
            node: "n".to_owned(),
            phase: "Running".to_owned(),
            memory_bytes: 5,
            ..PodView::default()
        }
    }

    fn demo(state: &mut State) {
        let made: InferenceDeployment = deployment("");
        let read = Packed::new(&made).map_err(|_| unreachable!());
        state.put_deployment(identity("default", "demo", "0b1c", ""), read);
    }

    fn held(state: &State) -> u64 {
        let held = state.held_by_others("0b1c");
        held.get("n").map_or(0, |held| held.memory_bytes)
    }

    fn plan(namespace: &str, generation: u64, image: &str, outcome: &str) -> InferencePlan {
        let mut spec = samples::plan();
        spec.generation = generation;
        spec.worker_image = Some(image.to_owned());
        let mut plan = InferencePlan::new(&format!("demo-{generation}"), spec);
        plan.metadata.namespace = Some(namespace.to_owned());
        plan.status.get_or_insert_default().outcome = Some(outcome.to_owned());
        plan
    }

    /// Anyone who may write plans in their own namespace can name a deployment of another namespace as controller.
    #[test]
    fn plans_of_another_namespace_are_nobodys() {
        let mut state = State::default();
        demo(&mut state);
        let own = plan("default", 1, "x:1", OUTCOME_SERVING);
        state.put_plan(identity("default", "demo-1", "p1", "0b1c"), Ok(&own));
        let held = |state: &State| state.held_by_others("somebody");
        let before = held(&state);
        let sent = plan("default", 2, "x:2", "");
        state.reserve("0b1c", &sent);
        let foreign = plan("other", 9, "x:2", OUTCOME_FAILED);
        state.put_plan(identity("other", "demo-9", "p9", "0b1c"), Ok(&foreign));
        let why = "written by nobody".to_owned();
        let unread = UnreadablePlan {
            why,
            model_key: None,
        };
        state.put_plan(identity("other", "demo-8", "p8", "0b1c"), Err(&unread));
        let plans = state.plans_of("0b1c");
        assert_eq!(plans.len(), 1);
        assert_eq!(plans[0].spec.generation, 1);
        assert_eq!(state.unreadable_plan("0b1c"), None);
        assert_eq!(state.turn_holder(at(0)), None);
        assert!(state.reserved.contains_key("0b1c"), "it is not seen yet");
        state.give_back("0b1c");
        assert_eq!(held(&state), before);
    }

    #[test]
    fn a_deployment_without_workers_holds_what_its_pods_hold_until_it_takes_its_nodes_again() {
        let mut state = State::default();
        let put = |state: &mut State, version: u64, at_zero: bool| {
            let mut deployment = deployment("");
            let status = deployment.status.get_or_insert_default();
            status.scale_to_zero = Some(hearth_crds::ScaleToZeroStatus {
                at_zero,
                ..hearth_crds::ScaleToZeroStatus::default()
            });
            let read = Packed::new(&deployment).map_err(|_| unreachable!());
            let mut identity = identity("default", "demo", "0b1c", "");
            identity.version = version;
            state.put_deployment(identity, read)
        };
        put(&mut state, 1, false);
        let served = plan("default", 1, "x:1", OUTCOME_SERVING);
        state.put_plan(identity("default", "demo-1", "p1", "0b1c"), Ok(&served));
        let held = |state: &State| state.held_by_others("somebody");
        let before = held(&state);
        assert!(!before.is_empty());
        assert!(put(&mut state, 2, true).waiting, "others have room");
        assert_eq!(held(&state), BTreeMap::new());
        // Before its Pods are there, and before its status is written.
        state.take_again("0b1c", Timestamp::now());
        assert_eq!(held(&state), before);
        put(&mut state, 3, false);
        assert_eq!(held(&state), before);
    }

    #[test]
    fn a_suspended_deployment_holds_what_its_pods_hold_and_no_turn() {
        let mut state = State::default();
        let put = |state: &mut State, version: u64, yaml: &str| {
            let read = Packed::new(&deployment(yaml)).map_err(|_| unreachable!());
            let mut identity = identity("default", "demo", "0b1c", "");
            identity.version = version;
            state.put_deployment(identity, read)
        };
        put(&mut state, 1, "");
        let served = plan("default", 1, "x:1", OUTCOME_SERVING);
        state.put_plan(identity("default", "demo-1", "p1", "0b1c"), Ok(&served));
        let next = plan("default", 2, "x:2", "");
        state.put_plan(identity("default", "demo-2", "p2", "0b1c"), Ok(&next));
        let held = |state: &State| state.held_by_others("somebody");
        let before = held(&state);
        assert!(!before.is_empty());
        assert!(state.turn_holder(at(0)).is_some());
        assert!(
            put(&mut state, 2, "suspend: true").waiting,
            "others have room"
        );
        assert_eq!(held(&state), BTreeMap::new());
        assert_eq!(state.turn_holder(at(0)), None);
        state.put_pod(
            identity("default", "demo-x", "demo-x", "0b1c"),
            pod("demo-x"),
        );
        assert_eq!(held(&state)["n"].memory_bytes, 5, "it has not ended yet");
        state.remove_pod(&Key::new("default", "demo-x"), "demo-x");
        put(&mut state, 3, "");
        assert_eq!(held(&state), before);
        assert!(state.turn_holder(at(0)).is_some());
    }

    /// `kubectl delete --cascade=orphan` leaves plans whose failed image change no longer belongs to any deployment.
    #[test]
    fn a_turn_goes_with_its_deployment() {
        for orphaned in [true, false] {
            let mut state = State::default();
            let put = |state: &mut State, owner: &str, version: u64| {
                let mut touched = Touched::default();
                for (generation, image, outcome) in
                    [(1, "x:1", OUTCOME_SERVING), (2, "x:2", OUTCOME_FAILED)]
                {
                    let name = format!("demo-{generation}");
                    let mut identity = identity("default", &name, &name, owner);
                    identity.version = version;
                    let plan = plan("default", generation, image, outcome);
                    touched.merge(state.put_plan(identity, Ok(&plan)));
                }
                touched
            };
            // Plans are seen before their deployment.
            put(&mut state, "0b1c", 1);
            assert_eq!(state.turn_holder(at(0)), None);
            demo(&mut state);
            let key = Key::new("default", "demo");
            assert_eq!(state.turn_holder(at(0)), Some((&key, true)));
            let touched = match orphaned {
                true => put(&mut state, "", 2),
                false => state.remove_deployment(&key, "0b1c"),
            };
            assert!(touched.waiting, "another's turn has come");
            assert_eq!(state.turn_holder(at(0)), None);
            // The next one that fails is found, although it sorts later.
            let read = Packed::new(&deployment("")).map_err(|_| unreachable!());
            state.put_deployment(identity("default", "other", "zzzz", ""), read);
            put(&mut state, "zzzz", 3);
            let other = Key::new("default", "other");
            let waits = plan("default", 1, "x:1", OUTCOME_SERVING);
            let read = Packed::new(&deployment("")).map_err(|_| unreachable!());
            state.put_deployment(identity("default", "waits", "w", ""), read);
            state.put_plan(identity("default", "waits-1", "w1", "w"), Ok(&waits));
            assert_eq!(state.turn("w", "x:2", at(0)).0, Turn::HeldBack(other));
        }
    }

    /// `kubectl delete --cascade=orphan` leaves Pods with our label and without a controller; anyone can create such
    /// Pods, or name a deployment of another namespace.
    #[test]
    fn pods_that_are_nobodys_take_their_room() {
        let mut state = State::default();
        state.put_pod(identity("default", "a", "a", ""), pod("a"));
        state.put_pod(identity("default", "b", "b", ""), pod("b"));
        demo(&mut state);
        assert_eq!(held(&state), 10);
        state.put_pod(identity("other", "c", "c", "0b1c"), pod("c"));
        assert_eq!(state.pods_of("0b1c").count(), 0, "of another namespace");
        assert_eq!(held(&state), 15);
        state.put_pod(identity("default", "d", "d", "0b1c"), pod("d"));
        assert_eq!(state.pods_of("0b1c").count(), 1);
        assert_eq!(held(&state), 15, "its own is not others'");
        state.remove_pod(&Key::new("default", "a"), "a");
        assert_eq!(held(&state), 10);
    }

    /// A Pod is adopted or orphaned, or replaced by another of its name while the watch is down: its resources count
    /// once.
    #[test]
    fn what_a_pod_held_goes_with_it_to_its_next_owner() {
        let mut state = State::default();
        demo(&mut state);
        let mut put = |uid: &str, owner: &str, version: u64| {
            let mut identity = identity("default", "a", uid, owner);
            identity.version = version;
            let touched = state.put_pod(identity, pod("a"));
            let others = state.held_by_others("somebody").remove("n");
            let others = others.map_or(0, |held| held.memory_bytes);
            (others, held(&state), touched.keys.len())
        };
        assert_eq!(put("a", "0b1c", 1), (5, 0, 1));
        assert_eq!(put("a", "", 2), (5, 5, 1), "its deployment hears of it");
        assert_eq!(put("a", "0b1c", 3), (5, 0, 1));
        assert_eq!(put("b", "another", 4), (5, 5, 1), "of the same name");
        state.remove_pod(&Key::new("default", "a"), "b");
        assert!(state.held_by_others("somebody").is_empty());
    }

    #[test]
    fn a_plan_whose_pods_are_forbidden_loses_its_place_after_a_while() {
        let mut state = State::default();
        demo(&mut state);
        let plan = |state: &mut State, generation: u64| {
            let mut spec = samples::plan();
            spec.generation = generation;
            let name = format!("demo-{generation}");
            let plan = InferencePlan::new(&name, spec);
            state.put_plan(identity("default", &name, &name, "0b1c"), Ok(&plan));
        };
        let forbid = |state: &mut State, generation: u64| {
            let words = "violates PodSecurity";
            state.forbid("0b1c", generation, words, true, Counted::default())
        };
        plan(&mut state, 2);
        let others = |state: &State| state.held_by_others("somebody").len();
        let nodes = others(&state);
        assert!(nodes > 0);
        forbid(&mut state, 2);
        state.expire_reservations();
        assert_eq!(others(&state), nodes, "it may be the quota of a moment");
        let long_ago = Some(Timestamp::now() - RESERVATION - Duration::from_secs(1));
        let forbidden = state.forbidden.get_mut("0b1c").expect("forbidden");
        forbidden.since = long_ago;
        assert!(
            state.expire_reservations().waiting,
            "others may have its place"
        );
        assert_eq!(others(&state), 0);
        assert_eq!(state.expire_reservations(), Touched::default());
        forbid(&mut state, 2);
        assert_eq!(others(&state), 0, "still");
        // An edit does not reset this, neither before nor after the reservation is lost.
        plan(&mut state, 3);
        assert_eq!(others(&state), nodes, "it may be allowed");
        assert!(forbid(&mut state, 3).waiting, "it is not");
        assert_eq!(others(&state), 0);
        state.allow("0b1c");
        assert_eq!(others(&state), nodes);
        forbid(&mut state, 3);
        assert_eq!(others(&state), nodes, "one was made since");
        state.forbidden.get_mut("0b1c").expect("forbidden").since = long_ago;
        plan(&mut state, 4);
        forbid(&mut state, 4);
        state.expire_reservations();
        assert_eq!(others(&state), 0);
    }
}
