//! Watches that keep the caches current and queue affected deployments.

use std::collections::HashSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use hearth_controller_core::key::Key;
use hearth_controller_core::names::{APP, LABEL_APP, LABEL_COMPONENT, LABEL_DEPLOYMENT};
use hearth_controller_core::observed::{Settings, Sight};
use kube::api::Api;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::cluster::cache::{CacheNotifier, State, Touched};
use crate::cluster::client::WATCH_SECONDS;
use crate::cluster::failure::{Failure, chain};
use crate::cluster::lean::{
    AgentPod, AnyPod, Budget, LeanClaim, LeanDeployment, LeanNode, LeanObject, LeanPlan, LeanPod,
    LeanProfile, LeanScaler, LeanSlice, ObjectKind, Policy, SecretKind, ServiceKind,
};
use crate::cluster::table::Identity;

/// Objects per page of a list: the page size bounds the memory.
pub(super) const PAGE: u32 = 100;
/// API version of dynamic resource allocation.
const DEVICE_VERSION: &str = "resource.k8s.io/v1";
/// Component of the agents' Pods, as the chart labels them.
const AGENT: &str = "agent";

/// Called with the namespace and the deployment of a Secret with certificates that changed.
pub(crate) type SecretListener = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// All watches, with the cache and listener that they notify.
#[derive(Clone)]
pub(crate) struct Watches {
    pub(crate) notifier: CacheNotifier,
    secret_changed: SecretListener,
    /// Number of watches that have not completed their first list.
    unfilled: Arc<AtomicUsize>,
    filled: Arc<Notify>,
}

/// A kind that is cached.
pub(super) trait Cached:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static
{
    /// Whether decisions require it. If watching it is forbidden, it is retried either way.
    const IS_NEEDED: bool = true;

    /// Stores an existing object.
    fn put(self, state: &mut State) -> Touched;
    /// Removes an object; with an empty uid, whichever object has that name, for now.
    fn forget(state: &mut State, key: &Key, uid: &str) -> Touched;
    /// The keys of all cached objects.
    fn keys(state: &State) -> Vec<Key>;
    /// Called when a list is complete.
    fn listed(_state: &mut State) -> Touched {
        Touched::default()
    }
    /// Called when watching is forbidden.
    fn refused(_state: &mut State) -> Touched {
        Touched::default()
    }
}

impl Watches {
    /// Creates the watches without starting any.
    pub(crate) fn new(notifier: CacheNotifier, secret_changed: SecretListener) -> Self {
        Self {
            notifier,
            secret_changed,
            unfilled: Arc::default(),
            filled: Arc::default(),
        }
    }

    /// Starts all watches. They end when the set is dropped.
    ///
    /// With `settings.namespaces`, namespaced objects are watched in those namespaces only. InferenceDeployments are
    /// watched everywhere if that is allowed, so that the status of one that is not served says so.
    pub(crate) async fn start(&self, client: &Client, settings: &Settings) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        self.cluster::<LeanNode>(&mut tasks, client);
        self.cluster::<LeanProfile>(&mut tasks, client);
        self.notifier.change(|state| {
            state.serve(&settings.namespaces);
            Touched::default()
        });
        if settings.ledger.all_pods {
            let all = Config::default().fields(AnyPod::FIELDS);
            self.watch::<AnyPod>(&mut tasks, Api::all(client.clone()), None, all);
        }
        if settings.claims && serves_devices(client).await {
            self.notifier.change(|state| {
                state.has_device_claims = true;
                Touched::default()
            });
            self.cluster::<LeanSlice>(&mut tasks, client);
            self.namespaced::<LeanClaim>(&mut tasks, client, &[], "");
        }
        let agents = format!("{LABEL_APP}={APP},{LABEL_COMPONENT}={AGENT}");
        let own = [settings.operator_namespace.clone()];
        self.namespaced::<AgentPod>(&mut tasks, client, &own, &agents);

