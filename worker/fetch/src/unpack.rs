//! Unpacks a verified archive into a model's directory.
//!
//! Only regular files and directories are created. Links become hard links to files of the same archive once all of
//! these exist, so no path can lead outside: nothing is ever written through a link.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use tar::{Archive, Entry, EntryType};

use crate::cache::remove_directory;
use crate::directory::{DIRECTORY_MODE, FILE_MODE, make_directory, put, set_mode};
use crate::need::Need;
use crate::part::Part;
use crate::progress::Reporter;
use crate::room::Room;
use crate::{FetchError, Phase};

/// Bytes copied at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Maximum size of one entry's headers and long names.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// Maximum size of the zeros after the last entry.
const MAX_PADDING_BYTES: u64 = 16 << 20;
/// Maximum nesting depth of a path.
const MAX_DEPTH: usize = 32;
/// Maximum length of a path in an archive; below the cache's own directory, it stays under the system's 4,096 bytes.
const MAX_PATH_BYTES: usize = 2048;
/// Maximum length of a name between two slashes: file systems take no longer ones.
const MAX_NAME_BYTES: usize = 255;
/// Maximum size of the paths and targets of all links, which are kept in memory until every file exists.
const MAX_LINK_BYTES: usize = 16 << 20;
/// Bytes of a refused entry's name that are shown.
const SHOWN_BYTES: usize = 200;
/// Maximum length of a chain of links.
const MAX_LINKS: usize = 8;
/// Largest window of a Zstandard frame, as a power of two (`--ultra --long=27`): it costs us memory while unpacking.
const MAX_WINDOW_LOG: u32 = 27;

/// An unpacking: its source, its target and its limits.
pub(crate) struct Unpacking {
    /// The URL, without secrets.
    pub(crate) shown: String,
    /// Verified checksum of the archive.
    pub(crate) sha256: String,
    /// Temporary directory beside the target, on the same file system.
    pub(crate) temporary: PathBuf,
    /// The model's directory, which does not exist yet.
    pub(crate) target: PathBuf,
    /// Room for its files.
    pub(crate) room: Arc<Room>,
    /// Maximum number of files and directories.
    pub(crate) max_entries: u64,
}

/// Unpacks the archive, puts the model in its place by one rename, and removes the archive.
///
/// An archive that can never be unpacked is removed too.
///
/// # Errors
/// The errors of [`crate::fetch`] that content and disk cause; nothing that was unpacked is left.
pub(crate) fn put_in_place(
    unpacking: &Unpacking,
    part: Part,
    reporter: &Reporter,
) -> Result<PathBuf, FetchError> {
    let temporary = &unpacking.temporary;
    // Left behind by a process that was killed.
    remove_directory(temporary)?;
    let outcome = unpack(unpacking, &part, reporter).and_then(|()| rename(unpacking));
    match outcome {
        Ok(()) => {
            part.remove()?;
            tracing::info!(
                url = unpacking.shown,
                sha256 = unpacking.sha256,
                directory = %unpacking.target.display(),
                "model put in place"
            );
            Ok(unpacking.target.clone())
        }
        Err(error) => {
            remove_directory(temporary)?;
            if error.fault_origin() == crate::FaultOrigin::Content {
                part.remove()?;
            }
            Err(error)
        }
    }
}

fn unpack(unpacking: &Unpacking, part: &Part, reporter: &Reporter) -> Result<(), FetchError> {
    let temporary = &unpacking.temporary;
    // Its length may not have been known before, and others fill the disk, too.
    let bytes = part.len_bytes();
    let what = format!("{} MiB for the archive's files", bytes.div_ceil(1 << 20));
    let room = &unpacking.room;
    room.make(Need::of_unpacked(bytes), &what, SystemTime::now())?;
    make_directory(temporary)?;
    let budget = Rc::new(Cell::new(MAX_HEADER_BYTES));
    let file = Counted {
        file: part.reader()?,
        bytes: 0,
        total_bytes: part.len_bytes(),
        reporter,
    };
    let reader = Budgeted {
        inner: unpacking.decoder(file)?,
        budget: Rc::clone(&budget),
    };
    let mut writer = Writer {
        unpacking,
        chunk: vec![0; CHUNK_BYTES],
        unchecked_bytes: 0,
        links: BTreeMap::new(),
        link_bytes: 0,
        directories: 0,
    };
    let mut archive = Archive::new(reader);
    let mut entries = archive
        .entries()
        .map_err(|error| unpacking.not_an_archive(error.to_string()))?;
    let mut count = 0;
    loop {
        budget.set(MAX_HEADER_BYTES);
        let Some(entry) = entries.next() else { break };
        let entry = entry.map_err(|error| match count {
            0 => unpacking.not_an_archive(format!("its content is not a tar archive ({error})")),
            _ => unpacking.corrupt(format!("after {count} entries: {error}")),
        })?;
        count += 1;
        if count > unpacking.max_entries {
            return Err(unpacking.too_many());
        }
        budget.set(u64::MAX);
        writer.entry(entry)?;
    }
    // The checksum of a compressed file comes after its last byte.
    budget.set(MAX_PADDING_BYTES);
    io::copy(&mut archive.into_inner(), &mut io::sink())
        .map_err(|error| unpacking.corrupt(format!("after its last entry: {error}")))?;
    writer.make_links()
}

