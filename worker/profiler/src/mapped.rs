//! Rate at which a disk's bytes arrive through the page cache, as those of weights that exceed memory do.
//!
//! Workers map weights, ask the kernel for what comes next in pieces that it reads in full, and wait in page faults for
//! what has not arrived. Mapping takes `unsafe`, which this crate forbids. So the same requests go to the file
//! (`posix_fadvise`, which the kernel makes of `madvise` on mapped files), and reads into a buffer wait for the pages.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, major, minor};

use crate::disk::{MAX_BYTES, MAX_TIME, MIN_BYTES, Sampled};
use crate::tree::Tree;

/// Bytes that are asked for ahead of those that are read.
const AHEAD_BYTES: u64 = 32 << 20;
/// Size of a part of a file that is read if samples of it are not in the page cache.
const PART_BYTES: u64 = 16 << 20;
/// Samples of a part.
const SAMPLES: usize = 8;
/// Size of one request where the device does not report its read-ahead: the kernel's default.
const DEFAULT_PIECE_BYTES: u64 = 128 << 10;
/// File systems whose files are memory: there is no disk to measure.
const IN_MEMORY: [u64; 2] = [
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
];

/// Reads what the page cache lacks of `files`, in their order; returns the rate in GB/s. `None` if it lacks too little, if
/// the file system does not say what it lacks, or if there is no disk. Nothing is dropped from the page cache for it.
pub(crate) fn read_gbps(tree: &Tree, files: &[PathBuf]) -> Option<f64> {
    let mut read = Arrived {
        bytes: 0,
        time: Duration::ZERO,
    };
    for path in files {
        if read.is_enough() {
            break;
        }
        if let Err(error) = read.absent_of(tree, path) {
            tree.warn(format!(
                "{}: {error}: not read through the page cache",
                path.display()
            ));
        }
    }
    let is_rate = read.bytes >= MIN_BYTES && !read.time.is_zero();
    is_rate.then(|| read.bytes as f64 / read.time.as_secs_f64() / 1e9)
}

/// What was read, and how long that took.
struct Arrived {
    bytes: u64,
    time: Duration,
}

impl Arrived {
    fn is_enough(&self) -> bool {
        self.bytes >= MAX_BYTES || self.time >= MAX_TIME
    }

    /// Reads the parts of a file that are not in the page cache.
    fn absent_of(&mut self, tree: &Tree, path: &Path) -> std::io::Result<()> {
        let file = File::open(path)?;
        let kind = rustix::fs::fstatfs(&file)?.f_type;
        // The type of this field differs from one architecture to another, its low bits do not.
        if IN_MEMORY.contains(&(kind as u64 & 0xffff_ffff)) {
            return Ok(());
        }
        let piece_bytes = piece_bytes(tree, &file)?;
        let absent = absent_parts(&mut Sampled::open(path)?, MAX_BYTES - self.bytes);
        let pieces: Vec<Range<u64>> = absent
            .iter()
            .flat_map(|part| pieces(part, piece_bytes))
            .collect();
        let ahead = (AHEAD_BYTES / piece_bytes).max(1) as usize;
        let mut buffer = vec![0_u8; usize::try_from(piece_bytes).unwrap_or(usize::MAX)];
        let mut asked = 0;
        let before = self.time;
        let begin = Instant::now();
        for (n, piece) in pieces.iter().enumerate() {
            if self.is_enough() {
                break;
            }
            for next in pieces.iter().take(n + 1 + ahead).skip(asked) {
                let len = std::num::NonZeroU64::new(next.end - next.start);
                rustix::fs::fadvise(&file, next.start, len, Advice::WillNeed)?;
                asked += 1;
            }
            let len = (piece.end - piece.start) as usize;
            file.read_exact_at(&mut buffer[..len], piece.start)?;
            self.bytes += len as u64;
            self.time = before + begin.elapsed();
        }
        Ok(())
    }
}

/// Size of one request: the device's read-ahead, as workers have it, since the kernel ignores what goes beyond.
fn piece_bytes(tree: &Tree, file: &File) -> std::io::Result<u64> {
    let device = file.metadata()?.dev();
    let (major, minor) = (major(device), minor(device));
    let kib = tree.number::<u64>(&format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"));
    // Whole pages, and no more than is to be read.
    let reported = kib
        .map_or(0, |kib| kib.saturating_mul(1024))
        .min(PART_BYTES);
    Ok(match reported & !0xfff {
        0 => DEFAULT_PIECE_BYTES,
        bytes => bytes,
    })
}

/// Parts of a file that the page cache lacks, as samples say, until they have `most_bytes`; from the end, since the
/// beginning has just been read directly, and a disk or a virtual machine's host may still have it.
fn absent_parts(file: &mut Sampled, most_bytes: u64) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut bytes = 0;
    for n in (0..file.len.div_ceil(PART_BYTES)).rev() {
        if bytes >= most_bytes {
            break;
        }
        let start = n * PART_BYTES;
        let part = start..file.len.min(start + PART_BYTES);
        if is_absent(file, &part) {
            bytes += part.end - part.start;
            parts.push(part);
        }
    }
    parts
}

/// Whether at most one sample of a part is in the page cache: an earlier one may have brought its page in.
fn is_absent(file: &mut Sampled, part: &Range<u64>) -> bool {
    let mut cached = 0;
    for _ in 0..SAMPLES {
        match file.is_cached(part.clone()) {
            Some(false) => {}
            Some(true) if cached == 0 => cached += 1,
            Some(true) | None => return false,
        }
    }
    true
}

fn pieces(part: &Range<u64>, piece_bytes: u64) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = part.end;
    (part.start..end)
        .step_by(usize::try_from(piece_bytes).unwrap_or(usize::MAX))
        .map(move |start| start..end.min(start + piece_bytes))
}
