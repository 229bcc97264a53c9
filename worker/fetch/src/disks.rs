//! The disks of a cache: models may be on another one than the parts of downloads.
//!
//! Whoever mounts a large disk at `models/`, or makes it a link, keeps `partial/` where it was. Then a file is copied to
//! its model instead of being moved, and what has to stay free does so on both disks. Where a directory of the same disk
//! is mounted at `models/`, files are copied too, and for a while that disk has both.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

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

    /// Whether a part is copied to its model: that is on another disk, or below another mount of the same one.
    pub(crate) fn copies_to_models(&self) -> bool {
        let mount = |path: PathBuf| {
            let told = statx(CWD, &path, AtFlags::empty(), StatxFlags::MNT_ID).ok()?;
            let is_told = told.stx_mask & StatxFlags::MNT_ID.bits() != 0;
            is_told.then_some(told.stx_mnt_id)
        };
        match (mount(self.models()), mount(self.partial())) {
            (Some(models), Some(parts)) => models != parts,
            // Linux before 5.8 does not tell.
            _ => self.has_models_apart(),
        }
    }
}