/// Writes entries below the temporary directory.
struct Writer<'a> {
    unpacking: &'a Unpacking,
    chunk: Vec<u8>,
    unchecked_bytes: u64,
    /// Links by their own path, with the path that they point to, both within the archive.
    links: BTreeMap<PathBuf, PathBuf>,
    /// Bytes of all links' paths.
    link_bytes: usize,
    /// Number of directories created so far.
    directories: u64,
}

impl Writer<'_> {
    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<(), FetchError> {
        let name = entry.path_bytes().into_owned();
        let shown = String::from_utf8_lossy(&name[..name.len().min(SHOWN_BYTES)]).into_owned();
        let refused = |reason: &str| self.unpacking.unsafe_entry(&shown, reason);
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        if is_too_long(&name) {
            return Err(refused(TOO_LONG));
        }
        let path = Path::new(std::ffi::OsStr::from_bytes(&name));
        let path = inside(Path::new(""), path)
            .ok_or_else(|| refused("leads out of the model's directory"))?;
        if path.components().count() > MAX_DEPTH {
            return Err(refused("is nested too deeply"));
        }
        match kind {
            EntryType::Directory => self.directory(&path, &shown),
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(&path, &shown, &mut entry)
            }
            EntryType::Symlink | EntryType::Link => {
                let target = entry
                    .link_name_bytes()
                    .ok_or_else(|| refused("is a link to nothing"))?;
                if is_too_long(&target) {
                    return Err(refused(TOO_LONG));
                }
                let target = Path::new(std::ffi::OsStr::from_bytes(&target));
                // A hard link names its file from the archive's top, a symbolic one from its own directory.
                let from = match kind {
                    EntryType::Symlink => path.parent().unwrap_or(Path::new("")),
                    _ => Path::new(""),
                };
                let target = inside(from, target)
                    .ok_or_else(|| refused("is a link out of the model's directory"))?;
                self.link_bytes += path.as_os_str().len() + target.as_os_str().len();
                if self.link_bytes > MAX_LINK_BYTES {
                    return Err(refused(&format!(
                        "is one link too many: the paths of all of them have more than {} MiB",
                        MAX_LINK_BYTES >> 20
                    )));
                }
                self.links.insert(path, target);
                Ok(())
            }
            _ => Err(refused("is a device, a pipe or of an unknown kind")),
        }
    }

    fn directory(&mut self, path: &Path, shown: &str) -> Result<(), FetchError> {
        let mut full = self.unpacking.temporary.clone();
        for component in path.components() {
            full.push(component);
            match fs::create_dir(&full) {
                Ok(()) => {
                    set_mode(&full, DIRECTORY_MODE)?;
                    self.directories += 1;
                    if self.directories > self.unpacking.max_entries {
                        return Err(self.unpacking.too_many());
                    }
                }
                Err(_) if full.is_dir() => {}
                Err(_) if full.exists() => {
                    return Err(self
                        .unpacking
                        .unsafe_entry(shown, "is both a file and a directory"));
                }
                Err(error) => return Err(FetchError::file(&full, error)),
            }
        }
        Ok(())
    }

    fn file(
        &mut self,
        path: &Path,
        shown: &str,
        entry: &mut Entry<'_, impl Read>,
    ) -> Result<(), FetchError> {
        if path.as_os_str().is_empty() {
            return Err(self.unpacking.unsafe_entry(shown, "has no name"));
        }
        self.directory(path.parent().unwrap_or(Path::new("")), shown)?;
        let full = self.unpacking.temporary.join(path);
        if full.is_dir() {
            return Err(self
                .unpacking
                .unsafe_entry(shown, "is both a file and a directory"));
        }
        let failed = FetchError::in_cache(&full);
        let mut file = File::create(&full).map_err(&failed)?;
        let size_bytes = entry.size();
        let mut written_bytes = 0;
        loop {
            let read = match entry.read(&mut self.chunk) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.unpacking.corrupt(format!("in {shown}: {error}"))),
            };
            file.write_all(&self.chunk[..read]).map_err(&failed)?;
            written_bytes += read as u64;
            self.unchecked_bytes += read as u64;
            if self.unchecked_bytes >= self.unpacking.room.period_bytes() {
                self.unchecked_bytes = 0;
                let room = &self.unpacking.room;
                let what = "the archive's files keep growing";
                room.make(Need::of_unpacked(0), what, SystemTime::now())?;
            }
        }
        if written_bytes != size_bytes {
            return Err(self.unpacking.corrupt(format!(
                "{shown} ends after {written_bytes} of {size_bytes} bytes"
            )));
        }
        set_mode(&full, FILE_MODE)?;
        file.sync_data().map_err(&failed)
    }

    /// Creates the links as hard links.
    fn make_links(mut self) -> Result<(), FetchError> {
        let temporary = &self.unpacking.temporary;
        let links = std::mem::take(&mut self.links);
        for (path, target) in &links {
            let shown = path.as_os_str().as_bytes();
            let shown = String::from_utf8_lossy(&shown[..shown.len().min(SHOWN_BYTES)]);
            let mut target = target;
            for _ in 0..MAX_LINKS {
                let Some(next) = links.get(target) else {
                    break;
                };
                target = next;
            }
            if !temporary.join(target).is_file() {
                let reason = format!(
                    "is a link to {:?}, which is not a file of the archive",
                    target.display()
                );
                return Err(self.unpacking.unsafe_entry(&shown, &reason));
            }
            self.directory(path.parent().unwrap_or(Path::new("")), &shown)?;
            let full = temporary.join(path);
            if full.exists() {
                return Err(self.unpacking.unsafe_entry(&shown, "appears twice"));
            }
            fs::hard_link(temporary.join(target), &full).map_err(|error| match error.kind() {
                io::ErrorKind::TooManyLinks => {
                    let reason = format!(
                        "is a link too many to {:?}: the disk lets no file have so many names",
                        target.display()
                    );
                    self.unpacking.unsafe_entry(&shown, &reason)
                }
                _ => FetchError::file(&full, error),
            })?;
        }
        Ok(())
    }
}

