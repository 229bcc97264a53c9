//! Residency policies: storage of a module's weights, and their transfer to where they are used.
//!
//! Each policy is one file and one implementation of [`hearth_model::Residency`]: a guard per use, an event on its
//! drop.
//!
//! | policy | a module's weights | for |
//! | --- | --- | --- |
//! | [`Resident`] | all stay in memory from the start | models that fit |
//! | [`MmapPrefetch`] | loaded before use and released after it, by advice to the kernel | models larger than memory |
//! | [`DirectExperts`] | routed experts are read past the page cache into buffers, once chosen | experts larger than memory beside a device |
//! | [`StreamLoading`] | routed experts pass through a ring of slots on the device, copied while others compute; dense modules stay there, or pass through two slots of their own | MoE models larger than the device |
//! | [`HotExperts`] | those routed experts that are used most stay in slots on the device, beside a host that has all | decoding with experts on the host |
//!
//! **Invariant**: a policy changes when bytes are in memory, never which bytes are read: every policy gives the same
//! results.
//!
//! **Invariant**: while a guard is held, its module's pages are not released.

mod direct_experts;
mod heat;
mod holder;
mod host_module;
mod hot_experts;
mod kept;
mod loader;
mod meter;
mod mmap_prefetch;
mod pages;
mod preparation;
mod resident;
mod ring;
mod store;
mod stream_loading;
mod window;

pub use direct_experts::{DirectExperts, ReadRates, read_rates, reads_directly};
pub use holder::{Held, WeightFile};
pub use hot_experts::HotExperts;
pub use kept::ReadAhead;
pub use mmap_prefetch::{Listener, MmapPrefetch, MmapPrefetchOptions, PrefetchEvent};
pub use resident::{LoadProgress, Placing, Resident, ResidentOptions};
pub use store::note_unused;
pub use stream_loading::{
    DENSE_SLOTS, LEAST_RING_SLOTS, RING_GROUPS, RingLength, RingSlots, StreamEvent, StreamListener,
    StreamLoading, StreamLoadingOptions,
};
