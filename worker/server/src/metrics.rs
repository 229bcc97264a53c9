//! `/metrics`: OpenTelemetry's GenAI server histograms under their own names, and `hearth_*` for the rest.
//!
//! For the model-server protocol of the Gateway API Inference Extension, name `hearth_requests_queued` (queued),
//! `hearth_requests_running` (running) and `hearth_kv_cache_usage_ratio` (KV-cache utilisation).

mod placements;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::config::Predicted;
use crate::demand::Demand;
use crate::failover::FailoverObserver;
use crate::router::{Health, Role, WorkerPool, WorkerView};

/// Content type of the text that [`Metrics::encode`] returns.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// Upper bounds of a histogram's buckets, in seconds.
#[derive(Clone, Copy)]
struct Buckets(&'static [f64]);

const FIRST_TOKEN: Buckets = Buckets(&[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 30.0, 60.0, 120.0,
]);
const PER_TOKEN: Buckets = Buckets(&[
    0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
]);
const DURATION: Buckets = Buckets(&[
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 120.0,
    300.0, 600.0,
]);

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

/// API that a request used; OpenTelemetry's `gen_ai.operation.name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    TextCompletion,
}

impl Operation {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::TextCompletion => "text_completion",
        }
    }
}

/// Reason a client was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutReason {
    /// The client took nothing for too long.
    Stalled,
    /// Too much output waited for it and for others.
    Backlog,
}

impl CutReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Stalled => "stalled",
            Self::Backlog => "backlog",
        }
    }
}

/// All metrics of a gateway.
pub(crate) struct Metrics {
    /// The load as it arrives.
    pub(crate) demand: Demand,
    registry: Registry,
    model: String,
    first_token: Family<Labels, Histogram, Buckets>,
    per_token: Family<Labels, Histogram, Buckets>,
    duration: Family<Labels, Histogram, Buckets>,
    responses: Family<Labels, Counter>,
    failovers: Family<Labels, Counter>,
    changed_numerics: Counter,
    finished: Family<Labels, Counter>,
    cut: Family<Labels, Counter>,
    waiting_bytes: Gauge,
    running: Gauge,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    generated_tokens: Counter,
}

impl Metrics {
    /// Creates the metrics of a gateway that serves `model` from `pool`.
    pub(crate) fn new(model: &str, pool: Arc<WorkerPool>, predicted: Predicted) -> Self {
        let mut registry = Registry::default();
        let mut metrics = Self {
            demand: Demand::new(&mut registry),
            registry,
            model: model.to_owned(),
            first_token: Family::new_with_constructor(FIRST_TOKEN),
            per_token: Family::new_with_constructor(PER_TOKEN),
            duration: Family::new_with_constructor(DURATION),
            responses: Family::default(),
            failovers: Family::default(),
            changed_numerics: Counter::default(),
            finished: Family::default(),
            cut: Family::default(),
            waiting_bytes: Gauge::default(),
            running: Gauge::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
        };
        metrics.register();
        let scrape = Scrape { pool, predicted };
        metrics.registry.register_collector(Box::new(scrape));
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        let mut histogram =
            |name: &str, help: &str, family: &Family<Labels, Histogram, Buckets>| {
                registry.register_with_unit(name, help, Unit::Seconds, family.clone());
            };
        histogram(
            "gen_ai_server_time_to_first_token",
            "From the whole request to the first token of a choice",
            &self.first_token,
        );
        histogram(
            "gen_ai_server_time_per_output_token",
            "Mean time between the tokens of a choice, not counting the first",
            &self.per_token,
        );
        histogram(
            "gen_ai_server_request_duration",
            "From the whole request to the end of its answer",
            &self.duration,
        );
        registry.register(
            "hearth_http_responses",
            "HTTP responses",
            self.responses.clone(),
        );
        registry.register(
            "hearth_failovers",
            "Streams that moved to another worker, or were tried again",
            self.failovers.clone(),
        );
        registry.register(
            "hearth_failovers_changed_numerics",
            "Streams continued with different numerics: later tokens may differ",
            self.changed_numerics.clone(),
        );
        registry.register(
            "hearth_choices_finished",
            "Finished choices by reason",
            self.finished.clone(),
        );
        registry.register(
            "hearth_clients_cut",
            "Clients cut off because they did not read their answers",
            self.cut.clone(),
        );
        registry.register(
            "hearth_answers_waiting_bytes",
            "Bytes of answers that clients have not read",
            self.waiting_bytes.clone(),
        );
        registry.register(
            "hearth_requests_running",
            "Choices that are being generated",
            self.running.clone(),
        );
        registry.register(
            "hearth_prompt_tokens",
            "Prompt tokens of started choices",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "hearth_prompt_cached_tokens",
            "Prompt tokens whose KV was reused",
            self.cached_tokens.clone(),
        );
        registry.register(
            "hearth_generated_tokens",
            "Generated tokens",
            self.generated_tokens.clone(),
        );
    }

