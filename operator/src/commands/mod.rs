//! Commands other than `hearth up` and `hearth operator`: inspecting what runs, talking to it, and converting objects.

pub(crate) mod chat;
pub(crate) mod convert;
pub(crate) mod logs;
pub(crate) mod plan;
pub(crate) mod probe;
pub(crate) mod status;
pub(crate) mod trace;
