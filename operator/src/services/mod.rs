//! Services that run besides the reconciles: certificates, agents, measurements, the Lease.

pub(crate) mod agents;
pub(crate) mod authority;
pub(crate) mod cluster_cache;
pub(crate) mod demand;
pub(crate) mod health;
pub(crate) mod lease;
pub(crate) mod measure;
mod rooms;
mod scrape;
pub(crate) mod watch;
