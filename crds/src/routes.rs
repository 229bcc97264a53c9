//! The workers behind a gateway, as a file that may change while the gateway runs.

use serde::{Deserialize, Serialize};

use crate::plan::PlanRole;

/// Workers that a gateway may send requests to. The operator writes the file; the gateway re-reads it repeatedly.
///
/// An older gateway ignores fields that it does not know: the writer may be newer than the reader. Routes that cannot
/// be followed without them set `min_version`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Routes {
    /// Lowest version of routes that a reader must know to follow these; 0: any.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub min_version: u32,
    /// One entry per worker.
    pub workers: Vec<Route>,
}

/// One worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Route {
    /// Its rank, such as `decode-0`.
    pub name: String,
    /// Prefill or decode.
    pub role: PlanRole,
    /// `host:port`; an IPv6 address in brackets.
    pub endpoint: String,
}

fn is_zero(version: &u32) -> bool {
    *version == 0
}
