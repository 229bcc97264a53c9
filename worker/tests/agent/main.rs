//! The agent as the operator calls it: a separate process, over mutual TLS.

#![allow(clippy::unwrap_used)] // helpers of tests

mod egress;
mod hub;
mod links;
mod models;
mod profiles;
mod seeds;
#[path = "../../fetch/tests/support/mod.rs"]
mod server;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_crds::{ModelFacts, NodeProfileStatus, store_key};
use hearth_transport::tonic::{Code, Status};
use hearth_transport::tonic_health::pb::HealthCheckRequest;
use hearth_transport::tonic_health::pb::health_check_response::ServingStatus;
use hearth_transport::v1::{
    CertifyRequest, Credentials, IdentifyRequest, ModelRequest, ModelResponse, ModelState,
    ProfileRequest, RetainRequest,
};
use hearth_transport::{ClientOptions, Clients, Worker};
use serde_json::Value;
use server::{Fault, FileServer, sha256};
use support::{Agent, AgentOptions, Authority, USER, demo_tar, skipped, until};
use tempfile::TempDir;

/// An agent and an operator that may call it.
struct Fixture {
    authority: Authority,
    cache: TempDir,
    agent: Agent,
    operator: Worker,
}

impl Fixture {
    fn new() -> Self {
        Self::in_cache(Authority::new(), TempDir::new().unwrap(), 60)
    }

    /// Starts an agent that reports failures of private servers early.
    fn impatient() -> Self {
        Self::in_cache(Authority::new(), TempDir::new().unwrap(), 3)
    }

    /// Starts an agent whose environment names proxies or authorities.
    fn with_environment(environment: &[(&str, String)]) -> Self {
        Self::start(Authority::new(), TempDir::new().unwrap(), 60, environment)
    }

    fn in_cache(authority: Authority, cache: TempDir, private_patience_s: u32) -> Self {
        Self::start(authority, cache, private_patience_s, &[])
    }

    fn start(
        authority: Authority,
        cache: TempDir,
        private_patience_s: u32,
        environment: &[(&str, String)],
    ) -> Self {
        let tls = authority.issue("agent.hearth");
        let agent = Agent::start(&AgentOptions {
            tls: &tls,
            cache: cache.path(),
            user: None,
            private_patience_s,
            environment,
        });
        let operator = agent.called_by(Some(&authority.issue("operator.hearth")));
        Self {
            authority,
            cache,
            agent,
            operator,
        }
    }

    /// Kills the agent with `kill -9` and starts another in its place.
    fn restarted(mut self) -> Self {
        self.agent.kill();
        Self::in_cache(self.authority, self.cache, 60)
    }

    fn has(&self, request: &ModelRequest) -> bool {
        let model = self.cache.path().join("models").join(&request.key);
        model.join("config.json").is_file()
    }
}

async fn model(operator: &Worker, request: &ModelRequest) -> ModelResponse {
    let answer = operator.agent().model(request.clone()).await;
    answer
        .unwrap_or_else(|status| panic!("{status}"))
        .into_inner()
}

async fn profile(operator: &Worker) -> Result<NodeProfileStatus, Status> {
    let answer = operator.agent().profile(ProfileRequest {}).await?;
    Ok(serde_json::from_str(&answer.into_inner().node_profile_json).unwrap())
}

async fn retain(operator: &Worker, keys: &[&ModelRequest]) -> BTreeSet<String> {
    let keys = keys.iter().map(|request| request.key.clone()).collect();
    let answer = operator.agent().retain(RetainRequest { keys }).await;
    answer.unwrap().into_inner().removed.into_iter().collect()
}

/// Builds the operator's request for an archive.
fn request(server: &FileServer, sha256: &str) -> ModelRequest {
    ModelRequest {
        key: store_key(&server.url(), sha256, ""),
        url: server.url(),
        sha256: sha256.to_owned(),
        ..ModelRequest::default()
    }
}

/// The same for another holder (`NAMESPACE/SECRET`), which opens the server with a token.
fn held(server: &FileServer, archive: &[u8], holder: &str, token: Option<&str>) -> ModelRequest {
    let sha256 = sha256(archive);
    ModelRequest {
        key: store_key(&server.url(), &sha256, holder),
        holder: holder.to_owned(),
        credentials: token.map(|token| Credentials {
            token: token.to_owned(),
            ..Credentials::default()
        }),
        ..request(server, &sha256)
    }
}

/// Polls until the model is ready or has failed; returns all answers.
async fn settled(operator: &Worker, request: &ModelRequest) -> Vec<ModelResponse> {
    let mut answers = Vec::new();
    until("the model is ready or has failed", async || {
        answers.push(model(operator, request).await);
        let state = answers.last().unwrap().state();
        assert_ne!(state, ModelState::Absent);
        state != ModelState::Fetching
    })
    .await;
    answers
}

