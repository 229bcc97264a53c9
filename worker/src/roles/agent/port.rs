//! The port on which agents of other nodes are awaited, one after the other: to measure a link, or to read a model.
//! Nothing listens on it otherwise.

use std::time::Duration;

use hearth_transport::Listener;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

/// Time for which one that is to be awaited waits for the one before: less than the operator waits for a call.
const TURN_PATIENCE: Duration = Duration::from_secs(6);

/// What another agent is awaited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The measurement of a link; a later one takes the place of one that nobody came for.
    Link,
    /// A model; each is waited for.
    Seed,
}

/// The port, and who is awaited on it now.
pub(super) struct WaitingPort {
    /// The host that this agent listens on.
    host: String,
    awaiting: Mutex<Option<(Purpose, JoinHandle<()>)>>,
}

impl WaitingPort {
    /// Creates the port of an agent that listens on this address (`host:port`).
    pub(super) fn new(listen: &str) -> Self {
        let host = listen.rsplit_once(':').map_or(listen, |(host, _)| host);
        Self {
            host: host.to_owned(),
            awaiting: Mutex::default(),
        }
    }

    /// Listens on the port (0: any) as long as `wait` takes, and returns it. Requires a tokio runtime.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a port that cannot be, FAILED_PRECONDITION if it is in use by another process,
    /// RESOURCE_EXHAUSTED if another agent is awaited for too long.
    pub(super) async fn listen<W>(
        &self,
        port: u32,
        purpose: Purpose,
        wait: impl FnOnce(Listener) -> W,
    ) -> Result<u16, Status>
    where
        W: Future<Output = ()> + Send + 'static,
    {
        let port = u16::try_from(port).map_err(|_| {
            Status::invalid_argument(format!("port is {port}: write one up to 65535"))
        })?;
        let busy =
            || Status::resource_exhausted("another agent is awaited; ask again in some seconds");
        let deadline = Instant::now() + TURN_PATIENCE;
        let turn = timeout_at(deadline, self.awaiting.lock()).await;
        let mut awaiting = turn.map_err(|_| busy())?;
        if let Some((before, task)) = &mut *awaiting {
            if (*before, purpose) == (Purpose::Link, Purpose::Link) {
                task.abort();
            }
            // Its port is free once it has ended.
            let _ = timeout_at(deadline, task).await.map_err(|_| busy())?;
        }
        *awaiting = None;
        let listener = Listener::bind(&format!("{}:{port}", self.host))
            .map_err(|error| Status::failed_precondition(error.to_string()))?;
        let port = listener.address().port();
        *awaiting = Some((purpose, tokio::spawn(wait(listener))));
        Ok(port)
    }
}
