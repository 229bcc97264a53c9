//! Repositories of a hub that breaks in every way a server can.

#![allow(clippy::unwrap_used)] // helpers of tests

mod disks;
mod lists;
mod random_faults;
mod seeds;
mod shared;
#[path = "../support/mod.rs"]
mod support;
mod unfinished;
mod xet;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_fetch::{
    AddressPolicy, Cache, Credentials, FaultOrigin, FetchError, FetchOptions, Phase, Progress,
    Source, fetch,
};
use serde_json::json;
use support::hub::{Asked, HubServer};
use support::{Fault, noise};
use tempfile::TempDir;

const REPO: &str = "acme/poems";
const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];

/// A repository as they are: with much that serving does not need.
struct Files(BTreeMap<String, Vec<u8>>);

impl Files {
    fn new(seed: u64) -> Self {
        let index = json!({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}});
        let config = format!("{{\"model_type\": \"llama\", \"seed\": {seed}}}");
        let files = [
            (".gitattributes", b"*.safetensors filter=lfs".to_vec()),
            ("README.md", b"# Poems".to_vec()),
            ("config.json", config.into_bytes()),
            ("tokenizer.json", noise(30_000, seed + 1)),
            (INDEX, index.to_string().into_bytes()),
            (SHARDS[0], noise(700_000, seed + 2)),
            (SHARDS[1], noise(500_000, seed + 3)),
            ("consolidated.safetensors", noise(400_000, seed + 4)),
            ("pytorch_model.bin", noise(400_000, seed + 5)),
            ("onnx/model.onnx", noise(100_000, seed + 6)),
            (
                "additional_chat_templates/tool_use.jinja",
                b"{{ tools }}".to_vec(),
            ),
        ];
        Self(files.map(|(name, bytes)| (name.to_owned(), bytes)).into())
    }

    fn list(&self) -> Vec<(&str, &[u8])> {
        let files = self.0.iter();
        files
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
            .collect()
    }

    /// Those that serving needs.
    fn needed(&self) -> BTreeMap<String, Vec<u8>> {
        let is_needed = |name: &str| {
            SHARDS.contains(&name)
                || [
                    "config.json",
                    "tokenizer.json",
                    INDEX,
                    "additional_chat_templates/tool_use.jinja",
                ]
                .contains(&name)
        };
        let files = self.0.clone().into_iter();
        files.filter(|(name, _)| is_needed(name)).collect()
    }

    fn needed_bytes(&self) -> usize {
        self.needed().values().map(Vec::len).sum()
    }
}

/// Every file below a directory, by path.
fn files_in(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(next) = directories.pop() {
        for entry in fs::read_dir(next).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let name = path.strip_prefix(directory).unwrap().to_str().unwrap();
            found.insert(name.to_owned(), fs::read(&path).unwrap());
        }
    }
    found
}

