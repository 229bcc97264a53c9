//! Rollout of worker images to one deployment after another: those that are changing to one, and the outcome.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hearth_crds::InferencePlan;
use jiff::{SignedDuration, Timestamp};

use crate::plan_record::{has_failed, has_served, passes_turn};

/// Time after which a deployment that is not ready with an image no longer holds back others: its own deadline is up
/// to its owner.
pub const LONGEST_TURN: SignedDuration = SignedDuration::from_mins(30);
/// Time after the longest turn for which a deployment that failed with an image holds back others: enough to notice a
/// broken image and withdraw it. After that the next one tries it, because the fault may lie with the deployment
/// itself, whose owner nobody else can make repair it.
const HELD_BACK: SignedDuration = SignedDuration::from_hours(1);

/// Outcome of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is being carried out.
    Open,
    /// All its ranks have been ready at once.
    Served,
    /// It was given up.
    Failed,
}

/// The plans of all deployments, as far as images are concerned.
#[derive(Debug, Default)]
pub struct Turns {
    /// Plans by owner and generation.
    plans: HashMap<Arc<str>, BTreeMap<u64, Step>>,
    /// Names of the images, each once.
    images: Vec<Arc<str>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Step {
    image: Option<Arc<str>>,
    outcome: Outcome,
    made: Option<Timestamp>,
    /// Whether what keeps it from serving is not its image's fault.
    passes: bool,
}

impl Step {
    /// Whether it holds nobody back from its image, whatever its outcome.
    fn has_passed(&self, now: Timestamp) -> bool {
        self.passes || self.passes_at().is_some_and(|at| now >= at)
    }

    /// Time at which it has passed at the latest; `None` for a plan without a creation time.
    fn passes_at(&self) -> Option<Timestamp> {
        let holds = match self.outcome {
            Outcome::Open | Outcome::Served => LONGEST_TURN,
            // Counted from the start, as nothing records the time of the failure.
            Outcome::Failed => LONGEST_TURN + HELD_BACK,
        };
        self.made?.checked_add(holds).ok()
    }
}

impl Turns {
    /// Replaces all plans of a deployment; empty: it has none, or is deleted. Returns whether another's turn may have
    /// come.
    pub fn set(&mut self, owner: &Arc<str>, plans: &[Arc<InferencePlan>]) -> bool {
        let steps = plans.iter();
        let steps = steps.map(|plan| (plan.spec.generation, self.step(plan)));
        let steps: BTreeMap<u64, Step> = steps.collect();
        let before = self.plans.remove(owner).unwrap_or_default();
        let newest = before.keys().next_back();
        let is_news = before.iter().any(|(generation, step)| {
            let now = steps.get(generation);
            now.map_or(newest == Some(generation), |now| now != step)
        });
        if !steps.is_empty() {
            self.plans.insert(Arc::clone(owner), steps);
        }
        is_news
    }

    fn step(&mut self, plan: &InferencePlan) -> Step {
        let outcome = if has_served(plan) {
            Outcome::Served
        } else if has_failed(plan) {
            Outcome::Failed
        } else {
            Outcome::Open
        };
        let image = plan.spec.worker_image.as_deref();
        Step {
            image: image.map(|image| self.shared(image)),
            outcome,
            made: plan.metadata.creation_timestamp.as_ref().map(|at| at.0),
            passes: !passes_turn(plan).is_empty(),
        }
    }

    /// The owner whose change to `image` is under way, or failed not long ago; `but` does not count.
    pub fn on_the_way_to(
        &self,
        image: &str,
        but: &str,
        now: Timestamp,
    ) -> Option<(&Arc<str>, Outcome)> {
        let ways = self.ways(now);
        let others = ways.filter(|(owner, step)| {
            let is_there = step.image.as_deref() == Some(image);
            ***owner != *but && is_there
        });
        first(others)
    }

    /// The owner that others wait for, whatever the image.
    pub fn holder(&self, now: Timestamp) -> Option<(&Arc<str>, Outcome)> {
        first(self.ways(now))
    }

    /// Time at which the owner's turn has passed at the latest, whatever comes of it.
    pub fn passes_at(&self, owner: &str) -> Option<Timestamp> {
        let (_, newest) = self.plans.get(owner)?.last_key_value()?;
        newest.passes_at()
    }

