//! When models were last used, and which of them are pinned.
//!
//! Both are on disk without content of their own, a file's time and a file's presence, so no crash leaves half of them.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use crate::cache::remove_file;
use crate::directory::sync;
use crate::{Cache, FetchError, Key};

impl Cache {
    /// Keeps the model until it is unpinned or removed by hand: no quota and no [`Cache::retain`] removes it.
    ///
    /// # Errors
    /// [`FetchError::Cache`].
    pub fn pin(&self, key: &Key) -> Result<(), FetchError> {
        let path = self.pinned_file(key);
        let made = fs::File::create(&path).and_then(|file| file.sync_all());
        made.map_err(FetchError::in_cache(&path))?;
        sync(&self.models())
    }

    /// Takes back [`Cache::pin`], if that was called.
    ///
    /// # Errors
    /// [`FetchError::Cache`].
    pub fn unpin(&self, key: &Key) -> Result<(), FetchError> {
        remove_file(&self.pinned_file(key))?;
        sync(&self.models())
    }

    /// Records that the model is or was in use at that time. Who may only read the cache records nothing.
    pub fn note_use(&self, key: &Key, now: SystemTime) {
        if self.model(key).is_none() {
            return;
        }
        if let Err(error) = self.try_note_use(key, now) {
            tracing::debug!(%key, "its use was not recorded: {error}");
        }
    }

    /// When the model was last used, as far as that is recorded.
    pub(crate) fn used(&self, key: &Key) -> Option<SystemTime> {
        let files = [self.about_file(key), self.used_file(key)];
        files.iter().filter_map(|path| modified(path)).max()
    }

    /// Records a time of use in a file's own time: no reader ever finds half of it.
    pub(crate) fn try_note_use(&self, key: &Key, now: SystemTime) -> Result<(), FetchError> {
        let noted = |path: &Path, file: fs::File| {
            let noted = file.set_modified(now).and_then(|()| file.sync_all());
            noted.map_err(|error| FetchError::file(path, error))
        };
        let path = self.about_file(key);
        if let Ok(file) = fs::File::options().write(true).open(&path) {
            return noted(&path, file);
        }
        let path = self.used_file(key);
        let file = fs::File::create(&path).map_err(FetchError::in_cache(&path))?;
        noted(&path, file)
    }

    pub(crate) fn is_pinned(&self, key: &Key) -> bool {
        self.pinned_file(key).exists()
    }
}

/// When a file or directory was last modified.
pub(crate) fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).and_then(|it| it.modified()).ok()
}