/// Patient enough for a busy machine, quick enough for a test.
fn options() -> FetchOptions {
    FetchOptions {
        stall_timeout: Duration::from_secs(20),
        attempts: 3,
        first_backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(20),
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
    fn new(server: &HubServer) -> Self {
        Self {
            directory: TempDir::new().unwrap(),
            source: Source::of_hub(&server.url(), REPO, None).unwrap(),
            options: options(),
            progress: Arc::default(),
        }
    }

    fn cache(&self) -> Cache {
        Cache::new(self.directory.path())
    }

    async fn fetch(&self) -> Result<PathBuf, FetchError> {
        let seen = Arc::clone(&self.progress);
        let observer =
            Arc::new(move |progress: &Progress| seen.lock().unwrap().push(progress.clone()));
        let cache = self.cache();
        let work = fetch(&self.source, &cache, &self.options, observer);
        tokio::time::timeout(Duration::from_secs(60), work)
            .await
            .expect("it hangs")
    }

    async fn failure(&self) -> FetchError {
        let error = self.fetch().await.unwrap_err();
        assert!(error.to_string().contains("\n  "), "no remedy: {error}");
        assert!(!error.to_string().contains("secret"), "{error}");
        // Nothing is served of a model that is not complete.
        assert_eq!(self.cache().model(&self.source.key()), None);
        error
    }
}

fn files_asked(server: &HubServer) -> Vec<Asked> {
    let asked = server.asked().into_iter();
    asked
        .filter(|asked| !asked.path.starts_with("/api/") && !asked.path.is_empty())
        .filter(|asked| !asked.is_head)
        .collect()
}

#[tokio::test]
async fn a_repository_is_fetched_once_and_only_what_is_needed() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let fetcher = Fetcher::new(&server);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(
        server.sent_bytes(),
        files.needed_bytes() + server.listing().to_string().len()
    );
    let about = fetcher.cache().about(&fetcher.source.key()).unwrap();
    assert_eq!(about.source, "acme/poems@main");
    assert_eq!(
        about.commit.as_deref(),
        server.listing()["sha"].as_str(),
        "{about:?}"
    );
    let left = fs::read_dir(fetcher.directory.path().join("partial")).unwrap();
    assert_eq!(left.count(), 0);

    // The progress is of all files together.
    let progress = fetcher.progress.lock().unwrap().clone();
    let counted: Vec<&Progress> = progress
        .iter()
        .filter(|p| p.phase == Phase::Downloading && p.total_bytes.is_some())
        .collect();
    assert!(counted.len() > 1 && counted.is_sorted_by_key(|p| p.bytes));
    let whole = files.needed_bytes() as u64;
    assert!(counted.iter().all(|p| p.total_bytes == Some(whole)));

    // It is already there: no server is asked, although the branch has moved on.
    let asked = server.asked().len();
    server.push(&Files::new(2).list());
    assert_eq!(fetcher.fetch().await.unwrap(), directory);
    assert_eq!(server.asked().len(), asked);
}

#[tokio::test]
async fn a_cut_connection_goes_on_where_it_broke() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    server.list_faults([Fault::CutAfter(100)]);
    let whole = Fault::IgnoreRange;
    // The index, config, template and tokenizer arrive; then the first shard breaks off twice.
    server.file_faults([whole.clone(), whole.clone(), whole.clone(), whole]);
    server.file_faults([Fault::CutAfter(300_000), Fault::CutAfter(250_000)]);
    let fetcher = Fetcher::new(&server);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let list_bytes = server.listing().to_string().len();
    assert_eq!(
        server.sent_bytes(),
        files.needed_bytes() + list_bytes + 100,
        "bytes came twice"
    );
    let ranges: Vec<String> = files_asked(&server)
        .iter()
        .filter(|asked| asked.is_large)
        .filter_map(|asked| asked.headers.range.clone())
        .collect();
    assert_eq!(ranges, ["bytes=300000-", "bytes=550000-"]);
}

#[tokio::test]
async fn a_later_fetch_goes_on_and_checks_all_bytes() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let whole = Fault::IgnoreRange;
    server.file_faults(vec![whole; 5]);
    server.file_faults([Fault::CutAfter(200_000), Fault::Status(400, Vec::new())]);
    let fetcher = Fetcher::new(&server);
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::Answer { .. }), "{error}");
    let before = server.sent_bytes();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let list_bytes = server.listing().to_string().len();
    assert_eq!(server.sent_bytes() - before, list_bytes + 300_000);
    let progress = fetcher.progress.lock().unwrap();
    assert!(progress.iter().any(|p| p.phase == Phase::Checking));
}

#[tokio::test]
async fn files_that_were_spoilt_on_disk_are_found() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    server.file_faults(vec![Fault::IgnoreRange; 5]);
    server.file_faults([Fault::Status(400, Vec::new())]);
    let fetcher = Fetcher::new(&server);
    fetcher.failure().await;
    let key = fetcher.source.key();
    let collected = format!("models/.unpack-{key}/{}", SHARDS[0]);
    let shard = fetcher.directory.path().join(collected);
    let mut bytes = fs::read(&shard).unwrap();
    bytes[1000] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
}

