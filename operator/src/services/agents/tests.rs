//! The operator's side against a fake agent, over mutual TLS with the authority's own certificates,
//! and with a fake API server.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::{self, State};
use axum::{middleware, response};
use bytes::Bytes;
use hearth_crds::{HttpSource, NodeModel, SecretRef};
use hearth_transport::tonic::service::Routes;
use hearth_transport::v1::agent_server::AgentServer;
use hearth_transport::v1::{ModelResponse, ModelState};
use hearth_transport::{ClientOptions, Clients, Listener, ServerOptions, Tls, TlsNames, serve};
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use jiff::Timestamp;
use rcgen::KeyPair;
use serde_json::json;
use tokio::task::JoinHandle;

use super::played::{Played, Service};
use super::*;
use crate::services::authority::AGENT_SECRET;
use crate::services::authority::fake::{FakeApi, settings};

mod hub;
mod limits;
mod links;
mod seeds;

fn fetched(http: &HttpSource) -> ModelSource {
    ModelSource {
        http: Some(http.clone()),
        ..ModelSource::default()
    }
}

/// Token of the Pod `uid-a` on node `a`.
pub(super) const TOKEN: &str = "of a";

/// A cluster with one node `a`, at first.
#[derive(Default)]
struct Paper {
    api: FakeApi,
    woken: Mutex<Vec<Key>>,
    in_use: Mutex<Option<BTreeSet<String>>>,
    outside: Mutex<Option<usize>>,
    /// Agents of further nodes.
    more: Mutex<Vec<AgentEndpoint>>,
}

impl AgentDirectory for Paper {
    fn agents(&self) -> Vec<AgentEndpoint> {
        let more = self.more.lock().expect("more").clone();
        [vec![place("a", "uid-a")], more].concat()
    }
    fn node_uid(&self, node: &str) -> Option<String> {
        let agents = self.agents().into_iter();
        let mut nodes = agents.map(|agent| agent.node);
        nodes.any(|it| it == node).then(|| format!("uid-{node}"))
    }
    fn is_profile_in_spec(&self, node: &str) -> bool {
        let path = format!("/apis/hearth.dev/v1alpha1/nodeprofiles/{node}");
        let profile = self.api.object(&path);
        profile.is_some_and(|profile| profile.get("status").is_none())
    }
    fn profile(&self, node: &str) -> Option<NodeProfileStatus> {
        let profile = self
            .api
            .object(&format!("/apis/hearth.dev/v1alpha1/nodeprofiles/{node}"))?;
        serde_json::from_value(profile["status"].clone()).ok()
    }
    fn held_bytes(&self, _: &str) -> u64 {
        100
    }
    fn models_in_use(&self) -> Option<BTreeSet<String>> {
        self.in_use.lock().expect("in use").clone()
    }
    fn node_ranges(&self) -> Vec<IpNet> {
        ["10.42.0.0/24", "192.168.7.1/32"]
            .map(|text| text.parse().expect("range"))
            .to_vec()
    }
    fn note_outside(&self, agents: usize) {
        *self.outside.lock().expect("outside") = Some(agents);
    }
    fn wake(&self, deployment: &Key) {
        self.woken.lock().expect("woken").push(deployment.clone());
    }
}

fn place(node: &str, pod_uid: &str) -> AgentEndpoint {
    AgentEndpoint {
        node: node.to_owned(),
        address: "127.0.0.1".to_owned(),
        pod_uid: pod_uid.to_owned(),
    }
}

/// The API server's review of the token of an agent's Pod.
fn reviewed(node: &str, pod_uid: &str) -> serde_json::Value {
    json!({
        "authenticated": true, "audiences": ["hearth-operator"],
        "user": {
            "username": "system:serviceaccount:hearth-system:hearth-agent",
            "extra": {
                "authentication.kubernetes.io/pod-uid": [pod_uid],
                "authentication.kubernetes.io/node-name": [node],
            },
        },
    })
}

struct Fixture {
    directory: Arc<Paper>,
    played: Arc<Played>,
    agents: Arc<Agents<Paper>>,
    running: JoinHandle<()>,
}

impl Fixture {
    /// Serves the agent with the certificate that the authority issued for agents, and starts the operator.
    async fn start() -> Self {
        Self::with(TOKEN).await
    }