    /// Renders the text of a scrape.
    pub(crate) fn encode(&self) -> Result<String, fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }

    fn labels(&self, operation: Operation) -> Labels {
        vec![
            ("gen_ai_operation_name", operation.as_str().to_owned()),
            ("gen_ai_request_model", self.model.clone()),
        ]
    }

    /// Counts a choice that has started; the gauge of running choices falls when the guard is dropped.
    pub(crate) fn choice_started(
        &self,
        prompt_tokens: usize,
        cached_tokens: u32,
        reader: Role,
    ) -> RunningGuard {
        self.running.inc();
        self.demand.started(reader, prompt_tokens);
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.cached_tokens.inc_by(u64::from(cached_tokens));
        RunningGuard(self.running.clone())
    }

    /// Records the first token of a choice.
    pub(crate) fn first_token(&self, operation: Operation, after: Duration) {
        self.first_token
            .get_or_create(&self.labels(operation))
            .observe(after.as_secs_f64());
    }

    /// Counts any token.
    pub(crate) fn token(&self) {
        self.generated_tokens.inc();
    }

    /// Records the end of a choice with `tokens` tokens, `span` between the first and the last.
    pub(crate) fn choice_finished(
        &self,
        operation: Operation,
        reason: &str,
        tokens: u32,
        span: Duration,
    ) {
        self.finished
            .get_or_create(&vec![("reason", reason.to_owned())])
            .inc();
        if tokens > 1 {
            let mean = span.as_secs_f64() / f64::from(tokens - 1);
            self.per_token
                .get_or_create(&self.labels(operation))
                .observe(mean);
        }
    }

    /// Records the end of a request; `error` is its code if it failed.
    pub(crate) fn request_finished(
        &self,
        operation: Operation,
        took: Duration,
        error: Option<&str>,
    ) {
        let mut labels = self.labels(operation);
        if let Some(error) = error {
            labels.push(("error_type", error.to_owned()));
        }
        self.duration
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    /// Counts a client that was cut off.
    pub(crate) fn client_cut(&self, reason: CutReason) {
        self.cut
            .get_or_create(&vec![("reason", reason.as_str().to_owned())])
            .inc();
    }

    /// Sets the bytes of answers that clients have not read.
    pub(crate) fn answers_waiting(&self, bytes: usize) {
        self.waiting_bytes.set(bytes as i64);
    }

    /// Counts an HTTP response; `route` is the pattern, never the path.
    pub(crate) fn response(&self, route: &str, status: u16) {
        let labels = vec![("route", route.to_owned()), ("status", status.to_string())];
        self.responses.get_or_create(&labels).inc();
    }
}

impl FailoverObserver for Metrics {
    fn moved(&self, kind: &'static str, _tokens: usize) {
        self.failovers
            .get_or_create(&vec![("reason", kind.to_owned())])
            .inc();
    }

    fn changed_numerics(&self) {
        self.changed_numerics.inc();
    }
}

/// Counts a running choice while it lives.
pub(crate) struct RunningGuard(Gauge);

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Values that are read at the moment of a scrape.
struct Scrape {
    pool: Arc<WorkerPool>,
    predicted: Predicted,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scrape").finish_non_exhaustive()
    }
}

