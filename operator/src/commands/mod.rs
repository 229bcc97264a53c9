//! Commands other than `hearth up` and `hearth operator`: inspecting what runs, talking to it, keeping its
//! models, and converting objects.

pub(crate) mod chat;
pub(crate) mod cluster;
pub(crate) mod convert;
pub(crate) mod logs;
pub(crate) mod models;
pub(crate) mod plan;
pub(crate) mod probe;
pub(crate) mod status;
pub(crate) mod trace;
