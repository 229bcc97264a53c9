//! Addresses that models are fetched from, servers that see the credentials, and reports about non-public servers.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_crds::{HttpFile, HttpSource};
use hearth_fetch::{
    AddressPolicy, Cache, Credentials, FaultOrigin, FetchError, FetchOptions, Key, Phase, Progress,
    Source, fetch,
};
use support::{Fault, FileServer, model_tar, sha256};
use tempfile::TempDir;

/// Time after which failures of private servers are reported.
const PATIENCE: Duration = Duration::from_secs(2);

/// Options like those of an agent in a cluster, on a machine where the tests' range is open.
fn inside(allowed: &str) -> FetchOptions {
    let cluster = vec!["127.0.3.0/24".parse().unwrap()];
    FetchOptions {
        attempts: 2,
        first_backoff: Duration::from_millis(20),
        max_backoff: Duration::from_millis(20),
        reserve_bytes: 0,
        private_patience: PATIENCE,
        address_policy: AddressPolicy::outside(cluster, vec![allowed.parse().unwrap()]),
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

/// Returns the error of a fetch that fails; checks that it is reported at a multiple of the patience.
async fn told_of(source: &Source, options: &FetchOptions) -> String {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let observer = move |progress: &Progress| sink.lock().unwrap().push(progress.clone());
    let directory = TempDir::new().unwrap();
    let cache = Cache::new(directory.path());
    let began = Instant::now();
    let error = fetch(source, &cache, options, Arc::new(observer))
        .await
        .unwrap_err();
    let elapsed = began.elapsed();
    assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
    assert_eq!(error.fault_origin(), FaultOrigin::Unknown);
    assert!(elapsed >= PATIENCE, "told after {elapsed:?}: {error}");
    let past_ms = elapsed.as_millis() % PATIENCE.as_millis();
    assert!(past_ms < 1200, "told after {elapsed:?}: {error}");
    for progress in &*seen.lock().unwrap() {
        let sizes = (
            progress.bytes,
            progress.total_bytes,
            progress.bytes_per_second,
        );
        assert_eq!((sizes, &progress.trouble), ((0, None, 0), &None));
    }
    error.to_string()
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
        assert_eq!(error.fault_origin(), FaultOrigin::Request);
        assert!(error.to_string().contains("allowedRanges"), "{error}");
        assert!(server.seen().is_empty(), "{host} was asked");
        let anywhere = FetchOptions {
            reserve_bytes: 0,
            ..FetchOptions::default()
        };
        // Users who fetch for themselves reach all of it.
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
    // Nor is a second one, or a name that resolves to it.
    let port = other.address().port();
    open.faults([
        redirect(&open.url()),
        redirect(&format!("http://localhost:{port}/m.tar")),
    ]);
    let error = fetched(&source, &inside("127.0.0.2/32")).await.unwrap_err();
    assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    // Where both are allowed, it is followed.
    open.faults([redirect(&other.url())]);
    fetched(&source, &inside("127.0.0.0/30")).await.unwrap();
    assert_eq!(other.seen().len(), 1);
}

/// Keeps those who may name URLs from scanning a network through errors: which ports are open, which paths exist.
#[tokio::test]
async fn of_a_server_inside_only_that_it_gave_no_such_archive_is_told() {
    let page = "an answer of somebody's ".repeat(100).into_bytes();
    let server = FileServer::start(page.clone()).await;
    let source = Source::new(&server.url(), &sha256(b"something else")).unwrap();
    let mut told = Vec::new();
    let faults = [
        Some(Fault::Status(404, Vec::new())),
        Some(Fault::Status(401, Vec::new())),
        Some(Fault::Status(418, Vec::new())),
        Some(Fault::Status(503, vec![("retry-after", "4000".to_owned())])),
        Some(redirect("/in/a/circle")),
        Some(Fault::StallAfter(500)),
        None,
    ];
    for fault in faults {
        let times = match fault {
            Some(Fault::Status(302, _)) => 12,
            Some(Fault::StallAfter(_)) => 2,
            _ => 1,
        };
        let fault = fault.into_iter().collect::<Vec<_>>();
        server.faults(fault.into_iter().cycle().take(times));
        told.push(told_of(&source, &inside("127.0.0.1/32")).await);
    }
    // A disk without room would reveal the answer's length.
    let full = FetchOptions {
        reserve_bytes: 1 << 60,
        ..inside("127.0.0.1/32")
    };
    told.push(told_of(&source, &full).await);
    // A port without a listener.
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let url = format!("http://{closed}/models/model.tar");
    let gone = Source::new(&url, source.sha256().unwrap()).unwrap();
    let error = told_of(&gone, &inside("127.0.0.1/32")).await;
    told.push(error.replace(&url, &server.url()));
    told.dedup();
    assert_eq!(told.len(), 1, "{told:#?}");
    // Without the port, whose digits are arbitrary.
    let words = told[0].replace(&server.url(), "");
    for secret in ["404", "refused", "4000", &sha256(&page)] {
        assert!(!words.contains(secret), "{words}");
    }
    assert!(told[0].contains("log of this node's agent"), "{}", told[0]);
}

/// Limits what the time of the next try reveals to what the progress showed: for archives, whether all of it arrived.
#[tokio::test]
async fn that_a_part_is_gone_on_with_is_said_of_archives_alone() {
    let archive = model_tar(1_000_000);
    let page = "an answer of somebody's ".repeat(50_000).into_bytes();
    let wrong = sha256(b"something else");
    for (file, breaks, expected) in [
        (&archive, true, false),
        (&archive, false, true),
        (&page, true, true),
        (&page, false, true),
    ] {
        let server = FileServer::start(file.clone()).await;
        if breaks {
            let off = Fault::Status(503, Vec::new());
            server.faults([Fault::CutAfter(500_000), off.clone(), off]);
        }
        let source = Source::new(&server.url(), &wrong).unwrap();
        let error = fetched(&source, &inside("127.0.0.1/32")).await.unwrap_err();
        assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
        assert_eq!(error.costs_all_again(), expected, "{breaks} {error:?}");
    }
}

#[tokio::test]
async fn what_an_ended_process_left_of_a_server_inside_is_kept_back_too() {
    let (body, wanted) = (b"an answer of somebody's".as_slice(), sha256(b"a model"));
    let source = Source::new("http://localhost:9/m.tar", &wanted).unwrap();
    let directory = TempDir::new().unwrap();
    let partial = directory.path().join("partial");
    std::fs::create_dir_all(&partial).unwrap();
    std::fs::write(partial.join(format!("{}.part", source.key())), body).unwrap();
    let facts = format!("{{\"url_sha256\":\"\",\"total_bytes\":{}}}", body.len());
    std::fs::write(partial.join(format!("{}.json", source.key())), facts).unwrap();
    let cache = Cache::new(directory.path());
    let nothing = Arc::new(|_: &Progress| {});
    let error = fetch(&source, &cache, &inside("127.0.0.1/32"), nothing).await;
    let error = error.unwrap_err();
    assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
    assert!(!error.to_string().contains(&sha256(body)), "{error}");
}

#[tokio::test]
async fn sizes_are_told_of_archives() {
    let archive = model_tar(3_000_000);
    let server = FileServer::start(archive.clone()).await;
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    let directory = TempDir::new().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let observer = move |progress: &Progress| sink.lock().unwrap().push(progress.clone());
    let cache = Cache::new(directory.path());
    let options = inside("127.0.0.1/32");
    fetch(&source, &cache, &options, Arc::new(observer))
        .await
        .unwrap();
    let seen = seen.lock().unwrap();
    let length = Some(archive.len() as u64);
    let told = |phase| {
        let mut of_phase = seen.iter().filter(|progress| progress.phase == phase);
        of_phase.any(|progress| progress.total_bytes == length)
    };
    assert!(
        told(Phase::Downloading) && told(Phase::Unpacking),
        "{seen:?}"
    );
}

/// All progress that a fetch into this cache reported.
async fn progress_in(
    directory: &TempDir,
    source: &Source,
    options: &FetchOptions,
) -> (Result<PathBuf, FetchError>, Vec<Progress>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let observer = move |progress: &Progress| sink.lock().unwrap().push(progress.clone());
    let cache = Cache::new(directory.path());
    let work = fetch(source, &cache, options, Arc::new(observer));
    let outcome = tokio::time::timeout(Duration::from_secs(60), work);
    let outcome = outcome.await.expect("it hangs");
    let seen = seen.lock().unwrap().clone();
    (outcome, seen)
}

/// Keeps a server that begins an archive and then redirects from learning the length of the other server's file.
#[tokio::test]
async fn no_size_is_told_of_what_another_server_goes_on_with() {
    let archive = model_tar(1_000_000);
    let page = vec![b'x'; archive.len()];
    let options = inside("127.0.0.0/30");
    let off = || {
        [
            Fault::Status(503, Vec::new()),
            Fault::Status(503, Vec::new()),
        ]
    };
    let mut told = Vec::new();
    // The other server has it or not; it sends all of it or breaks off.
    for fault in [
        None,
        Some(Fault::CutAfter(300_000)),
        Some(Fault::Status(404, Vec::new())),
    ] {
        let server = FileServer::start(archive.clone()).await;
        let other = FileServer::start_at("127.0.0.2", page.clone()).await;
        other.pace(Duration::from_millis(5));
        other.faults(fault.clone());
        server.faults([Fault::CutAfter(600), redirect(&other.url())]);
        server.faults(off());
        let source = Source::new(&server.url(), &sha256(b"something else")).unwrap();
        let directory = TempDir::new().unwrap();
        let (outcome, seen) = progress_in(&directory, &source, &options).await;
        let error = outcome.unwrap_err();
        assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
        assert!(error.costs_all_again(), "{error:?}");
        let asked = other.seen();
        assert_eq!(asked[0].range.as_deref(), Some("bytes=600-"), "{asked:?}");
        told.extend(seen.iter().map(|progress| progress.bytes));
        if matches!(fault, Some(Fault::CutAfter(_))) {
            // Nor by the next process, which asks only the first server.
            server.faults(off());
            let (outcome, seen) = progress_in(&directory, &source, &options).await;
            let error = outcome.unwrap_err();
            assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
            assert!(error.costs_all_again(), "{error:?}");
            assert!(seen.iter().all(|it| it.bytes == 0), "{seen:?}");
        }
    }
    assert!(told.iter().all(|&bytes| bytes <= 600), "{told:?}");
}

#[tokio::test]
async fn sizes_are_told_when_the_server_of_an_archive_goes_on_with_it() {
    let archive = model_tar(1_000_000);
    let server = FileServer::start(archive.clone()).await;
    let other = FileServer::start_at("127.0.0.2", archive.clone()).await;
    other.pace(Duration::from_millis(5));
    other.faults([Fault::CutAfter(300_000)]);
    server.faults([redirect(&other.url()), redirect(&other.url())]);
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    let options = inside("127.0.0.0/30");
    let (outcome, seen) = progress_in(&TempDir::new().unwrap(), &source, &options).await;
    outcome.unwrap();
    assert_eq!(other.seen().len(), 2);
    let length = archive.len() as u64;
    let mut seen = seen.iter();
    let is_told = |it: &Progress| it.bytes > 310_000 && it.total_bytes == Some(length);
    assert!(seen.any(|it| it.phase == Phase::Downloading && is_told(it)));
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

    // The server that this one redirects to learns neither the credentials nor the query.
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
    // Nor where it leads on to itself, or back.
    server.faults([redirect(&elsewhere.url())]);
    elsewhere.faults([redirect("/elsewhere")]);
    fetched(&led, &options).await.unwrap();
    assert!(elsewhere.seen().iter().all(|it| it.authorization.is_none()));
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
    // Another user with the same digest brings their own, or has none.
    server.faults([Fault::Status(404, Vec::new())]);
    let theirs = Key::parse(&"b".repeat(32)).unwrap();
    let other = Source::new(&server.url(), &sha)
        .unwrap()
        .kept_as(theirs.clone());
    let refused = fetch(&other, &cache, &options, nothing).await.unwrap_err();
    assert!(matches!(refused, FetchError::NotFound { .. }), "{refused}");
    assert_eq!(cache.model(&theirs), None);
}

#[tokio::test]
async fn a_server_inside_without_ranges_that_breaks_is_tried_as_often_as_others() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    // Each try takes longer than the patience, and only the first brings a new byte.
    let cuts = [900_000, 800_000, 800_000];
    server.faults(cuts.map(Fault::IgnoreRangeAndCutAfter));
    server.pace(Duration::from_millis(12));
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    let options = FetchOptions {
        attempts: 4,
        ..inside("127.0.0.1/32")
    };
    fetched(&source, &options).await.unwrap();
    assert_eq!(server.seen().len(), cuts.len() + 1);
}

/// Of each file of a list as little is told as of an archive, and weights show how far they are.
#[tokio::test]
async fn a_list_reveals_no_more_than_an_archive() {
    let config = b"{}".to_vec();
    let mut weights = 2_u64.to_le_bytes().to_vec();
    weights.extend(b"{}");
    weights.extend(support::noise(600_000, 3));
    let (small, large) = (
        FileServer::start(config.clone()).await,
        FileServer::start(weights.clone()).await,
    );
    let source = |weights_sha256: String| {
        let file = |server: &FileServer, path: &str, sha256: String| HttpFile {
            url: server.url(),
            sha256,
            path: Some(path.to_owned()),
        };
        Source::of_files(&HttpSource {
            files: vec![
                file(&small, "config.json", sha256(&config)),
                file(&large, "model.safetensors", weights_sha256),
            ],
            ..HttpSource::default()
        })
        .unwrap()
    };
    let right = source(sha256(&weights));
    small.faults([Fault::Status(404, Vec::new())]);
    let words = told_of(&right, &inside("127.0.0.1/32")).await;
    assert!(!words.contains("404"), "{words}");

    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let observer = move |progress: &Progress| sink.lock().unwrap().push(progress.clone());
    let directory = TempDir::new().unwrap();
    let cache = Cache::new(directory.path());
    large.pace(Duration::from_millis(50));
    let options = inside("127.0.0.1/32");
    let fetched = fetch(&right, &cache, &options, Arc::new(observer)).await;
    assert!(fetched.unwrap().join("model.safetensors").is_file());
    let most = seen.lock().unwrap().iter().map(|it| it.bytes).max();
    assert!(most > Some(100_000), "{most:?}");
    assert_eq!(large.seen().len(), 1, "its length is not asked for");

    // A page of an internal server is no weights.
    large.pace(Duration::ZERO);
    large.replace(vec![b'x'; 600_000], None);
    let wrong = source(sha256(b"something else"));
    let directory = TempDir::new().unwrap();
    let cache = Cache::new(directory.path());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let observer = move |progress: &Progress| sink.lock().unwrap().push(progress.clone());
    let error = fetch(&wrong, &cache, &options, Arc::new(observer)).await;
    let error = error.unwrap_err();
    assert!(matches!(error, FetchError::KeptBack { .. }), "{error}");
    let most = seen.lock().unwrap().iter().map(|it| it.bytes).max();
    assert!(most <= Some(config.len() as u64), "{most:?}");
}