impl Collector for Scrape {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let workers = self.pool.views();
        let mut writer = Writer { encoder };
        self.pool_gauges(&mut writer, &workers)?;
        worker_gauges(&mut writer, &workers)?;
        placements::write(&mut writer, &workers)?;
        worker_counters(&mut writer, &workers)
    }
}

impl Scrape {
    fn pool_gauges(
        &self,
        writer: &mut Writer<'_>,
        workers: &[WorkerView],
    ) -> Result<(), fmt::Error> {
        let decode = || workers.iter().filter(|worker| worker.role == Role::Decode);
        let waiting: u64 = decode().map(|worker| u64::from(worker.stats.waiting)).sum();
        writer.gauge(
            "hearth_requests_queued",
            "Choices that wait, here and at decode workers",
            (self.pool.waiting() as u64 + waiting) as f64,
        )?;
        // A leaving worker has no room for new requests.
        let staying = || decode().filter(|worker| worker.health != Health::Leaving);
        let sum = |part: fn(&WorkerView) -> u32| staying().map(|w| f64::from(part(w))).sum::<f64>();
        let total = sum(|worker| worker.stats.kv_blocks_total);
        let used = sum(|worker| worker.stats.kv_blocks_used);
        let ratio = if total > 0.0 { used / total } else { 0.0 };
        writer.gauge(
            "hearth_kv_cache_usage_ratio",
            "Used share of the decode workers' KV blocks",
            ratio,
        )?;
        let generation = workers.iter().map(|worker| worker.plan_generation).max();
        writer.gauge(
            "hearth_plan_generation",
            "Generation of the plan that the workers run",
            generation.unwrap_or(0) as f64,
        )?;
        if let Some(seconds) = self.predicted.ttft_seconds {
            writer.gauge(
                "hearth_predicted_time_to_first_token_seconds",
                "The plan's prediction",
                seconds,
            )?;
        }
        if let Some(seconds) = self.predicted.tpot_seconds {
            writer.gauge(
                "hearth_predicted_time_per_output_token_seconds",
                "The plan's prediction",
                seconds,
            )?;
        }
        Ok(())
    }
}

type Part = fn(&WorkerView) -> f64;

/// Gauges of each worker: name, help, value.
const WORKER_GAUGES: &[(&str, &str, Part)] = &[
    ("hearth_worker_ready", "1: accepts requests", |w| {
        f64::from(u8::from(w.health == Health::Ready))
    }),
    ("hearth_worker_hung", "1: unresponsive", |w| {
        f64::from(u8::from(w.health == Health::Hung))
    }),
    ("hearth_worker_requests", "Requests of this gateway", |w| {
        f64::from(w.in_flight)
    }),
    ("hearth_worker_running", "Sequences in the batch", |w| {
        f64::from(w.stats.running)
    }),
    (
        "hearth_worker_waiting",
        "Requests in the worker's queue",
        |w| f64::from(w.stats.waiting),
    ),
    ("hearth_worker_kv_blocks", "KV blocks", |w| {
        f64::from(w.stats.kv_blocks_total)
    }),
    (
        "hearth_worker_kv_blocks_used",
        "KV blocks of running sequences",
        |w| f64::from(w.stats.kv_blocks_used),
    ),
    (
        "hearth_worker_resident_bytes",
        "Bytes of weights held ready",
        |w| w.stats.resident_bytes as f64,
    ),
    (
        "hearth_worker_expert_copy_hidden_ratio",
        "Share of the time of copies of experts that computation hides",
        |w| match w.stats.expert_copy_seconds {
            copied if copied > 0.0 => 1.0 - (w.stats.expert_wait_seconds / copied).min(1.0),
            _ => 1.0,
        },
    ),
    (
        "hearth_worker_device_peak_bytes",
        "Most bytes of the device's memory in use at once",
        |w| w.stats.device_peak_bytes as f64,
    ),
    (
        "hearth_worker_device_budget_bytes",
        "Bytes of the device's memory that the worker may use",
        |w| w.stats.device_budget_bytes as f64,
    ),
    (
        "hearth_worker_plan_generation",
        "Plan that the worker runs",
        |w| w.plan_generation as f64,
    ),
];

