//! Container images written without a container engine: one layer of chosen files, as an archive that `docker load`,
//! `podman load`, `ctr images import` and `skopeo copy` accept. The same files give the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::programs::root;

/// User id of the images: unprivileged, as Pod Security `restricted` requires.
const USER: u32 = 65532;

/// An image to write.
#[derive(Clone, Debug)]
pub struct Image {
    reference: String,
    entrypoint: Vec<String>,
    user: Option<u32>,
    compressed: bool,
    /// Entries by path, without the leading slash.
    files: BTreeMap<PathBuf, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    bytes: Vec<u8>,
    mode: u32,
}

/// Sizes of an image, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Size of its files on a node.
    pub unpacked: u64,
    /// Size of its archive.
    pub archive: u64,
}

/// The two programs that Hearth's images hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Program {
    /// `hearth`.
    Operator,
    /// `hearth-worker`, with the demo model.
    Worker,
}

impl Image {
    /// Creates an image with the files that any program may look for, but no program yet.
    pub fn new(reference: &str) -> Self {
        let image = Self {
            reference: reference.to_owned(),
            entrypoint: Vec::new(),
            user: None,
            compressed: false,
            files: BTreeMap::new(),
        };
        let users = format!("root:x:0:0::/:/none\nhearth:x:{USER}:{USER}::/tmp:/none\n");
        let groups = format!("root:x:0:\nhearth:x:{USER}:\n");
        image
            .text("/etc/passwd", &users)
            .text("/etc/group", &groups)
            .text("/etc/nsswitch.conf", "hosts: files dns\n")
    }

    /// Builds one of Hearth's images from the programs of a build.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn of(program: Program, reference: &str, built: &Path) -> anyhow::Result<Self> {
        let inside = match program {
            Program::Operator => "/usr/bin/hearth",
            Program::Worker => "/usr/bin/hearth-worker",
        };
        let mut image = Self::new(reference).entrypoint(&[inside]);
        image.user = Some(USER);
        image = image.program(built, inside)?;
        let authorities = Path::new("/etc/ssl/certs/ca-certificates.crt");
        if authorities.is_file() {
            image = image.file(authorities, "/etc/ssl/certs/ca-certificates.crt", 0o644)?;
        }
        if program == Program::Worker {
            image = image.driver_libraries()?;
            let models = root().join("models/hearth-demo");
            image = image.directory(&models, "/usr/share/hearth/models/hearth-demo")?;
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
        let Some(directory) = directory else {
            return Ok(self);
        };
        for name in ["libdl.so.2", "libpthread.so.0", "librt.so.1"] {
            let path = directory.join(name);
            self = self.file(&path, &path.to_string_lossy(), 0o755)?;
        }
        Ok(self)
    }

    /// Sets the command that the container runs.
    #[must_use]
    pub fn entrypoint(mut self, words: &[&str]) -> Self {
        self.entrypoint = words.iter().map(ToString::to_string).collect();
        self
    }

