//! A fake agent for tests.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use hearth_crds::{MemoryProfile, NodeModel, NodeProfileStatus};
use hearth_transport::Tls;
use hearth_transport::tonic::{Code, Request, Response, Status};
use hearth_transport::v1::agent_server::Agent as AgentService;
use hearth_transport::v1::{
    AwaitLinkRequest, AwaitLinkResponse, CertifyRequest, CertifyResponse, IdentifyRequest,
    IdentifyResponse, MeasureLinkRequest, MeasureLinkResponse, ModelRequest, ModelResponse,
    ProfileRequest, ProfileResponse, RetainRequest, RetainResponse, SeedRequest, SeedResponse,
};
use rcgen::KeyPair;

use super::tests::TOKEN;

/// An agent whose responses are set by the test.
pub(super) struct Played {
    pub(super) token: Mutex<String>,
    pub(super) key: KeyPair,
    pub(super) node: Mutex<String>,
    /// Models that its profile has.
    pub(super) held: Mutex<Vec<NodeModel>>,
    /// Responses to `Model`, one per call; the last one is repeated.
    pub(super) models: Mutex<Vec<ModelResponse>>,
    /// What it says instead of them.
    pub(super) refusal: Mutex<Option<Status>>,
    pub(super) asked: Mutex<Vec<ModelRequest>>,
    pub(super) retained: Mutex<Vec<Vec<String>>>,
    /// Measurements of links that it awaited and made.
    pub(super) awaited: Mutex<Vec<AwaitLinkRequest>>,
    pub(super) measured: Mutex<Vec<MeasureLinkRequest>>,
    /// What it says of each link.
    pub(super) link: Mutex<Result<MeasureLinkResponse, Status>>,
    /// Models that it was to give, and what it says to that.
    pub(super) given: Mutex<Vec<SeedRequest>>,
    pub(super) seed: Mutex<Result<SeedResponse, Status>>,
    /// TLS identity that it presents, and the nodes for which it was issued certificates.
    pub(super) tls: Mutex<Option<Tls>>,
    pub(super) certified: Mutex<Vec<String>>,
    /// Whether it begins its answers to `Model` and does not end them.
    pub(super) is_stuck: AtomicBool,
}

impl Default for Played {
    fn default() -> Self {
        Self {
            token: Mutex::new(TOKEN.to_owned()),
            key: KeyPair::generate().expect("key"),
            node: Mutex::default(),
            held: Mutex::default(),
            models: Mutex::default(),
            refusal: Mutex::default(),
            asked: Mutex::default(),
            retained: Mutex::default(),
            awaited: Mutex::default(),
            measured: Mutex::default(),
            link: Mutex::new(Err(Status::unimplemented("an older version"))),
            given: Mutex::default(),
            seed: Mutex::new(Err(Status::unimplemented("an older version"))),
            tls: Mutex::default(),
            certified: Mutex::default(),
            is_stuck: AtomicBool::default(),
        }
    }
}

/// The fake agent as a service.
pub(super) struct Service(pub(super) Arc<Played>);

#[hearth_transport::tonic::async_trait]
impl AgentService for Service {
    async fn identify(
        &self,
        _: Request<IdentifyRequest>,
    ) -> Result<Response<IdentifyResponse>, Status> {
        Ok(Response::new(IdentifyResponse {
            token: self.0.token.lock().expect("token").clone(),
            public_key: self.0.key.public_key_pem(),
        }))
    }

    async fn certify(
        &self,
        request: Request<CertifyRequest>,
    ) -> Result<Response<CertifyResponse>, Status> {
        let request = request.into_inner();
        let tls = self.0.tls.lock().expect("tls").clone().expect("TLS");
        tls.adopt(&request.certificate, &self.0.key.serialize_pem())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.0
            .certified
            .lock()
            .expect("certified")
            .push(request.node);
        Ok(Response::new(CertifyResponse {}))
    }

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
        let profile = NodeProfileStatus {
            node,
            memory: MemoryProfile {
                total_bytes: 1000,
                available_bytes: 700,
                least_available_bytes: Some(300),
                least_over_seconds: 90,
                ..MemoryProfile::default()
            },
            measured_at: "2026-11-20T12:00:00Z".to_owned(),
            models: self.0.held.lock().expect("held").clone(),
            ..NodeProfileStatus::default()
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
        if let Some(refusal) = self.0.refusal.lock().expect("refusal").clone() {
            return Err(refusal);
        }
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

    async fn await_link(
        &self,
        request: Request<AwaitLinkRequest>,
    ) -> Result<Response<AwaitLinkResponse>, Status> {
        let mut awaited = self.0.awaited.lock().expect("awaited");
        awaited.push(request.into_inner());
        Ok(Response::new(AwaitLinkResponse { port: 9404 }))
    }

    async fn measure_link(
        &self,
        request: Request<MeasureLinkRequest>,
    ) -> Result<Response<MeasureLinkResponse>, Status> {
        let mut measured = self.0.measured.lock().expect("measured");
        measured.push(request.into_inner());
        let link = self.0.link.lock().expect("link").clone();
        link.map(Response::new)
    }

    async fn seed(&self, request: Request<SeedRequest>) -> Result<Response<SeedResponse>, Status> {
        let mut given = self.0.given.lock().expect("given");
        given.push(request.into_inner());
        let seed = self.0.seed.lock().expect("seed").clone();
        seed.map(Response::new)
    }
}
