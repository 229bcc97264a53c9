//! Links to other nodes: this agent measures one when the operator says so, and answers one measurement when the
//! operator says whose. Nothing listens on the port between two measurements.

use std::sync::Arc;
use std::time::Duration;

use hearth_transport::v1::{AwaitLinkRequest, LinkEnd, MeasureLinkRequest, MeasureLinkResponse};
use hearth_transport::{Endpoint, Tls, TlsNames, answer_link, measure_link};
use tokio::sync::Mutex;
use tonic::Status;

use super::identity::Identity;
use super::port::{Purpose, WaitingPort};

/// Time limit for a measurement: less than the operator waits for a call.
const MEASURE_PATIENCE: Duration = Duration::from_secs(8);
/// Time for which a measurement is awaited and answered: longer than it takes, with the operator's call to the other.
const AWAIT_PATIENCE: Duration = Duration::from_secs(12);

/// Both ends of links, of which there is one each at a time.
pub(super) struct Links {
    port: Arc<WaitingPort>,
    measuring: Mutex<()>,
}

impl Links {
    /// Creates both ends for an agent that awaits others on this port.
    pub(super) fn new(port: Arc<WaitingPort>) -> Self {
        Self {
            port,
            measuring: Mutex::default(),
        }
    }

    /// Listens for one measurement, instead of for an earlier one, and returns the port. Requires a tokio runtime.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for certificates or a port that cannot be, FAILED_PRECONDITION if the port is in use,
    /// RESOURCE_EXHAUSTED while something else is awaited there.
    pub(super) async fn wait_for(
        &self,
        request: AwaitLinkRequest,
        identity: &Identity,
    ) -> Result<u16, Status> {
        let (peer, tls) = known(request.end, identity)?;
        let wait = |listener| async move {
            match answer_link(&peer, listener, tls, AWAIT_PATIENCE).await {
                Ok(()) => tracing::debug!(peer, "the link from there has been measured"),
                Err(error) => tracing::warn!("the link from there was not measured: {error}"),
            }
        };
        self.port.listen(request.port, Purpose::Link, wait).await
    }

    /// Measures the link to the agent of another node.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED while another one is measured, INVALID_ARGUMENT for certificates or an address that cannot be,
    /// INTERNAL if the link cannot be measured.
    pub(super) async fn measure(
        &self,
        request: MeasureLinkRequest,
        identity: &Identity,
    ) -> Result<MeasureLinkResponse, Status> {
        let (peer, tls) = known(request.end, identity)?;
        let endpoint: Endpoint = request
            .endpoint
            .parse()
            .map_err(|error| Status::invalid_argument(format!("{error}")))?;
        let Ok(_alone) = self.measuring.try_lock() else {
            let why = "this node measures another link; ask again in some seconds";
            return Err(Status::resource_exhausted(why));
        };
        let measured = measure_link(&peer, &endpoint, &tls, MEASURE_PATIENCE).await;
        let rates = measured.map_err(|error| Status::internal(error.to_string()))?;
        tracing::info!(
            peer,
            gbps = rates.gbps,
            rtt_us = rates.rtt_us,
            "link measured"
        );
        Ok(MeasureLinkResponse {
            gbps: rates.gbps,
            rtt_us: rates.rtt_us,
        })
    }
}

/// The agent of the other node, in words, and certificates for a connection with its agent alone.
pub(super) fn known(end: Option<LinkEnd>, identity: &Identity) -> Result<(String, Tls), Status> {
    let LinkEnd {
        peer,
        peer_tls_name,
        certificate,
    } = end.ok_or_else(|| Status::invalid_argument("end is missing: name the other node"))?;
    // Without a name, every agent would be accepted.
    if peer_tls_name.is_empty() {
        let why = "end.peer_tls_name is empty: name the other agent";
        return Err(Status::invalid_argument(why));
    }
    let names = TlsNames {
        server: Some(peer_tls_name.clone()),
        clients: vec![peer_tls_name],
    };
    let tls = identity.beside(&certificate, &names)?;
    Ok((format!("the agent of node {peer}"), tls))
}
