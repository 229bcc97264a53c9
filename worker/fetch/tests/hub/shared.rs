//! Files that another model of this machine has: they are there once, and nobody gets one by its checksum alone.

use std::os::unix::fs::MetadataExt;

use hearth_crds::{HttpFile, HttpSource};
use hearth_fetch::{Claim, Claims, Owner, Stored};

use super::disks::Disk;
use super::support::sha256;
use super::*;

/// A fetcher of another source into the cache of the first one.
fn beside(first: &Fetcher, source: Source) -> Fetcher {
    Fetcher {
        directory: TempDir::new().unwrap(),
        source,
        options: first.options.clone(),
        progress: Arc::default(),
    }
}

/// Fetches it into the cache of the first one.
async fn fetch_beside(first: &Fetcher, other: &Fetcher) -> Result<PathBuf, FetchError> {
    let cache = first.cache();
    let work = fetch(&other.source, &cache, &other.options, Arc::new(|_| {}));
    let fetched = tokio::time::timeout(Duration::from_secs(60), work).await;
    fetched.expect("it hangs")
}

fn links(directory: &Path, name: &str) -> u64 {
    fs::metadata(directory.join(name)).unwrap().nlink()
}

/// Files of another revision: the index, the tokenizer and the first shard are the same.
fn next(files: &Files) -> Files {
    let mut next = files.0.clone();
    next.insert(SHARDS[1].to_owned(), noise(450_000, 99));
    Files(next)
}

/// Bytes of files that do not have a checksum of their own in the hub's list, and come again.
fn small_bytes(files: &Files) -> usize {
    let needed = files.needed();
    let small = needed.values().filter(|bytes| bytes.len() < 10_000);
    small.map(Vec::len).sum()
}

fn stored(first: &Fetcher, source: &Source) -> Stored {
    let stored = first.cache().stored().unwrap();
    let mut of_key = stored.into_iter().filter(|it| it.key == source.key());
    of_key.next().unwrap()
}

#[tokio::test]
async fn two_revisions_have_their_common_files_once_and_go_one_without_the_other() {
    let old = Files::new(1);
    let new = next(&old);
    let server = HubServer::start(REPO, &old.list()).await;
    let first = Fetcher::new(&server);
    let one = first.fetch().await.unwrap();
    assert_eq!(stored(&first, &first.source).shared_bytes, 0);
    let commit = server.push(&new.list());
    let source = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    let other = beside(&first, source);
    let before = server.sent_bytes();
    let two = fetch_beside(&first, &other).await.unwrap();
    assert_eq!(files_in(&two), new.needed());
    // Of the tokenizer and of the first shard, the hub has given the first byte.
    let list_bytes = server.listing().to_string().len();
    let expected = list_bytes + small_bytes(&new) + 450_000 + 2;
    assert_eq!(server.sent_bytes() - before, expected);
    assert_eq!((links(&one, SHARDS[0]), links(&two, SHARDS[0])), (2, 2));
    assert_eq!(links(&two, SHARDS[1]), 1);
    let counters = &first.options.counters;
    let downloaded_bytes = old.needed_bytes() + small_bytes(&new) + 450_000;
    assert_eq!(counters.downloaded_bytes(), downloaded_bytes as u64);

    // Each says its own size, and what is not its own alone; all together count once.
    let shared_bytes = 700_000 + 30_000;
    for (source, files) in [(&first.source, &old), (&other.source, &new)] {
        let stored = stored(&first, source);
        let bytes = files.needed_bytes() as u64;
        assert_eq!((stored.bytes, stored.shared_bytes), (bytes, shared_bytes));
    }
    let held_bytes = (old.needed_bytes() + new.needed_bytes()) as u64 - shared_bytes;
    assert_eq!(first.cache().stored_bytes().unwrap(), held_bytes);

    first.cache().forget(&first.source.key()).unwrap();
    assert_eq!(files_in(&two), new.needed());
    assert_eq!(links(&two, SHARDS[0]), 1);
    assert_eq!(stored(&first, &other.source).shared_bytes, 0);
    // And back: what the first one had besides is fetched again.
    let before = server.sent_bytes();
    let commit = server.push(&old.list());
    let again = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    let again = beside(&first, again);
    let three = fetch_beside(&first, &again).await.unwrap();
    assert_eq!(files_in(&three), old.needed());
    let expected = server.listing().to_string().len() + small_bytes(&old) + 500_000 + 2;
    assert_eq!(server.sent_bytes() - before, expected);
}

