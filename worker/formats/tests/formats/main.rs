//! The formats as seen from outside: files in, typed views or messages out.

// In a test, a panic is the message.
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
