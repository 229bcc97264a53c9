//! Downloads from servers that break in every way a server can.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_fetch::{Cache, FaultOrigin, FetchError, FetchOptions, Phase, Progress, Source, fetch};
use support::{Fault, FileServer, Seen, model_tar, noise, sha256, tar_of};
use tempfile::TempDir;

/// Patient enough for a busy machine, quick enough for a test.
fn options() -> FetchOptions {
    FetchOptions {
        stall_timeout: Duration::from_secs(20),
        attempts: 3,
        first_backoff: Duration::from_millis(20),
        max_backoff: Duration::from_millis(50),
        reserve_bytes: 0,
        ..FetchOptions::default()
    }
}

struct Fetcher {
    directory: TempDir,
    source: Source,
    options: FetchOptions,
    progress: Arc<Mutex<Vec<Progress>>>,
}

impl Fetcher {
    fn new(server: &FileServer, sha256: &str) -> Self {
        Self {
            directory: TempDir::new().unwrap(),
            source: Source::new(&server.url(), sha256).unwrap(),
            options: options(),
            progress: Arc::default(),
        }
    }

    async fn fetch(&self) -> Result<PathBuf, FetchError> {
        let seen = Arc::clone(&self.progress);
        let observer =
            Arc::new(move |progress: &Progress| seen.lock().unwrap().push(progress.clone()));
        let cache = Cache::new(self.directory.path());
        let work = fetch(&self.source, &cache, &self.options, observer);
        tokio::time::timeout(Duration::from_secs(60), work)
            .await
            .expect("it hangs")
    }

    /// Names in `partial/`.
    fn parts(&self) -> Vec<String> {
        let entries = fs::read_dir(self.directory.path().join("partial")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    fn part_bytes(&self) -> u64 {
        let name = format!("{}.part", self.source.key());
        let path = self.directory.path().join("partial").join(name);
        fs::metadata(path).map_or(0, |metadata| metadata.len())
    }
}

fn first_byte(seen: &Seen) -> usize {
    let range = seen.range.as_deref().expect("a range");
    let first = range
        .strip_prefix("bytes=")
        .unwrap()
        .strip_suffix('-')
        .unwrap();
    first.parse().unwrap()
}

fn weights(directory: &Path) -> Vec<u8> {
    fs::read(directory.join("model.safetensors")).unwrap()
}

#[tokio::test]
async fn a_model_is_fetched_once() {
    let archive = model_tar(3_000_000);
    let server = FileServer::start(archive.clone()).await;
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    let directory = fetcher.fetch().await.unwrap();
    let key = &sha256(&archive)[..32];
    assert_eq!(directory, fetcher.directory.path().join("models").join(key));
    assert_eq!(weights(&directory), noise(3_000_000, 7));
    assert_eq!(fetcher.parts(), [""; 0]);

    let progress = fetcher.progress.lock().unwrap().clone();
    let phases: Vec<Phase> = progress.iter().map(|progress| progress.phase).collect();
    assert!(
        phases.contains(&Phase::Downloading) && phases.contains(&Phase::Unpacking),
        "{phases:?}"
    );
    let downloading = progress
        .iter()
        .find(|p| p.phase == Phase::Downloading)
        .unwrap();
    assert_eq!(downloading.total_bytes, Some(archive.len() as u64));

    // It is already there: no server is asked.
    assert_eq!(fetcher.fetch().await.unwrap(), directory);
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn a_cut_connection_goes_on_where_it_broke() {
    let archive = model_tar(2_000_000);
    for cuts in [
        vec![1],
        vec![archive.len() - 1],
        vec![700_001, 600_000, 500_000],
        vec![0, 100],
    ] {
        let server = FileServer::start(archive.clone()).await;
        server.faults(cuts.iter().map(|&bytes| Fault::CutAfter(bytes)));
        let fetcher = Fetcher::new(&server, &sha256(&archive));
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(weights(&directory), noise(2_000_000, 7), "{cuts:?}");

        let seen = server.seen();
        assert_eq!(seen.len(), cuts.len() + 1, "{cuts:?}");
        let received: usize = cuts.iter().sum();
        if received > 0 {
            let last = seen.last().unwrap();
            assert_eq!(first_byte(last), received, "{cuts:?}");
            assert_eq!(last.if_range.as_deref(), Some("\"one\""));
        }
        assert_eq!(
            server.sent_bytes(),
            archive.len(),
            "{cuts:?}: bytes came twice"
        );
    }
}

#[tokio::test]
async fn a_later_fetch_goes_on_and_checks_all_bytes() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::CutAfter(1_200_000), Fault::Status(403, Vec::new())]);
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    let error = fetcher.fetch().await.unwrap_err();
    assert!(matches!(error, FetchError::Denied { .. }), "{error}");
    assert_eq!(fetcher.part_bytes(), 1_200_000);
    fetcher.fetch().await.unwrap();
    assert_eq!(first_byte(&server.seen()[2]), 1_200_000);
    assert_eq!(server.sent_bytes(), archive.len());
    let progress = fetcher.progress.lock().unwrap();
    assert!(
        progress
            .iter()
            .any(|p| p.phase == Phase::Checking && p.bytes > 0)
    );
}

