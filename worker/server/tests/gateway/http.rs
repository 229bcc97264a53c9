//! The HTTP side: routes, limits, keys, metrics, HTTPS.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hearth_server::{Gateway, GatewayConfig, HttpsFiles};
use serde_json::{Value, json};

use crate::support::model::model_dir;
use crate::support::{FakeWorker, MODEL, Running, chat_body, gateway, unready_gateway};

const CHAT: &str = "/v1/chat/completions";

/// Sends raw bytes and reads to the end.
async fn raw(gateway: &Running, request: Vec<u8>) -> String {
    let address = gateway.address;
    let exchange = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        // A server that has answered early need not read the rest.
        let _ = stream.write_all(&request);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

fn post(headers: &str, body: &[u8]) -> Vec<u8> {
    let mut request = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    request
}

/// Status and error object of a raw answer.
fn error_of(answer: &str) -> (u16, Value) {
    let status = answer
        .split(' ')
        .nth(1)
        .unwrap_or_default()
        .parse()
        .unwrap_or(0);
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body)
        .unwrap_or_default();
    let value: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"));
    (status, value["error"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.served_name = "Org/Fake-7B".to_owned()
    })
    .await;
    let (status, list) = gateway.get("/v1/models").await;
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!((status, &list["object"]), (200, &json!("list")));
    assert_eq!(
        (&list["data"][0]["id"], &list["data"][0]["object"]),
        (&json!("Org/Fake-7B"), &json!("model"))
    );
    for path in ["/v1/models/Org/Fake-7B", "/v1/models/Org%2FFake-7B"] {
        let (status, one) = gateway.get(path).await;
        assert_eq!(
            (status, serde_json::from_str::<Value>(&one).unwrap()),
            (200, list["data"][0].clone())
        );
    }
    let (status, other) = gateway.get("/v1/models/gpt-9").await;
    assert_eq!(status, 404);
    assert!(
        other.contains("this endpoint serves 'Org/Fake-7B'") && other.contains("model_not_found"),
        "{other}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_paths_methods_and_types_are_told() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (status, text) = gateway.get("/v1/embeddings").await;
    assert_eq!(status, 404);
    assert!(
        text.contains("there is no GET /v1/embeddings")
            && text.contains("POST /v1/chat/completions"),
        "{text}"
    );
    let response = gateway
        .http
        .get(format!("{}{CHAT}", gateway.url))
        .send()
        .await
        .unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["allow"]),
        (405, &"POST".parse().unwrap())
    );
    assert!(
        response
            .text()
            .await
            .unwrap()
            .contains("does not accept GET")
    );

    for (kind, words) in [
        (
            "application/x-www-form-urlencoded",
            "Content-Type application/x-www-form-urlencoded",
        ),
        ("text/plain", "send application/json"),
        ("application/json; charset=latin1", "in UTF-8"),
    ] {
        let answer = raw(&gateway, post(&format!("Content-Type: {kind}\r\n"), b"{}")).await;
        let (status, error) = error_of(&answer);
        assert_eq!(
            (status, &error["code"]),
            (415, &json!("unsupported_media_type")),
            "{kind}"
        );
        assert!(
            error["message"].as_str().unwrap().contains(words),
            "{error}"
        );
    }
    let answer = raw(
        &gateway,
        post(
            "Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
            b"{}",
        ),
    )
    .await;
    assert_eq!(error_of(&answer).0, 415);
    for headers in [
        "",
        "Content-Type: application/json; charset=UTF-8\r\n",
        "Content-Encoding: Identity\r\n",
    ] {
        let body = chat_body("say:x", json!({})).to_string();
        let answer = raw(&gateway, post(headers, body.as_bytes())).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_no_json_are_told_where() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let deep = "[".repeat(100_000);
    let cases: [(&[u8], &str, &[&str]); 7] = [
        (
            b"{\"model\": \"x\",\n \"n\": }",
            "invalid_json",
            &["line 2, column 7", "expected value"],
        ),
        (
            b"{\"model\": \"x\"",
            "invalid_json",
            &["line 1, column 13", "EOF"],
        ),
        (
            b"{} {}",
            "invalid_json",
            &["line 1, column 4", "trailing characters"],
        ),
        (
            b"{\"model\": \"\xff\"}",
            "invalid_utf8",
            &["byte 11 is 0xff", "UTF-8"],
        ),
        (b"", "invalid_json", &["is empty"]),
        (b"{\"n\": 1e999}", "invalid_json", &["out of range"]),
        (deep.as_bytes(), "invalid_json", &["recursion limit"]),
    ];
    for (body, code, words) in cases {
        let (status, error) =
            error_of(&raw(&gateway, post("Content-Type: application/json\r\n", body)).await);
        assert_eq!((status, &error["code"]), (400, &json!(code)), "{error}");
        let message = error["message"].as_str().unwrap();
        for word in words {
            assert!(message.contains(word), "{word}: {message}");
        }
        assert!(!message.contains(" at line "), "{message}");
    }
    for (body, kind) in [
        ("[1]", "an array"),
        ("[]", "an array"),
        ("null", "null"),
        ("7", "a number"),
    ] {
        let (status, error) = error_of(&raw(&gateway, post("", body.as_bytes())).await);
        assert_eq!(
            (status, &error["code"]),
            (400, &json!("invalid_json")),
            "{body}"
        );
        assert_eq!(
            error["message"],
            format!("the request body is {kind}: it must be a JSON object")
        );
    }
    let half = chat_body("x", json!({}))
        .to_string()
        .replace("\"x\"", r#""\ud83d""#);
    let (_, error) = error_of(&raw(&gateway, post("", half.as_bytes())).await);
    assert_eq!(error["code"], "invalid_json");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains(r"\ud83d is half of a surrogate pair"),
        "{message}"
    );
    // Some editors put a byte order mark in front.
    let marked = format!("\u{feff}{}", chat_body("say:x", json!({})));
    let answer = raw(&gateway, post("", marked.as_bytes())).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_megabytes_are_refused_unread() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    // Announced: the answer comes before a byte of the body.
    let announced = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 104857600\r\n\r\n"
    );
    let (status, error) = error_of(&raw(&gateway, announced.into_bytes()).await);
    assert_eq!((status, &error["code"]), (413, &json!("body_too_large")));
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("104857600 bytes: at most 8388608"),
        "{error}"
    );
    // Sent anyway.
    let sent = post("Content-Type: application/json\r\n", &vec![b' '; 100 << 20]);
    assert_eq!(error_of(&raw(&gateway, sent).await).0, 413);
    // Not announced: cut off at the limit.
    let mut chunked =
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            .into_bytes();
    for _ in 0..9 {
        chunked.extend(b"100000\r\n");
        chunked.extend(vec![b' '; 1 << 20]);
        chunked.extend(b"\r\n");
    }
    assert_eq!(error_of(&raw(&gateway, chunked).await).0, 413);
    // An ordinary client reads the answer too.
    let response = gateway
        .http
        .post(format!("{}{CHAT}", gateway.url))
        .body(vec![b' '; 20 << 20])
        .send()
        .await;
    assert_eq!(response.unwrap().status(), 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_and_slow_bodies_have_limits() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.limits.header_timeout = Duration::from_millis(300);
        config.limits.body_timeout = Duration::from_millis(300);
    })
    .await;
    let many: String = (0..200).map(|i| format!("X-{i}: y\r\n")).collect();
    assert!(
        raw(&gateway, post(&many, b"{}"))
            .await
            .starts_with("HTTP/1.1 431")
    );
    let long = format!("X-Long: {}\r\n", "y".repeat(100 << 10));
    assert!(
        raw(&gateway, post(&long, b"{}"))
            .await
            .starts_with("HTTP/1.1 431")
    );
    // Headers that never end: the connection is closed.
    assert_eq!(
        raw(&gateway, b"GET /health HTTP/1.1\r\nHost:".to_vec()).await,
        ""
    );
    let cut = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{");
    let (status, error) = error_of(&raw(&gateway, cut.into_bytes()).await);
    assert_eq!((status, &error["code"]), (408, &json!("body_timeout")));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_asked_for_and_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, "# ours\n\n key-one \nkey-two\n").unwrap();
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| config.api_keys = Some(path.clone())).await;
    let ask = |header: Option<&str>| {
        let mut request = gateway.http.get(format!("{}/v1/models", gateway.url));
        if let Some(header) = header {
            request = request.header("authorization", header);
        }
        async move { request.send().await.unwrap() }
    };
    for header in [
        None,
        Some("Bearer key-three"),
        Some("Bearer"),
        Some("Bearer "),
        Some("Basic key-one"),
        Some("Bearer key-on"),
        Some("Bearer # ours"),
    ] {
        let response = ask(header).await;
        assert_eq!(response.status(), 401, "{header:?}");
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let error: Value = response.json().await.unwrap();
        assert_eq!(
            (&error["error"]["type"], &error["error"]["code"]),
            (&json!("authentication_error"), &json!("invalid_api_key"))
        );
    }
    for header in ["Bearer key-one", "bearer key-two"] {
        assert_eq!(ask(Some(header)).await.status(), 200);
    }
    assert_eq!(gateway.post(CHAT, chat_body("x", json!({}))).await.0, 401);
    for open in ["/health", "/ready"] {
        assert_eq!(gateway.get(open).await.0, 200, "{open}");
    }
    // Metrics are served on their own port, with a key or without.
    let (status, text) = gateway.get("/metrics").await;
    assert_eq!(status, 404);
    assert!(
        text.contains("a port of their own") && !text.contains("hearth_"),
        "{text}"
    );
    assert!(gateway.metrics().await.contains("hearth_"));
    let api = gateway.metrics_url.replace("/metrics", "/v1/models");
    let response = gateway.http.get(api).send().await.unwrap();
    assert_eq!(response.status(), 404);
    tokio::time::sleep(Duration::from_millis(2100)).await;
    std::fs::write(&path, "key-three\n").unwrap();
    assert_eq!(ask(Some("Bearer key-three")).await.status(), 200);
    assert_eq!(ask(Some("Bearer key-one")).await.status(), 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_follow_what_was_served() {
    let worker = FakeWorker::start();
    worker
        .behaviour
        .cached_tokens
        .store(2, std::sync::atomic::Ordering::SeqCst);
    let gateway = gateway(&[&worker], |config| {
        config.predicted.ttft_seconds = Some(0.25)
    })
    .await;
    gateway.chat("say:abc", json!({})).await;
    gateway
        .post("/v1/completions", json!({"model": MODEL, "prompt": "go"}))
        .await;
    gateway.chat("x", json!({"n": 0})).await;
    let response = gateway.http.get(&gateway.metrics_url).send().await.unwrap();
    assert!(
        response.headers()["content-type"]
            .to_str()
            .unwrap()
            .starts_with("application/openmetrics-text")
    );
    let text = response.text().await.unwrap();
    assert!(text.ends_with("# EOF\n"));
    for (name, labels, value) in [
        (
            "gen_ai_server_time_to_first_token_seconds_count",
            "gen_ai_operation_name=\"chat\"",
            1.0,
        ),
        (
            "gen_ai_server_time_to_first_token_seconds_count",
            "text_completion",
            1.0,
        ),
        (
            "gen_ai_server_time_per_output_token_seconds_count",
            "gen_ai_request_model=\"fake-model\"",
            2.0,
        ),
        ("gen_ai_server_request_duration_seconds_count", "", 2.0),
        (
            "gen_ai_server_time_to_first_token_seconds_bucket",
            "le=\"120.0\"",
            2.0,
        ),
        (
            "gen_ai_server_time_per_output_token_seconds_bucket",
            "le=\"120.0\"",
            2.0,
        ),
        (
            "gen_ai_server_request_duration_seconds_bucket",
            "le=\"120.0\"",
            2.0,
        ),
        ("hearth_generated_tokens_total", "", 20.0),
        ("hearth_prompt_cached_tokens_total", "", 4.0),
        ("hearth_requests_running", "", 0.0),
        ("hearth_requests_queued", "", 0.0),
        ("hearth_kv_cache_usage_ratio", "", 0.25),
        ("hearth_plan_generation", "", 3.0),
        ("hearth_predicted_time_to_first_token_seconds", "", 0.25),
        (
            "hearth_worker_weight_read_bytes_total",
            "role=\"decode\"",
            4096.0,
        ),
        ("hearth_worker_ready", "", 1.0),
        (
            "hearth_worker_placement_info",
            r#"role="decode",cpus="2-3",numa_nodes="0",memory_numa_nodes="0",gpu_uuid="",shortfalls="1 of 2 \"threads\" compute",group="""#,
            1.0,
        ),
        (
            "hearth_worker_numa_bytes",
            r#"numa_node="0",kind="weights""#,
            700.0,
        ),
        ("hearth_choices_finished_total", "reason=\"stop\"", 1.0),
        ("hearth_choices_finished_total", "reason=\"length\"", 1.0),
        (
            "hearth_http_responses_total",
            "route=\"/v1/chat/completions\",status=\"400\"",
            1.0,
        ),
    ] {
        assert_eq!(
            gateway.metric(name, labels).await,
            value,
            "{name} {labels}\n{text}"
        );
    }
    assert!(gateway.metric("hearth_prompt_tokens_total", "").await > 10.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn https_is_served_with_a_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let (cert, key) = (dir.path().join("tls.crt"), dir.path().join("tls.key"));
    let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&cert, pair.cert.pem()).unwrap();
    std::fs::write(&key, pair.signing_key.serialize_pem()).unwrap();
    let worker = FakeWorker::start();
    let files = HttpsFiles {
        cert: cert.clone(),
        key,
    };
    let gateway = unready_gateway(&[&worker], |config| config.https = Some(files)).await;
    let answer = tokio::time::timeout(
        Duration::from_secs(10),
        https_get(gateway.address, pair.cert.der().to_vec()),
    );
    assert!(answer.await.unwrap().starts_with("HTTP/1.1 200"));

    let model = model_dir();
    let mut config = GatewayConfig::new(MODEL, model.path(), vec![worker.endpoint()]);
    config.https = Some(HttpsFiles {
        cert: cert.clone(),
        key: cert,
    });
    let error = Gateway::start(config).err().unwrap().to_string();
    assert!(
        error.contains("tls.crt") && error.contains("private key"),
        "{error}"
    );
}

async fn https_get(address: std::net::SocketAddr, der: Vec<u8>) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut roots = rustls::RootCertStore::empty();
    roots.add(der.into()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut stream = connector
        .connect("localhost".try_into().unwrap(), stream)
        .await
        .unwrap();
    stream
        .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_cannot_start_says_why() {
    let worker = FakeWorker::dormant();
    let model = model_dir();
    let start = |adjust: &dyn Fn(&mut GatewayConfig)| {
        let mut config = GatewayConfig::new(MODEL, model.path(), vec![worker.endpoint()]);
        adjust(&mut config);
        Gateway::start(config).err().unwrap().to_string()
    };
    assert!(start(&|config| config.decode.clear()).contains("no decode worker"));
    let error = start(&|config| config.context_length = Some(4096));
    assert!(
        error.contains("contextLength is 4096") && error.contains("512"),
        "{error}"
    );
    let error = start(&|config| config.model_dir = "/nowhere".into());
    assert!(error.contains("config.json"), "{error}");
    let error = start(&|config| config.api_keys = Some("/nowhere/keys".into()));
    assert!(
        error.contains("/nowhere/keys") && error.contains("one API key per line"),
        "{error}"
    );
    let empty = model.path().join("empty");
    std::fs::write(&empty, "# nothing\n").unwrap();
    let error = start(&|config| config.api_keys = Some(empty.clone()));
    assert!(error.contains("holds no API key"), "{error}");
    std::fs::remove_file(model.path().join("tokenizer.json")).unwrap();
    assert!(start(&|_| {}).contains("tokenizer.json"));
}