#[tokio::test]
async fn a_branch_that_moves_on_is_fetched_whole_and_of_one_commit() {
    let (old, new) = (Files::new(1), Files::new(2));
    let server = HubServer::start(REPO, &old.list()).await;
    server.file_faults(vec![Fault::IgnoreRange; 5]);
    server.file_faults([Fault::CutAfter(200_000), Fault::Status(400, Vec::new())]);
    let fetcher = Fetcher::new(&server);
    fetcher.failure().await;
    // The next commit has one file fewer, and another name for it.
    let mut next = new.0.clone();
    next.remove("additional_chat_templates/tool_use.jinja");
    let new = Files(next);
    let commit = server.push(&new.list());
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), new.needed());
    let about = fetcher.cache().about(&fetcher.source.key()).unwrap();
    assert_eq!(about.commit, Some(commit));
}

#[tokio::test]
async fn a_commit_can_be_asked_for() {
    let (old, new) = (Files::new(1), Files::new(2));
    let server = HubServer::start(REPO, &old.list()).await;
    let commit = server.listing()["sha"].as_str().unwrap().to_owned();
    server.push(&new.list());
    let mut fetcher = Fetcher::new(&server);
    fetcher.source = fetcher.source.at_commit(&commit).unwrap();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), old.needed());
    // As a revision, too.
    fetcher.source = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), old.needed());
}

#[tokio::test]
async fn a_file_that_changes_meanwhile_is_never_served() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    server.file_faults(vec![Fault::IgnoreRange; 5]);
    server.file_faults([Fault::CutAfter(200_000), Fault::Status(400, Vec::new())]);
    let fetcher = Fetcher::new(&server);
    fetcher.failure().await;
    server.swap(SHARDS[1], &noise(500_000, 77));
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::Altered { .. }), "{error}");
    assert_eq!(error.fault_origin(), FaultOrigin::Content);
    assert!(error.to_string().contains(SHARDS[1]), "{error}");
    // The rest of the part was asked for on condition, and the whole file came.
    let asked = files_asked(&server);
    let conditions: Vec<&Asked> = asked
        .iter()
        .filter(|asked| asked.is_large && asked.headers.if_range.is_some())
        .collect();
    // Once before the file changed, and once after.
    assert_eq!(conditions.len(), 2);
    server.swap(SHARDS[1], &files.0[SHARDS[1]]);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
}

#[tokio::test]
async fn a_byte_that_is_wrong_once_is_asked_for_again() {
    let files = Files::new(1);
    for position in 0..6 {
        let server = HubServer::start(REPO, &files.list()).await;
        server.file_faults(vec![Fault::IgnoreRange; position]);
        server.file_faults([Fault::Spoil]);
        let fetcher = Fetcher::new(&server);
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(files_in(&directory), files.needed(), "{position}");
    }
}

#[tokio::test]
async fn lengths_that_are_lies_are_found_out() {
    let files = Files::new(1);
    for lie in [0, 1, 499_999, 500_001, 800_000] {
        let server = HubServer::start(REPO, &files.list()).await;
        server.file_faults(vec![Fault::IgnoreRange; 5]);
        server.file_faults([Fault::Claim(lie)]);
        let fetcher = Fetcher::new(&server);
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(files_in(&directory), files.needed(), "{lie}");
        // Every time: the fetch ends.
        let server = HubServer::start(REPO, &files.list()).await;
        server.file_faults(vec![Fault::IgnoreRange; 5]);
        server.file_faults(vec![Fault::Claim(lie); 9]);
        let error = Fetcher::new(&server).failure().await;
        assert!(matches!(error, FetchError::Lost { .. }), "{error}");
        assert!(
            error.to_string().contains("for a file of 500000"),
            "{error}"
        );
    }
    // A list that lies about the length of a file.
    let server = HubServer::start(REPO, &files.list()).await;
    let mut list = server.listing();
    for sibling in list["siblings"].as_array_mut().unwrap() {
        if sibling["rfilename"] == SHARDS[0] {
            sibling["lfs"]["size"] = json!(600_000);
        }
    }
    server.list(&list.to_string());
    let error = Fetcher::new(&server).failure().await;
    assert!(matches!(error, FetchError::Lost { .. }), "{error}");
    // Without a length, the list's counts.
    let server = HubServer::start(REPO, &files.list()).await;
    server.file_faults(vec![Fault::Chunked; 6]);
    let fetcher = Fetcher::new(&server);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
}

