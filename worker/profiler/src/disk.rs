//! Read rate of the disk below a directory, bypassing the page cache.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearth_crds::DiskProfile;
use rustix::fs::{Advice, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::tree::Tree;

/// Limits of a measurement: most bytes to read, and longest time.
const MAX_BYTES: u64 = 256 << 20;
const MAX_TIME: Duration = Duration::from_millis(400);
/// Fewer bytes say nothing about a disk's speed.
const MIN_BYTES: u64 = 1 << 20;
const CHUNK_BYTES: usize = 4 << 20;
/// Size of the file written for reading, and the free space required for it.
const PROBE_BYTES: usize = 128 << 20;
const PROBE_FREE_BYTES: u64 = 8 * PROBE_BYTES as u64;
/// Alignment required by direct reads on all common file systems.
const ALIGN_BYTES: usize = 4096;

/// Returns the disk below `directory` with its free bytes and no rate; `None`, with a warning, if it cannot be
/// queried.
pub(crate) fn unmeasured(tree: &Tree, directory: &Path) -> Option<DiskProfile> {
    let shown = directory.display();
    match rustix::fs::statvfs(directory) {
        Ok(stat) => Some(DiskProfile {
            path: shown.to_string(),
            read_gbps: 0.0,
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            cached_bytes: None,
        }),
        Err(error) => {
            tree.warn(format!("{shown}: {error}: its disk is not measured"));
            None
        }
    }
}

/// Measures the sequential read rate of the disk below `directory` by reading its largest files or, with `probe`, a
/// file written for this purpose if they are too small; returns `None`, with a warning, if there is nothing to read.
pub(crate) fn measure(tree: &Tree, directory: &Path, probe: bool) -> Option<DiskProfile> {
    let disk = unmeasured(tree, directory)?;
    let shown = directory.display();
    let mut read_bytes = 0;
    let mut time = Duration::ZERO;
    for file in largest_files(directory) {
        if read_bytes >= MAX_BYTES || time >= MAX_TIME {
            break;
        }
        match read_file(&file, MAX_BYTES - read_bytes, MAX_TIME - time) {
            Ok((bytes, spent)) => {
                read_bytes += bytes;
                time += spent;
            }
            Err(error) => tree.warn(format!("{}: {error}: not read", file.display())),
        }
    }
    if read_bytes < MIN_BYTES && probe && disk.free_bytes >= PROBE_FREE_BYTES {
        match read_probe(directory) {
            Ok(read) => (read_bytes, time) = read,
            Err(error) => tree.warn(format!("{shown}: {error}: no file is written to be read")),
        }
    }
    if read_bytes < MIN_BYTES || time.is_zero() {
        tree.warn(format!(
            "{shown} has less than {} MiB to read: its disk is not measured",
            MIN_BYTES >> 20
        ));
        return None;
    }
    Some(DiskProfile {
        read_gbps: read_bytes as f64 / time.as_secs_f64() / 1e9,
        ..disk
    })
}

/// Adds the size of the directory's files that are in the page cache: those need not be read, whichever process loaded
/// them.
pub(crate) fn with_cached(disk: DiskProfile) -> DiskProfile {
    let files = largest_files(Path::new(&disk.path));
    let cached: Option<u64> = files.iter().map(|file| cached_bytes(file)).sum();
    DiskProfile {
        cached_bytes: cached.filter(|_| !files.is_empty()),
        ..disk
    }
}

/// Estimates a file's bytes in the page cache from [`SAMPLES`] samples; `None` if the file system does not support it.
fn cached_bytes(path: &Path) -> Option<u64> {
    const SAMPLES: u64 = 256;
    let file = File::open(path).ok()?;
    let len = file.metadata().ok()?.len();
    // A sample that misses must not trigger read-ahead around it.
    rustix::fs::fadvise(&file, 0, None, Advice::Random).ok()?;
    let samples = len.div_ceil(ALIGN_BYTES as u64).clamp(1, SAMPLES);
    let mut found = 0;
    for sample in 0..samples {
        let mut byte = [0_u8];
        let offset = len / samples * sample;
        let mut buffers = [std::io::IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(&file, &mut buffers, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => found += 1,
            Err(Errno::AGAIN) => {}
            Err(_) => return None,
        }
    }
    Some(len / samples * found)
}

/// Writes a file and reads it. The file is unlinked at once, so it disappears whatever happens.
fn read_probe(directory: &Path) -> std::io::Result<(u64, Duration)> {
    let path = directory.join(format!(".hearth-probe-{}", std::process::id()));
    let mut file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    std::fs::remove_file(&path)?;
    // Different bytes in each block, so that no file system deduplicates or compresses them.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut chunk = Vec::with_capacity(CHUNK_BYTES);
    for _ in 0..PROBE_BYTES / CHUNK_BYTES {
        chunk.clear();
        while chunk.len() < CHUNK_BYTES {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.extend_from_slice(&state.to_le_bytes());
        }
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    let nameless = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    read_file(&nameless, MAX_BYTES, MAX_TIME)
}

/// Regular files in a directory, largest first.
fn largest_files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut files: Vec<(u64, PathBuf)> = entries
        .flatten()
        // Model directories of a hub contain links into its cache: follow them.
        .filter_map(|e| Some((std::fs::metadata(e.path()).ok()?, e.path())))
        .filter(|(metadata, _)| metadata.is_file())
        .map(|(metadata, path)| (metadata.len(), path))
        .collect();
    files.sort_unstable_by(|a, b| b.cmp(a));
    files.into_iter().map(|(_, path)| path).collect()
}

/// Reads a file from its start, with direct I/O if the file system supports it, otherwise after dropping its pages.
/// Returns the number of bytes and the time taken.
fn read_file(path: &Path, max_bytes: u64, max_time: Duration) -> std::io::Result<(u64, Duration)> {
    let direct = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    let mut buffer = vec![0u8; CHUNK_BYTES + ALIGN_BYTES];
    let offset = buffer.as_ptr().align_offset(ALIGN_BYTES).min(ALIGN_BYTES);
    let chunk = &mut buffer[offset..offset + CHUNK_BYTES];
    if let Ok(file) = rustix::fs::open(path, direct, Mode::empty())
        && let Ok(read) = read_timed(File::from(file), chunk, max_bytes, max_time)
    {
        return Ok(read);
    }
    let file = File::open(path)?;
    // Pages mapped by a process are not dropped; then this partly measures the cache.
    rustix::fs::fadvise(file.as_fd(), 0, None, Advice::DontNeed)?;
    read_timed(file, chunk, max_bytes, max_time)
}

fn read_timed(
    mut file: File,
    chunk: &mut [u8],
    max_bytes: u64,
    max_time: Duration,
) -> std::io::Result<(u64, Duration)> {
    let start = Instant::now();
    let mut bytes = 0;
    while bytes < max_bytes && start.elapsed() < max_time {
        match file.read(chunk)? {
            0 => break,
            read => bytes += read as u64,
        }
    }
    Ok((bytes, start.elapsed()))
}
