//! Models that one node's agent gives to another's.

use hearth_crds::HuggingFaceSource;
use hearth_transport::v1::SeedResponse;

use super::links::with_b;
use super::*;

/// An agent's answer about the model.
fn answer(state: ModelState, commit: &str, from_node: &str) -> ModelResponse {
    let facts = include_str!("../../../../../models/hearth-demo/facts.json");
    let facts_json = match state {
        ModelState::Ready => facts,
        _ => "",
    };
    ModelResponse {
        state: state.into(),
        facts_json: facts_json.to_owned(),
        commit: commit.to_owned(),
        from_node: from_node.to_owned(),
        ..ModelResponse::default()
    }
}

#[tokio::test]
async fn who_lacks_a_model_is_told_who_gives_it() {
    let fixture = Fixture::start().await;
    let b = with_b(&fixture).await;
    let hub = HuggingFaceSource {
        repo: "acme/poems".to_owned(),
        revision: None,
        token_secret_ref: None,
    };
    let key = hub.store_key("one");
    let source = ModelSource {
        hugging_face: Some(hub),
        ..ModelSource::default()
    };
    let commit = "c".repeat(40);
    let says = |played: &Played, answer| *played.models.lock().expect("models") = vec![answer];
    says(&b, answer(ModelState::Ready, &commit, ""));
    says(&fixture.played, answer(ModelState::Absent, "", ""));
    let demo = Key::new("one", "demo");
    let view = |node: &str| fixture.agents.fetches(&key).remove(node);
    fixture.agents.want(&demo, &source, &["b".to_owned()], None);
    until("b has it", || {
        matches!(view("b"), Some(FetchView::Ready { .. })).then_some(())
    })
    .await;
    // Its agent is of an older version, and gives nothing: the model comes from the hub.
    let nodes = ["a", "b"].map(str::to_owned);
    fixture.agents.want(&demo, &source, &nodes, None);
    let asked = || {
        let asked = fixture.played.asked.lock().expect("asked").clone();
        let of_hub = asked.into_iter().filter(|asked| asked.hub.is_some());
        of_hub.collect::<Vec<_>>()
    };
    until("a is asked", || asked().pop()).await;
    assert_eq!(asked()[0].seed, None);
    assert_eq!(asked()[0].hub.clone().expect("hub").commit, commit);
    assert!(!b.given.lock().expect("given").is_empty());

    *b.seed.lock().expect("seed") = Ok(SeedResponse { port: 4711 });
    let place = until("a is told of b", || asked().pop()?.seed).await;
    assert_eq!(place.endpoint, "127.0.0.2:4711");
    let given = b.given.lock().expect("given").last().cloned();
    let given = given.expect("a request");
    assert_eq!(
        (&given.key, &given.commit, given.port),
        (&key, &commit, 9404)
    );
    let ends = [(place.end, "b"), (given.end, "a")];
    for (end, peer) in ends {
        let end = end.expect("end");
        assert_eq!(end.peer, peer);
        assert_eq!(end.peer_tls_name, format!("{peer}.link.agent.hearth"));
    }

    // While it is taken, nobody is asked to give it again.
    says(&fixture.played, answer(ModelState::Fetching, "", "b"));
    until("a takes it", || {
        matches!(view("a"), Some(FetchView::Fetching { from_node: Some(node), .. }) if node == "b")
            .then_some(())
    })
    .await;
    let count = || b.given.lock().expect("given").len();
    let (before, asked_before) = (count(), asked().len());
    until("a is asked again", || {
        (asked().len() > asked_before + 1).then_some(())
    })
    .await;
    assert_eq!(count(), before);
}
