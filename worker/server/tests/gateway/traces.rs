//! Traces: what the gateway makes of the client's, and what it passes on.

use std::collections::BTreeMap;

use hearth_server::GatewayConfig;
use hearth_transport::spans::{SpanContext, Tracer};
use hearth_transport::tonic::Status;
use opentelemetry::trace::{SpanId, SpanKind, Status as SpanStatus, TracerProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use serde_json::{Value, json};

use crate::support::{FakeWorker, Fault, Running, chat_body, eventually, gateway};

const CHAT: &str = "/v1/chat/completions";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// Receives the spans of one gateway.
struct Spans {
    exporter: InMemorySpanExporter,
    provider: SdkTracerProvider,
}

impl Spans {
    fn start() -> Self {
        let exporter = InMemorySpanExporter::default();
        let builder = SdkTracerProvider::builder();
        let provider = builder.with_simple_exporter(exporter.clone()).build();
        Self { exporter, provider }
    }

    fn receive(&self) -> impl FnOnce(&mut GatewayConfig) + use<> {
        let tracer = Tracer::recording(self.provider.tracer("test"));
        |config| config.tracer = tracer
    }

    /// Waits for the request's span, which ends last, and returns all.
    async fn of_a_request(&self) -> Vec<SpanData> {
        let spans = || self.exporter.get_finished_spans().unwrap();
        let is_request = |span: &SpanData| span.span_kind == SpanKind::Server;
        eventually(|| async { spans().iter().any(is_request) }).await;
        let spans = spans();
        self.exporter.reset();
        spans
    }
}

fn named<'a>(spans: &'a [SpanData], name: &str) -> Vec<&'a SpanData> {
    spans.iter().filter(|span| span.name == name).collect()
}

fn one<'a>(spans: &'a [SpanData], name: &str) -> &'a SpanData {
    let found = named(spans, name);
    assert_eq!(found.len(), 1, "{name} in {spans:?}");
    found[0]
}

fn attributes(span: &SpanData) -> BTreeMap<String, String> {
    let pairs = span.attributes.iter();
    let pairs: Vec<_> = pairs
        .map(|pair| (pair.key.to_string(), pair.value.to_string()))
        .collect();
    let all = pairs.iter().cloned().collect::<BTreeMap<_, _>>();
    assert_eq!(all.len(), pairs.len(), "a key is there twice: {pairs:?}");
    all
}

/// Sends a request of the client's trace, with `flags`.
async fn send(gateway: &Running, flags: &str, body: Value) -> reqwest::Response {
    let request = gateway.http.post(format!("{}{CHAT}", gateway.url));
    let request = request
        .header("traceparent", format!("00-{TRACE}-{CALLER}-{flags}"))
        .header("tracestate", "vendor=1");
    request.json(&body).send().await.unwrap()
}

