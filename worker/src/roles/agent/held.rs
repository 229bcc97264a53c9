//! What the node's store has, as the node's profile tells it. Whoever may read profiles need not be allowed to read
//! deployments: a model that a Secret, or a secret in its URL, has opened is counted and not named.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hearth_crds::{NodeFetch, NodeModel, NodeProfileStatus, NodeStore, is_for_all};
use hearth_fetch::{FetchError, Phase, Progress, Stored};
use jiff::Timestamp;
use tokio::sync::Semaphore;

use super::models::Models;

const HOUR_SECONDS: u64 = 3600;

/// Longest wait for the store's disk: a profile has to be told without it, too.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a store has, and those of its models that are named.
type Told = (NodeStore, Vec<NodeModel>);

/// Looks into a store.
type Look = Box<dyn Fn() -> Result<Told, FetchError> + Send + Sync>;

/// What the store has, as far as its disk answers.
pub(super) struct Held {
    look: Look,
    patience: Duration,
    /// Taken while a look goes on: a disk that hangs holds up one thread.
    turn: Arc<Semaphore>,
    /// What the last look that succeeded found.
    last: Mutex<Option<Told>>,
}

impl Held {
    pub(super) fn of(models: &Arc<Models>) -> Arc<Self> {
        let models = Arc::clone(models);
        Self::by(Box::new(move || held(&models)), PATIENCE)
    }

    fn by(look: Look, patience: Duration) -> Arc<Self> {
        Arc::new(Self {
            look,
            patience,
            turn: Arc::new(Semaphore::new(1)),
            last: Mutex::default(),
        })
    }

    /// Adds what the store has to the profile; what it had at the last look, if its disk fails or does not answer in time. Requires a
    /// tokio runtime.
    pub(super) async fn add(self: &Arc<Self>, profile: &mut NodeProfileStatus) {
        if let Err(why) = self.renew().await {
            tracing::warn!("the profile does not tell what the store has now: {why}");
        }
        if let Some((store, models)) = self.last().clone() {
            (profile.store, profile.models) = (Some(store), models);
        }
    }

    /// Looks into the store, unless an earlier look has not come to an end.
    async fn renew(self: &Arc<Self>) -> Result<(), String> {
        let turn = Arc::clone(&self.turn).try_acquire_owned();
        let turn = turn.map_err(|_| "its disk still has not answered".to_owned())?;
        let own = Arc::clone(self);
        let look = tokio::task::spawn_blocking(move || {
            let found = (own.look)();
            let found = found.map(|told| *own.last() = Some(told));
            drop(turn);
            found
        });
        match tokio::time::timeout(self.patience, look).await {
            Ok(Ok(found)) => found.map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("its disk has not answered for {:?}", self.patience)),
        }
    }

    fn last(&self) -> MutexGuard<'_, Option<Told>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn held(models: &Models) -> Result<Told, FetchError> {
    let cache = models.cache();
    // First: what is put in its place meanwhile is in the store then.
    let fetched = models.fetched_for_all();
    let stored = cache.stored()?;
    let store = NodeStore::rounded(
        u32::try_from(stored.len()).unwrap_or(u32::MAX),
        cache.stored_bytes()?,
    );
    let mut told: Vec<NodeModel> = stored.into_iter().filter_map(of_stored).collect();
    for (key, source, progress) in fetched {
        if told.iter().all(|model| model.key != key.as_str()) {
            told.push(NodeModel {
                key: key.to_string(),
                source,
                fetch: Some(of_progress(progress)),
                ..NodeModel::default()
            });
        }
    }
    Ok((store, told))
}

/// What is told of a model; `None` if not every deployment may have it, or that is not known.
fn of_stored(stored: Stored) -> Option<NodeModel> {
    let Stored {
        key,
        about,
        bytes,
        shared_bytes: _,
        used,
        is_in_use,
        is_pinned,
        directory: _,
    } = stored;
    let about = about?;
    if !about.for_all && !is_for_all(key.as_str(), &about.source, about.sha256.as_deref()) {
        return None;
    }
    // In hours: a profile is not a clock.
    let hour = |used: SystemTime| {
        let seconds = used.duration_since(UNIX_EPOCH).ok()?.as_secs();
        Some(seconds / HOUR_SECONDS * HOUR_SECONDS)
    };
    Some(NodeModel {
        key: key.to_string(),
        source: about.source,
        commit: about.commit,
        bytes,
        verified_at: about.verified_at_s.and_then(rfc3339),
        last_used: used.filter(|_| !is_in_use).and_then(hour).and_then(rfc3339),
        in_use: is_in_use,
        pinned: is_pinned,
        fetch: None,
    })
}

