//! Read rates of the disk below a directory: past the page cache, and through it.

use std::fs::File;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_crds::DiskProfile;
use rustix::fs::{Advice, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

use crate::mapped;
use crate::tree::Tree;

/// Limits of a measurement: most bytes to read, and longest time.
pub(crate) const MAX_BYTES: u64 = 256 << 20;
pub(crate) const MAX_TIME: Duration = Duration::from_millis(400);
/// Fewer bytes say nothing about a disk's speed.
pub(crate) const MIN_BYTES: u64 = 1 << 20;
/// Levels of directories below the given one, and files and directories of all of them, among which the largest files are sought.
const MAX_DEPTH: usize = 3;
const MAX_ENTRIES: usize = 10_000;
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
            mapped_read_gbps: 0.0,
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            cached_bytes: None,
        }),
        Err(error) => {
            tree.warn(format!("{shown}: {error}: its disk is not measured"));
            None
        }
    }
}

/// Measures the sequential read rate of the disk below `directory`, and the rate through the page cache where that lacks
/// some of it, by reading the largest files there; if they are too small, with `probe` a file written for this purpose, else the files
/// in up to [`MAX_DEPTH`] levels of directories below. Returns `None`, with a warning, if there is nothing to read.
pub(crate) fn measure(tree: &Tree, directory: &Path, probe: bool) -> Option<DiskProfile> {
    let disk = unmeasured(tree, directory)?;
    let shown = directory.display();
    let mut files = largest_files(directory, 0);
    let (mut read_bytes, mut time) = read_files(tree, &files);
    // Open until it was read by both ways: it has no name.
    let mut probe_file = None;
    if read_bytes < MIN_BYTES && probe && disk.free_bytes >= PROBE_FREE_BYTES {
        match read_probe(directory) {
            Ok((file, read)) => {
                (read_bytes, time) = read;
                files = vec![nameless(&file)];
                probe_file = Some(file);
            }
            Err(error) => tree.warn(format!("{shown}: {error}: no file is written to be read")),
        }
    }
    if read_bytes < MIN_BYTES {
        files = largest_files(directory, MAX_DEPTH);
        (read_bytes, time) = read_files(tree, &files);
    }
    if read_bytes < MIN_BYTES || time.is_zero() {
        let probe = match probe {
            true => format!("free {} MiB there", PROBE_FREE_BYTES >> 20),
            false => "let a file be written there for a moment (--probe-disk)".to_owned(),
        };
        tree.warn(format!(
            "{shown} has less than {} MiB to read: its disk is not measured. Name a directory with a model's weights, or {probe}",
            MIN_BYTES >> 20
        ));
        return None;
    }
    let mapped_read_gbps = mapped::read_gbps(tree, &files).unwrap_or(0.0);
    drop(probe_file);
    Some(DiskProfile {
        read_gbps: read_bytes as f64 / time.as_secs_f64() / 1e9,
        mapped_read_gbps,
        ..disk
    })
}

/// Reads files one after another, past the page cache: the number of bytes and the time taken.
fn read_files(tree: &Tree, files: &[PathBuf]) -> (u64, Duration) {
    let (mut read_bytes, mut time) = (0, Duration::ZERO);
    for file in files {
        if read_bytes >= MAX_BYTES || time >= MAX_TIME {
            break;
        }
        match read_file(file, MAX_BYTES - read_bytes, MAX_TIME - time) {
            Ok((bytes, spent)) => {
                read_bytes += bytes;
                time += spent;
            }
            Err(error) => tree.warn(format!("{}: {error}: not read", file.display())),
        }
    }
    (read_bytes, time)
}

/// Adds the size of the directory's files that are in the page cache: those need not be read, whichever process loaded
/// them.
pub(crate) fn with_cached(disk: DiskProfile) -> DiskProfile {
    let files = largest_files(Path::new(&disk.path), 0);
    let cached: Option<u64> = files.iter().map(|file| cached_bytes(file)).sum();
    DiskProfile {
        cached_bytes: cached.filter(|_| !files.is_empty()),
        ..disk
    }
}

/// Estimates a file's bytes in the page cache from [`SAMPLES`] samples; `None` if the file system does not support it.
fn cached_bytes(path: &Path) -> Option<u64> {
    const SAMPLES: u64 = 256;
    let mut file = Sampled::open(path).ok()?;
    let len = file.len;
    let samples = len.div_ceil(ALIGN_BYTES as u64).clamp(1, SAMPLES);
    let mut found = 0;
    for sample in 0..samples {
        let start = len / samples * sample;
        found += u64::from(file.is_cached(start..start + len / samples)?);
    }
    Some(len / samples * found)
}

/// A file that is asked which of its bytes are in the page cache.
pub(crate) struct Sampled {
    file: File,
    /// Its size in bytes.
    pub(crate) len: u64,
    /// State of the choice of samples.
    state: u64,
}

impl Sampled {
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        // A sample that misses must not trigger read-ahead around it.
        rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
        // Some kernels read a page that was missed, so that samples at the same places would find it.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let state = now.map_or(0, |time| u64::from(time.subsec_nanos())) + 1;
        Ok(Self { file, len, state })
    }

    /// Whether a byte of a part, chosen at random, is in the page cache; `None` if the file system does not say.
    pub(crate) fn is_cached(&mut self, part: Range<u64>) -> Option<bool> {
        self.state = next(self.state);
        let offset = part.start + self.state % (part.end - part.start).max(1);
        let mut byte = [0_u8];
        let mut buffers = [std::io::IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(&self.file, &mut buffers, offset, ReadWriteFlags::NOWAIT) {
            Ok(_) => Some(true),
            Err(Errno::AGAIN) => Some(false),
            Err(_) => None,
        }
    }
}

/// Writes a file and reads it past the page cache, from which it is dropped. The file is unlinked at once, so it disappears
/// whatever happens.
fn read_probe(directory: &Path) -> std::io::Result<(File, (u64, Duration))> {
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
            state = next(state);
            chunk.extend_from_slice(&state.to_le_bytes());
        }
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    let read = read_file(&nameless(&file), MAX_BYTES, MAX_TIME)?;
    // What was just written is in the page cache, and nobody else has this file.
    rustix::fs::fadvise(file.as_fd(), 0, None, Advice::DontNeed)?;
    Ok((file, read))
}

/// The next of a sequence of numbers that look random, none of them 0.
fn next(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^ (state << 17)
}

/// Path of an open file that has no name.
fn nameless(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Regular files in a directory and in `depth` levels of directories below it on the same file system, largest first. No more than
/// [`MAX_ENTRIES`] entries are looked at, the nearest ones first.
fn largest_files(directory: &Path, depth: usize) -> Vec<PathBuf> {
    let device = |path: &Path| std::fs::metadata(path).ok().map(|it| it.dev());
    let top = device(directory);
    let mut files: Vec<(u64, PathBuf)> = Vec::new();
    let mut level = vec![directory.to_owned()];
    let mut left = MAX_ENTRIES;
    for _ in 0..=depth {
        let mut below = Vec::new();
        for entry in level.iter().flat_map(std::fs::read_dir).flatten().flatten() {
            let path = entry.path();
            if left == 0 {
                break;
            }
            left -= 1;
            // A link to a directory may lead back.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                below.push(path);
                continue;
            }
            // Model directories of a hub contain links into its cache: follow them.
            match std::fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() => files.push((metadata.len(), path)),
                _ => {}
            }
        }
        below.retain(|path| device(path) == top);
        level = below;
    }
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
