//! Models of a hub, and agents that do not know one.

use hearth_crds::HuggingFaceSource;

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
    fixture.agents.want(&demo, &source, &["a".to_owned()]);
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
        matches!(view(), Some(FetchView::Unknown(why)) if why.contains("older version"))
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
