//! The least memory that the other programs of each node left to Hearth within a day.
//!
//! An agent says what was available at least in its last minutes, whoever took the rest. What Hearth's Pods may have taken
//! of it is known here alone, by their requests, and is added, so that they do not count against themselves: like
//! `availableBytes`, the result is the most that Hearth might have used.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_crds::NodeProfileStatus;
use tokio::time::Instant;

/// Time over which the least counts: programs of a machine come and go by the day.
pub(super) const WINDOW: Duration = Duration::from_secs(24 * 3600);
/// More than the time that an agent's answer looks back: Pods that were there then may have had memory.
const ANSWER: Duration = Duration::from_secs(180);

/// What each node could spare, by its name.
#[derive(Default)]
pub(super) struct Spares(Mutex<BTreeMap<String, Spare>>);

/// What one node could spare.
struct Spare {
    /// What the memory is: that of another machine, or beside other virtual devices, would say nothing.
    memory: (u64, u64),
    /// When this operator began to watch.
    since: Instant,
    /// How long others had watched before.
    before: Duration,
    /// Bytes that were available, oldest first, and each less than all later ones.
    least: VecDeque<(Instant, u64)>,
    /// Bytes that Hearth's Pods requested.
    held: VecDeque<(Instant, u64)>,
}

impl Spares {
    /// Puts the least of the last day into a profile that has the least of an agent's last minutes. `stored` is the node's
    /// profile, which an operator before this one may have written; `held_bytes` is the memory requested by Hearth's Pods.
    pub(super) fn hear(
        &self,
        measured: &mut NodeProfileStatus,
        stored: Option<&NodeProfileStatus>,
        held_bytes: u64,
        now: Instant,
    ) {
        let Some(least) = measured.memory.least_available_bytes else {
            // An agent of an earlier version does not watch.
            measured.memory.least_over_seconds = 0;
            return;
        };
        let memory = memory_of(measured);
        let mut spares = self.lock();
        let spare = spares
            .entry(measured.node.clone())
            .or_insert_with(|| Spare::new(memory, stored, now));
        if spare.memory != memory {
            *spare = Spare::new(memory, None, now);
        }
        let held_bytes = spare.most_held(held_bytes, now);
        let most = measured.memory.total_bytes.max(least);
        let bytes = least.saturating_add(held_bytes).min(most);
        measured.memory.least_available_bytes = Some(spare.least_with(bytes, now));
        measured.memory.least_over_seconds = spare.watched_seconds(now);
    }

