//! The axis of residency: where a module's weights live and how they come to be where they are used.

use std::ops::Deref;
use std::sync::Arc;

use hearth_kernels::Backend;

use crate::{ModuleId, ModuleWeights, ResidencyError};

/// A policy that hands out modules when they are ready on the device: a guard in, an event out.
///
/// The guard holds the module where it is; its drop tells the policy that the module may go. The pair is the ON/OFF tuple of
/// stream-loading prefill, prima.cpp's WILLNEED, LIME's slot and MNN's flash read alike.
pub trait Residency<B: Backend>: Send + Sync {
    /// Waits until a module is ready, and holds it until the guard is dropped.
    ///
    /// # Errors
    /// [`ResidencyError::Unknown`] for a module that the policy was not opened with, and what brings the module in.
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError>;

    /// Says which modules will be acquired next, in this order: the experts that a router has just chosen.
    fn announce(&self, _upcoming: &[ModuleId]) {}

    /// How many of these modules, from the first, may be held at once; at least 1.
    fn group(&self, upcoming: &[ModuleId]) -> usize {
        upcoming.len().max(1)
    }

    /// All routed experts of a layer, where they stay on the device and it can choose among them by itself. `choices`: how
    /// many the router makes (tokens × experts of a token), for the counters.
    fn expert_bank(&self, _layer: u32, _choices: usize) -> Option<Arc<B::ExpertBank>> {
        None
    }

    /// What the policy has done so far.
    fn stats(&self) -> ResidencyStats;
}

/// Learns that a module is no longer in use.
pub trait Release: Send + Sync {
    /// One guard of the module was dropped.
    fn released(&self, id: ModuleId);
}

/// A module's weights, held where they are used until this is dropped.
pub struct Guard<B: Backend> {
    weights: Arc<ModuleWeights<B>>,
    release: Option<Arc<dyn Release>>,
}

impl<B: Backend> Guard<B> {
    /// A guard whose drop calls `release`, if there is one.
    pub fn new(weights: Arc<ModuleWeights<B>>, release: Option<Arc<dyn Release>>) -> Self {
        Self { weights, release }
    }
}

impl<B: Backend> Deref for Guard<B> {
    type Target = ModuleWeights<B>;

    fn deref(&self) -> &ModuleWeights<B> {
        &self.weights
    }
}

impl<B: Backend> Drop for Guard<B> {
    fn drop(&mut self) {
        if let Some(release) = &self.release {
            release.released(self.weights.id());
        }
    }
}

/// Counters of a residency policy since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResidencyStats {
    /// Bytes of all modules, as stored.
    pub total_bytes: u64,
    /// Bytes of the modules that the policy holds resident now.
    pub resident_bytes: u64,
    /// Guards handed out.
    pub acquired: u64,
    /// Bytes of weights that computation has read: each acquired module counts whole, the embedding (of which a token
    /// reads one row) not at all.
    pub read_bytes: u64,
    /// Bytes that were asked for ahead of use.
    pub prefetched_bytes: u64,
    /// Bytes that were given back after use.
    pub released_bytes: u64,
}
