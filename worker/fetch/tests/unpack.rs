//! Archives of every kind, and archives that are refused.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support;

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_fetch::{Cache, FaultOrigin, FetchError, FetchOptions, Source, fetch};
use support::{FileServer, model_tar, noise, sha256, tar_of};
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

/// Fetches an archive into a cache of its own.
async fn unpacked(archive: Vec<u8>) -> (TempDir, Result<PathBuf, FetchError>) {
    unpacked_up_to(50, archive).await
}

async fn unpacked_up_to(
    max_entries: u64,
    archive: Vec<u8>,
) -> (TempDir, Result<PathBuf, FetchError>) {
    let checksum = sha256(&archive);
    let server = FileServer::start(archive).await;
    let directory = TempDir::new().unwrap();
    let source = Source::new(&server.url(), &checksum).unwrap();
    let options = FetchOptions {
        max_entries,
        reserve_bytes: 0,
        ..FetchOptions::default()
    };
    let cache = Cache::new(directory.path().join("cache"));
    let outcome = fetch(&source, &cache, &options, Arc::new(|_| {})).await;
    (directory, outcome)
}

/// Returns the error of a refused archive; checks that nothing of it is left.
async fn refused(archive: Vec<u8>) -> FetchError {
    let (directory, outcome) = unpacked(archive).await;
    let error = outcome.expect_err("it was unpacked");
    assert_eq!(error.fault_origin(), FaultOrigin::Content, "{error}");
    let left = files(directory.path());
    let left: Vec<&String> = left
        .iter()
        .filter(|name| !name.ends_with(".lock"))
        .collect();
    assert!(left.is_empty(), "{error} leaves {left:?}");
    error
}

/// Files and links below a directory.
fn files(directory: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            names.extend(files(&entry.path()));
        } else {
            names.push(entry.path().display().to_string());
        }
    }
    names
}

