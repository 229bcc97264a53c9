//! Files of container images, put together without a container engine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::archive::append;
use crate::elf::{Elf, Platform};

/// User id of the images: unprivileged, as Pod Security `restricted` requires.
const USER: u32 = 65532;
/// Certificate authorities, where Debian has them and where programs look for them.
const AUTHORITIES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The files of an image, and what its container runs.
#[derive(Clone, Debug)]
pub struct Image {
    pub(crate) entrypoint: Vec<String>,
    pub(crate) environment: Vec<String>,
    pub(crate) user: Option<String>,
    platform: Option<Platform>,
    /// Entries by path, without the leading slash.
    files: BTreeMap<PathBuf, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    bytes: Vec<u8>,
    mode: u32,
}

/// The two programs that Hearth's images hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `hearth`.
    Operator,
    /// `hearth-worker`, with the demo model.
    Worker,
}

impl Program {
    /// Name of the program, and of its image.
    pub fn name(self) -> &'static str {
        match self {
            Self::Operator => "hearth",
            Self::Worker => "hearth-worker",
        }
    }
}

impl Default for Image {
    fn default() -> Self {
        Self::new()
    }
}

impl Image {
    /// Creates an image with the files that any program may look for, but no program yet.
    pub fn new() -> Self {
        let image = Self {
            entrypoint: Vec::new(),
            environment: vec!["PATH=/usr/bin:/bin".to_owned()],
            user: None,
            platform: None,
            files: BTreeMap::new(),
        };
        let users = format!("root:x:0:0::/:/none\nhearth:x:{USER}:{USER}::/tmp:/none\n");
        let groups = format!("root:x:0:\nhearth:x:{USER}:\n");
        image
            .text("/etc/passwd", &users)
            .text("/etc/group", &groups)
            .text("/etc/nsswitch.conf", "hosts: files dns\n")
    }

    /// Builds one of Hearth's images from a program that was built. `demo` is the directory of the demo model, which only
    /// the worker's image holds.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn of(program: Program, built: &Path, demo: &Path) -> anyhow::Result<Self> {
        let inside = format!("/usr/bin/{}", program.name());
        let mut image = Self::new().entrypoint(&[&inside]);
        image.user = Some(format!("{USER}:{USER}"));
        image = image.program(built, &inside)?;
        if Path::new(AUTHORITIES).is_file() {
            image = image.file(Path::new(AUTHORITIES), AUTHORITIES, 0o644)?;
        }
        if program == Program::Worker {
            image = image
                .driver_libraries()?
                .directory(demo, "/usr/share/hearth/models/hearth-demo")?
                // What the NVIDIA container runtime brings in where a Pod has a GPU.
                .environment("NVIDIA_DRIVER_CAPABILITIES", "compute,utility");
        }
        Ok(image)
    }

    /// Adds the libraries that NVIDIA's driver, mounted by the container runtime, links besides the program's own.
    fn driver_libraries(mut self) -> anyhow::Result<Self> {
        let directory = self
            .files
            .keys()
            .find(|path| path.ends_with("libc.so.6"))
            .and_then(|path| path.parent())
            .map(|parent| Path::new("/").join(parent));
        // A static program loads nothing.
        let (Some(directory), Some(platform)) = (directory, self.platform) else {
            return Ok(self);
        };
        for name in ["libdl.so.2", "libpthread.so.0", "librt.so.1"] {
            let inside = directory.join(name);
            let from = match self.is_foreign() {
                true => platform.library(name)?,
                false => inside.clone(),
            };
            self = self.file(&from, &inside.to_string_lossy(), 0o755)?;
        }
        Ok(self)
    }

    /// Sets the command that the container runs.
    #[must_use]
    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.entrypoint = words.iter().map(ToString::to_string).collect();
        self
    }

    /// Sets a variable of the container's environment.
    #[must_use]
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push(format!("{name}={value}"));
        self
    }

    /// Adds a text file.
    #[must_use]
    pub fn text(mut self, inside: &str, text: &str) -> Self {
        self.insert(inside, text.as_bytes().to_vec(), 0o644);
        self
    }

    /// Adds a file.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn file(mut self, from: &Path, inside: &str, mode: u32) -> anyhow::Result<Self> {
        let bytes = std::fs::read(from).with_context(|| from.display().to_string())?;
        self.insert(inside, bytes, mode);
        Ok(self)
    }

    /// Adds the files directly in a directory, not those in its subdirectories.
    ///
    /// # Errors
    /// When one cannot be read.
    pub fn directory(mut self, from: &Path, inside: &str) -> anyhow::Result<Self> {
        let entries = std::fs::read_dir(from).with_context(|| from.display().to_string())?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let Some(name) = path.file_name().filter(|_| path.is_file()) else {
                continue;
            };
            let inside = format!("{inside}/{}", name.to_string_lossy());
            self = self.file(&path, &inside, 0o644)?;
        }
        Ok(self)
    }

    /// Adds a program without its symbols, along with the shared libraries that it loads.
    ///
    /// # Errors
    /// When one of them cannot be read, or the program is for another platform than one that the image has.
    pub fn program(mut self, from: &Path, inside: &str) -> anyhow::Result<Self> {
        let bytes = std::fs::read(from).with_context(|| from.display().to_string())?;
        let elf = Elf::parse(&bytes, from)?;
        let platform = *self.platform.get_or_insert(elf.platform);
        if platform != elf.platform {
            bail!(
                "{} is for {}, and the image's other programs for {}\n  an image has one platform: name programs of one",
                from.display(),
                elf.platform.architecture(),
                platform.architecture()
            );
        }
        let libraries = match (&elf.loader, self.is_foreign()) {
            // A static program.
            (None, _) => Vec::new(),
            (Some(loader), true) => elf.foreign_libraries(Path::new(loader))?,
            (Some(_), false) => own_libraries(from)?,
        };
        for (library, path) in libraries {
            self = self.file(&library, &path.display().to_string(), 0o755)?;
        }
        let bytes = match elf.has_symbols {
            true => stripped(from, platform)?,
            false => bytes,
        };
        self.insert(inside, bytes, 0o755);
        Ok(self)
    }

    /// What it runs on: what its programs do. `None` without a program.
    pub fn platform(&self) -> Option<Platform> {
        self.platform
    }

    /// Size of its files on a node, in bytes.
    pub fn unpacked_bytes(&self) -> u64 {
        let bytes = self.files.values().map(|entry| entry.bytes.len() as u64);
        bytes.sum()
    }

    /// Whether its programs do not run on this machine.
    fn is_foreign(&self) -> bool {
        self.platform.is_some() && self.platform != Platform::of_machine()
    }

    fn insert(&mut self, inside: &str, bytes: Vec<u8>, mode: u32) {
        let path = Path::new(inside.trim_start_matches('/')).to_path_buf();
        self.files.insert(path, Entry { bytes, mode });
    }

    /// Builds a tar of the files, each after the directories that contain it.
    pub(crate) fn layer(&self) -> anyhow::Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        let mut directories: BTreeSet<PathBuf> =
            ["dev", "proc", "sys", "tmp"].map(PathBuf::from).into();
        for path in self.files.keys() {
            let above = path.ancestors().skip(1);
            directories.extend(above.filter(|path| *path != Path::new("")).map(Into::into));
        }
        for directory in directories {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(tar::EntryType::Directory);
            let mode = if directory == Path::new("tmp") {
                0o1777
            } else {
                0o755
            };
            header.set_mode(mode);
            header.set_size(0);
            tar.append_data(&mut header, directory.join(""), std::io::empty())?;
        }
        for (path, entry) in &self.files {
            append(&mut tar, path, &entry.bytes, entry.mode)?;
        }
        Ok(tar.into_inner()?)
    }
}

