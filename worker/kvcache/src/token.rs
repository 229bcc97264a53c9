//! A token as the cache sees it: its id, and what computes its keys and values.

/// Identifies what computes keys and values: device, kernels, form of attention and stored types. The caller
/// assigns the numbers; equal numbers mean bitwise equal values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Provenance(pub u32);

impl Provenance {
    /// The worker that owns this cache.
    pub const OWN: Self = Self(0);
}

/// A token of a sequence with the provenance of its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvToken {
    /// The token id.
    pub id: u32,
    /// Origin of its keys and values.
    pub provenance: Provenance,
}

impl KvToken {
    /// Creates a token that the worker itself computes.
    pub const fn own(id: u32) -> Self {
        Self {
            id,
            provenance: Provenance::OWN,
        }
    }
}
