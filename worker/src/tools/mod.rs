//! Tools that work on a model without a server.

mod ahead;
mod bench;
#[cfg(feature = "cuda")]
mod cuda_compile;
mod facts;
mod fetch;
mod generate;
mod inspect;
mod lanes;
mod logits;
mod models;
mod own;
mod peers;
mod profile;
mod random;
mod rates;
mod session;
mod store;
mod virtual_device;

pub(crate) use bench::{BenchArgs, run as bench};
#[cfg(feature = "cuda")]
pub(crate) use cuda_compile::{CudaCompileArgs, run as cuda_compile};
pub(crate) use facts::{FactsArgs, run as facts};
pub(crate) use fetch::{FetchArgs, run as fetch, sentence as progress_sentence};
pub(crate) use generate::{GenerateArgs, run as generate};
pub(crate) use inspect::{InspectArgs, run as inspect};
pub(crate) use logits::{LogitsArgs, run as logits};
pub(crate) use models::{ModelsArgs, run as models};
pub(crate) use own::{OwnArgs, run as own};
pub(crate) use profile::{ProfileArgs, run as profile};
pub(crate) use random::{RandomArgs, run as random};
pub(crate) use store::StoreArgs;
pub(crate) use virtual_device::VirtualDevice;
