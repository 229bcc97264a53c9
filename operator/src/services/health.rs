//! /healthz, /readyz and /metrics of the operator.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hearth_controller_core::observed::Settings;
use jiff::Timestamp;
use tokio::net::TcpListener;

use super::agents::Agents;
use super::cluster_cache::ClusterCache;
use super::rooms;
use crate::cluster::cache::{Cache, State as Cached};
use crate::cluster::queue::Queue;
use crate::telemetry::cluster::ClusterFigures;
use crate::telemetry::{Held, Holder, Telemetry};

/// Media type of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// State behind /metrics and the probes.
#[derive(Clone)]
pub(crate) struct HealthState {
    pub(crate) telemetry: Arc<Telemetry>,
    pub(crate) cache: Arc<Cache>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) settings: Arc<Settings>,
    /// Set once this replica works, if nodes have agents.
    pub(crate) agents: Arc<OnceLock<Arc<Agents<ClusterCache>>>>,
}

impl HealthState {
    fn held(&self) -> Held {
        let (due, at_work) = self.queue.depth();
        let state = self.cache.lock();
        let holder = state.turn_holder(Timestamp::now());
        let mut objects = vec![
            ("InferenceDeployment", state.deployments.len()),
            ("InferencePlan", state.plans.len()),
            ("Pod", state.pods.len()),
            ("Node", state.nodes.len()),
        ];
        let others = state.objects.iter();
        objects.extend(others.map(|(kind, table)| (*kind, table.len())));
        Held {
            due,
            at_work,
            turn_holder: holder.map(|(key, has_failed)| Holder {
                namespace: key.namespace.to_string(),
                name: key.name.to_string(),
                outcome: if has_failed { "Failed" } else { "UnderWay" },
            }),
            objects,
            cluster: self.cluster(&state),
        }
    }

    /// What is exported of the nodes; `None` from a replica that is not the leader.
    fn cluster(&self, state: &Cached) -> Option<ClusterFigures> {
        if !self.telemetry.is_leader.load(Ordering::Relaxed) {
            return None;
        }
        let expiry_s = self.telemetry.authority_s.load(Ordering::Relaxed);
        Some(ClusterFigures {
            nodes: rooms::of_nodes(state, &self.settings.ledger),
            shares: rooms::of_deployments(state),
            fetches: self
                .agents
                .get()
                .map_or_else(Vec::new, |it| it.all_fetches()),
            authority_s: (expiry_s != 0).then_some(expiry_s),
        })
    }
}

/// Serves /healthz, /readyz and /metrics until it is dropped.
///
/// # Errors
/// The address is unavailable.
pub(crate) async fn serve(
    address: SocketAddr,
    state: HealthState,
) -> anyhow::Result<impl Future<Output = ()>> {
    let listener = hearth_transport::listen(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    let listener = listener
        .with_context(|| format!("--listen {address} cannot be bound\n  choose another address"))?;
    tracing::info!(address = %listener.local_addr()?, "serving /healthz, /readyz and /metrics");
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(state);
    Ok(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "health and metrics are not served any more");
        }
    })
}

async fn ready(State(state): State<HealthState>) -> Response {
    if state.telemetry.is_synced.load(Ordering::Relaxed) {
        "ok\n".into_response()
    } else {
        let reason = "the caches are not filled yet\n";
        (StatusCode::SERVICE_UNAVAILABLE, reason).into_response()
    }
}

async fn metrics(State(state): State<HealthState>) -> Response {
    match state.telemetry.encode(state.held()) {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