fn of_progress(progress: Option<Progress>) -> NodeFetch {
    let Some(progress) = progress else {
        return NodeFetch::default();
    };
    let total_bytes = progress.total_bytes.filter(|bytes| *bytes > 0);
    // An archive that is being unpacked is all there.
    let bytes = match progress.phase {
        Phase::Unpacking => total_bytes.unwrap_or_default(),
        _ => progress.bytes,
    };
    let percent =
        |total: u64| u32::try_from((u128::from(bytes) * 100 / u128::from(total)).min(100));
    NodeFetch {
        percent: total_bytes.and_then(|total| percent(total).ok()),
        total_bytes,
        from_node: progress.from_node,
    }
}

fn rfc3339(seconds: u64) -> Option<String> {
    let time = Timestamp::from_second(i64::try_from(seconds).ok()?).ok()?;
    Some(time.to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use hearth_crds::{hub_store_key, store_key};
    use hearth_fetch::{About, Key};

    use super::*;

    fn stored(key: &str, source: &str, sha256: Option<&str>) -> Stored {
        Stored {
            key: Key::parse(key).unwrap(),
            about: Some(About {
                source: source.to_owned(),
                commit: None,
                sha256: sha256.map(str::to_owned),
                files: BTreeMap::new(),
                holder: None,
                for_all: false,
                verified_at_s: Some(0),
            }),
            bytes: 7,
            shared_bytes: 0,
            used: Some(UNIX_EPOCH + Duration::from_secs(2 * HOUR_SECONDS + 1234)),
            is_in_use: false,
            is_pinned: true,
            directory: PathBuf::new(),
        }
    }

    #[test]
    fn only_what_everybody_may_have_is_named_with_the_hour_of_its_use() {
        let mut of_all = stored(&hub_store_key("a/b", "main", ""), "a/b@main", None);
        let told = of_stored(of_all.clone()).unwrap();
        assert_eq!(told.last_used.as_deref(), Some("1970-01-01T02:00:00Z"));
        assert_eq!(told.verified_at.as_deref(), Some("1970-01-01T00:00:00Z"));
        assert!(told.pinned && told.bytes == 7);
        of_all.is_in_use = true;
        let told = of_stored(of_all.clone()).unwrap();
        assert_eq!((told.in_use, told.last_used), (true, None));
        of_all.about = None;
        assert_eq!(of_stored(of_all), None);
        let private = stored(&hub_store_key("a/b", "main", "one/hub"), "a/b@main", None);
        assert_eq!(of_stored(private), None);
        let sha256 = "a".repeat(64);
        let url = "http://nas/m.tar";
        let archive = |holder| stored(&store_key(url, &sha256, holder), url, Some(&sha256));
        assert!(of_stored(archive("")).is_some());
        assert_eq!(of_stored(archive("one/")), None);
        // The name of a list does not tell for whom it is.
        let mut list = stored(&"a".repeat(32), "http://nas/m/ (2 files)", Some(&sha256));
        assert_eq!(of_stored(list.clone()), None);
        if let Some(about) = &mut list.about {
            about.for_all = true;
        }
        assert!(of_stored(list).is_some());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_disk_that_hangs_or_fails_leaves_the_last_look_and_holds_up_one_thread() {
        let (answer, answers) = mpsc::channel::<Result<u32, ()>>();
        let answers = Mutex::new(answers);
        let looks = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&looks);
        let look = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            let answer = answers.lock().unwrap().recv().unwrap();
            let found = answer.map(|models| (NodeStore::rounded(models, 1), Vec::new()));
            found.map_err(|()| FetchError::Ended {
                reason: "spoilt".to_owned(),
            })
        };
        let held = Held::by(Box::new(look), Duration::from_millis(200));
        let told = async || {
            let mut profile = NodeProfileStatus::default();
            held.add(&mut profile).await;
            profile.store
        };
        let store = |models| {
            Some(NodeStore {
                models,
                bytes: 1 << 30,
            })
        };
        answer.send(Ok(3)).unwrap();
        assert_eq!(told().await, store(3));
        answer.send(Err(())).unwrap();
        assert_eq!(told().await, store(3));
        for _ in 0..3 {
            assert_eq!(told().await, store(3), "it hangs");
        }
        assert_eq!(looks.load(Ordering::Relaxed), 3);
        answer.send(Ok(4)).unwrap();
        while held.turn.available_permits() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        answer.send(Ok(5)).unwrap();
        assert_eq!(told().await, store(5));
    }

    #[test]
    fn a_fetch_is_told_in_percent_where_its_size_is_known() {
        let told = |phase, total_bytes| {
            of_progress(Some(Progress {
                phase,
                bytes: 10,
                total_bytes,
                bytes_per_second: 5,
                from_node: Some("attic".to_owned()),
                trouble: None,
            }))
        };
        let half = told(Phase::Downloading, Some(20));
        assert_eq!((half.percent, half.total_bytes), (Some(50), Some(20)));
        assert_eq!(half.from_node.as_deref(), Some("attic"));
        assert_eq!(told(Phase::Downloading, None).percent, None);
        assert_eq!(told(Phase::Unpacking, Some(20)).percent, Some(100));
        assert_eq!(of_progress(None), NodeFetch::default());
    }
}
