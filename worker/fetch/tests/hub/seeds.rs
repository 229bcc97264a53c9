//! Files of a hub that another node has: they come from there, and nothing wrong does.

use std::sync::Arc;

use hearth_fetch::{Counters, Giver, GiverPatience, Seed};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::task::JoinHandle;

use super::*;

/// A node that has fetched the model, and gives it to another.
struct First {
    fetcher: Fetcher,
    directory: PathBuf,
    commit: String,
    counters: Arc<Counters>,
}

impl First {
    async fn new(server: &HubServer) -> Self {
        let fetcher = Fetcher::new(server);
        let directory = fetcher.fetch().await.unwrap();
        let about = fetcher.cache().about(&fetcher.source.key()).unwrap();
        Self {
            fetcher,
            directory,
            commit: about.commit.unwrap(),
            counters: Arc::default(),
        }
    }

    fn holds(&self, commit: &str) -> Result<Giver, String> {
        Giver::hold(&self.fetcher.cache(), &self.fetcher.source.key(), commit)
    }

    /// Answers on one end of a connection; returns the other.
    fn given(&self) -> (DuplexStream, JoinHandle<std::io::Result<()>>) {
        let (own, mut other) = duplex(64 << 10);
        let giver = self.holds(&self.commit).unwrap();
        let counters = Arc::clone(&self.counters);
        let giving = tokio::spawn(async move {
            let patience = GiverPatience::default();
            giver.give(&mut other, patience, &counters).await
        });
        (own, giving)
    }
}

/// A node that takes what it can from this connection.
fn second(server: &HubServer, connection: DuplexStream) -> Fetcher {
    let mut fetcher = Fetcher::new(server);
    fetcher.options.seed = Some(Seed::new("attic", connection));
    fetcher.options.seed_patience = Duration::from_millis(500);
    fetcher
}

/// Asks for a file as a node does that is not to be trusted.
async fn asks(connection: &mut DuplexStream, path: &str, total_bytes: u64, from: u64) -> u8 {
    let mut request = (path.len() as u16).to_le_bytes().to_vec();
    request.extend(path.as_bytes());
    request.extend(total_bytes.to_le_bytes());
    request.extend(from.to_le_bytes());
    connection.write_all(&request).await.unwrap();
    connection.read_u8().await.unwrap()
}

/// A node that gives these files, and after so many bytes does what its kind does.
pub(super) fn of_any_kind(files: &BTreeMap<String, Vec<u8>>, kind: usize, after: usize) -> Seed {
    let (own, mut other) = duplex(64 << 10);
    let files = files.clone();
    tokio::spawn(async move {
        let mut given_bytes = 0;
        while let Ok(length) = other.read_u16_le().await {
            let mut name = vec![0; length.into()];
            other.read_exact(&mut name).await?;
            let mut bytes = files[std::str::from_utf8(&name).unwrap()].clone();
            assert_eq!(other.read_u64_le().await?, bytes.len() as u64);
            let mut bytes = bytes.split_off(other.read_u64_le().await? as usize);
            let is_now = (given_bytes..given_bytes + bytes.len()).contains(&after);
            let at = after.saturating_sub(given_bytes);
            given_bytes += bytes.len();
            match kind % 5 {
                0 if is_now => {
                    other.write_u8(0).await?;
                    continue;
                }
                1 if is_now => bytes[at] ^= 1,
                2 if is_now => {
                    other.write_u8(1).await?;
                    other.write_all(&bytes[..at]).await?;
                    break;
                }
                3 if is_now => {
                    // Other bytes, and then the end.
                    other.write_u8(1).await?;
                    other.write_all(&vec![7; at]).await?;
                    break;
                }
                _ => {}
            }
            other.write_u8(1).await?;
            other.write_all(&bytes).await?;
        }
        Ok::<_, std::io::Error>(())
    });
    Seed::new("attic", own)
}

