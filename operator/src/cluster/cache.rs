//! Everything known about the cluster, kept current by watches and by the responses to our own writes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_controller_core::calls;
use hearth_controller_core::conditions::holds_nothing;
use hearth_controller_core::key::Key;
use hearth_controller_core::ledger::Ledger;
use hearth_controller_core::ledger::holdings::Holdings;
use hearth_controller_core::observed::forbidden::Forbidden;
use hearth_controller_core::observed::{AgentEndpoint, NodeView, PodView, ScalerView};
use hearth_controller_core::plan_record::model_key_of;
use hearth_controller_core::turns::Turns;
use hearth_crds::{InferenceDeployment, InferencePlan, NodeProfileStatus};
use jiff::Timestamp;
use kube::api::ObjectMeta;

use crate::cluster::devices::{Claimed, Devices, Offered};
use crate::cluster::lean::Facts;
use crate::cluster::packed::Packed;
use crate::cluster::queue::Queue;
use crate::cluster::sharing::Sharing;
use crate::cluster::table::{Identity, Put, Table};

/// Delay that batches changes made at about the same time.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Delay before deployments that wait for room are reconciled after some was freed.
const ROOM_DEBOUNCE: Duration = Duration::from_secs(1);

/// A deployment as it was read, or one that this version cannot read.
pub(crate) type ReadDeployment = Result<Packed<InferenceDeployment>, Box<Unreadable>>;
/// A plan, or one that this version cannot read.
pub(crate) type ReadPlan = Result<Packed<InferencePlan>, Box<UnreadablePlan>>;

/// A plan written in another version of the API.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct UnreadablePlan {
    /// The reason that it cannot be read.
    pub(crate) why: String,
    /// Name of its model in the nodes' stores; `None` for other sources.
    pub(crate) model_key: Option<String>,
}

/// A deployment written in another version of the API.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Unreadable {
    pub(crate) metadata: ObjectMeta,
    /// The reason that it cannot be read.
    pub(crate) reason: String,
    /// Name of its model in the nodes' stores; `None` for other sources, and for one that was never fetched.
    pub(crate) model_key: Option<String>,
}

/// The operator's view of the cluster.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    state: Mutex<State>,
}

/// A [`Cache`] whose changes queue the deployments that they affect.
#[derive(Clone, Debug)]
pub(crate) struct CacheNotifier {
    pub(crate) cache: Arc<Cache>,
    pub(crate) queue: Arc<Queue>,
}

impl CacheNotifier {
    /// Changes the contents. Any update, from a watch or from the response to a write, may affect a deployment: a
    /// response also shows what others changed, and the watch does not report that again.
    pub(crate) fn change(&self, change: impl FnOnce(&mut State) -> Touched) {
        let (touched, waiting) = {
            let mut state = self.cache.lock();
            let touched = change(&mut state);
            let waiting = if touched.waiting {
                state.waiting()
            } else {
                Vec::new()
            };
            (touched, waiting)
        };
        for key in touched.keys {
            self.queue.add(key, DEBOUNCE);
        }
        for key in waiting {
            self.queue.add(key, ROOM_DEBOUNCE);
        }
    }
}

/// The contents of a [`Cache`], locked.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) deployments: Table<ReadDeployment>,
    pub(crate) plans: Table<ReadPlan>,
    pub(crate) pods: Table<PodView>,
    pub(crate) scalers: Table<ScalerView>,
    /// Objects by kind: Service, Secret, PodDisruptionBudget, NetworkPolicy.
    pub(crate) objects: HashMap<&'static str, Table<Facts>>,
    pub(crate) nodes: BTreeMap<String, Arc<NodeView>>,
    node_uids: HashMap<String, String>,
    profiles: HashMap<String, NodeProfileStatus>,
    pub(crate) profiles_in_spec: HashSet<String>,
    /// Running agents, by Pod.
    agents: HashMap<Key, AgentEndpoint>,
    pub(crate) holdings: Holdings,
    pub(crate) ledger: Ledger,
    devices: Devices,
    /// See `Observed::has_device_claims`.
    pub(crate) has_device_claims: bool,
    /// Plans that were sent to the API server and not yet seen in a watch, by owner.
    pub(crate) reserved: HashMap<Arc<str>, (Arc<InferencePlan>, Instant)>,
    /// Pods that the API server rejected as forbidden, by owner.
    pub(crate) forbidden: HashMap<Arc<str>, Forbidden>,
    /// Deployments that wait for room, for a node, or for their turn to roll out a worker image.
    waiting: HashSet<Key>,
    pub(crate) turns: Turns,
    /// Uids of deployments that are suspended, or without workers for want of requests: their plans hold no resources and no
    /// turn.
    pub(crate) suspended: HashSet<Arc<str>>,
    /// Generations of the plans that deployments follow by their status, by uid.
    pub(crate) followed: HashMap<Arc<str>, u64>,
    pub(crate) sharing: Sharing,
    /// Deployments by uid.
    pub(crate) keys: HashMap<Arc<str>, Key>,
}

