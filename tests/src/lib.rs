//! What the multi-process tests share: the programs, a running `hearth up`, and a plain HTTP client of its endpoint.

#![forbid(unsafe_code)]

mod chat;
mod programs;
mod up;

pub use chat::{Answer, chat_body, chat_stream};
pub use programs::{hearth, root, run, worker};
pub use up::{Up, UpOptions};