/// Moves the model into place from among the unpacked files, and removes the rest.
fn rename(unpacking: &Unpacking) -> Result<(), FetchError> {
    let Unpacking {
        temporary, target, ..
    } = unpacking;
    let model = model_in(unpacking)?;
    put(&model, target)?;
    // If the model was a subdirectory in the archive, its surroundings are left over.
    remove_directory(temporary)
}

/// Finds the directory with config.json: the top, or the only directory there that has one.
fn model_in(unpacking: &Unpacking) -> Result<PathBuf, FetchError> {
    let top = &unpacking.temporary;
    if top.join("config.json").is_file() {
        return Ok(top.clone());
    }
    let failed = FetchError::in_cache(top);
    let mut names: Vec<OsString> = fs::read_dir(top)
        .map_err(&failed)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<_, _>>()
        .map_err(&failed)?;
    names.sort();
    let mut models = names
        .iter()
        .map(|name| top.join(name))
        .filter(|path| path.join("config.json").is_file());
    if let (Some(model), None) = (models.next(), models.next()) {
        return Ok(model);
    }
    const SHOWN: usize = 5;
    let mut shown: Vec<String> = names
        .iter()
        .take(SHOWN)
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    if names.len() > SHOWN {
        shown.push(format!("{} more", names.len() - SHOWN));
    }
    if shown.is_empty() {
        shown.push("nothing".to_owned());
    }
    Err(FetchError::NoModel {
        url: unpacking.shown.clone(),
        names: shown.join(", "),
    })
}

/// Reason that a path or a link's target is refused.
const TOO_LONG: &str = "has a path or a name in it that is too long";

/// Whether a path, or a name in it, is longer than the limits.
fn is_too_long(path: &[u8]) -> bool {
    let mut names = path.split(|byte| *byte == b'/');
    path.len() > MAX_PATH_BYTES || names.any(|name| name.len() > MAX_NAME_BYTES)
}

