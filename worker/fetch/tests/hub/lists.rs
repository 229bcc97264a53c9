//! Lists of files behind URLs, as a person writes them.

use std::collections::BTreeSet;

use hearth_crds::{HttpFile, HttpSource};

use super::support::sha256;
use super::*;

/// The files of the hub's newest commit, by their own URLs.
fn listed(server: &HubServer, files: &Files) -> HttpSource {
    let commit = server.listing()["sha"].as_str().unwrap().to_owned();
    let named = files.0.iter().filter(|(name, _)| !name.starts_with('.'));
    HttpSource {
        files: named
            .map(|(name, bytes)| HttpFile {
                url: format!(
                    "{}/{REPO}/resolve/{commit}/{name}?download=true",
                    server.url()
                ),
                sha256: sha256(bytes),
                path: name.contains('/').then(|| name.clone()),
            })
            .collect(),
        ..HttpSource::default()
    }
}

fn fetcher(server: &HubServer, list: &HttpSource) -> Fetcher {
    Fetcher {
        source: Source::of_files(list).unwrap(),
        ..Fetcher::new(server)
    }
}

#[tokio::test]
async fn what_serving_needs_of_a_list_is_fetched_and_each_byte_once() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let mut list = listed(&server, &files);
    // The index, config, tokenizer and template arrive; then the first shard breaks off twice.
    server.file_faults(vec![Fault::IgnoreRange; 4]);
    server.file_faults([Fault::CutAfter(300_000), Fault::CutAfter(250_000)]);
    let fetcher = fetcher(&server, &list);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(server.sent_bytes(), files.needed_bytes());
    let asked = files_asked(&server).into_iter();
    let ranges: Vec<String> = asked.filter_map(|asked| asked.headers.range).collect();
    assert!(ranges.contains(&"bytes=300000-".to_owned()), "{ranges:?}");
    assert!(ranges.contains(&"bytes=550000-".to_owned()), "{ranges:?}");
    let left = fs::read_dir(fetcher.directory.path().join("partial")).unwrap();
    assert_eq!(left.count(), 0);
    let about = fetcher.cache().about(&fetcher.source.key()).unwrap();
    assert_eq!(about.sha256, Some(list.revision()));
    let progress = fetcher.progress.lock().unwrap().clone();
    let counted: Vec<u64> = progress
        .iter()
        .filter(|progress| progress.phase == Phase::Downloading)
        .map(|progress| progress.bytes)
        .collect();
    assert!(counted.len() > 1 && counted.is_sorted(), "{counted:?}");

    // The same list in another order is the same model, and another server's is another one.
    let asked = server.asked().len();
    list.files.reverse();
    let turned = Source::of_files(&list).unwrap();
    assert_eq!(turned.key(), fetcher.source.key());
    assert_eq!(fetcher.fetch().await.unwrap(), directory);
    assert_eq!(server.asked().len(), asked);
    list.files[0].url = "http://mirror.lan/model.bin".to_owned();
    assert_ne!(Source::of_files(&list).unwrap().key(), turned.key());
}

/// Sizes of all files that the progress of a download told.
fn totals(fetcher: &Fetcher) -> BTreeSet<Option<u64>> {
    let progress = fetcher.progress.lock().unwrap();
    let arriving = progress.iter().filter(|it| it.phase == Phase::Downloading);
    arriving.map(|it| it.total_bytes).collect()
}

#[tokio::test]
async fn the_lengths_of_all_files_are_known_before_the_first_one_arrives() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let fetcher = fetcher(&server, &listed(&server, &files));
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let whole_bytes = files.needed_bytes() as u64;
    // The index comes first, and tells what else is needed.
    let told = totals(&fetcher);
    assert_eq!(told, BTreeSet::from([None, Some(whole_bytes)]));
    let progress = fetcher.progress.lock().unwrap().clone();
    let of_index = files.0[INDEX].len() as u64;
    let (before, after): (Vec<_>, Vec<_>) = progress
        .iter()
        .filter(|it| it.phase == Phase::Downloading)
        .partition(|it| it.bytes <= of_index);
    assert!(
        before.iter().all(|it| it.total_bytes.is_none()),
        "{before:?}"
    );
    assert!(!after.is_empty() && after.iter().all(|it| it.total_bytes == Some(whole_bytes)));
}

