//! The operator's side of the agents on the nodes: it reads their measurements and writes them as NodeProfiles, has
//! them measure their links to each other ([`links`]), has them fetch models behind URLs and of a hub, or from each other
//! ([`seeds`]), and has them drop those that are no longer used. Agents have no permissions in the
//! cluster, so the operator calls them, by gRPC over mutual TLS. Each proves its Pod's identity by a token
//! ([`identity`]) and presents a certificate of its own node, which the operator issues in return ([`calls`]); a
//! Secret that opens one is read for the one call that needs it ([`secrets`]).
//!
//! NodeProfiles are owned by their Nodes: the cluster removes them when a node leaves.

mod calls;
mod fetches;
mod identity;
mod link_turns;
mod links;
mod profile;
pub(crate) mod ranges;
mod secrets;
mod seeds;
mod spare;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use calls::Certified;
use calls::{no_source, refused};
use fetches::{Answer, Fetches, Poll, SILENCE, answer_of};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use hearth_controller_core::key::Key;
use hearth_controller_core::names::{FIELD_MANAGER, LINK_PORT, WORKER_PORT, host_port};
use hearth_controller_core::observed::{AgentEndpoint, FetchView, Settings};
use hearth_crds::{API_VERSION, HttpFile, ModelSource, NodeProfile, NodeProfileStatus};
use hearth_transport::Endpoint;
use hearth_transport::v1::{
    self, Credentials, HubRepository, ModelRequest, ModelState, ProfileRequest, RetainRequest,
};
use ipnet::IpNet;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use links::Links;
use profile::{due_profile, profile_object};
use serde_json::json;
use spare::Spares;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::services::authority::Authority;
use crate::telemetry::cluster::Fetch;

use secrets::{HUB_SECRET, SecretField, URL_SECRET};

/// Interval at which a node's profile is read.
const PROFILE_EVERY: Duration = Duration::from_secs(60);
/// Interval at which it is read as long as the node has not been measured.
const FIRST_PROFILE_EVERY: Duration = Duration::from_secs(2);
/// Interval at which due fetches are polled.
const FETCH_EVERY: Duration = Duration::from_secs(2);
/// Interval at which the API server is asked for the Service ranges.
const SERVICES_EVERY: Duration = Duration::from_secs(30);
/// Time limit of a call: an agent answers immediately and does long work in the background.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of nodes that are called at the same time.
const CONCURRENCY: usize = 16;
/// Failures after which a node without a profile is asked half as often.
const FAILURES_BEFORE_DOUBLING: u32 = 8;

/// The agents' view of the operator's cache.
pub(crate) trait AgentDirectory: Send + Sync + 'static {
    /// Running agents.
    fn agents(&self) -> Vec<AgentEndpoint>;
    /// The uid of the node; `None` if there is no such node.
    fn node_uid(&self, node: &str) -> Option<String>;
    /// The node's profile in the cluster.
    fn profile(&self, node: &str) -> Option<NodeProfileStatus>;
    /// Whether that profile is stored where an earlier version wrote it, in the spec.
    fn is_profile_in_spec(&self, node: &str) -> bool;
    /// Memory requested by Hearth's Pods on the node.
    fn held_bytes(&self, node: &str) -> u64;
    /// Names in the nodes' stores of the fetched models that deployments and plans refer to; `None` until all of
    /// them have been read.
    fn models_in_use(&self) -> Option<BTreeSet<String>>;
    /// Pod address ranges of all nodes, and the nodes' own addresses.
    fn node_ranges(&self) -> Vec<IpNet>;
    /// Records how many agents have addresses outside of the known ranges.
    fn note_outside(&self, agents: usize);
    /// Queues a deployment, since something that it waits for has changed.
    fn wake(&self, deployment: &Key);
}