/// Deployments that a change affects.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Touched {
    pub(crate) keys: Vec<Key>,
    /// Whether deployments that wait for room are affected too.
    pub(crate) waiting: bool,
}

impl Cache {
    /// Locks the contents. Never held over an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Stores a deployment.
    pub(crate) fn put_deployment(&mut self, identity: Identity, value: ReadDeployment) -> Touched {
        let (key, uid) = (identity.key.clone(), Arc::clone(&identity.uid));
        let after = value.clone();
        match self.deployments.put(identity, value) {
            Put::Stale | Put::Same => Touched::default(),
            Put::Changed(before) => {
                // Its Pods and plans may have been seen first.
                let is_new = self.keys.insert(Arc::clone(&uid), key.clone()).is_none();
                let (changes_rest, gives) = self.suspend(&uid, &after);
                let is_other = is_new | changes_rest;
                let has_freed = is_other && self.recount(&uid);
                // The status is written by us. Changes to it by others are corrected at the next resync.
                let mut touched = match before.is_some_and(|before| is_same_wish(&before, &after)) {
                    true => Touched::default(),
                    false => Touched::one(key),
                };
                touched.waiting |= has_freed || gives;
                touched
            }
        }
    }

    /// Takes the nodes of a deployment's plan again, for workers that start after there were none.
    pub(crate) fn take_again(&mut self, uid: &str, now: Timestamp) {
        if let Some(uid) = self.suspended.take(uid) {
            self.sharing.begin(&uid, now);
            self.recount(&uid);
        }
    }

    /// Records whether a deployment is suspended or without workers, which plan it follows, and whether its workers may end for others;
    /// returns whether the former two changed, and whether they may from now on. An unreadable one keeps its state.
    fn suspend(&mut self, uid: &Arc<str>, deployment: &ReadDeployment) -> (bool, bool) {
        let deployment = deployment.as_ref().ok();
        let Some(deployment) = deployment.and_then(|packed| packed.get().ok()) else {
            return (false, false);
        };
        let gives = self.sharing.note(uid, &deployment);
        let is_at_rest = deployment.spec.suspend || holds_nothing(deployment.status.as_ref());
        let changes = match is_at_rest {
            true => self.suspended.insert(Arc::clone(uid)),
            false => self.suspended.remove(uid),
        };
        let status = deployment.status.as_ref();
        let followed = status.and_then(|status| Some(status.plan.as_ref()?.generation));
        let before = match followed {
            Some(generation) => self.followed.insert(Arc::clone(uid), generation),
            None => self.followed.remove(uid),
        };
        (changes || before != followed, gives)
    }

    /// Stores a plan, or the reason that it cannot be read.
    pub(crate) fn put_plan(
        &mut self,
        mut identity: Identity,
        value: Result<&InferencePlan, &UnreadablePlan>,
    ) -> Touched {
        identity.share(&self.keys);
        let owner = Arc::clone(&identity.owner);
        let key = identity.key.clone();
        let before = self.plans.owner(&key);
        let generation = value.map_or(0, |plan| plan.spec.generation);
        let packed = match value {
            Ok(plan) => Packed::new(plan).map_err(|error| {
                let (why, model_key) = (error.to_string(), model_key_of(plan));
                Box::new(UnreadablePlan { why, model_key })
            }),
            Err(unreadable) => Err(Box::new(unreadable.clone())),
        };
        match self.plans.put(identity, packed) {
            Put::Stale | Put::Same => Touched::default(),
            Put::Changed(_) => {
                let is_seen =
                    |(plan, _): &(Arc<InferencePlan>, Instant)| plan.spec.generation <= generation;
                if self.is_ours(&owner, &key) && self.reserved.get(&owner).is_some_and(is_seen) {
                    self.reserved.remove(&owner);
                }
                self.owners_changed(before, &owner)
            }
        }
    }

