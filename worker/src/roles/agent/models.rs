//! The models on this node: fetched in the background, with their state reported on request.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hearth_crds::ModelFacts;
use hearth_fetch::{
    Cache, Claim, Claims, Counters, FaultOrigin, FetchError, FetchOptions, Key, Phase, Progress,
    Source, Tries, fetch,
};
use hearth_transport::v1::{ModelRequest, ModelResponse, ModelState};
use tokio::task::JoinHandle;
use tonic::Status;

use super::limits::{Limits, MOST_WAIT};
use super::request::{checked, is_for_all, parsed, ranges};
use super::seed::Place;
use super::tool;
use crate::tools::progress_sentence;

/// Time limit for reading a model's headers, which takes a second, or longer from a busy disk.
const FACTS_PATIENCE: Duration = Duration::from_secs(300);

/// All models on this node.
pub(super) struct Models {
    cache: Cache,
    limits: Limits,
    entries: Mutex<BTreeMap<Key, Entry>>,
    /// Keys in the last `retain` request; `None` before the first one.
    named: Mutex<Option<BTreeSet<Key>>>,
    counters: Arc<Counters>,
    failures: AtomicU64,
}

/// A model that was requested.
struct Entry {
    state: State,
    /// Consecutive attempts; the reason for the last failure is reported while the state is [`State::Failed`].
    tries: Tries,
}

enum State {
    Working {
        progress: Option<Progress>,
        task: JoinHandle<()>,
        /// What is fetched, if whoever names it may have it.
        shown: Option<String>,
    },
    Ready(Ready),
    Failed {
        again_at: Instant,
    },
}

/// A model that can be served.
#[derive(Clone)]
struct Ready {
    facts_json: String,
    /// Size of its files in bytes.
    bytes: u64,
    /// Its commit, if it is of a hub and that is recorded.
    commit: String,
}

/// Reason a model is not ready, and who can fix it.
struct Failure {
    why: String,
    fault_origin: FaultOrigin,
    /// Whether the next try may cost as much again.
    costs_all_again: bool,
}

impl From<FetchError> for Failure {
    fn from(error: FetchError) -> Self {
        Self {
            why: error.to_string(),
            fault_origin: error.fault_origin(),
            costs_all_again: error.costs_all_again(),
        }
    }
}

impl Models {
    /// Creates an empty table; nothing is checked yet.
    pub(super) fn new(cache: Cache, limits: Limits) -> Self {
        Self {
            cache,
            limits,
            entries: Mutex::default(),
            named: Mutex::default(),
            counters: Arc::default(),
            failures: AtomicU64::new(0),
        }
    }

    /// The store itself.
    pub(super) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Most bytes that it may have; `None` for as many as the disk has.
    pub(super) fn quota_bytes(&self) -> Option<u64> {
        self.limits.quota_bytes
    }

    /// What is being fetched that every deployment may have, and how far it is.
    pub(super) fn fetched_for_all(&self) -> Vec<(Key, String, Option<Progress>)> {
        let entries = self.lock();
        let fetched = entries
            .iter()
            .filter_map(|(key, entry)| match &entry.state {
                State::Working {
                    progress,
                    shown: Some(shown),
                    task,
                } if !task.is_finished() => Some((key.clone(), shown.clone(), progress.clone())),
                _ => None,
            });
        fetched.collect()
    }

