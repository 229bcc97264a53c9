//! The operator's side against an agent that is played here, over mutual TLS with the authority's own certificates,
//! beside an API server that is played too.

use std::net::SocketAddr;

use hearth_crds::MemoryProfile;
use hearth_transport::tonic::service::Routes;
use hearth_transport::tonic::{Code, Response, Status};
use hearth_transport::v1::agent_server::{Agent as AgentService, AgentServer};
use hearth_transport::v1::{ModelResponse, ModelState, ProfileResponse, RetainResponse};
use hearth_transport::{Listener, ServerOptions, Tls, TlsNames, serve};
use serde_json::json;

use super::*;
use crate::controller::authority::AGENT_SECRET;
use crate::controller::authority::fake::{FakeApi, settings};

/// An agent whose answers are set by the test.
#[derive(Default)]
struct Played {
    node: Mutex<String>,
    /// Answers to `Model`, one a call; the last one stays.
    models: Mutex<Vec<ModelResponse>>,
    asked: Mutex<Vec<ModelRequest>>,
    retained: Mutex<Vec<Vec<String>>>,
}

/// The played agent as a service.
struct Service(Arc<Played>);

#[hearth_transport::tonic::async_trait]
impl AgentService for Service {
    async fn profile(
        &self,
        _: Request<ProfileRequest>,
    ) -> Result<Response<ProfileResponse>, Status> {
        let node = self.0.node.lock().expect("node").clone();
        if node.is_empty() {
            return Err(Status::new(
                Code::Unavailable,
                "this node is being measured",
            ));
        }
        let profile = NodeProfileSpec {
            node,
            memory: MemoryProfile {
                total_bytes: 1000,
                available_bytes: 700,
                ..MemoryProfile::default()
            },
            measured_at: "2026-11-20T12:00:00Z".to_owned(),
            ..NodeProfileSpec::default()
        };
        let node_profile_json = serde_json::to_string(&profile).expect("JSON");
        Ok(Response::new(ProfileResponse { node_profile_json }))
    }

    async fn model(
        &self,
        request: Request<ModelRequest>,
    ) -> Result<Response<ModelResponse>, Status> {
        self.0
            .asked
            .lock()
            .expect("asked")
            .push(request.into_inner());
        let mut models = self.0.models.lock().expect("models");
        let next = models[0].clone();
        if models.len() > 1 {
            models.remove(0);
        }
        Ok(Response::new(next))
    }

    async fn retain(
        &self,
        request: Request<RetainRequest>,
    ) -> Result<Response<RetainResponse>, Status> {
        self.0
            .retained
            .lock()
            .expect("retained")
            .push(request.into_inner().keys);
        Ok(Response::new(RetainResponse::default()))
    }
}

/// A cluster of one node `a`.
#[derive(Default)]
struct Paper {
    api: FakeApi,
    woken: Mutex<Vec<Key>>,
    in_use: Mutex<Option<BTreeSet<String>>>,
}

impl Ground for Paper {
    fn agents(&self) -> Vec<(String, String)> {
        vec![("a".to_owned(), "127.0.0.1".to_owned())]
    }
    fn node_uid(&self, node: &str) -> Option<String> {
        (node == "a").then(|| "uid-a".to_owned())
    }
    fn profile(&self, node: &str) -> Option<NodeProfileSpec> {
        let profile = self
            .api
            .object(&format!("/apis/hearth.dev/v1alpha1/nodeprofiles/{node}"))?;
        serde_json::from_value(profile["spec"].clone()).ok()
    }
    fn held_bytes(&self, _: &str) -> u64 {
        100
    }
    fn models_in_use(&self) -> Option<BTreeSet<String>> {
        self.in_use.lock().expect("in use").clone()
    }
    fn wake(&self, deployment: &Key) {
        self.woken.lock().expect("woken").push(deployment.clone());
    }
}

struct Scene {
    ground: Arc<Paper>,
    played: Arc<Played>,
    agents: Arc<Agents<Paper>>,
}

impl Scene {
    /// Serves the agent with the certificate that the authority made for agents, and lets the operator run.
    async fn start() -> Self {
        let ground = Arc::new(Paper::default());
        let client = ground.api.client();
        let authority = Arc::new(Authority::new(client.clone(), Arc::new(settings()), None));
        authority.keep(Timestamp::now()).await.expect("authority");
        let played = Arc::new(Played::default());
        let address = serve_agent(&ground.api, played.clone());
        let mut agents = Agents::new(client, authority, ground.clone());
        agents.port = address.port();
        let agents = Arc::new(agents);
        let running = agents.clone();
        tokio::spawn(async move { running.run().await });
        Self {
            ground,
            played,
            agents,
        }
    }
}

