//! The group that a rank belongs to now, of those that are formed one after the other.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use hearth_model::{ExpertParallel, ModelError};

use crate::{Formed, Former, Group, GroupError, Wanted};

const NOT_FORMED: &str = "the group has not formed yet";

/// Groups that the head forms, each of them an epoch.
pub(crate) struct Epochs {
    former: Box<dyn Former>,
    formed: Mutex<Option<Formed>>,
    /// Numerics that the members but the head must have, by place: those of the first group; `None` before it: any.
    expected: Mutex<Option<Vec<String>>>,
    /// Set where groups of some members do what that of all does: how experts run.
    shrinks: OnceLock<ExpertParallel>,
}

impl Epochs {
    /// Groups of `former`, of which none is formed yet.
    pub(crate) fn new(former: Box<dyn Former>) -> Self {
        Self {
            former,
            formed: Mutex::default(),
            expected: Mutex::default(),
            shrinks: OnceLock::new(),
        }
    }

    /// Forms no first group of members with other numerics than these.
    pub(crate) fn expect(&self, numerics: Vec<String>) {
        *self.expected() = Some(numerics);
    }

    /// Forms groups of fewer members, too, from now on: of as many as keep the bits where experts run in this way.
    pub(crate) fn may_shrink(&self, experts: ExpertParallel) {
        // Said once, by the head.
        let _ = self.shrinks.set(experts);
    }

    /// The group that was formed last.
    pub(crate) fn group(&self) -> Result<Arc<dyn Group>, ModelError> {
        let formed = self.lock();
        let group = formed.as_ref().map(|formed| Arc::clone(&formed.group));
        group.ok_or_else(|| ModelError::Group {
            why: NOT_FORMED.to_owned(),
        })
    }

    /// Drops messages of passes before this one.
    pub(crate) fn forget(&self, before_pass: u64) {
        if let Some(formed) = &*self.lock() {
            formed.group.forget(before_pass);
        }
    }

    /// Numerics of the other members, whether or not they are together now.
    pub(crate) fn numerics(&self) -> Vec<String> {
        self.expected().clone().unwrap_or_default()
    }

    /// How many ranks are together and who is missing, where these are not all.
    pub(crate) fn short(&self) -> Option<String> {
        self.lock().as_ref()?.short.clone()
    }

    /// Why no pass succeeds now.
    pub(crate) fn lost(&self) -> Option<String> {
        match &*self.lock() {
            Some(formed) => formed.group.lost().map(|error| error.to_string()),
            None => Some(NOT_FORMED.to_owned()),
        }
    }

    /// Waits up to `patience` for the next group, and returns whether it has formed.
    ///
    /// # Errors
    /// [`ModelError::Unlike`] at once if all members came, and one computes otherwise than before; [`ModelError::Group`] if one does not
    /// fit.
    pub(crate) fn rejoin(&self, patience: Duration) -> Result<bool, ModelError> {
        let expected = self.expected().clone();
        let shrinks = self.shrinks.get();
        let wanted = Wanted {
            fits: &|ranks| shrinks.is_some_and(|experts| experts.keeps_bits(ranks)),
            numerics: expected.as_deref(),
        };
        let formed = self.former.form(patience, &wanted);
        let Some(now) = formed.map_err(model_error)? else {
            return Ok(false);
        };
        match &expected {
            Some(expected) => as_expected(&now, expected)?,
            None => *self.expected() = Some(now.numerics.clone()),
        }
        *self.lock() = Some(now);
        Ok(true)
    }

    fn expected(&self) -> MutexGuard<'_, Option<Vec<String>>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Formed>> {
        // It is replaced as a whole.
        self.formed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks the numerics of a new group's members; its other members are free for the next one if one has others than expected.
fn as_expected(now: &Formed, expected: &[String]) -> Result<(), ModelError> {
    let others = now.places.iter().enumerate().skip(1);
    for ((rank, place), numerics) in others.zip(&now.numerics) {
        let needed = expected.get(place.saturating_sub(1));
        if needed == Some(numerics) {
            continue;
        }
        let why = format!(
            "{} computes with {numerics}, and {} is needed: answers would go on with other tokens",
            now.group.name(rank),
            needed.map_or("", String::as_str)
        );
        now.group.lose(rank, &why);
        return Err(ModelError::Unlike { why });
    }
    Ok(())
}

/// A group's error as a model's.
pub(crate) fn model_error(error: GroupError) -> ModelError {
    let why = error.to_string();
    match error {
        GroupError::Fault { .. } => ModelError::Member { why },
        GroupError::Lost { .. } | GroupError::Unfit { .. } | GroupError::Left => {
            ModelError::Group { why }
        }
    }
}
