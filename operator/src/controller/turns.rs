//! Worker images come to one deployment after the other: which of them are on their way to one, and how it went.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use hearth_crds::InferencePlan;

use super::choose::{has_failed, has_served};
use super::queue::Key;

/// Whether a deployment may begin to change to the operator's worker image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It may.
    #[default]
    Free,
    /// When that deployment is ready with it.
    After(Key),
    /// That deployment did not get ready with it: nobody else begins.
    HeldBack(Key),
}

/// How far a plan has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is being carried out.
    Open,
    /// All its ranks were ready once.
    Served,
    /// It was given up.
    Failed,
}

/// The plans of all deployments, as far as images go.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// By owner and generation.
    plans: HashMap<Arc<str>, BTreeMap<u64, Step>>,
    /// Each image's name once.
    images: Vec<Arc<str>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Step {
    image: Option<Arc<str>>,
    outcome: Outcome,
}

impl Turns {
    /// Takes a plan. Returns whether another's turn may have come.
    pub(crate) fn put(&mut self, owner: &Arc<str>, plan: &InferencePlan) -> bool {
        let outcome = if has_served(plan) {
            Outcome::Served
        } else if has_failed(plan) {
            Outcome::Failed
        } else {
            Outcome::Open
        };
        let image = plan.spec.worker_image.as_deref();
        let step = Step {
            image: image.map(|image| self.shared(image)),
            outcome,
        };
        let steps = self.plans.entry(Arc::clone(owner)).or_default();
        let before = steps.get(&plan.spec.generation);
        let is_news = before.is_some_and(|before| *before != step);
        steps.insert(plan.spec.generation, step);
        is_news
    }

    /// Forgets a plan. Returns whether another's turn may have come.
    pub(crate) fn remove(&mut self, owner: &str, generation: u64) -> bool {
        let Some(steps) = self.plans.get_mut(owner) else {
            return false;
        };
        let is_newest = steps.keys().next_back() == Some(&generation);
        steps.remove(&generation);
        if steps.is_empty() {
            self.plans.remove(owner);
        }
        is_newest
    }

    /// The owner whose change to `image` is under way, or has failed; `but` does not count.
    pub(crate) fn on_the_way_to(&self, image: &str, but: &str) -> Option<(&Arc<str>, Outcome)> {
        let ways = self.plans.iter().filter_map(|(owner, steps)| {
            let (generation, newest) = steps.last_key_value()?;
            let mut before = steps.range(..generation).map(|(_, step)| step);
            let had_other = |step: &Step| {
                let other = step.image.as_deref();
                step.outcome == Outcome::Served && other.is_some_and(|other| other != image)
            };
            let is_way = &**owner != but
                && newest.image.as_deref() == Some(image)
                && newest.outcome != Outcome::Served
                && before.any(had_other);
            is_way.then_some((owner, newest.outcome))
        });
        // A failure is the better reason; of several, the same each time.
        ways.min_by_key(|(owner, outcome)| (*outcome != Outcome::Failed, Arc::clone(owner)))
    }

    /// The image of the owner's newest plan.
    pub(crate) fn newest_image(&self, owner: &str) -> Option<&str> {
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

#[cfg(test)]
mod tests {
    use super::super::build::samples;
    use super::super::names::{NOTE_OUTCOME, OUTCOME_FAILED, OUTCOME_SERVING};
    use super::*;

    fn plan(generation: u64, image: &str, outcome: &str) -> InferencePlan {
        let mut spec = samples::plan();
        spec.generation = generation;
        spec.worker_image = Some(image.to_owned());
        let mut plan = InferencePlan::new(&format!("demo-{generation}"), spec);
        let notes = plan.metadata.annotations.get_or_insert_default();
        notes.insert(NOTE_OUTCOME.to_owned(), outcome.to_owned());
        plan
    }

    #[test]
    fn a_way_is_one_from_an_image_that_served() {
        let mut turns = Turns::default();
        let (one, two): (Arc<str>, Arc<str>) = ("one".into(), "two".into());
        let under_way = |turns: &Turns| {
            turns
                .on_the_way_to("x:2", "two")
                .map(|(_, outcome)| outcome)
        };
        turns.put(&one, &plan(1, "x:1", OUTCOME_SERVING));
        turns.put(&two, &plan(1, "x:1", OUTCOME_SERVING));
        assert_eq!(under_way(&turns), None);
        assert!(!turns.put(&one, &plan(2, "x:2", "")));
        assert_eq!(under_way(&turns), Some(Outcome::Open));
        assert_eq!(turns.on_the_way_to("x:2", "one"), None, "its own way");
        assert!(turns.put(&one, &plan(2, "x:2", OUTCOME_FAILED)));
        assert_eq!(under_way(&turns), Some(Outcome::Failed));
        assert_eq!(turns.on_the_way_to("x:3", "two"), None, "another image");
        assert!(turns.put(&one, &plan(2, "x:2", OUTCOME_SERVING)));
        assert_eq!(under_way(&turns), None);
        assert_eq!(turns.newest_image("one"), Some("x:2"));
        // A first plan holds nobody up, and neither does one that is gone.
        let three: Arc<str> = "three".into();
        turns.put(&three, &plan(1, "x:2", ""));
        assert_eq!(under_way(&turns), None);
        turns.put(&one, &plan(3, "x:1", OUTCOME_SERVING));
        turns.put(&one, &plan(4, "x:2", ""));
        assert_eq!(under_way(&turns), Some(Outcome::Open));
        assert!(turns.remove("one", 4));
        assert_eq!(under_way(&turns), None);
    }
}
