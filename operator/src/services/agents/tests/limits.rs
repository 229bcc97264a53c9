//! Agents that hang, and nodes whose profile is never accepted.

use super::*;

#[tokio::test]
async fn an_agent_that_never_ends_its_answer_delays_no_other_and_is_given_up() {
    let mut fixture = Fixture::start().await;
    // Longer than a busy machine takes for all of this.
    let call_timeout = 6 * CALL_TIMEOUT;
    fixture.restart(call_timeout, Duration::ZERO);
    fixture.played.is_stuck.store(true, Ordering::Relaxed);
    let source = |digit: &str| HttpSource {
        url: "http://nas.lan/m.tar".to_owned(),
        sha256: digit.repeat(64),
        ..HttpSource::default()
    };
    let (one, two) = (source("a"), source("b"));
    let view = |agents: &Agents<Paper>, source: &HttpSource, node: &str| {
        agents.fetches(&source.store_key("default")).remove(node)
    };
    let (demo, other) = (Key::new("default", "demo"), Key::new("default", "other"));
    fixture
        .agents
        .want(&demo, &fetched(&one), &["a".to_owned()], None);
    tokio::time::sleep(2 * FETCH_EVERY).await;
    fixture
        .agents
        .want(&other, &fetched(&two), &["gone".to_owned()], None);
    let began = Instant::now();
    until("the other node", || view(&fixture.agents, &two, "gone")).await;
    assert!(view(&fixture.agents, &one, "a").is_none(), "it is stuck");
    assert!(began.elapsed() < call_timeout);

    let want = |agents: &Agents<Paper>| {
        agents.want(&demo, &fetched(&one), &["a".to_owned()], None);
    };
    // An operator that has just started does not take it for lost at once.
    fixture.restart(Duration::from_millis(300), SILENCE);
    want(&fixture.agents);
    tokio::time::sleep(2 * FETCH_EVERY).await;
    assert_eq!(view(&fixture.agents, &one, "a"), None);

    fixture.restart(Duration::from_millis(300), Duration::ZERO);
    want(&fixture.agents);
    until("the end of the call", || {
        let view = view(&fixture.agents, &one, "a");
        matches!(view, Some(FetchView::Unknown(why)) if why.contains("no answer within 0.3 s"))
            .then_some(())
    })
    .await;
    fixture.played.is_stuck.store(false, Ordering::Relaxed);
    *fixture.played.models.lock().expect("models") = vec![ModelResponse {
        state: ModelState::Failed.into(),
        ..ModelResponse::default()
    }];
    until("an answer", || {
        let view = view(&fixture.agents, &one, "a");
        matches!(view, Some(FetchView::Failed(_))).then_some(())
    })
    .await;
}

#[test]
fn a_node_whose_profile_is_never_accepted_is_asked_less_and_less() {
    let (mut asked, mut now) = (Asked::default(), Instant::now());
    let mut waits = Vec::new();
    for _ in 0..80 {
        let began = now;
        while !asked.is_due(false, now) {
            now += Duration::from_secs(1);
        }
        waits.push((now - began).as_secs());
        asked.begin(now);
        assert!(!asked.is_due(false, now + PROFILE_EVERY), "it is running");
        asked.heard(&Err("rejected".to_owned()));
    }
    assert_eq!(waits[..3], [0, 2, 2]);
    assert!(waits.is_sorted(), "{waits:?}");
    assert_eq!(waits.last(), Some(&PROFILE_EVERY.as_secs()));
    asked.heard(&Ok(()));
    assert!(asked.is_due(false, now + FIRST_PROFILE_EVERY));
    assert!(!asked.is_due(true, now + FIRST_PROFILE_EVERY));
}
