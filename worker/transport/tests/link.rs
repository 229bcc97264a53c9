//! Measuring a link over real sockets, with mutual TLS.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::time::Duration;

use common::certificates::Authority;
use hearth_transport::{Endpoint, LinkError, Listener, Tls, TlsNames, answer_link, measure_link};

const PATIENCE: Duration = Duration::from_secs(20);

/// One end of the link between `own` and `peer`.
fn end(authority: &Authority, own: &str, peer: &str) -> Tls {
    let (cert, key) = authority.sign(own);
    let names = TlsNames {
        server: Some(peer.to_owned()),
        clients: vec![peer.to_owned()],
    };
    let base = Tls::read(&authority.issue("base", "agent.hearth")).unwrap();
    base.beside(&cert, &key, &names).unwrap()
}

fn bind() -> (Listener, Endpoint) {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let endpoint = listener.address().to_string().parse().unwrap();
    (listener, endpoint)
}

#[tokio::test]
async fn a_link_has_a_latency_and_a_bandwidth() {
    let directory = tempfile::tempdir().unwrap();
    let ours = Authority::new(directory.path(), "ours");
    let (listener, endpoint) = bind();
    let (a, b) = (
        end(&ours, "a.link", "b.link"),
        end(&ours, "b.link", "a.link"),
    );
    let (measured, answered) = tokio::join!(
        measure_link("b", &endpoint, &a, PATIENCE),
        answer_link("a", listener, b, PATIENCE),
    );
    answered.unwrap();
    let rates = measured.unwrap();
    println!("{rates:?}");
    assert!(rates.gbps.is_finite() && rates.gbps > 0.0, "{rates:?}");
    assert!(rates.rtt_us.is_finite() && rates.rtt_us > 0.0, "{rates:?}");
    // It was for one measurement.
    let again = measure_link("b", &endpoint, &a, PATIENCE)
        .await
        .unwrap_err();
    assert!(matches!(again, LinkError::Unreachable { .. }), "{again}");
}

#[tokio::test]
async fn a_stranger_is_not_answered_and_keeps_nobody_from_it() {
    let directory = tempfile::tempdir().unwrap();
    let ours = Authority::new(directory.path(), "ours");
    let (listener, endpoint) = bind();
    let (a, b) = (
        end(&ours, "a.link", "b.link"),
        end(&ours, "b.link", "a.link"),
    );
    let answering = tokio::spawn(answer_link("a", listener, b, PATIENCE));
    // One that says nothing, another node's agent, and one that expects another.
    let _silent = tokio::net::TcpStream::connect((endpoint.host(), endpoint.port())).await;
    for stranger in [
        end(&ours, "c.link", "b.link"),
        end(&ours, "a.link", "c.link"),
    ] {
        let refused = measure_link("node b", &endpoint, &stranger, PATIENCE).await;
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("node b"), "{error}");
    }
    let measured = measure_link("b", &endpoint, &a, PATIENCE).await;
    assert!(measured.is_ok(), "{measured:?}");
    answering.await.unwrap().unwrap();
}

#[tokio::test]
async fn both_ends_give_up_by_themselves() {
    let directory = tempfile::tempdir().unwrap();
    let ours = Authority::new(directory.path(), "ours");
    let tls = || end(&ours, "a.link", "b.link");
    let short = Duration::from_millis(300);
    // A peer that accepts the connection and says nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = silent.local_addr().unwrap().to_string().parse().unwrap();
    let error = measure_link("node b", &endpoint, &tls(), short).await;
    let words = "node b did not do its part within 0.3 s";
    assert_eq!(error.unwrap_err().to_string(), words);
    let (listener, _) = bind();
    let error = answer_link("node b", listener, tls(), short).await;
    assert_eq!(error.unwrap_err().to_string(), words);
}