#[tokio::test]
async fn what_is_removed_for_another_counts_as_far_as_it_frees_something() {
    let old = Files::new(1);
    let new = next(&old);
    let server = HubServer::start(REPO, &old.list()).await;
    let mut first = Fetcher::new(&server);
    first.options.claims = Claims::by(|_| Claim::Free);
    first.options.recent = Duration::ZERO;
    first.fetch().await.unwrap();
    let commit = server.push(&new.list());
    let source = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    let second = beside(&first, source);
    fetch_beside(&first, &second).await.unwrap();
    let held_bytes = first.cache().stored_bytes().unwrap();

    // Both have to go for a third one: their common files count with the last of them.
    let third = Files::new(50);
    let commit = server.push(&third.list());
    let source = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    first.options.quota_bytes = Some(third.needed_bytes() as u64 + 100_000);
    fetch_beside(&first, &beside(&first, source)).await.unwrap();
    let counters = &first.options.counters;
    assert_eq!(counters.evictions(), 2);
    assert_eq!(counters.evicted_bytes(), held_bytes);
}

#[tokio::test]
async fn where_there_are_no_links_files_of_another_model_are_copied() {
    let old = Files::new(1);
    let new = next(&old);
    let server = HubServer::start(REPO, &old.list()).await;
    let first = Fetcher::new(&server);
    let one = first.fetch().await.unwrap();
    // No link leads out of a mount, even to the same file system.
    let Some(_mount) = Disk::bind(&one, one.clone()) else {
        return;
    };
    let commit = server.push(&new.list());
    let source = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    let other = beside(&first, source);
    let before = server.sent_bytes();
    let two = fetch_beside(&first, &other).await.unwrap();
    assert_eq!(files_in(&two), new.needed());
    // The hub has given no more than where files are linked.
    let list_bytes = server.listing().to_string().len();
    let expected = list_bytes + small_bytes(&new) + 450_000 + 2;
    assert_eq!(server.sent_bytes() - before, expected);
    assert_eq!((links(&one, SHARDS[0]), links(&two, SHARDS[0])), (1, 1));
    assert_eq!(stored(&first, &other.source).shared_bytes, 0);
}

#[tokio::test]
async fn a_gated_file_is_shared_with_its_holder_alone_and_only_if_the_hub_gives_it() {
    let files = Files::new(1);
    let gated = HubServer::start(REPO, &files.list()).await;
    gated.gate_by("Bearer hush-token");
    let mut first = Fetcher::new(&gated);
    first.options.owner = Owner::Node("attic".to_owned());
    let opened = |source: &Source, token: &str, holder: &str| {
        let token = token.to_owned();
        let credentials = Credentials::Bearer { token };
        source.clone().opened_by(credentials).held_by(holder)
    };
    let private = beside(&first, opened(&first.source, "hush-token", "one/hub"));
    let one = fetch_beside(&first, &private).await.unwrap();

    // Its list, with all checksums, is no secret: another repository that names them is opened by nothing but its own token.
    let mut renamed = files.0.clone();
    let config = b"{\"model_type\": \"llama\"}";
    renamed.insert("config.json".to_owned(), config.to_vec());
    let renamed = Files(renamed);
    let copies = HubServer::start("acme/copies", &renamed.list()).await;
    copies.gate_by("Bearer another");
    let source = Source::of_hub(&copies.url(), "acme/copies", None).unwrap();
    for token in ["", "hush-token"] {
        let stranger = beside(&first, opened(&source, token, "one/hub"));
        let error = fetch_beside(&first, &stranger).await.unwrap_err();
        assert!(matches!(error, FetchError::HubDenied { .. }), "{error}");
        assert_eq!(links(&one, SHARDS[0]), 1);
        assert_eq!(first.cache().model(&source.key()), None);
    }

    // Whoever else may have it learns nothing of the first one.
    let list_bytes = copies.listing().to_string().len();
    let before = copies.sent_bytes();
    let other = beside(&first, opened(&source, "another", "two/hub"));
    let two = fetch_beside(&first, &other).await.unwrap();
    assert_eq!(files_in(&two), renamed.needed());
    assert_eq!(links(&one, SHARDS[0]), 1);
    let whole_bytes = list_bytes + renamed.needed_bytes();
    assert_eq!(copies.sent_bytes() - before, whole_bytes);
    first.cache().forget(&source.key()).unwrap();

    let before = (copies.sent_bytes(), copies.asked().len());
    let same = beside(&first, opened(&source, "another", "one/hub"));
    let two = fetch_beside(&first, &same).await.unwrap();
    assert_eq!(files_in(&two), renamed.needed());
    assert_eq!(links(&one, SHARDS[0]), 2);
    let few_bytes = list_bytes + small_bytes(&renamed) + 3;
    assert_eq!(copies.sent_bytes() - before.0, few_bytes);
    let asked = copies.asked().split_off(before.1);
    let large: Vec<&Asked> = asked.iter().filter(|asked| asked.is_large).collect();
    assert_eq!(large.len(), 3);
    assert!(large.iter().all(|it| it.headers.authorization.is_none()));
}

