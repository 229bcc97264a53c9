//! Where a module's weights live and how they come to be where they are used.
//!
//! Each policy is one file and one [`hearth_model::Residency`]: a guard in, an event out.
//!
//! | policy | a module's weights | for |
//! | --- | --- | --- |
//! | [`Resident`] | all stay, from the start | models that fit |
//! | [`MmapPrefetch`] | come before use and go after it, by advice to the kernel | models larger than memory |
//!
//! **Invariant**: a policy changes when bytes are in memory, never which bytes are read: every policy gives the same bits.
//!
//! **Invariant**: while a guard is held, nothing gives its module's pages back.

mod holder;
mod mmap_prefetch;
mod pages;
mod resident;
mod store;
mod window;

pub use holder::{Held, WeightFile};
pub use mmap_prefetch::{Listener, MmapPrefetch, MmapPrefetchOptions, PrefetchEvent};
pub use resident::{LoadProgress, Placing, Resident, ResidentOptions};
