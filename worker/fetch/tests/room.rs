//! A cache with a quota: which models go for another one, which stay, and the rate of downloads.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use hearth_fetch::{
    Cache, Claim, Claims, FetchError, FetchOptions, Hold, Key, Owner, Source, Throttle, fetch,
};
use support::hub::HubServer;
use support::{Fault, FileServer, model_tar, noise, sha256};
use tempfile::TempDir;

const MINUTE: Duration = Duration::from_secs(60);
/// Bytes of each model's weights.
const WEIGHTS_BYTES: usize = 600_000;
/// Room for two models.
const QUOTA_BYTES: u64 = 1_500_000;

/// A cache, and a hub for each of its models.
struct Store {
    directory: TempDir,
    hubs: Vec<HubServer>,
    options: FetchOptions,
}

impl Store {
    async fn with(names: &[&str]) -> Self {
        let mut hubs = Vec::new();
        for (seed, name) in (1..).zip(names) {
            let weights = noise(WEIGHTS_BYTES, seed);
            let files: [(&str, &[u8]); 3] = [
                ("config.json", b"{\"model_type\": \"llama\"}"),
                ("tokenizer.json", b"{}"),
                ("model.safetensors", &weights),
            ];
            hubs.push(HubServer::start(&format!("acme/{name}"), &files).await);
        }
        Self {
            directory: TempDir::new().unwrap(),
            hubs,
            options: FetchOptions {
                reserve_bytes: 0,
                quota_bytes: Some(QUOTA_BYTES),
                claims: Claims::by(|_| Claim::Free),
                owner: Owner::Node("attic".to_owned()),
                attempts: 2,
                first_backoff: Duration::from_millis(5),
                ..FetchOptions::default()
            },
        }
    }

    fn cache(&self) -> Cache {
        Cache::new(self.directory.path())
    }

    fn source(&self, name: &str) -> Source {
        let repo = format!("acme/{name}");
        let is_of = |hub: &&HubServer| hub.listing()["id"] == repo.as_str();
        let hub = self.hubs.iter().find(is_of).unwrap();
        let source = Source::of_hub(&hub.url(), &repo, None).unwrap();
        source.held_by("")
    }

    fn key(&self, name: &str) -> Key {
        self.source(name).key()
    }

    fn held_bytes(&self) -> u64 {
        bytes_below(self.directory.path())
    }

    async fn fetch(&self, name: &str) -> Result<PathBuf, FetchError> {
        get(&self.source(name), &self.cache(), &self.options).await
    }

    /// Fetches a model that was last used so long ago.
    async fn fetched_before(&self, name: &str, age: Duration) -> Key {
        self.fetch(name).await.unwrap();
        let key = self.key(name);
        self.cache().note_use(&key, SystemTime::now() - age);
        key
    }

    fn has(&self, name: &str) -> bool {
        self.cache().model(&self.key(name)).is_some()
    }

    async fn refusal(&self, name: &str) -> String {
        let error = self.fetch(name).await.unwrap_err();
        assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
        assert_eq!(self.options.counters.evictions(), 0, "removed in vain");
        error.to_string()
    }
}

/// Bytes of all files below a directory.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
    let bytes = entries.map(|entry| match entry.file_type().unwrap().is_dir() {
        true => bytes_below(&entry.path()),
        false => entry.metadata().unwrap().len(),
    });
    bytes.sum()
}

async fn get(
    source: &Source,
    cache: &Cache,
    options: &FetchOptions,
) -> Result<PathBuf, FetchError> {
    let work = fetch(source, cache, options, Arc::new(|_| {}));
    tokio::time::timeout(MINUTE, work).await.expect("it hangs")
}

#[tokio::test]
async fn the_least_recently_used_goes_for_another() {
    let store = Store::with(&["one", "two", "three"]).await;
    store.fetched_before("one", 30 * MINUTE).await;
    store.fetched_before("two", 40 * MINUTE).await;
    store.fetch("three").await.unwrap();
    assert!(store.has("one") && !store.has("two") && store.has("three"));
    let counters = &store.options.counters;
    assert_eq!(counters.evictions(), 1);
    assert!(counters.evicted_bytes() >= WEIGHTS_BYTES as u64);
    assert!(counters.downloaded_bytes() >= 3 * WEIGHTS_BYTES as u64);
    assert!(store.held_bytes() <= QUOTA_BYTES);
    // It is used again: then the other one goes.
    store.fetch("one").await.unwrap();
    store
        .cache()
        .note_use(&store.key("three"), SystemTime::now() - 20 * MINUTE);
    store.fetch("two").await.unwrap();
    assert!(store.has("one") && store.has("two") && !store.has("three"));
}

