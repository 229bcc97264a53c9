//! Dereference: collects all inputs of one reconcile from the caches; the only requests are for events of a Pod that
//! hangs, and for the claim of a model whose files are still being located.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_controller_core::age::age;
use hearth_controller_core::conditions::{self, MODEL_READY};
use hearth_controller_core::key::Key;
use hearth_controller_core::observed::{
    Demand, FetchView, Measured, Observed, Placement, PodView, Settings, StoredCopy,
};
use hearth_crds::{Condition, InferenceDeployment, ModelSource};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

use crate::cluster::cache::{Cache, State};

/// Minimum age of a Pod before its events are requested.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for which a response about a Pod's events is reused.
const EVENTS_FRESH: Duration = Duration::from_secs(10);
/// Longest time that the API server may take to list events or to read a claim: they are helpful, not essential.
const EVENTS_WAIT: Duration = Duration::from_secs(5);

/// Inputs of a reconcile that are not in the caches.
#[derive(Clone, Debug, Default)]
pub(crate) struct UncachedState {
    /// Agents' reports about the model, by node.
    pub(crate) fetches: BTreeMap<String, FetchView>,
    /// The commit that nodes have of a model of a hub.
    pub(crate) fetched_commit: Option<String>,
    /// Access modes of the claim that holds the model.
    pub(crate) claim_modes: Vec<String>,
    /// Latencies that the gateway measured recently.
    pub(crate) measured: Option<Measured>,
    /// Load that the gateways measured recently.
    pub(crate) demand: Option<Demand>,
    /// Seconds since the last request, of all deployments whose gateways are read for their load.
    pub(crate) idle_s: BTreeMap<Key, f64>,
    /// Resources that workers actually got, and whether they hang, by worker address.
    pub(crate) placements: BTreeMap<SocketAddr, Placement>,
    /// Serial of the newest certificate.
    pub(crate) certificate: Option<String>,
}

/// Reader of a reconcile's inputs.
pub(crate) struct Dereferencer {
    client: Client,
    cache: Arc<Cache>,
    settings: Arc<Settings>,
    /// The newest warning about a Pod and the time of its request, by Pod uid.
    warnings: Mutex<HashMap<String, (Instant, Option<String>)>>,
}

impl Dereferencer {
    /// Creates a dereferencer that reads from `cache`.
    pub(crate) fn new(client: Client, cache: Arc<Cache>, settings: Arc<Settings>) -> Self {
        Self {
            client,
            cache,
            settings,
            warnings: Mutex::default(),
        }
    }

    /// Collects everything known about `deployment` and the cluster around it.
    pub(crate) fn observe(
        &self,
        deployment: &Arc<InferenceDeployment>,
        now: Timestamp,
        outside: &UncachedState,
    ) -> Observed {
        let uid = deployment.uid().unwrap_or_default();
        let key = Key::new(
            &deployment.namespace().unwrap_or_default(),
            &deployment.name_any(),
        );
        let warnings = self.warnings();
        let state = self.cache.lock();
        let pods = state.pods_of(&uid).map(|row| {
            let warning = warnings.get(&row.value.uid).and_then(|(_, w)| w.clone());
            match warning.filter(|_| row.value.is_setting_up) {
                None => Arc::clone(&row.value),
                Some(warning) => Arc::new(PodView {
                    setup_warning: Some(warning),
                    ..PodView::clone(&row.value)
                }),
            }
        });
        let service = state.object("Service", &key);
        let service = service.filter(|row| *row.owner == *uid);
        let (turn, turn_comes_at) = state.turn(&uid, &self.settings.worker_image, now);
        Observed {
            now,
            settings: Arc::clone(&self.settings),
            deployment: Arc::clone(deployment),
            plans: state.plans_of(&uid),
            pods: pods.collect(),
            scaler: state.scaler_of(&uid, &key),
            nodes: state.nodes.clone(),
            held_by_others: state.held_by_others(&uid),
            neighbours: state.neighbours((&key, &uid), deployment, &outside.idle_s, now),
            askers: state.askers_of(&key),
            awaited_nodes: state.awaited_nodes(&key, deployment),
            others: state.others(),
            claimable: state.devices().free_for(&key),
            has_device_claims: state.has_device_claims,
            claim_modes: outside.claim_modes.clone(),
            turn,
            turn_comes_at,
            forbidden: state.forbidden.get(&*uid).cloned(),
            fetches: outside.fetches.clone(),
            stored: stored(&state, &deployment.spec.model.source, &key.namespace),
            fetched_commit: outside.fetched_commit.clone(),
            measured: outside.measured,
            demand: outside.demand.clone(),
            placements: outside.placements.clone(),
            certificate: outside.certificate.clone(),
            external: service.and_then(|row| row.value.external.clone()),
        }
    }

