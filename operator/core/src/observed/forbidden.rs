//! Pods that the API server forbids: because of a full ResourceQuota, a LimitRange, Pod Security, or a webhook.
//!
//! No Pod reports this, since there is none. It is remembered here from the responses to the writes, and after a
//! restart the next write shows it again. What ended before the restart is not remembered: a plan for which the old
//! Pods made room in vain is then given up only when its deadline is over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hearth_crds::GPU_RESOURCE;
use jiff::Timestamp;

use super::pod::PodView;
use crate::age::age;
use crate::quantity::{bytes, millis};

/// Longest wait between two reconciles of a deployment whose writes fail, in the hope that the failure passes by itself.
pub const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Time for which a quota that was found full is assumed to be full, if nothing of the deployment has gone since: the
/// next reconcile, which comes after the longest wait at the latest, still knows of it.
pub const FULL_FOR: Duration = BACKOFF_MAX.saturating_mul(2);

/// Time after which a plan is tried again whose Pods, all together, a quota does not admit.
pub const TRIED_AGAIN_AFTER: Duration = Duration::from_secs(300);

/// Time after which a quota no longer counts what has gone from the deployment.
const RECOUNT: Duration = Duration::from_secs(30);

/// Result of creating the Pods of one plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    /// Generation of the plan.
    pub generation: u64,
    /// The API server's message.
    pub words: String,
    /// Whether a gateway was among the Pods.
    pub has_gateway: bool,
    /// Amount of each resource that the quota leaves to all of the deployment's Pods together: the largest that was
    /// reported, since its counts lag behind the Pods. `None`: unknown.
    rooms: BTreeMap<String, Option<u64>>,
    /// Time at which a Pod, of whichever plan, was first forbidden since the last one was created; `None`: one was
    /// created since.
    pub since: Option<Timestamp>,
    /// Time at which a Pod was last forbidden; `None`: since then something of the deployment has gone, or a Pod was
    /// created.
    pub last: Option<Timestamp>,
    /// Time at which a Pod was last forbidden, whatever has gone or been created since.
    tried: Timestamp,
    /// Record of what has gone from the deployment since the first refusal.
    gone: Option<Gone>,
    /// Whether the plan has lost its place on the nodes.
    pub is_dropped: bool,
}

/// Record that something of the deployment has gone.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gone {
    /// Time of the latest such event.
    at: Timestamp,
    /// Resources that quotas were known to be short of at the first such event.
    known: BTreeSet<String>,
}

/// State of the namespace's ResourceQuota for a rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quota {
    /// It is not in the way.
    #[default]
    Free,
    /// It has no room for the plan beside the previous one, but would have room for the plan alone.
    Tight,
    /// Like [`Self::Tight`], and it recently had none for a gateway.
    Full,
}

/// Amounts that Pods count towards a ResourceQuota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pods: u64,
    cpu_millis: u64,
    memory_bytes: u64,
    /// GPUs that are requested from the device plugin.
    gpus: u64,
}

impl Counted {
    /// Amounts of a deployment's Pods, except those that have ended.
    pub fn of_pods<'a>(pods: impl Iterator<Item = &'a PodView>) -> Self {
        let alive = pods.filter(|pod| !pod.has_ended());
        alive.fold(Self::default(), |sum, pod| {
            let gpus = pod.gpus * u32::from(pod.claimed_gpus.is_empty());
            sum.with(pod.cpu_millis, pod.memory_bytes, gpus)
        })
    }

    /// Adds one Pod: its CPU in thousandths, its memory, and the GPUs that it requests from the device plugin.
    #[must_use]
    pub const fn with(self, cpu_millis: u64, memory_bytes: u64, gpus: u32) -> Self {
        Self {
            pods: self.pods.saturating_add(1),
            cpu_millis: self.cpu_millis.saturating_add(cpu_millis),
            memory_bytes: self.memory_bytes.saturating_add(memory_bytes),
            gpus: self.gpus.saturating_add(gpus as u64),
        }
    }

    /// The amount of a resource as a quota names it; `None` if it is unknown what Pods count towards it.
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