/// Clients of all agents. One task runs [`Agents::run`]; others share it to request and read fetches.
pub(crate) struct Agents<G> {
    client: Client,
    /// Namespace of the agents' Pods.
    namespace: String,
    authority: Arc<Authority>,
    directory: Arc<G>,
    /// Port that agents listen on.
    port: u16,
    /// Port on which they await the measurement of a link.
    link_port: u16,
    call_timeout: Duration,
    /// Time from the start for which agents are waited for that have told nothing of a model yet.
    first_words: Duration,
    slots: Semaphore,
    fetches: Mutex<Fetches>,
    links: Links,
    spares: Spares,
    /// Agents that were issued a certificate, by node.
    certified: Mutex<BTreeMap<String, Certified>>,
    /// The cluster's address ranges that do not depend on its nodes.
    ranges: Vec<IpNet>,
    /// Address of the hub that repositories are fetched from.
    hub_endpoint: String,
    /// Service ranges that the API server last reported.
    services: Mutex<Vec<IpNet>>,
}

/// A running agent.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Agent {
    place: AgentEndpoint,
    endpoint: Endpoint,
}

impl Agent {
    fn node(&self) -> &str {
        &self.place.node
    }
}

impl<G: AgentDirectory> Agents<G> {
    /// Creates the clients without calling any agent.
    pub(crate) fn new(
        client: Client,
        authority: Arc<Authority>,
        directory: Arc<G>,
        settings: &Settings,
    ) -> Self {
        Self {
            client,
            namespace: settings.operator_namespace.clone(),
            authority,
            directory,
            port: WORKER_PORT,
            link_port: LINK_PORT,
            call_timeout: CALL_TIMEOUT,
            first_words: SILENCE,
            slots: Semaphore::new(CONCURRENCY),
            fetches: Mutex::default(),
            links: Links::default(),
            spares: Spares::default(),
            certified: Mutex::default(),
            ranges: settings.cluster_ranges.clone(),
            hub_endpoint: settings.hub_endpoint.clone(),
            services: Mutex::default(),
        }
    }

    /// Maintains all agents until it is dropped.
    pub(crate) async fn run(&self) {
        // Before the first model is requested.
        self.read_services().await;
        let until = Instant::now() + self.first_words;
        self.lock().wait_for_first_words(until);
        tokio::join!(
            self.keep_profiles(),
            self.keep_links(),
            self.keep_models(),
            self.keep_services()
        );
    }

    /// Rereads the Service ranges regularly: they may be added to a running cluster, and a request to the API server
    /// may fail.
    async fn keep_services(&self) {
        loop {
            tokio::time::sleep(SERVICES_EVERY).await;
            self.read_services().await;
        }
    }

    async fn read_services(&self) {
        if let Some(told) = ranges::of_services(&self.client).await {
            *self.services.lock().unwrap_or_else(PoisonError::into_inner) = told;
        }
    }

    /// Progress of a model on the nodes where it is wanted. `key` is its name in the nodes' stores.
    pub(crate) fn fetches(&self, key: &str) -> BTreeMap<String, FetchView> {
        self.lock().views(key)
    }

    /// Progress of all models that deployments want.
    pub(crate) fn all_fetches(&self) -> Vec<Fetch> {
        self.lock().all()
    }

    /// The commit of a model of a hub that nodes have; `None` for other models, and while none is known.
    pub(crate) fn commit(&self, key: &str) -> Option<String> {
        self.lock().commit(key).map(str::to_owned)
    }

    /// Has the agents of `nodes` keep the model for a deployment, at the commit that its plans record. With a source that is not fetched
    /// it wants none.
    pub(crate) fn want(
        &self,
        deployment: &Key,
        source: &ModelSource,
        nodes: &[String],
        commit: Option<&str>,
    ) {
        self.lock().want(deployment, source, nodes, commit);
    }

