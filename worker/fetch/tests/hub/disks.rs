//! Models on another disk than the parts of downloads.

use std::io::Write;
use std::os::unix::fs::{MetadataExt, symlink};
use std::process::Command;

use hearth_fetch::{Claim, Claims, Owner};

use super::support::{FileServer, model_tar, sha256};
use super::*;

/// Bytes of the weights in an archive.
const WEIGHTS_BYTES: usize = 1_200_000;

/// Says past the test's capture why something was not tried.
fn skipped(words: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {words}");
}

/// Has the fetcher's models on another file system than the rest, in the directory that is returned; `None`, with the
/// reason on standard error, where this machine has no other.
fn models_apart(fetcher: &Fetcher) -> Option<TempDir> {
    let apart = TempDir::new_in("/dev/shm").ok();
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    let own = device(fetcher.directory.path());
    let Some(apart) = apart.filter(|apart| device(apart.path()) != own) else {
        skipped("models on another disk: /dev/shm is none here");
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
    // Each byte came once.
    let list_bytes = server.listing().to_string().len();
    assert_eq!(server.sent_bytes(), files.needed_bytes() + list_bytes);
    assert_eq!(
        cache.disk_of_models(),
        fetcher.directory.path().join("models")
    );
    cache.forget(&key).unwrap();
    assert_eq!(fs::read_dir(apart.path()).unwrap().count(), 0);
}

/// A file system of its own, unmounted when dropped.
pub(super) struct Disk(PathBuf);

impl Disk {
    /// Mounts one of so many KiB; `None`, with the reason on standard error, where that is not permitted.
    fn mount(at: PathBuf, size_kib: u64) -> Option<Self> {
        let size = format!("size={size_kib}k");
        Self::mounted(&["-t", "tmpfs", "-o", &size, "tmpfs"], at)
    }

    /// Mounts a directory in another place, too; `None` likewise.
    pub(super) fn bind(directory: &Path, at: PathBuf) -> Option<Self> {
        fs::create_dir_all(directory).unwrap();
        Self::mounted(&["--bind", directory.to_str().unwrap()], at)
    }

    fn mounted(what: &[&str], at: PathBuf) -> Option<Self> {
        fs::create_dir_all(&at).unwrap();
        let mut mount = Command::new("mount");
        mount.args(what).arg(&at);
        if !mount.output().is_ok_and(|done| done.status.success()) {
            skipped("small disks for models and parts: no file system may be mounted here");
            return None;
        }
        Some(Self(at))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A cache whose models and parts each have a small disk of their own.
struct Apart {
    models: Disk,
    parts: Disk,
    directory: TempDir,
    options: FetchOptions,
}

impl Apart {
    fn new(models_kib: u64, parts_kib: u64) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        Some(Self {
            models: Disk::mount(directory.path().join("models"), models_kib)?,
            parts: Disk::mount(directory.path().join("partial"), parts_kib)?,
            directory,
            options: FetchOptions {
                claims: Claims::by(|_| Claim::Free),
                recent: Duration::ZERO,
                owner: Owner::Node("attic".to_owned()),
                ..options()
            },
        })
    }

    fn has(&self, source: &Source) -> bool {
        let cache = Cache::new(self.directory.path());
        cache.model(&source.key()).is_some()
    }

    fn part_bytes(&self, source: &Source) -> u64 {
        let part = self.parts.0.join(format!("{}.part", source.key()));
        fs::metadata(part).map_or(0, |part| part.len())
    }

    async fn fetch(&self, source: &Source) -> Result<PathBuf, FetchError> {
        let cache = Cache::new(self.directory.path());
        let work = fetch(source, &cache, &self.options, Arc::new(|_| {}));
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, work).await.expect("it hangs")
    }

    /// Fetches a model that there is no room for; the error must have these words, and nothing may go in vain.
    async fn refusal(&self, source: &Source, words: &[&str]) {
        let error = self.fetch(source).await.unwrap_err();
        assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
        let text = error.to_string();
        for words in words {
            assert!(text.contains(words), "no {words:?} in {text}");
        }
        assert_eq!(self.options.counters.evictions(), 0);
    }

    /// Leaves a part of an archive that nobody fetches any more.
    async fn leave_part(&self, server: &FileServer, source: &Source) {
        server.faults([Fault::CutAfter(WEIGHTS_BYTES), Fault::Status(404, vec![])]);
        self.fetch(source).await.unwrap_err();
        assert!(self.part_bytes(source) > WEIGHTS_BYTES as u64 / 2);
    }
}

/// A server of an archive.
async fn served(weights_bytes: usize) -> (FileServer, Source) {
    let archive = model_tar(weights_bytes);
    let server = FileServer::start(archive.clone()).await;
    let source = Source::new(&server.url(), &sha256(&archive)).unwrap();
    (server, source)
}

#[tokio::test]
async fn an_archive_needs_of_each_disk_what_is_written_there() {
    // Each has room for the archive or for its files, and not for both.
    let Some(mut apart) = Apart::new(2048, 2048) else {
        return;
    };
    let (server, source) = served(WEIGHTS_BYTES).await;
    // Together they count once.
    apart.options.quota_bytes = Some(2_000_000);
    let quota = "the quota of 1.9 MiB has 1.9 MiB left";
    apart.refusal(&source, &[quota, "agent.store.quota"]).await;
    apart.options.quota_bytes = Some(2_500_000);
    let sent_bytes = server.sent_bytes();
    apart.fetch(&source).await.unwrap();
    assert!(apart.has(&source) && server.sent_bytes() >= sent_bytes + WEIGHTS_BYTES);
    assert_eq!(fs::read_dir(&apart.parts.0).unwrap().count(), 0);
}

#[tokio::test]
async fn the_disk_without_room_is_named_before_anything_arrives() {
    let needs = "2 MiB to fetch of the archive, 2 MiB for its files; the disk of";
    let (_server, source) = served(WEIGHTS_BYTES).await;
    for (models_kib, parts_kib, reserve_bytes, short) in [
        (1024, 4096, 0, "models has 1 MiB free, of which 0 B"),
        (4096, 1024, 0, "partial has 1020 KiB free, of which 0 B"),
        (2048, 4096, 1 << 20, "models has 2 MiB free, of which 1 MiB"),
        (
            4096,
            2048,
            1 << 20,
            "partial has 2.0 MiB free, of which 1 MiB",
        ),
    ] {
        let Some(mut apart) = Apart::new(models_kib, parts_kib) else {
            return;
        };
        apart.options.reserve_bytes = reserve_bytes;
        let remedy = "free space on that disk";
        apart.refusal(&source, &[needs, short, remedy]).await;
        assert_eq!(apart.part_bytes(&source), 0);
    }
}

#[tokio::test]
async fn an_archive_of_unknown_length_is_not_unpacked_onto_a_disk_without_room() {
    let Some(mut apart) = Apart::new(1024, 4096) else {
        return;
    };
    // The smaller it is, the less room is made at a time.
    apart.options.quota_bytes = Some(8_000_000);
    let (server, source) = served(WEIGHTS_BYTES).await;
    server.faults([Fault::Chunked]);
    let words = ["2 MiB for the archive's files; ", "models has "];
    apart.refusal(&source, &words).await;
    // What arrived stays, for when there is room.
    assert!(apart.part_bytes(&source) > WEIGHTS_BYTES as u64);
    assert!(!apart.has(&source));
}

#[tokio::test]
async fn what_goes_makes_room_on_the_disk_that_is_short() {
    let (left_server, left) = served(WEIGHTS_BYTES + 1).await;
    let (_, old) = served(WEIGHTS_BYTES + 2).await;
    let (_, new) = served(WEIGHTS_BYTES + 3).await;
    // Models are short of room: a part on the other disk is no help, although it was not used for longer.
    let Some(apart) = Apart::new(2048, 4096) else {
        return;
    };
    apart.fetch(&old).await.unwrap();
    apart.leave_part(&left_server, &left).await;
    apart.fetch(&new).await.unwrap();
    assert!(apart.has(&new) && !apart.has(&old));
    assert!(apart.part_bytes(&left) > 0);
    assert_eq!(apart.options.counters.evictions(), 1);
    // Parts are: no model is one.
    let Some(apart) = Apart::new(4096, 2048) else {
        return;
    };
    apart.fetch(&old).await.unwrap();
    apart.leave_part(&left_server, &left).await;
    apart.fetch(&new).await.unwrap();
    assert!(apart.has(&new) && apart.has(&old));
    assert_eq!(apart.part_bytes(&left), 0);
    assert_eq!(apart.options.counters.evictions(), 1);
}

#[tokio::test]
async fn a_repository_needs_all_of_one_disk_and_its_longest_file_of_the_other() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let source = Source::of_hub(&server.url(), REPO, None).unwrap();
    let weights_asked = || files_asked(&server).iter().filter(|it| it.is_large).count();
    let Some(apart) = Apart::new(2048, 640) else {
        return;
    };
    let words = ["2 MiB to fetch; the disk of", "partial has "];
    apart.refusal(&source, &words).await;
    let Some(mut apart) = Apart::new(2048, 1024) else {
        return;
    };
    assert_eq!(weights_asked(), 0);
    // The first shard breaks off: its part is of no use to the disk of the models.
    let whole = Fault::IgnoreRange;
    server.file_faults([whole.clone(), whole.clone(), whole.clone(), whole]);
    server.file_faults([Fault::CutAfter(400_000), Fault::Status(404, vec![])]);
    apart.fetch(&source).await.unwrap_err();
    assert!(apart.part_bytes(&source) > 0);
    let before = weights_asked();
    let filler = apart.models.0.join("filler");
    fs::write(&filler, vec![0; 1_000_000]).unwrap();
    apart.refusal(&source, &["to fetch; ", "models has"]).await;
    assert_eq!(weights_asked(), before);
    fs::remove_file(filler).unwrap();
    // The quota counts a file once, while it is copied too.
    apart.options.quota_bytes = Some(files.needed_bytes() as u64);
    let directory = apart.fetch(&source).await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
}