    /// What all fetches did.
    pub(super) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Number of attempts to get a model that failed.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Returns the model's state; starts fetching it if it is not present, from `seed` as far as that has it. Requires a
    /// tokio runtime.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a request that can never succeed.
    pub(super) fn model(
        self: &Arc<Self>,
        request: &ModelRequest,
        seed: Option<Place>,
    ) -> Result<ModelResponse, Status> {
        let (key, source) = checked(request)?;
        let models = Arc::clone(self);
        let options = FetchOptions {
            claims: Claims::by(move |key| models.claim(key)),
            counters: Arc::clone(&self.counters),
            ..self.limits.options(ranges(&request.cluster_ranges)?)
        };
        let mut entries = self.lock();
        let mut tries = Tries::default();
        if let Some(entry) = entries.get(&key) {
            tries = entry.tries.clone();
            let is_same = source.as_ref().is_none_or(|source| tries.are_of(source));
            match &entry.state {
                State::Ready(ready) if self.cache.model(&key).is_some() => {
                    return Ok(ready.answer(request));
                }
                State::Working { progress, task, .. } if !task.is_finished() => {
                    return Ok(working(progress.as_ref()));
                }
                State::Failed { again_at } if is_same && Instant::now() < *again_at => {
                    return Ok(failed(&tries.why));
                }
                _ => {}
            }
        } else if source.is_some() || self.cache.model(&key).is_some() {
            // An earlier agent may have tried it.
            tries = self.cache.tries(&key);
            if let Some(entry) = waiting(&tries, source.as_ref(), SystemTime::now()) {
                let answer = failed(&tries.why);
                entries.insert(key, entry);
                return Ok(answer);
            }
        }
        if source.is_none() && self.cache.model(&key).is_none() {
            entries.remove(&key);
            return Ok(ModelResponse {
                state: ModelState::Absent.into(),
                message: "it is not on this node, and no source was given to fetch it from"
                    .to_owned(),
                ..ModelResponse::default()
            });
        }
        if let Some(source) = &source {
            tries.go_on_with(source);
        }
        let entry = Entry {
            tries,
            state: State::Working {
                progress: None,
                shown: source
                    .as_ref()
                    .filter(|_| is_for_all(request))
                    .map(Source::shown),
                task: tokio::spawn(Arc::clone(self).work(key.clone(), source, options, seed)),
            },
        };
        entries.insert(key, entry);
        Ok(working(None))
    }

    /// Removes all models and parts except those named, those in work, and those named recently; returns the removed
    /// keys.
    ///
    /// # Errors
    /// INVALID_ARGUMENT if a name is not a key; FAILED_PRECONDITION if the cache cannot be changed.
    pub(super) async fn retain(self: &Arc<Self>, keys: &[String]) -> Result<Vec<String>, Status> {
        let named = keys
            .iter()
            .map(|text| parsed(text))
            .collect::<Result<BTreeSet<Key>, Status>>()?;
        let before = self.lock_named().replace(named.clone());
        // From now on a model that was named until now counts as recently used.
        for released in before.unwrap_or_default().difference(&named) {
            self.cache.note_use(released, SystemTime::now());
        }
        let removed = self.remove_all_but(named, self.limits.keep).await?;
        Ok(removed.iter().map(Key::to_string).collect())
    }