fn large_asked(server: &HubServer) -> usize {
    let asked = files_asked(server);
    asked.iter().filter(|asked| asked.is_large).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_node_takes_all_files_from_the_first_and_only_the_list_from_the_hub() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = First::new(&server).await;
    let (asked, sent_bytes) = (files_asked(&server).len(), server.sent_bytes());
    let (connection, giving) = first.given();
    let mut fetcher = second(&server, connection);
    // The limit of downloads does not apply: at this one, they would take a quarter of an hour.
    let slow = hearth_fetch::Throttle::new(std::num::NonZeroU64::new(1000).unwrap());
    fetcher.options.throttle = Some(Arc::new(slow));
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(files_asked(&server).len(), asked);
    let list_bytes = server.listing().to_string().len();
    assert_eq!(server.sent_bytes(), sent_bytes + list_bytes);
    let progress = fetcher.progress.lock().unwrap().clone();
    let from: Vec<_> = progress
        .iter()
        .filter(|progress| progress.phase == Phase::Downloading && progress.bytes > 0)
        .map(|progress| progress.from_node.as_deref())
        .collect();
    assert!(!from.is_empty() && from.iter().all(|node| *node == Some("attic")));
    let bytes = files.needed_bytes() as u64;
    let counters = &fetcher.options.counters;
    assert_eq!(
        (counters.taken_bytes(), counters.downloaded_bytes()),
        (bytes, 0)
    );
    assert_eq!(first.counters.given_bytes(), bytes);
    // Until the second has ended, nothing removes the model.
    let key = first.fetcher.source.key();
    let removed = first.fetcher.cache().forget(&key);
    assert!(matches!(removed, Err(FetchError::InUse { .. })));
    drop(fetcher);
    giving.await.unwrap().unwrap();
    first.fetcher.cache().forget(&key).unwrap();
    assert!(first.holds(&first.commit).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_of_another_node_are_never_used() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = First::new(&server).await;
    // Of the right length.
    let mut spoilt = files.0[SHARDS[0]].clone();
    spoilt[300_000] ^= 1;
    fs::write(first.directory.join(SHARDS[0]), &spoilt).unwrap();
    let asked = large_asked(&server);
    let (connection, _giving) = first.given();
    let fetcher = second(&server, connection);
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    // The hub gave that file and the one after it; those before came from the node, the tokenizer among them.
    assert_eq!(large_asked(&server), asked + 2);
    let counters = &fetcher.options.counters;
    let weights = (files.0[SHARDS[0]].len() + files.0[SHARDS[1]].len()) as u64;
    assert_eq!(counters.downloaded_bytes(), weights);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_give_what_it_has_is_not_waited_for() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = First::new(&server).await;
    let (silent, _open) = duplex(1 << 10);
    // Passes on what the first node gives, until so many bytes have come, and then stalls or breaks off.
    let cut = |after: u64, stalls: bool| {
        let (own, mut through) = duplex(64 << 10);
        let (mut source, _giving) = first.given();
        tokio::spawn(async move {
            let mut left = after;
            let (mut from_source, mut to_source) = tokio::io::split(&mut source);
            let (mut from_own, mut to_own) = tokio::io::split(&mut through);
            let asks = tokio::io::copy(&mut from_own, &mut to_source);
            let gives = async {
                let mut piece = vec![0; 4096];
                while left > 0 {
                    let most = left.min(4096) as usize;
                    let read = from_source.read(&mut piece[..most]).await.unwrap();
                    to_own.write_all(&piece[..read]).await.unwrap();
                    left -= read as u64;
                }
                if stalls {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! { _ = asks => {}, () = gives => {} }
        });
        own
    };
    for (connection, some) in [
        (silent, false),
        (cut(400_000, true), true),
        (cut(400_000, false), true),
    ] {
        let asked = files_asked(&server).len();
        let fetcher = second(&server, connection);
        let directory = fetcher.fetch().await.unwrap();
        assert_eq!(files_in(&directory), files.needed());
        let again = files_asked(&server).split_off(asked);
        // What came of the weights is kept: the hub gives the rest.
        let rest = again.iter().filter(|asked| asked.is_large).any(|asked| {
            let range = asked.headers.range.as_deref();
            range.is_some_and(|range| range != "bytes=0-")
        });
        assert_eq!(rest, some, "{again:#?}");
        assert_eq!(fetcher.options.counters.taken_bytes() > 0, some);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_was_stopped_goes_on_from_another_node() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = First::new(&server).await;
    let mut fetcher = Fetcher::new(&server);
    fetcher.options.attempts = 1;
    server.file_faults(vec![Fault::IgnoreRange; 4]);
    server.file_faults([Fault::CutAfter(200_000)]);
    fetcher.failure().await;
    let (connection, _giving) = first.given();
    fetcher.options.seed = Some(Seed::new("attic", connection));
    let asked = files_asked(&server).len();
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(files_asked(&server).len(), asked);
    let given_bytes = first.counters.given_bytes();
    let weights = (files.0[SHARDS[0]].len() + files.0[SHARDS[1]].len()) as u64;
    assert!(given_bytes > 0 && given_bytes < weights, "{given_bytes}");
}

#[tokio::test]
async fn who_may_not_have_a_repository_gets_it_from_nobody() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = First::new(&server).await;
    server.open_by("Bearer hush");
    let (connection, _giving) = first.given();
    let fetcher = second(&server, connection);
    let refused = fetcher.failure().await.to_string();
    assert!(refused.contains("may not be read"), "{refused}");
    assert_eq!(first.counters.given_bytes(), 0);
}

#[tokio::test]
async fn only_the_files_of_the_model_are_given() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let first = First::new(&server).await;
    let other = first.holds(&"0".repeat(40)).unwrap_err();
    assert!(other.contains(&first.commit), "{other}");
    let outside = first.directory.parent().unwrap().join("x.safetensors");
    fs::write(&outside, "secret").unwrap();
    let link = first.directory.join("link.safetensors");
    std::os::unix::fs::symlink(&outside, link).unwrap();
    let (mut connection, giving) = first.given();
    let config = files.0["config.json"].len() as u64;
    for (path, total_bytes, from) in [
        ("../x.safetensors", 6, 0),
        (outside.to_str().unwrap(), 6, 0),
        ("link.safetensors", 6, 0),
        ("", 0, 0),
        ("missing.safetensors", 6, 0),
        ("config.json", config + 1, 0),
        ("config.json", config, config + 1),
    ] {
        let answer = asks(&mut connection, path, total_bytes, from).await;
        assert_eq!(answer, 0, "{path}");
    }
    assert_eq!(asks(&mut connection, "config.json", config, 2).await, 1);
    let mut rest = vec![0; config as usize - 2];
    connection.read_exact(&mut rest).await.unwrap();
    assert_eq!(rest, files.0["config.json"][2..]);
    // What is no request ends it.
    connection.write_all(&[0xff; 64]).await.unwrap();
    let ended = giving.await.unwrap().unwrap_err();
    assert_eq!(ended.kind(), std::io::ErrorKind::InvalidData);
}