        let served = &settings.namespaces;
        self.namespaced::<LeanPlan>(&mut tasks, client, served, "");
        self.namespaced::<LeanScaler>(&mut tasks, client, served, "");
        self.namespaced::<LeanPod>(&mut tasks, client, served, LABEL_DEPLOYMENT);
        self.namespaced::<LeanObject<ServiceKind>>(&mut tasks, client, served, LABEL_DEPLOYMENT);
        self.namespaced::<LeanObject<SecretKind>>(&mut tasks, client, served, LABEL_DEPLOYMENT);
        self.namespaced::<LeanObject<Budget>>(&mut tasks, client, served, LABEL_DEPLOYMENT);
        self.namespaced::<LeanObject<Policy>>(&mut tasks, client, served, LABEL_DEPLOYMENT);
        let everywhere = served.is_empty() || may_list_everywhere(client).await;
        let deployments: &[String] = if everywhere { &[] } else { served };
        self.namespaced::<LeanDeployment>(&mut tasks, client, deployments, "");
        tasks
    }

    /// Waits until every cache has been filled once.
    pub(crate) async fn wait_until_filled(&self) {
        while self.unfilled.load(Ordering::Acquire) > 0 {
            let filled = self.filled.notified();
            let _ = tokio::time::timeout(Duration::from_millis(200), filled).await;
        }
    }

    fn cluster<K>(&self, tasks: &mut JoinSet<()>, client: &Client)
    where
        K: Cached + Resource<Scope = ClusterResourceScope>,
    {
        self.watch::<K>(tasks, Api::all(client.clone()), None, Config::default());
    }

    fn namespaced<K>(
        &self,
        tasks: &mut JoinSet<()>,
        client: &Client,
        namespaces: &[String],
        labels: &str,
    ) where
        K: Cached + Resource<Scope = NamespaceResourceScope>,
    {
        let which = match labels {
            "" => Config::default(),
            labels => Config::default().labels(labels),
        };
        if namespaces.is_empty() {
            return self.watch::<K>(tasks, Api::all(client.clone()), None, which);
        }
        for namespace in namespaces {
            let api = Api::namespaced(client.clone(), namespace);
            self.watch::<K>(tasks, api, Some(namespace.clone()), which.clone());
        }
    }

    fn watch<K: Cached>(
        &self,
        tasks: &mut JoinSet<()>,
        api: Api<K>,
        namespace: Option<String>,
        which: Config,
    ) {
        let config = which.timeout(WATCH_SECONDS).page_size(PAGE);
        self.unfilled.fetch_add(1, Ordering::AcqRel);
        let watches = self.clone();
        tasks.spawn(async move {
            let mut listener = Listener::new(watches, namespace);
            let mut events = watcher(api, config).backoff(Patience::default()).boxed();
            while let Some(event) = events.next().await {
                listener.hear(event);
            }
        });
    }
}

/// The event handler of one watch.
struct Listener {
    watches: Watches,
    namespace: Option<String>,
    /// Keys in the list that is being read.
    seen: HashSet<Key>,
    is_filled: bool,
    /// The last problem, so that it is logged once.
    trouble: Option<String>,
}

impl Listener {
    fn new(watches: Watches, namespace: Option<String>) -> Self {
        Self {
            watches,
            namespace,
            seen: HashSet::new(),
            is_filled: false,
            trouble: None,
        }
    }

    fn hear<K: Cached>(&mut self, event: Result<Event<K>, watcher::Error>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => return self.complain::<K>(&error),
        };
        if self.trouble.take().is_some() {
            tracing::info!("{}s are watched again", K::kind(&()));
        }
        match event {
            Event::Init => self.seen.clear(),
            Event::InitApply(object) => {
                self.seen.insert(Identity::of(object.meta()).key);
                self.take(object);
            }
            Event::InitDone => {
                self.forget_unseen::<K>();
                self.watches.notifier.change(K::listed);
                self.fill();
            }
            Event::Apply(object) => self.take(object),
            Event::Delete(object) => {
                let identity = Identity::of(object.meta());
                self.secret_changed::<K>(&object);
                let (key, uid) = (identity.key, identity.uid);
                let notifier = &self.watches.notifier;
                notifier.change(|state| K::forget(state, &key, &uid));
            }
        }
    }

    fn fill(&mut self) {
        if !std::mem::replace(&mut self.is_filled, true) {
            self.watches.unfilled.fetch_sub(1, Ordering::AcqRel);
            self.watches.filled.notify_waiters();
        }
    }

    /// Removes objects that a complete list did not include: they are gone, and their deletion was missed.
    fn forget_unseen<K: Cached>(&mut self) {
        let seen = std::mem::take(&mut self.seen);
        let is_listed = |key: &Key| match &self.namespace {
            Some(namespace) => **namespace == *key.namespace,
            None => true,
        };
        self.watches.notifier.change(|state| {
            let mut touched = Touched::default();
            for key in K::keys(state) {
                if is_listed(&key) && !seen.contains(&key) {
                    touched.merge(K::forget(state, &key, ""));
                }
            }
            touched
        });
    }

    fn take<K: Cached>(&self, object: K) {
        let copy = (K::kind(&()) == "Secret").then(|| object.clone());
        let mut is_news = false;
        self.watches.notifier.change(|state| {
            let touched = object.put(state);
            is_news = touched != Touched::default();
            touched
        });
        if let Some(secret) = copy.filter(|_| is_news) {
            self.secret_changed::<K>(&secret);
        }
    }

    /// Notifies the listener of a Secret that changed: someone may have tampered with it.
    fn secret_changed<K: Cached>(&self, object: &K) {
        if K::kind(&()) != "Secret" {
            return;
        }
        let labels = object.meta().labels.as_ref();
        let deployment = labels.and_then(|labels| labels.get(LABEL_DEPLOYMENT));
        if let (Some(deployment), Some(namespace)) = (deployment, &object.meta().namespace) {
            (self.watches.secret_changed)(namespace, deployment);
        }
    }

    fn complain<K: Cached>(&mut self, error: &watcher::Error) {
        let kind = K::kind(&());
        let words = match cause(error) {
            Some(Failure::NotFound(_)) if K::group(&()) == hearth_crds::GROUP => {
                if !K::IS_NEEDED {
                    self.fill();
                }
                format!(
                    "the cluster does not know {kind}s\n  install them: hearth crd | kubectl apply -f -"
                )
            }
            Some(Failure::Forbidden(why)) => {
                self.watches.notifier.change(K::refused);
                if !K::IS_NEEDED {
                    self.fill();
                }
                format!("{kind}s may not be watched: {why}\n  grant it, as the chart does")
            }
            // Watches end regularly: a new list or watch follows.
            _ if is_usual(error) => return tracing::debug!("{kind}s: {}", chain(error)),
            Some(other) => format!("{kind}s are not watched for now: {other}"),
            None => format!("{kind}s are not watched for now: {}", chain(error)),
        };
        if self.trouble.as_ref() != Some(&words) {
            tracing::warn!("{words}");
            self.trouble = Some(words);
        }
    }
}

