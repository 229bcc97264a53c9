//! The disks of a cache: models may be on another one than the parts of downloads.
//!
//! Whoever mounts a large disk at `models/`, or makes it a link, keeps `partial/` where it was. Then a file is copied to
//! its model instead of being moved, and what has to stay free does so on both disks.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::Cache;

impl Cache {
    /// A directory on the disk that models are on: the cache's own, or `models/` if that is on another one.
    pub fn disk_of_models(&self) -> PathBuf {
        match self.has_models_apart() {
            true => self.models(),
            false => self.path().to_owned(),
        }
    }

    /// Whether models and parts are on different disks.
    pub(crate) fn has_models_apart(&self) -> bool {
        let device = |path: PathBuf| fs::metadata(path).map(|it| it.dev()).ok();
        match (device(self.models()), device(self.partial())) {
            (Some(models), Some(parts)) => models != parts,
            _ => false,
        }
    }
}
