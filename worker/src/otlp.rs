//! Traces by OTLP: the spans of this process go to a collector, if the environment names one.
//!
//! No request waits for the collector: spans are put into a bounded queue, from which a thread of its own sends them. What finds no
//! room there, cannot be delivered or is rejected, is dropped and counted; the log says so once each time the collector is lost, or
//! begins to reject.

use std::error::Error;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use hearth_crds::{InferencePlanSpec, PlanRank};
use hearth_transport::spans::{KeyValue, Tracer};
use opentelemetry::trace::TracerProvider;
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, RetryPolicy, WithExportConfig, WithHttpConfig};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
};
use prost::Message;
use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};

use crate::environment::{Environment, OtlpVariables, Variable};

/// Time that the last spans have to be delivered as the process ends: less than what its supervisor waits beyond the time for
/// requests.
const FLUSH: Duration = Duration::from_secs(2);
/// Time limit for delivering a batch, as the standard has it.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Path of traces below a collector's address.
const PATH: &str = "/v1/traces";
/// Samplers of the standard that there are here, and whether each takes a ratio.
const SAMPLERS: [(&str, bool); 6] = [
    ("always_on", false),
    ("always_off", false),
    ("traceidratio", true),
    ("parentbased_always_on", false),
    ("parentbased_always_off", false),
    ("parentbased_traceidratio", true),
];

/// The traces of a process; dropping it delivers the last ones, within a bounded time.
pub(crate) struct OtlpTraces(Option<Delivery>);

struct Delivery {
    provider: SdkTracerProvider,
    tally: Arc<Tally>,
}

impl OtlpTraces {
    /// Starts the delivery, if the environment asks for it, of spans of `rank`.
    ///
    /// # Errors
    /// An error that names the variable whose value cannot be used.
    pub(crate) fn start(
        environment: &Environment,
        plan: &InferencePlanSpec,
        rank: &PlanRank,
    ) -> anyhow::Result<Self> {
        let variables = &environment.otlp;
        let Some(url) = endpoint(variables)? else {
            return Ok(Self(None));
        };
        check_protocol(variables.protocol.as_ref())?;
        check_sampler(variables)?;
        check_headers(variables.headers.as_ref())?;
        let tally = Arc::new(Tally {
            // The rest may hold a password.
            collector: url.origin().ascii_serialization(),
            ..Tally::default()
        });
        let exporter = Reporting {
            inner: exporter(&url, timeout(variables.timeout.as_ref())?, &tally)?,
            tally: Arc::clone(&tally),
        };
        let processor = Counted {
            inner: BatchSpanProcessor::builder(exporter).build(),
            tally: Arc::clone(&tally),
        };
        let provider = SdkTracerProvider::builder()
            .with_resource(resource(variables, plan, rank))
            .with_span_processor(processor)
            .build();
        tracing::info!(collector = tally.collector, "traces are on");
        Ok(Self(Some(Delivery { provider, tally })))
    }

    /// What starts spans.
    pub(crate) fn tracer(&self) -> Tracer {
        match &self.0 {
            Some(delivery) => Tracer::recording(delivery.provider.tracer("hearth")),
            None => Tracer::default(),
        }
    }
}

impl Drop for OtlpTraces {
    fn drop(&mut self) {
        let Some(Delivery { provider, tally }) = &self.0 else {
            return;
        };
        // What it was too late for is in the tally.
        let _ = provider.shutdown_with_timeout(FLUSH);
        let lost = tally.lost();
        if lost > 0 {
            tracing::warn!(
                collector = tally.collector,
                lost,
                "spans were not delivered"
            );
        }
    }
}

/// The address that traces go to; `None`: they are off.
fn endpoint(variables: &OtlpVariables) -> anyhow::Result<Option<Url>> {
    if variables.is_off {
        return Ok(None);
    }
    let (variable, path) = match (&variables.traces_endpoint, &variables.endpoint) {
        (Some(own), _) => (own, ""),
        (None, Some(base)) => (base, PATH),
        (None, None) => return Ok(None),
    };
    let parsed = |text: &str| {
        let url = Url::parse(text).ok();
        url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
    };
    // Without a host, the path that is added would be taken for one.
    let url = parsed(&variable.value).and_then(|url| match path {
        "" => Some(url),
        path => parsed(&format!("{}{path}", variable.value.trim_end_matches('/'))),
    });
    url.map(Some)
        .with_context(|| variable.refused("not a URL", "write one as http://collector:4318"))
}

fn check_protocol(protocol: Option<&Variable>) -> anyhow::Result<()> {
    match protocol {
        Some(protocol) if protocol.value != "http/protobuf" => bail!(protocol.refused(
            "not implemented",
            "write http/protobuf with the collector's port for it, 4318 in most, or no traces: OTEL_TRACES_EXPORTER=none"
        )),
        _ => Ok(()),
    }
}

