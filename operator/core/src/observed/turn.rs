//! Turns of deployments to change to another worker image.

use crate::key::Key;

/// Whether a deployment may begin to change to the operator's worker image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// It may.
    #[default]
    Free,
    /// It may once that deployment is ready with it.
    After(Key),
    /// That deployment did not become ready with it: no other one begins.
    HeldBack(Key),
}