    /// Forgets nodes that are gone.
    pub(super) fn retain(&self, is_there: impl Fn(&str) -> bool) {
        self.lock().retain(|node, _| is_there(node));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Spare>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spare {
    /// Begins with what is written of the same memory.
    fn new(memory: (u64, u64), stored: Option<&NodeProfileStatus>, now: Instant) -> Self {
        let stored = stored.filter(|stored| memory_of(stored) == memory);
        let least = stored.and_then(|stored| stored.memory.least_available_bytes);
        let seconds = stored.map_or(0, |stored| stored.memory.least_over_seconds);
        Self {
            memory,
            since: now,
            before: Duration::from_secs(seconds.into()),
            least: least.map(|bytes| (now, bytes)).into_iter().collect(),
            held: VecDeque::new(),
        }
    }

    /// The most that Hearth's Pods requested while the agent's answer came about.
    fn most_held(&mut self, held_bytes: u64, now: Instant) -> u64 {
        self.held.push_back((now, held_bytes));
        self.held
            .retain(|(at, _)| now.duration_since(*at) <= ANSWER);
        let held = self.held.iter().map(|(_, bytes)| *bytes);
        held.max().unwrap_or(held_bytes)
    }

    fn least_with(&mut self, bytes: u64, now: Instant) -> u64 {
        while self.least.back().is_some_and(|(_, later)| *later >= bytes) {
            self.least.pop_back();
        }
        self.least.push_back((now, bytes));
        while self
            .least
            .front()
            .is_some_and(|(at, _)| now.duration_since(*at) > WINDOW)
        {
            self.least.pop_front();
        }
        self.least.front().map_or(bytes, |(_, least)| *least)
    }

    fn watched_seconds(&self, now: Instant) -> u32 {
        let watched = self.before.saturating_add(now.duration_since(self.since));
        u32::try_from(watched.min(WINDOW).as_secs()).unwrap_or(u32::MAX)
    }
}

/// All memory of a node, and that of its virtual devices, in bytes.
fn memory_of(profile: &NodeProfileStatus) -> (u64, u64) {
    let gpus = profile.gpus.iter();
    let devices = gpus.filter(|gpu| gpu.virtual_device.is_some());
    let taken = devices.map(|gpu| gpu.memory_bytes).sum();
    (profile.memory.total_bytes, taken)
}

#[cfg(test)]
mod tests {
    use hearth_crds::MemoryProfile;

    use super::*;

    const HOUR: u64 = 3600;

    fn profile(least_bytes: Option<u64>) -> NodeProfileStatus {
        NodeProfileStatus {
            node: "a".to_owned(),
            memory: MemoryProfile {
                total_bytes: 1000,
                available_bytes: 900,
                least_available_bytes: least_bytes,
                ..MemoryProfile::default()
            },
            ..NodeProfileStatus::default()
        }
    }

    /// Hears what an agent says, each so many seconds after the start, with so much held; returns the last least and time.
    fn after(stored: Option<&NodeProfileStatus>, heard: &[(u64, u64, u64)]) -> (Option<u64>, u32) {
        let (spares, start) = (Spares::default(), Instant::now());
        let mut told = (None, 0);
        for (second, least, held) in heard {
            let mut measured = profile(Some(*least));
            let now = start + Duration::from_secs(*second);
            spares.hear(&mut measured, stored, *held, now);
            let memory = measured.memory;
            told = (memory.least_available_bytes, memory.least_over_seconds);
        }
        told
    }

    #[test]
    fn the_least_of_a_day_is_told_and_then_forgotten() {
        let day = [(0, 800, 0), (60, 300, 0), (2 * HOUR, 700, 0)];
        assert_eq!(after(None, &day), (Some(300), 7200));
        let later = [&day[..], &[(24 * HOUR + 61, 900, 0)]].concat();
        assert_eq!(after(None, &later), (Some(700), 86_400));
    }

    #[test]
    fn what_hearths_pods_held_does_not_count() {
        // A Pod has taken 500 of what it requested.
        assert_eq!(after(None, &[(0, 300, 600)]).0, Some(900));
        assert_eq!(
            after(None, &[(0, 800, 600)]).0,
            Some(1000),
            "no more than there is"
        );
        // It is gone, and the agent's answer still looks back at it.
        assert_eq!(after(None, &[(0, 300, 600), (60, 300, 0)]).0, Some(900));
        assert_eq!(after(None, &[(0, 300, 600), (240, 800, 0)]).0, Some(800));
    }

    #[test]
    fn an_operator_goes_on_with_what_is_written_of_the_same_memory() {
        let mut stored = profile(Some(200));
        stored.memory.least_over_seconds = 3600;
        assert_eq!(
            after(Some(&stored), &[(0, 800, 0), (60, 800, 0)]),
            (Some(200), 3660)
        );
        let over = [(0, 800, 0), (24 * HOUR + 1, 700, 0)];
        assert_eq!(after(Some(&stored), &over), (Some(700), 86_400));
        stored.memory.total_bytes = 500;
        assert_eq!(after(Some(&stored), &[(0, 800, 0)]), (Some(800), 0));
    }

    #[test]
    fn an_agent_that_does_not_watch_says_nothing() {
        let spares = Spares::default();
        let mut measured = profile(None);
        spares.hear(&mut measured, Some(&profile(Some(200))), 0, Instant::now());
        assert_eq!(measured, profile(None));
    }

    #[test]
    fn nodes_that_are_gone_are_forgotten() {
        let spares = Spares::default();
        let now = Instant::now();
        spares.hear(&mut profile(Some(200)), None, 0, now);
        spares.retain(|node| node != "a");
        let mut again = profile(Some(700));
        spares.hear(&mut again, None, 0, now);
        assert_eq!(again.memory.least_available_bytes, Some(700));
    }
}
