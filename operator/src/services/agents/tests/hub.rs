//! Models of a hub, and agents that do not know one.

use hearth_crds::{HttpFile, HuggingFaceSource};
use hearth_transport::tonic::Status;

use super::*;

#[tokio::test]
async fn a_repository_is_asked_for_with_its_token_at_the_hub_that_is_configured() {
    let fixture = Fixture::start().await;
    // An agent of an earlier version finds no URL; the next one fetches.
    let of_state = |state: ModelState| ModelResponse {
        state: state.into(),
        message: "of the agent".to_owned(),
        ..ModelResponse::default()
    };
    *fixture.played.models.lock().expect("models") =
        vec![of_state(ModelState::Absent), of_state(ModelState::Failed)];
    let hub = HuggingFaceSource {
        repo: "acme/poems".to_owned(),
        revision: None,
        token_secret_ref: Some(SecretRef {
            name: "hub".to_owned(),
        }),
    };
    let key = hub.store_key("one");
    let source = ModelSource {
        hugging_face: Some(hub),
        ..ModelSource::default()
    };
    let demo = Key::new("one", "demo");
    fixture.agents.want(&demo, &source, &["a".to_owned()], None);
    let view = || fixture.agents.fetches(&key).remove("a");
    until("the Secret is missed", || {
        matches!(view(), Some(FetchView::Failed(why)) if why.contains("huggingFace.tokenSecretRef is not there"))
            .then_some(())
    })
    .await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "type": "Opaque",
        "data": {"token": "aHVzaA=="},
    });
    let path = "/api/v1/namespaces/one/secrets/hub";
    fixture.directory.api.put(path, secret);
    until("the older agent is told", || {
        matches!(view(), Some(FetchView::Unknown(why)) if why.contains("fetches no models of a hub"))
            .then_some(())
    })
    .await;
    until("the newer agent is told", || {
        matches!(view(), Some(FetchView::Failed(why)) if why == "of the agent").then_some(())
    })
    .await;
    let asked = fixture.played.asked.lock().expect("asked").remove(0);
    let repository = asked.hub.expect("a repository");
    assert_eq!(
        (
            &*repository.endpoint,
            &*repository.repo,
            &*repository.revision
        ),
        ("http://hub.lan", "acme/poems", "main")
    );
    assert_eq!((&*asked.url, &*asked.holder), ("", "one/hub"));
    assert_eq!(asked.credentials.expect("credentials").token, "hush");
}

#[tokio::test]
async fn a_list_of_files_is_asked_for_by_paths_and_an_older_agent_is_told() {
    let fixture = Fixture::start().await;
    *fixture.played.models.lock().expect("models") = vec![ModelResponse {
        state: ModelState::Absent.into(),
        ..ModelResponse::default()
    }];
    let list = HttpSource {
        files: vec![HttpFile {
            url: "http://nas.lan/m/config.json?sig=1".to_owned(),
            sha256: "a".repeat(64),
            path: None,
        }],
        ..HttpSource::default()
    };
    let key = list.store_key("one");
    let source = ModelSource {
        http: Some(list),
        ..ModelSource::default()
    };
    let demo = Key::new("one", "demo");
    fixture.agents.want(&demo, &source, &["a".to_owned()], None);
    until("the older agent is told", || {
        let view = fixture.agents.fetches(&key).remove("a");
        matches!(view, Some(FetchView::Unknown(why)) if why.contains("fetches no models as a list of files"))
            .then_some(())
    })
    .await;
    let asked = fixture.played.asked.lock().expect("asked").remove(0);
    assert_eq!(
        (&*asked.key, &*asked.holder, &*asked.url),
        (&*key, "one/", "")
    );
    assert_eq!(&*asked.files[0].url, "http://nas.lan/m/config.json?sig=1");
    assert_eq!(asked.files[0].path, "config.json");
    // What an agent takes for wrong has failed: it is no agent that is silent.
    let refusal = Status::invalid_argument("files[0].url is odd");
    *fixture.played.refusal.lock().expect("refusal") = Some(refusal);
    until("the refusal is told", || {
        let view = fixture.agents.fetches(&key).remove("a");
        matches!(view, Some(FetchView::Failed(why)) if why == "files[0].url is odd").then_some(())
    })
    .await;
}

/// An operator that was restarted has heard of no node yet.
#[test]
fn the_commit_that_plans_record_is_that_of_all_nodes_whoever_tells_another_one_first() {
    let mut fetches = Fetches::default();
    let [demo, twin] = ["demo", "twin"].map(|name| Key::new("default", name));
    let source = ModelSource {
        hugging_face: Some(HuggingFaceSource {
            repo: "a/b".to_owned(),
            revision: None,
            token_secret_ref: None,
        }),
        ..ModelSource::default()
    };
    let key = source.store_key("default").expect("a key");
    let nodes = |names: &[&str]| -> Vec<String> { names.iter().map(ToString::to_string).collect() };
    let view = FetchView::Fetching {
        bytes: 7,
        total_bytes: 1000,
        bytes_per_second: 5,
        from_node: None,
    };
    let told = |commit: &str| Answer {
        view: view.clone(),
        commit: commit.to_owned(),
    };
    let now = Instant::now();
    fetches.want(&demo, &source, &nodes(&["a", "b"]), Some("c1"));
    let polls = fetches.due(now);
    let asked: Vec<_> = polls.iter().map(|it| (&*it.node, &*it.commit)).collect();
    assert_eq!(asked, [("a", "c1"), ("b", "c1")]);
    fetches.learn(&polls[0], told("c2"), now);
    assert!(matches!(&fetches.views(&key)["a"], FetchView::Failed(_)));
    fetches.learn(&polls[1], told("c1"), now);
    assert_eq!(fetches.views(&key)["b"], view);
    // One that has no plan yet has the same model, and may come first.
    let mut fetches = Fetches::default();
    fetches.want(&twin, &source, &nodes(&["a"]), None);
    let poll = fetches.due(now).remove(0);
    assert_eq!(poll.commit, "");
    fetches.learn(&poll, told("c2"), now);
    fetches.want(&demo, &source, &nodes(&["b"]), Some("c1"));
    assert_eq!(fetches.commit(&key), Some("c1"));
    let commits: Vec<String> = fetches.due(now).into_iter().map(|it| it.commit).collect();
    assert_eq!(commits, ["c1", "c1"]);
}