/// The library would take the default for what it does not know.
fn check_sampler(variables: &OtlpVariables) -> anyhow::Result<()> {
    let Some(sampler) = &variables.sampler else {
        return Ok(());
    };
    let known = SAMPLERS.iter().find(|(name, _)| *name == sampler.value);
    let Some((_, takes_ratio)) = known else {
        let names = SAMPLERS.map(|(name, _)| name).join(", ");
        bail!(sampler.refused("no sampler", &format!("write one of {names}")));
    };
    let is_ratio = |value: &str| {
        let ratio = value.parse::<f64>();
        ratio.is_ok_and(|ratio| (0.0..=1.0).contains(&ratio))
    };
    match &variables.sampler_argument {
        Some(argument) if *takes_ratio && !is_ratio(&argument.value) => {
            bail!(argument.refused("no ratio", "write one from 0 to 1, such as 0.1"))
        }
        None if *takes_ratio => {
            bail!(sampler.refused(
                "a sampler with a ratio",
                "write it in OTEL_TRACES_SAMPLER_ARG"
            ))
        }
        _ => Ok(()),
    }
}

/// The library would leave out what it cannot send. Values may be keys, and so may what stands where a name should.
fn check_headers(headers: Option<&Variable>) -> anyhow::Result<()> {
    let Some(headers) = headers else {
        return Ok(());
    };
    const REMEDY: &str = "write name=value,name=value; what a value has besides ASCII letters, digits and signs, and its commas, in percent-encoding";
    let entries = headers.value.split(',').map(str::trim);
    for (number, entry) in (1..).zip(entries).filter(|(_, entry)| !entry.is_empty()) {
        let refused = |why: String| headers.refused_unseen(&why, REMEDY);
        let Some((name, value)) = entry.split_once('=') else {
            bail!(refused(format!("its part {number} has no \"=\"")));
        };
        if name.trim().parse::<HeaderName>().is_err() {
            bail!(refused(format!(
                "its part {number} begins with no name of a header"
            )));
        }
        let text = value.trim();
        let value = percent_decoded(text).unwrap_or_else(|| text.to_owned());
        // A key alone may end in "=" (Base64), and then looks like a name.
        let is_alone = text.trim_matches('=').is_empty();
        if is_alone || HeaderValue::from_str(&value).is_err() {
            bail!(refused(format!(
                "its part {number} has no value that a header can have"
            )));
        }
    }
    Ok(())
}

/// What a percent-encoded text stands for; `None` if it is none, and then stands for itself.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = match (first, after) {
            (b'%', [high, low, after @ ..]) => {
                let digit = |byte: &u8| char::from(*byte).to_digit(16);
                let byte = 16 * digit(high)? + digit(low)?;
                bytes.push(u8::try_from(byte).ok()?);
                after
            }
            (b'%', _) => return None,
            (other, after) => {
                bytes.push(*other);
                after
            }
        };
    }
    String::from_utf8(bytes).ok()
}

fn timeout(variable: Option<&Variable>) -> anyhow::Result<Duration> {
    let Some(variable) = variable else {
        return Ok(TIMEOUT);
    };
    let millis = variable.value.parse().ok().filter(|millis| *millis > 0);
    let millis = millis.with_context(|| {
        variable.refused("no time", "write a number of milliseconds, such as 10000")
    })?;
    Ok(Duration::from_millis(millis))
}

/// What sends batches; headers and compression are as the environment says.
fn exporter(
    url: &Url,
    timeout: Duration,
    tally: &Arc<Tally>,
) -> anyhow::Result<opentelemetry_otlp::SpanExporter> {
    // Public collectors can still be reached from images without CA certificates.
    let roots = webpki_root_certs::TLS_SERVER_ROOT_CERTS
        .iter()
        .filter_map(|der| reqwest::Certificate::from_der(der).ok());
    let client = reqwest::blocking::Client::builder()
        .timeout(timeout)
        // Its headers may hold a key, which is for nobody else.
        .redirect(reqwest::redirect::Policy::none())
        .tls_certs_merge(roots);
    let client = match url.host_str().is_some_and(hearth_fetch::is_own) {
        true => client.no_proxy(),
        false => client,
    };
    let client = client.build().context("no client for traces")?;
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_http()
        .with_http_client(Collector {
            client,
            tally: Arc::clone(tally),
        })
        .with_endpoint(url.as_str())
        .with_protocol(Protocol::HttpBinary)
        .with_timeout(timeout)
        .with_retry_policy(RetryPolicy::recommended());
    exporter
        .build()
        .context("OTEL_EXPORTER_OTLP_*: traces cannot be sent as these variables say")
}