#[tokio::test]
async fn a_hub_whose_list_names_other_bytes_than_it_has_gets_nobody_a_file() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = Fetcher::new(&server);
    let one = first.fetch().await.unwrap();
    let liar = HubServer::start("acme/liar", &files.list()).await;
    // The list stays: it names the checksum of what it does not have.
    liar.swap(SHARDS[0], &noise(700_000, 55));
    let source = Source::of_hub(&liar.url(), "acme/liar", None).unwrap();
    let other = beside(&first, source);
    let error = fetch_beside(&first, &other).await.unwrap_err();
    assert!(matches!(error, FetchError::Altered { .. }), "{error}");
    assert_eq!(links(&one, SHARDS[0]), 1);
}

#[tokio::test]
async fn a_file_that_was_spoilt_meanwhile_is_fetched() {
    let old = Files::new(1);
    let new = next(&old);
    let server = HubServer::start(REPO, &old.list()).await;
    let first = Fetcher::new(&server);
    let one = first.fetch().await.unwrap();
    let mut bytes = fs::read(one.join(SHARDS[0])).unwrap();
    bytes[1000] ^= 1;
    fs::write(one.join(SHARDS[0]), bytes).unwrap();
    let commit = server.push(&new.list());
    let source = Source::of_hub(&server.url(), REPO, Some(&commit)).unwrap();
    let other = beside(&first, source);
    let two = fetch_beside(&first, &other).await.unwrap();
    assert_eq!(files_in(&two), new.needed());
    assert_eq!((links(&one, SHARDS[0]), links(&two, SHARDS[0])), (1, 1));
}

#[tokio::test]
async fn a_list_takes_files_of_its_own_user_and_on_a_node_only_after_its_server_gave_them() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let mut first = Fetcher::new(&server);
    first.source = first.source.held_by("");
    let one = first.fetch().await.unwrap();
    let commit = server.listing()["sha"].as_str().unwrap().to_owned();
    let list = |query: &str| HttpSource {
        files: files
            .needed()
            .iter()
            .map(|(name, bytes)| HttpFile {
                url: format!("{}/{REPO}/resolve/{commit}/{name}?{query}", server.url()),
                sha256: sha256(bytes),
                path: name.contains('/').then(|| name.clone()),
            })
            .collect(),
        ..HttpSource::default()
    };
    let mine = beside(&first, Source::of_files(&list("mine")).unwrap());
    let before = server.sent_bytes();
    let two = fetch_beside(&first, &mine).await.unwrap();
    assert_eq!(files_in(&two), files.needed());
    assert_eq!(server.sent_bytes() - before, small_bytes(&files));
    assert_eq!(links(&one, SHARDS[1]), 2);

    let mut tenant = beside(
        &first,
        Source::of_files(&list("tenant"))
            .unwrap()
            .held_by("two/web"),
    );
    tenant.options.owner = Owner::Node("attic".to_owned());
    let before = server.sent_bytes();
    let three = fetch_beside(&first, &tenant).await.unwrap();
    assert_eq!(files_in(&three), files.needed());
    assert_eq!(server.sent_bytes() - before, files.needed_bytes());
    assert_eq!(links(&one, SHARDS[1]), 3);
    let left = fs::read_dir(first.directory.path().join("partial")).unwrap();
    assert_eq!(left.count(), 0);
}