    /// Owners that are changing, or failed not long ago to change, from an image that served to another one.
    fn ways(&self, now: Timestamp) -> impl Iterator<Item = (&Arc<str>, &Step)> {
        self.plans.iter().filter_map(move |(owner, steps)| {
            let (generation, newest) = steps.last_key_value()?;
            let mut before = steps.range(..generation).map(|(_, step)| step);
            let had_other = |step: &Step| {
                let other = step.image.as_ref();
                let is_other = other.is_some() && other != newest.image.as_ref();
                step.outcome == Outcome::Served && is_other
            };
            let is_way = newest.image.is_some()
                && newest.outcome != Outcome::Served
                && !newest.has_passed(now)
                && before.any(had_other);
            is_way.then_some((owner, newest))
        })
    }

    /// The image of the owner's newest plan.
    pub fn newest_image(&self, owner: &str) -> Option<&str> {
        let (_, newest) = self.plans.get(owner)?.last_key_value()?;
        newest.image.as_deref()
    }

    fn shared(&mut self, image: &str) -> Arc<str> {
        if let Some(known) = self.images.iter().find(|known| &***known == image) {
            return Arc::clone(known);
        }
        self.images.retain(|known| Arc::strong_count(known) > 1);
        let image: Arc<str> = image.into();
        self.images.push(Arc::clone(&image));
        image
    }
}

/// Prefers a failure, which is the better reason; among several, always the same one.
fn first<'a>(
    ways: impl Iterator<Item = (&'a Arc<str>, &'a Step)>,
) -> Option<(&'a Arc<str>, Outcome)> {
    let ways = ways.map(|(owner, step)| (owner, step.outcome));
    ways.min_by_key(|(owner, outcome)| (*outcome != Outcome::Failed, Arc::clone(owner)))
}

