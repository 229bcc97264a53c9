//! Values that are kept by the thousand and read seldom.

use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value as its JSON: one piece of memory, and about half of what the value takes with all its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed<T> {
    json: Box<str>,
    of: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Packed<T> {
    /// Packs a value.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    pub(crate) fn new(value: &T) -> serde_json::Result<Self> {
        Ok(Self {
            json: serde_json::to_string(value)?.into(),
            of: PhantomData,
        })
    }

    /// The value.
    ///
    /// # Errors
    /// When what was written cannot be read.
    pub(crate) fn get(&self) -> serde_json::Result<T> {
        serde_json::from_str(&self.json)
    }

    /// Whether a word stands somewhere in it: many need not be unpacked to know that it does not.
    pub(crate) fn mentions(&self, word: &str) -> bool {
        self.json.contains(word)
    }
}