    /// Compresses the layer, for images that are transferred.
    #[must_use]
    pub fn compressed(mut self) -> Self {
        self.compressed = true;
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

    /// Adds a program without its symbols, along with the shared libraries that it links.
    ///
    /// # Errors
    /// When one of them cannot be read.
    pub fn program(mut self, from: &Path, inside: &str) -> anyhow::Result<Self> {
        for library in shared_libraries(from)? {
            let inside = library.display().to_string();
            self = self.file(&library, &inside, 0o755)?;
        }
        self.insert(inside, stripped(from)?, 0o755);
        Ok(self)
    }

    fn insert(&mut self, inside: &str, bytes: Vec<u8>, mode: u32) {
        let path = Path::new(inside.trim_start_matches('/')).to_path_buf();
        self.files.insert(path, Entry { bytes, mode });
    }

    /// Writes the archive.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, archive: &Path) -> anyhow::Result<Sizes> {
        let layer = self.layer()?;
        let diff_id = digest(&layer);
        let (layer, kind) = if self.compressed {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(&layer)?;
            (encoder.finish()?, "tar+gzip")
        } else {
            (layer, "tar")
        };
        let config = serde_json::to_vec(&self.config(&diff_id))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor(&format!("application/vnd.oci.image.layer.v1.{kind}"), &layer)],
        }))?;
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["annotations"] = json!({
            "io.containerd.image.name": self.reference,
            "org.opencontainers.image.ref.name": self.reference,
        });
        let index = json!({"schemaVersion": 2, "manifests": [entry]});
        // The same blobs under the name that `docker load` expects.
        let docker = json!([{
            "Config": blob(&config),
            "RepoTags": [self.reference],
            "Layers": [blob(&layer)],
        }]);
        let file = File::create(archive).with_context(|| archive.display().to_string())?;
        let mut tar = tar::Builder::new(file);
        for (name, bytes) in [
            ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json", serde_json::to_vec(&index)?),
            ("manifest.json", serde_json::to_vec(&docker)?),
            (&blob(&config), config.clone()),
            (&blob(&manifest), manifest.clone()),
            (&blob(&layer), layer.clone()),
        ] {
            append(&mut tar, name, &bytes, 0o644)?;
        }
        let file = tar.into_inner()?;
        let bytes = self.files.values().map(|entry| entry.bytes.len() as u64);
        Ok(Sizes {
            unpacked: bytes.sum(),
            archive: file.metadata()?.len(),
        })
    }

    fn config(&self, diff_id: &str) -> Value {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let mut config = json!({
            "Entrypoint": self.entrypoint,
            "Env": ["PATH=/usr/bin:/bin"],
            "WorkingDir": "/",
        });
        if let Some(user) = self.user {
            config["User"] = json!(format!("{user}:{user}"));
        }
        json!({
            "architecture": architecture,
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "hearth-images"}],
        })
    }

    /// Builds a tar of the files, each after the directories that contain it.
    fn layer(&self) -> anyhow::Result<Vec<u8>> {
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

fn append<W: Write>(
    tar: &mut tar::Builder<W>,
    name: impl AsRef<Path>,
    bytes: &[u8],
    mode: u32,
) -> anyhow::Result<()> {
    let mut header = tar::Header::new_ustar();
    header.set_size(bytes.len() as u64);
    header.set_mode(mode);
    tar.append_data(&mut header, name, bytes)?;
    Ok(())
}

fn descriptor(kind: &str, bytes: &[u8]) -> Value {
    json!({"mediaType": kind, "digest": digest(bytes), "size": bytes.len()})
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(bytes))
}

fn blob(bytes: &[u8]) -> String {
    format!("blobs/{}", digest(bytes).replace(':', "/"))
}

/// Returns the libraries that the dynamic loader would map for a program, including the loader; none for a static one.
fn shared_libraries(program: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("ldd")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        if error.contains("not a dynamic executable") {
            return Ok(Vec::new());
        }
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
        libraries.extend(path.map(without_dots));
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
fn stripped(program: &Path) -> anyhow::Result<Vec<u8>> {
    let copy = tempfile::NamedTempFile::new()?;
    let output = Command::new("strip")
        .args(["--strip-all", "-o"])
        .arg(copy.path())
        .arg(program)
        .output()
        .context("strip")?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("strip {}: {}", program.display(), error.trim());
    }
    Ok(std::fs::read(copy.path())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let directory = tempfile::tempdir().expect("directory");
        let image = Image::new("hearth.test/x:1").text("/a/b/c", "text");
        let archives = ["1", "2"].map(|name| {
            let path = directory.path().join(name);
            image.clone().compressed().write(&path).expect("archive");
            std::fs::read(path).expect("archive")
        });
        assert!(archives[0] == archives[1]);
    }

    #[test]
    fn a_layer_has_directories_before_their_files_and_all_libraries() {
        let program = std::env::current_exe().expect("this program");
        let image = Image::new("hearth.test/x:1")
            .program(&program, "/usr/bin/x")
            .expect("libraries");
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