#[tokio::test]
async fn what_is_held_pinned_claimed_or_recent_stays_and_the_error_says_so() {
    let mut store = Store::with(&["one", "two", "three"]).await;
    let one = store.fetched_before("one", 30 * MINUTE).await;
    let two = store.fetched_before("two", 5 * MINUTE).await;
    let cache = store.cache();

    let hold = Hold::take(&cache.model(&one).unwrap()).unwrap();
    let text = store.refusal("three").await;
    for words in [
        "node attic has no room for acme/three@main: 1 MiB to fetch; ",
        "the quota of 1.4 MiB has ",
        "models hold 1.1 MiB: 586.0 KiB in use by workers, 586.0 KiB used within 600 s",
        "agent.store.quota",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert!(cache.stored().unwrap().iter().any(|it| it.is_in_use));
    drop(hold);

    cache.pin(&one).unwrap();
    let text = store.refusal("three").await;
    assert!(text.contains("586.0 KiB pinned"), "{text}");
    assert!(cache.stored().unwrap().iter().any(|it| it.is_pinned));
    // Not by an operator that wants nothing any more, and not by hand.
    let keep_two = [two.clone()].into();
    let removed = cache.retain(&keep_two, Duration::ZERO, SystemTime::now());
    assert!(!removed.unwrap().contains(&one));
    let error = cache.forget(&one).unwrap_err();
    assert!(matches!(error, FetchError::Pinned { .. }), "{error}");
    cache.unpin(&one).unwrap();

    let wanted = Arc::new(Mutex::new(Claim::Wanted));
    let claim = Arc::clone(&wanted);
    store.options.claims = Claims::by(move |_| *claim.lock().unwrap());
    let text = store.refusal("three").await;
    assert!(text.contains("1.1 MiB wanted by deployments"), "{text}");
    *wanted.lock().unwrap() = Claim::Unknown;
    let text = store.refusal("three").await;
    assert!(text.contains("has not told about yet"), "{text}");
    *wanted.lock().unwrap() = Claim::Free;

    assert!(store.has("one") && store.has("two"));
    store.fetch("three").await.unwrap();
    assert!(!store.has("one") && store.has("two") && store.has("three"));
}

#[tokio::test]
async fn nothing_is_removed_unless_it_suffices() {
    let mut store = Store::with(&["one", "two"]).await;
    store.fetched_before("one", 30 * MINUTE).await;
    store.options.quota_bytes = Some(WEIGHTS_BYTES as u64 / 2);
    let text = store.refusal("two").await;
    assert!(text.contains("that would not suffice"), "{text}");
    assert!(store.has("one"));
    // No quota, but a disk that has to stay free.
    store.options.quota_bytes = None;
    store.options.reserve_bytes = 1 << 60;
    let text = store.refusal("two").await;
    assert!(text.contains("agent.diskReservePercent"), "{text}");
    store.options.reserve_bytes = 0;
    store.fetch("two").await.unwrap();
    assert!(store.has("one") && store.has("two"));
}

/// A store whose models `one` and `two` have the same weights.
async fn sharing() -> Store {
    let mut store = Store::with(&["one", "three"]).await;
    let weights = noise(WEIGHTS_BYTES, 1);
    let files: [(&str, &[u8]); 2] = [
        ("config.json", b"{\"model_type\": \"llama\", \"a\": 2}"),
        ("model.safetensors", &weights),
    ];
    store.hubs.push(HubServer::start("acme/two", &files).await);
    store
}

#[tokio::test]
async fn what_two_models_have_counts_once_and_is_free_once_both_are_gone() {
    let mut store = sharing().await;
    store.options.quota_bytes = Some(WEIGHTS_BYTES as u64 + 10_000);
    let one = store.fetched_before("one", 30 * MINUTE).await;
    // Apart they would not fit.
    store.fetched_before("two", 20 * MINUTE).await;
    assert!(store.has("one") && store.has("two"));
    let cache = store.cache();
    cache.pin(&one).unwrap();
    let text = store.refusal("three").await;
    assert!(text.contains("586.0 KiB pinned"), "{text}");
    assert!(store.has("two"), "it would have freed next to nothing");
    cache.unpin(&one).unwrap();
    store.fetch("three").await.unwrap();
    assert!(!store.has("one") && !store.has("two") && store.has("three"));
    assert!(store.held_bytes() <= WEIGHTS_BYTES as u64 + 10_000);
}

#[tokio::test]
async fn a_model_goes_for_its_own_bytes_and_not_for_those_that_another_keeps() {
    let mut store = sharing().await;
    store.fetched_before("one", 40 * MINUTE).await;
    store.fetched_before("two", 30 * MINUTE).await;
    store.fetched_before("three", 20 * MINUTE).await;
    let two = store.key("two");
    let hold = Hold::take(&store.cache().model(&two).unwrap()).unwrap();
    let files: [(&str, &[u8]); 2] = [
        ("config.json", b"{\"model_type\": \"llama\"}"),
        ("model.safetensors", &noise(WEIGHTS_BYTES, 9)),
    ];
    store.hubs.push(HubServer::start("acme/four", &files).await);
    store.fetch("four").await.unwrap();
    assert!(store.has("one") && store.has("two"));
    assert!(!store.has("three") && store.has("four"));
    drop(hold);
}

#[tokio::test]
async fn a_model_in_use_is_not_removed_by_hand_or_by_an_operator() {
    let store = Store::with(&["one"]).await;
    let one = store.fetched_before("one", 60 * MINUTE).await;
    let cache = store.cache();
    let hold = Hold::take(&cache.model(&one).unwrap()).unwrap();
    let retain = || cache.retain(&[].into(), Duration::ZERO, SystemTime::now());
    assert_eq!(retain().unwrap(), []);
    let error = cache.forget(&one).unwrap_err();
    assert!(matches!(error, FetchError::InUse { .. }), "{error}");
    assert!(error.to_string().contains("acme/one@main"), "{error}");
    drop(hold);
    assert_eq!(retain().unwrap(), [one]);
}

#[tokio::test]
async fn an_archive_of_unknown_length_makes_room_as_it_arrives() {
    let store = Store::with(&["one", "two"]).await;
    store.fetched_before("one", 30 * MINUTE).await;
    store.fetched_before("two", 20 * MINUTE).await;
    let archive = model_tar(400_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::Chunked]);
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    let cache = store.cache();
    get(&source, &cache, &store.options).await.unwrap();
    assert!(!store.has("one") && store.has("two"));
    assert!(store.held_bytes() <= QUOTA_BYTES);
    // One that is larger than the quota is given up before it exceeds it.
    let archive = model_tar(3_000_000);
    server.replace(archive.clone(), None);
    server.faults([Fault::Chunked]);
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    let error = get(&source, &cache, &store.options).await.unwrap_err();
    assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
    assert!(store.held_bytes() <= QUOTA_BYTES);
}