/// Packs a tar with entries that no packer would make: name, kind, link target, content.
fn raw_tar(entries: &[(&str, EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, kind, link, content) in entries {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o4777);
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

const CONFIG: (&str, EntryType, &str, &[u8]) = ("config.json", EntryType::Regular, "", b"{}");

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn every_kind_of_archive_gives_the_same_model() {
    let tar = model_tar(300_000);
    let (first, second) = tar.split_at(100_000);
    let zstd = |bytes: &[u8]| zstd::stream::encode_all(bytes, 1).unwrap();
    let kinds = [
        ("tar", tar.clone()),
        ("gz", gzip(&tar)),
        (
            "gz in two members, as pigz writes",
            [gzip(first), gzip(second)].concat(),
        ),
        ("zst", zstd(&tar)),
        ("zst in two frames", [zstd(first), zstd(second)].concat()),
    ];
    for (kind, archive) in kinds {
        let (_cache, outcome) = unpacked(archive).await;
        let directory = outcome.unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert_eq!(
            fs::read(directory.join("model.safetensors")).unwrap(),
            noise(300_000, 7),
            "{kind}"
        );
        let config = fs::metadata(directory.join("config.json")).unwrap();
        assert_eq!(config.permissions().mode() & 0o7777, 0o644, "{kind}");
    }
}

#[tokio::test]
async fn a_model_in_a_single_directory_is_found() {
    for files in [
        [
            ("./qwen/config.json", b"{}".as_slice()),
            ("./qwen/sub/a.safetensors", b"a"),
        ],
        [("qwen/config.json", b"{}"), ("README.md", b"read me")],
    ] {
        let (_cache, outcome) = unpacked(tar_of(&files)).await;
        let directory = outcome.unwrap();
        assert!(directory.join("config.json").is_file());
        // Nothing of its surroundings is left; beside it is what the cache notes of it.
        let beside = fs::read_dir(directory.parent().unwrap()).unwrap();
        let mut names = beside.map(|entry| entry.unwrap().file_name());
        let is_other = |name: OsString| {
            let name = name.to_string_lossy();
            !name.starts_with(".about-") && !directory.ends_with(&*name)
        };
        assert!(!names.any(is_other));
        assert!(!directory.join("README.md").exists());
    }
    for files in [
        vec![
            ("a/config.json", b"{}".as_slice()),
            ("b/config.json", b"{}"),
        ],
        vec![("a/b/config.json", b"{}")],
        vec![("model.safetensors", b"w")],
        vec![],
    ] {
        let error = refused(tar_of(&files)).await;
        assert!(matches!(error, FetchError::NoModel { .. }), "{error}");
    }
    let error = refused(tar_of(&[("weights.bin", b"w")])).await;
    assert!(error.to_string().contains("it has weights.bin"), "{error}");
}

#[tokio::test]
async fn no_entry_leads_outside() {
    let regular = EntryType::Regular;
    for (name, kind, link) in [
        ("../evil", regular, ""),
        ("a/../../evil", regular, ""),
        ("/tmp/evil", regular, ""),
        ("..", EntryType::Directory, ""),
        ("evil", EntryType::Symlink, "/etc/passwd"),
        ("evil", EntryType::Symlink, "../../outside"),
        ("a/evil", EntryType::Symlink, "../../outside"),
        ("evil", EntryType::Link, "/etc/passwd"),
        ("a/evil", EntryType::Link, "../config.json"),
        ("evil", EntryType::Symlink, "not-there"),
        ("evil", EntryType::Symlink, "evil"),
        ("evil", EntryType::Symlink, "."),
        ("evil", EntryType::Symlink, ""),
        ("evil", EntryType::Char, ""),
        ("evil", EntryType::Block, ""),
        ("evil", EntryType::Fifo, ""),
        ("config.json/evil", regular, ""),
        ("config.json", EntryType::Directory, ""),
        ("config.json", EntryType::Symlink, "other"),
        (".", regular, ""),
    ] {
        let other = ("other", regular, "", b"other".as_slice());
        let error = refused(raw_tar(&[CONFIG, other, (name, kind, link, b"")])).await;
        let FetchError::Unsafe { entry, .. } = &error else {
            panic!("{name}: {error}")
        };
        assert_eq!(entry, name);
    }
}

#[tokio::test]
async fn nothing_is_written_through_a_link() {
    // The classic: a link to a directory outside, then a file in it.
    let outside = TempDir::new().unwrap();
    let link = outside.path().to_str().unwrap();
    let evil = ("out/evil", EntryType::Regular, "", b"evil".as_slice());
    refused(raw_tar(&[
        CONFIG,
        ("out", EntryType::Symlink, link, b""),
        evil,
    ]))
    .await;
    // Inside by their text, outside once they are followed: z → d/e/up/.. where up → ../..
    refused(raw_tar(&[
        CONFIG,
        ("d/e/file", EntryType::Regular, "", b"x"),
        ("d/e/up", EntryType::Symlink, "../..", b""),
        ("z", EntryType::Symlink, "d/e/up/..", b""),
        ("z/evil", EntryType::Regular, "", b"evil"),
    ]))
    .await;
    assert_eq!(files(outside.path()), [""; 0]);
}

/// Makes entries that an attacker might think of: each number of `dice` chooses something.
fn wild_entries(dice: &mut impl Iterator<Item = u8>) -> Vec<(String, EntryType, String)> {
    const WORDS: [&str; 8] = ["..", ".", "a", "b", "config.json", "", "outside", "link"];
    const KINDS: [EntryType; 6] = [
        EntryType::Regular,
        EntryType::Directory,
        EntryType::Symlink,
        EntryType::Link,
        EntryType::Symlink,
        EntryType::Fifo,
    ];
    let path = |dice: &mut dyn Iterator<Item = u8>| {
        let words = dice.next().unwrap() % 4;
        let words = (0..=words).map(|_| WORDS[usize::from(dice.next().unwrap()) % WORDS.len()]);
        words.collect::<Vec<_>>().join("/")
    };
    let count = dice.next().unwrap() % 6;
    (0..=count)
        .map(|_| {
            let kind = KINDS[usize::from(dice.next().unwrap()) % KINDS.len()];
            (path(dice), kind, path(dice))
        })
        .collect()
}

#[tokio::test]
async fn whatever_an_archive_holds_nothing_is_touched_outside() {
    let (mut taken, mut refused) = (0, 0);
    for seed in 0..300 {
        let mut dice = noise(200, seed).into_iter();
        let wild = wild_entries(&mut dice);
        let mut entries = vec![CONFIG];
        entries.extend(
            wild.iter()
                .map(|(name, kind, link)| (name.as_str(), *kind, link.as_str(), b"".as_slice())),
        );
        let archive = raw_tar(&entries);
        // All of it is in the cache already: no server is asked.
        let directory = TempDir::new().unwrap();
        fs::write(directory.path().join("outside"), "untouched").unwrap();
        let cache = directory.path().join("cache");
        let source = Source::new("http://127.0.0.1:9/m.tar", &sha256(&archive)).unwrap();
        let key = source.key();
        fs::create_dir_all(cache.join("partial")).unwrap();
        fs::write(cache.join(format!("partial/{key}.part")), &archive).unwrap();
        let facts = format!("{{\"url_sha256\":\"\",\"total_bytes\":{}}}", archive.len());
        fs::write(cache.join(format!("partial/{key}.json")), facts).unwrap();
        let options = FetchOptions::default();
        let outcome = fetch(&source, &Cache::new(&cache), &options, Arc::new(|_| {})).await;

        let left = files(directory.path());
        assert!(
            left.iter().all(|path| !Path::new(path).is_symlink()),
            "{wild:?}: {left:?}"
        );
        let model = cache.join(format!("models/{key}")).display().to_string() + "/";
        let lock = format!("{key}.lock");
        let outside: Vec<&String> = left
            .iter()
            .filter(|path| !path.starts_with(&model) && !path.ends_with(&lock))
            .filter(|path| !path.ends_with(&format!("models/.about-{key}")))
            .collect();
        assert_eq!(
            outside,
            [&directory.path().join("outside").display().to_string()],
            "{wild:?}"
        );
        assert_eq!(
            fs::read(directory.path().join("outside")).unwrap(),
            b"untouched"
        );
        match outcome {
            Ok(directory) => {
                assert!(directory.join("config.json").is_file(), "{wild:?}");
                taken += 1;
            }
            Err(error) => {
                assert_eq!(
                    error.fault_origin(),
                    FaultOrigin::Content,
                    "{wild:?}: {error}"
                );
                assert!(!Path::new(&model).exists(), "{wild:?}");
                refused += 1;
            }
        }
    }
    assert!(
        taken > 10 && refused > 50,
        "the archives are all alike: {taken} {refused}"
    );
}

/// Exceeds ext4's limit of 65,000 names per file.
#[tokio::test]
async fn a_file_with_more_names_than_the_disk_has_is_told_as_such() {
    let names: Vec<String> = (0..66_000).map(|number| format!("l{number}")).collect();
    let links = names.iter();
    let links = links.map(|name| (name.as_str(), EntryType::Link, "config.json", &b""[..]));
    let entries: Vec<_> = std::iter::once(CONFIG).chain(links).collect();
    let (_cache, outcome) = unpacked_up_to(100_000, raw_tar(&entries)).await;
    match outcome {
        Ok(_) => {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: files of this machine's temporary directory have as many names as one likes"
            );
        }
        Err(error) => {
            assert!(matches!(error, FetchError::Unsafe { .. }), "{error}");
            assert!(error.to_string().contains("a link too many"), "{error}");
        }
    }
}

#[tokio::test]
async fn links_inside_are_second_names() {
    let blob = ("blobs/abc", EntryType::Regular, "", b"weights".as_slice());
    let (_cache, outcome) = unpacked(raw_tar(&[
        // Before their targets, and through another link.
        ("model.safetensors", EntryType::Symlink, "./links/one", b""),
        ("links/one", EntryType::Symlink, "../blobs/abc", b""),
        ("hard", EntryType::Link, "blobs/abc", b""),
        CONFIG,
        blob,
    ]))
    .await;
    let directory = outcome.unwrap();
    let inode = |name: &str| fs::symlink_metadata(directory.join(name)).unwrap().ino();
    assert_eq!(
        fs::read(directory.join("model.safetensors")).unwrap(),
        b"weights"
    );
    for name in ["model.safetensors", "links/one", "hard"] {
        assert!(!directory.join(name).is_symlink());
        assert_eq!(inode(name), inode("blobs/abc"));
    }
    // The set-user-id bit does not survive.
    let mode = fs::metadata(directory.join("blobs/abc"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o644);
}

#[tokio::test]
async fn an_archive_that_is_cut_off_is_told_as_broken() {
    let tar = model_tar(300_000);
    let gz = gzip(&tar);
    let zst = zstd::stream::encode_all(tar.as_slice(), 1).unwrap();
    for archive in [
        &tar[..150_000],
        &gz[..gz.len() / 2],
        &gz[..gz.len() - 4],
        &zst[..zst.len() / 2],
    ] {
        let error = refused(archive.to_vec()).await;
        assert!(matches!(error, FetchError::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("its sha256 is right"), "{error}");
    }
    // A wrong gzip checksum.
    let mut wrong = gz.clone();
    let at = wrong.len() - 8;
    wrong[at] ^= 1;
    let error = refused(wrong).await;
    assert!(matches!(error, FetchError::Corrupt { .. }), "{error}");
}

#[tokio::test]
async fn what_is_no_archive_is_told_by_its_name() {
    for (bytes, expected) in [
        (
            b"<!DOCTYPE html><title>Log in</title>".to_vec(),
            "an HTML page",
        ),
        (b"PK\x03\x04 and so on".to_vec(), "a .zip file"),
        (b"\xfd7zXZ\0 and so on".to_vec(), "an .xz file"),
        (b"GGUF\x03\0\0\0".to_vec(), "a GGUF file"),
        (Vec::new(), "it is empty"),
        (noise(100_000, 3), "not a tar"),
        (gzip(&noise(100_000, 3)), "not a tar"),
        (b"short".to_vec(), "not a tar"),
    ] {
        let error = refused(bytes).await;
        assert!(matches!(error, FetchError::NotAnArchive { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[tokio::test]
async fn archives_without_end_are_left() {
    let names: Vec<String> = (0..60).map(|n| format!("file-{n}")).collect();
    let files: Vec<(&str, &[u8])> = names
        .iter()
        .map(|name| (name.as_str(), b"x".as_slice()))
        .collect();
    let error = refused(tar_of(&files)).await;
    assert!(
        matches!(error, FetchError::TooMany { limit: 50, .. }),
        "{error}"
    );

    // A name of 4 MiB, which would be read into memory.
    let name = vec![b'a'; 4 << 20];
    let error = refused(raw_tar(&[
        CONFIG,
        ("././@LongLink", EntryType::GNULongName, "", &name),
    ]))
    .await;
    assert!(error.to_string().contains("too long"), "{error}");

    let deep = "d/".repeat(40) + "file";
    let error = refused(raw_tar(&[CONFIG, (&deep, EntryType::Regular, "", b"")])).await;
    assert!(error.to_string().contains("too deep"), "{error}");
}

/// Packs a model with links of the given paths; long link targets and long names as GNU tar writes them.
fn tar_of_links(links: impl Iterator<Item = (String, String)>) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    let mut append = |kind, content: &[u8]| {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        let name = match kind {
            EntryType::Regular => "config.json",
            _ => "././@LongLink",
        };
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, content).unwrap();
    };
    append(EntryType::Regular, b"{}");
    for (path, target) in links {
        append(EntryType::GNULongName, path.as_bytes());
        append(EntryType::GNULongLink, target.as_bytes());
        append(EntryType::Symlink, b"");
    }
    let tar = builder.into_inner().unwrap();
    zstd::stream::encode_all(tar.as_slice(), 1).unwrap()
}

#[tokio::test]
async fn links_take_no_more_memory_than_a_model_s_could() {
    // No file system has such names, and all of them would be kept until the end: 150 KB that become 3 GB.
    let (long, deep) = ("a".repeat(500_000), "d/".repeat(5) + &"a/".repeat(1100));
    for (path, target) in [
        (long.as_str(), "config.json"),
        ("link", long.as_str()),
        (&"a".repeat(256), "config.json"),
        ("link", &"a".repeat(256)),
        (&deep, "config.json"),
    ] {
        let links = std::iter::once((path.to_owned(), target.to_owned()));
        let error = refused(tar_of_links(links)).await;
        let text = error.to_string();
        assert!(
            matches!(error, FetchError::Unsafe { .. }) && text.contains("too long"),
            "{text}"
        );
        assert!(text.len() < 1000, "{} bytes are told", text.len());
    }

    // Each as long as allowed; together they are too much, long before the archive's end.
    let directory = format!("{}/", "d".repeat(250)).repeat(7);
    let links = (0..6000).map(|n| (format!("{directory}{n}"), format!("{directory}{}", n + 1)));
    let archive = tar_of_links(links);
    let checksum = sha256(&archive);
    let server = FileServer::start(archive).await;
    let source = Source::new(&server.url(), &checksum).unwrap();
    let directory = TempDir::new().unwrap();
    let options = FetchOptions {
        reserve_bytes: 0,
        ..FetchOptions::default()
    };
    let cache = Cache::new(directory.path());
    let outcome = fetch(&source, &cache, &options, Arc::new(|_| {})).await;
    let error = outcome.unwrap_err();
    assert!(
        error.to_string().contains("more than 16 MiB"),
        "{}",
        error.to_string().len()
    );
}

#[tokio::test]
async fn directories_on_the_way_to_a_file_count() {
    let names: Vec<String> = (0..5)
        .map(|n| format!("{n}/{}", "d/".repeat(12)) + "file")
        .collect();
    let files: Vec<(&str, &[u8])> = names
        .iter()
        .map(|name| (name.as_str(), b"x".as_slice()))
        .collect();
    let error = refused(tar_of(&files)).await;
    assert!(matches!(error, FetchError::TooMany { .. }), "{error}");
}

#[tokio::test]
async fn what_a_killed_process_left_is_no_hindrance() {
    let archive = model_tar(1000);
    let checksum = sha256(&archive);
    let server = FileServer::start(archive).await;
    let directory = TempDir::new().unwrap();
    let left = directory
        .path()
        .join("models")
        .join(format!(".unpack-{}", &checksum[..32]));
    fs::create_dir_all(left.join("deep")).unwrap();
    fs::write(left.join("deep/config.json"), "old").unwrap();
    let source = Source::new(&server.url(), &checksum).unwrap();
    let cache = Cache::new(directory.path());
    let model = fetch(&source, &cache, &FetchOptions::default(), Arc::new(|_| {}))
        .await
        .unwrap();
    assert!(!model.join("deep").exists() && !left.exists());
}
