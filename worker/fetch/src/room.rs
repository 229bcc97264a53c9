//! Room in a cache: its quota and the reserve of its disk, and the models that are removed for them.
//!
//! The least recently used go first. What is in use, pinned, claimed by its owner, being fetched or was used a short
//! while ago stays, and nothing is removed unless that suffices.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use hearth_crds::format_bytes;

use crate::cache::Removal;
use crate::directory::Inode;
use crate::error::free_bytes;
use crate::lock::{Lock, Promise};
use crate::need::{Limit, Need, Scope, choose, freed_bytes};
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

    /// Bytes that these have freed: files that another model has stay.
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
    /// Those that nothing else in the cache has.
    pub(crate) bytes: u64,
    /// Bytes of each file that another key has, too.
    pub(crate) shared: BTreeMap<Inode, u64>,
    /// Those of its part.
    pub(crate) part_bytes: u64,
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
    /// Who may have it; `None` if that is not known.
    pub(crate) holder: Option<String>,
    /// Limits; [`FetchOptions::reserve_bytes`] is what the percentage amounts to, if that is more.
    pub(crate) options: FetchOptions,
    /// What is to stay free on the disk of the parts, if models are on another one.
    pub(crate) parts_reserve_bytes: Option<u64>,
    /// Bytes of its files that other models of this machine had.
    pub(crate) shared_bytes: Arc<AtomicU64>,
}

impl Room {
    /// Makes sure that so much more can be written, removing models if that is necessary and possible. Blocks.
    ///
    /// # Errors
    /// [`FetchError::NoRoom`], and then nothing was removed; [`FetchError::Cache`].
    pub(crate) fn make(&self, need: Need, what: &str, now: SystemTime) -> Result<(), FetchError> {
        // Of a removal that was cut off; nobody else removes what is being fetched.
        self.cache.forget_removed(&self.key)?;
        let is_fetched_alone = !self.cache.is_fetched_besides(&self.key);
        if self.options.quota_bytes.is_none() && is_fetched_alone {
            let limits = self.limits(need, Need::default(), 0);
            if limits.iter().all(|limit| limit.missing_bytes() == 0) {
                return Ok(());
            }
        }
        let turn = self.turn()?;
        let made = self.make_in_turn(need, what, now);
        turn.remove();
        made
    }

    /// What limits this need, where other fetches still have to write what they promised.
    fn limits(&self, need: Need, promised: Need, held_bytes: u64) -> Vec<Limit> {
        let reserve_bytes = self.options.reserve_bytes;
        let disks = match self.parts_reserve_bytes {
            None => vec![(Scope::Disk, reserve_bytes)],
            Some(parts_reserve_bytes) => vec![
                (Scope::DiskOfParts, parts_reserve_bytes),
                (Scope::DiskOfModels, reserve_bytes),
            ],
        };
        // Where quota and disk are as short, the error names the later one.
        let scopes = [(Scope::Quota, held_bytes)].into_iter().chain(disks);
        let limits = scopes.filter_map(|(scope, taken_bytes)| {
            let room_bytes = match scope {
                Scope::Quota => self.options.quota_bytes?,
                _ => free_bytes(&scope.directory(&self.cache)).unwrap_or(u64::MAX),
            };
            Some(Limit {
                scope,
                need_bytes: scope.bytes_needed(need)?,
                promised_bytes: scope.bytes_needed(promised).unwrap_or_default(),
                room_bytes,
                taken_bytes,
            })
        });
        limits.collect()
    }

    /// Makes room for what is missing of a whole model, and promises it: as long as `lock`, the fetch's own, is held, others leave it
    /// the room for what has not arrived. Blocks.
    ///
    /// # Errors
    /// Those of [`Self::make`].
    fn make_and_promise(
        &self,
        lock: &Lock,
        (need, promise): (Need, Promise),
        what: &str,
        now: SystemTime,
    ) -> Result<(), FetchError> {
        self.cache.forget_removed(&self.key)?;
        let turn = self.turn()?;
        let made = self.make_in_turn(need, what, now);
        let made = made.and_then(|()| lock.promise(promise));
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
        need: (Need, Promise),
        what: String,
    ) -> Result<(), FetchError> {
        let (room, lock) = (Arc::clone(room), Arc::clone(lock));
        blocking(move || room.make_and_promise(&lock, need, &what, SystemTime::now())).await
    }

