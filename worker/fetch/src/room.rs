//! Room in a cache: its quota and the reserve of its disk, and the models that are removed for them.
//!
//! The least recently used go first. What is in use, pinned, claimed by its owner, being fetched or was used a short
//! while ago stays, and nothing is removed unless that suffices.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use hearth_crds::format_bytes;

use crate::cache::Removal;
use crate::error::free_bytes;
use crate::lock::Lock;
use crate::{Cache, FetchError, FetchOptions, Key, blocking};

/// Bytes written between two looks at the room that is left, without a quota.
const PERIOD_BYTES: u64 = 64 << 20;
/// Wait for another process that makes room in the same cache.
const TURN_PERIOD: Duration = Duration::from_millis(20);
/// Attempts to remove what somebody began to use in between.
const ATTEMPTS: u32 = 4;

/// Whether the owner of a cache still has a claim to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// None: it may be removed when its room is needed.
    Free,
    /// A deployment wants it.
    Wanted,
    /// It is not known yet whether anything wants it.
    Unknown,
    /// Only a person removes it.
    Personal,
}

/// Says which models the owner of a cache has a claim to. It is asked whenever room is made.
#[derive(Clone)]
pub struct Claims(Arc<dyn Fn(&Key) -> Claim + Send + Sync>);

impl Claims {
    /// Asks `claim`.
    pub fn by(claim: impl Fn(&Key) -> Claim + Send + Sync + 'static) -> Self {
        Self(Arc::new(claim))
    }
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Claims")
    }
}

/// Whose cache it is, for messages and remedies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A node of a cluster, by its name.
    Node(String),
    /// A user of this machine.
    User,
}

impl Owner {
    /// The owner at the beginning of a sentence.
    pub(crate) fn named(&self) -> String {
        match self {
            Self::Node(name) => format!("node {name}"),
            Self::User => "this machine".to_owned(),
        }
    }
}

/// What a process did with its caches; shared by all of its fetches.
#[derive(Debug, Default)]
pub struct Counters {
    downloaded_bytes: AtomicU64,
    taken_bytes: AtomicU64,
    given_bytes: AtomicU64,
    evictions: AtomicU64,
    evicted_bytes: AtomicU64,
}

