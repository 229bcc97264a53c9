//! From where models are fetched, who sees the credentials, and what is told of servers inside.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hearth_fetch::{
    Blame, Cache, Credentials, FetchError, FetchOptions, Key, Reach, Source, fetch,
};
use support::{Fault, FileServer, model_tar, sha256};
use tempfile::TempDir;

/// Like an agent of a cluster, on a machine where the range of tests is open.
fn inside(allowed: &str) -> FetchOptions {
    let cluster = vec!["127.0.3.0/24".parse().unwrap()];
    FetchOptions {
        attempts: 2,
        first_backoff: Duration::from_millis(20),
        max_backoff: Duration::from_millis(20),
        reserve_bytes: 0,
        reach: Reach::outside(cluster, vec![allowed.parse().unwrap()]),
        ..FetchOptions::default()
    }
}

async fn fetched(source: &Source, options: &FetchOptions) -> Result<PathBuf, FetchError> {
    let directory = TempDir::new().unwrap();
    let cache = Cache::new(directory.path());
    let work = fetch(source, &cache, options, Arc::new(|_| {}));
    let outcome = tokio::time::timeout(Duration::from_secs(60), work);
    outcome.await.expect("it hangs")
}

fn redirect(to: &str) -> Fault {
    Fault::Status(302, vec![("location", to.to_owned())])
}

#[tokio::test]
async fn what_is_inside_is_not_asked() {
    let archive = model_tar(1000);
    let sha = sha256(&archive);
    for (address, host) in [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", "2130706433"),
        ("127.0.0.1", "[::ffff:127.0.0.1]"),
        ("127.0.3.1", "127.0.3.1"),
    ] {
        let server = FileServer::start_at(address, archive.clone()).await;
        let url = format!("http://{host}:{}/m.tar", server.address().port());
        let source = Source::new(&url, &sha).unwrap();
        let error = fetched(&source, &inside("127.0.9.0/24")).await.unwrap_err();
        assert!(
            matches!(error, FetchError::Forbidden { .. }),
            "{host}: {error}"
        );
        assert_eq!(error.blame(), Blame::Request);
        assert!(error.to_string().contains("allowedRanges"), "{error}");
        assert!(server.seen().is_empty(), "{host} was asked");
        let anywhere = FetchOptions {
            reserve_bytes: 0,
            ..FetchOptions::default()
        };
        // Whoever fetches for their own use reaches all of it.
        let own = match host.starts_with('[') {
            true => continue,
            false => fetched(&source, &anywhere).await,
        };
        assert!(own.is_ok(), "{host}: {own:?}");
    }
}

#[tokio::test]
async fn a_redirect_leads_no_further_than_the_url_itself_may() {
    let archive = model_tar(1000);
    let open = FileServer::start(archive.clone()).await;
    let other = FileServer::start_at("127.0.0.2", archive.clone()).await;
    let source = Source::new(&open.url(), &sha256(&archive)).unwrap();
    open.faults([redirect(&other.url())]);
    let error = fetched(&source, &inside("127.0.0.1/32")).await.unwrap_err();
    assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    assert!(other.seen().is_empty(), "the redirect was followed");
    // Neither does a second one, nor a name that resolves to it.
    let port = other.address().port();
    open.faults([
        redirect(&open.url()),
        redirect(&format!("http://localhost:{port}/m.tar")),
    ]);
    let error = fetched(&source, &inside("127.0.0.2/32")).await.unwrap_err();
    assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    // Where both are allowed it is followed.
    open.faults([redirect(&other.url())]);
    fetched(&source, &inside("127.0.0.0/30")).await.unwrap();
    assert_eq!(other.seen().len(), 1);
}

