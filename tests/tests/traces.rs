//! Traces by OTLP: one request is one trace over all processes, and a collector that is missing is nobody's trouble.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_tests::{OtlpReceiver, ReceivedSpan, Up, UpOptions, chat_body, free_port};
use rustix::process::Signal;
use serde_json::{Value, json};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const RANKS: [&str; 3] = ["gateway-0", "prefill-0", "decode-0"];

fn up(variables: &[(&str, &str)]) -> UpOptions {
    let variables = variables.iter();
    UpOptions {
        environment: variables
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        ..UpOptions::default()
    }
}

/// Asks, with the trace of a client, and returns the answer: a prompt long enough for the prefill worker.
async fn ask(up: &Up, room: &str) -> Value {
    let question = format!("The {room} has a server and a laptop. ").repeat(120);
    let mut body = chat_body("hearth-demo", &question, 16);
    body["stream"] = json!(false);
    body["logprobs"] = json!(false);
    if let Some(body) = body.as_object_mut() {
        body.remove("stream_options");
    }
    let request = reqwest::Client::new()
        .post(format!("{}/chat/completions", up.v1()))
        .header("traceparent", format!("00-{TRACE}-{CALLER}-01"))
        .json(&body);
    let response = request.send().await.expect("a response");
    assert_eq!(response.status(), 200);
    let answer: Value = response.json().await.expect("JSON");
    json!({"choices": answer["choices"], "usage": answer["usage"]})
}

/// The span of this name of a rank; there is one, as long as one request was sent.
fn span(spans: &[ReceivedSpan], (rank, name): Place) -> &ReceivedSpan {
    let mut found = spans
        .iter()
        .filter(|span| span.process["service.instance.id"] == rank && span.name == name);
    let span = found.next();
    assert!(found.next().is_none(), "{rank} has several {name:?}");
    span.unwrap_or_else(|| panic!("{rank} has no {name:?}: {spans:#?}"))
}

/// All that the processes have logged, with each line's file.
fn log_lines(up: &Up) -> Vec<(String, String)> {
    fn read(directory: &Path, lines: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                read(&path, lines);
            } else if name.ends_with(".log") {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                lines.extend(text.lines().map(|line| (name.clone(), line.to_owned())));
            }
        }
    }
    let mut lines = Vec::new();
    read(up.state_dir(), &mut lines);
    lines
}

/// How often a rank has logged a line with these words.
fn said(up: &Up, rank: &str, words: &str) -> usize {
    let lines = log_lines(up).into_iter();
    let of_rank = lines.filter(|(file, _)| file.starts_with(rank));
    of_rank.filter(|(_, line)| line.contains(words)).count()
}

/// Whether a rank has a thread that sends traces.
fn sends_traces(up: &Up, rank: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", up.pid(rank))).expect("threads");
    let names = tasks.flatten().filter_map(|task| {
        // A thread may end meanwhile.
        std::fs::read_to_string(task.path().join("comm")).ok()
    });
    names
        .into_iter()
        .any(|name| name.starts_with("OpenTelemetry"))
}

/// A rank and the name of a span there.
type Place = (&'static str, &'static str);

const REQUEST: Place = ("gateway-0", "POST /v1/chat/completions");
const CALL: Place = ("gateway-0", "hearth.v1.Decode/Generate");
const DECODE: Place = ("decode-0", "hearth.v1.Decode/Generate");
const FETCH: Place = ("decode-0", "hearth.v1.Prefill/Prefill");
const PREFILL: Place = ("prefill-0", "hearth.v1.Prefill/Prefill");

/// The spans of a request that a prefill worker reads, each with its parent; that of the request has the client's.
const SPANS: [(Place, Option<Place>); 13] = [
    (REQUEST, None),
    (("gateway-0", "prepare"), Some(REQUEST)),
    (("gateway-0", "wait for a worker"), Some(REQUEST)),
    (CALL, Some(REQUEST)),
    (DECODE, Some(CALL)),
    (("decode-0", "queue"), Some(DECODE)),
    (("decode-0", "prompt"), Some(DECODE)),
    (FETCH, Some(("decode-0", "prompt"))),
    (("decode-0", "KV transfer"), Some(FETCH)),
    (("decode-0", "generation"), Some(DECODE)),
    (PREFILL, Some(FETCH)),
    (("prefill-0", "queue"), Some(PREFILL)),
    (("prefill-0", "prompt"), Some(PREFILL)),
];

#[tokio::test]
async fn one_request_is_one_trace_of_three_processes() {
    let collector = OtlpReceiver::start();
    let up = Up::start(&up(&[
        (ENDPOINT, collector.endpoint()),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-lab=attic"),
        ("OTEL_RESOURCE_ATTRIBUTES", "team=search"),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
        ("RUST_LOG", "warn,hearth=debug"),
    ]));
    assert!(RANKS.iter().all(|rank| sends_traces(&up, rank)));
    let answer = ask(&up, "office").await;
    let spans = collector.wait_for(|spans| spans.len() >= SPANS.len());
    assert_eq!(spans.len(), SPANS.len(), "{spans:#?}");
    assert_eq!(collector.header("x-lab").as_deref(), Some("attic"));
    for (place, parent) in SPANS {
        let its = span(&spans, place);
        let parent = parent.map_or(CALLER, |parent| &span(&spans, parent).id);
        assert_eq!(its.parent, parent, "{its:#?}");
        assert_eq!(its.trace, TRACE, "{its:#?}");
        assert!(!its.has_failed, "{its:#?}");
        assert!(its.time_ns.0 <= its.time_ns.1, "{its:#?}");
        let (role, _) = place.0.split_once('-').expect("a rank");
        assert_eq!(its.process["service.name"], format!("hearth-{role}"));
        assert_eq!(its.process["service.namespace"], "demo");
        assert_eq!(its.process["team"], "search");
    }
    check_what_is_noted(&spans, &answer["usage"]);
    for (rank, words) in [
        ("decode-0", "request accepted"),
        ("prefill-0", "prefill accepted"),
    ] {
        let lines = log_lines(&up);
        let mut lines = lines.iter().filter(|(file, _)| file.starts_with(rank));
        let named = lines.any(|(_, line)| line.contains(words) && line.contains(TRACE));
        assert!(named, "{rank} does not name the trace: {}", up.logs());
    }
}

