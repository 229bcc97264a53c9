//! The group that a rank belongs to now, of those that are formed one after the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_model::ModelError;

use crate::{Formed, Former, Group, GroupError};

const NOT_FORMED: &str = "the group has not formed yet";

/// Groups that the head forms, each of them an epoch.
pub(crate) struct Epochs {
    former: Box<dyn Former>,
    formed: Mutex<Option<Formed>>,
    /// Numerics that the members of the first group must have; `None`: any.
    expected: Mutex<Option<Vec<String>>>,
}

impl Epochs {
    /// Groups of `former`, of which none is formed yet.
    pub(crate) fn new(former: Box<dyn Former>) -> Self {
        Self {
            former,
            formed: Mutex::default(),
            expected: Mutex::default(),
        }
    }

    /// Forms no first group of members with other numerics than these.
    pub(crate) fn expect(&self, numerics: Vec<String>) {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        *expected = Some(numerics);
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

    /// Numerics of the other members.
    pub(crate) fn numerics(&self) -> Vec<String> {
        let formed = self.lock();
        formed
            .as_ref()
            .map_or_else(Vec::new, |f| f.numerics.clone())
    }

    /// Why no pass succeeds now.
    pub(crate) fn lost(&self) -> Option<String> {
        match &*self.lock() {
            Some(formed) => formed.group.lost().map(|error| error.to_string()),
            None => Some(NOT_FORMED.to_owned()),
        }
    }

    /// Waits up to `patience` for the next group, and returns whether it has formed.
    pub(crate) fn rejoin(&self, patience: Duration) -> Result<bool, ModelError> {
        let Some(now) = self.former.form(patience).map_err(model_error)? else {
            return Ok(false);
        };
        let mut formed = self.lock();
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let before = formed.as_ref().map(|before| &before.numerics);
        let before = before.or(expected.as_ref());
        if let Some(before) = before.filter(|before| **before != now.numerics) {
            let differs = |(now, before): (&String, &String)| now != before;
            let rank = now.numerics.iter().zip(before).position(differs);
            let why = format!(
                "the members compute with {:?}, and {before:?} is needed: answers would go on with other tokens",
                now.numerics
            );
            // Its members are free for the next one.
            now.group.lose(rank.unwrap_or(0) + 1, &why);
            return Err(ModelError::Group { why });
        }
        *formed = Some(now);
        Ok(true)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Formed>> {
        // It is replaced as a whole.
        self.formed.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