/// Waits until the node is measured, and returns its profile.
async fn first_profile(operator: &Worker) -> NodeProfileStatus {
    let mut measured = None;
    until("the node is measured", async || {
        measured = profile(operator).await.ok();
        measured.is_some()
    })
    .await;
    measured.unwrap()
}

/// Changes the profile that the agent stored.
fn edit_kept(fixture: &Fixture, change: impl FnOnce(&mut Value)) {
    let kept = fixture.cache.path().join("profile.json");
    let text = fs::read_to_string(&kept).unwrap();
    let mut value = serde_json::from_str(&text).unwrap();
    change(&mut value);
    fs::write(&kept, value.to_string()).unwrap();
}

/// Returns the value of `MemTotal` or a similar line, in bytes.
fn meminfo(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib * 1024
}

#[tokio::test]
async fn only_the_operator_is_answered() {
    let fixture = Fixture::new();
    let stranger = Authority::new();
    // From another authority, from ours with another name, and without any certificate.
    let other_authority = {
        let mixed = stranger.issue("operator.hearth");
        fs::copy(
            fixture.authority.issue("x.hearth").join("ca.crt"),
            mixed.join("ca.crt"),
        )
        .unwrap();
        mixed
    };
    let worker = fixture.authority.issue("demo.default.hearth");
    for (who, certificates) in [
        (
            "another authority's operator",
            Some(other_authority.as_path()),
        ),
        ("a worker", Some(worker.as_path())),
        ("nobody", None),
    ] {
        let mut caller = fixture.agent.called_by(certificates).agent();
        let refused = caller.retain(RetainRequest { keys: Vec::new() }).await;
        let status = refused.expect_err(who);
        // The error came from the connection, not from the service.
        assert!(
            std::error::Error::source(&status).is_some(),
            "{who}: {status}"
        );
    }
    // Agents are rejected too, whether with the certificate that all start with or with another node's.
    for name in ["agent.hearth", "node-2.node.agent.hearth"] {
        let other = fixture.authority.issue(name);
        let mut caller = fixture.agent.called_by(Some(&other)).agent();
        let refused = caller.retain(RetainRequest { keys: Vec::new() }).await;
        assert!(refused.is_err(), "{name}");
    }
    // The operator likewise requires an agent's name.
    let worker = Agent::start(&AgentOptions {
        tls: &fixture.authority.issue("other.default.hearth"),
        cache: fixture.cache.path(),
        user: None,
        private_patience_s: 60,
        environment: &[],
    });
    let caller = worker.called_by(Some(&fixture.authority.issue("operator.hearth")));
    assert!(
        caller
            .agent()
            .retain(RetainRequest { keys: Vec::new() })
            .await
            .is_err()
    );
    assert!(
        fixture
            .operator
            .agent()
            .retain(RetainRequest { keys: Vec::new() })
            .await
            .is_ok()
    );

    // A probe needs no certificate.
    let probes = Clients::new(ClientOptions::default());
    let probe = probes
        .worker(&fixture.agent.health.parse().unwrap())
        .unwrap();
    for service in ["", "live"] {
        let service = service.to_owned();
        let answer = probe
            .health()
            .check(HealthCheckRequest { service })
            .await
            .unwrap();
        assert_eq!(answer.into_inner().status(), ServingStatus::Serving);
    }
}

#[tokio::test]
async fn an_agent_tells_its_newest_token_and_one_key() {
    let fixture = Fixture::new();
    let told = fixture.operator.agent().identify(IdentifyRequest {}).await;
    let told = told.unwrap().into_inner();
    assert_eq!(told.token, "a token");
    assert!(told.public_key.starts_with("-----BEGIN PUBLIC KEY-----"));
    // The kubelet writes another token: the agent returns the new one.
    let token = fixture.authority.place("agent.hearth").join("token");
    fs::write(&token, "the next").unwrap();
    let again = fixture.operator.agent().identify(IdentifyRequest {}).await;
    let again = again.unwrap().into_inner();
    assert_eq!(
        (&*again.token, again.public_key),
        ("the next", told.public_key)
    );
    fs::remove_file(token).unwrap();
    let refused = fixture.operator.agent().identify(IdentifyRequest {}).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("token"), "{refused}");
}