fn serve_agent(api: &FakeApi, played: Arc<Played>) -> SocketAddr {
    let path = format!("/api/v1/namespaces/hearth-system/secrets/{AGENT_SECRET}");
    let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| api.secret_text(&path, name));
    let tls = Tls::from_pem(&cert, &key, &ca, &TlsNames::shared("agent.hearth")).expect("TLS");
    let listener = Listener::bind("127.0.0.1:0").expect("port");
    let address = listener.address();
    tokio::spawn(async move {
        let options = ServerOptions {
            tls: Some(tls),
            ..ServerOptions::default()
        };
        let routes = Routes::new(AgentServer::new(Service(played)));
        serve(listener, routes, &options, std::future::pending()).await
    });
    address
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..200 {
        if let Some(found) = look() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("not within 10 s: {what}");
}

#[tokio::test]
async fn a_measured_node_gets_its_profile_once() {
    let scene = Scene::start().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(scene.ground.profile("a"), None, "the agent is measuring");
    *scene.played.node.lock().expect("node") = "a".to_owned();
    until("a profile", || scene.ground.profile("a")).await;
    let path = "/apis/hearth.dev/v1alpha1/nodeprofiles/a";
    let object = scene.ground.api.object(path).expect("profile");
    assert_eq!(
        object["metadata"]["ownerReferences"],
        json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "uid-a"}])
    );
    assert_eq!(
        object["spec"]["memory"]["availableBytes"], 800,
        "700 and the 100 that our Pods ask for"
    );
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let writes = scene.ground.api.writes();
    assert_eq!(
        writes
            .iter()
            .filter(|write| write.contains("nodeprofiles"))
            .count(),
        1,
        "{writes:?}"
    );
}

#[tokio::test]
async fn an_agent_of_another_node_is_not_believed() {
    let scene = Scene::start().await;
    *scene.played.node.lock().expect("node") = "b".to_owned();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(
        scene
            .ground
            .api
            .writes()
            .iter()
            .all(|write| !write.contains("nodeprofiles"))
    );
}

#[tokio::test]
async fn a_fetch_is_started_followed_and_told() {
    let scene = Scene::start().await;
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
    *scene.played.models.lock().expect("models") = vec![fetching(10), fetching(500), failed];
    let source = HttpSource {
        url: "http://nas.lan/m.tar".to_owned(),
        sha256: "a".repeat(64),
    };
    let demo = Key::new("default", "demo");
    scene
        .agents
        .want(&demo, Some(&source), &["a".to_owned(), "gone".to_owned()]);
    let view = |node: &str| scene.agents.fetches(&source).remove(node);
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
    let asked = scene.played.asked.lock().expect("asked").clone();
    assert_eq!(
        (&*asked[0].key, &*asked[0].url),
        ("a".repeat(32).as_str(), "http://nas.lan/m.tar")
    );
    assert!(scene.ground.woken.lock().expect("woken").contains(&demo));
}

#[tokio::test]
async fn nothing_is_dropped_before_all_is_known() {
    let scene = Scene::start().await;
    *scene.played.node.lock().expect("node") = "a".to_owned();
    until("a profile", || scene.ground.profile("a")).await;
    assert!(scene.played.retained.lock().expect("retained").is_empty());

    let scene = Scene::start().await;
    *scene.ground.in_use.lock().expect("in use") = Some(BTreeSet::from(["k1".to_owned()]));
    let source = HttpSource {
        url: "http://nas.lan/m.tar".to_owned(),
        sha256: "b".repeat(64),
    };
    *scene.played.models.lock().expect("models") = vec![ModelResponse::default()];
    scene.agents.want(
        &Key::new("default", "demo"),
        Some(&source),
        &["a".to_owned()],
    );
    *scene.played.node.lock().expect("node") = "a".to_owned();
    let kept = until("a call of Retain with the wish in it", || {
        let retained = scene.played.retained.lock().expect("retained");
        retained.iter().find(|keys| keys.len() == 2).cloned()
    })
    .await;
    assert_eq!(kept, ["b".repeat(32), "k1".to_owned()]);
}
