//! Other deployments on the same nodes, as far as workers end so that others can start.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::Holding;
use crate::key::Key;

/// A deployment whose workers may end for others, or are ending.
#[derive(Clone, Debug, PartialEq)]
pub struct Neighbour {
    /// The deployment.
    pub key: Key,
    /// Its priority.
    pub priority: i32,
    /// Whether its workers end for a higher priority only.
    pub keeps: bool,
    /// Seconds for which it has had no request; `None` if nobody knows.
    pub idle_s: Option<f64>,
    /// Since when its workers run that were started without a request; `None` for all others.
    pub preloaded_since: Option<Timestamp>,
    /// Whether its workers are ending already.
    pub is_leaving: bool,
    /// Whether its workers are starting for somebody: they do not end before they are ready.
    pub is_starting: bool,
    /// What it holds, by node.
    pub holding: BTreeMap<String, Holding>,
}

/// A deployment that finds no room unless others end their workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asker {
    /// The deployment.
    pub key: Key,
    /// Its priority.
    pub priority: i32,
    /// Since when it has asked.
    pub since: Timestamp,
}