#[tokio::test]
async fn bytes_that_were_spoilt_on_disk_are_found() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::CutAfter(1_200_000), Fault::Status(403, Vec::new())]);
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    fetcher.fetch().await.unwrap_err();
    let part = fetcher
        .directory
        .path()
        .join("partial")
        .join(format!("{}.part", fetcher.source.key()));
    let mut bytes = fs::read(&part).unwrap();
    bytes[1000] ^= 1;
    fs::write(&part, bytes).unwrap();
    let error = fetcher.fetch().await.unwrap_err();
    assert!(matches!(error, FetchError::Mismatch { .. }), "{error}");
    // The spoilt bytes are gone: the next fetch succeeds.
    fetcher.fetch().await.unwrap();
}

#[tokio::test]
async fn a_file_that_changed_meanwhile_is_fetched_from_its_start() {
    let (old, new) = (model_tar(2_000_000), model_tar(1_500_000));
    for etag in [Some("\"two\""), None] {
        let server = FileServer::start(old.clone()).await;
        if etag.is_none() {
            // Without a validator, the length decides.
            server.replace(old.clone(), None);
        }
        server.faults([Fault::CutAfter(1_000_000), Fault::Status(403, Vec::new())]);
        let fetcher = Fetcher::new(&server, &sha256(&new));
        fetcher.fetch().await.unwrap_err();
        server.replace(new.clone(), etag);
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(weights(&directory), noise(1_500_000, 7));
        assert!(server.seen()[2].range.is_some(), "it did not try to go on");
    }
}

#[tokio::test]
async fn a_server_that_ignores_ranges_gives_all_again() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::CutAfter(1_000_000), Fault::IgnoreRange]);
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(weights(&directory), noise(2_000_000, 7));
    assert_eq!(first_byte(&server.seen()[1]), 1_000_000);
    assert_eq!(server.sent_bytes(), 1_000_000 + archive.len());
}

#[tokio::test]
async fn a_server_that_ignores_ranges_and_always_breaks_is_left() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    // Each try brings bytes, but only the first brings new ones.
    server.faults((0..9).map(|_| Fault::IgnoreRangeAndCutAfter(900_000)));
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    let error = fetcher.fetch().await.unwrap_err();
    let FetchError::Lost {
        attempts, bytes, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((*attempts, *bytes), (3, 900_000));
    assert_eq!(server.seen().len(), 3);
    assert_eq!(error.fault_origin(), FaultOrigin::Remote);
}

#[tokio::test]
async fn a_file_of_unknown_length() {
    let archive = model_tar(500_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::Chunked]);
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    fetcher.fetch().await.unwrap();
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn a_part_that_is_the_whole_file_is_not_fetched_again() {
    let archive = model_tar(500_000);
    let server = FileServer::start(archive.clone()).await;
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    let partial = fetcher.directory.path().join("partial");
    fs::create_dir_all(&partial).unwrap();
    let key = fetcher.source.key();
    fs::write(partial.join(format!("{key}.part")), &archive).unwrap();
    // Its length was never announced, so the server is asked: nothing follows the last byte.
    let facts = "{\"url_sha256\":\"\",\"etag\":null,\"last_modified\":null,\"total_bytes\":null}";
    fs::write(partial.join(format!("{key}.json")), facts).unwrap();
    fetcher.fetch().await.unwrap();
    assert_eq!(server.sent_bytes(), 0);
}

#[tokio::test]
async fn more_than_announced_is_not_taken() {
    let archive = model_tar(500_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::TooLong]);
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    // A part of a file of unannounced length, so that the claimed one is believed.
    let partial = fetcher.directory.path().join("partial");
    fs::create_dir_all(&partial).unwrap();
    let key = fetcher.source.key();
    fs::write(partial.join(format!("{key}.part")), &archive[..1000]).unwrap();
    let facts = "{\"url_sha256\":\"\",\"etag\":null,\"last_modified\":null,\"total_bytes\":null}";
    fs::write(partial.join(format!("{key}.json")), facts).unwrap();
    let error = fetcher.fetch().await.unwrap_err();
    let FetchError::TooLong {
        announced_bytes, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(*announced_bytes, archive.len() as u64 - 1000);
    assert!(fetcher.part_bytes() <= *announced_bytes);
}

