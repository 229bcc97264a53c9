//! Pods that ended as a whole, such as those that a kubelet rejected or evicted. Each is created again under its name
//! and says nothing about the previous one, so their plan keeps a record.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_crds::{EndedPod, InferencePlan};
use jiff::Timestamp;
use serde::Deserialize;

use crate::age::age;
use crate::names::ANNOTATION_ENDS;
use crate::observed::PodView;
use crate::plan_record::annotation;

/// Minimum time from the creation of a Pod that failed until it is created again: a node may refuse it again at once.
/// It doubles with each end.
const REMAKE_AFTER: Duration = Duration::from_secs(10);
/// Maximum of that time.
const REMAKE_AFTER_MAX: Duration = Duration::from_secs(300);
/// Lifetime from which a Pod counts as healthy: the count for its name starts over.
const LONG_LIFE: Duration = Duration::from_secs(900);

/// Ends by the Pod's name, as their plan records them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Ends(BTreeMap<String, Ended>);

/// Pods of one name that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Ended {
    /// UID of the last of them.
    uid: String,
    /// Number of them, one after the other.
    times: u32,
    /// Time at which the first was recorded, in seconds since 1970.
    first_seconds: i64,
    /// Whether a container of one of them ever ran.
    pub(crate) has_run: bool,
}

impl Ended {
    /// Time at which the first was recorded.
    pub(crate) fn first(&self) -> Timestamp {
        Timestamp::from_second(self.first_seconds).unwrap_or(Timestamp::UNIX_EPOCH)
    }
}

impl Ends {
    /// The ends that the plan has recorded.
    pub(crate) fn of(plan: &InferencePlan) -> Self {
        let told = plan.status.as_ref();
        let Some(ended) = told.and_then(|status| status.ended_pods.as_ref()) else {
            return serde_json::from_str(annotation(plan, ANNOTATION_ENDS)).unwrap_or_default();
        };
        let ends = ended.iter().map(|pod| {
            let ended = Ended {
                uid: pod.uid.clone(),
                times: pod.times,
                first_seconds: pod.first_seconds,
                has_run: pod.has_run,
            };
            (pod.name.clone(), ended)
        });
        Self(ends.collect())
    }

    /// The Pods of that name that have ended.
    pub(crate) fn get(&self, pod: &str) -> Option<&Ended> {
        self.0.get(pod)
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Ended> {
        self.0.values()
    }

    /// Time from its creation after which a Pod that has ended is created again.
    pub(crate) fn remake_after(&self, pod: &str) -> Duration {
        let times = self.get(pod).map_or(0, |ended| ended.times);
        let wait = REMAKE_AFTER.saturating_mul(1 << times.min(8));
        wait.min(REMAKE_AFTER_MAX)
    }

    /// Records a Pod that has ended and is about to be created again. One that was recorded before is not counted
    /// twice.
    pub(crate) fn take(&mut self, pod: &PodView, now: Timestamp) {
        let life = age(pod.created.unwrap_or(now), now);
        let ended = self.0.entry(pod.name.clone()).or_default();
        if ended.uid == pod.uid {
            return;
        }
        if ended.times == 0 || life >= LONG_LIFE {
            *ended = Ended {
                first_seconds: now.as_second(),
                ..Ended::default()
            };
        }
        ended.uid.clone_from(&pod.uid);
        ended.times += 1;
        ended.has_run |= has_run(pod);
    }

    /// Forgets Pods whose names are not wanted.
    pub(crate) fn keep(&mut self, is_wanted: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| is_wanted(name));
    }

    /// Converts them for the plan's status.
    pub(crate) fn to_status(&self) -> Vec<EndedPod> {
        let ends = self.0.iter();
        ends.map(|(name, ended)| EndedPod {
            name: name.clone(),
            uid: ended.uid.clone(),
            times: ended.times,
            first_seconds: ended.first_seconds,
            has_run: ended.has_run,
        })
        .collect()
    }
}

/// Whether a Pod ended before its container ran: its kubelet rejected it.
pub(crate) fn is_rejected(pod: &PodView) -> bool {
    pod.phase == "Failed" && !has_run(pod)
}

fn has_run(pod: &PodView) -> bool {
    pod.container.as_ref().is_some_and(|container| {
        container.running_since.is_some() || container.last_end.is_some() || container.restarts > 0
    })
}