    /// Stores a deployment's Pod.
    pub(crate) fn put_pod(&mut self, mut identity: Identity, value: PodView) -> Touched {
        identity.share(&self.keys);
        let owner = Arc::clone(&identity.owner);
        let before = self.pods.owner(&identity.key);
        match self.pods.put(identity, value) {
            Put::Stale | Put::Same => Touched::default(),
            Put::Changed(_) => self.owners_changed(before, &owner),
        }
    }

    /// Stores an object of one of the four kinds.
    pub(crate) fn put_object(
        &mut self,
        kind: &'static str,
        mut identity: Identity,
        value: Facts,
    ) -> Touched {
        identity.share(&self.keys);
        let owner = Arc::clone(&identity.owner);
        match self.objects.entry(kind).or_default().put(identity, value) {
            Put::Stale | Put::Same => Touched::default(),
            Put::Changed(_) => self.touch_owner(&owner),
        }
    }

    /// Stores a node, without its profile.
    pub(crate) fn put_node(&mut self, uid: &str, mut view: NodeView) -> Touched {
        self.node_uids.insert(view.name.clone(), uid.to_owned());
        let profile = self.profiles.get(&view.name).cloned();
        view.profile = profile.map(NodeProfileStatus::without_store);
        let name = view.name.clone();
        let before = self.nodes.get(&name);
        // Not every component that adds a taint sets its time.
        for taint in view.taints.iter_mut().filter(|t| t.since.is_none()) {
            let mut known = before.iter().flat_map(|before| &before.taints);
            let same = known.find(|known| known.key == taint.key && known.effect == taint.effect);
            taint.since = same.map_or_else(|| Some(Timestamp::now()), |same| same.since);
        }
        // The clock of a freshly booted machine may be ahead; then the time at which the change was seen here is used.
        let now = Timestamp::now();
        let seen = |told: Option<Timestamp>, known: Option<Timestamp>| {
            let is_ahead = told.is_some_and(|told| told > now);
            if is_ahead { known.or(Some(now)) } else { told }
        };
        view.ready_since = seen(view.ready_since, before.and_then(|it| it.ready_since));
        let known = before.and_then(|it| it.not_ready_since);
        view.not_ready_since = seen(view.not_ready_since, known);
        if before.is_some_and(|before| **before == view) {
            return Touched::default();
        }
        self.nodes.insert(name.clone(), Arc::new(view));
        self.node_changed(&name)
    }

    /// Removes a node.
    pub(crate) fn remove_node(&mut self, name: &str) -> Touched {
        self.node_uids.remove(name);
        match self.nodes.remove(name) {
            None => Touched::default(),
            Some(_) => self.node_changed(name),
        }
    }

    /// Records whether a profile is stored where an earlier version wrote it.
    pub(crate) fn note_profile_in_spec(&mut self, name: &str, is_in_spec: bool) {
        match is_in_spec {
            true => self.profiles_in_spec.insert(name.to_owned()),
            false => self.profiles_in_spec.remove(name),
        };
    }

    /// Stores a node's measured profile; `None` removes it. What the node's store has is read from here alone, and no deployment
    /// is looked at because of it.
    pub(crate) fn put_profile(
        &mut self,
        name: &str,
        profile: Option<NodeProfileStatus>,
    ) -> Touched {
        if self.profiles.get(name) == profile.as_ref() {
            return Touched::default();
        }
        match &profile {
            Some(profile) => self.profiles.insert(name.to_owned(), profile.clone()),
            None => self.profiles.remove(name),
        };
        let measured = profile.map(NodeProfileStatus::without_store);
        if let Some(node) = self.nodes.get(name) {
            if node.profile == measured {
                return Touched::default();
            }
            let view = NodeView {
                profile: measured,
                ..NodeView::clone(node)
            };
            self.nodes.insert(name.to_owned(), Arc::new(view));
        }
        Touched {
            keys: Vec::new(),
            waiting: true,
        }
    }

    /// Sets the namespaces whose deployments are served.
    pub(crate) fn serve(&mut self, namespaces: &[String]) {
        self.ledger.serve(namespaces);
    }

    /// Whether deployments of a namespace are served.
    pub(crate) fn is_served(&self, namespace: &str) -> bool {
        self.ledger.is_served(namespace)
    }

