//! Traces of a running worker: the last that the lanes of its device did, written when it is told to.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hearth_kernels::trace::Trace;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::device::DeviceOptions;
use crate::trace_file;

/// Events that are kept: some 20 MB with their names.
const KEPT_EVENTS: usize = 1 << 17;

/// What a worker has recorded, and where it is written to.
pub(super) struct Traces {
    kept: Option<(PathBuf, Arc<Trace>)>,
    rank: String,
    /// SIGUSR1, from the start on: a process without a handler ends at it.
    requests: std::io::Result<Signal>,
}

impl Traces {
    /// Lets a rank's device record if there is a directory to write to.
    pub(super) fn new(directory: Option<&Path>, rank: &str, device: &mut DeviceOptions) -> Self {
        let kept = directory.and_then(|directory| {
            let trace = device.traced_lately(KEPT_EVENTS);
            if trace.is_none() {
                tracing::warn!(
                    rank,
                    "HEARTH_TRACE_DIR has no effect here: this device records nothing, virtual ones do"
                );
            }
            Some((directory.to_owned(), trace?))
        });
        Self {
            kept,
            rank: rank.to_owned(),
            requests: signal(SignalKind::user_defined1()),
        }
    }

    /// Writes a file whenever SIGUSR1 comes; never returns.
    pub(super) async fn write_when_told(mut self, device: &str) -> Infallible {
        let requests = match &mut self.requests {
            Ok(requests) => requests,
            Err(error) => {
                tracing::warn!(%error, "SIGUSR1 cannot be handled: no trace can be asked for");
                return std::future::pending().await;
            }
        };
        let mut written = 0_u32;
        loop {
            requests.recv().await;
            let Some((directory, trace)) = &self.kept else {
                tracing::warn!("a trace was asked for: start the worker with HEARTH_TRACE_DIR");
                continue;
            };
            written += 1;
            let name = format!("{}-{}-{written}.json", self.rank, std::process::id());
            let path = directory.join(name);
            let events = trace.take();
            let saved = tokio::task::block_in_place(|| trace_file::write(&path, device, &events));
            match saved {
                Ok(()) => {
                    tracing::info!(path = %path.display(), events = events.len(), "trace written")
                }
                Err(error) => tracing::warn!(error = format!("{error:#}"), "no trace was written"),
            }
        }
    }
}
