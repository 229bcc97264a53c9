//! The operator's view of the cluster: the client, watches, caches, and objects reduced to the fields that are read.

pub(crate) mod api;
pub(crate) mod cache;
pub(crate) mod client;
pub(crate) mod dereference;
pub(crate) mod devices;
pub(crate) mod digest;
pub(crate) mod failure;
mod gateways;
pub(crate) mod lean;
mod packed;
pub(crate) mod queue;
mod room;
mod scalers;
mod sharing;
pub(crate) mod snapshot;
pub(crate) mod table;
pub(crate) mod watches;