    /// Stores the GPUs that a slice offers; `None` removes them.
    pub(crate) fn put_slice(&mut self, slice: Key, offered: Option<Offered>) -> Touched {
        Touched {
            keys: Vec::new(),
            waiting: self.devices.offer(slice, offered),
        }
    }

    /// Stores the GPUs that a claim has; `None` removes them.
    pub(crate) fn put_claim(&mut self, claim: Key, claimed: Option<Claimed>) -> Touched {
        let has_freed = claimed.is_none();
        let is_news = self.devices.claim(claim, claimed);
        Touched {
            keys: Vec::new(),
            waiting: is_news && has_freed,
        }
    }

    /// GPUs offered and claimed through dynamic resource allocation.
    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Stores an agent's endpoint; `None` removes it.
    pub(crate) fn put_agent(&mut self, pod: Key, place: Option<AgentEndpoint>) {
        match place {
            Some(place) => self.agents.insert(pod, place),
            None => self.agents.remove(&pod),
        };
    }

    /// Removes a deployment: its resources are free once its Pods are gone.
    pub(crate) fn remove_deployment(&mut self, key: &Key, uid: &str) -> Touched {
        let Some(row) = self.deployments.remove(key, uid) else {
            return Touched::default();
        };
        self.waiting.remove(key);
        self.keys.remove(&row.uid);
        self.reserved.remove(&row.uid);
        self.suspended.remove(&row.uid);
        self.followed.remove(&row.uid);
        self.forbidden.remove(&row.uid);
        let asked = self.sharing.forget(key, &row.uid);
        let mut touched = self.owned_changed(&row.uid);
        touched.keys.extend(asked);
        touched.keys.push(key.clone());
        touched
    }

    /// Removes a plan.
    pub(crate) fn remove_plan(&mut self, key: &Key, uid: &str) -> Touched {
        match self.plans.remove(key, uid) {
            None => Touched::default(),
            Some(row) => self.owned_changed(&row.owner),
        }
    }

    /// Removes a Pod.
    pub(crate) fn remove_pod(&mut self, key: &Key, uid: &str) -> Touched {
        match self.pods.remove(key, uid) {
            None => Touched::default(),
            Some(row) => {
                if let Some(forbidden) = self.forbidden.get_mut(&row.owner) {
                    forbidden.goes(Timestamp::now());
                }
                self.owned_changed(&row.owner)
            }
        }
    }

    /// Removes an object of one of the four kinds.
    pub(crate) fn remove_object(&mut self, kind: &'static str, key: &Key, uid: &str) -> Touched {
        let table = self.objects.entry(kind).or_default();
        match table.remove(key, uid) {
            None => Touched::default(),
            Some(row) => self.touch_owner(&row.owner),
        }
    }

    /// Sets whether a deployment waits for room, for a node, or for its turn.
    pub(crate) fn set_waiting(&mut self, key: &Key, waits: bool) {
        if waits {
            self.waiting.insert(key.clone());
        } else {
            self.waiting.remove(key);
        }
    }

    /// Whether it does.
    pub(crate) fn is_waiting(&self, key: &Key) -> bool {
        self.waiting.contains(key)
    }

    fn waiting(&self) -> Vec<Key> {
        self.waiting.iter().cloned().collect()
    }

    /// Running agents, one per node.
    pub(crate) fn agents(&self) -> Vec<AgentEndpoint> {
        let places = self.agents.values();
        let by_node: BTreeMap<&str, &AgentEndpoint> =
            places.map(|place| (&*place.node, place)).collect();
        by_node.into_values().cloned().collect()
    }

    /// Keys of the agents' Pods.
    pub(crate) fn agent_keys(&self) -> Vec<Key> {
        self.agents.keys().cloned().collect()
    }

    /// Returns the uid of a node.
    pub(crate) fn node_uid(&self, node: &str) -> Option<&str> {
        self.node_uids.get(node).map(String::as_str)
    }

    /// Returns a node's measured profile.
    pub(crate) fn profile(&self, node: &str) -> Option<&NodeProfileStatus> {
        self.profiles.get(node)
    }

    /// Nodes that have a profile.
    pub(crate) fn profiled(&self) -> Vec<String> {
        self.profiles.keys().cloned().collect()
    }

