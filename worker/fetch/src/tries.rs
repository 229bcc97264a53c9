//! Record of earlier tries to get a model, on disk: an agent that ends, or that is killed because of what a model does
//! to it, continues where it was instead of starting from zero.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::{Cache, FetchError, Key, Source};

/// Consecutive tries of one model that did not succeed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tries {
    /// Tries that failed.
    pub failures: u32,
    /// Tries that ended without a process left to say why. A process that is about to unpack or read the model counts
    /// itself here, and takes that back when it has an outcome.
    pub lost: u32,
    /// Description of the last failure; empty if unknown.
    pub why: String,
    /// Earliest time of the next try, in seconds since 1970.
    pub again_at_s: u64,
    /// SHA-256 of the key and the credentials, never those themselves; empty if unknown.
    pub source_sha256: String,
}

impl Tries {
    /// Whether they were of this source, as far as is known: a corrected secret need not wait.
    pub fn are_of(&self, source: &Source) -> bool {
        self.source_sha256.is_empty() || self.source_sha256 == source.fingerprint()
    }

    /// Continues with this source. Failures with another secret no longer count.
    pub fn go_on_with(&mut self, source: &Source) {
        if !self.are_of(source) {
            self.failures = 0;
        }
        self.source_sha256 = source.fingerprint();
    }

    /// Sets [`Self::again_at_s`] to `wait` after `now`.
    pub fn wait(&mut self, now: SystemTime, wait: Duration) {
        self.again_at_s = since_epoch(now + wait).as_secs();
    }

    /// Remaining wait before the next try; never longer than `most`, even if the clock was set in between.
    pub fn left(&self, now: SystemTime, most: Duration) -> Duration {
        let again_at = Duration::from_secs(self.again_at_s);
        again_at.saturating_sub(since_epoch(now)).min(most)
    }
}

impl Cache {
    /// Tries of this model; the default if there is no record, or none that can be read.
    pub fn tries(&self, key: &Key) -> Tries {
        let text = fs::read(self.tries_file(key)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Writes the record, or removes it if there is nothing to record.
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
        // Short secrets could be guessed from their checksum.
        let mut options = File::options();
        options.create(true).write(true).truncate(true).mode(0o600);
        text.and_then(|text| options.open(&temporary)?.write_all(&text))
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
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::Credentials;

    #[test]
    fn a_secret_that_was_exchanged_is_noticed_and_not_kept() {
        let source = Source::new("http://nas/m.tar", &"ab".repeat(32)).unwrap();
        let token = |token: &str| {
            let token = token.to_owned();
            source.clone().opened_by(Credentials::Bearer { token })
        };
        let basic = |username: &str, password: &str| {
            let [username, password] = [username, password].map(str::to_owned);
            source
                .clone()
                .opened_by(Credentials::Basic { username, password })
        };
        let all = [
            source.clone(),
            token("wrong"),
            token("right"),
            basic("", "wrong"),
            basic("wrong", ""),
        ];
        for (at, one) in all.iter().enumerate() {
            let mut tries = Tries {
                failures: 3,
                ..Tries::default()
            };
            assert!(tries.are_of(one), "an older note does not tell");
            tries.go_on_with(one);
            assert_eq!(tries.failures, 3);
            assert!(!tries.source_sha256.contains("wrong"));
            for (other_at, other) in all.iter().enumerate() {
                assert_eq!(tries.are_of(other), at == other_at, "{at} {other_at}");
            }
            tries.go_on_with(&token("new"));
            assert_eq!(tries.failures, 0);
            assert!(tries.are_of(&token("new")) && !tries.are_of(one));
        }
    }

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
            ..Tries::default()
        };
        let hour = Duration::from_secs(3600);
        assert_eq!(tries.left(now, hour), Duration::ZERO);
        tries.wait(now, Duration::from_secs(90));
        cache.note_tries(&key, &tries).unwrap();
        assert_eq!(cache.tries(&key), tries);
        let mode = fs::metadata(cache.tries_file(&key)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
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
        // A model that is no longer named takes its record along.
        cache
            .retain(&Default::default(), Duration::ZERO, now)
            .unwrap();
        assert!(!cache.tries_file(&key).exists());
    }
}