fn worker_gauges(writer: &mut Writer<'_>, workers: &[WorkerView]) -> Result<(), fmt::Error> {
    for (name, help, part) in WORKER_GAUGES {
        let mut metric = writer
            .encoder
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for worker in workers {
            ConstGauge::new(part(worker)).encode(metric.encode_family(&labels_of(worker))?)?;
        }
    }
    Ok(())
}

/// Counters of each worker: name, help, value.
const WORKER_COUNTERS: &[(&str, &str, Part)] = &[
    (
        "hearth_worker_prefix_hit_tokens",
        "Prompt tokens whose KV was reused",
        |w| w.stats.prefix_hit_tokens as f64,
    ),
    (
        "hearth_worker_prefix_query_tokens",
        "Prompt tokens looked up",
        |w| w.stats.prefix_query_tokens as f64,
    ),
    ("hearth_worker_prompt_tokens", "Prompt tokens", |w| {
        w.stats.prompt_tokens as f64
    }),
    ("hearth_worker_generated_tokens", "Generated tokens", |w| {
        w.stats.generated_tokens as f64
    }),
    (
        "hearth_worker_weight_read_bytes",
        "Bytes of weights read",
        |w| w.stats.weight_bytes_read as f64,
    ),
    (
        "hearth_worker_kv_moved_bytes",
        "Bytes of KV sent and received",
        |w| w.stats.kv_bytes_moved as f64,
    ),
    (
        "hearth_worker_peer_kv_bytes",
        "Bytes of its own keys and values that the head of peers has sent to them",
        |w| w.stats.peer_kv_bytes as f64,
    ),
    (
        "hearth_worker_peer_kv_passed_on_bytes",
        "Bytes of peers' keys and values that their head has passed on to those of its node",
        |w| w.stats.peer_kv_passed_on_bytes as f64,
    ),
    (
        "hearth_worker_expert_copy_bytes",
        "Bytes of experts copied to the device",
        |w| w.stats.expert_copy_bytes as f64,
    ),
    (
        "hearth_worker_expert_copy_seconds",
        "Seconds in which the link copied experts",
        |w| w.stats.expert_copy_seconds,
    ),
    (
        "hearth_worker_expert_wait_seconds",
        "Seconds in which computation waited for these copies",
        |w| w.stats.expert_wait_seconds,
    ),
    ("hearth_worker_steps", "Forward passes", |w| {
        w.stats.steps as f64
    }),
    (
        "hearth_worker_step_seconds",
        "Seconds in forward passes",
        |w| w.stats.step_seconds,
    ),
    (
        "hearth_worker_preemptions",
        "Sequences recomputed for lack of KV blocks",
        |w| w.stats.preemptions as f64,
    ),
];

fn worker_counters(writer: &mut Writer<'_>, workers: &[WorkerView]) -> Result<(), fmt::Error> {
    for (name, help, part) in WORKER_COUNTERS {
        let mut metric = writer
            .encoder
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        for worker in workers {
            ConstCounter::new(part(worker)).encode(metric.encode_family(&labels_of(worker))?)?;
        }
    }
    Ok(())
}

/// Returns a worker's labels. The name alone is not enough: while one plan follows another, both have a `decode-0`.
fn labels_of(worker: &WorkerView) -> Labels {
    vec![
        ("worker", worker.name.clone()),
        ("address", worker.endpoint.to_string()),
        ("role", worker.role.as_str().to_owned()),
    ]
}

struct Writer<'a> {
    encoder: DescriptorEncoder<'a>,
}

impl Writer<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> Result<(), fmt::Error> {
        let gauge = ConstGauge::new(value);
        let metric = self
            .encoder
            .encode_descriptor(name, help, None, gauge.metric_type())?;
        gauge.encode(metric)
    }
}