/// What this process is; the environment has the last word.
fn resource(variables: &OtlpVariables, plan: &InferencePlanSpec, rank: &PlanRank) -> Resource {
    let own = [
        KeyValue::new("service.name", format!("hearth-{}", rank.role.as_str())),
        KeyValue::new("service.namespace", plan.deployment.name.clone()),
        KeyValue::new("service.instance.id", rank.name.clone()),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
        KeyValue::new("k8s.namespace.name", plan.deployment.namespace.clone()),
        KeyValue::new("host.name", rank.node.clone()),
        KeyValue::new("hearth.plan.generation", plan.generation as i64),
    ];
    let resource = Resource::builder_empty()
        .with_attributes(own)
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_detector(Box::new(EnvResourceDetector::new()));
    match &variables.service_name {
        Some(name) => resource.with_service_name(name.clone()).build(),
        None => resource.build(),
    }
}

/// What became of spans.
#[derive(Debug, Default)]
struct Tally {
    /// Scheme, host and port of the collector.
    collector: String,
    ended: AtomicU64,
    delivered: AtomicU64,
    /// Whether the last batch was not delivered.
    is_failing: AtomicBool,
    /// Whether spans of the last batch that was delivered were rejected.
    is_rejecting: AtomicBool,
    /// How many of the last answer's batch were.
    rejected: AtomicU64,
    /// Why the last call failed, or spans of it were rejected.
    cause: Mutex<String>,
}

impl Tally {
    fn lost(&self) -> u64 {
        let ended = self.ended.load(Ordering::Relaxed);
        ended.saturating_sub(self.delivered.load(Ordering::Relaxed))
    }

    /// Notes what the answer of success says: a collector may take a batch and reject some of its spans (`partial_success`).
    fn answered(&self, body: &[u8]) {
        let answer = ExportTraceServiceResponse::decode(body).unwrap_or_default();
        let partial = answer.partial_success.unwrap_or_default();
        let rejected = u64::try_from(partial.rejected_spans).unwrap_or(0);
        self.rejected.store(rejected, Ordering::Relaxed);
        self.note_cause(partial.error_message);
    }

    fn note_cause(&self, cause: String) {
        *self.cause.lock().unwrap_or_else(PoisonError::into_inner) = cause;
    }

    fn delivered(&self, spans: u64) {
        let rejected = self.rejected.swap(0, Ordering::Relaxed).min(spans);
        self.delivered
            .fetch_add(spans - rejected, Ordering::Relaxed);
        let was_rejecting = self.is_rejecting.swap(rejected > 0, Ordering::Relaxed);
        if rejected > 0 && !was_rejecting {
            let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
            tracing::warn!(
                collector = self.collector,
                rejected,
                spans,
                cause = *cause,
                "the collector rejects spans, which are dropped; requests go on"
            );
        }
        if self.is_failing.swap(false, Ordering::Relaxed) {
            tracing::info!(collector = self.collector, "traces are delivered again");
        }
    }

    fn failed(&self) {
        if !self.is_failing.swap(true, Ordering::Relaxed) {
            let cause = self.cause.lock().unwrap_or_else(PoisonError::into_inner);
            tracing::warn!(
                collector = self.collector,
                cause = *cause,
                "traces cannot be delivered, and are dropped until they can; requests go on"
            );
        }
    }
}

/// Counts spans that have ended, those for which the queue has no room among them.
#[derive(Debug)]
struct Counted {
    inner: BatchSpanProcessor,
    tally: Arc<Tally>,
}

impl SpanProcessor for Counted {
    fn on_start(&self, span: &mut Span, context: &opentelemetry::Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        self.tally.ended.fetch_add(1, Ordering::Relaxed);
        self.inner.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Reports what is not delivered.
#[derive(Debug)]
struct Reporting {
    inner: opentelemetry_otlp::SpanExporter,
    tally: Arc<Tally>,
}

impl SpanExporter for Reporting {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len() as u64;
        let outcome = self.inner.export(batch).await;
        match &outcome {
            Ok(()) => self.tally.delivered(spans),
            Err(_) => self.tally.failed(),
        }
        outcome
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// The collector's HTTP client, which keeps the cause of failures: the library tells less.
#[derive(Debug)]
struct Collector {
    client: reqwest::blocking::Client,
    tally: Arc<Tally>,
}

#[tonic::async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let outcome = self.client.send_bytes(request).await;
        let cause = match &outcome {
            Ok(response) if response.status().is_success() => {
                self.tally.answered(response.body());
                return outcome;
            }
            Ok(response) => format!("it answers {}", response.status()),
            Err(error) => innermost(error.as_ref()),
        };
        self.tally.note_cause(cause);
        outcome
    }
}

/// The last message of an error's chain: the outer ones say no more than that there was an error.
fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> OtlpVariables {
        let environment = Environment::read(|name| {
            let found = pairs.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        });
        environment.otlp
    }