#[tokio::test]
async fn refusals_name_what_was_refused_and_the_remedy() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    for (repo, revision, expected) in [
        (
            "acme/prose",
            "main",
            "acme/prose at main was not found: the hub answered 404 Not Found (RepoNotFound)",
        ),
        (
            REPO,
            "v9",
            "acme/poems at v9 was not found: the hub answered 404 Not Found (RevisionNotFound)",
        ),
    ] {
        let mut fetcher = Fetcher::new(&server);
        fetcher.source = Source::of_hub(&server.url(), repo, Some(revision)).unwrap();
        let error = fetcher.failure().await;
        assert!(error.to_string().contains(expected), "{error}");
    }
    let listed = server.asked().len();
    assert_eq!(listed, 2, "a refusal is final");
    for (status, words) in [
        (
            401,
            ["acme/poems at main may not be read", "tokenSecretRef"],
        ),
        (403, ["accept its licence", "HEARTH_MODEL_TOKEN"]),
        (404, ["was not found", "check the names"]),
        (416, ["returned no file", "416"]),
    ] {
        let server = HubServer::start(REPO, &files.list()).await;
        server.list_faults([Fault::Status(status, Vec::new())]);
        let error = Fetcher::new(&server).failure().await.to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        // The same for a file: its name is told.
        server.file_faults(vec![Fault::IgnoreRange; 4]);
        server.file_faults([Fault::Status(status, Vec::new())]);
        let error = Fetcher::new(&server).failure().await.to_string();
        assert!(error.contains(SHARDS[0]), "{error}");
    }
}

#[tokio::test]
async fn a_busy_hub_is_given_the_time_that_it_asks_for() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let busy =
        |status, seconds: &str| Fault::Status(status, vec![("retry-after", seconds.to_owned())]);
    server.list_faults([busy(429, "1"), Fault::Status(503, Vec::new())]);
    server.file_faults([busy(503, "1")]);
    let fetcher = Fetcher::new(&server);
    let began = Instant::now();
    let directory = fetcher.fetch().await.unwrap();
    assert!(
        began.elapsed() >= Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(files_in(&directory), files.needed());
    let progress = fetcher.progress.lock().unwrap().clone();
    let mut troubles = progress.iter().filter_map(|p| p.trouble.as_deref());
    assert!(troubles.any(|trouble| trouble.contains("429")));

    let server = HubServer::start(REPO, &files.list()).await;
    server.list_faults([busy(429, "7200")]);
    let error = Fetcher::new(&server).failure().await.to_string();
    assert!(
        error.contains("429") && error.contains("asks to wait 7200 s"),
        "{error}"
    );
    let server = HubServer::start(REPO, &files.list()).await;
    server.list_faults(vec![Fault::Status(503, Vec::new()); 9]);
    let error = Fetcher::new(&server).failure().await;
    assert!(
        matches!(error, FetchError::Lost { attempts: 3, .. }),
        "{error}"
    );
}

