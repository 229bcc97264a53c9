//! The API server's audit log of writes.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use serde::Deserialize;

/// Records each completed write with its user and object, but no reads.
pub(super) const POLICY: &str = r#"{
  "apiVersion": "audit.k8s.io/v1",
  "kind": "Policy",
  "omitStages": ["RequestReceived", "ResponseStarted", "Panic"],
  "rules": [
    {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
    {"level": "None"}
  ]
}"#;

/// One completed write.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AuditEntry {
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// `system:serviceaccount:NAMESPACE:NAME`, `system:node:node-1` …
    pub user: String,
    /// The client's user agent.
    pub user_agent: String,
    /// Empty for the core group.
    pub group: String,
    /// Plural name: `pods`.
    pub resource: String,
    /// `status`, `scale`, `eviction` …; empty for the object itself.
    pub subresource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    /// Empty if the server chose it, or for a collection.
    pub name: String,
    /// HTTP status of the response.
    pub code: u16,
    /// Time at which the response was complete, as RFC 3339 with microseconds: entries sort by it.
    pub at: String,
    /// Request URI with its parameters (`?fieldManager=hearth&force=true`).
    pub uri: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    verb: String,
    user: User,
    #[serde(default)]
    user_agent: String,
    #[serde(rename = "requestURI")]
    request_uri: String,
    #[serde(default)]
    object_ref: ObjectRef,
    #[serde(default)]
    response_status: ResponseStatus,
    stage_timestamp: String,
}

#[derive(Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Default, Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

/// Returns the entries of a log from byte `offset`, which is advanced past the last complete line.
pub(super) fn read(log: &Path, offset: &mut u64) -> std::io::Result<Vec<AuditEntry>> {
    let mut file = File::open(log)?;
    file.seek(SeekFrom::Start(*offset))?;
    let mut new = Vec::new();
    file.read_to_end(&mut new)?;
    new.truncate(
        new.iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |end| end + 1),
    );
    *offset += new.len() as u64;
    Ok(parse(&String::from_utf8_lossy(&new)))
}

/// Parses the entries of a log, ignoring a last line that is still being written.
fn parse(log: &str) -> Vec<AuditEntry> {
    log.lines()
        .filter_map(|line| serde_json::from_str::<Event>(line).ok())
        .map(|event| AuditEntry {
            verb: event.verb,
            user: event.user.username,
            user_agent: event.user_agent,
            group: event.object_ref.api_group,
            resource: event.object_ref.resource,
            subresource: event.object_ref.subresource,
            namespace: event.object_ref.namespace,
            name: event.object_ref.name,
            code: event.response_status.code,
            at: event.stage_timestamp,
            uri: event.request_uri,
        })
        .collect()
}
