//! What became of earlier tries to have a model, on disk: an agent that ends, or that is killed for what a model does to
//! it, begins where it was and not from zero.

use std::fs;
use std::io;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::{Cache, FetchError, Key};

/// Tries of one model in a row that gave nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tries {
    /// That failed.
    pub failures: u32,
    /// At whose end no process was there any more to say why. One that is about to unpack or read the model counts itself
    /// here, and takes that back when it has an outcome.
    pub lost: u32,
    /// What the last failure was; empty where that is not known.
    pub why: String,
    /// Seconds since 1970: not tried again before.
    pub again_at_s: u64,
}

impl Tries {
    /// Sets [`Self::again_at_s`].
    pub fn wait(&mut self, now: SystemTime, wait: Duration) {
        self.again_at_s = since_epoch(now + wait).as_secs();
    }

    /// How long it is still to be left alone; never longer than `most`, whatever clocks did meanwhile.
    pub fn left(&self, now: SystemTime, most: Duration) -> Duration {
        let again_at = Duration::from_secs(self.again_at_s);
        again_at.saturating_sub(since_epoch(now)).min(most)
    }
}

impl Cache {
    /// Of this model; none where there is nothing to tell. A note that cannot be read is none.
    pub fn tries(&self, key: &Key) -> Tries {
        let text = fs::read(self.tries_file(key)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Notes them, or that there is nothing to tell.
    ///
    /// # Errors
    /// [`FetchError::Cache`], [`FetchError::DiskFull`].
    pub fn note_tries(&self, key: &Key, tries: &Tries) -> Result<(), FetchError> {
        let path = self.tries_file(key);
        if *tries == Tries::default() {
            return crate::cache::remove_file(&path);
        }
        let temporary = path.with_extension("tries-new");
        let text = serde_json::to_vec(tries).map_err(io::Error::from);
        text.and_then(|text| fs::write(&temporary, text))
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(FetchError::in_cache(&path))
    }
}

fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_are_kept_until_there_is_nothing_to_tell() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        cache.create().unwrap();
        let key = Key::parse(&"a".repeat(32)).unwrap();
        assert_eq!(cache.tries(&key), Tries::default());
        let now = SystemTime::now();
        let mut tries = Tries {
            failures: 2,
            lost: 1,
            why: "broken".to_owned(),
            again_at_s: 0,
        };
        let hour = Duration::from_secs(3600);
        assert_eq!(tries.left(now, hour), Duration::ZERO);
        tries.wait(now, Duration::from_secs(90));
        cache.note_tries(&key, &tries).unwrap();
        assert_eq!(cache.tries(&key), tries);
        let left = tries.left(now, hour);
        assert!((88..=90).contains(&left.as_secs()), "{left:?}");
        // The clock was a year ahead.
        let before = now - 365 * 24 * hour;
        assert_eq!(tries.left(before, hour), hour);
        assert_eq!(tries.left(now + hour, hour), Duration::ZERO);

        cache.note_tries(&key, &Tries::default()).unwrap();
        assert!(
            fs::read_dir(directory.path().join("partial"))
                .unwrap()
                .next()
                .is_none()
        );
        fs::write(cache.tries_file(&key), "{\"failures\":").unwrap();
        assert_eq!(cache.tries(&key), Tries::default());
        // A model that nobody names takes its note along.
        cache
            .retain(&Default::default(), Duration::ZERO, now)
            .unwrap();
        assert!(!cache.tries_file(&key).exists());
    }
}