#[tokio::test]
async fn a_token_is_for_the_hub_alone() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    server.open_by("Bearer hush-token");
    let mut fetcher = Fetcher::new(&server);
    let error = fetcher.failure().await.to_string();
    assert!(
        error.contains("401") && error.contains("GatedRepo"),
        "{error}"
    );
    fetcher.source = fetcher.source.opened_by(Credentials::Bearer {
        token: "hush-token".to_owned(),
    });
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let large: Vec<Asked> = files_asked(&server)
        .into_iter()
        .filter(|asked| asked.is_large)
        .collect();
    assert_eq!(large.len(), 3);
    assert!(
        large
            .iter()
            .all(|asked| asked.headers.authorization.is_none() && asked.headers.referer.is_none()),
        "{large:?}"
    );
    for file in files_in(fetcher.directory.path()).values() {
        assert!(!String::from_utf8_lossy(file).contains("hush"));
    }
}

#[tokio::test]
async fn hostile_lists_write_nothing_outside() {
    let files = Files::new(1);
    let index = json!({"weight_map": {"a": "../../../evil.safetensors"}}).to_string();
    let mut hostile = files.0.clone();
    hostile.insert(INDEX.to_owned(), index.into_bytes());
    hostile.insert("../../../evil.safetensors".to_owned(), noise(20_000, 9));
    let server = HubServer::start(REPO, &Files(hostile).list()).await;
    let fetcher = Fetcher::new(&server);
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::NotAModel { .. }), "{error}");
    let found = files_in(fetcher.directory.path());
    assert!(
        !found.keys().any(|name| name.contains("evil")),
        "{:?}",
        found.keys()
    );

    // Longer than any list, and larger than any disk.
    let server = HubServer::start(REPO, &files.list()).await;
    server.list(&" ".repeat(33 << 20));
    let error = Fetcher::new(&server).failure().await;
    assert!(matches!(error, FetchError::Listing { .. }), "{error}");
    let server = HubServer::start(REPO, &files.list()).await;
    let mut list = server.listing();
    for sibling in list["siblings"].as_array_mut().unwrap() {
        if SHARDS.iter().any(|shard| sibling["rfilename"] == *shard) {
            sibling["lfs"]["size"] = json!(u64::MAX / 2 + 1);
        }
    }
    server.list(&list.to_string());
    let error = Fetcher::new(&server).failure().await;
    assert!(matches!(error, FetchError::Listing { .. }), "{error}");
}

#[tokio::test]
async fn a_disk_that_is_too_small_is_told_before_the_weights_are_asked_for() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let mut list = server.listing();
    for sibling in list["siblings"].as_array_mut().unwrap() {
        if sibling["rfilename"] == SHARDS[0] {
            sibling["lfs"]["size"] = json!(1_u64 << 60);
        }
    }
    server.list(&list.to_string());
    let error = Fetcher::new(&server).failure().await;
    assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("acme/poems@main"), "{error}");
    assert!(files_asked(&server).iter().all(|asked| !asked.is_large));
}

#[tokio::test]
async fn a_mirror_is_subject_to_the_address_policy_and_its_answers_are_told() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let mut fetcher = Fetcher::new(&server);
    let ranges = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    fetcher.options.address_policy = AddressPolicy::outside(Vec::new(), Vec::new());
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::Forbidden { .. }), "{error}");
    assert!(server.asked().is_empty());
    fetcher.options.address_policy = AddressPolicy::outside(Vec::new(), ranges(&["127.0.0.1/32"]));
    server.list_faults([Fault::Status(404, Vec::new())]);
    // The administrator chose it: what it lacks is no secret.
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::HubNotFound { .. }), "{error}");
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let progress = fetcher.progress.lock().unwrap();
    assert!(progress.iter().any(|p| p.total_bytes.is_some()));
}

#[tokio::test]
async fn a_token_that_no_request_can_carry_is_told_at_once() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let mut fetcher = Fetcher::new(&server);
    let token = "two\nlines".to_owned();
    fetcher.source = fetcher.source.opened_by(Credentials::Bearer { token });
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::Token { .. }), "{error}");
    assert_eq!(error.fault_origin(), FaultOrigin::Request);
    assert!(server.asked().is_empty());
}