    /// Like `start`, but the agent has another token.
    async fn with(token: &str) -> Self {
        let directory = Arc::new(Paper::default());
        let client = directory.api.client();
        let authority = Arc::new(Authority::new(client.clone(), Arc::new(settings()), None));
        authority.keep(Timestamp::now()).await.expect("authority");
        directory.api.knows_token(TOKEN, reviewed("a", "uid-a"));
        directory.api.knows_token("of b", reviewed("b", "uid-b"));
        let played = Arc::new(Played::default());
        *played.token.lock().expect("token") = token.to_owned();
        let address = serve_agent(&directory.api, played.clone(), "127.0.0.1:0");
        let mut agents = Agents::new(client, authority, directory.clone(), &ranged());
        (agents.port, agents.first_words) = (address.port(), Duration::ZERO);
        let agents = Arc::new(agents);
        Self {
            running: run(&agents),
            directory,
            played,
            agents,
        }
    }

    /// Starts the operator anew, with another time limit for calls, and for agents that have told nothing yet.
    fn restart(&mut self, call_timeout: Duration, first_words: Duration) {
        self.running.abort();
        let authority = Arc::clone(&self.agents.authority);
        let client = self.directory.api.client();
        let mut agents = Agents::new(client, authority, self.directory.clone(), &ranged());
        (agents.port, agents.call_timeout) = (self.agents.port, call_timeout);
        agents.first_words = first_words;
        self.agents = Arc::new(agents);
        self.running = run(&self.agents);
    }
}

fn run(agents: &Arc<Agents<Paper>>) -> JoinHandle<()> {
    let agents = Arc::clone(agents);
    tokio::spawn(async move { agents.run().await })
}

fn ranged() -> Settings {
    Settings {
        cluster_ranges: vec!["10.43.0.0/16".parse().expect("range")],
        ..settings()
    }
}

fn serve_agent(api: &FakeApi, played: Arc<Played>, address: &str) -> SocketAddr {
    let path = format!("/api/v1/namespaces/hearth-system/secrets/{AGENT_SECRET}");
    let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| api.secret_text(&path, name));
    let tls = Tls::from_pem(&cert, &key, &ca, &TlsNames::for_operator()).expect("TLS");
    *played.tls.lock().expect("tls") = Some(tls.clone());
    let listener = Listener::bind(address).expect("port");
    let address = listener.address();
    tokio::spawn(async move {
        let options = ServerOptions {
            tls: Some(tls),
            ..ServerOptions::default()
        };
        let routes = Routes::new(AgentServer::new(Service(Arc::clone(&played))));
        let stuck = middleware::from_fn_with_state(played, stuck);
        let routes = Routes::from(routes.into_axum_router().layer(stuck));
        serve(listener, routes, &options, std::future::pending()).await
    });
    address
}

/// Begins answers to `Model` and does not end them while the agent is stuck.
async fn stuck(
    State(played): State<Arc<Played>>,
    request: extract::Request,
    next: middleware::Next,
) -> response::Response {
    if !played.is_stuck.load(Ordering::Relaxed) || !request.uri().path().ends_with("/Model") {
        return next.run(request).await;
    }
    let never = futures::stream::pending::<Result<Bytes, Infallible>>();
    let mut response = response::Response::new(Body::from_stream(never));
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..500 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not within 25 s: {what}");
}

#[tokio::test]
async fn a_measured_node_gets_its_profile_once() {
    let fixture = Fixture::start().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(
        fixture.directory.profile("a"),
        None,
        "the agent is measuring"
    );
    *fixture.played.held.lock().expect("held") = ["c/d@main", "a/b@main"]
        .map(|source| NodeModel {
            source: source.to_owned(),
            ..NodeModel::default()
        })
        .to_vec();
    *fixture.played.node.lock().expect("node") = "a".to_owned();
    until("a profile", || fixture.directory.profile("a")).await;
    let path = "/apis/hearth.dev/v1alpha1/nodeprofiles/a";
    let object = fixture.directory.api.object(path).expect("profile");
    assert_eq!(
        object["metadata"]["ownerReferences"],
        json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "uid-a"}])
    );
    assert_eq!(
        object["status"]["memory"]["availableBytes"], 800,
        "700 and the 100 that our Pods ask for"
    );
    assert_eq!(
        object["status"]["memory"]["leastAvailableBytes"], 400,
        "300 and those that our Pods ask for"
    );
    assert_eq!(object["status"]["models"][0]["source"], "a/b@main");
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let writes = fixture.directory.api.writes();
    assert_eq!(
        writes
            .iter()
            .filter(|write| write.contains("nodeprofiles"))
            .count(),
        2,
        "the object and its status: {writes:?}"
    );
}

