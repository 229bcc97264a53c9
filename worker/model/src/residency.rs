//! The residency axis: storage of a module's weights, and their transfer to where they are used.

use std::ops::{Add, Deref};
use std::sync::Arc;

use hearth_kernels::Backend;

use crate::{ExpertShare, ModuleId, ModuleWeights, ResidencyError};

/// A policy that hands out guards for modules that are ready on the device.
///
/// The guard keeps the module in place; dropping it tells the policy that the module may be evicted. This pair covers
/// the ON/OFF tuple of stream-loading prefill, prima.cpp's WILLNEED, LIME's slot and MNN's flash read alike.
pub trait Residency<B: Backend>: Send + Sync {
    /// Waits until a module is ready, and holds it until the guard is dropped.
    ///
    /// # Errors
    /// [`ResidencyError::Unknown`] for a module that the policy was not opened with, and errors of loading the module.
    fn acquire(&self, id: ModuleId) -> Result<Guard<B>, ResidencyError>;

    /// Tells the policy that a pass of `rows` rows begins, from the first layer; of each layer's experts it uses none but those
    /// of `share`.
    ///
    /// # Errors
    /// [`ResidencyError::Device`] if the policy's device fails.
    fn begin_pass(&self, _rows: usize, _share: ExpertShare) -> Result<(), ResidencyError> {
        Ok(())
    }

    /// Tells the policy which experts of a layer will be acquired next, in order: those that its router has just chosen. No others
    /// of the layer are.
    fn announce(&self, _layer: u32, _upcoming: &[ModuleId]) {}

    /// Returns how many of these modules, counted from the first, may be held at once; at least 1.
    fn group(&self, upcoming: &[ModuleId]) -> usize {
        upcoming.len().max(1)
    }

    /// Returns all routed experts of a layer if they stay on the device and it can choose among them by itself.
    /// `choices` is the number of choices that the router makes (tokens × experts per token), for the counters.
    fn expert_bank(&self, _layer: u32, _choices: usize) -> Option<Arc<B::ExpertBank>> {
        None
    }

    /// Whether a pass waits here, for modules that come or for a choice of experts that the device does not make by itself.
    fn keeps_host_waiting(&self) -> bool {
        true
    }

    /// Statistics of the policy.
    fn stats(&self) -> ResidencyStats;
}

/// A cache of routed experts in the device's memory, beside a host that has all of them and computes those that are missing.
pub trait ExpertCache<B: Backend>: Residency<B> {
    /// Notes that these experts are used, and keeps those of them that are on the device there; `None` for the others.
    fn keep(&self, chosen: &[ModuleId]) -> Vec<Option<Kept>>;

    /// Begins to load as many of `missed` as end the layer soonest beside the host, which takes `host_ms` milliseconds for an
    /// expert; `None` for those that are left to it. [`Residency::acquire`] waits for one that comes.
    fn load(&self, missed: &[ModuleId], host_ms: f64) -> Vec<Option<Kept>>;
}

/// An expert that is on the device, or on its way there, and stays until this is dropped.
pub struct Kept {
    id: ModuleId,
    release: Arc<dyn Release>,
}

impl Kept {
    /// Creates a value that calls `release` when it is dropped.
    pub fn new(id: ModuleId, release: Arc<dyn Release>) -> Self {
        Self { id, release }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.release.released(self.id);
    }
}

/// Receiver of notifications that a module is no longer in use.
pub trait Release: Send + Sync {
    /// Called when one guard of the module was dropped.
    fn released(&self, id: ModuleId);
}

/// A module's weights, held in place until this is dropped.
pub struct Guard<B: Backend> {
    weights: Arc<ModuleWeights<B>>,
    release: Option<Arc<dyn Release>>,
}

impl<B: Backend> Guard<B> {
    /// Creates a guard that calls `release`, if given, when it is dropped.
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
    /// Bytes of all modules as stored.
    pub total_bytes: u64,
    /// Bytes of the modules that the policy currently holds resident.
    pub resident_bytes: u64,
    /// Number of guards handed out.
    pub acquired: u64,
    /// Bytes of weights read by computation: each acquired module counts in full, except the embedding (a token
    /// reads only one row of it), which does not count.
    pub read_bytes: u64,
    /// Bytes requested ahead of use.
    pub prefetched_bytes: u64,
    /// Bytes released after use.
    pub released_bytes: u64,
    /// What passes did whose experts came over a link.
    pub streamed: StreamedStats,
}

impl Add for ResidencyStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            total_bytes: self.total_bytes + other.total_bytes,
            resident_bytes: self.resident_bytes + other.resident_bytes,
            acquired: self.acquired + other.acquired,
            read_bytes: self.read_bytes + other.read_bytes,
            prefetched_bytes: self.prefetched_bytes + other.prefetched_bytes,
            released_bytes: self.released_bytes + other.released_bytes,
            streamed: self.streamed + other.streamed,
        }
    }
}

/// Passes whose experts came over a link, by the clock of the device. What the device has not reached yet is counted
/// later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamedStats {
    /// Passes that began.
    pub passes: u64,
    /// Rows of these.
    pub rows: u64,
    /// Bytes that crossed the link.
    pub copied_bytes: u64,
    /// Time for which the link was busy with them, ns.
    pub copy_ns: u64,
    /// Time for which computation waited for them, ns: the part of their time that nothing hides.
    pub wait_ns: u64,
    /// Time from the begins of passes to the ends of their last experts, ns.
    pub pass_ns: u64,
}

impl StreamedStats {
    /// What was done since an earlier reading. A reading in the middle of a pass counts neither it nor its rows.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            passes: self.passes.saturating_sub(before.passes),
            rows: self.rows.saturating_sub(before.rows),
            copied_bytes: self.copied_bytes.saturating_sub(before.copied_bytes),
            copy_ns: self.copy_ns.saturating_sub(before.copy_ns),
            wait_ns: self.wait_ns.saturating_sub(before.wait_ns),
            pass_ns: self.pass_ns.saturating_sub(before.pass_ns),
        }
    }
}

impl Add for StreamedStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passes: self.passes + other.passes,
            rows: self.rows + other.rows,
            copied_bytes: self.copied_bytes + other.copied_bytes,
            copy_ns: self.copy_ns + other.copy_ns,
            wait_ns: self.wait_ns + other.wait_ns,
            pass_ns: self.pass_ns + other.pass_ns,
        }
    }
}
