//! What the multi-process tests share: the programs, a running `hearth up`, a Kubernetes cluster, container images, and
//! a plain HTTP client.

#![forbid(unsafe_code)]

mod chat;
pub mod cluster;
mod deployment;
pub mod image;
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