/// Checks events, tokens and bytes.
fn check_what_is_noted(spans: &[ReceivedSpan], usage: &Value) {
    assert_eq!(span(spans, CALL).events, ["first token"]);
    assert_eq!(span(spans, ("prefill-0", "prompt")).events, ["first KV"]);
    let sent = &span(spans, PREFILL).attributes["hearth.kv.bytes"];
    let taken = &span(spans, ("decode-0", "KV transfer")).attributes["hearth.kv.bytes"];
    assert_eq!(sent, taken);
    assert_ne!(sent, "0");
    let (input, output) = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens");
    for (place, key, field) in [
        (REQUEST, input, "prompt_tokens"),
        (REQUEST, output, "completion_tokens"),
        (PREFILL, input, "prompt_tokens"),
        (DECODE, input, "prompt_tokens"),
        (("decode-0", "generation"), output, "completion_tokens"),
    ] {
        let noted = &span(spans, place).attributes[key];
        assert_eq!(*noted, usage[field].to_string(), "{place:?}");
    }
}

#[tokio::test]
async fn without_a_collector_nothing_is_sent_and_the_answers_are_the_same() {
    // The standard's default address is not taken for one that was asked for.
    let off = Up::start(&up(&[("OTEL_TRACES_SAMPLER", "always_on"), (ENDPOINT, "")]));
    for rank in RANKS {
        assert!(!sends_traces(&off, rank), "{rank}");
    }
    let expected = ask(&off, "office").await;
    drop(off);
    let collector = OtlpReceiver::start();
    let disabled = [
        (ENDPOINT, collector.endpoint()),
        ("OTEL_SDK_DISABLED", "true"),
    ];
    let off = Up::start(&up(&disabled));
    assert_eq!(ask(&off, "office").await, expected);
    assert!(RANKS.iter().all(|rank| !sends_traces(&off, rank)));
    drop(off);
    assert!(collector.spans().is_empty(), "{:#?}", collector.spans());

    // One that refuses connections: said once a process.
    let refused = format!("http://127.0.0.1:{}", free_port());
    let lost = Up::start(&up(&[
        (ENDPOINT, &refused),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
    ]));
    for _ in 0..3 {
        assert_eq!(ask(&lost, "office").await["choices"], expected["choices"]);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    while said(&lost, "gateway-0", "traces cannot be delivered") == 0 {
        assert!(Instant::now() < deadline, "nobody says so: {}", lost.logs());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(said(&lost, "gateway-0", "traces cannot be delivered"), 1);
    drop(lost);

    // One that takes connections and never answers: more spans than there is room for, and an end all the same.
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let deaf = format!("http://{}", deaf.local_addr().expect("an address"));
    let mut hung = Up::start(&up(&[
        (ENDPOINT, &deaf),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000"),
        ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "4"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2"),
    ]));
    for _ in 0..5 {
        assert_eq!(ask(&hung, "office").await["choices"], expected["choices"]);
    }
    hung.signal_up(Signal::INT);
    assert_eq!(hung.wait(), 0, "{}", hung.output());
    assert_eq!(said(&hung, "gateway-0", "spans were not delivered"), 1);
}

#[test]
fn an_address_that_is_none_is_said_at_the_start() {
    let mut wrong = Up::spawn(&up(&[(ENDPOINT, "collector:4318")]));
    wrong.wait_for_output("OTEL_EXPORTER_OTLP_ENDPOINT is \"collector:4318\": not a URL");
    assert_ne!(wrong.wait(), 0, "{}", wrong.output());
}

#[test]
fn headers_that_cannot_be_sent_are_said_at_the_start_without_their_keys() {
    let mut wrong = Up::spawn(&up(&[
        (ENDPOINT, "http://127.0.0.1:9"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api key=hush"),
    ]));
    wrong.wait_for_output("OTEL_EXPORTER_OTLP_HEADERS cannot be used: its part 1 begins with no");
    assert_ne!(wrong.wait(), 0, "{}", wrong.output());
    assert!(!wrong.output().contains("hush"), "{}", wrong.output());
}

#[tokio::test]
async fn spans_that_a_collector_rejects_are_counted_as_lost() {
    let collector = OtlpReceiver::rejecting(1);
    let mut up = Up::start(&up(&[
        (ENDPOINT, collector.endpoint()),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
    ]));
    ask(&up, "office").await;
    collector.wait_for(|spans| spans.len() >= SPANS.len());
    // What the last batches were answered is known once the processes have ended.
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 0, "{}", up.output());
    for rank in RANKS {
        let words = [
            "the collector rejects spans",
            "no room in the attic",
            "rejected=1",
        ];
        for words in words {
            assert_eq!(said(&up, rank, words), 1, "{rank}: {words}: {}", up.logs());
        }
        assert_eq!(said(&up, rank, "spans were not delivered"), 1, "{rank}");
    }
    assert_eq!(said(&up, "gateway-0", "traces are delivered again"), 0);
}