    /// Requests the access modes of the claim that holds the model until the model has been found. Empty if the claim
    /// does not exist, or the operator may not read it.
    pub(crate) async fn claim_modes(&self, deployment: &InferenceDeployment) -> Vec<String> {
        let source = &deployment.spec.model.source;
        let Some(claim) = &source.persistent_volume_claim else {
            return Vec::new();
        };
        let ready = conditions::of(deployment.status.as_ref(), MODEL_READY);
        let is_known = |ready: &Condition| {
            ready.status == "True" && ready.observed_generation == deployment.metadata.generation
        };
        if ready.is_some_and(is_known) {
            return Vec::new();
        }
        let namespace = deployment.namespace().unwrap_or_default();
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &namespace);
        let read = tokio::time::timeout(EVENTS_WAIT, claims.get(&claim.claim_name)).await;
        let claim = match read {
            Ok(Ok(claim)) => claim,
            Ok(Err(error)) => {
                tracing::debug!(%error, "the claim of a model cannot be read");
                return Vec::new();
            }
            Err(_) => return Vec::new(),
        };
        // The granted modes count; before it is bound, the requested ones.
        let given = claim.status.and_then(|status| status.access_modes);
        let asked = claim.spec.and_then(|spec| spec.access_modes);
        given.or(asked).unwrap_or_default()
    }

    /// Requests the events of Pods that hang before their container is created: no Pod condition gives the reason.
    /// Returns the delay until the next request.
    pub(crate) async fn ask_about_hanging_pods(
        &self,
        deployment: &InferenceDeployment,
        now: Timestamp,
    ) -> Option<Duration> {
        let uid = deployment.uid().unwrap_or_default();
        let hanging: Vec<(String, Duration)> = {
            let state = self.cache.lock();
            let pods = state.pods_of(&uid);
            pods.filter(|row| row.value.is_setting_up && !row.value.is_deleting)
                .map(|row| {
                    let created = row.value.created.unwrap_or(now);
                    (row.value.uid.clone(), age(created, now))
                })
                .collect()
        };
        self.forget_old_warnings();
        let mut again: Option<Duration> = None;
        for (pod, age) in hanging {
            if age < PATIENCE {
                let wait = PATIENCE - age;
                again = Some(again.map_or(wait, |again| again.min(wait)));
                continue;
            }
            again = Some(again.map_or(EVENTS_FRESH, |again| again.min(EVENTS_FRESH)));
            let asked = self.warnings().get(&pod).map(|(at, _)| *at);
            if asked.is_some_and(|at| at.elapsed() < EVENTS_FRESH) {
                continue;
            }
            let namespace = deployment.namespace().unwrap_or_default();
            let warning = self.newest_warning(&namespace, &pod).await;
            self.warnings().insert(pod, (Instant::now(), warning));
        }
        again
    }

    async fn newest_warning(&self, namespace: &str, pod: &str) -> Option<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let of_pod = format!("involvedObject.uid={pod},type=Warning");
        let parameters = ListParams::default().fields(&of_pod).limit(50);
        let listed = tokio::time::timeout(EVENTS_WAIT, events.list(&parameters)).await;
        let listed = match listed {
            Ok(Ok(listed)) => listed.items,
            Ok(Err(error)) => {
                tracing::debug!(%error, "the events of a Pod cannot be listed");
                return None;
            }
            Err(_) => return None,
        };
        let newest = listed.into_iter().max_by_key(|event| {
            let last = event.last_timestamp.as_ref().map(|time| time.0);
            let made = event.metadata.creation_timestamp.as_ref().map(|t| t.0);
            last.or(event.event_time.as_ref().map(|time| time.0))
                .or(made)
        })?;
        let reason = newest.reason.unwrap_or_default();
        let message = newest.message.unwrap_or_default();
        Some(format!("{reason}: {message}"))
    }

    fn forget_old_warnings(&self) {
        let is_fresh = |at: &Instant| at.elapsed() < EVENTS_FRESH * 6;
        self.warnings().retain(|_, (at, _)| is_fresh(at));
    }

    fn warnings(&self) -> std::sync::MutexGuard<'_, HashMap<String, (Instant, Option<String>)>> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes whose profiles say that their stores have a fetched model, or that it is on its way there.
fn stored(state: &State, source: &ModelSource, namespace: &str) -> BTreeMap<String, StoredCopy> {
    let Some(key) = source.store_key(namespace) else {
        return BTreeMap::new();
    };
    let copies = state.nodes.keys().filter_map(|node| {
        let mut models = state.profile(node)?.models.iter();
        let model = models.find(|model| model.key == key)?;
        let copy = match &model.fetch {
            None => StoredCopy::Whole,
            Some(_) => StoredCopy::Coming,
        };
        Some((node.clone(), copy))
    });
    copies.collect()
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::testing::node;
    use hearth_crds::{NodeFetch, NodeModel, NodeProfileStatus};

    use super::*;

    #[test]
    fn nodes_that_have_a_model_or_fetch_it_are_known_by_their_profiles() {
        let source: ModelSource =
            serde_json::from_str(r#"{"huggingFace": {"repo": "acme/poems"}}"#).expect("a source");
        let key = source.store_key("default").expect("a key");
        let mut state = State::default();
        let coming = Some(NodeFetch::default());
        for (name, key, fetch) in [
            ("attic", &*key, None),
            ("office", &*key, coming.clone()),
            ("shed", "another", coming),
        ] {
            state.put_node(name, node(name, 4, 1 << 30));
            let model = NodeModel {
                key: key.to_owned(),
                fetch,
                ..NodeModel::default()
            };
            let profile = NodeProfileStatus {
                models: vec![model],
                ..NodeProfileStatus::default()
            };
            state.put_profile(name, Some(profile));
        }
        let all = [("attic", StoredCopy::Whole), ("office", StoredCopy::Coming)];
        let all = all.map(|(name, copy)| (name.to_owned(), copy));
        assert_eq!(stored(&state, &source, "default"), BTreeMap::from(all));
        let builtin = ModelSource::default();
        assert_eq!(stored(&state, &builtin, "default"), BTreeMap::new());
    }
}