#[tokio::test]
async fn servers_that_tell_no_length_or_a_wrong_one_are_fetched_from_all_the_same() {
    let files = Files::new(1);
    let silent = [
        Fault::Status(405, Vec::new()),
        Fault::Status(403, Vec::new()),
        Fault::Chunked,
    ];
    for fault in silent {
        let server = HubServer::start(REPO, &files.list()).await;
        server.head_faults([fault.clone()]);
        let fetcher = fetcher(&server, &listed(&server, &files));
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(files_in(&directory), files.needed());
        assert_eq!(totals(&fetcher), BTreeSet::from([None]), "{fault:?}");
    }
    for claimed in [1, 3_000_000, usize::MAX] {
        let server = HubServer::start(REPO, &files.list()).await;
        server.head_faults(vec![Fault::Claim(claimed); files.0.len()]);
        let fetcher = fetcher(&server, &listed(&server, &files));
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(files_in(&directory), files.needed());
        let progress = fetcher.progress.lock().unwrap().clone();
        let is_right = |it: &Progress| it.total_bytes.is_none_or(|whole| it.bytes <= whole);
        assert!(progress.iter().all(is_right), "{claimed}");
    }
}

#[tokio::test]
async fn a_wrong_file_is_told_and_the_others_stay() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let fetcher = fetcher(&server, &listed(&server, &files));
    server.file_faults(vec![Fault::IgnoreRange; 4]);
    server.file_faults([Fault::Spoil]);
    let error = fetcher.failure().await;
    let FetchError::Mismatch { url, expected, .. } = &error else {
        panic!("{error}")
    };
    assert!(url.ends_with(SHARDS[0]), "{url}");
    assert_eq!(*expected, sha256(&files.0[SHARDS[0]]));
    assert_eq!(error.fault_origin(), FaultOrigin::Content);
    let before = server.sent_bytes();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(server.sent_bytes() - before, 1_200_000, "the two shards");
}

#[tokio::test]
async fn a_later_fetch_goes_on_with_the_file_that_it_has_a_part_of() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let fetcher = fetcher(&server, &listed(&server, &files));
    server.file_faults(vec![Fault::IgnoreRange; 4]);
    server.file_faults([Fault::CutAfter(200_000), Fault::Status(400, Vec::new())]);
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::Answer { .. }), "{error}");
    let before = server.sent_bytes();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(server.sent_bytes() - before, 1_000_000);
}

#[tokio::test]
async fn credentials_go_to_the_first_server_of_a_list_alone() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    server.open_by("Bearer t0ken");
    let other = HubServer::start(REPO, &files.list()).await;
    let mut list = listed(&server, &files);
    let elsewhere = listed(&other, &files);
    let is_config = |file: &HttpFile| file.path() == "config.json";
    let (at, from) = (
        list.files.iter().rposition(is_config).unwrap(),
        elsewhere.files.iter().find(|file| is_config(file)).unwrap(),
    );
    list.files[at] = from.clone();
    let token = "t0ken".to_owned();
    let mut fetcher = fetcher(&server, &list);
    fetcher.source = fetcher.source.opened_by(Credentials::Bearer { token });
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    for asked in server.asked() {
        let expected = (!asked.is_large).then(|| "Bearer t0ken".to_owned());
        assert_eq!(asked.headers.authorization, expected, "{}", asked.path);
    }
    let others = other.asked();
    let heads: Vec<bool> = others.iter().map(|asked| asked.is_head).collect();
    assert_eq!(heads, [true, false]);
    assert!(others.iter().all(|it| it.headers.authorization.is_none()));
}

#[tokio::test]
async fn a_list_without_a_model_is_told_before_anything_is_fetched() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let list = listed(&server, &files);
    let without = |names: &[&str]| {
        let mut list = list.clone();
        list.files.retain(|file| !names.contains(&file.path()));
        list
    };
    for (names, expected) in [
        (&["config.json"][..], "config.json is not in it"),
        (&[INDEX], "and consolidated.safetensors and model-00001"),
    ] {
        let error = fetcher(&server, &without(names))
            .failure()
            .await
            .to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("list all files of the model"), "{error}");
    }
    assert!(server.asked().is_empty());
    // A shard that the index names.
    let error = fetcher(&server, &without(&SHARDS[1..])).failure().await;
    let named = format!("{INDEX} names {}, which is not in it", SHARDS[1]);
    assert!(error.to_string().contains(&named), "{error}");
    // Nothing leads out of the directory, and no file is two.
    let with_path = |path: &str| {
        let mut list = list.clone();
        list.files[1].path = Some(path.to_owned());
        Source::of_files(&list).unwrap_err()
    };
    let twice = list.files[0].path().to_owned();
    for path in ["../config.json", "/etc/x", "", "a//b", ".hidden", &twice] {
        let error = with_path(path);
        assert!(matches!(error, FetchError::FilePath { .. }), "{error}");
    }
}
