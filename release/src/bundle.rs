//! A release with models in one archive, for clusters whose nodes reach no registry and no hub.
//!
//! ```text
//! hearth-VERSION/README.md          what to do with it
//! hearth-VERSION/install-node.sh    puts images and models on a node
//! hearth-VERSION/…                  the files of the release: images, chart, install.yaml, SBOMs
//! hearth-VERSION/images.txt         the archives of images, each with its image's name
//! hearth-VERSION/store/             models in the layout of a node's store (`hearth_fetch::Cache`), pinned
//! hearth-VERSION/SHA256SUMS         of all of these
//! ```

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hearth_fetch::{Cache, Hold, Stored};

use crate::archive::{Digesting, append, sha256};
use crate::layout;

/// File of a release, and of a bundle, with the checksums of the others.
pub const SUMS: &str = "SHA256SUMS";
/// How the name of a bundle in a release's directory ends.
const BUNDLE_END: &str = "-bundle.tar";
const README: &str = include_str!("../bundle/README.md");
const INSTALL_NODE: &str = include_str!("../bundle/install-node.sh");

/// What goes into a bundle.
#[derive(Clone, Debug)]
pub struct Bundle<'a> {
    /// Directory of the release, as `scripts/release.sh` writes it.
    pub release: &'a Path,
    /// Store of models, as `hearth models pull` fills it; `None` for a bundle without models.
    pub store: Option<&'a Path>,
    /// Names or keys of the models of the store; empty for all of them.
    pub models: &'a [String],
    /// Version of the release.
    pub version: &'a str,
}

/// The archive while it is written.
struct Archive {
    tar: tar::Builder<File>,
    /// `hearth-VERSION`.
    top: PathBuf,
    /// Lines of [`SUMS`].
    sums: String,
}

impl Bundle<'_> {
    /// Writes the archive, which is there when it is complete; returns the models in it.
    ///
    /// # Errors
    /// When a file of the release is not what its checksum says, a model is not in the store, or something cannot be read
    /// or written.
    pub fn write(&self, archive: &Path) -> anyhow::Result<Vec<Stored>> {
        let unfinished = archive.with_extension("part");
        let file = File::create(&unfinished).with_context(|| unfinished.display().to_string())?;
        let written = self.write_to(file);
        let models = match written {
            Ok(models) => models,
            Err(error) => {
                // What is left of it would only be in the way.
                let _ = std::fs::remove_file(&unfinished);
                return Err(error);
            }
        };
        std::fs::rename(&unfinished, archive).with_context(|| archive.display().to_string())?;
        Ok(models)
    }

    fn write_to(&self, file: File) -> anyhow::Result<Vec<Stored>> {
        let models = self.chosen()?;
        let mut archive = Archive {
            tar: tar::Builder::new(file),
            top: PathBuf::from(format!("hearth-{}", self.version)),
            sums: String::new(),
        };
        archive.text(
            "README.md",
            &README.replace("@VERSION@", self.version),
            0o644,
        )?;
        archive.text("install-node.sh", INSTALL_NODE, 0o755)?;
        let mut images = String::new();
        for (sum, name) in self.files()? {
            let path = self.release.join(&name);
            let found = archive.file(Path::new(&name), &path)?;
            if found != sum {
                bail!(
                    "{} has changed since {SUMS} was written: SHA-256 {found}\n  make the release anew",
                    path.display()
                );
            }
            if Path::new(&name).extension().is_some_and(|end| end == "tar") {
                images.push_str(&format!("{name} {}\n", layout::reference(&path)?));
            }
        }
        archive.text("images.txt", &images, 0o644)?;
        for model in &models {
            archive.model(self.store.unwrap_or(Path::new("")), model)?;
        }
        archive.finish()?;
        Ok(models)
    }

    /// The files of the release with their checksums, without a bundle that was made with it.
    fn files(&self) -> anyhow::Result<Vec<(String, String)>> {
        let path = self.release.join(SUMS);
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!(
                "{} cannot be read\n  name the directory that scripts/release.sh wrote",
                path.display()
            )
        })?;
        let mut files = Vec::new();
        for line in text.lines() {
            let Some((sum, name)) = line.split_once("  ") else {
                bail!("{}: {line:?} is no checksum and name", path.display());
            };
            if !name.ends_with(BUNDLE_END) {
                files.push((sum.to_owned(), name.to_owned()));
            }
        }
        Ok(files)
    }

    /// The models of the store that were asked for.
    fn chosen(&self) -> anyhow::Result<Vec<Stored>> {
        let Some(store) = self.store else {
            return Ok(Vec::new());
        };
        let stored = Cache::new(store).stored()?;
        let is_named = |model: &Stored, name: &String| {
            let about = model.about.as_ref();
            model.key.as_str() == name || about.is_some_and(|about| about.source == *name)
        };
        for name in self.models {
            if !stored.iter().any(|model| is_named(model, name)) {
                bail!(
                    "{}: no model {name} is there\n  fetch it: hearth models pull; hearth models list shows names and keys",
                    store.display()
                );
            }
        }
        let is_chosen = |model: &Stored| {
            self.models.is_empty() || self.models.iter().any(|name| is_named(model, name))
        };
        let chosen: Vec<Stored> = stored.into_iter().filter(is_chosen).collect();
        if chosen.is_empty() {
            bail!(
                "{}: no model is there\n  fetch one: hearth models pull OWNER/NAME, or leave --store out",
                store.display()
            );
        }
        Ok(chosen)
    }
}

