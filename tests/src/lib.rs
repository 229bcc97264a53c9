//! What the multi-process tests share: the programs, a running `hearth up`, and a plain HTTP client of its endpoint.

#![forbid(unsafe_code)]

mod chat;
mod deployment;
mod metrics;
mod programs;
mod tensors;
mod up;

pub use chat::{Answer, chat_body, chat_stream};
pub use deployment::{copy_of_demo, deployment};
pub use metrics::Metrics;
pub use programs::{hearth, root, run, worker};
pub use tensors::{Tensor, Tensors, edit_header};
pub use up::{Up, UpOptions};