/// Resolves `path` relative to `from`, without `.` and `..`; `None` if it leads out of the top.
fn inside(from: &Path, path: &Path) -> Option<PathBuf> {
    let mut parts: Vec<OsString> = from.iter().map(OsString::from).collect();
    for component in path.components() {
        match component {
            Component::Normal(name) => parts.push(name.to_owned()),
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.iter().collect())
}

/// Offset of a tar's magic.
const MAGIC_AT: usize = 257;
/// Number of leading bytes that tell a file's type.
pub(crate) const HEAD_BYTES: usize = MAGIC_AT + 5;

/// Whether a file with these first bytes can be unpacked: gzip, zstd, or a tar with a magic.
pub(crate) fn is_archive(head: &[u8]) -> bool {
    let is_compressed = matches!(head, [0x1f, 0x8b, ..] | [0x28, 0xb5, 0x2f, 0xfd, ..]);
    is_compressed || head.get(MAGIC_AT..HEAD_BYTES) == Some(b"ustar".as_slice())
}

/// Whether a file with these first bytes is an archive, or weights as safetensors: the length of their header, whose upper half
/// is 0, and a brace.
pub(crate) fn is_of_model(head: &[u8]) -> bool {
    let is_weights = matches!(head, [_, _, _, _, 0, 0, 0, 0, b'{', ..]);
    is_weights || is_archive(head)
}

impl Unpacking {
    /// Returns a reader of the tar inside the file, chosen by its first bytes.
    fn decoder<'a>(&self, mut file: Counted<'a>) -> Result<Box<dyn Read + 'a>, FetchError> {
        let mut head = Vec::new();
        let peek = (&mut file).take(512).read_to_end(&mut head);
        peek.map_err(|error| self.corrupt(error.to_string()))?;
        let whole = io::Cursor::new(head.clone()).chain(file);
        let whole = BufReader::with_capacity(CHUNK_BYTES, whole);
        let known: Option<&str> = match head.as_slice() {
            [0x1f, 0x8b, ..] => return Ok(Box::new(flate2::bufread::MultiGzDecoder::new(whole))),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => {
                let decoder = zstd::stream::read::Decoder::with_buffer(whole);
                let decoder = decoder.and_then(|mut decoder| {
                    decoder.window_log_max(MAX_WINDOW_LOG)?;
                    Ok(decoder)
                });
                let decoder = decoder.map_err(|error| self.corrupt(error.to_string()))?;
                return Ok(Box::new(decoder));
            }
            [0xfd, b'7', b'z', b'X', b'Z', ..] => Some("it is an .xz file"),
            [b'B', b'Z', b'h', ..] => Some("it is a .bz2 file"),
            [b'P', b'K', ..] => Some("it is a .zip file"),
            [b'7', b'z', 0xbc, 0xaf, ..] => Some("it is a .7z file"),
            [b'G', b'G', b'U', b'F', ..] => Some("it is a GGUF file"),
            [b'<', ..] => Some("it is an HTML page"),
            [] => Some("it is empty"),
            _ => None,
        };
        let is_tar = is_archive(&head);
        match known {
            Some(what) if !is_tar => Err(self.not_an_archive(what.to_owned())),
            // The oldest kind of tar has no magic: its header's checksum decides.
            _ => Ok(Box::new(whole)),
        }
    }

    fn not_an_archive(&self, what: String) -> FetchError {
        FetchError::NotAnArchive {
            url: self.shown.clone(),
            what,
        }
    }

    fn too_many(&self) -> FetchError {
        FetchError::TooMany {
            url: self.shown.clone(),
            limit: self.max_entries,
        }
    }

    fn corrupt(&self, reason: String) -> FetchError {
        FetchError::Corrupt {
            url: self.shown.clone(),
            reason,
        }
    }

    fn unsafe_entry(&self, entry: &str, reason: &str) -> FetchError {
        FetchError::Unsafe {
            url: self.shown.clone(),
            entry: entry.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

/// Reports how much of the archive has been read.
struct Counted<'a> {
    file: File,
    bytes: u64,
    total_bytes: u64,
    reporter: &'a Reporter,
}

impl Read for Counted<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes += read as u64;
        self.reporter
            .tell(Phase::Unpacking, self.bytes, Some(self.total_bytes));
        Ok(read)
    }
}

/// Fails once more is read than the budget allows: what lies between files is read into memory.
struct Budgeted<R> {
    inner: R,
    budget: Rc<Cell<u64>>,
}

impl<R: Read> Read for Budgeted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        let left = self.budget.get().checked_sub(read as u64);
        let left = left.ok_or_else(|| {
            io::Error::other("a header, a name or the gap between files is too long")
        })?;
        self.budget.set(left);
        Ok(read)
    }
}
