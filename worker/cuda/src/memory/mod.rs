//! Device memory, and host memory used with it.

mod pinned;
mod pool;
mod regions;
mod upload;
mod ways;

pub(crate) use pinned::Pinned;
pub(crate) use pool::{Buffer, Memory};
pub(crate) use regions::RegisteredFiles;
pub(crate) use upload::{Pitched, Ring, Source, Uploader};
pub use ways::CopyWays;
