//! `GET /health` and `/ready`, and `/metrics` on a separate port: open without a key, since probes and scrapers carry
//! none.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hearth_transport::v1::Placement;
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ErrorType};
use crate::metrics::CONTENT_TYPE;
use crate::router::{Health, Role, WorkerView};

/// Reports that the process works.
pub(super) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Reports whether requests are answered: a decode worker is ready, whose ring is whole if it leads one, and the gateway is not
/// shutting down.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let is_draining = app.is_draining.load(Ordering::Relaxed);
    let views = app.pool.views();
    // Whoever waits for a member of its group takes requests, and answers none meanwhile.
    let count = |role| {
        let (ready, of) = app.pool.count(role);
        let is_open = |worker: &&WorkerView| worker.role == role && worker.health == Health::Ready;
        let open = views.iter().filter(is_open);
        let waiting = open.filter(|worker| !worker.waits_for.is_empty()).count();
        (ready.saturating_sub(waiting), of)
    };
    let pool = |role| {
        let (ready, of) = count(role);
        json!({"ready": ready, "of": of})
    };
    let is_ready = !is_draining && count(Role::Decode).0 > 0;
    let workers: Vec<Value> = views
        .iter()
        .map(|worker| {
            json!({
                "name": worker.name,
                "address": worker.endpoint.to_string(),
                "role": worker.role.as_str(),
                "state": worker.health.as_str(),
                "waits_for": (!worker.waits_for.is_empty()).then_some(&worker.waits_for),
                "running": worker.stats.running,
                "waiting": worker.stats.waiting,
                "placement": worker.placement.as_ref().map(placement),
            })
        })
        .collect();
    let body = json!({
        "ready": is_ready,
        "draining": is_draining,
        "decode": pool(Role::Decode),
        "prefill": pool(Role::Prefill),
        "workers": workers,
    });
    let mut response = Json(body).into_response();
    if !is_ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
    }
    response
}

/// Renders the resources that a worker got from its machine.
fn placement(placement: &Placement) -> Value {
    let memory: Vec<Value> = placement
        .memory
        .iter()
        .map(|node| {
            json!({
                "numa_node": node.numa_node,
                "weight_bytes": node.weight_bytes,
                "own_bytes": node.own_bytes,
            })
        })
        .collect();
    json!({
        "cpus": placement.cpus,
        "numa_nodes": placement.numa_nodes,
        "threads": placement.threads,
        "gpu_uuid": (!placement.gpu_uuid.is_empty()).then_some(&placement.gpu_uuid),
        "memory_numa_nodes": placement.memory_numa_nodes,
        "memory": memory,
        "shortfalls": placement.shortfalls,
    })
}

/// Returns the metrics as OpenMetrics text.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    match app.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => ApiError::internal("the metrics cannot be written").into_response(),
    }
}

/// Pushes the same text again and again, in one answer that does not end, each with `# EOF` as its last line: at once, as soon as a
/// choice waits for its first token where none did, every second while there are choices, and every four without.
pub(super) async fn watch(State(app): State<Arc<App>>) -> Response {
    let Some(mut watch) = app.metrics.demand.watch() else {
        let message = "as many watch these metrics as may; read them, or end another watch";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        return ApiError::new(status, ErrorType::Server, message.to_owned()).into_response();
    };
    let texts = async_stream::stream! {
        loop {
            watch.due().await;
            yield app.metrics.encode();
        }
    };
    (
        [(header::CONTENT_TYPE, CONTENT_TYPE)],
        Body::from_stream(texts),
    )
        .into_response()
}

/// Refuses `/metrics` on the API's port: clients need not see how much it is used, and by how many.
pub(super) async fn metrics_are_elsewhere() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorType::InvalidRequest,
        "metrics are on a port of their own: 9402 of a gateway's Pod, or where hearth up says",
    )
    .with_code("unknown_url")
}
