//! Pages of mapped weights: requesting, touching and releasing them.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use hearth_formats::Checkpoint;
use hearth_model::ModuleSpec;
use rustix::fs::{major, minor};
use rustix::mm::{Advice, madvise};

/// Size of one piece of advice in bytes if the device does not report one: the kernel's default read-ahead.
const DEFAULT_ADVICE_BYTES: usize = 128 << 10;

/// Returns the regions of mapped files that a module occupies, with neighbours joined; empty for a checkpoint in
/// memory.
pub(crate) fn regions(spec: &ModuleSpec, checkpoint: &Checkpoint) -> Vec<Bytes> {
    let mut ranges: Vec<(usize, Range<usize>)> = spec
        .tensors
        .iter()
        .filter_map(|tensor| checkpoint.parts(&tensor.name).ok())
        .flatten()
        .map(|part| {
            let range = part.offset as usize..(part.offset + part.size_bytes) as usize;
            (part.file, range)
        })
        .collect();
    ranges.sort_by_key(|(file, range)| (*file, range.start));
    let mut joined: Vec<(usize, Range<usize>)> = Vec::new();
    for (file, range) in ranges {
        match joined.last_mut() {
            Some((last, before)) if *last == file && before.end == range.start => {
                before.end = range.end;
            }
            _ => joined.push((file, range)),
        }
    }
    joined
        .into_iter()
        .map(|(file, range)| (&checkpoint.files()[file], range))
        .filter(|(file, _)| !file.path.as_os_str().is_empty())
        .map(|(file, range)| file.data.slice(range))
        .collect()
}

/// Largest size of one piece of advice, in bytes, that the kernel honours on these files. It reads at most the
/// device's read-ahead per request, or its largest transfer if that is larger (`force_page_cache_ra` in
/// mm/readahead.c), and silently ignores the rest.
pub(crate) fn advice_bytes(checkpoint: &Checkpoint) -> usize {
    let files = checkpoint.files().iter();
    let read_ahead = files.filter_map(|file| read_ahead_bytes(&file.path));
    read_ahead.min().unwrap_or(DEFAULT_ADVICE_BYTES)
}

/// Read-ahead of the device that holds a file, in bytes; `None` if the system does not report it, as for stacked file
/// systems.
fn read_ahead_bytes(file: &Path) -> Option<usize> {
    let device = fs::metadata(file).ok()?.dev();
    let (major, minor) = (major(device), minor(device));
    let text = fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")).ok()?;
    let kib: usize = text.trim().parse().ok()?;
    (kib > 0).then_some(kib << 10)
}

/// Asks the kernel to read pages in the background, `piece_bytes` at a time, as long as `is_wanted` returns true.
pub(crate) fn will_need(bytes: &Bytes, piece_bytes: usize, is_wanted: impl Fn() -> bool) {
    for piece in pieces(covering(bytes), piece_bytes) {
        if !is_wanted() {
            return;
        }
        // Advice that the kernel ignores only costs a page fault later.
        let _ = advise(piece, Advice::WillNeed);
    }
}

/// Splits a range of pages into pieces of whole pages.
fn pieces(range: Range<usize>, piece_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let page = rustix::param::page_size();
    let step = (piece_bytes / page * page).max(page);
    let end = range.end;
    range
        .step_by(step)
        .map(move |start| start..end.min(start.saturating_add(step)))
}

/// Reads pages and maps them, so that the first use does not wait for them.
///
/// # Errors
/// An error if the file cannot be read (it was truncated after it was opened, or the disk fails).
pub(crate) fn populate(bytes: &Bytes) -> io::Result<()> {
    match advise(covering(bytes), Advice::LinuxPopulateRead) {
        // Before Linux 5.14.
        Err(rustix::io::Errno::INVAL) => {
            let step = rustix::param::page_size();
            let sum = (0..bytes.len())
                .step_by(step)
                .fold(0u8, |sum, at| sum ^ bytes[at]);
            std::hint::black_box(sum);
            Ok(())
        }
        other => Ok(other?),
    }
}