/// Otherwise whoever may name URLs could read a network through the errors: which ports are open, which paths are there.
#[tokio::test]
async fn of_a_server_inside_only_that_it_gave_no_such_archive_is_told() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let source = Source::new(&server.url(), &sha256(b"something else")).unwrap();
    let mut told = Vec::new();
    let faults = [
        Some(Fault::Status(404, Vec::new())),
        Some(Fault::Status(401, Vec::new())),
        Some(Fault::Status(418, Vec::new())),
        Some(Fault::Status(503, vec![("retry-after", "4000".to_owned())])),
        Some(redirect("/in/a/circle")),
        None,
    ];
    for fault in faults {
        let times = match fault {
            Some(Fault::Status(302, _)) => 12,
            _ => 1,
        };
        let fault = fault.into_iter().collect::<Vec<_>>();
        server.faults(fault.into_iter().cycle().take(times));
        let error = fetched(&source, &inside("127.0.0.1/32")).await.unwrap_err();
        assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
        told.push(error.to_string());
    }
    // A port that nobody listens on.
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let url = format!("http://{closed}/models/model.tar");
    let gone = Source::new(&url, source.sha256()).unwrap();
    let error = fetched(&gone, &inside("127.0.0.1/32")).await.unwrap_err();
    told.push(error.to_string().replace(&url, &server.url()));
    told.dedup();
    assert_eq!(told.len(), 1, "{told:#?}");
    for secret in ["404", "refused", "4000", &sha256(&archive)] {
        assert!(!told[0].contains(secret), "{}", told[0]);
    }
    assert!(told[0].contains("log of this node's agent"), "{}", told[0]);
}

#[tokio::test]
async fn credentials_open_the_url_and_go_nowhere_else() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let sha = sha256(&archive);
    let options = FetchOptions {
        attempts: 1,
        reserve_bytes: 0,
        ..FetchOptions::default()
    };
    server.open_by("Bearer t0ken");
    let closed = Source::new(&server.url(), &sha).unwrap();
    let denied = fetched(&closed, &options).await.unwrap_err();
    assert!(matches!(denied, FetchError::Denied { .. }), "{denied}");
    let token = "t0ken".to_owned();
    let opened = closed.clone().opened_by(Credentials::Bearer { token });
    fetched(&opened, &options).await.unwrap();
    // "ann:pw" in base64.
    server.open_by("Basic YW5uOnB3");
    let basic = Credentials::Basic {
        username: "ann".to_owned(),
        password: "pw".to_owned(),
    };
    fetched(&closed.clone().opened_by(basic), &options)
        .await
        .unwrap();

    // Another server, where this one leads, learns neither them nor the query that led there.
    let elsewhere = FileServer::start_at("127.0.0.2", archive.clone()).await;
    server.open_by("Bearer t0ken");
    server.faults([redirect(&elsewhere.url())]);
    let url = format!("{}?signature=hush", server.url());
    let token = "t0ken".to_owned();
    let led = Source::new(&url, &sha)
        .unwrap()
        .opened_by(Credentials::Bearer { token });
    fetched(&led, &options).await.unwrap();
    let seen = elsewhere.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!((&seen[0].authorization, &seen[0].referer), (&None, &None));
}

#[tokio::test]
async fn a_model_lies_under_the_name_that_it_is_asked_for_by() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let sha = sha256(&archive);
    let directory = TempDir::new().unwrap();
    let cache = Cache::new(directory.path());
    let options = FetchOptions {
        reserve_bytes: 0,
        ..FetchOptions::default()
    };
    let mine = Key::parse(&"a".repeat(32)).unwrap();
    let source = Source::new(&server.url(), &sha)
        .unwrap()
        .kept_as(mine.clone());
    let nothing = Arc::new(|_: &hearth_fetch::Progress| {});
    let found = fetch(&source, &cache, &options, nothing.clone())
        .await
        .unwrap();
    assert!(found.ends_with(mine.as_str()));
    // Somebody else with the same digest brings his own, or has none.
    server.faults([Fault::Status(404, Vec::new())]);
    let theirs = Key::parse(&"b".repeat(32)).unwrap();
    let other = Source::new(&server.url(), &sha)
        .unwrap()
        .kept_as(theirs.clone());
    let refused = fetch(&other, &cache, &options, nothing).await.unwrap_err();
    assert!(matches!(refused, FetchError::NotFound { .. }), "{refused}");
    assert_eq!(cache.model(&theirs), None);
}