/// Whether InferenceDeployments of all namespaces can be listed.
async fn may_list_everywhere(client: &Client) -> bool {
    let api: Api<LeanDeployment> = Api::all(client.clone());
    let mut wait = Patience::default();
    loop {
        let parameters = kube::api::ListParams::default().limit(1);
        match api.list(&parameters).await.map_err(Failure::from) {
            Ok(_) => return true,
            Err(Failure::Forbidden(_)) => {
                tracing::info!(
                    "InferenceDeployments of other namespaces may not be seen: those that are not served cannot say so"
                );
                return false;
            }
            Err(failure) => {
                tracing::warn!("InferenceDeployments cannot be listed: {failure}");
                tokio::time::sleep(wait.next().unwrap_or(Duration::from_secs(10))).await;
            }
        }
    }
}

/// Whether the cluster has dynamic resource allocation.
async fn serves_devices(client: &Client) -> bool {
    let mut wait = Patience::default();
    loop {
        match client
            .list_api_group_resources(DEVICE_VERSION)
            .await
            .map_err(Failure::from)
        {
            Ok(_) => return true,
            Err(Failure::NotFound(_) | Failure::Forbidden(_)) => return false,
            Err(failure) => {
                tracing::warn!("it cannot be told whether {DEVICE_VERSION} is served: {failure}");
                tokio::time::sleep(wait.next().unwrap_or(Duration::from_secs(10))).await;
            }
        }
    }
}

fn cause(error: &watcher::Error) -> Option<Failure> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Some(Failure::from(error)),
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => None,
    }
}

fn is_usual(error: &watcher::Error) -> bool {
    matches!(
        error,
        watcher::Error::WatchError(_) | watcher::Error::WatchFailed(_)
    )
}

/// Backoff between attempts to watch: from 0.2 s to 10 s, with jitter so that not all watches retry at once.
#[derive(Debug, Default)]
struct Patience {
    failures: u32,
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = Duration::from_millis(200).saturating_mul(1 << self.failures.min(6));
        self.failures += 1;
        let wait = wait.min(Duration::from_secs(10));
        Some(wait.mul_f64(0.5 + rand::random::<f64>() / 2.0))
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

impl Cached for LeanDeployment {
    fn put(self, state: &mut State) -> Touched {
        let identity = Identity::of(&self.metadata);
        state.put_deployment(identity, self.into_read())
    }

    fn forget(state: &mut State, key: &Key, uid: &str) -> Touched {
        state.remove_deployment(key, uid)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.deployments.keys().cloned().collect()
    }
}

impl Cached for LeanPlan {
    fn put(self, state: &mut State) -> Touched {
        let identity = Identity::of(&self.metadata);
        state.put_plan(identity, self.plan.as_ref())
    }

    fn forget(state: &mut State, key: &Key, uid: &str) -> Touched {
        state.remove_plan(key, uid)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.plans.keys().cloned().collect()
    }
}

impl Cached for LeanScaler {
    /// The current replica numbers stay in force without it.
    const IS_NEEDED: bool = false;

