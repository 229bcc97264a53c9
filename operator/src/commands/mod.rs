//! Commands that show what runs, and why.

pub(crate) mod chat;
pub(crate) mod logs;
pub(crate) mod plan;
pub(crate) mod probe;
pub(crate) mod status;
