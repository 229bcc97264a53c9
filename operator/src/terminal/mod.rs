//! What people see: messages, progress, tables.

pub(crate) mod table;
pub(crate) mod ui;
