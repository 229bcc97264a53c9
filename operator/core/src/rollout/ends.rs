//! Pods that ended as a whole, such as those that a kubelet rejected or evicted. Each is made again under its name and tells
//! nothing of the one before, so their plan remembers.

use std::collections::BTreeMap;
use std::time::Duration;

use hearth_crds::{EndedPod, InferencePlan};
use jiff::Timestamp;
use serde::Deserialize;

use crate::age::age;
use crate::names::ANNOTATION_ENDS;
use crate::observed::PodView;
use crate::plan_record::annotation;

/// A Pod that failed is made again no sooner than this after it was made: a node may refuse it again at once. With each
/// end the time doubles.
const REMAKE_AFTER: Duration = Duration::from_secs(10);
/// The longest such time.
const REMAKE_AFTER_MAX: Duration = Duration::from_secs(300);
/// A Pod that lived for so long did well: the count of its name begins anew.
const LONG_LIFE: Duration = Duration::from_secs(900);

/// Ends by the Pod's name, as their plan remembers them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Ends(BTreeMap<String, Ended>);

/// Pods of one name that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Ended {
    /// The last of them.
    uid: String,
    /// How many, one after the other.
    times: u32,
    /// When the first was noted, in seconds since 1970.
    first_seconds: i64,
    /// Whether a container of one of them ever ran.
    pub(crate) has_run: bool,
}

impl Ended {
    /// When the first was noted.
    pub(crate) fn first(&self) -> Timestamp {
        Timestamp::from_second(self.first_seconds).unwrap_or(Timestamp::UNIX_EPOCH)
    }
}

impl Ends {
    /// As the plan remembers them.
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

    /// How long after it was made a Pod that has ended is to be made again.
    pub(crate) fn remake_after(&self, pod: &str) -> Duration {
        let times = self.get(pod).map_or(0, |ended| ended.times);
        let wait = REMAKE_AFTER.saturating_mul(1 << times.min(8));
        wait.min(REMAKE_AFTER_MAX)
    }

    /// Takes a Pod that has ended and is about to be made again. One that was taken before is not counted twice.
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

    /// Forgets Pods of names that are not among these.
    pub(crate) fn keep(&mut self, is_wanted: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| is_wanted(name));
    }

    /// As the plan's status has them.
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

/// Whether a Pod ended before its container ran: its kubelet did not take it.
pub(crate) fn is_rejected(pod: &PodView) -> bool {
    pod.phase == "Failed" && !has_run(pod)
}

fn has_run(pod: &PodView) -> bool {
    pod.container.as_ref().is_some_and(|container| {
        container.running_since.is_some() || container.last_end.is_some() || container.restarts > 0
    })
}
