//! The agent as its operator calls it: a process of its own, over mutual TLS.

#![allow(clippy::unwrap_used)] // helpers of tests

#[path = "../fetch/tests/support/mod.rs"]
mod server;
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use hearth_crds::{ModelFacts, NodeProfileSpec};
use hearth_transport::tonic::{Code, Status};
use hearth_transport::tonic_health::pb::HealthCheckRequest;
use hearth_transport::tonic_health::pb::health_check_response::ServingStatus;
use hearth_transport::v1::{
    ModelRequest, ModelResponse, ModelState, ProfileRequest, RetainRequest,
};
use hearth_transport::{ClientOptions, Clients, Worker};
use serde_json::Value;
use server::{Fault, FileServer, sha256};
use support::{Agent, AgentOptions, Authority, USER, demo_tar, until};
use tempfile::TempDir;

/// One agent with an operator that may call it.
struct World {
    authority: Authority,
    cache: TempDir,
    agent: Agent,
    operator: Worker,
}

impl World {
    fn new() -> Self {
        Self::in_cache(Authority::new(), TempDir::new().unwrap())
    }

    fn in_cache(authority: Authority, cache: TempDir) -> Self {
        let tls = authority.issue("agent.hearth");
        let agent = Agent::start(&AgentOptions {
            tls: &tls,
            cache: cache.path(),
            user: None,
        });
        let operator = agent.called_by(Some(&authority.issue("operator.hearth")));
        Self {
            authority,
            cache,
            agent,
            operator,
        }
    }

