//! Models of a hub, on a node that has none.

use hearth_crds::{HttpFile, NodeStore, files_store_key, hub_store_key};
use hearth_transport::v1::{self, HubRepository};

use super::server::hub::HubServer;
use super::*;

const REPO: &str = "acme/demo";

/// The files of the demo model, with one that serving does not need.
pub(super) fn demo_files() -> Vec<(String, Vec<u8>)> {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/hearth-demo");
    let entries = fs::read_dir(model).unwrap().flatten();
    let files = entries.filter(|entry| entry.path().is_file());
    let mut files: Vec<(String, Vec<u8>)> = files
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect();
    files.push(("pytorch_model.bin".to_owned(), vec![7; 100_000]));
    files
}

pub(super) async fn start(files: &[(String, Vec<u8>)]) -> HubServer {
    HubServer::start(REPO, &listed(files)).await
}

fn listed(files: &[(String, Vec<u8>)]) -> Vec<(&str, &[u8])> {
    let files = files.iter();
    files.map(|(name, bytes)| (&**name, &**bytes)).collect()
}

/// Builds the operator's request for a repository.
pub(super) fn wanted(server: &HubServer, holder: &str, token: &str, commit: &str) -> ModelRequest {
    ModelRequest {
        key: hub_store_key(REPO, "main", holder),
        holder: holder.to_owned(),
        credentials: (!token.is_empty()).then(|| Credentials {
            token: token.to_owned(),
            ..Credentials::default()
        }),
        hub: Some(HubRepository {
            endpoint: server.url(),
            repo: REPO.to_owned(),
            revision: "main".to_owned(),
            commit: commit.to_owned(),
        }),
        ..ModelRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_is_fetched_and_its_commit_told() {
    let fixture = Fixture::new();
    let files = demo_files();
    let server = start(&files).await;
    server.file_faults([Fault::CutAfter(1000)]);
    server.pace(Duration::from_millis(5));
    let request = wanted(&server, "", "", "");
    let answers = settled(&fixture.operator, &request).await;
    let (ready, before) = answers.split_last().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    let first = server.listing()["sha"].as_str().unwrap().to_owned();
    assert_eq!(ready.commit, first);
    let facts: ModelFacts = serde_json::from_str(&ready.facts_json).unwrap();
    assert!(!facts.architecture.is_empty());
    assert!(fixture.has(&request));
    let model = fixture.cache.path().join("models").join(&request.key);
    assert!(!model.join("pytorch_model.bin").exists());
    // The whole was told from the first byte of the weights on, although the server is private.
    let counted = before.iter().filter(|answer| answer.total_bytes > 0);
    let totals: BTreeSet<u64> = counted.map(|answer| answer.total_bytes).collect();
    assert_eq!(totals.into_iter().collect::<Vec<_>>(), [ready.bytes]);

    // The branch moves on; what is here stays, and other nodes are to have the same.
    let mut newer = files.clone();
    newer.push(("README.md".to_owned(), b"# Demo".to_vec()));
    let second = server.push(&listed(&newer));
    let asked = server.asked().len();
    let again = model_of(&fixture, &request).await;
    assert_eq!(again.commit, first);
    let pinned = model_of(&fixture, &wanted(&server, "", "", &first)).await;
    assert_eq!(pinned.state(), ModelState::Ready);
    let other = model_of(&fixture, &wanted(&server, "", "", &second)).await;
    assert_eq!(other.state(), ModelState::Failed);
    assert!(
        other.message.contains(&first) && other.message.contains(&second),
        "{}",
        other.message
    );
    assert_eq!(server.asked().len(), asked);
    // Another node fetches the commit that it is asked for.
    let node = Fixture::new();
    let request = wanted(&server, "", "", &first);
    let ready = settled(&node.operator, &request).await.pop().unwrap();
    assert_eq!((ready.state(), ready.commit), (ModelState::Ready, first));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_profile_has_what_the_store_has_and_names_nothing_that_a_secret_opened() {
    let fixture = Fixture::new();
    let before = first_profile(&fixture.operator).await;
    assert_eq!(before.store, Some(NodeStore::default()));
    assert_eq!(before.models, []);
    let server = start(&demo_files()).await;
    server.pace(Duration::from_millis(20));
    let public = wanted(&server, "", "", "");
    until("the profile says how far the fetch is", async || {
        model_of(&fixture, &public).await;
        let told = profile(&fixture.operator).await.unwrap();
        let fetches = told.models.iter().filter_map(|it| it.fetch.as_ref());
        let is_half = |percent| (1..100).contains(&percent);
        fetches.filter_map(|fetch| fetch.percent).any(is_half)
    })
    .await;
    let ready = settled(&fixture.operator, &public).await.pop().unwrap();
    let archive = demo_tar();
    let nas = FileServer::start(archive.clone()).await;
    nas.open_by("Bearer t0ken");
    let private = held(&nas, &archive, "one/nas", Some("t0ken"));
    let opened = settled(&fixture.operator, &private).await.pop().unwrap();
    assert_eq!(opened.state(), ModelState::Ready, "{}", opened.message);

    let told = profile(&fixture.operator).await.unwrap();
    // In whole GiB.
    let store = NodeStore {
        models: 2,
        bytes: 1 << 30,
    };
    assert!(ready.bytes + opened.bytes < store.bytes);
    assert_eq!((told.store, told.models.len()), (Some(store), 1));
    let model = &told.models[0];
    assert_eq!((&model.key, model.bytes), (&public.key, ready.bytes));
    assert_eq!(model.source, "acme/demo@main");
    assert_eq!(model.commit.as_ref(), Some(&ready.commit));
    assert!(model.verified_at.is_some() && model.fetch.is_none() && !model.pinned);
    let used = model.last_used.as_deref().unwrap();
    assert!(used.ends_with(":00:00Z"), "{used}");
    let text = serde_json::to_string(&told).unwrap();
    for secret in ["one/nas", &nas.url(), &private.sha256, &private.key] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    let models = fixture.cache.path().join("models");
    fs::write(models.join(format!(".pinned-{}", public.key)), "").unwrap();
    let told = profile(&fixture.operator).await.unwrap();
    assert!(told.models[0].pinned);
}

/// Builds the operator's request for the files of the hub's commit by their own URLs, as a list.
fn wanted_list(
    server: &HubServer,
    files: &[(String, Vec<u8>)],
    (query, holder, token): (&str, &str, &str),
) -> ModelRequest {
    let commit = server.listing()["sha"].as_str().unwrap().to_owned();
    let listed: Vec<HttpFile> = files
        .iter()
        .map(|(name, bytes)| HttpFile {
            url: format!("{}/{REPO}/resolve/{commit}/{name}{query}", server.url()),
            sha256: sha256(bytes),
            path: Some(name.clone()),
        })
        .collect();
    ModelRequest {
        key: files_store_key(&listed, holder),
        holder: holder.to_owned(),
        credentials: (!token.is_empty()).then(|| Credentials {
            token: token.to_owned(),
            ..Credentials::default()
        }),
        files: listed
            .into_iter()
            .map(|file| v1::HttpFile {
                url: file.url,
                sha256: file.sha256,
                path: file.path.unwrap(),
            })
            .collect(),
        ..ModelRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_files_is_fetched_and_named_in_the_profile() {
    let fixture = Fixture::new();
    first_profile(&fixture.operator).await;
    let files = demo_files();
    let server = start(&files).await;
    let request = wanted_list(&server, &files, ("", "", ""));
    let ready = settled(&fixture.operator, &request).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    assert!(fixture.has(&request) && ready.commit.is_empty());
    let told = profile(&fixture.operator).await.unwrap();
    let sources: Vec<&str> = told.models.iter().map(|model| &*model.source).collect();
    let place = format!("{}/{REPO}/resolve/", server.url());
    assert!(sources[0].starts_with(&place), "{sources:?}");
    assert_eq!((sources.len(), told.models[0].bytes), (1, ready.bytes));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_something_secret_opens_is_counted_and_not_named() {
    let fixture = Fixture::new();
    first_profile(&fixture.operator).await;
    let files = demo_files();
    let server = start(&files).await;
    // Whatever the holder says.
    let private = [
        ("?sig=hush", "one/", ""),
        ("?sig=hush", "", ""),
        ("", "one/nas", "t0ken"),
        ("", "", "t0ken"),
    ];
    for (opened_by, count) in private.into_iter().zip(1..) {
        server.pace(Duration::from_millis(20));
        let request = wanted_list(&server, &files, opened_by);
        let began = model_of(&fixture, &request).await;
        assert_eq!(began.state(), ModelState::Fetching, "{opened_by:?}");
        let told = profile(&fixture.operator).await.unwrap();
        assert_eq!(told.models, [], "{opened_by:?} while it is fetched");
        let still = model_of(&fixture, &request).await;
        assert_eq!(still.state(), ModelState::Fetching, "{opened_by:?}");
        server.pace(Duration::ZERO);
        let ready = settled(&fixture.operator, &request).await.pop().unwrap();
        assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
        let told = profile(&fixture.operator).await.unwrap();
        assert_eq!(told.models, [], "{opened_by:?}");
        assert_eq!(told.store.unwrap().models, count);
    }
}

async fn model_of(fixture: &Fixture, request: &ModelRequest) -> ModelResponse {
    model(&fixture.operator, request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gated_repository_is_for_those_whose_token_opens_it() {
    let fixture = Fixture::new();
    let server = start(&demo_files()).await;
    server.open_by("Bearer t0ken");
    let own = wanted(&server, "one/hub", "t0ken", "");
    let ready = settled(&fixture.operator, &own).await.pop().unwrap();
    assert_eq!(ready.state(), ModelState::Ready, "{}", ready.message);
    for other in [
        wanted(&server, "", "", ""),
        wanted(&server, "two/hub", "guess", ""),
    ] {
        let refused = settled(&fixture.operator, &other).await.pop().unwrap();
        assert_eq!(refused.state(), ModelState::Failed);
        assert!(
            refused
                .message
                .contains("acme/demo at main may not be read")
                && refused.message.contains("tokenSecretRef"),
            "{}",
            refused.message
        );
        assert!(!fixture.has(&other));
    }
    // Nobody takes the key of another holder.
    let stolen = ModelRequest {
        key: own.key.clone(),
        ..wanted(&server, "two/hub", "guess", "")
    };
    let refused = fixture.operator.agent().model(stolen).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    // The token is not stored on the disk.
    let found = std::process::Command::new("grep")
        .args(["-r", "-l", "t0ken"])
        .arg(fixture.cache.path())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
}

#[tokio::test]
async fn a_mirror_inside_the_cluster_is_not_fetched_from() {
    let fixture = Fixture::new();
    let server = start(&demo_files()).await;
    let mut request = wanted(&server, "", "", "");
    request.hub.as_mut().unwrap().endpoint = "http://10.43.0.1".to_owned();
    request.cluster_ranges = vec!["10.43.0.0/16".to_owned()];
    let failed = settled(&fixture.operator, &request).await.pop().unwrap();
    assert_eq!(failed.state(), ModelState::Failed);
    assert!(
        failed.message.contains("agent.fetch.allowedRanges"),
        "{}",
        failed.message
    );
}