    /// Makes room on a blocking thread.
    ///
    /// # Errors
    /// Those of [`Self::make`].
    pub(crate) async fn make_soon(
        room: &Arc<Self>,
        need: Need,
        what: String,
    ) -> Result<(), FetchError> {
        let room = Arc::clone(room);
        blocking(move || room.make(need, &what, SystemTime::now())).await
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

    fn make_in_turn(&self, need: Need, what: &str, now: SystemTime) -> Result<(), FetchError> {
        for attempt in 1.. {
            // In this order: what arrives in between counts twice, and not nowhere.
            let promised = self.cache.promised(&self.key)?;
            let items = self.cache.items(&self.key, &self.options, now)?;
            let held_bytes = Scope::Quota.sum_bytes(&items);
            let limits = self.limits(need, promised, held_bytes);
            let removable = if attempt <= ATTEMPTS { &items[..] } else { &[] };
            let chosen = choose(removable, &limits);
            let chosen = chosen.map_err(|limit| self.no_room(limit, &items, what))?;
            // What is removed counts as free at once: some file systems take their time.
            if self.remove_all(&chosen, &items)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns whether all of them are gone: somebody may have begun to use one. `items` are all that there are.
    fn remove_all(&self, chosen: &[&Item], items: &[Item]) -> Result<bool, FetchError> {
        let mut before_bytes = 0;
        for (at, item) in chosen.iter().enumerate() {
            if self.cache.try_remove(&item.key)? != Removal::Removed {
                return Ok(false);
            }
            let gone_bytes = freed_bytes(Scope::Disk, &chosen[..=at], items);
            let bytes = gone_bytes - before_bytes;
            before_bytes = gone_bytes;
            self.options.counters.evicted(bytes);
            tracing::info!(
                key = %item.key,
                bytes,
                "removed to make room for {}", self.shown
            );
        }
        Ok(true)
    }

    /// Tenants of a node learn nothing of what is being fetched for others, not even how much: it may be a server's answer that they
    /// must not see.
    fn no_room(&self, limit: &Limit, items: &[Item], what: &str) -> FetchError {
        let owner = self.options.owner.clone();
        let mut told = limit.clone();
        let mut shown = items.to_vec();
        if let Owner::Node(_) = owner {
            let holds = holds(items, limit.scope, &self.options);
            let promised_bytes = limit.promised_bytes;
            tracing::info!(model = self.shown, promised_bytes, "no room: {holds}");
            shown.retain(|item| item.stays != Some(Stays::Fetched));
            told.promised_bytes = 0;
            if limit.scope == Scope::Quota {
                told.taken_bytes = Scope::Quota.sum_bytes(&shown);
            }
        }
        FetchError::NoRoom {
            shown: self.shown.clone(),
            what: format!("{what}; {}", told.short(&self.cache)),
            holds: holds(&shown, limit.scope, &self.options),
            remedy: limit.remedy(&owner),
            owner,
        }
    }
}

/// What the cache holds that counts against a limit, by the reason that it stays. Names would tell one tenant what another
/// one has.
fn holds(items: &[Item], scope: Scope, options: &FetchOptions) -> String {
    let held_bytes = scope.sum_bytes(items);
    let mut reasons: Vec<(Option<Stays>, u64)> = Vec::new();
    let mut counted = BTreeSet::new();
    // What one of them keeps stays for its reason.
    let (free, kept): (Vec<&Item>, Vec<&Item>) = items.iter().partition(|it| it.stays.is_none());
    for item in kept.into_iter().chain(free) {
        let bytes_more = scope.bytes_of(item, &mut counted);
        match reasons.iter_mut().find(|(stays, _)| *stays == item.stays) {
            Some((_, bytes)) => *bytes += bytes_more,
            None => reasons.push((item.stays, bytes_more)),
        }
    }
    reasons.retain(|(_, bytes)| *bytes > 0);
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
    let what = match scope {
        Scope::DiskOfParts => "download",
        _ => "model",
    };
    match parts.is_empty() {
        true => format!("it holds no {what}"),
        false => format!(
            "{what}s hold {}: {}",
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
            holder: None,
            options: FetchOptions {
                reserve_bytes: 0,
                quota_bytes: Some(1000),
                claims: Claims::by(|_| Claim::Free),
                ..FetchOptions::default()
            },
            parts_reserve_bytes: None,
            shared_bytes: Arc::default(),
        };
        let makes = |need_bytes: u64| {
            let made = room('b').make(Need::of_part(need_bytes), "it", SystemTime::now());
            if let Err(error) = &made {
                assert!(matches!(error, FetchError::NoRoom { .. }), "{error}");
            }
            made.is_ok()
        };
        let path = cache.lock_file(&key('a'));
        let lock = Lock::try_acquire(&path).unwrap().unwrap();
        let promise = Promise {
            whole_bytes: 800,
            longest_bytes: 700,
        };
        let need = (Need::of_part(800), promise);
        let made = room('a').make_and_promise(&lock, need, "it", SystemTime::now());
        made.unwrap();
        assert!(!makes(300) && makes(200), "nothing of it has arrived");
        let unpacking = cache.unpacking(&key('a'));
        fs::create_dir(&unpacking).unwrap();
        fs::write(unpacking.join("config.json"), [0; 700]).unwrap();
        assert!(!makes(300) && makes(200), "a file of it has arrived");
        drop(lock);
        assert!(makes(300), "nobody fetches it any more");
        // Parts on a disk of their own, which no model that goes makes room on.
        let apart = Room {
            parts_reserve_bytes: Some(1 << 60),
            ..room('b')
        };
        let makes = |need: Need| apart.make(need, "it", SystemTime::now());
        makes(Need::of_unpacked(1)).unwrap();
        let text = makes(Need::of_part(1)).unwrap_err().to_string();
        let disk = format!("the disk of {} has", cache.partial().display());
        assert!(text.contains(&disk), "{text}");
    }
}
