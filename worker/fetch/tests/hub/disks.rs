//! Models on another disk than the parts of downloads.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};

use super::*;

/// Has the fetcher's models on another file system than the rest, in the directory that is returned; `None`, with the
/// reason on standard error, where this machine has no other.
fn models_apart(fetcher: &Fetcher) -> Option<TempDir> {
    let apart = TempDir::new_in("/dev/shm").ok();
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    let own = device(fetcher.directory.path());
    let Some(apart) = apart.filter(|apart| device(apart.path()) != own) else {
        // Past the test's capture.
        let words = "SKIPPED: models on another disk: /dev/shm is none here";
        let _ = writeln!(std::io::stderr(), "{words}");
        return None;
    };
    symlink(apart.path(), fetcher.directory.path().join("models")).unwrap();
    Some(apart)
}

#[tokio::test]
async fn models_may_be_on_another_disk_than_what_is_downloaded() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let whole = Fault::IgnoreRange;
    // The index, config, template and tokenizer arrive; then the first shard breaks off.
    server.file_faults([whole.clone(), whole.clone(), whole.clone(), whole]);
    server.file_faults([Fault::CutAfter(300_000)]);
    let fetcher = Fetcher::new(&server);
    let Some(apart) = models_apart(&fetcher) else {
        return;
    };
    let (cache, key) = (fetcher.cache(), fetcher.source.key());
    // What a process that was killed left of a copy is none of the model's files.
    let unfinished = apart.path().join(format!(".unpack-{key}"));
    fs::create_dir(&unfinished).unwrap();
    fs::write(unfinished.join(".copy"), "half").unwrap();

    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    let there = apart.path().join(key.as_str());
    assert_eq!(files_in(&there), files.needed());
    let parts = fs::read_dir(fetcher.directory.path().join("partial")).unwrap();
    assert_eq!(parts.count(), 0, "a part is left");
    // Each byte came once and counts once.
    let list_bytes = server.listing().to_string().len();
    assert_eq!(server.sent_bytes(), files.needed_bytes() + list_bytes);
    assert_eq!(cache.held_bytes().unwrap(), files.needed_bytes() as u64);
    assert_eq!(
        cache.disk_of_models(),
        fetcher.directory.path().join("models")
    );
    cache.forget(&key).unwrap();
    assert_eq!(fs::read_dir(apart.path()).unwrap().count(), 0);
}