    async fn keep_profiles(&self) {
        let mut asked: BTreeMap<String, Asked> = BTreeMap::new();
        let mut complaints = Complaints::default();
        let (mut outside, mut looked) = (BTreeSet::new(), None);
        let mut ticks = tokio::time::interval(FIRST_PROFILE_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut running = FuturesUnordered::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Some(heard) = running.next() => {
                    let (node, outcome): (String, Result<(), String>) = heard;
                    if let Some(asked) = asked.get_mut(&node) {
                        asked.heard(&outcome);
                    }
                    complaints.hear(&node, outcome);
                    continue;
                }
            }
            let agents = self.agents();
            let has_agent = |node: &str| agents.iter().any(|agent| agent.node() == node);
            asked.retain(|node, _| has_agent(node));
            self.spares.retain(has_agent);
            let now = Instant::now();
            if looked.is_none_or(|at| now.duration_since(at) >= PROFILE_EVERY) {
                looked = Some(now);
                self.look_outside(&agents, &mut outside);
            }
            for agent in agents {
                let is_known = self.directory.profile(agent.node()).is_some();
                let asked = asked.entry(agent.node().to_owned()).or_default();
                if asked.is_due(is_known, now) {
                    asked.begin(now);
                    running.push(self.ask_profile(agent));
                }
            }
        }
    }

    async fn ask_profile(&self, agent: Agent) -> (String, Result<(), String>) {
        let _slot = self.slots.acquire().await;
        let outcome = self.refresh_profile(&agent).await;
        if outcome.is_ok() {
            self.retain(&agent).await;
        }
        (agent.place.node, outcome)
    }

    /// Polls each node's models one after the other, and the nodes side by side: one that hangs delays no other.
    async fn keep_models(&self) {
        let mut ticks = tokio::time::interval(FETCH_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut busy = BTreeSet::new();
        let mut running = FuturesUnordered::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                Some(heard) = running.next() => {
                    let node: String = heard;
                    busy.remove(&node);
                    continue;
                }
            }
            let mut polls: BTreeMap<String, Vec<Poll>> = BTreeMap::new();
            for poll in self.lock().due(Instant::now()) {
                polls.entry(poll.node.clone()).or_default().push(poll);
            }
            let agents = self.agents();
            for (node, polls) in polls {
                if busy.insert(node.clone()) {
                    let agent = agents.iter().find(|agent| agent.node() == node);
                    running.push(self.ask_models(node, agent.cloned(), polls));
                }
            }
        }
    }

    async fn ask_models(&self, node: String, agent: Option<Agent>, polls: Vec<Poll>) -> String {
        let _slot = self.slots.acquire().await;
        for poll in polls {
            let answer = match &agent {
                Some(agent) => self.ask_model(agent, &poll).await,
                None => Err(format!("node {node} has no running agent")),
            };
            let now = Instant::now();
            let woken = match answer {
                Ok(answer) => self.lock().learn(&poll, answer, now),
                Err(why) => self.lock().silent(&poll, why, now),
            };
            woken
                .iter()
                .for_each(|deployment| self.directory.wake(deployment));
        }
        node
    }

    /// Warns of agents outside of the known ranges: agents are Pods, so fetches from other Pods would not be blocked
    /// there.
    fn look_outside(&self, agents: &[Agent], before: &mut BTreeSet<String>) {
        let ranges = self.known_ranges();
        let is_outside = |address: &str| {
            let address: Option<IpAddr> = address.parse().ok();
            address.is_some_and(|address| !ranges.iter().any(|range| range.contains(&address)))
        };
        let addresses = agents.iter().map(|agent| &agent.place.address);
        let now: BTreeSet<String> = addresses
            .filter(|address| is_outside(address))
            .cloned()
            .collect();
        self.directory.note_outside(now.len());
        if let Some(address) = now.difference(before).next() {
            tracing::warn!(
                address,
                agents = now.len(),
                "Pods have addresses outside of the cluster's ranges that are known: models can be fetched from Pods; name the Pods' range in agent.fetch.clusterRanges"
            );
        }
        *before = now;
    }

    /// Reads the agent's measurements and writes them if they differ enough.
    async fn refresh_profile(&self, agent: &Agent) -> Result<(), String> {
        let Some(uid) = self.directory.node_uid(agent.node()) else {
            return Ok(());
        };
        let answer = self
            .call(agent, |mut stub| async move {
                stub.profile(ProfileRequest {}).await
            })
            .await?;
        let mut measured: NodeProfileStatus = serde_json::from_str(&answer.node_profile_json)
            .map_err(|error| {
                format!("its profile cannot be read ({error}); is it of another version?")
            })?;
        if measured.node != agent.node() {
            return Err(format!("it says that it is on node {:?}", measured.node));
        }
        let stored = self.directory.profile(agent.node());
        // Links are known here alone.
        measured.links = self.links_of(agent.node(), stored.as_ref());
        let held = self.directory.held_bytes(agent.node());
        self.spares
            .hear(&mut measured, stored.as_ref(), held, Instant::now());
        let due = due_profile(stored.as_ref(), measured, held);
        // A profile of an earlier version is moved unchanged, so that nothing is replanned for it.
        let moved = stored.filter(|_| self.directory.is_profile_in_spec(agent.node()));
        let Some(status) = due.or(moved) else {
            return Ok(());
        };
        let api: Api<NodeProfile> = Api::all(self.client.clone());
        self.write_profile(&api, status, uid)
            .await
            .map_err(|error| error.to_string())
    }

    /// Creates the object if it does not exist, and removes an earlier version's measurements from its spec once they
    /// are in its status, so that the node always has a profile.
    async fn write_profile(
        &self,
        api: &Api<NodeProfile>,
        status: NodeProfileStatus,
        node_uid: String,
    ) -> Result<(), kube::Error> {
        let node = status.node.clone();
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let object = profile_object(&node, node_uid);
        let is_there = self.directory.profile(&node).is_some();
        if !is_there {
            api.patch(&node, &parameters, &Patch::Apply(&object))
                .await?;
        }
        let status = json!({
            "apiVersion": API_VERSION, "kind": "NodeProfile", "status": status,
        });
        api.patch_status(&node, &parameters, &Patch::Apply(&status))
            .await?;
        if is_there {
            api.patch(&node, &parameters, &Patch::Apply(&object))
                .await?;
        }
        Ok(())
    }

    /// Has the agent drop models that nothing refers to.
    async fn retain(&self, agent: &Agent) {
        let Some(mut keys) = self.directory.models_in_use() else {
            return;
        };
        keys.extend(self.lock().keys());
        let request = RetainRequest {
            keys: keys.into_iter().collect(),
        };
        let called = self.call(agent, |mut stub| {
            let request = request.clone();
            async move { stub.retain(request).await }
        });
        match called.await {
            Ok(answer) => {
                for key in answer.removed {
                    tracing::info!(
                        node = agent.node(),
                        key,
                        "model removed from the node's cache"
                    );
                }
            }
            Err(error) => tracing::debug!(node = agent.node(), error, "cache not tidied"),
        }
    }

    /// Returns the running agents.
    fn agents(&self) -> Vec<Agent> {
        let agent = |place: AgentEndpoint| {
            let endpoint = host_port(&place.address, self.port).parse().ok()?;
            Some(Agent { place, endpoint })
        };
        self.directory
            .agents()
            .into_iter()
            .filter_map(agent)
            .collect()
    }

    /// Ranges from which no model is fetched, unless an agent is configured otherwise.
    fn cluster_ranges(&self) -> Vec<String> {
        self.known_ranges().iter().map(IpNet::to_string).collect()
    }

    fn known_ranges(&self) -> BTreeSet<IpNet> {
        let services = self.services.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.ranges.iter().chain(&*services).copied();
        known.chain(self.directory.node_ranges()).collect()
    }

    /// # Errors
    /// Why nothing came from the agent.
    async fn ask_model(&self, agent: &Agent, poll: &Poll) -> Result<Answer, String> {
        let mut request = match self.request(poll).await {
            Ok(request) => request,
            Err(why) => return Ok(FetchView::Failed(why).into()),
        };
        request.seed = self.seed_for(agent, poll).await;
        let kind = match (&request.hub, &*request.files) {
            (Some(_), _) => Some("of a hub"),
            (None, [_, ..]) => Some("as a list of files"),
            (None, []) => None,
        };
        let called = self.call(agent, |mut stub| {
            let request = request.clone();
            async move { stub.model(request).await.or_else(refused) }
        });
        match (called.await, kind) {
            (Ok(answer), Some(kind)) if answer.state() == ModelState::Absent => {
                Ok(FetchView::Unknown(no_source(kind)).into())
            }
            (Ok(answer), _) => Ok(answer_of(answer)),
            (Err(error), _) => Err(format!(
                "the agent of node {} does not answer: {error}",
                agent.node()
            )),
        }
    }

    /// The request for a model, with what opens its source.
    async fn request(&self, poll: &Poll) -> Result<ModelRequest, String> {
        let mut request = ModelRequest {
            key: poll.key.clone(),
            holder: poll.source.holder(&poll.namespace),
            cluster_ranges: self.cluster_ranges(),
            ..ModelRequest::default()
        };
        if let Some(http) = &poll.source.http {
            request.url.clone_from(&http.url);
            request.sha256.clone_from(&http.sha256);
            request.files = http.files.iter().map(file).collect();
            if let Some(secret) = &http.secret_ref {
                request.credentials = Some(self.opened_by(poll, &secret.name, URL_SECRET).await?);
            }
        } else if let Some(hub) = &poll.source.hugging_face {
            request.hub = Some(HubRepository {
                endpoint: self.hub_endpoint.clone(),
                repo: hub.repo.clone(),
                revision: hub.revision().to_owned(),
                commit: poll.commit.clone(),
            });
            if let Some(secret) = &hub.token_secret_ref {
                request.credentials = Some(self.opened_by(poll, &secret.name, HUB_SECRET).await?);
            }
        }
        Ok(request)
    }

    async fn opened_by(
        &self,
        poll: &Poll,
        secret: &str,
        field: SecretField,
    ) -> Result<Credentials, String> {
        secrets::credentials(&self.client, &poll.namespace, secret, field).await
    }

    fn lock(&self) -> MutexGuard<'_, Fetches> {
        self.fetches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When an agent was asked for its profile, and with which success.