#[tokio::test]
async fn an_agent_of_another_node_is_not_believed() {
    let fixture = Fixture::start().await;
    *fixture.played.node.lock().expect("node") = "b".to_owned();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(
        fixture
            .directory
            .api
            .writes()
            .iter()
            .all(|write| !write.contains("nodeprofiles"))
    );
}

#[tokio::test]
async fn a_fetch_is_started_followed_and_told() {
    let fixture = Fixture::start().await;
    let fetching = |bytes| ModelResponse {
        state: ModelState::Fetching.into(),
        bytes,
        total_bytes: 1000,
        bytes_per_second: 7,
        ..ModelResponse::default()
    };
    let failed = ModelResponse {
        state: ModelState::Failed.into(),
        message: "the server says 404".to_owned(),
        ..ModelResponse::default()
    };
    *fixture.played.models.lock().expect("models") = vec![fetching(10), fetching(500), failed];
    let source = HttpSource {
        url: "http://nas.lan/m.tar".to_owned(),
        sha256: "a".repeat(64),
        ..HttpSource::default()
    };
    let key = source.store_key("default");
    let demo = Key::new("default", "demo");
    fixture.agents.want(
        &demo,
        &fetched(&source),
        &["a".to_owned(), "gone".to_owned()],
        None,
    );
    let view = |node: &str| fixture.agents.fetches(&key).remove(node);
    until("half", || {
        matches!(view("a"), Some(FetchView::Fetching { bytes: 500, .. })).then_some(())
    })
    .await;
    until("the failure", || {
        matches!(view("a"), Some(FetchView::Failed(why)) if why.contains("404")).then_some(())
    })
    .await;
    assert!(
        matches!(view("gone"), Some(FetchView::Unknown(why)) if why.contains("gone has no running agent"))
    );
    let asked = fixture.played.asked.lock().expect("asked").clone();
    assert_eq!(
        (&*asked[0].key, &*asked[0].url),
        (&*key, "http://nas.lan/m.tar")
    );
    assert_eq!(
        asked[0].cluster_ranges,
        ["10.42.0.0/24", "10.43.0.0/16", "192.168.7.1/32"]
    );
    assert_eq!((&*asked[0].holder, &asked[0].credentials), ("", &None));
    assert!(
        fixture
            .directory
            .woken
            .lock()
            .expect("woken")
            .contains(&demo)
    );
}

#[tokio::test]
async fn the_cluster_s_ranges_are_those_of_now() {
    const PATH: &str = "/apis/networking.k8s.io/v1/servicecidrs";
    let fixture = Fixture::start().await;
    let told = || fixture.agents.cluster_ranges();
    let known = ["10.42.0.0/24", "10.43.0.0/16", "192.168.7.1/32"];
    assert_eq!(told(), known);
    let services = |ranges: &[&str]| {
        let list = json!({"items": [{"spec": {"cidrs": ranges}}]});
        fixture.directory.api.put(PATH, list);
    };
    // The API server did not answer at the start; later a range is added, and removed again.
    services(&["10.96.0.0/16", "10.97.0.0/16"]);
    fixture.agents.read_services().await;
    assert!(told().contains(&"10.97.0.0/16".to_owned()));
    services(&["10.96.0.0/16"]);
    fixture.agents.read_services().await;
    assert!(!told().contains(&"10.97.0.0/16".to_owned()));
    // The last reported ranges remain in force while it reports none.
    fixture.directory.api.remove(PATH);
    fixture.agents.read_services().await;
    assert!(told().contains(&"10.96.0.0/16".to_owned()));

    // The only agent is a Pod at 127.0.0.1: Pods are outside of all of these.
    until("it is noted", || {
        (*fixture.directory.outside.lock().expect("outside") == Some(1)).then_some(())
    })
    .await;
    let mut before = BTreeSet::new();
    let mut agents = fixture.agents.agents();
    fixture.agents.look_outside(&agents, &mut before);
    assert_eq!(before, BTreeSet::from(["127.0.0.1".to_owned()]));
    agents[0].place.address = "10.42.0.7".to_owned();
    fixture.agents.look_outside(&agents, &mut before);
    assert!(before.is_empty());
}

