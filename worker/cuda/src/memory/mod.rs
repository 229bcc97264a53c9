//! Memory of the GPU and of the host beside it.

mod pinned;
mod pool;
mod regions;
mod upload;

pub(crate) use pinned::Pinned;
pub(crate) use pool::{Buffer, Memory};
pub(crate) use upload::{Pitched, Uploader};