#[derive(Default)]
struct Asked {
    last: Option<Instant>,
    is_running: bool,
    /// Consecutive failures.
    failures: u32,
}

impl Asked {
    /// A node that was never measured is asked often, but not forever: its profile may be one that the API server rejects.
    fn is_due(&self, is_known: bool, now: Instant) -> bool {
        let every = match is_known {
            true => PROFILE_EVERY,
            false => {
                let patience = self.failures / FAILURES_BEFORE_DOUBLING;
                PROFILE_EVERY.min(FIRST_PROFILE_EVERY * 2_u32.saturating_pow(patience))
            }
        };
        let is_time = |last: Instant| now.duration_since(last) >= every;
        !self.is_running && self.last.is_none_or(is_time)
    }

    fn begin(&mut self, now: Instant) {
        (self.last, self.is_running) = (Some(now), true);
    }

    fn heard(&mut self, outcome: &Result<(), String>) {
        self.is_running = false;
        self.failures = match outcome {
            Ok(()) => 0,
            Err(_) => self.failures.saturating_add(1),
        };
    }
}

/// Problems with nodes' agents, logged once and not on every call.
#[derive(Default)]
struct Complaints(BTreeMap<String, String>);

impl Complaints {
    fn hear(&mut self, node: &str, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => {
                if self.0.remove(node).is_some() {
                    tracing::info!(node, "the node's agent answers again");
                }
            }
            Err(why) => {
                if self.0.get(node) != Some(&why) {
                    tracing::warn!(node, %why, "the node's agent gives no profile");
                    self.0.insert(node.to_owned(), why);
                }
            }
        }
    }
}

/// A file as an agent is asked for it.
fn file(file: &HttpFile) -> v1::HttpFile {
    v1::HttpFile {
        url: file.url.clone(),
        sha256: file.sha256.clone(),
        path: file.path().to_owned(),
    }
}

#[cfg(test)]
mod played;
#[cfg(test)]
mod tests;