    #[test]
    fn traces_go_to_a_url_or_nowhere() {
        let to = |pairs: &[(&str, &str)]| {
            let url = endpoint(&variables(pairs)).map_err(|error| error.to_string());
            url.map(|url| url.map(String::from))
        };
        const BASE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
        const OWN: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
        assert_eq!(to(&[]), Ok(None));
        assert_eq!(to(&[(BASE, "")]), Ok(None));
        let at = |url: &str| Ok(Some(url.to_owned()));
        assert_eq!(
            to(&[(BASE, "http://c:4318/")]),
            at("http://c:4318/v1/traces")
        );
        assert_eq!(to(&[(BASE, "https://c/x")]), at("https://c/x/v1/traces"));
        assert_eq!(to(&[(OWN, "http://c/in"), (BASE, "?")]), at("http://c/in"));
        for off in [
            ("OTEL_SDK_DISABLED", "true"),
            ("OTEL_TRACES_EXPORTER", "none"),
        ] {
            assert_eq!(to(&[(BASE, "http://c:4318"), off]), Ok(None), "{off:?}");
        }
        for wrong in ["collector:4318", "grpc://c:4317", "http://", "/v1"] {
            let error = to(&[(BASE, wrong)]).unwrap_err();
            assert!(
                error.contains(&format!("{BASE} is {wrong:?}"))
                    && error.contains("http://collector:4318"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_would_be_passed_over_is_refused() {
        let sampler = |name: &str, argument: Option<&str>| {
            let mut pairs = vec![("OTEL_TRACES_SAMPLER", name)];
            pairs.extend(argument.map(|argument| ("OTEL_TRACES_SAMPLER_ARG", argument)));
            check_sampler(&variables(&pairs)).map_err(|error| error.to_string())
        };
        assert_eq!(sampler("always_on", None), Ok(()));
        assert_eq!(sampler("parentbased_traceidratio", Some("0.25")), Ok(()));
        for (name, argument, words) in [
            ("sometimes", None, "OTEL_TRACES_SAMPLER is \"sometimes\""),
            ("traceidratio", None, "OTEL_TRACES_SAMPLER_ARG"),
            (
                "traceidratio",
                Some("25%"),
                "OTEL_TRACES_SAMPLER_ARG is \"25%\"",
            ),
            (
                "traceidratio",
                Some("2"),
                "OTEL_TRACES_SAMPLER_ARG is \"2\"",
            ),
        ] {
            let error = sampler(name, argument).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let grpc = variables(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]);
        let error = check_protocol(grpc.protocol.as_ref()).unwrap_err();
        assert!(error.to_string().contains("http/protobuf"), "{error}");
        let never = variables(&[("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")]);
        let error = timeout(never.timeout.as_ref()).unwrap_err();
        assert!(error.to_string().contains("milliseconds"), "{error}");
    }

    #[test]
    fn headers_that_cannot_be_sent_are_refused_and_no_key_is_shown() {
        let check = |name: &'static str, value: &str| {
            let read = variables(&[(name, value)]);
            check_headers(read.headers.as_ref()).map_err(|error| error.to_string())
        };
        const ALL: &str = "OTEL_EXPORTER_OTLP_HEADERS";
        const OWN: &str = "OTEL_EXPORTER_OTLP_TRACES_HEADERS";
        for value in [
            "",
            "x-lab=attic",
            " x-lab = attic , authorization=Basic%20a2V5,",
            "x=1%2C2,y=a=b",
            "x=100%",
        ] {
            assert_eq!(check(ALL, value), Ok(()), "{value:?}");
        }
        for (name, value, words) in [
            (ALL, "hush", "its part 1 has no \"=\""),
            (OWN, "x-lab=attic,hush", "its part 2 has no \"=\""),
            (ALL, "x-lab=attic,hu sh=1", "its part 2 begins with no name"),
            (OWN, "api-key=hush%0A", "its part 1 has no value"),
            (ALL, "x-lab=attic,hush=", "its part 2 has no value"),
            (ALL, "hush==", "its part 1 has no value"),
        ] {
            let error = check(name, value).unwrap_err();
            assert!(
                error.starts_with(&format!("{name} cannot be used: ")),
                "{error}"
            );
            assert!(
                error.contains(words) && error.contains("\n  write name=value"),
                "{error}"
            );
            assert!(
                !error.contains("hush") && !error.contains("hu sh"),
                "{error}"
            );
        }
    }
}