/// What was promised to a fetch on the disk of the parts is room for the longest file that is still to come.
#[tokio::test]
async fn a_long_file_has_room_that_others_do_not_take_while_a_short_one_arrives() {
    let Some(mut apart) = Apart::new(4096, 1024) else {
        return;
    };
    let files = Files::new(1);
    let hub = HubServer::start(REPO, &files.list()).await;
    let first = Source::of_hub(&hub.url(), REPO, None).unwrap();
    let (_server, second) = served(600_000).await;
    // Long enough for the second fetch to be refused meanwhile.
    apart.options.stall_timeout = Duration::from_secs(3);
    hub.file_faults([Fault::IgnoreRange, Fault::StallAfter(3)]);
    let meanwhile = async {
        let begins = Instant::now();
        while files_asked(&hub).len() < 2 {
            assert!(begins.elapsed() < Duration::from_secs(60), "nothing comes");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        apart.refusal(&second, &["partial has "]).await;
        assert!(!apart.has(&first), "it was over before");
    };
    let (directory, ()) = tokio::join!(apart.fetch(&first), meanwhile);
    assert_eq!(files_in(&directory.unwrap()), files.needed());
    apart.fetch(&second).await.unwrap();
}

#[tokio::test]
async fn a_directory_of_the_same_disk_mounted_for_models_needs_room_for_a_copy() {
    let files = Files::new(1);
    let server = HubServer::start(REPO, &files.list()).await;
    let fetcher = Fetcher::new(&server);
    let top = fetcher.directory.path();
    // Room for all files, and not for the longest twice.
    let Some(_disk) = Disk::mount(top.to_owned(), 1536) else {
        return;
    };
    let Some(_models) = Disk::bind(&top.join("elsewhere"), top.join("models")) else {
        return;
    };
    let error = fetcher.failure().await;
    assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
    let text = error.to_string();
    let disk = format!("MiB to fetch; the disk of {} has", top.display());
    assert!(text.contains(&disk), "{text}");
    assert!(files_asked(&server).iter().all(|it| !it.is_large));
    let grow = ["-o", "remount,size=2560k"];
    let grown = Command::new("mount").args(grow).arg(top).status();
    assert!(grown.unwrap().success());
    let directory = fetcher.fetch().await.unwrap();
    assert_eq!(files_in(&directory), files.needed());
    assert_eq!(
        files_in(&top.join("elsewhere").join(fetcher.source.key().as_str())),
        files.needed()
    );
}