    /// `kill -9`, and another agent in its place.
    fn restarted(mut self) -> Self {
        self.agent.kill();
        Self::in_cache(self.authority, self.cache)
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

async fn profile(operator: &Worker) -> Result<NodeProfileSpec, Status> {
    let answer = operator.agent().profile(ProfileRequest {}).await?;
    Ok(serde_json::from_str(&answer.into_inner().node_profile_json).unwrap())
}

async fn retain(operator: &Worker, keys: &[&ModelRequest]) -> BTreeSet<String> {
    let keys = keys.iter().map(|request| request.key.clone()).collect();
    let answer = operator.agent().retain(RetainRequest { keys }).await;
    answer.unwrap().into_inner().removed.into_iter().collect()
}

/// What the operator asks for an archive.
fn request(server: &FileServer, sha256: &str) -> ModelRequest {
    ModelRequest {
        key: sha256[..32].to_owned(),
        url: server.url(),
        sha256: sha256.to_owned(),
    }
}

/// Polls until the model is ready or has failed; gives all answers.
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

/// The profile as soon as the node is measured.
async fn first_profile(operator: &Worker) -> NodeProfileSpec {
    let mut measured = None;
    until("the node is measured", async || {
        measured = profile(operator).await.ok();
        measured.is_some()
    })
    .await;
    measured.unwrap()
}

/// Changes what the agent keeps of the node.
fn edit_kept(world: &World, change: impl FnOnce(&mut Value)) {
    let kept = world.cache.path().join("profile.json");
    let text = fs::read_to_string(&kept).unwrap();
    let mut value = serde_json::from_str(&text).unwrap();
    change(&mut value);
    fs::write(&kept, value.to_string()).unwrap();
}

/// The value of `MemTotal` or the like, in bytes.
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
async fn a_node_is_measured_once_and_looked_at_each_time() {
    let world = World::new();
    let status = profile(&world.operator)
        .await
        .expect_err("it cannot be measured yet");
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().contains("being measured"), "{status}");
    let first = first_profile(&world.operator).await;
    assert_eq!(first.node, "node-1");
    assert_eq!(first.memory.total_bytes, meminfo("MemTotal"));
    assert!(!first.cpus.is_empty() && first.memory.read_one_thread_gbps > 0.0);
    assert!(first.compute.f32_one_thread_gflops > 0.0);
    let disk = &first.disks[0];
    assert_eq!(disk.path, world.cache.path().display().to_string());
    assert!(disk.free_bytes > 0 && disk.read_gbps > 0.0, "{disk:?}");
    // Measuring left nothing but its result.
    let names: BTreeSet<_> = fs::read_dir(world.cache.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(
        names,
        ["models", "partial", "profile.json"]
            .map(str::to_owned)
            .into()
    );

    // What a child measured does not stay in the agent: it never was there.
    let (now_mib, peak_mib) = (
        world.agent.kib("VmRSS") >> 10,
        world.agent.kib("VmHWM") >> 10,
    );
    eprintln!("agent: {now_mib} MiB, at most {peak_mib} MiB");
    assert!(peak_mib < 64, "the agent took {peak_mib} MiB");

    // Another agent takes the rates over, and looks at memory and disk itself.
    edit_kept(&world, |value| {
        value["profile"]["memory"]["availableBytes"] = 1.into();
        value["profile"]["disks"][0]["freeBytes"] = 1.into();
        value["profile"]["node"] = "node-0".into();
    });
    let world = world.restarted();
    let again = profile(&world.operator).await.expect("the rates are kept");
    assert_eq!(again.measured_at, first.measured_at);
    assert_eq!(again.compute, first.compute);
    assert_eq!(again.disks[0].read_gbps, first.disks[0].read_gbps);
    assert!(again.memory.available_bytes > 1 && again.disks[0].free_bytes > 1);
    assert_eq!(again.node, "node-1");
}

#[tokio::test]
async fn other_hardware_is_measured_again() {
    let world = World::new();
    let first = first_profile(&world.operator).await;
    edit_kept(&world, |value| {
        value["hardware"] = "another machine".into();
        value["profile"]["measuredAt"] = "2020-01-01T00:00:00Z".into();
    });
    let world = world.restarted();
    let status = profile(&world.operator)
        .await
        .expect_err("these rates are another machine's");
    assert!(status.message().contains("it has changed"), "{status}");
    let again = first_profile(&world.operator).await;
    // RFC 3339 of one time zone sorts by time.
    assert!(again.measured_at >= first.measured_at);
}

#[tokio::test]
async fn a_model_is_fetched_in_the_background_and_told_with_its_facts() {
    let world = World::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.pace(Duration::from_millis(1));
    let wanted = request(&server, &sha256(&archive));

    // Only looked for.
    let look = ModelRequest {
        url: String::new(),
        ..wanted.clone()
    };
    let absent = model(&world.operator, &look).await;
    assert_eq!(absent.state(), ModelState::Absent);
    assert!(server.seen().is_empty());

    let answers = settled(&world.operator, &wanted).await;
    let half = answers
        .iter()
        .find(|answer| answer.bytes > 0)
        .expect("progress");
    assert_eq!(half.state(), ModelState::Fetching);
    assert_eq!(half.total_bytes, archive.len() as u64);
    assert!(answers.iter().any(|answer| answer.bytes_per_second > 0));
    let ready = answers.last().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    let facts: ModelFacts = serde_json::from_str(&ready.facts_json).unwrap();
    assert!(
        facts.layers > 0 && facts.bytes.total() > 1 << 20,
        "{facts:?}"
    );
    assert!(ready.bytes > facts.bytes.total());
    assert!(world.has(&wanted));

    // Asked again, by a second operator, and by another agent after this one: fetched once.
    assert_eq!(
        model(&world.operator, &wanted).await.state(),
        ModelState::Ready
    );
    assert_eq!(
        model(&world.operator, &look).await.state(),
        ModelState::Ready
    );
    let world = world.restarted();
    assert_eq!(
        settled(&world.operator, &look)
            .await
            .last()
            .unwrap()
            .facts_json,
        ready.facts_json
    );
    assert_eq!(server.seen().len(), 1);

    // Its disk was exchanged: fetched again.
    fs::remove_dir_all(world.cache.path().join("models")).unwrap();
    assert_eq!(
        model(&world.operator, &look).await.state(),
        ModelState::Absent
    );
    let again = settled(&world.operator, &wanted).await;
    assert_eq!(again.last().unwrap().state(), ModelState::Ready);
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn what_failed_is_told_and_tried_again_later() {
    let world = World::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::Status(404, Vec::new())]);
    let wanted = request(&server, &sha256(&archive));
    let began = Instant::now();
    let failed = settled(&world.operator, &wanted).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    assert!(
        failed.message.contains("404 Not Found"),
        "{}",
        failed.message
    );
    assert!(failed.message.contains(&server.url()) && failed.message.contains("\n  check"));
    // At once: the same words, and the server is left alone.
    assert_eq!(model(&world.operator, &wanted).await, failed);
    assert_eq!(server.seen().len(), 1);
    until("it is tried again", async || {
        model(&world.operator, &wanted).await.state() != ModelState::Failed
    })
    .await;
    assert!(began.elapsed() >= Duration::from_secs(5));
    assert_eq!(
        settled(&world.operator, &wanted)
            .await
            .pop()
            .unwrap()
            .state(),
        ModelState::Ready
    );

    // Another file than was asked for is told with both checksums, and not fetched again at once.
    let wrong = request(&server, &sha256(b"something else"));
    let failed = settled(&world.operator, &wrong).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    for sha256 in [&wrong.sha256, &wanted.sha256] {
        assert!(
            failed.message.contains(sha256.as_str()),
            "{}",
            failed.message
        );
    }
    // A URL that was put right is tried at once.
    let other = FileServer::start(&b"something else"[..]).await;
    let right = ModelRequest {
        url: other.url(),
        ..wrong.clone()
    };
    let failed = settled(&world.operator, &right).await.pop().unwrap();
    assert!(failed.message.contains("no archive"), "{}", failed.message);

    // A model that cannot be served is not ready.
    let bare = server::model_tar(1000);
    let third = FileServer::start(bare.clone()).await;
    let failed = settled(&world.operator, &request(&third, &sha256(&bare)))
        .await
        .pop()
        .unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    assert!(failed.message.contains("config.json"), "{}", failed.message);
}

#[tokio::test]
async fn what_can_never_be_fetched_is_refused() {
    let world = World::new();
    let server = FileServer::start(demo_tar()).await;
    let wanted = request(&server, &sha256(&demo_tar()));
    let wrong = request(&server, &sha256(b"something else"));
    for (key, url, sha256) in [
        ("../../etc", server.url(), wanted.sha256.clone()),
        (wanted.key.as_str(), server.url(), wrong.sha256.clone()),
        (
            wanted.key.as_str(),
            "file:///etc/passwd".to_owned(),
            wanted.sha256.clone(),
        ),
    ] {
        let key = key.to_owned();
        let bad = world
            .operator
            .agent()
            .model(ModelRequest { key, url, sha256 })
            .await;
        assert_eq!(bad.unwrap_err().code(), Code::InvalidArgument);
    }
}

#[tokio::test]
async fn models_that_nobody_names_are_removed_and_those_in_work_are_not() {
    let world = World::new();
    let (one, two) = (demo_tar(), {
        let mut archive = demo_tar();
        archive.extend([0; 512]);
        archive
    });
    let (server_one, server_two) = (
        FileServer::start(one.clone()).await,
        FileServer::start(two.clone()).await,
    );
    let (wanted_one, wanted_two) = (
        request(&server_one, &sha256(&one)),
        request(&server_two, &sha256(&two)),
    );
    for wanted in [&wanted_one, &wanted_two] {
        let ready = settled(&world.operator, wanted).await.pop().unwrap();
        assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    }
    // A third is half here.
    let three = server::model_tar(1_000_000);
    let server_three = FileServer::start(three.clone()).await;
    server_three.faults([Fault::StallAfter(500_000)]);
    let wanted_three = request(&server_three, &sha256(&three));
    until("a half of the third is here", async || {
        model(&world.operator, &wanted_three).await.bytes >= 500_000
    })
    .await;

    let removed = retain(&world.operator, &[&wanted_two]).await;
    assert_eq!(removed, [wanted_one.key.clone()].into());
    assert!(!world.has(&wanted_one) && world.has(&wanted_two));
    assert_eq!(
        model(&world.operator, &wanted_three).await.state(),
        ModelState::Fetching
    );
    assert_eq!(
        model(&world.operator, &wanted_two).await.state(),
        ModelState::Ready
    );
    // Killed in mid-fetch, the part is nobody's.
    let world = world.restarted();
    let removed = retain(&world.operator, &[]).await;
    assert_eq!(
        removed,
        [wanted_two.key.clone(), wanted_three.key.clone()].into()
    );
    for name in ["models", "partial"] {
        let left = fs::read_dir(world.cache.path().join(name)).unwrap().count();
        assert_eq!(left, 0, "{name}");
    }
    let keys = vec!["..".to_owned()];
    let bad = world.operator.agent().retain(RetainRequest { keys }).await;
    assert_eq!(bad.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_killed_agent_is_followed_by_one_that_goes_on() {
    let world = World::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    let cut = archive.len() / 2;
    server.faults([Fault::StallAfter(cut)]);
    let wanted = request(&server, &sha256(&archive));
    let part = world
        .cache
        .path()
        .join(format!("partial/{}.part", wanted.key));
    until("a half is on disk", async || {
        model(&world.operator, &wanted).await;
        fs::metadata(&part).is_ok_and(|metadata| metadata.len() == cut as u64)
    })
    .await;
    let world = world.restarted();
    let ready = settled(&world.operator, &wanted).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert_eq!(server.sent_bytes(), archive.len(), "bytes came twice");
}

#[tokio::test]
async fn only_the_operator_is_answered() {
    let world = World::new();
    let stranger = Authority::new();
    // Of another authority, of ours with another name, without any certificate.
    let other_authority = {
        let mixed = stranger.issue("operator.hearth");
        fs::copy(
            world.authority.issue("x.hearth").join("ca.crt"),
            mixed.join("ca.crt"),
        )
        .unwrap();
        mixed
    };
    let worker = world.authority.issue("demo.default.hearth");
    for (who, certificates) in [
        (
            "another authority's operator",
            Some(other_authority.as_path()),
        ),
        ("a worker", Some(worker.as_path())),
        ("nobody", None),
    ] {
        let mut caller = world.agent.called_by(certificates).agent();
        let refused = caller.retain(RetainRequest { keys: Vec::new() }).await;
        let status = refused.expect_err(who);
        // It came from the connection, not from the service.
        assert!(
            std::error::Error::source(&status).is_some(),
            "{who}: {status}"
        );
    }
    // And the operator asks for an agent.
    let worker = Agent::start(&AgentOptions {
        tls: &world.authority.issue("other.default.hearth"),
        cache: world.cache.path(),
        user: None,
    });
    let caller = worker.called_by(Some(&world.authority.issue("operator.hearth")));
    assert!(
        caller
            .agent()
            .retain(RetainRequest { keys: Vec::new() })
            .await
            .is_err()
    );
    assert!(
        world
            .operator
            .agent()
            .retain(RetainRequest { keys: Vec::new() })
            .await
            .is_ok()
    );

    // A probe needs no certificate.
    let probes = Clients::new(ClientOptions::default());
    let probe = probes.worker(&world.agent.health.parse().unwrap()).unwrap();
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

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_ends_at_once_when_it_is_told_to() {
    let mut world = World::new();
    let archive = demo_tar();
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::StallAfter(1_000_000)]);
    let wanted = request(&server, &sha256(&archive));
    until("a fetch runs", async || {
        model(&world.operator, &wanted).await.bytes >= 1_000_000
    })
    .await;
    let (code, took) = world.agent.terminate();
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
        eprintln!("left out: only root can start an agent as another user");
        return;
    }
    let authority = Authority::new();
    let tls = authority.issue("agent.hearth");
    for directory in tls.ancestors().take(2) {
        chown(directory);
    }
    chown(&tls.join("tls.key"));
    // Readable, not writable.
    let cache = TempDir::new().unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(cache.path(), mode(0o755)).unwrap();
    let start = || {
        Agent::start(&AgentOptions {
            tls: &tls,
            cache: cache.path(),
            user: Some(USER),
        })
    };
    says_so_and_measures(&start(), &authority).await;
    assert!(!cache.path().join("profile.json").exists());

    // Its own.
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