#[tokio::test]
async fn nothing_is_dropped_before_all_is_known() {
    let fixture = Fixture::start().await;
    *fixture.played.node.lock().expect("node") = "a".to_owned();
    until("a profile", || fixture.directory.profile("a")).await;
    assert!(fixture.played.retained.lock().expect("retained").is_empty());

    let fixture = Fixture::start().await;
    *fixture.directory.in_use.lock().expect("in use") = Some(BTreeSet::from(["k1".to_owned()]));
    let source = HttpSource {
        url: "http://nas.lan/m.tar".to_owned(),
        sha256: "b".repeat(64),
        ..HttpSource::default()
    };
    *fixture.played.models.lock().expect("models") = vec![ModelResponse::default()];
    fixture.agents.want(
        &Key::new("default", "demo"),
        &fetched(&source),
        &["a".to_owned()],
        None,
    );
    *fixture.played.node.lock().expect("node") = "a".to_owned();
    let kept = until("a call of Retain with the wish in it", || {
        let retained = fixture.played.retained.lock().expect("retained");
        retained.iter().find(|keys| keys.len() == 2).cloned()
    })
    .await;
    let mut expected = [source.store_key("default"), "k1".to_owned()];
    expected.sort();
    assert_eq!(kept, expected);
}

#[tokio::test]
async fn a_secret_opens_the_url_of_its_own_namespace() {
    let fixture = Fixture::start().await;
    *fixture.played.models.lock().expect("models") = vec![ModelResponse::default()];
    let source = HttpSource {
        url: "http://nas.lan/m.tar".to_owned(),
        sha256: "a".repeat(64),
        secret_ref: Some(SecretRef {
            name: "nas".to_owned(),
        }),
        ..HttpSource::default()
    };
    let (one, two) = (Key::new("one", "demo"), Key::new("two", "demo"));
    let path = "/api/v1/namespaces/one/secrets/nas";
    // "hush" in base64.
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nas"}, "type": "Opaque",
        "data": {"token": "aHVzaA=="},
    });
    fixture.directory.api.put(path, secret);
    for deployment in [&one, &two] {
        fixture
            .agents
            .want(deployment, &fetched(&source), &["a".to_owned()], None);
    }
    let (own, other) = (source.store_key("one"), source.store_key("two"));
    assert_ne!(own, other);
    // The other namespace names the same URL and digest, but has no such Secret.
    until("the refusal", || {
        let view = fixture.agents.fetches(&other).remove("a");
        matches!(view, Some(FetchView::Failed(why)) if why.contains("Secret two/nas")).then_some(())
    })
    .await;
    let asked = until("a call", || {
        fixture.played.asked.lock().expect("asked").first().cloned()
    })
    .await;
    assert_eq!((&*asked.key, &*asked.holder), (&*own, "one/nas"));
    assert_eq!(asked.credentials.expect("credentials").token, "hush");
    let all = fixture.played.asked.lock().expect("asked").clone();
    assert!(all.iter().all(|asked| asked.key == own));
    assert!(
        !fixture
            .directory
            .api
            .writes()
            .iter()
            .any(|write| write.contains("nas"))
    );
}

#[tokio::test]
async fn each_agent_is_given_a_certificate_of_its_node_and_trusted_by_that_alone() {
    let fixture = Fixture::start().await;
    *fixture.played.node.lock().expect("node") = "a".to_owned();
    until("a profile", || fixture.directory.profile("a")).await;
    assert_eq!(*fixture.played.certified.lock().expect("certified"), ["a"]);

    // A new operator finds the agent with its certificate and renews it using that one.
    let [first, second] = [&fixture, &fixture].map(|fixture| {
        let authority = Arc::clone(&fixture.agents.authority);
        let client = fixture.directory.api.client();
        let mut agents = Agents::new(client, authority, fixture.directory.clone(), &settings());
        agents.port = fixture.agents.port;
        agents
    });
    let agent = first.agents().remove(0);
    let profile = |agents: Agents<Paper>, agent: Agent| async move {
        let called = agents.call(&agent, |mut stub| async move {
            stub.profile(ProfileRequest {}).await
        });
        called.await
    };
    assert!(profile(first, agent.clone()).await.is_ok());
    assert_eq!(fixture.played.certified.lock().expect("certified").len(), 2);
    // The holder of node a's certificate is not accepted as node b, wherever it answers.
    let impostor = Agent {
        place: place("b", "uid-b"),
        ..agent.clone()
    };
    let error = profile(second, impostor).await.expect_err("an impostor");
    assert!(error.contains("node.agent.hearth"), "{error}");
    assert_eq!(fixture.played.certified.lock().expect("certified").len(), 2);
}