#[tokio::test]
async fn a_wrong_checksum_is_told_with_both_and_leaves_nothing() {
    let archive = model_tar(500_000);
    let server = FileServer::start(archive.clone()).await;
    let wrong = sha256(b"something else");
    let fetcher = Fetcher::new(&server, &wrong);
    let error = fetcher.fetch().await.unwrap_err();
    assert!(matches!(error, FetchError::Mismatch { .. }));
    assert_eq!(error.fault_origin(), FaultOrigin::Content);
    let text = error.to_string();
    assert!(
        text.contains(&wrong) && text.contains(&sha256(&archive)),
        "{text}"
    );
    assert_eq!(fetcher.parts(), [format!("{}.lock", fetcher.source.key())]);
    assert!(
        Cache::new(fetcher.directory.path())
            .model(&fetcher.source.key())
            .is_none()
    );
}

#[tokio::test]
async fn answers_that_are_no_file() {
    let archive = model_tar(1000);
    let location = |to: String| vec![("location", to)];
    let server = FileServer::start(archive.clone()).await;
    for (status, headers, expected) in [
        (
            404,
            vec![],
            "was not found: the server answered 404 Not Found",
        ),
        (410, vec![], "410 Gone"),
        (401, vec![], "may not be read: the server answered 401"),
        (418, vec![], "returned no file: the server answered 418"),
        (204, vec![], "returned no file: the server answered 204"),
    ] {
        server.faults([Fault::Status(status, headers)]);
        let fetcher = Fetcher::new(&server, &sha256(&archive));
        let error = fetcher.fetch().await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.to_string().contains(&server.url()), "{error}");
        assert_eq!(error.fault_origin(), FaultOrigin::Remote);
    }
    assert_eq!(
        server.seen().len(),
        5,
        "no answer of these is asked for twice"
    );

    server.faults((0..20).map(|_| Fault::Status(302, location(server.url()))));
    let error = Fetcher::new(&server, &sha256(&archive))
        .fetch()
        .await
        .unwrap_err();
    assert!(matches!(error, FetchError::Redirects { .. }), "{error}");

    let other = FileServer::start(archive.clone()).await;
    other.faults([Fault::Status(
        302,
        location(format!("http://{}/elsewhere", other.address())),
    )]);
    Fetcher::new(&other, &sha256(&archive))
        .fetch()
        .await
        .unwrap();
}

#[tokio::test]
async fn a_busy_server_is_given_the_time_it_asks_for() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let retry_after = |seconds: &str| vec![("retry-after", seconds.to_owned())];
    server.faults([
        Fault::Status(503, retry_after("1")),
        Fault::Status(429, retry_after("1")),
    ]);
    let fetcher = Fetcher::new(&server, &sha256(&archive));
    let began = Instant::now();
    fetcher.fetch().await.unwrap();
    assert!(
        began.elapsed() >= Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    let progress = fetcher.progress.lock().unwrap().clone();
    let trouble = progress
        .iter()
        .find_map(|p| p.trouble.clone())
        .expect("it is told");
    assert!(
        trouble.contains("503") && trouble.contains("trying again in 1.0 s"),
        "{trouble}"
    );

    // Longer than any fetch waits.
    server.faults([Fault::Status(503, retry_after("86400"))]);
    let error = Fetcher::new(&server, &sha256(&archive))
        .fetch()
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("asks to wait 86400 s"),
        "{error}"
    );
}

#[tokio::test]
async fn a_silent_server_is_asked_again_and_a_slow_one_is_not() {
    let archive = model_tar(400_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::StallAfter(100_000)]);
    let mut fetcher = Fetcher::new(&server, &sha256(&archive));
    fetcher.options.stall_timeout = Duration::from_millis(1500);
    fetcher.fetch().await.unwrap();
    assert_eq!(first_byte(&server.seen()[1]), 100_000);
    // During the silence, everything that had arrived was reported.
    let told =
        |progress: &Progress| progress.phase == Phase::Downloading && progress.bytes == 100_000;
    assert!(fetcher.progress.lock().unwrap().iter().any(told));

    // Slower in total than the tolerated silence.
    let slow = FileServer::start(archive.clone()).await;
    slow.pace(Duration::from_millis(100));
    let mut fetcher = Fetcher::new(&slow, &sha256(&archive));
    fetcher.options.stall_timeout = Duration::from_secs(2);
    let began = Instant::now();
    fetcher.fetch().await.unwrap();
    assert!(began.elapsed() > Duration::from_secs(4));
    assert_eq!(slow.seen().len(), 1);
    let progress = fetcher.progress.lock().unwrap();
    assert!(
        progress.iter().any(|p| p.bytes_per_second > 10_000),
        "no rate was told"
    );
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/m.tar", listener.local_addr().unwrap());
    drop(listener);
    let server = FileServer::start(Vec::new()).await;
    let mut fetcher = Fetcher::new(&server, &sha256(b""));
    fetcher.source = Source::new(&url, &sha256(b"")).unwrap();
    let error = fetcher.fetch().await.unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, FetchError::Lost { attempts: 3, .. }),
        "{text}"
    );
    assert!(text.to_lowercase().contains("connection refused"), "{text}");
}