/// Returns what this machine's dynamic loader would map for a program, itself included, by the path here and the same in
/// an image.
fn own_libraries(program: &Path) -> anyhow::Result<Vec<(PathBuf, PathBuf)>> {
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("ldd {}: {}", program.display(), error.trim());
    }
    let mut libraries = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        if line.contains("not found") {
            bail!("{}: {}", program.display(), line.trim());
        }
        // "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)" or "/lib64/ld-linux-x86-64.so.2 (0x…)"; the kernel's own
        // library has no path.
        let path = line.split_whitespace().find(|word| word.starts_with('/'));
        libraries.extend(path.map(without_dots).map(|path| (path.clone(), path)));
    }
    Ok(libraries)
}

/// Turns `/usr/lib/x/../y` into `/usr/lib/y`, which is safe because an image has no symbolic links.
fn without_dots(path: &str) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// Returns a program without symbols and debug information.
fn stripped(program: &Path, platform: Platform) -> anyhow::Result<Vec<u8>> {
    let strip = match Some(platform) == Platform::of_machine() {
        true => "strip".to_owned(),
        false => format!("{}-strip", platform.gnu()),
    };
    let copy = tempfile::NamedTempFile::new()?;
    let output = Command::new(&strip)
        .args(["--strip-all", "-o"])
        .arg(copy.path())
        .arg(program)
        .output()
        .with_context(|| {
            let package = format!("binutils-{}", platform.gnu().replace('_', "-"));
            format!(
                "{strip} is needed for {}\n  install it: Debian's {package}",
                program.display()
            )
        })?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("{strip} {}: {}", program.display(), error.trim());
    }
    Ok(std::fs::read(copy.path())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_directories_before_their_files_and_all_libraries() {
        let program = std::env::current_exe().expect("this program");
        let image = Image::new()
            .program(&program, "/usr/bin/x")
            .expect("libraries");
        assert_eq!(image.platform(), Platform::of_machine());
        let layer = image.layer().expect("layer");
        let mut seen = BTreeSet::from([PathBuf::new()]);
        for entry in tar::Archive::new(layer.as_slice()).entries().expect("tar") {
            let path = entry.expect("entry").path().expect("path").into_owned();
            let above = path.parent().expect("parent").to_path_buf();
            assert!(seen.contains(&above), "{} comes too early", path.display());
            seen.insert(path);
        }
        let has = |part: &str| {
            seen.iter()
                .any(|path| path.display().to_string().contains(part))
        };
        assert!(
            has("usr/bin/x") && has("libc.so") && has("ld-linux"),
            "{seen:?}"
        );
    }
}
