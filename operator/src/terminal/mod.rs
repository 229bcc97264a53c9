//! User-facing output: messages, progress, tables.

pub(crate) mod table;
pub(crate) mod ui;
