//! Models that go from node to node: this agent gives one to another agent when the operator says to whom, and takes one
//! from where the operator says. The operator knows which node may have which model; the bytes are verified by whoever
//! takes them.

use std::sync::Arc;
use std::time::Duration;

use hearth_fetch::{Cache, Counters, Giver, GiverPatience, Seed};
use hearth_transport::stream::{accept_one, connect};
use hearth_transport::v1::{SeedPlace, SeedRequest};
use hearth_transport::{Endpoint, Tls};
use tokio::sync::Semaphore;
use tonic::Status;

use super::identity::Identity;
use super::link::known;
use super::port::{Purpose, WaitingPort};
use super::request::parsed;

/// Most agents that read at a time.
const MAX_READERS: usize = 4;
/// Time for which another agent is awaited: it comes as soon as the operator has called it.
const AWAIT_PATIENCE: Duration = Duration::from_secs(5);
/// Time for a connection to another agent.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);

/// What this agent gives to others.
pub(super) struct Seeds {
    port: Arc<WaitingPort>,
    cache: Cache,
    counters: Arc<Counters>,
    places: Arc<Semaphore>,
}

impl Seeds {
    /// Gives nothing yet.
    pub(super) fn new(port: Arc<WaitingPort>, cache: Cache, counters: Arc<Counters>) -> Self {
        Self {
            port,
            cache,
            counters,
            places: Arc::new(Semaphore::new(MAX_READERS)),
        }
    }

    /// Awaits another agent and gives it one model; returns the port. Requires a tokio runtime.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a key, certificates or a port that cannot be, FAILED_PRECONDITION if the model is not here or the
    /// port is in use, RESOURCE_EXHAUSTED while as many read as may.
    pub(super) async fn give(
        &self,
        request: SeedRequest,
        identity: &Identity,
    ) -> Result<u16, Status> {
        let key = parsed(&request.key)?;
        let (peer, tls) = known(request.end, identity)?;
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            return Err(Status::resource_exhausted(format!(
                "{MAX_READERS} other agents read from this node; ask again when one has ended"
            )));
        };
        let (cache, commit) = (self.cache.clone(), request.commit);
        let held = tokio::task::spawn_blocking(move || Giver::hold(&cache, &key, &commit));
        let giver = held
            .await
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(Status::failed_precondition)?;
        let counters = Arc::clone(&self.counters);
        let wait = |listener| async move {
            let mut stream = match accept_one(listener, tls, AWAIT_PATIENCE).await {
                Ok(stream) => stream,
                Err(error) => return tracing::info!("{peer} did not come for a model: {error}"),
            };
            // The port is free for the next one.
            tokio::spawn(async move {
                let _place = place;
                tracing::info!("{peer} reads a model from here");
                let patience = GiverPatience::default();
                match giver.give(&mut stream, patience, &counters).await {
                    Ok(()) => tracing::info!("{peer} has read what it wanted"),
                    Err(error) => tracing::warn!("{peer} reads no more from here: {error}"),
                }
            });
        };
        self.port.listen(request.port, Purpose::Seed, wait).await
    }

    /// Checks that no other agent reads: that takes of a link what its measurement would tell.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED if one does.
    pub(super) fn check_quiet(&self) -> Result<(), Status> {
        match self.places.available_permits() == MAX_READERS {
            true => Ok(()),
            false => Err(Status::resource_exhausted(
                "another agent reads a model from this node; ask again when it has ended",
            )),
        }
    }
}

/// Where a model may be taken from.
pub(super) struct Place {
    node: String,
    endpoint: Endpoint,
    tls: Tls,
}

impl Place {
    /// Reads what the operator says of it.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for certificates or an address that cannot be.
    pub(super) fn checked(place: SeedPlace, identity: &Identity) -> Result<Self, Status> {
        let node = place.end.as_ref().map(|end| end.peer.clone());
        let (_, tls) = known(place.end, identity)?;
        let endpoint = place.endpoint.parse();
        let endpoint = endpoint
            .map_err(|error| Status::invalid_argument(format!("seed.endpoint: {error}")))?;
        Ok(Self {
            node: node.unwrap_or_default(),
            endpoint,
            tls,
        })
    }

    /// Connects to it; `None` if it is not there, and everything comes from the hub.
    pub(super) async fn connected(self) -> Option<Seed> {
        let Self {
            node,
            endpoint,
            tls,
        } = self;
        match connect(&endpoint, &tls, CONNECT_PATIENCE).await {
            Ok(stream) => Some(Seed::new(node, stream)),
            Err(error) => {
                tracing::warn!(node, %endpoint, "no model can be taken from there, so it comes from the hub: {error}");
                None
            }
        }
    }
}