/// Unmaps whole pages and marks them as the first to reclaim; returns their size in bytes. They stay in the page cache
/// until the memory is needed, so a module needed again soon costs no disk read.
pub(crate) fn give_back(released: &Releasable) -> u64 {
    let range = within(&released.0);
    if range.is_empty() {
        return 0;
    }
    // Before Linux 5.4, COLD does not exist; unmapping alone leaves the pages at their place in the kernel's LRU list.
    let _ = advise(range.clone(), Advice::LinuxCold);
    match advise(range.clone(), Advice::LinuxDontNeed) {
        Ok(()) => range.len() as u64,
        Err(_) => 0,
    }
}

/// Unmaps the files of a checkpoint and drops them from the page cache, unless another process has them mapped: they
/// are read from disk when they are touched again.
///
/// # Errors
/// An error if a file cannot be reopened.
pub(crate) fn forget(checkpoint: &Checkpoint) -> io::Result<()> {
    let mappings = read_only_file_mappings()?;
    let files = checkpoint.files().iter();
    for file in files.filter(|file| !file.path.as_os_str().is_empty()) {
        for Releasable(whole) in Releasable::among(vec![file.data.clone()], &mappings) {
            advise(covering(&whole), Advice::LinuxDontNeed)?;
        }
        let opened = fs::File::open(&file.path)?;
        // Pages just written are dropped only once they are on disk; a read-only mount has nothing to write.
        let _ = opened.sync_all();
        rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// A part of a file that may leave the page cache.
pub(crate) struct Cached {
    file: Arc<fs::File>,
    offset: u64,
    size_bytes: NonZeroU64,
}

impl Cached {
    /// Where mapped regions of a checkpoint's files come from; regions of other memory are left out. `opened` has the files
    /// that were opened before, by path: each is opened once.
    ///
    /// # Errors
    /// An error if a file cannot be reopened.
    pub(crate) fn of<'c>(
        regions: &[Releasable],
        checkpoint: &'c Checkpoint,
        opened: &mut HashMap<&'c Path, Arc<fs::File>>,
    ) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for Releasable(bytes) in regions {
            let range = addresses(bytes);
            let holds = |data: &Bytes| {
                let whole = addresses(data);
                whole.start <= range.start && range.end <= whole.end
            };
            let file = checkpoint.files().iter().find(|file| holds(&file.data));
            let (Some(file), Some(size_bytes)) = (file, NonZeroU64::new(bytes.len() as u64)) else {
                continue;
            };
            let again = match opened.get(&*file.path) {
                Some(again) => Arc::clone(again),
                None => Arc::new(fs::File::open(&file.path)?),
            };
            opened.insert(&file.path, Arc::clone(&again));
            found.push(Self {
                file: again,
                offset: (range.start - addresses(&file.data).start) as u64,
                size_bytes,
            });
        }
        Ok(found)
    }

    /// Drops its pages from the page cache, but for those that a process has mapped: memory is free at once for what is
    /// read next, for which a control group at its limit would not reclaim much.
    pub(crate) fn drop_pages(&self) {
        // What stays is reclaimed by the kernel when it needs the memory.
        let advice = rustix::fs::Advice::DontNeed;
        let _ = rustix::fs::fadvise(&*self.file, self.offset, Some(self.size_bytes), advice);
    }
}

/// Bytes in a read-only file mapping: releasing their pages loses nothing.
pub(crate) struct Releasable(Bytes);

impl Releasable {
    /// Returns the regions that lie within `mappings`, this process's read-only file mappings.
    pub(crate) fn among(regions: Vec<Bytes>, mappings: &[Range<usize>]) -> Vec<Self> {
        let inside = |bytes: &Bytes| {
            let range = addresses(bytes);
            mappings
                .iter()
                .any(|m| m.start <= range.start && range.end <= m.end)
        };
        regions.into_iter().filter(inside).map(Self).collect()
    }

    pub(crate) fn bytes(&self) -> &Bytes {
        &self.0
    }
}

/// Address ranges of this process's read-only file mappings.
///
/// # Errors
/// An error if `/proc/self/maps` cannot be read.
pub(crate) fn read_only_file_mappings() -> io::Result<Vec<Range<usize>>> {
    Ok(fs::read_to_string("/proc/self/maps")?
        .lines()
        .filter_map(read_only_file)
        .collect())
}

/// Parses `7f00-7f10 r--p 00000000 fe:00 1234 /path`: returns the range if the mapping is a file's and not writable.
fn read_only_file(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (permissions, inode) = (fields.next()?, fields.nth(2)?);
    if inode == "0" || permissions.contains('w') {
        return None;
    }
    let address = |hex| usize::from_str_radix(hex, 16).ok();
    Some(address(start)?..address(end)?)
}