#[tokio::test]
async fn who_has_the_first_certificate_and_another_node_s_token_gets_nothing() {
    // Everything that a compromised node b has, at the address of node a's agent, which has not been called yet.
    for (token, words) in [("of b", "of another Pod"), ("guessed", "unknown token")] {
        let fixture = Fixture::with(token).await;
        *fixture.played.node.lock().expect("node") = "a".to_owned();
        *fixture.played.models.lock().expect("models") = vec![ModelResponse::default()];
        let agent = fixture.agents.agents().remove(0);
        let called = fixture.agents.call(&agent, |mut stub| async move {
            stub.profile(ProfileRequest {}).await
        });
        let error = called.await.expect_err("an impostor");
        assert!(
            error.contains(words) && !error.contains(token),
            "{token}: {error}"
        );
        tokio::time::sleep(Duration::from_millis(2500)).await;
        assert!(
            fixture
                .played
                .certified
                .lock()
                .expect("certified")
                .is_empty()
        );
        assert_eq!(fixture.directory.profile("a"), None);
        // As soon as it presents the node's own token, it is accepted: nothing is stuck.
        *fixture.played.token.lock().expect("token") = TOKEN.to_owned();
        until("a profile", || fixture.directory.profile("a")).await;
        assert_eq!(*fixture.played.certified.lock().expect("certified"), ["a"]);
    }
}

#[tokio::test]
async fn an_agent_that_begins_anew_is_certified_again_and_calls_nobody() {
    let fixture = Fixture::start().await;
    *fixture.played.node.lock().expect("node") = "a".to_owned();
    until("a profile", || fixture.directory.profile("a")).await;
    // Neither the certificate that all agents start with nor this agent's own is accepted, not even by an agent.
    let path = format!("/api/v1/namespaces/hearth-system/secrets/{AGENT_SECRET}");
    let text = |name: &str| fixture.directory.api.secret_text(&path, name);
    let key = KeyPair::generate().expect("key");
    let given = fixture
        .agents
        .authority
        .agent("a", &key.public_key_pem(), Timestamp::now())
        .await
        .expect("certificate");
    for (certificate, key) in [
        (text("tls.crt"), text("tls.key")),
        (given.certificate, key.serialize_pem()),
    ] {
        let names = TlsNames {
            server: Some("a.node.agent.hearth".to_owned()),
            clients: Vec::new(),
        };
        let tls = Tls::from_pem(&certificate, &key, &text("ca.crt"), &names).expect("TLS");
        let options = ClientOptions {
            tls: Some(tls),
            ..ClientOptions::default()
        };
        let agent = fixture.agents.agents().remove(0);
        let worker = Clients::new(options)
            .worker(&agent.endpoint)
            .expect("worker");
        let request = RetainRequest { keys: Vec::new() };
        assert!(worker.agent().retain(request).await.is_err());
    }
    assert!(fixture.played.retained.lock().expect("retained").is_empty());

    // Its process restarts, at the same address.
    let played = Arc::new(Played::default());
    *played.node.lock().expect("node") = "a".to_owned();
    *played.models.lock().expect("models") = vec![ModelResponse::default()];
    let address = serve_agent(&fixture.directory.api, played.clone(), "127.0.0.1:0");
    let agent = Agent {
        place: place("a", "uid-a"),
        endpoint: address.to_string().parse().expect("endpoint"),
    };
    let called = fixture.agents.call(&agent, |mut stub| async move {
        stub.profile(ProfileRequest {}).await
    });
    assert!(called.await.is_ok());
    assert_eq!(*played.certified.lock().expect("certified"), ["a"]);
}
