//! Hearth on a cluster: its images, built from the programs of the test build.

use std::path::{Path, PathBuf};

use anyhow::Context;
use hearth_release::image::{Image, Program};
use hearth_release::layout::Layout;

use super::Cluster;
use crate::programs::{program, root, target_directory};

/// Images for the chart to use.
#[derive(Clone, Debug, PartialEq)]
pub struct Images {
    /// `REGISTRY/NAME` and the tag, separately.
    pub operator: (String, String),
    /// The same for the worker.
    pub worker: (String, String),
}

impl Cluster {
    /// Imports Hearth's images into all nodes. On a foreign cluster they are those of `HEARTH_TEST_REGISTRY`, with the
    /// tag `test`.
    ///
    /// # Panics
    /// When they cannot be made.
    pub fn import_hearth(&self) -> Images {
        if self.is_own() {
            return self.import_programs(TAG, program);
        }
        let registry = std::env::var("HEARTH_TEST_REGISTRY").unwrap_or_else(|_| {
            panic!(
                "HEARTH_TEST_REGISTRY is not set\n  push the images of `make images` with the tag \
                 `test` to where the cluster finds them, and name that registry"
            )
        });
        images(&registry, TAG)
    }

    /// Imports images of the programs in a directory, which are of an earlier version, into all nodes of the test's own cluster.
    ///
    /// # Panics
    /// When they cannot be made.
    pub fn import_earlier(&self, directory: &Path) -> Images {
        self.import_programs("earlier", |name| directory.join(name))
    }

    fn import_programs(&self, tag: &str, built: impl Fn(&str) -> PathBuf) -> Images {
        for which in [Program::Operator, Program::Worker] {
            let archive = archive(which, &built(which.name()), tag)
                .unwrap_or_else(|error| panic!("the image of {}: {error:#}", which.name()));
            self.import_image(&archive);
        }
        images(REGISTRY, tag)
    }
}

const REGISTRY: &str = "hearth.test";
const TAG: &str = "test";

fn images(registry: &str, tag: &str) -> Images {
    let image = |which: Program| (format!("{registry}/{}", which.name()), tag.to_owned());
    Images {
        operator: image(Program::Operator),
        worker: image(Program::Worker),
    }
}

/// Returns the image archive of a program, rewritten if the program has changed. The archive gets the program's
/// modification time: a build with other features replaces a newer program with an older one.
fn archive(which: Program, built: &Path, tag: &str) -> anyhow::Result<PathBuf> {
    let name = which.name();
    let directory = target_directory().join("images");
    std::fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    let archive = directory.join(format!("{name}-{tag}.tar"));
    let time = built
        .metadata()
        .with_context(|| built.display().to_string())?
        .modified()?;
    if modified(&archive)? != Some(time) {
        // Written under another name until complete, so that a killed test leaves no partial archive.
        let unfinished = directory.join(format!("{name}.{}", std::process::id()));
        let image = Image::of(which, built, &root().join("models/hearth-demo"))?;
        Layout::new(&format!("{REGISTRY}/{name}:{tag}"))
            .image(image)
            .write(&unfinished)?;
        std::fs::File::options()
            .write(true)
            .open(&unfinished)?
            .set_modified(time)?;
        std::fs::rename(&unfinished, &archive)?;
    }
    Ok(archive)
}

/// Returns a file's modification time; `None` if it does not exist.
fn modified(file: &Path) -> anyhow::Result<Option<std::time::SystemTime>> {
    match file.metadata() {
        Ok(found) => Ok(Some(found.modified()?)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| file.display().to_string()),
    }
}