#[tokio::test]
async fn an_agent_shows_the_certificate_that_it_was_given_until_its_files_change() {
    let fixture = Fixture::new();
    let own = "node-1.node.agent.hearth";
    let told = fixture.operator.agent().identify(IdentifyRequest {}).await;
    let told = told.unwrap().into_inner();
    let certificate = |name: &str, node: &str| CertifyRequest {
        node: node.to_owned(),
        certificate: fixture.authority.sign(name, &told.public_key),
    };
    let operator = fixture.authority.issue("operator.hearth");
    let expecting = |name: &str| fixture.agent.called_as(name, Some(&operator));
    assert!(
        expecting(own)
            .agent()
            .retain(RetainRequest::default())
            .await
            .is_err()
    );
    // A certificate for another node is rejected, and so is text that is not a certificate.
    let request = certificate("node-2.node.agent.hearth", "node-2");
    let refused = fixture.operator.agent().certify(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let stranger = fixture.authority.issue(own).join("tls.crt");
    for wrong in ["none", &fs::read_to_string(stranger).unwrap()] {
        let request = CertifyRequest {
            node: "node-1".to_owned(),
            certificate: wrong.to_owned(),
        };
        let refused = fixture.operator.agent().certify(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }

    let request = certificate(own, "node-1");
    fixture
        .operator
        .agent()
        .certify(request.clone())
        .await
        .unwrap();
    assert!(
        expecting(own)
            .agent()
            .retain(RetainRequest::default())
            .await
            .is_ok()
    );
    let first = || expecting("agent.hearth");
    assert!(
        first()
            .agent()
            .retain(RetainRequest::default())
            .await
            .is_err()
    );
    // The same authority issues another initial certificate: the adopted one is dropped, as after a change of
    // authorities.
    fixture.authority.issue("agent.hearth");
    until("the first certificate is shown again", async || {
        first()
            .agent()
            .retain(RetainRequest::default())
            .await
            .is_ok()
    })
    .await;
    fixture.operator.agent().certify(request).await.unwrap();
    assert!(
        expecting(own)
            .agent()
            .retain(RetainRequest::default())
            .await
            .is_ok()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_ends_at_once_when_it_is_told_to() {
    let mut fixture = Fixture::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::StallAfter(1_000_000)]);
    let wanted = request(&server, &sha256(&archive));
    let part = format!("partial/{}.part", wanted.key);
    let part = fixture.cache.path().join(part);
    until("a fetch runs", async || {
        model(&fixture.operator, &wanted).await;
        fs::metadata(&part).is_ok_and(|metadata| metadata.len() >= 1_000_000)
    })
    .await;
    let (code, took) = fixture.agent.terminate();
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[tokio::test]
async fn an_agent_without_a_cache_says_so_and_still_measures() {
    let authority = Authority::new();
    let cache = TempDir::new().unwrap();
    let file = cache.path().join("file");
    fs::write(&file, "").unwrap();
    let agent = Agent::start(&AgentOptions {
        tls: &authority.issue("agent.hearth"),
        cache: &file.join("cache"),
        user: None,
        private_patience_s: 60,
        environment: &[],
    });
    says_so_and_measures(&agent, &authority).await;
}

async fn says_so_and_measures(agent: &Agent, authority: &Authority) {
    let operator = agent.called_by(Some(&authority.issue("operator.hearth")));
    let archive = server::model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let failed = settled(&operator, &request(&server, &sha256(&archive)))
        .await
        .pop()
        .unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    assert!(
        failed.message.contains("must be writable for user"),
        "{}",
        failed.message
    );
    until("the node is measured", async || {
        profile(&operator).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn an_agent_needs_no_more_than_its_cache() {
    if !rustix::process::geteuid().is_root() {
        skipped("an agent with no more than its cache: only root can start one as another user");
        return;
    }
    let authority = Authority::new();
    let tls = authority.issue("agent.hearth");
    for directory in tls.ancestors().take(2) {
        chown(directory);
    }
    chown(&tls.join("tls.key"));
    // Readable, but not writable.
    let cache = TempDir::new().unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(cache.path(), mode(0o755)).unwrap();
    let start = || {
        Agent::start(&AgentOptions {
            tls: &tls,
            cache: cache.path(),
            user: Some(USER),
            private_patience_s: 60,
            environment: &[],
        })
    };
    says_so_and_measures(&start(), &authority).await;
    assert!(!cache.path().join("profile.json").exists());

    // Owned by the agent's user.
    chown(cache.path());
    let agent = start();
    let operator = agent.called_by(Some(&authority.issue("operator.hearth")));
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let ready = settled(&operator, &request(&server, &sha256(&archive)))
        .await
        .pop()
        .unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    until("the node is measured", async || {
        profile(&operator).await.is_ok()
    })
    .await;
    assert!(cache.path().join("profile.json").exists());
}

fn chown(path: &Path) {
    std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
}