    async fn remove_all_but(
        self: &Arc<Self>,
        mut kept: BTreeSet<Key>,
        keep: Duration,
    ) -> Result<Vec<Key>, Status> {
        {
            let mut entries = self.lock();
            let in_work = entries
                .iter()
                .filter(|(_, entry)| matches!(entry.state, State::Working { .. }));
            kept.extend(in_work.map(|(key, _)| key.clone()));
            entries.retain(|key, _| kept.contains(key));
        }
        let cache = self.cache.clone();
        let now = SystemTime::now();
        let removed = tokio::task::spawn_blocking(move || cache.retain(&kept, keep, now))
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| Status::failed_precondition(error.to_string()))?;
        if !removed.is_empty() {
            tracing::info!(keys = ?removed, "removed models that no deployment names");
        }
        Ok(removed)
    }

    /// Whether a model may be removed to make room for another.
    fn claim(&self, key: &Key) -> Claim {
        let is_in_work = |entry: &Entry| matches!(entry.state, State::Working { .. });
        if self.lock().get(key).is_some_and(is_in_work) {
            return Claim::Wanted;
        }
        match &*self.lock_named() {
            None => Claim::Unknown,
            Some(named) if named.contains(key) => Claim::Wanted,
            Some(_) => Claim::Free,
        }
    }

    fn lock_named(&self) -> MutexGuard<'_, Option<BTreeSet<Key>>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches the model, checks it, and records the outcome.
    async fn work(
        self: Arc<Self>,
        key: Key,
        source: Option<Source>,
        mut options: FetchOptions,
        seed: Option<Place>,
    ) {
        let began = Instant::now();
        if let (Some(seed), Some(_), None) = (seed, &source, self.cache.model(&key)) {
            options.seed = seed.connected().await;
        }
        let outcome = self.ready(&key, source.as_ref(), &options).await;
        let took = began.elapsed();
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(&key) else {
            return;
        };
        entry.tries.lost = 0;
        match outcome {
            Ok(ready) => {
                tracing::info!(%key, bytes = ready.bytes, "model ready");
                entry.tries = Tries::default();
                entry.state = State::Ready(ready);
            }
            Err(failure) => {
                let Failure {
                    why, fault_origin, ..
                } = failure;
                let wasted = if failure.costs_all_again {
                    took
                } else {
                    Duration::ZERO
                };
                entry.tries.failures += 1;
                self.failures.fetch_add(1, Ordering::Relaxed);
                let wait = self
                    .limits
                    .wait_after(fault_origin, entry.tries.failures, wasted);
                tracing::warn!(%key, ?wait, "model failed: {why}");
                let again_at = Instant::now() + wait;
                entry.tries.wait(SystemTime::now(), wait);
                entry.tries.why = why;
                entry.state = State::Failed { again_at };
            }
        }
        self.keep_tries(&key, &entry.tries);
    }

    /// Counts a try as lost until it has an outcome: an archive's content may crash this process.
    fn begin_risk(&self, key: &Key) {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(key) else {
            return;
        };
        entry.tries.lost += 1;
        let lost = entry.tries.lost;
        if let Some(again) = lost.checked_sub(1).filter(|again| *again > 0) {
            let now = SystemTime::now();
            let wait = self
                .limits
                .wait_after(FaultOrigin::Content, again, Duration::ZERO);
            entry.tries.wait(now, wait);
        }
        entry.tries.why = format!(
            "the node's agent was terminated {lost} times while it unpacked or read the model\n  find out why its Pod ended: the model's files may be corrupt, or need more memory than the node has"
        );
        self.keep_tries(key, &entry.tries);
    }

    /// Records the attempts; without the record, the next agent merely starts again.
    fn keep_tries(&self, key: &Key, tries: &Tries) {
        if let Err(error) = self.cache.note_tries(key, tries) {
            tracing::warn!(%key, "earlier attempts cannot be recorded: {error}");
        }
    }

    async fn ready(
        self: &Arc<Self>,
        key: &Key,
        source: Option<&Source>,
        options: &FetchOptions,
    ) -> Result<Ready, Failure> {
        let risk = Arc::new(Once::new());
        let directory = match (self.cache.model(key), source) {
            (Some(directory), _) => {
                self.cache.note_use(key, SystemTime::now());
                directory
            }
            (None, Some(source)) => {
                tracing::info!(%key, url = source.shown(), "fetching");
                let (models, own) = (Arc::clone(self), key.clone());
                let once = Arc::clone(&risk);
                let observer = Arc::new(move |progress: &Progress| {
                    if progress.phase == Phase::Unpacking {
                        once.call_once(|| models.begin_risk(&own));
                    }
                    models.note(&own, progress);
                });
                fetch(source, &self.cache, options, observer).await?
            }
            (None, None) => {
                return Err(Failure {
                    why: "it was removed while it was being inspected".to_owned(),
                    fault_origin: FaultOrigin::Local,
                    costs_all_again: false,
                });
            }
        };
        risk.call_once(|| self.begin_risk(key));
        let unfit = |why| Failure {
            why,
            fault_origin: FaultOrigin::Content,
            costs_all_again: true,
        };
        let arguments = ["facts", "--serving", "--json", "--model"].map(OsStr::new);
        let mut arguments = arguments.to_vec();
        arguments.push(directory.as_os_str());
        let facts: ModelFacts = tool::ask(&arguments, FACTS_PATIENCE).await.map_err(unfit)?;
        let facts_json = serde_json::to_string(&facts).map_err(|error| unfit(error.to_string()))?;
        let (cache, own) = (self.cache.clone(), key.clone());
        let looked = move || (cache.bytes(&own), cache.about(&own));
        let (bytes, about) = tokio::task::spawn_blocking(looked)
            .await
            .unwrap_or_default();
        Ok(Ready {
            facts_json,
            bytes,
            commit: about.and_then(|about| about.commit).unwrap_or_default(),
        })
    }

    fn note(&self, key: &Key, now: &Progress) {
        if let Some(Entry {
            state: State::Working { progress, .. },
            ..
        }) = self.lock().get_mut(key)
        {
            *progress = Some(now.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ready {
    /// The answer to a request. A model of another commit than other nodes have is not ready for their deployment: ranks
    /// of one plan must hold the same weights.
    fn answer(&self, request: &ModelRequest) -> ModelResponse {
        let asked = request.hub.as_ref().map_or("", |hub| &hub.commit);
        if !asked.is_empty() && !self.commit.is_empty() && asked != self.commit {
            return failed(&format!(
                "the node has commit {} of it, and other nodes have {asked}\n  name a commit as the revision, so that all nodes fetch the same",
                self.commit
            ));
        }
        ModelResponse {
            state: ModelState::Ready.into(),
            bytes: self.bytes,
            total_bytes: self.bytes,
            bytes_per_second: 0,
            message: String::new(),
            facts_json: self.facts_json.clone(),
            commit: self.commit.clone(),
            from_node: String::new(),
        }
    }
}

fn working(progress: Option<&Progress>) -> ModelResponse {
    let state = ModelState::Fetching.into();
    match progress {
        None => ModelResponse {
            state,
            message: "looking at it".to_owned(),
            ..ModelResponse::default()
        },
        Some(progress) => {
            let total_bytes = progress.total_bytes.unwrap_or_default();
            // An archive that is being unpacked is all there: its share must not begin at zero once more.
            let (bytes, bytes_per_second) = match progress.phase {
                Phase::Unpacking => (total_bytes, 0),
                _ => (progress.bytes, progress.bytes_per_second),
            };
            ModelResponse {
                state,
                bytes,
                total_bytes,
                bytes_per_second,
                message: progress_sentence(progress),
                from_node: progress.from_node.clone().unwrap_or_default(),
                ..ModelResponse::default()
            }
        }
    }
}

fn failed(why: &str) -> ModelResponse {
    ModelResponse {
        state: ModelState::Failed.into(),
        message: why.to_owned(),
        ..ModelResponse::default()
    }
}

/// Returns the state of a model that an earlier agent tried, while it should be left alone.
fn waiting(tries: &Tries, source: Option<&Source>, now: SystemTime) -> Option<Entry> {
    // An agent that ends once while unpacking was probably replaced, as happens to all Pods now and then.
    let is_known = tries.failures > 0 || tries.lost > 1;
    let is_same = source.is_none_or(|source| tries.are_of(source));
    let left = tries.left(now, MOST_WAIT);
    (is_known && is_same && !left.is_zero()).then(|| Entry {
        tries: tries.clone(),
        state: State::Failed {
            again_at: Instant::now() + left,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_that_is_unpacked_is_reported_as_all_there() {
        let progress = |phase| Progress {
            phase,
            bytes: 10,
            total_bytes: Some(100),
            bytes_per_second: 5,
            from_node: None,
            trouble: None,
        };
        let told = |phase| working(Some(&progress(phase))).bytes;
        assert_eq!(told(Phase::Downloading), 10);
        assert_eq!(told(Phase::Unpacking), 100);
    }
}
