//! A collector that takes traces by OTLP over HTTP and keeps their spans.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::{HeaderMap, StatusCode};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode as SpanStatus};
use prost::Message;

/// Longest wait for spans: processes send them every few seconds, and a busy machine lets them wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// A span as it was received.
#[derive(Clone, Debug)]
pub struct ReceivedSpan {
    /// `service.name`, `service.instance.id` and what else the process says of itself.
    pub process: BTreeMap<String, String>,
    /// Id of its trace, in hex.
    pub trace: String,
    /// Its own id, in hex.
    pub id: String,
    /// Id of its parent, in hex; empty if it has none.
    pub parent: String,
    /// Its name.
    pub name: String,
    /// Start and end, in nanoseconds of Unix time.
    pub time_ns: (u64, u64),
    /// Its attributes, as text.
    pub attributes: BTreeMap<String, String>,
    /// Names of its events.
    pub events: Vec<String>,
    /// Whether it failed.
    pub has_failed: bool,
}

/// A running collector; it ends with the test.
pub struct OtlpReceiver {
    endpoint: String,
    received: Arc<Received>,
}

#[derive(Default)]
struct Received {
    spans: Mutex<Vec<ReceivedSpan>>,
    /// Headers of the last call.
    headers: Mutex<HeaderMap>,
    /// Spans of each call that it rejects, though it answers 200.
    rejects: i64,
}

impl OtlpReceiver {
    /// Starts it on a free port, on a thread of its own.
    ///
    /// # Panics
    /// When there is none.
    pub fn start() -> Self {
        Self::rejecting(0)
    }

    /// The same of one that answers 200, and says that it has rejected so many spans of the call.
    ///
    /// # Panics
    /// When there is no free port.
    pub fn rejecting(rejects: i64) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .unwrap_or_else(|error| panic!("no collector: {error}"));
        let address = listener.local_addr();
        let address = address.unwrap_or_else(|error| panic!("no collector: {error}"));
        let received = Arc::new(Received {
            rejects,
            ..Received::default()
        });
        let router = Router::new()
            .route("/v1/traces", post(take))
            .with_state(Arc::clone(&received));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let runtime = runtime.unwrap_or_else(|error| panic!("no collector: {error}"));
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener);
                let listener = listener.unwrap_or_else(|error| panic!("no collector: {error}"));
                let _ = axum::serve(listener, router).await;
            });
        });
        Self {
            endpoint: format!("http://{address}"),
            received,
        }
    }

    /// Its address, for `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// All spans that have come.
    pub fn spans(&self) -> Vec<ReceivedSpan> {
        locked(&self.received.spans).clone()
    }

    /// A header of the last call.
    pub fn header(&self, name: &str) -> Option<String> {
        let headers = locked(&self.received.headers);
        Some(headers.get(name)?.to_str().ok()?.to_owned())
    }

    /// Waits until the spans are as wanted, and returns them.
    ///
    /// # Panics
    /// When they do not come in time.
    pub fn wait_for(&self, wanted: impl Fn(&[ReceivedSpan]) -> bool) -> Vec<ReceivedSpan> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let spans = self.spans();
            if wanted(&spans) {
                return spans;
            }
            assert!(
                Instant::now() < deadline,
                "spans are missing beside {spans:#?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn locked<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn take(State(received): State<Arc<Received>>, headers: HeaderMap, body: Bytes) -> Response {
    let Ok(request) = ExportTraceServiceRequest::decode(body) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    *locked(&received.headers) = headers;
    for resource in request.resource_spans {
        let process = texts(resource.resource.unwrap_or_default().attributes);
        let scopes = resource.scope_spans.into_iter();
        let spans = scopes.flat_map(|scope| scope.spans);
        let spans = spans.map(|span| received_span(span, &process));
        locked(&received.spans).extend(spans);
    }
    let partial_success = ExportTracePartialSuccess {
        rejected_spans: received.rejects,
        error_message: "no room in the attic".to_owned(),
    };
    let answer = ExportTraceServiceResponse {
        partial_success: (received.rejects > 0).then_some(partial_success),
    };
    answer.encode_to_vec().into_response()
}

fn received_span(span: Span, process: &BTreeMap<String, String>) -> ReceivedSpan {
    let status = span.status.unwrap_or_default();
    ReceivedSpan {
        process: process.clone(),
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        name: span.name,
        time_ns: (span.start_time_unix_nano, span.end_time_unix_nano),
        attributes: texts(span.attributes),
        events: span.events.into_iter().map(|event| event.name).collect(),
        has_failed: status.code == SpanStatus::Error as i32,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(pairs: Vec<KeyValue>) -> BTreeMap<String, String> {
    let pairs = pairs.into_iter();
    pairs.map(|pair| (pair.key, text(pair.value))).collect()
}

fn text(value: Option<AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(any_value::Value::StringValue(text)) => text,
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        Some(any_value::Value::BoolValue(is_so)) => is_so.to_string(),
        Some(any_value::Value::DoubleValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}