/// The resource that a quota's name means, if known here. Limits are not: most Pods get theirs from a LimitRange.
fn kind(resource: &str) -> Option<Kind> {
    match resource {
        "pods" | "count/pods" => Some(Kind::Pods),
        "cpu" | "requests.cpu" => Some(Kind::Cpu),
        "memory" | "requests.memory" => Some(Kind::Memory),
        _ if resource.strip_prefix("requests.") == Some(GPU_RESOURCE) => Some(Kind::Gpus),
        _ => None,
    }
}

/// Amounts that a full quota leaves to a deployment that accounts for `own` of the used ones, by resource in the unit
/// of [`Counted`], from a message such as `exceeded quota: small, requested: pods=1, used: pods=3, limited: pods=3`.
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
    /// Records that a Pod of that plan is forbidden now, while the deployment's Pods count `own`, given what was known
    /// `before`.
    pub fn after(
        before: Option<Self>,
        generation: u64,
        words: &str,
        has_gateway: bool,
        own: Counted,
        now: Timestamp,
    ) -> Self {
        // Another plan whose Pods are forbidden is not a fresh start.
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
            tried: now,
            gone,
            is_dropped,
        }
    }

    /// Records that something of the deployment has gone: the plan's Pods are worth another try.
    pub fn goes(&mut self, now: Timestamp) {
        self.last = None;
        let known = || self.rooms.keys().cloned().collect();
        let known = self.gone.take().map_or_else(known, |gone| gone.known);
        self.gone = Some(Gone { at: now, known });
    }

    /// Whether the Pods that served have ended for that plan in vain: a quota is also short of something else, which
    /// it did not report while it was short of the first. It reports no more than the resources that one Pod is too
    /// much for.
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

    /// Time after which all Pods of that plan, which count `needs`, are worth a try, where a quota admitted some of them and is
    /// known not to admit all, also without the previous plan's; `None`: they are worth one now.
    pub fn is_short_for(
        &self,
        generation: u64,
        needs: Counted,
        now: Timestamp,
    ) -> Option<Duration> {
        // The first message may count Pods that were created with the one that was too much.
        let since = self.since.filter(|since| age(*since, now) >= RECOUNT)?;
        let left = TRIED_AGAIN_AFTER.saturating_sub(age(self.tried.max(since), now));
        let is_short =
            self.generation == generation && is_quota(&self.words) && !self.fits(needs, |_| true);
        (is_short && !left.is_zero()).then_some(left)
    }

    /// State of the quota for the rollout of that plan, whose Pods count `needs`. Nothing that runs makes room for a
    /// plan that the quota would not admit on its own either.
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

    /// Whether the quota is known to have room for all of a plan's Pods without the previous ones, for the resources
    /// that `counts` selects.
    fn fits(&self, needs: Counted, counts: impl Fn(&str) -> bool) -> bool {
        let fits = |(resource, room): (&String, &Option<u64>)| {
            let room = room.zip(needs.of(resource));
            room.is_some_and(|(room, need)| need <= room)
        };
        let mut rooms = self.rooms.iter();
        !self.rooms.is_empty() && rooms.all(|it| !counts(it.0) || fits(it))
    }
}

/// Whether a Pod is forbidden because a ResourceQuota has no room, which others may free.
pub fn is_quota(words: &str) -> bool {
    words.contains("exceeded quota")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{GIB, at};

    /// Amounts of Pods with these bytes of memory.
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

    /// Serving Pods make room only for Pods that can then be created.
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
        // Amounts that cannot be counted are no evidence.
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

    /// A quota names the resources that one Pod is too much for, and no more.
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
        // It is short of what it was known to be short of, and others may have taken that by now.
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

    /// A Pod that has just gone is still counted for a moment.
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
