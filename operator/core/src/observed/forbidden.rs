//! Pods that the API server forbids: a full ResourceQuota, a LimitRange, Pod Security, or somebody's webhook.
//!
//! No Pod tells of it, since there is none. It is remembered here from the answers to the writes, and after a start the next
//! write tells again. What had gone before the start is told by nobody: a plan for which the old made room in vain is then
//! given up when its deadline is over, no sooner.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use super::pod::PodView;
use crate::age::age;
use crate::names::GPU_RESOURCE;
use crate::quantity::{bytes, millis};

/// Longest wait between two reconciles of a deployment whose writes fail, in the hope that the failure passes by itself.
pub const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// For how long after it was met a full quota is taken to be full still, if nothing of the deployment has gone since: the next
/// reconcile, which comes after the longest wait at the latest, knows of it.
pub const FULL_FOR: Duration = BACKOFF_MAX.saturating_mul(2);

/// A quota that refuses so long after something of the deployment has gone does not count that any more.
const RECOUNT: Duration = Duration::from_secs(30);

/// What came of making the Pods of one plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// The plan's.
    pub generation: u64,
    /// The API server's words.
    pub words: String,
    /// Whether a gateway was among the Pods.
    pub has_gateway: bool,
    /// What the quota leaves to the deployment's Pods, all of them together: the most that was told
    /// of each resource, since its counts lag behind the Pods. None: it is not known.
    rooms: BTreeMap<String, Option<u64>>,
    /// When it was first forbidden since one was made, of whichever plan; none: one was made since.
    pub since: Option<Timestamp>,
    /// When it was forbidden last; none since then something of the deployment has gone, or a Pod was made.
    pub last: Option<Timestamp>,
    /// What of the deployment has gone since it was first forbidden.
    gone: Option<Gone>,
    /// The plan has lost its place on the nodes.
    pub is_dropped: bool,
}

/// That something of the deployment has gone.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gone {
    /// The last of it.
    at: Timestamp,
    /// The resources that quotas were known to be short of when the first of it went.
    known: BTreeSet<String>,
}

/// How a rollout finds the namespace's ResourceQuota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quota {
    /// It was not in the way.
    #[default]
    Free,
    /// It has no room for the plan beside the one before, and would have it for the plan alone.
    Tight,
    /// As [`Self::Tight`], and it had none for a gateway, a moment ago.
    Full,
}

/// What Pods count of a ResourceQuota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pods: u64,
    cpu_millis: u64,
    memory_bytes: u64,
    /// Those that are asked of the device plugin.
    gpus: u64,
}

