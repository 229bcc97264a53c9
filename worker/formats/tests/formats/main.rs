//! The formats through the public API: files in, typed views or errors out.

// In a test, the panic is the message.
#![allow(clippy::unwrap_used)]

mod chat_template;
mod checkpoint;
mod config;
mod config_faults;
mod demo;
mod files;
mod generation;
mod long_files;
mod random;
mod safetensors;
mod tokenizer;