/// Whether workers are kept from running by something that is not their image's fault.
pub fn is_no_images_fault(reason: &str) -> bool {
    matches!(
        reason,
        "Evicted"
            | "MountFailed"
            | "NodeLost"
            | "NotAllowed"
            | "QuotaExceeded"
            | "Rejected"
            | "SetupFailed"
            | "Unschedulable"
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::names::{OUTCOME_FAILED, OUTCOME_SERVING};
    use crate::testing::at;
    use crate::testing::samples;

    fn plan(generation: u64, image: &str, outcome: &str) -> InferencePlan {
        let mut spec = samples::plan();
        spec.generation = generation;
        spec.worker_image = Some(image.to_owned());
        let mut plan = InferencePlan::new(&format!("demo-{generation}"), spec);
        plan.status.get_or_insert_default().outcome = Some(outcome.to_owned());
        plan
    }

    /// Turns, and the plans that they were given.
    #[derive(Default)]
    struct Plans {
        turns: Turns,
        by_owner: HashMap<String, BTreeMap<u64, Arc<InferencePlan>>>,
    }

    impl Plans {
        fn put(&mut self, owner: &str, plan: &InferencePlan) -> bool {
            let plans = self.by_owner.entry(owner.to_owned()).or_default();
            plans.insert(plan.spec.generation, Arc::new(plan.clone()));
            self.told(owner)
        }

        fn remove(&mut self, owner: &str, generation: u64) -> bool {
            let plans = self.by_owner.get_mut(owner).expect("an owner");
            plans.remove(&generation).expect("a plan");
            self.told(owner)
        }

        fn told(&mut self, owner: &str) -> bool {
            let plans: Vec<_> = self.by_owner[owner].values().cloned().collect();
            self.turns.set(&owner.into(), &plans)
        }
    }

    #[test]
    fn a_way_is_one_from_an_image_that_served() {
        let mut turns = Plans::default();
        let (one, two) = ("one", "two");
        let under_way = |turns: &Plans| {
            turns
                .turns
                .on_the_way_to("x:2", "two", at(0))
                .map(|(_, outcome)| outcome)
        };
        turns.put(one, &plan(1, "x:1", OUTCOME_SERVING));
        turns.put(two, &plan(1, "x:1", OUTCOME_SERVING));
        assert_eq!(under_way(&turns), None);
        assert!(!turns.put(one, &plan(2, "x:2", "")));
        assert_eq!(under_way(&turns), Some(Outcome::Open));
        assert_eq!(
            turns.turns.on_the_way_to("x:2", "one", at(0)),
            None,
            "its own way"
        );
        assert!(turns.put(one, &plan(2, "x:2", OUTCOME_FAILED)));
        assert_eq!(under_way(&turns), Some(Outcome::Failed));
        assert_eq!(
            turns.turns.on_the_way_to("x:3", "two", at(0)),
            None,
            "another image"
        );
        assert!(turns.put(one, &plan(2, "x:2", OUTCOME_SERVING)));
        assert_eq!(under_way(&turns), None);
        assert_eq!(turns.turns.newest_image("one"), Some("x:2"));
        // A first plan holds nobody back, and neither does a deleted one.
        let three = "three";
        turns.put(three, &plan(1, "x:2", ""));
        assert_eq!(under_way(&turns), None);
        turns.put(one, &plan(3, "x:1", OUTCOME_SERVING));
        turns.put(one, &plan(4, "x:2", ""));
        assert_eq!(under_way(&turns), Some(Outcome::Open));
        assert!(turns.remove("one", 4));
        assert_eq!(under_way(&turns), None);
    }

    /// One tenant's deadline or missing directory must not hold up everyone.
    #[test]
    fn a_turn_ends_by_itself_and_is_passed_on_where_the_image_is_not_to_blame() {
        let mut turns = Plans::default();
        let one = "one";
        turns.put(one, &plan(1, "x:1", OUTCOME_SERVING));
        let mut next = plan(2, "x:2", "");
        next.metadata.creation_timestamp = Some(Time(at(0)));
        turns.put(one, &next);
        let held = |turns: &Plans, second: i64| {
            let held = turns.turns.on_the_way_to("x:2", "two", at(second));
            assert_eq!(held, turns.turns.holder(at(second)));
            held.map(|(_, outcome)| outcome)
        };
        assert_eq!(held(&turns, 1799), Some(Outcome::Open));
        assert_eq!(held(&turns, 1800), None);
        next.status.get_or_insert_default().passes_turn = Some("MountFailed".to_owned());
        assert!(turns.put(one, &next), "somebody else's turn has come");
        assert_eq!(held(&turns, 1), None);
        next.status.get_or_insert_default().outcome = Some(OUTCOME_FAILED.to_owned());
        turns.put(one, &next);
        assert_eq!(held(&turns, 1), None);
        // By now it crashes: the image may be to blame.
        next.status.get_or_insert_default().passes_turn = Some(String::new());
        turns.put(one, &next);
        assert_eq!(held(&turns, 3600), Some(Outcome::Failed));
    }

    /// A plan of `owner` from the image that served, made at `second`.
    fn try_image(turns: &mut Plans, owner: &str, outcome: &str, second: i64) {
        turns.put(owner, &plan(1, "x:1", OUTCOME_SERVING));
        let mut next = plan(2, "x:2", outcome);
        next.metadata.creation_timestamp = Some(Time(at(second)));
        turns.put(owner, &next);
    }

    /// One tenant's broken deployment must not keep an image from everyone for good.
    #[test]
    fn a_failure_holds_back_the_next_one_for_a_time() {
        let mut turns = Plans::default();
        let end = 5400;
        let held = |turns: &Plans, second: i64| {
            let held = turns.turns.on_the_way_to("x:2", "last", at(second));
            assert_eq!(held, turns.turns.holder(at(second)));
            held.map(|(owner, outcome)| (owner.to_string(), outcome))
        };
        let by = |owner: &str, outcome| Some((owner.to_owned(), outcome));
        turns.put("last", &plan(1, "x:1", OUTCOME_SERVING));
        try_image(&mut turns, "one", OUTCOME_FAILED, 0);
        assert_eq!(held(&turns, end - 1), by("one", Outcome::Failed));
        assert_eq!(held(&turns, end), None);
        // A broken image fails with the next one too, which holds for as long again.
        try_image(&mut turns, "two", "", end);
        assert_eq!(held(&turns, end), by("two", Outcome::Open));
        try_image(&mut turns, "two", OUTCOME_FAILED, end);
        assert_eq!(held(&turns, 2 * end - 1), by("two", Outcome::Failed));
        assert_eq!(held(&turns, 2 * end), None);
        // One that becomes ready with it ends the waiting at once.
        try_image(&mut turns, "three", "", 2 * end);
        assert_eq!(held(&turns, 2 * end), by("three", Outcome::Open));
        try_image(&mut turns, "three", OUTCOME_SERVING, 2 * end);
        assert_eq!(held(&turns, 2 * end), None);
    }
}
