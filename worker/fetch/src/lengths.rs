//! Lengths of the files of a list, asked of their servers before the first one is fetched. Progress alone relies on them: a server may
//! say anything, or nothing.

use std::path::PathBuf;
use std::sync::Arc;

use futures::{StreamExt, stream};
use tokio::time::timeout;

use crate::address_policy::Guard;
use crate::connection::Clients;
use crate::line::Line;
use crate::place::Remote;
use crate::progress::Reporter;
use crate::room::Room;

/// Maximum number of files that are asked for at the same time.
const CONCURRENCY: usize = 8;

/// Returns the length in bytes of each file, given with the path that it has once it is complete; `None` unless all are told within the
/// time of one connection. Where addresses are limited, public servers alone are asked, and directly: a sum would tell what others
/// have, and the time that it takes whether they are there.
pub(crate) async fn ask(
    files: &[(Remote, PathBuf)],
    room: &Arc<Room>,
    reporter: &Arc<Reporter>,
) -> Option<Vec<u64>> {
    let options = &room.options;
    let is_limited = options.address_policy.is_limited();
    let goes_through = |remote: &Remote| options.egress.proxy_of(&remote.place.url).is_some();
    if is_limited && files.iter().any(|(remote, _)| goes_through(remote)) {
        return None;
    }
    let guard = Guard::of_public(&options.address_policy);
    let clients = Clients::new(&files.first()?.0.place, options, &guard).ok()?;
    let length = async |(remote, path): &(Remote, PathBuf)| match tokio::fs::metadata(path).await {
        Ok(there) => Some(there.len()),
        Err(_) => {
            let line = Line {
                place: &remote.place,
                options,
                reporter,
                guard: &guard,
                clients: &clients,
            };
            line.announced_bytes().await
        }
    };
    let mut answers = stream::iter(files).map(length).buffered(CONCURRENCY);
    let all = async {
        let mut lengths = Vec::with_capacity(files.len());
        while let Some(told) = answers.next().await {
            lengths.push(told?);
        }
        Some(lengths)
    };
    timeout(options.connect_timeout, all).await.ok()?
}
