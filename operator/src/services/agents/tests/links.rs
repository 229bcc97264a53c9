//! Links, as two agents measure them for the operator.

use hearth_crds::LinkProfile;
use hearth_transport::tonic::Status;
use hearth_transport::v1::MeasureLinkResponse;

use super::*;

/// Node `b` beside node `a`, with profiles of both.
pub(super) async fn with_b(fixture: &Fixture) -> Arc<Played> {
    let played = Arc::new(Played::default());
    *played.token.lock().expect("token") = "of b".to_owned();
    let address = format!("127.0.0.2:{}", fixture.agents.port);
    serve_agent(&fixture.directory.api, played.clone(), &address);
    let mut b = place("b", "uid-b");
    b.address = "127.0.0.2".to_owned();
    fixture.directory.more.lock().expect("more").push(b);
    for (played, node) in [(&fixture.played, "a"), (&played, "b")] {
        *played.node.lock().expect("node") = node.to_owned();
        until("a profile", || fixture.directory.profile(node)).await;
    }
    played
}

fn says(played: &Played, gbps: f64, rtt_us: f64) {
    *played.link.lock().expect("link") = Ok(MeasureLinkResponse { gbps, rtt_us });
}

fn link(peer: &str, gbps: f64, rtt_us: f64) -> LinkProfile {
    let peer = peer.to_owned();
    LinkProfile { peer, gbps, rtt_us }
}

#[tokio::test]
async fn agents_measure_their_links_and_each_profile_has_its_own() {
    let fixture = Fixture::start().await;
    says(&fixture.played, 0.117, 300.0);
    let b = with_b(&fixture).await;
    says(&b, 0.2, 280.0);
    let links = |node: &str| {
        let profile = fixture.directory.profile(node);
        profile.map_or_else(Vec::new, |profile| profile.links)
    };
    for (node, expected) in [("a", link("b", 0.117, 300.0)), ("b", link("a", 0.2, 280.0))] {
        until("a link", || (!links(node).is_empty()).then_some(())).await;
        assert_eq!(links(node), [expected]);
    }
    // Each was told of the other, with a certificate that is good for that alone.
    let measured = fixture.played.measured.lock().expect("measured").clone();
    let [measured] = &measured[..] else {
        panic!("{measured:?}");
    };
    assert_eq!(measured.endpoint, "127.0.0.2:9404");
    let end = measured.end.clone().expect("end");
    assert_eq!(
        (&*end.peer, &*end.peer_tls_name),
        ("b", "b.link.agent.hearth")
    );
    let awaited = b.awaited.lock().expect("awaited")[0].clone();
    let end_of_b = awaited.end.expect("end");
    assert_eq!(
        (&*end_of_b.peer, &*end_of_b.peer_tls_name),
        ("a", "a.link.agent.hearth")
    );
    assert_eq!(awaited.port, 9404);
    for (certificate, key) in [
        (end.certificate, &fixture.played.key),
        (end_of_b.certificate, &b.key),
    ] {
        let tls = fixture.played.tls.lock().expect("tls").clone();
        let fits = tls.expect("tls").beside(
            &certificate,
            &key.serialize_pem(),
            &TlsNames::for_operator(),
        );
        assert!(fits.is_ok());
    }
    // Another operator takes them from the profiles, and measures nothing again; what agents say does not remove them.
    tokio::time::sleep(Duration::from_millis(5500)).await;
    assert_eq!(b.measured.lock().expect("measured").len(), 1);
    let mut fixture = fixture;
    fixture.restart(CALL_TIMEOUT, Duration::ZERO);
    tokio::time::sleep(Duration::from_millis(5500)).await;
    assert_eq!(b.measured.lock().expect("measured").len(), 1);
    assert_eq!(
        fixture.directory.profile("b").expect("profile").links,
        [link("a", 0.2, 280.0)]
    );
    // A node that leaves is nobody's peer.
    fixture.directory.more.lock().expect("more").clear();
    let agent = fixture.agents.agents().remove(0);
    fixture
        .agents
        .refresh_profile(&agent)
        .await
        .expect("profile");
    assert!(
        fixture
            .directory
            .profile("a")
            .expect("profile")
            .links
            .is_empty()
    );
}

#[tokio::test]
async fn a_link_that_cannot_be_measured_keeps_its_value_and_stops_nothing() {
    let fixture = Fixture::start().await;
    let b = with_b(&fixture).await;
    // The loop has its own turns.
    fixture.running.abort();
    let agents = fixture.agents.agents();
    let take = async || fixture.agents.take_link(&agents[0], &agents[1]).await;
    let links = || fixture.directory.profile("a").expect("profile").links;
    let why = take().await.expect_err("no link");
    assert!(why.contains("an older version"), "{why}");
    assert!(links().is_empty());
    says(&fixture.played, 0.117, 300.0);
    take().await.expect("measured");
    assert_eq!(links(), [link("b", 0.117, 300.0)]);

    *fixture.played.link.lock().expect("link") = Err(Status::internal("nobody answers"));
    let why = take().await.expect_err("no link");
    let words = ["agent of node a", "nobody answers"];
    assert!(words.iter().all(|words| why.contains(words)), "{why}");
    for (gbps, rtt_us) in [
        (0.0, 300.0),
        (-1.0, 300.0),
        (f64::NAN, 300.0),
        (f64::INFINITY, 300.0),
        (0.117, f64::NAN),
        (1e300, 300.0),
    ] {
        says(&fixture.played, gbps, rtt_us);
        let why = take().await.expect_err("no link");
        assert!(why.contains("which no link has"), "{why}");
    }
    // A little slower is the same link, half as fast is not.
    says(&fixture.played, 0.1, 310.0);
    take().await.expect("measured");
    assert_eq!(links(), [link("b", 0.117, 300.0)]);
    says(&fixture.played, 0.05, 310.0);
    take().await.expect("measured");
    assert_eq!(links(), [link("b", 0.05, 310.0)]);

    // The other end does not prove its identity any more.
    *b.token.lock().expect("token") = TOKEN.to_owned();
    let forget = |node: &str| {
        fixture
            .agents
            .certified
            .lock()
            .expect("certified")
            .remove(node)
    };
    forget("b");
    let why = take().await.expect_err("an impostor");
    let words = ["agent of node b", "another Pod"];
    assert!(words.iter().all(|words| why.contains(words)), "{why}");
    assert_eq!(links(), [link("b", 0.05, 310.0)]);
}