    /// The plans of a deployment, oldest first.
    pub(crate) fn plans_of(&self, owner: &str) -> Vec<Arc<InferencePlan>> {
        let rows = self.plans.of(owner);
        let ours = rows.filter(|(key, _)| self.is_ours(owner, key));
        let mut plans: Vec<Arc<InferencePlan>> = ours
            .filter_map(|(_, row)| row.value.as_ref().as_ref().ok()?.get().ok().map(Arc::new))
            .collect();
        plans.sort_by_key(|plan| plan.spec.generation);
        plans
    }

    /// Name of a deployment's plan that cannot be read, with the reason; if there are several, the last one by name.
    pub(crate) fn unreadable_plan(&self, owner: &str) -> Option<(Box<str>, Box<str>)> {
        let rows = self.plans.of(owner);
        let ours = rows.filter(|(key, _)| self.is_ours(owner, key));
        let unreadable = ours.filter_map(|(key, row)| {
            let why = row.value.as_ref().as_ref().err()?;
            Some((Box::from(&*key.name), why.why.as_str().into()))
        });
        unreadable.max()
    }

    /// Returns an object of a deployment.
    pub(crate) fn object(
        &self,
        kind: &str,
        key: &Key,
    ) -> Option<&crate::cluster::table::Row<Facts>> {
        self.objects.get(kind)?.get(key)
    }

    pub(crate) fn owned_changed(&mut self, owner: &Arc<str>) -> Touched {
        let has_freed = self.recount(owner);
        Touched {
            waiting: has_freed,
            ..self.touch_owner(owner)
        }
    }

    /// Handles a change to an object of `owner` that belonged to `before` until now: an object may change its
    /// controller, and another object of the same name may appear without the deletion of the first being seen.
    fn owners_changed(&mut self, before: Option<Arc<str>>, owner: &Arc<str>) -> Touched {
        let mut touched = self.owned_changed(owner);
        if let Some(before) = before.filter(|before| before != owner) {
            touched.merge(self.owned_changed(&before));
        }
        touched
    }

    pub(crate) fn touch_owner(&self, owner: &Arc<str>) -> Touched {
        match self.keys.get(owner) {
            Some(key) => Touched::one(key.clone()),
            None => Touched::default(),
        }
    }

    fn node_changed(&self, name: &str) -> Touched {
        let owners = self.holdings.owners_on(name);
        Touched {
            keys: owners
                .filter_map(|owner| self.keys.get(owner).cloned())
                .collect(),
            waiting: true,
        }
    }
}

/// Whether only the status and fields maintained by the API server differ.
fn is_same_wish(before: &ReadDeployment, after: &ReadDeployment) -> bool {
    match (before, after) {
        (Ok(before), Ok(after)) => {
            let (Ok(before), Ok(after)) = (before.get(), after.get()) else {
                return false;
            };
            let (old, new) = (&before.metadata, &after.metadata);
            old.uid == new.uid
                && old.generation == new.generation
                && old.deletion_timestamp == new.deletion_timestamp
                && calls::of(old) == calls::of(new)
                && before.spec == after.spec
        }
        _ => false,
    }
}

impl Touched {
    pub(crate) fn one(key: Key) -> Self {
        Self {
            keys: vec![key],
            waiting: false,
        }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.keys.extend(other.keys);
        self.waiting |= other.waiting;
    }
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::testing::{GIB, node};

    use super::*;

    /// The node's machine has booted and not yet synchronised its clock.
    #[test]
    fn a_node_whose_clock_is_ahead_is_as_it_is_since_that_was_seen() {
        for is_ready in [true, false] {
            let mut state = State::default();
            let mut put = |told: Timestamp, labels: &str| {
                let mut view = node("office", 4, GIB);
                view.is_ready = is_ready;
                view.ready_since = is_ready.then_some(told);
                view.not_ready_since = (!is_ready).then_some(told);
                view.labels.insert("x".to_owned(), labels.to_owned());
                state.put_node("uid", view);
                let seen = &state.nodes["office"];
                assert_eq!(seen.ready_since.is_some(), is_ready);
                assert_eq!(seen.not_ready_since.is_some(), !is_ready);
                seen.ready_since.or(seen.not_ready_since).expect("a time")
            };
            let start = Timestamp::now();
            let ahead = start + jiff::SignedDuration::from_hours(2);
            let seen = put(ahead, "a");
            assert!(start <= seen && seen <= Timestamp::now(), "{seen}");
            assert_eq!(put(ahead, "b"), seen, "another label is no change of that");
            let past = start - jiff::SignedDuration::from_hours(2);
            assert_eq!(put(past, "b"), past);
        }
    }
}
