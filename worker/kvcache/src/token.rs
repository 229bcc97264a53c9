//! A token as the cache knows it: which one it is, and what computes its keys and values.

/// What computes keys and values: device, kernels, form of attention and stored types, as a number that the caller
/// gives out. Equal numbers stand for equal bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Provenance(pub u32);

impl Provenance {
    /// The worker whose cache this is.
    pub const OWN: Self = Self(0);
}

/// A token of a sequence with the provenance of its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvToken {
    /// The token.
    pub id: u32,
    /// What computes its keys and values.
    pub provenance: Provenance,
}

impl KvToken {
    /// A token that the worker itself computes.
    pub const fn own(id: u32) -> Self {
        Self {
            id,
            provenance: Provenance::OWN,
        }
    }
}
