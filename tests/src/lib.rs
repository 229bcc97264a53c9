//! Shared code of the multi-process tests: the programs, a running `hearth up`, a Kubernetes cluster, an operator with
//! a fault-injecting proxy, an emulated machine, and a simple HTTP client.

#![forbid(unsafe_code)]

mod certificates;
mod cgroup;
mod chat;
pub mod cluster;
mod deployment;
mod metrics;
pub mod operator;
mod otlp;
mod ports;
mod probe;
mod processes;
mod programs;
mod queries;
mod ranks;
mod ring;
mod tensors;
mod up;
mod vm;

pub use certificates::write_certificates;
pub use cgroup::Cgroup;
pub use chat::{Answer, chat_body, chat_stream};
pub use deployment::{copy_of_demo, deployment};
pub use metrics::Metrics;
pub use otlp::{OtlpReceiver, ReceivedSpan};
pub use ports::free_port;
pub use probe::probe;
pub use processes::{cpu_time, has_ended};
pub use programs::{
    elf_header, hearth, python, release_tool, root, run, skipped, worker, write_fault,
};
pub use queries::{DASHBOARD, RULES, queried_metrics};
pub use ranks::{Rank, Ranks};
pub use ring::{RING_MEMBERS, RingMember};
pub use tensors::{Tensor, Tensors, edit_header};
pub use up::{Up, UpOptions};
pub use vm::Vm;