impl Archive {
    fn text(&mut self, name: &str, text: &str, mode: u32) -> anyhow::Result<()> {
        append(&mut self.tar, self.top.join(name), text.as_bytes(), mode)?;
        self.sum(&sha256(text.as_bytes()), Path::new(name));
        Ok(())
    }

    /// Adds a file of any size; returns its SHA-256.
    fn file(&mut self, name: &Path, from: &Path) -> anyhow::Result<String> {
        let shown = || from.display().to_string();
        let file = File::open(from).with_context(shown)?;
        let mut header = tar::Header::new_gnu();
        header.set_size(file.metadata().with_context(shown)?.len());
        header.set_mode(0o644);
        let mut reader = Digesting::new(file);
        let name_inside = self.top.join(name);
        let added = self.tar.append_data(&mut header, name_inside, &mut reader);
        added.with_context(shown)?;
        let digits = reader.digits();
        self.sum(&digits, name);
        Ok(digits)
    }

    /// Adds a stored model as a node keeps one that is pinned.
    fn model(&mut self, store: &Path, model: &Stored) -> anyhow::Result<()> {
        let inside = Cache::new("store");
        // Nothing removes it meanwhile.
        let Some(_hold) = Hold::take(&model.directory) else {
            bail!(
                "{} is being removed from the store\n  fetch it again: hearth models pull",
                model.directory.display()
            );
        };
        let about = Cache::new(store).about_file(&model.key);
        if model.about.is_none() {
            bail!(
                "{}: what {} is was not recorded by the version that fetched it\n  remove it and fetch it again: hearth models rm, hearth models pull",
                store.display(),
                model.key
            );
        }
        self.file(&inside.about_file(&model.key), &about)?;
        let pinned = inside.pinned_file(&model.key);
        self.text(&pinned.to_string_lossy(), "", 0o644)?;
        self.directory(&inside.directory(&model.key), &model.directory)
    }

    fn directory(&mut self, name: &Path, from: &Path) -> anyhow::Result<()> {
        let shown = || from.display().to_string();
        let entries = std::fs::read_dir(from).with_context(shown)?;
        let mut paths = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()
            .with_context(shown)?;
        paths.sort();
        for path in paths {
            let name = name.join(path.file_name().unwrap_or_default());
            match path.is_dir() {
                true => self.directory(&name, &path)?,
                false => drop(self.file(&name, &path)?),
            }
        }
        Ok(())
    }

    fn sum(&mut self, digits: &str, name: &Path) {
        self.sums
            .push_str(&format!("{digits}  {}\n", name.display()));
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let name = self.top.join(SUMS);
        append(&mut self.tar, name, self.sums.as_bytes(), 0o644)?;
        let mut file = self.tar.into_inner()?;
        file.flush()?;
        file.sync_all()?;
        Ok(())
    }
}