#[tokio::test]
async fn parts_that_nobody_fetches_any_more_go_too() {
    let store = Store::with(&["one", "two", "three"]).await;
    let archive = model_tar(1_000_000);
    let server = FileServer::start(archive.clone()).await;
    server.faults([Fault::CutAfter(300_000), Fault::Status(404, Vec::new())]);
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    let cache = store.cache();
    let mut options = store.options.clone();
    options.quota_bytes = None;
    get(&source, &cache, &options).await.unwrap_err();
    assert!(store.held_bytes() >= 300_000);
    store.fetched_before("one", 30 * MINUTE).await;
    store.fetch("two").await.unwrap();
    assert!(store.has("one") && store.has("two"));
    assert!(store.held_bytes() <= QUOTA_BYTES);
}

#[tokio::test]
async fn a_crash_between_two_steps_leaves_a_cache_that_is_right() {
    let store = Store::with(&["one", "two", "three"]).await;
    let one = store.fetched_before("one", 30 * MINUTE).await;
    let cache = store.cache();
    let models = store.directory.path().join("models");
    // While it was removed: moved out of its place, with its records.
    fs::rename(
        models.join(one.as_str()),
        models.join(format!(".remove-{one}")),
    )
    .unwrap();
    fs::write(models.join(format!(".about-{one}.new")), "{\"source\":").unwrap();
    let lock = store.directory.path().join("partial/room.lock");
    fs::write(lock, "").unwrap();
    assert_eq!(cache.model(&one), None);
    assert!(store.held_bytes() >= WEIGHTS_BYTES as u64);
    store.fetched_before("two", 20 * MINUTE).await;
    // What is left of it counts, and goes first.
    store.fetch("three").await.unwrap();
    assert!(store.has("two") && store.has("three"));
    let names: Vec<String> = fs::read_dir(&models)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned())
        .filter(|name| name.contains(one.as_str()))
        .collect();
    assert_eq!(names, [""; 0]);
    // A record that was cut off says nothing, and the model is there all the same.
    let two = store.key("two");
    fs::write(models.join(format!(".about-{two}")), "{\"source\":").unwrap();
    assert_eq!(cache.about(&two), None);
    assert!(
        cache
            .stored()
            .unwrap()
            .iter()
            .any(|stored| stored.key == two)
    );
}

#[tokio::test]
async fn a_stored_model_tells_when_it_was_verified_and_used() {
    let store = Store::with(&["one"]).await;
    let before = SystemTime::now() - Duration::from_secs(2);
    store.fetch("one").await.unwrap();
    let stored = store.cache().stored().unwrap().remove(0);
    let seconds = before.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let verified_at_s = stored.about.unwrap().verified_at_s.unwrap();
    assert!(verified_at_s >= seconds.as_secs());
    assert!(stored.used.unwrap() >= before);
    assert!(!stored.is_in_use && !stored.is_pinned);
}

#[tokio::test]
async fn downloads_side_by_side_keep_their_rate_together() {
    let store = Store::with(&["one", "two"]).await;
    let rate = NonZeroU64::new(WEIGHTS_BYTES as u64).unwrap();
    let options = FetchOptions {
        quota_bytes: None,
        throttle: Some(Arc::new(Throttle::new(rate))),
        ..store.options.clone()
    };
    let (cache, sources) = (store.cache(), ["one", "two"].map(|name| store.source(name)));
    let began = Instant::now();
    let [one, two] = &sources;
    let (one, two) = tokio::join!(get(one, &cache, &options), get(two, &cache, &options));
    assert!(one.is_ok() && two.is_ok());
    // Twice the bytes of a second, less the burst. How much longer it takes is the machine's affair.
    assert!(began.elapsed() >= Duration::from_millis(1700));
}