fn addresses(bytes: &Bytes) -> Range<usize> {
    let start = bytes.as_ptr() as usize;
    start..start + bytes.len()
}

/// Range of the pages that hold any of the bytes.
fn covering(bytes: &Bytes) -> Range<usize> {
    let (range, page) = (addresses(bytes), rustix::param::page_size());
    range.start / page * page..range.end.next_multiple_of(page)
}

/// Range of the pages that hold only these bytes.
fn within(bytes: &Bytes) -> Range<usize> {
    let (range, page) = (addresses(bytes), rustix::param::page_size());
    let start = range.start.next_multiple_of(page);
    start..(range.end / page * page).max(start)
}

fn advise(range: Range<usize>, advice: Advice) -> rustix::io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: WILLNEED, COLD and POPULATE_READ change no content. DONTNEED is used only by `give_back` and `forget`,
    // on pages of a `Releasable`: a read-only file mapping, which its `Bytes` keeps alive, and whose last page may
    // extend beyond the end of the file. The next read of such a page restores the same file content, so no reference
    // into it sees a change.
    unsafe { madvise(range.start as *mut _, range.len(), advice) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_read_only_mappings_of_files_may_be_given_back() {
        let file = "7f12a000-7f12c000 r--p 00001000 fe:00 1234       /models/a b.safetensors";
        assert_eq!(read_only_file(file), Some(0x7f12_a000..0x7f12_c000));
        let executable = "55d0-55e0 r-xp 00000000 fe:00 99 /bin/x";
        assert_eq!(read_only_file(executable), Some(0x55d0..0x55e0));
        let others = [
            "7f12a000-7f12c000 rw-p 00001000 fe:00 1234 /models/a.safetensors",
            "7f12a000-7f12c000 r--p 00000000 00:00 0",
            "7f12a000-7f12c000 rw-p 00000000 00:00 0 [heap]",
            "",
            "garbage",
        ];
        for line in others {
            assert_eq!(read_only_file(line), None, "{line}");
        }
    }

    #[test]
    fn advice_comes_in_pieces_that_cover_everything_once() {
        let page = rustix::param::page_size();
        let split = |pages, piece| -> Vec<usize> {
            let all: Vec<_> = pieces(page..page * (1 + pages), piece).collect();
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!(all.iter().map(Range::len).sum::<usize>(), pages * page);
            all.iter().map(|piece| piece.len() / page).collect()
        };
        assert_eq!(split(7, 3 * page), [3, 3, 1]);
        assert_eq!(split(2, page / 2), [1, 1]);
        assert_eq!(split(5, usize::MAX), [5]);
        assert_eq!(split(0, page), [0_usize; 0]);
    }

    #[test]
    fn the_device_tells_how_much_it_reads_ahead() {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let Some(bytes) = read_ahead_bytes(file.path()) else {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: the file system here has no read-ahead of its own"
            );
            return;
        };
        assert!(bytes >= 1024 && bytes.is_multiple_of(1024), "{bytes} bytes");
        assert_eq!(read_ahead_bytes(Path::new("/proc/self/none")), None);
    }

    #[test]
    fn memory_of_our_own_is_never_given_back() {
        let page = rustix::param::page_size();
        let owned = Bytes::from(vec![7u8; 16 * page]);
        let mappings = read_only_file_mappings().unwrap();
        assert!(!mappings.is_empty());
        assert!(Releasable::among(vec![owned], &mappings).is_empty());
    }

    #[test]
    fn pages_shared_with_a_neighbour_are_asked_for_but_not_given_back() {
        let page = rustix::param::page_size();
        let owned = Bytes::from(vec![0u8; 8 * page]);
        let first_page = (owned.as_ptr() as usize).next_multiple_of(page) - owned.as_ptr() as usize;
        let start = first_page + page / 2;
        let region = owned.slice(start..start + 3 * page);
        assert_eq!(covering(&region).len(), 4 * page);
        assert_eq!(within(&region).len(), 2 * page);
        let small = owned.slice(start..start + page / 4);
        assert_eq!(covering(&small).len(), page);
        assert!(within(&small).is_empty());
    }
}
