//! `/metrics` of an agent: its store of models and the power of its node's GPUs, over plain HTTP. Names of models are not among them.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::Context;
use hearth_profiler::GpuPower;
use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};
use tokio::task::AbortHandle;

use super::models::Models;

/// Content type of the answer.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Connections at a time: anybody in the cluster may open one.
const MAX_CONNECTIONS: usize = 16;
/// Time in which a connection is done with.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Metrics that are served until this is dropped.
pub(super) struct Serving(AbortHandle);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves the metrics at this address. Requires a tokio runtime.
///
/// # Errors
/// The address cannot be listened on.
pub(super) fn serve(address: &str, models: Arc<Models>) -> anyhow::Result<Serving> {
    let listener = hearth_transport::listen(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    });
    let listener = listener.with_context(|| {
        format!("--metrics is {address}, which cannot be listened on\n  another process holds the port: choose another, or end that process")
    })?;
    // The store is looked through for one answer at a time.
    let models = Arc::new(Mutex::new(models));
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let task = tokio::spawn(async move {
        while let Ok(place) = Arc::clone(&places).acquire_owned().await {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let models = Arc::clone(&models);
            tokio::spawn(async move {
                let answer = service_fn(move |request| answer(request, Arc::clone(&models)));
                let mut http = http1::Builder::new();
                let served = http
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), answer);
                // Who breaks off or takes too long scrapes again.
                let _ = tokio::time::timeout(PATIENCE, served).await;
                drop(place);
            });
        }
    });
    Ok(Serving(task.abort_handle()))
}

async fn answer(
    request: Request<Incoming>,
    models: Arc<Mutex<Arc<Models>>>,
) -> Result<Response<String>, Infallible> {
    let is_known = request.method() == Method::GET && request.uri().path() == "/metrics";
    let text = match is_known {
        true => {
            let models = models.lock().await;
            let own = Arc::clone(&models);
            let read = tokio::task::spawn_blocking(move || encode(&own));
            read.await.ok().flatten()
        }
        false => {
            let mut response = Response::new("GET /metrics is all that is here\n".to_owned());
            *response.status_mut() = StatusCode::NOT_FOUND;
            return Ok(response);
        }
    };
    let response = Response::builder().header(CONTENT_TYPE, OPEN_METRICS);
    let response = text.and_then(|text| response.body(text).ok());
    Ok(response.unwrap_or_else(|| {
        let mut response = Response::new("the store of models cannot be read\n".to_owned());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        response
    }))
}

/// The metrics as OpenMetrics text; `None` if the store cannot be read. Blocks.
fn encode(models: &Models) -> Option<String> {
    let held_bytes = models.cache().stored_bytes().ok()?;
    let counters = models.counters();
    let mut registry = Registry::default();
    let gauges = [
        (
            "hearth_agent_store_bytes",
            "Bytes of the models in the node's store",
            Some(held_bytes),
        ),
        (
            "hearth_agent_store_quota_bytes",
            "Most bytes that the store may have, if a quota is set",
            models.quota_bytes(),
        ),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            let gauge = Gauge::<i64>::default();
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
            registry.register(name, help, gauge);
        }
    }
    for (name, help, value) in [
        (
            "hearth_agent_store_evictions",
            "Models and parts that were removed to make room for others",
            counters.evictions(),
        ),
        (
            "hearth_agent_store_evicted_bytes",
            "Bytes of models and parts that were removed to make room for others",
            counters.evicted_bytes(),
        ),
        (
            "hearth_agent_downloaded_bytes",
            "Bytes of models that arrived from servers",
            counters.downloaded_bytes(),
        ),
        (
            "hearth_agent_taken_bytes",
            "Bytes of models that arrived from other nodes",
            counters.taken_bytes(),
        ),
        (
            "hearth_agent_given_bytes",
            "Bytes of models that were sent to other nodes",
            counters.given_bytes(),
        ),
        (
            "hearth_agent_fetch_failures",
            "Attempts to get a model that failed",
            models.failures(),
        ),
    ] {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        registry.register(name, help, counter);
    }
    add_power(&mut registry, &hearth_profiler::gpu_power());
    let mut text = String::new();
    text::encode(&mut text, &registry).ok()?;
    Some(text)
}

/// Adds what the GPUs say of their power; nothing on a node without GPUs.
fn add_power(registry: &mut Registry, gpus: &[GpuPower]) {
    let limits = gpus.iter().map(|gpu| gpu.limit_milliwatts);
    let taken = gpus.iter().map(|gpu| gpu.milliwatts);
    for (name, help, values) in [
        (
            "hearth_agent_gpu_power_limit_watts",
            "Power limit of a GPU that is in force",
            limits.collect::<Vec<_>>(),
        ),
        (
            "hearth_agent_gpu_power_watts",
            "Power that a GPU takes",
            taken.collect(),
        ),
    ] {
        let family = Family::<[(&str, String); 1], Gauge<f64, AtomicU64>>::default();
        let known = gpus
            .iter()
            .zip(&values)
            .filter_map(|(gpu, value)| Some((gpu, (*value)?)));
        for (gpu, milliwatts) in known {
            let gauge = family.get_or_create(&[("uuid", gpu.uuid.clone())]);
            gauge.set(f64::from(milliwatts) / 1000.0);
        }
        if values.iter().any(Option::is_some) {
            registry.register(name, help, family);
        }
    }
}