impl Counters {
    /// Bytes that servers gave of models that were fetched whole. What has arrived of others is not told: it would say which addresses answer.
    pub fn downloaded_bytes(&self) -> u64 {
        self.downloaded_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that other nodes gave of models that were fetched whole.
    pub fn taken_bytes(&self) -> u64 {
        self.taken_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that were given to other nodes.
    pub fn given_bytes(&self) -> u64 {
        self.given_bytes.load(Ordering::Relaxed)
    }

    /// Models and parts that were removed to make room.
    pub fn evictions(&self) -> u64 {
        self.evictions.load(Ordering::Relaxed)
    }

    /// Bytes of these.
    pub fn evicted_bytes(&self) -> u64 {
        self.evicted_bytes.load(Ordering::Relaxed)
    }

    /// Counts a model that was fetched whole, and how many of its bytes other nodes gave.
    pub(crate) fn fetched(&self, bytes: u64, taken_bytes: u64) {
        let taken_bytes = taken_bytes.min(bytes);
        self.taken_bytes.fetch_add(taken_bytes, Ordering::Relaxed);
        let downloaded_bytes = bytes - taken_bytes;
        self.downloaded_bytes
            .fetch_add(downloaded_bytes, Ordering::Relaxed);
    }

    pub(crate) fn given(&self, bytes: u64) {
        self.given_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn evicted(&self, bytes: u64) {
        self.evictions.fetch_add(1, Ordering::Relaxed);
        self.evicted_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Reason that something is not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stays {
    Wanted,
    Used,
    Pinned,
    Recent,
    Fetched,
    Unknown,
    Personal,
}

impl Stays {
    fn words(self) -> &'static str {
        match self {
            Self::Wanted => "wanted by deployments",
            Self::Used => "in use by workers",
            Self::Pinned => "pinned",
            Self::Recent => "used a short while ago",
            Self::Fetched => "being fetched",
            Self::Unknown => "that the operator has not told about yet",
            Self::Personal => "that nothing but hearth models rm removes",
        }
    }
}

/// Everything in the cache that has one key.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) key: Key,
    pub(crate) bytes: u64,
    /// When it was last used; what has no such time goes first.
    pub(crate) used: Option<SystemTime>,
    pub(crate) stays: Option<Stays>,
}

/// Room for one fetch.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    pub(crate) cache: Cache,
    /// The model that is fetched.
    pub(crate) key: Key,
    /// Its name.
    pub(crate) shown: String,
    /// Limits; [`FetchOptions::reserve_bytes`] is what the percentage amounts to, if that is more.
    pub(crate) options: FetchOptions,
    /// What is to stay free on the disk of the parts, if models are on another one.
    pub(crate) parts_reserve_bytes: Option<u64>,
}

impl Room {
    /// Makes sure that `need_bytes` more can be written, removing models if that is necessary and possible. Blocks.
    ///
    /// # Errors
    /// [`FetchError::NoRoom`], and then nothing was removed; [`FetchError::DiskFull`] if it is the disk of the parts;
    /// [`FetchError::Cache`].
    pub(crate) fn make(
        &self,
        need_bytes: u64,
        what: &str,
        now: SystemTime,
    ) -> Result<(), FetchError> {
        // Of a removal that was cut off; nobody else removes what is being fetched.
        self.cache.forget_removed(&self.key)?;
        self.check_parts(need_bytes, what)?;
        let is_fetched_alone = !self.cache.is_fetched_besides(&self.key);
        if self.options.quota_bytes.is_none() && is_fetched_alone && self.has_free(need_bytes) {
            return Ok(());
        }
        let turn = self.turn()?;
        let made = self.make_in_turn((need_bytes, self.options.quota_bytes), what, now);
        turn.remove();
        made
    }

    /// Makes sure that a part can be copied to its model, on whose disk it is not; the quota has counted its bytes, and the
    /// part goes at once. Blocks.
    ///
    /// # Errors
    /// Those of [`Self::make`].
    pub(crate) fn make_for_copy(&self, bytes: u64, now: SystemTime) -> Result<(), FetchError> {
        if self.has_free(bytes) {
            return Ok(());
        }
        let what = format!(
            "{} MiB to copy to the models' disk",
            bytes.div_ceil(1 << 20)
        );
        let turn = self.turn()?;
        let made = self.make_in_turn((bytes, None), &what, now);
        turn.remove();
        made
    }

    /// Whether the disk of the models has these bytes besides what is to stay free.
    fn has_free(&self, bytes: u64) -> bool {
        let free_bytes = free_bytes(&self.cache.models()).unwrap_or(u64::MAX);
        free_bytes >= bytes.saturating_add(self.options.reserve_bytes)
    }

    /// Checks the disk of the parts, if it is one of its own: no model that goes makes room there.
    fn check_parts(&self, bytes: u64, what: &str) -> Result<(), FetchError> {
        let Some(reserve_bytes) = self.parts_reserve_bytes else {
            return Ok(());
        };
        let path = self.cache.partial();
        let free_bytes = free_bytes(&path).unwrap_or(u64::MAX);
        let need_bytes = bytes.saturating_add(reserve_bytes);
        if free_bytes >= need_bytes {
            return Ok(());
        }
        Err(FetchError::DiskFull {
            path,
            what: format!("{what}, and {} stay free", format_bytes(reserve_bytes)),
            need_bytes,
            free_bytes,
        })
    }

    /// Makes room for what is missing of a whole model, and promises it: as long as `lock`, the fetch's own, is held, others leave it
    /// the room for what has not arrived. Blocks.
    ///
    /// # Errors
    /// Those of [`Self::make`].
    fn make_and_promise(
        &self,
        lock: &Lock,
        (missing_bytes, whole_bytes): (u64, u64),
        what: &str,
        now: SystemTime,
    ) -> Result<(), FetchError> {
        self.cache.forget_removed(&self.key)?;
        let turn = self.turn()?;
        let made = self.make_in_turn((missing_bytes, self.options.quota_bytes), what, now);
        let made = made.and_then(|()| lock.promise(whole_bytes));
        turn.remove();
        made
    }

    /// The same on a blocking thread.
    ///
    /// # Errors
    /// Those of [`Self::make`].
    pub(crate) async fn make_whole(
        room: &Arc<Self>,
        lock: &Arc<Lock>,
        bytes: (u64, u64),
        what: String,
    ) -> Result<(), FetchError> {
        let (room, lock) = (Arc::clone(room), Arc::clone(lock));
        blocking(move || room.make_and_promise(&lock, bytes, &what, SystemTime::now())).await
    }

    /// Makes room on a blocking thread.
    ///
    /// # Errors
    /// Those of [`Self::make`].
    pub(crate) async fn make_soon(
        room: &Arc<Self>,
        need_bytes: u64,
        what: String,
    ) -> Result<(), FetchError> {
        let room = Arc::clone(room);
        blocking(move || room.make(need_bytes, &what, SystemTime::now())).await
    }

    /// Bytes that may be written between two calls of [`Self::make`].
    pub(crate) fn period_bytes(&self) -> u64 {
        let quota_bytes = self.options.quota_bytes.unwrap_or(u64::MAX);
        (quota_bytes / 16).clamp(64 << 10, PERIOD_BYTES)
    }

    /// Waits for its turn: two that make room at once would count the same bytes.
    fn turn(&self) -> Result<Lock, FetchError> {
        loop {
            if let Some(turn) = Lock::try_acquire(&self.cache.room_lock_file())? {
                return Ok(turn);
            }
            std::thread::sleep(TURN_PERIOD);
        }
    }

    fn make_in_turn(
        &self,
        (need_bytes, quota_bytes): (u64, Option<u64>),
        what: &str,
        now: SystemTime,
    ) -> Result<(), FetchError> {
        for attempt in 1.. {
            // In this order: what arrives in between counts twice, and not nowhere.
            let promised_bytes = self.cache.promised_bytes(&self.key)?;
            let items = self.cache.items(&self.key, &self.options, now)?;
            let demand = Demand {
                need_bytes,
                promised_bytes,
                held_bytes: items.iter().map(|item| item.bytes).sum(),
                free_bytes: free_bytes(&self.cache.models()).unwrap_or(u64::MAX),
                reserve_bytes: self.options.reserve_bytes,
                quota_bytes,
            };
            let chosen = choose(&items, demand.missing_bytes());
            let Some(chosen) = chosen.filter(|_| attempt <= ATTEMPTS) else {
                return Err(self.no_room(&demand, &items, what));
            };
            // What is removed counts as free at once: some file systems take their time.
            if self.remove_all(&chosen)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns whether all of them are gone: somebody may have begun to use one.
    fn remove_all(&self, chosen: &[&Item]) -> Result<bool, FetchError> {
        for item in chosen {
            if self.cache.try_remove(&item.key)? != Removal::Removed {
                return Ok(false);
            }
            self.options.counters.evicted(item.bytes);
            tracing::info!(
                key = %item.key,
                bytes = item.bytes,
                "removed to make room for {}", self.shown
            );
        }
        Ok(true)
    }

    /// Tenants of a node learn nothing of what is being fetched for others, not even how much: it may be a server's answer that they
    /// must not see.
    fn no_room(&self, demand: &Demand, items: &[Item], what: &str) -> FetchError {
        let owner = self.options.owner.clone();
        let mut told = demand.clone();
        let mut shown = items.to_vec();
        if let Owner::Node(_) = owner {
            let holds = holds(items, &self.options);
            let promised_bytes = demand.promised_bytes;
            tracing::info!(model = self.shown, promised_bytes, "no room: {holds}");
            shown.retain(|item| item.stays != Some(Stays::Fetched));
            told.promised_bytes = 0;
            told.held_bytes = shown.iter().map(|item| item.bytes).sum();
        }
        FetchError::NoRoom {
            owner: owner.clone(),
            shown: self.shown.clone(),
            what: format!(
                "{what}; {}",
                told.short(&self.cache.disk_of_models(), demand.is_of_quota())
            ),
            holds: holds(&shown, &self.options),
            remedy: demand.remedy(&owner),
        }
    }
}

/// What is needed of a cache, and what it has.
#[derive(Clone)]
struct Demand {
    need_bytes: u64,
    /// Bytes that other running fetches still have to write.
    promised_bytes: u64,
    held_bytes: u64,
    free_bytes: u64,
    reserve_bytes: u64,
    quota_bytes: Option<u64>,
}

impl Demand {
    /// Bytes to remove.
    fn missing_bytes(&self) -> u64 {
        self.missing_of_disk_bytes()
            .max(self.missing_of_quota_bytes())
    }

    fn wanted_bytes(&self) -> u64 {
        self.need_bytes.saturating_add(self.promised_bytes)
    }

    fn missing_of_disk_bytes(&self) -> u64 {
        let wanted_bytes = self.wanted_bytes().saturating_add(self.reserve_bytes);
        wanted_bytes.saturating_sub(self.free_bytes)
    }

    fn missing_of_quota_bytes(&self) -> u64 {
        let wanted_bytes = self.wanted_bytes().saturating_add(self.held_bytes);
        wanted_bytes.saturating_sub(self.quota_bytes.unwrap_or(u64::MAX))
    }

    /// Whether the quota is in the way, and not the disk.
    fn is_of_quota(&self) -> bool {
        self.missing_of_disk_bytes() < self.missing_of_quota_bytes()
    }

    /// What there is, and which limit is in the way.
    fn short(&self, directory: &Path, is_of_quota: bool) -> String {
        let mut text = match self.quota_bytes {
            Some(quota_bytes) if is_of_quota => {
                format!(
                    "the quota of {} has {} left",
                    format_bytes(quota_bytes),
                    format_bytes(quota_bytes.saturating_sub(self.held_bytes))
                )
            }
            _ => format!(
                "the disk of {} has {} free, of which {} stay free",
                directory.display(),
                format_bytes(self.free_bytes),
                format_bytes(self.reserve_bytes)
            ),
        };
        if self.promised_bytes > 0 {
            text += &format!(
                ", and other downloads still need {}",
                format_bytes(self.promised_bytes)
            );
        }
        text
    }

    fn remedy(&self, owner: &Owner) -> &'static str {
        match (owner, self.is_of_quota()) {
            (Owner::Node(_), true) => {
                "raise agent.store.quota of Hearth's chart, unpin models, or delete deployments of others"
            }
            (Owner::Node(_), false) => {
                "free space on that disk, unpin models, or delete deployments of others; agent.diskReservePercent of Hearth's chart is what stays free"
            }
            (Owner::User, true) => {
                "raise HEARTH_MODEL_QUOTA, or remove models: hearth models list, hearth models rm NAME"
            }
            (Owner::User, false) => {
                "free space on that disk, remove models (hearth models list, hearth models rm NAME), or keep them on another disk: HEARTH_CACHE=DIR"
            }
        }
    }
}

/// The items to remove, least recently used first; `None` if all that may be removed would not suffice.
fn choose(items: &[Item], missing_bytes: u64) -> Option<Vec<&Item>> {
    let mut free: Vec<&Item> = items
        .iter()
        .filter(|item| item.stays.is_none() && item.bytes > 0)
        .collect();
    free.sort_by_key(|item| (item.used, item.key.clone()));
    let mut left_bytes = missing_bytes;
    let mut chosen = Vec::new();
    for item in free {
        if left_bytes == 0 {
            break;
        }
        left_bytes = left_bytes.saturating_sub(item.bytes);
        chosen.push(item);
    }
    (left_bytes == 0).then_some(chosen)
}

/// What the cache holds, by the reason that it stays. Names would tell one tenant what another one has.
fn holds(items: &[Item], options: &FetchOptions) -> String {
    let held_bytes: u64 = items.iter().map(|item| item.bytes).sum();
    let mut reasons: Vec<(Option<Stays>, u64)> = Vec::new();
    for item in items.iter().filter(|item| item.bytes > 0) {
        match reasons.iter_mut().find(|(stays, _)| *stays == item.stays) {
            Some((_, bytes)) => *bytes += item.bytes,
            None => reasons.push((item.stays, item.bytes)),
        }
    }
    reasons.sort();
    let parts: Vec<String> = reasons
        .into_iter()
        .map(|(stays, bytes)| match stays {
            Some(Stays::Recent) => format!(
                "{} used within {} s",
                format_bytes(bytes),
                options.recent.as_secs()
            ),
            Some(stays) => format!("{} {}", format_bytes(bytes), stays.words()),
            None => format!("{} that would not suffice", format_bytes(bytes)),
        })
        .collect();
    match parts.is_empty() {
        true => "it holds no model".to_owned(),
        false => format!(
            "models hold {}: {}",
            format_bytes(held_bytes),
            parts.join(", ")
        ),
    }
}

/// Why a model stays, as far as its owner and its times say.
pub(crate) fn stays(
    key: &Key,
    used: Option<SystemTime>,
    options: &FetchOptions,
    now: SystemTime,
) -> Option<Stays> {
    match (options.claims.0)(key) {
        Claim::Wanted => return Some(Stays::Wanted),
        Claim::Unknown => return Some(Stays::Unknown),
        Claim::Personal => return Some(Stays::Personal),
        Claim::Free => {}
    }
    let is_recent = used.is_some_and(|used| {
        // A time a little ahead is of a clock that was set in between.
        let distance = now.duration_since(used);
        distance.unwrap_or_else(|ahead| ahead.duration()) < options.recent
    });
    is_recent.then_some(Stays::Recent)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn what_was_promised_to_a_fetch_is_left_to_it_between_two_files() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::new(directory.path());
        cache.create().unwrap();
        let key = |digit: char| Key::parse(&digit.to_string().repeat(32)).unwrap();
        let room = |digit: char| Room {
            cache: cache.clone(),
            key: key(digit),
            shown: "a model".to_owned(),
            options: FetchOptions {
                reserve_bytes: 0,
                quota_bytes: Some(1000),
                claims: Claims::by(|_| Claim::Free),
                ..FetchOptions::default()
            },
            parts_reserve_bytes: None,
        };
        let makes = |need_bytes: u64| {
            let made = room('b').make(need_bytes, "it", SystemTime::now());
            if let Err(error) = &made {
                assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
            }
            made.is_ok()
        };
        let path = cache.lock_file(&key('a'));
        let lock = Lock::try_acquire(&path).unwrap().unwrap();
        let made = room('a').make_and_promise(&lock, (800, 800), "it", SystemTime::now());
        made.unwrap();
        assert!(!makes(300) && makes(200), "nothing of it has arrived");
        let unpacking = cache.unpacking(&key('a'));
        fs::create_dir(&unpacking).unwrap();
        fs::write(unpacking.join("config.json"), [0; 700]).unwrap();
        assert!(!makes(300) && makes(200), "a file of it has arrived");
        drop(lock);
        assert!(makes(300), "nobody fetches it any more");
        // Parts on a disk of their own: no model makes room there.
        let apart = Room {
            parts_reserve_bytes: Some(1 << 60),
            ..room('b')
        };
        let error = apart.make(1, "it", SystemTime::now()).unwrap_err();
        let is_of_parts = |path: &Path| path == cache.partial();
        assert!(
            matches!(&error, FetchError::DiskFull { path, .. } if is_of_parts(path)),
            "{error}"
        );
    }
}
