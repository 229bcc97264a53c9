//! Metrics and logs of the operator.

pub(crate) mod cluster;
mod deployments;
mod series;

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use anyhow::Context as _;
use clap::ValueEnum;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use cluster::ClusterFigures;
use deployments::Deployments;

/// Metrics of the operator's activity.
#[derive(Debug)]
pub(crate) struct Telemetry {
    registry: Registry,
    reconciles: Family<Outcome, Counter>,
    durations: Histogram,
    requests: Family<ApiRequest, Counter>,
    gauges: Gauges,
    /// What is exported of each deployment.
    pub(crate) deployments: Deployments,
    /// Whether all caches have been filled once.
    pub(crate) is_synced: AtomicBool,
    /// Whether this replica is the leader.
    pub(crate) is_leader: AtomicBool,
    /// End of the validity of the certificate authority, in seconds since 1970; 0 before it is known.
    pub(crate) authority_s: AtomicI64,
}

#[derive(Debug, Default)]
struct Gauges {
    queue: Gauge,
    at_work: Gauge,
    leader: Gauge,
    objects: Family<Kind, Gauge>,
    outside: Gauge,
    turn: Family<Holder, Gauge>,
}

/// A deployment that others wait for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Holder {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// `UnderWay` or `Failed`.
    pub(crate) outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    /// `Ok`, or the name of the failure.
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ApiRequest {
    verb: &'static str,
    resource: String,
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

impl Telemetry {
    /// Creates the metrics with all counts at zero.
    pub(crate) fn new() -> Self {
        let mut registry = Registry::default();
        let reconciles = Family::<Outcome, Counter>::default();
        registry.register(
            "hearth_operator_reconciles",
            "Reconciles by how they ended",
            reconciles.clone(),
        );
        let durations = Histogram::new(exponential_buckets(0.001, 2.0, 16));
        registry.register(
            "hearth_operator_reconcile_seconds",
            "Time of one reconcile",
            durations.clone(),
        );
        let requests = Family::<ApiRequest, Counter>::default();
        registry.register(
            "hearth_operator_api_requests",
            "Requests to the API server but for watches, by verb, resource and answer (0: none)",
            requests.clone(),
        );
        let gauges = Gauges::default();
        registry.register(
            "hearth_operator_queue",
            "Deployments that are due",
            gauges.queue.clone(),
        );
        registry.register(
            "hearth_operator_at_work",
            "Deployments that are worked on",
            gauges.at_work.clone(),
        );
        registry.register(
            "hearth_operator_leader",
            "1 if this replica works, 0 if it waits",
            gauges.leader.clone(),
        );
        registry.register(
            "hearth_operator_worker_image_turn",
            "1 for the deployment that others wait for before they change to their worker image",
            gauges.turn.clone(),
        );
        registry.register(
            "hearth_operator_cached",
            "Objects in the caches",
            gauges.objects.clone(),
        );
        registry.register(
            "hearth_operator_agents_outside_known_ranges",
            "Agents whose addresses no known range of the cluster holds: name the Pods' range in agent.fetch.clusterRanges",
            gauges.outside.clone(),
        );
        Self {
            registry,
            reconciles,
            durations,
            requests,
            gauges,
            deployments: Deployments::default(),
            is_synced: AtomicBool::new(false),
            is_leader: AtomicBool::new(false),
            authority_s: AtomicI64::new(0),
        }
    }

    /// Counts a reconcile.
    pub(crate) fn reconciled(&self, outcome: &'static str, seconds: f64) {
        self.reconciles.get_or_create(&Outcome { outcome }).inc();
        self.durations.observe(seconds);
    }

    /// Counts a request to the API server.
    pub(crate) fn requested(&self, verb: &'static str, resource: String, code: u16) {
        let request = ApiRequest {
            verb,
            resource,
            code,
        };
        self.requests.get_or_create(&request).inc();
    }

    /// Sets the number of agents outside of the known ranges.
    pub(crate) fn outside(&self, agents: usize) {
        self.gauges.outside.set(agents as i64);
    }

    /// Encodes all metrics as OpenMetrics, with the current contents of the caches. Only the leader tells of deployments and nodes:
    /// otherwise each replica would have them.
    ///
    /// # Errors
    /// A metric cannot be written as text.
    pub(crate) fn encode(&self, held: Held) -> Result<String, std::fmt::Error> {
        self.gauges.queue.set(held.due as i64);
        self.gauges.at_work.set(held.at_work as i64);
        let is_leader = self.is_leader.load(Ordering::Relaxed);
        self.gauges.leader.set(i64::from(is_leader));
        self.gauges.turn.clear();
        if let Some(holder) = &held.turn_holder {
            self.gauges.turn.get_or_create(holder).set(1);
        }
        for (kind, count) in held.objects {
            let gauge = self.gauges.objects.get_or_create(&Kind { kind });
            gauge.set(count as i64);
        }
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        if let Some(cluster) = held.cluster {
            let mut found = Registry::default();
            found.register_collector(Box::new(self.deployments.clone()));
            found.register_collector(Box::new(cluster));
            encode_registry(&mut text, &found)?;
        }
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// Values that are counted anew for each scrape.
#[derive(Debug)]
pub(crate) struct Held {
    /// Deployments that are due.
    pub(crate) due: usize,
    /// Deployments in progress.
    pub(crate) at_work: usize,
    /// The deployment that others wait for.
    pub(crate) turn_holder: Option<Holder>,
    /// Objects in the caches, by kind.
    pub(crate) objects: Vec<(&'static str, usize)>,
    /// The nodes, if this replica is the leader.
    pub(crate) cluster: Option<ClusterFigures>,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

/// Starts logging to standard error.
///
/// # Errors
/// The filter is not valid.
pub(crate) fn start_log(filter: &str, format: LogFormat) -> anyhow::Result<()> {
    // A word that is not a level would be taken for a module, and silence all others.
    let is_level = |word: &str| word.contains('=') || word.parse::<LevelFilter>().is_ok();
    anyhow::ensure!(
        filter.split(',').all(is_level),
        "--log {filter:?} is not a valid filter\n  write error, warn, info or debug"
    );
    // Errors that the libraries report for every broken watch are logged once, by the watch itself.
    let quiet = "kube_client=off,kube_runtime=off,tower=warn,hyper=warn,h2=warn,rustls=warn";
    let filter = EnvFilter::try_new(format!("{quiet},{filter}")).with_context(|| {
        format!("--log {filter:?} is not a valid filter\n  write error, warn, info or debug")
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(false)
        // A line that cannot be written is lost; reporting that the same way would panic.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    Ok(())
}