/// The span that the last call to a worker came from.
fn caller(worker: &FakeWorker) -> Option<SpanContext> {
    let calls = worker.behaviour.calls.lock().unwrap();
    calls.last().unwrap().1.trace.clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_and_the_requests_id_are_passed_on() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let response = send(&gateway, "01", chat_body("say:x", json!({}))).await;
    let id = response.headers()["x-request-id"].to_str().unwrap();
    let id = id.to_owned();
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["id"], format!("chatcmpl-{id}"));
    let (call, context) = worker.behaviour.calls.lock().unwrap()[0].clone();
    let trace = context.trace.unwrap();
    assert_eq!(trace.trace_id().to_string(), TRACE);
    // The gateway adds no span of which nobody would hear.
    assert_eq!(trace.span_id().to_string(), CALLER);
    assert!(trace.is_sampled());
    assert_eq!(trace.trace_state().header(), "vendor=1");
    assert_eq!(
        context.request_id.as_deref(),
        Some(call.request_id.as_str())
    );
    assert!(call.request_id.contains(&id));
    let request = gateway.http.post(format!("{}{CHAT}", gateway.url));
    let request = request.header("traceparent", "nonsense");
    let body = chat_body("say:x", json!({}));
    request.json(&body).send().await.unwrap();
    assert_eq!(caller(&worker), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requests_spans_are_part_of_the_clients_trace() {
    let (worker, spans) = (FakeWorker::start(), Spans::start());
    let gateway = gateway(&[&worker], spans.receive()).await;
    send(&gateway, "01", chat_body("say:four", json!({}))).await;
    let told = caller(&worker).unwrap();
    let spans = spans.of_a_request().await;
    for span in &spans {
        assert_eq!(span.span_context.trace_id().to_string(), TRACE, "{span:?}");
        assert_eq!(span.status, SpanStatus::Unset, "{span:?}");
    }
    let request = one(&spans, "POST /v1/chat/completions");
    assert_eq!(request.parent_span_id.to_string(), CALLER);
    let own = request.span_context.span_id();
    let call = one(&spans, "hearth.v1.Decode/Generate");
    for part in [
        one(&spans, "prepare"),
        one(&spans, "wait for a worker"),
        call,
    ] {
        assert_eq!(part.parent_span_id, own, "{part:?}");
        assert!(part.start_time >= request.start_time && part.end_time <= request.end_time);
    }
    assert_eq!(told.span_id(), call.span_context.span_id());
    assert_eq!(told.trace_state().header(), "vendor=1");
    assert_eq!(call.events[0].name, "first token");
    let noted = attributes(request);
    assert_eq!(noted["http.response.status_code"], "200");
    // Four bytes, a token each, and the end token.
    assert_eq!(noted["gen_ai.usage.output_tokens"], "5");
    assert!(noted["hearth.request.id"].starts_with("chatcmpl-"));
    assert_eq!(
        attributes(call)["server.address"],
        worker.endpoint().to_string()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_decides_whether_its_trace_is_recorded_and_others_begin_one() {
    let (worker, spans) = (FakeWorker::start(), Spans::start());
    let gateway = gateway(&[&worker], spans.receive()).await;
    send(&gateway, "00", chat_body("say:x", json!({}))).await;
    let told = caller(&worker).unwrap();
    assert_eq!(told.trace_id().to_string(), TRACE);
    assert!(!told.is_sampled());
    gateway.chat("x", json!({})).await;
    let spans = spans.of_a_request().await;
    let request = one(&spans, "POST /v1/chat/completions");
    assert_eq!(request.parent_span_id, SpanId::INVALID);
    assert_ne!(request.span_context.trace_id().to_string(), TRACE);
    assert_eq!(
        named(&spans, "hearth.v1.Decode/Generate").len(),
        1,
        "that of the second request alone: {spans:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_moves_has_a_span_for_each_worker() {
    let (worker, spans) = (FakeWorker::start(), Spans::start());
    worker.behaviour.fault(Fault::Cut(2));
    let gateway = gateway(&[&worker], spans.receive()).await;
    let body = chat_body("say:four", json!({"stream": true}));
    let text = send(&gateway, "01", body).await.text().await.unwrap();
    assert!(text.contains("[DONE]"), "{text}");
    let spans = spans.of_a_request().await;
    let calls = named(&spans, "hearth.v1.Decode/Generate");
    assert_eq!(calls.len(), 2, "{spans:?}");
    assert!(matches!(calls[0].status, SpanStatus::Error { .. }));
    assert_eq!(attributes(calls[0])["hearth.attempt"], "1");
    assert_eq!(calls[1].status, SpanStatus::Unset);
    assert_eq!(attributes(calls[1])["hearth.attempt"], "2");
    assert_eq!(named(&spans, "wait for a worker").len(), 2);
    let request = one(&spans, "POST /v1/chat/completions");
    assert_eq!(request.status, SpanStatus::Unset, "nothing was lost");
    let moves: Vec<_> = request.events.iter().collect();
    assert_eq!(moves.len(), 1, "{moves:?}");
    assert_eq!(moves[0].name, "moves to another worker");
    let kept = moves[0].attributes.iter();
    let kept = kept.map(|pair| (pair.key.as_str(), pair.value.to_string()));
    assert!(
        kept.clone()
            .any(|pair| pair == ("hearth.tokens_kept", "2".to_owned()))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_wrong_is_noted_with_whose_fault_it_is() {
    let (worker, spans) = (FakeWorker::start(), Spans::start());
    let gateway = gateway(&[&worker], spans.receive()).await;
    let (status, _) = gateway.chat("x", json!({"temperature": -1})).await;
    assert_eq!(status, 400);
    let of_client = spans.of_a_request().await;
    let request = one(&of_client, "POST /v1/chat/completions");
    assert_eq!(request.status, SpanStatus::Unset);
    let noted = attributes(request);
    assert_eq!(noted["http.response.status_code"], "400");
    assert!(!noted["error.type"].is_empty());
    for _ in 0..5 {
        worker
            .behaviour
            .fault(Fault::Status(0, Status::internal("broken")));
    }
    let (status, _) = gateway.chat("x", json!({})).await;
    assert_eq!(status, 502);
    let of_ours = spans.of_a_request().await;
    let request = one(&of_ours, "POST /v1/chat/completions");
    assert!(matches!(request.status, SpanStatus::Error { .. }));
    let noted = attributes(request);
    assert_eq!(noted["error.type"], "workers_failed");
    assert_eq!(noted["http.response.status_code"], "502");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_client_leaves_ends_its_spans() {
    let (worker, spans) = (FakeWorker::start(), Spans::start());
    crate::failover::paced(&worker, 50);
    let gateway = gateway(&[&worker], spans.receive()).await;
    let body = chat_body("tell me", json!({"stream": true, "max_tokens": 900}));
    let mut events = gateway.open(CHAT, body).await;
    events.next_text().await.unwrap();
    drop(events);
    let spans = spans.of_a_request().await;
    let request = one(&spans, "POST /v1/chat/completions");
    assert_eq!(attributes(request)["error.type"], "cancelled");
    assert_eq!(named(&spans, "hearth.v1.Decode/Generate").len(), 1);
}
