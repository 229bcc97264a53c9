//! Logical KV blocks: ownership and contents of each block of the paged cache.
//!
//! Nothing here touches device memory. A [`KvCache`] hands out [`BlockId`]s; the engine passes them to
//! the backend, which owns the bytes. A block's type tracks its life cycle:
//!
//! ```text
//!            allocate          begin            complete            register
//!   (free) ───────────▶ Reset ───────▶ Partial ──────────▶ Complete ──────────▶ Registered
//!      ▲                  │               │                   │                     │
//!      └──────────────────┴──── release ──┴───────────────────┘      last release   ▼
//!      ▲                                                                     cached (evictable)
//!      └───────────────────────────────── eviction, least recently used first ──────┘
//! ```
//!
//! **Invariants**
//! - Only `Reset` and `Partial` blocks can take tokens, and neither can be cloned: no sequence ever writes
//!   into a block that another one reads.
//! - A prefix is reused only if its tokens are equal, one by one: their ids, and what computed their keys and
//!   values ([`Provenance`]). The hash only finds candidates.
//! - Blocks are neither lost nor handed out twice: free + used + cached = total, after every operation.
//! - No clock and no random number: the same calls give the same blocks.

#![forbid(unsafe_code)]

mod block;
mod cache;
mod error;
mod pool;
mod sequence;
mod token;

pub use block::{Block, BlockState, Complete, Partial, Registered, Reset};
pub use cache::KvCache;
pub use error::{KvCacheError, OutOfBlocks, RegisterError};
pub use hearth_kernels::BlockId;
pub use pool::{BlockPool, CacheStats, PrefixHash};
pub use sequence::SequenceBlocks;
pub use token::{KvToken, Provenance};