    fn put(self, state: &mut State) -> Touched {
        let identity = Identity::of(&self.metadata);
        match self.scaler {
            Ok(scaler) => state.put_scaler(identity, scaler),
            Err(reason) => {
                tracing::warn!(scaler = %identity.key, reason, "an InferencePoolScaler cannot be read");
                state.remove_scaler(&identity.key, "")
            }
        }
    }

    fn forget(state: &mut State, key: &Key, uid: &str) -> Touched {
        state.remove_scaler(key, uid)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.scalers.keys().cloned().collect()
    }
}

impl Cached for LeanPod {
    fn put(self, state: &mut State) -> Touched {
        let identity = Identity::of(&self.metadata);
        state.put_pod(identity, self.into_view())
    }

    fn forget(state: &mut State, key: &Key, uid: &str) -> Touched {
        state.remove_pod(key, uid)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.pods.keys().cloned().collect()
    }
}

impl Cached for AnyPod {
    const IS_NEEDED: bool = false;

    fn put(self, state: &mut State) -> Touched {
        let charge = self.charge(|namespace| state.is_served(namespace));
        state.put_charge(&self.key(), charge)
    }

    fn forget(state: &mut State, key: &Key, _uid: &str) -> Touched {
        state.put_charge(key, None)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.charged()
    }

    fn listed(state: &mut State) -> Touched {
        state.see(Sight::All)
    }

    fn refused(state: &mut State) -> Touched {
        state.see(Sight::Forbidden)
    }
}

impl Cached for LeanSlice {
    const IS_NEEDED: bool = false;

    fn put(self, state: &mut State) -> Touched {
        let key = Identity::of(&self.metadata).key;
        state.put_slice(key, self.offered())
    }

    fn forget(state: &mut State, key: &Key, _uid: &str) -> Touched {
        state.put_slice(key.clone(), None)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.devices().slices()
    }
}

impl Cached for LeanClaim {
    const IS_NEEDED: bool = false;

    fn put(self, state: &mut State) -> Touched {
        let key = Identity::of(&self.metadata).key;
        state.put_claim(key, self.claimed())
    }

    fn forget(state: &mut State, key: &Key, _uid: &str) -> Touched {
        state.put_claim(key.clone(), None)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.devices().claims()
    }
}

impl Cached for AgentPod {
    fn put(self, state: &mut State) -> Touched {
        state.put_agent(Identity::of(&self.metadata).key, self.place());
        Touched::default()
    }

    fn forget(state: &mut State, key: &Key, _uid: &str) -> Touched {
        state.put_agent(key.clone(), None);
        Touched::default()
    }

    fn keys(state: &State) -> Vec<Key> {
        state.agent_keys()
    }
}

impl Cached for LeanNode {
    fn put(self, state: &mut State) -> Touched {
        let uid = self.metadata.uid.clone().unwrap_or_default();
        state.put_node(&uid, self.into_view())
    }

    fn forget(state: &mut State, key: &Key, _uid: &str) -> Touched {
        state.remove_node(&key.name)
    }

    fn keys(state: &State) -> Vec<Key> {
        state.nodes.keys().map(|name| Key::new("", name)).collect()
    }
}

impl Cached for LeanProfile {
    fn put(self, state: &mut State) -> Touched {
        let name = self.metadata.name.unwrap_or_default();
        if let Err(reason) = &self.status {
            tracing::warn!(name, reason, "a NodeProfile cannot be read");
        }
        state.note_profile_in_spec(&name, self.is_in_spec);
        state.put_profile(&name, self.status.ok().flatten())
    }

    fn forget(state: &mut State, key: &Key, _uid: &str) -> Touched {
        state.note_profile_in_spec(&key.name, false);
        state.put_profile(&key.name, None)
    }

    fn keys(state: &State) -> Vec<Key> {
        let names = state.profiled();
        names.iter().map(|name| Key::new("", name)).collect()
    }
}

impl<K: ObjectKind> Cached for LeanObject<K> {
    fn put(self, state: &mut State) -> Touched {
        let identity = Identity::of(&self.metadata);
        state.put_object(K::KIND, identity, self.facts)
    }

    fn forget(state: &mut State, key: &Key, uid: &str) -> Touched {
        state.remove_object(K::KIND, key, uid)
    }

    fn keys(state: &State) -> Vec<Key> {
        let table = state.objects.get(K::KIND);
        let keys = table
            .into_iter()
            .flat_map(crate::cluster::table::Table::keys);
        keys.cloned().collect()
    }
}