#[tokio::test]
async fn a_disk_without_room_is_told_before_anything_is_fetched() {
    let archive = model_tar(2_000_000);
    let server = FileServer::start(archive.clone()).await;
    let mut fetcher = Fetcher::new(&server, &sha256(&archive));
    fetcher.options.reserve_bytes = 1 << 60;
    let error = fetcher.fetch().await.unwrap_err();
    assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
    assert_eq!(error.fault_origin(), FaultOrigin::Local);
    let text = error.to_string();
    assert!(
        text.contains("2 MiB to fetch of the archive")
            && text.contains("of which 1048576 TiB stay free"),
        "{text}"
    );
    assert_eq!(fetcher.part_bytes(), 0);
}

#[tokio::test]
async fn many_fetchers_fetch_once() {
    let archive = model_tar(1_500_000);
    let server = FileServer::start(archive.clone()).await;
    server.pace(Duration::from_millis(3));
    let fetcher = Arc::new(Fetcher::new(&server, &sha256(&archive)));
    let fetches = (0..8).map(|_| {
        let fetcher = Arc::clone(&fetcher);
        tokio::spawn(async move { fetcher.fetch().await })
    });
    for fetch in futures::future::join_all(fetches).await {
        fetch.unwrap().unwrap();
    }
    assert_eq!(server.sent_bytes(), archive.len());
    let progress = fetcher.progress.lock().unwrap().clone();
    let waiting: Vec<&Progress> = progress
        .iter()
        .filter(|p| p.phase == Phase::Waiting)
        .collect();
    assert!(
        waiting
            .iter()
            .any(|p| p.bytes > 0 && p.total_bytes == Some(archive.len() as u64)),
        "{waiting:?}"
    );
    assert_eq!(fetcher.parts(), [""; 0]);
}

#[tokio::test]
async fn the_next_in_line_goes_on_when_the_first_is_dropped() {
    let archive = model_tar(1_500_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::StallAfter(800_000)]);
    let fetcher = Arc::new(Fetcher::new(&server, &sha256(&archive)));
    let first = tokio::spawn({
        let fetcher = Arc::clone(&fetcher);
        async move { fetcher.fetch().await }
    });
    while fetcher.part_bytes() < 800_000 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let second = tokio::spawn({
        let fetcher = Arc::clone(&fetcher);
        async move { fetcher.fetch().await }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!second.is_finished());
    first.abort();
    second.await.unwrap().unwrap();
    assert_eq!(first_byte(&server.seen()[1]), 800_000);
    assert_eq!(server.sent_bytes(), archive.len());
}

#[tokio::test]
async fn a_cache_that_cannot_be_written_is_named() {
    let archive = model_tar(1000);
    let server = FileServer::start(archive.clone()).await;
    let mut fetcher = Fetcher::new(&server, &sha256(&archive));
    let file = fetcher.directory.path().join("file");
    fs::write(&file, "").unwrap();
    let error = {
        let cache = Cache::new(&file);
        fetch(&fetcher.source, &cache, &fetcher.options, Arc::new(|_| {}))
            .await
            .unwrap_err()
    };
    let text = error.to_string();
    assert!(matches!(error, FetchError::Cache { .. }), "{text}");
    assert!(
        text.contains("file/models") && text.contains("must be writable for user"),
        "{text}"
    );
    fetcher.options.attempts = 1;
    fetcher.fetch().await.unwrap();
}

#[tokio::test]
async fn a_plain_server_has_no_tls() {
    let server = FileServer::start(tar_of(&[])).await;
    let mut fetcher = Fetcher::new(&server, &sha256(b""));
    let url = server.url().replace("http:", "https:");
    fetcher.source = Source::new(&url, &sha256(b"")).unwrap();
    let error = fetcher.fetch().await.unwrap_err();
    assert!(matches!(error, FetchError::Tls { .. }), "{error}");
    assert!(error.to_string().contains("HEARTH_CA_BUNDLE"), "{error}");
}