impl Counted {
    /// The Pods of a deployment that are not over.
    pub fn of_pods<'a>(pods: impl Iterator<Item = &'a PodView>) -> Self {
        let alive = pods.filter(|pod| !matches!(pod.phase.as_str(), "Failed" | "Succeeded"));
        alive.fold(Self::default(), |sum, pod| {
            let gpus = pod.gpus * u32::from(pod.claimed_gpus.is_empty());
            sum.with(pod.cpu_millis, pod.memory_bytes, gpus)
        })
    }

    /// With one more Pod: its CPU in thousandths, its memory, and the GPUs that it asks of the device plugin.
    #[must_use]
    pub const fn with(self, cpu_millis: u64, memory_bytes: u64, gpus: u32) -> Self {
        Self {
            pods: self.pods.saturating_add(1),
            cpu_millis: self.cpu_millis.saturating_add(cpu_millis),
            memory_bytes: self.memory_bytes.saturating_add(memory_bytes),
            gpus: self.gpus.saturating_add(gpus as u64),
        }
    }

    /// The amount of a resource as a quota names it; none: it is not known what Pods count of it.
    fn of(self, resource: &str) -> Option<u64> {
        match kind(resource)? {
            Kind::Pods => Some(self.pods),
            Kind::Cpu => Some(self.cpu_millis),
            Kind::Memory => Some(self.memory_bytes),
            Kind::Gpus => Some(self.gpus),
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Pods,
    Cpu,
    Memory,
    Gpus,
}

/// What a quota counts, of what is known here. Limits are not: most Pods get theirs from a LimitRange.
fn kind(resource: &str) -> Option<Kind> {
    match resource {
        "pods" | "count/pods" => Some(Kind::Pods),
        "cpu" | "requests.cpu" => Some(Kind::Cpu),
        "memory" | "requests.memory" => Some(Kind::Memory),
        _ if resource.strip_prefix("requests.") == Some(GPU_RESOURCE) => Some(Kind::Gpus),
        _ => None,
    }
}

/// What a full quota leaves to a deployment that has `own` of what it counts as used, in the unit of [`Counted`] by resource,
/// from words such as `exceeded quota: small, requested: pods=1, used: pods=3, limited: pods=3`.
fn rooms(words: &str, own: Counted) -> BTreeMap<String, Option<u64>> {
    let amounts = |name: &str| -> BTreeMap<&str, &str> {
        let list = words.split_once(name).map_or("", |(_, list)| list);
        let list = list.split_whitespace().next().unwrap_or_default();
        list.split(',')
            .filter_map(|it| it.split_once('='))
            .collect()
    };
    let (used, limited) = (amounts(", used: "), amounts(", limited: "));
    let room = |resource: &str, limit: &str| {
        let amount = match kind(resource)? {
            Kind::Cpu => millis,
            Kind::Pods | Kind::Memory | Kind::Gpus => bytes,
        };
        let others = amount(used.get(resource)?)?.saturating_sub(own.of(resource)?);
        Some(amount(limit)?.saturating_sub(others))
    };
    let rooms = limited.iter();
    rooms
        .map(|(resource, limit)| ((*resource).to_owned(), room(resource, limit)))
        .collect()
}

impl Forbidden {
    /// A Pod of that plan is forbidden now, while the deployment's Pods count `own`, after what was known `before`.
    pub fn after(
        before: Option<Self>,
        generation: u64,
        words: &str,
        has_gateway: bool,
        own: Counted,
        now: Timestamp,
    ) -> Self {
        // Another plan whose Pods may not be made is no fresh start.
        let since = before.as_ref().and_then(|before| before.since);
        let is_dropped = before.as_ref().is_some_and(|before| before.is_dropped);
        let mut rooms = rooms(words, own);
        let mut gone = None;
        if let Some(before) = before.filter(|before| before.generation == generation) {
            gone = before.gone;
            for (resource, known) in before.rooms {
                let room = rooms.entry(resource).or_default();
                *room = (*room).max(known);
            }
        }
        Self {
            generation,
            words: words.to_owned(),
            has_gateway,
            rooms,
            since: Some(since.unwrap_or(now)),
            last: Some(now),
            gone,
            is_dropped,
        }
    }

    /// Something of the deployment has gone: the plan's Pods are worth another try.
    pub fn goes(&mut self, now: Timestamp) {
        self.last = None;
        let known = || self.rooms.keys().cloned().collect();
        let known = self.gone.take().map_or_else(known, |gone| gone.known);
        self.gone = Some(Gone { at: now, known });
    }

    /// Whether what served has gone for that plan in vain: a quota is short of something else too, which it did not tell as
    /// long as it was short of the first. It tells no more than what one Pod is too much for.
    pub fn was_made_room_in_vain(&self, generation: u64, needs: Counted) -> bool {
        let (Some(gone), Some(last)) = (&self.gone, self.last) else {
            return false;
        };
        self.generation == generation
            && is_quota(&self.words)
            && age(gone.at, last) >= RECOUNT
            && self.fits(needs, |resource| gone.known.contains(resource))
            && !self.fits(needs, |_| true)
    }

    /// How the rollout of that plan, whose Pods count `needs`, finds the quota. Nothing that runs makes room for a plan that the
    /// quota would not have alone either.
    pub fn quota(&self, generation: u64, needs: Counted, now: Timestamp) -> Quota {
        if self.generation != generation || !is_quota(&self.words) || !self.fits(needs, |_| true) {
            return Quota::Free;
        }
        let is_full = self.last.is_some_and(|last| age(last, now) < FULL_FOR);
        match is_full && self.has_gateway {
            true => Quota::Full,
            false => Quota::Tight,
        }
    }

    /// Whether the quota is known to have room for all of a plan's Pods without those before, as far as these resources go.
    fn fits(&self, needs: Counted, counts: impl Fn(&str) -> bool) -> bool {
        let fits = |(resource, room): (&String, &Option<u64>)| {
            let room = room.zip(needs.of(resource));
            room.is_some_and(|(room, need)| need <= room)
        };
        let mut rooms = self.rooms.iter();
        !self.rooms.is_empty() && rooms.all(|it| !counts(it.0) || fits(it))
    }
}

/// Whether a Pod is forbidden for want of room in a ResourceQuota, which others may make.
pub fn is_quota(words: &str) -> bool {
    words.contains("exceeded quota")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{GIB, at};

    /// What Pods of so many bytes count.
    fn needs(memory_bytes: &[u64]) -> Counted {
        let pods = memory_bytes.iter();
        pods.fold(Counted::default(), |sum, bytes| sum.with(1500, *bytes, 1))
    }

    fn own(memory_bytes: u64) -> Counted {
        let pod = |phase: &str| PodView {
            memory_bytes,
            cpu_millis: 1500,
            gpus: 1,
            phase: phase.to_owned(),
            ..PodView::default()
        };
        Counted::of_pods([&pod("Running"), &pod("Failed")].into_iter())
    }

    fn words(used: &str, limited: &str) -> String {
        format!(
            "pods \"x\" is forbidden: exceeded quota: small, requested: {used}, used: {used}, limited: {limited}"
        )
    }

    /// What serves makes room only for what may be made then.
    #[test]
    fn a_quota_makes_the_old_end_first_only_where_the_new_fits_it_alone() {
        let quota = |used: &str, limited: &str, wants: &[u64]| {
            let words = words(used, limited);
            let forbidden = Forbidden::after(None, 1, &words, false, own(32 * GIB), at(0));
            let wants: Vec<u64> = wants.iter().map(|gib| gib * GIB).collect();
            forbidden.quota(1, needs(&wants), at(0))
        };
        let memory = "requests.memory=";
        let of = |used: &str, limited: &str, wants: &[u64]| {
            quota(
                &format!("{memory}{used}"),
                &format!("{memory}{limited}"),
                wants,
            )
        };
        assert_eq!(of("32Gi", "48Gi", &[32]), Quota::Tight);
        assert_eq!(of("32Gi", "48Gi", &[24, 24]), Quota::Tight);
        assert_eq!(of("32Gi", "48Gi", &[32, 32]), Quota::Free, "never fits");
        assert_eq!(of("40Gi", "48Gi", &[40]), Quota::Tight);
        assert_eq!(of("41Gi", "48Gi", &[40]), Quota::Free, "others have 9 GiB");
        assert_eq!(of("32Gi", "20Gi", &[32]), Quota::Free, "it was lowered");
        assert_eq!(quota("pods=3", "pods=3", &[1]), Quota::Tight);
        assert_eq!(quota("pods=3", "pods=3", &[1, 1]), Quota::Free);
        assert_eq!(quota("cpu=1500m", "cpu=2", &[1]), Quota::Tight);
        assert_eq!(quota("cpu=1500m", "cpu=2", &[1, 1]), Quota::Free);
        let gpus = "requests.nvidia.com/gpu=1";
        assert_eq!(quota(gpus, gpus, &[1]), Quota::Tight);
        assert_eq!(quota(gpus, gpus, &[1, 1]), Quota::Free);
        let both = "memory=32Gi,pods=9";
        assert_eq!(quota(both, "memory=48Gi,pods=9", &[32]), Quota::Tight);
        assert_eq!(quota(both, "memory=48Gi,pods=8", &[32]), Quota::Free);
        // What cannot be counted is no evidence.
        assert_eq!(quota("limits.cpu=1", "limits.cpu=9", &[1]), Quota::Free);
        assert_eq!(quota("cpu=x", "cpu=9", &[1]), Quota::Free);
        assert_eq!(of("1.12345678ä", "4Ei", &[1]), Quota::Free);
        assert_eq!(of("32Gi", "4Ei", &[32]), Quota::Tight);
        let odd = Forbidden::after(None, 1, "exceeded quota", false, own(1), at(0));
        assert_eq!(odd.quota(1, needs(&[1]), at(0)), Quota::Free);
    }

    #[test]
    fn a_full_quota_is_known_at_the_next_visit_however_late_it_comes() {
        let full = words("pods=1", "pods=1");
        let forbidden = Forbidden::after(None, 1, &full, true, own(GIB), at(0));
        let reconciled = |wait: Duration| forbidden.quota(1, needs(&[1]), at(0) + wait);
        assert_eq!(reconciled(BACKOFF_MAX), Quota::Full);
        assert_eq!(reconciled(3 * BACKOFF_MAX), Quota::Tight);
    }

    /// A quota names what one Pod is too much for, and no more.
    #[test]
    fn a_quota_that_is_short_of_something_else_is_known_when_its_counts_are_new() {
        let small = own(GIB);
        let wants = needs(&[4 * GIB, 4 * GIB]);
        let memory = "requests.memory=4Gi";
        let told = |before: Option<Forbidden>, used: &str, limited: &str, since_s: i64| {
            let now = at(since_s);
            Forbidden::after(before, 1, &words(used, limited), false, small, now)
        };
        let first = || told(None, "pods=3", "pods=4", 0);
        assert_eq!(first().quota(1, wants, at(0)), Quota::Tight);
        let never = told(Some(first()), "requests.memory=1Gi", memory, 99);
        assert!(!never.was_made_room_in_vain(1, wants), "nothing has gone");
        let gone = || {
            let mut gone = first();
            gone.goes(at(0));
            gone
        };
        let vain = |since_s: i64, resource: &str| {
            let used = format!("{resource}=1Gi");
            let limited = format!("{resource}=4Gi");
            let told = told(Some(gone()), &used, &limited, since_s);
            told.was_made_room_in_vain(1, wants)
        };
        assert!(!vain(29, "requests.memory"), "its counts may be old");
        assert!(vain(31, "requests.memory"));
        assert!(vain(31, "limits.memory"), "what is not counted here");
        let mut more = told(Some(gone()), "requests.memory=1Gi", memory, 0);
        more.goes(at(0));
        let more = told(Some(more), "requests.memory=1Gi", memory, 31);
        assert!(more.was_made_room_in_vain(1, wants), "the last one ended");
        assert!(!more.was_made_room_in_vain(2, wants));
        // It is short of what it was known to be short of, and others may have that now.
        let same = told(Some(gone()), "pods=4", "pods=4", 31);
        assert!(!same.was_made_room_in_vain(1, wants));
        let next = Forbidden::after(
            Some(more),
            2,
            &words("pods=1", "pods=1"),
            false,
            small,
            at(31),
        );
        assert_eq!(next.gone, None);
    }

    /// A Pod that has just gone is counted for a moment still.
    #[test]
    fn what_was_seen_to_fit_fits_until_the_next_plan() {
        let full = words("pods=1", "pods=1");
        let first = Forbidden::after(None, 1, &full, true, own(GIB), at(0));
        assert_eq!(first.quota(1, needs(&[1]), at(0)), Quota::Full);
        let lagging = Forbidden::after(Some(first), 1, &full, true, Counted::default(), at(0));
        assert_eq!(lagging.quota(1, needs(&[1]), at(0)), Quota::Full);
        assert_eq!(lagging.quota(2, needs(&[1]), at(0)), Quota::Free);
        let next = Forbidden::after(Some(lagging), 2, &full, true, Counted::default(), at(0));
        assert_eq!(next.quota(2, needs(&[1]), at(0)), Quota::Free);
    }
}
