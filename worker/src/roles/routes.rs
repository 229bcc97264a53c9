//! The file that lists the workers for a running gateway.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use hearth_crds::{PlanRole, Route, Routes, read_versioned};
use hearth_server::router::{Role, WorkerPool, WorkerRoute};

/// Time between two reads of the file. It is a link that is swapped, on a file system that may not report changes. Requests wait for
/// the first worker that it names.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Makes the workers listed in the file the members of `pool`, and updates them whenever the list changes. A file that
/// is empty or does not exist yet lists none; one that cannot be parsed changes nothing, and is reported once.
pub(super) async fn follow(path: PathBuf, pool: Arc<WorkerPool>) -> Infallible {
    let mut follower = Follower::default();
    loop {
        let text = tokio::fs::read(&path).await;
        match follower.look(text) {
            Ok(Some(members)) => match pool.set_members(&members) {
                Ok(()) => tracing::info!(workers = members.len(), "routes reloaded"),
                Err(error) => complain(&path, &error.into()),
            },
            Ok(None) => {}
            Err(error) => complain(&path, &error),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn complain(path: &Path, error: &anyhow::Error) {
    tracing::warn!(routes = %path.display(), error = format!("{error:#}"), "keeping the previous routes");
}

/// State of following the file.
#[derive(Default)]
struct Follower {
    last: Option<Vec<u8>>,
    /// Whether the file was empty at the last read: possibly only for a moment, while it is being written.
    was_empty: bool,
    has_complained: bool,
}

impl Follower {
    /// Returns the members, if the file lists other ones than before.
    ///
    /// # Errors
    /// The problem with the file, the first time it occurs.
    fn look(&mut self, text: std::io::Result<Vec<u8>>) -> anyhow::Result<Option<Vec<WorkerRoute>>> {
        let text = match text {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound && self.last.is_none() => {
                return Ok(None);
            }
            Err(_) if self.has_complained => return Ok(None),
            Err(error) => {
                self.has_complained = true;
                return Err(error.into());
            }
        };
        self.has_complained = false;
        let was_empty = std::mem::replace(&mut self.was_empty, text.is_empty());
        let is_settled = !text.is_empty() || was_empty;
        if !is_settled || self.last.as_ref() == Some(&text) {
            return Ok(None);
        }
        let members = parse(&text);
        self.last = Some(text);
        members.map(Some)
    }
}

fn parse(text: &[u8]) -> anyhow::Result<Vec<WorkerRoute>> {
    if text.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    let Routes {
        workers,
        min_version: _,
    } = read_versioned(text)?;
    workers.into_iter().map(worker).collect()
}

fn worker(route: Route) -> anyhow::Result<WorkerRoute> {
    let Route {
        name,
        role,
        endpoint,
    } = route;
    let role = match role {
        PlanRole::Prefill => Role::Prefill,
        PlanRole::Decode => Role::Decode,
        PlanRole::Gateway | PlanRole::Stage => bail!(
            "{name} is a {}: only Prefill and Decode workers are routed to",
            role.as_str()
        ),
    };
    let endpoint = endpoint.parse().with_context(|| name.clone())?;
    Ok(WorkerRoute {
        name,
        role,
        endpoint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &[u8] = br#"{"workers":[{"name":"decode-0","role":"Decode","endpoint":"10.0.0.1:9400","since":3}]}"#;

    fn names(members: Option<Vec<WorkerRoute>>) -> Option<Vec<String>> {
        members.map(|members| members.into_iter().map(|member| member.name).collect())
    }

    #[test]
    fn a_file_that_is_not_there_yet_or_empty_names_no_worker() {
        let mut follower = Follower::default();
        let missing = || Err(ErrorKind::NotFound.into());
        assert_eq!(follower.look(missing()).unwrap(), None);
        assert_eq!(follower.look(Ok(Vec::new())).unwrap(), None);
        assert_eq!(follower.look(Ok(Vec::new())).unwrap(), Some(Vec::new()));
        let one = follower.look(Ok(ONE.to_vec())).unwrap();
        assert_eq!(names(one), Some(vec!["decode-0".to_owned()]));
        assert_eq!(follower.look(Ok(ONE.to_vec())).unwrap(), None);
        // A file that disappears changes nothing, and is reported once.
        assert!(follower.look(missing()).is_err());
        assert_eq!(follower.look(missing()).unwrap(), None);
        assert_eq!(follower.look(Ok(ONE.to_vec())).unwrap(), None);
    }

    #[test]
    fn a_file_that_is_being_written_empties_no_pool() {
        let mut follower = Follower::default();
        assert!(follower.look(Ok(ONE.to_vec())).unwrap().is_some());
        assert_eq!(follower.look(Ok(Vec::new())).unwrap(), None);
        assert_eq!(follower.look(Ok(ONE.to_vec())).unwrap(), None);
        assert_eq!(follower.look(Ok(Vec::new())).unwrap(), None);
        assert_eq!(follower.look(Ok(Vec::new())).unwrap(), Some(Vec::new()));
    }

    #[test]
    fn nonsense_is_told_once() {
        for (text, words) in [
            ("{\"workers\":[", "EOF"),
            ("{}", "missing field `workers`"),
            (r#"{"minVersion":9,"workers":[]}"#, "minVersion is 9"),
            (
                r#"{"workers":[{"name":"x","role":"Router","endpoint":"a:1"}]}"#,
                "Router",
            ),
            (
                r#"{"workers":[{"name":"gateway-0","role":"Gateway","endpoint":"a:1"}]}"#,
                "gateway-0 is a gateway",
            ),
            (
                r#"{"workers":[{"name":"decode-0","role":"Decode","endpoint":"10.0.0.1"}]}"#,
                "write a port",
            ),
        ] {
            let mut follower = Follower::default();
            let error = follower.look(Ok(text.into())).unwrap_err();
            assert!(format!("{error:#}").contains(words), "{text}: {error:#}");
            assert_eq!(follower.look(Ok(text.into())).unwrap(), None);
            assert!(follower.look(Ok(ONE.to_vec())).unwrap().is_some());
        }
    }
}
