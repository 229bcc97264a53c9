//! `hearth probe`: what a health check and `helm test` see of an endpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use hearth_tests::{Up, free_port, hearth, run};
use serde_json::json;

/// A proxy where nobody listens: whatever goes through it fails.
const DEAD_PROXY: &str = "http://127.0.0.1:9";

/// Runs `hearth probe`; returns exit code, output and errors.
fn probe(arguments: &[&str]) -> (i32, String, String) {
    run(hearth()
        .arg("probe")
        .args(arguments)
        .envs(["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"].map(|name| (name, DEAD_PROXY))))
}

#[test]
fn a_model_is_asked_without_a_proxy_and_its_answer_printed() {
    let up = Up::demo();
    for url in [up.base(), up.v1()] {
        let (code, answer, errors) = probe(&[&url, "--ask", "What is Hearth?"]);
        assert_eq!(code, 0, "{errors}");
        assert!(
            answer.contains("Hearth") && answer.ends_with('\n'),
            "{answer}"
        );
    }
    let health = format!("{}/health", up.base());
    let (code, _, errors) = probe(&[&health]);
    assert_eq!(code, 0, "{errors}");
    let (code, answer, errors) = probe(&[&up.v1(), "--ask", "x", "--model", "nosuch"]);
    assert_eq!((code, answer.as_str()), (1, ""), "{errors}");
    assert!(errors.contains("nosuch"), "{errors}");
}

#[test]
fn an_endpoint_that_is_not_there_is_told() {
    let url = format!("http://127.0.0.1:{}", free_port());
    let (code, _, errors) = probe(&[&url, "--ask", "x", "--wait", "1s"]);
    assert_eq!(code, 1);
    assert!(
        errors.contains(&format!("{url}/v1 cannot be reached")),
        "{errors}"
    );
    let (code, _, errors) = probe(&["demo:8080", "--ask", "x"]);
    assert_eq!(code, 1);
    assert!(errors.contains("write it as http://host:8080"), "{errors}");
    let (code, _, errors) = probe(&[&url, "--model", "x"]);
    assert_eq!(code, 2);
    assert!(errors.contains("--ask"), "{errors}");
}

/// An endpoint whose first answers to questions are refusals, with a status and in words.
struct Endpoint {
    url: String,
    asked: Arc<AtomicUsize>,
}

impl Endpoint {
    /// Refuses this often, as one that starts, and then streams these lines.
    async fn start(refusals: usize, lines: &'static str) -> Self {
        let starts = json!({"error": {"message": "the pool starts"}}).to_string();
        Self::refusing(refusals, (StatusCode::SERVICE_UNAVAILABLE, starts), lines).await
    }

    async fn refusing(refusals: usize, refusal: (StatusCode, String), lines: &'static str) -> Self {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let answer = move |State(asked): State<Arc<AtomicUsize>>| async move {
            match asked.fetch_add(1, Ordering::Relaxed) < refusals {
                true => refusal.into_response(),
                false => lines.into_response(),
            }
        };
        let models = || async { json!({"data": [{"id": "demo"}]}).to_string() };
        let router = Router::new()
            .route("/v1/models", get(models))
            .route("/v1/chat/completions", post(answer))
            .with_state(count);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("its address"));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, asked }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

const ANSWER: &str =
    "data: {\"choices\": [{\"delta\": {\"content\": \"fire\"}}]}\n\ndata: [DONE]\n\n";
const CUT: &str = "data: {\"choices\": [{\"delta\": {\"content\": \"fi\"}}]}\n\n";
const NOTHING: &str = "data: {\"choices\": [{\"delta\": {}}]}\n\ndata: [DONE]\n\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_starts_is_waited_for_if_asked_to() {
    let endpoint = Endpoint::start(2, ANSWER).await;
    let (code, answer, errors) = probe(&[&endpoint.url, "--ask", "x"]);
    assert_eq!((code, answer.as_str()), (1, ""), "{errors}");
    assert!(errors.contains("the pool starts"), "{errors}");
    let (code, answer, errors) = probe(&[&endpoint.url, "--ask", "x", "--wait", "10m"]);
    assert_eq!((code, answer.as_str()), (0, "fire\n"), "{errors}");
    assert_eq!(endpoint.asked(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_that_stays_one_is_told_at_once_with_what_to_do() {
    let unknown = json!({"error": {"message": "demo is not served here"}}).to_string();
    let refusals = [
        (401, String::new(), ["has a key", "--api-key KEY"]),
        (
            403,
            "<h1>no entry</h1>".to_owned(),
            ["403 Forbidden: <h1>no entry", "to let you in"],
        ),
        (
            404,
            "page not found\n".to_owned(),
            ["404 Not Found: page not found", "http://host:8080/v1"],
        ),
        (404, unknown, ["demo is not served here", ""]),
    ];
    for (status, text, words) in refusals {
        let status = StatusCode::from_u16(status).expect("a status");
        let endpoint = Endpoint::refusing(usize::MAX, (status, text), ANSWER).await;
        let (code, answer, errors) = probe(&[&endpoint.url, "--ask", "x", "--wait", "1m"]);
        assert_eq!((code, answer.as_str()), (1, ""), "{errors}");
        for words in words {
            assert!(errors.contains(words), "no {words:?} in {errors}");
        }
        assert_eq!(endpoint.asked(), 1, "{status} was asked again");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_breaks_off_or_is_none_is_a_failure() {
    let endpoint = Endpoint::start(0, CUT).await;
    let (code, answer, errors) = probe(&[&endpoint.url, "--ask", "x", "--wait", "10m"]);
    assert_eq!((code, answer.as_str()), (1, "fi"), "{errors}");
    assert!(errors.contains("the answer was cut off"), "{errors}");
    // What was printed is not asked for again.
    assert_eq!(endpoint.asked(), 1);
    let endpoint = Endpoint::start(0, NOTHING).await;
    let (code, answer, errors) = probe(&[&endpoint.url, "--ask", "x"]);
    assert_eq!((code, answer.as_str()), (1, ""), "{errors}");
    assert!(errors.contains("demo answered nothing"), "{errors}");
}
