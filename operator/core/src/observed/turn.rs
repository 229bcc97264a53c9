//! Whose turn it is with another worker image.

use crate::key::Key;

/// Whether a deployment may begin to change to the operator's worker image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// It may.
    #[default]
    Free,
    /// When that deployment is ready with it.
    After(Key),
    /// That deployment did not get ready with it: nobody else begins.
    HeldBack(Key),
}
