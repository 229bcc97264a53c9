//! Requests from web pages of other origins, as browsers send them.

use hearth_server::CorsOrigin;
use http::{HeaderMap, Method, StatusCode};
use serde_json::json;

use crate::support::{FakeWorker, Running, chat_body, gateway};

const CHAT: &str = "/v1/chat/completions";
const PAGE: &str = "http://localhost:3000";

async fn gateway_for(worker: &FakeWorker, origins: &[&str]) -> Running {
    let origins: Vec<CorsOrigin> = origins.iter().map(|text| text.parse().unwrap()).collect();
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "the-key\n").unwrap();
    gateway(&[worker], |config| {
        config.cors_origins = origins;
        config.api_keys = Some(keys.path().to_owned());
    })
    .await
}

/// Sends a browser's preflight request: without a key, asking whether one may be sent.
async fn preflight(gateway: &Running, origin: &str) -> (StatusCode, HeaderMap) {
    let request = gateway
        .http
        .request(Method::OPTIONS, format!("{}{CHAT}", gateway.url))
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header(
            "access-control-request-headers",
            "authorization,content-type,x-stainless-lang",
        );
    let response = request.send().await.unwrap();
    (response.status(), response.headers().clone())
}

fn allowed(headers: &HeaderMap) -> Option<&str> {
    headers.get("access-control-allow-origin")?.to_str().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_a_named_origin_may_ask_and_read() {
    let worker = FakeWorker::start();
    let gateway = gateway_for(&worker, &["https://other.example", PAGE]).await;
    let (status, headers) = preflight(&gateway, PAGE).await;
    assert!(status.is_success(), "{status}");
    assert_eq!(allowed(&headers), Some(PAGE));
    let value = |name: &str| headers[name].to_str().unwrap().to_lowercase();
    assert!(value("access-control-allow-methods").contains("post"));
    for header in ["authorization", "content-type", "x-stainless-lang"] {
        assert!(value("access-control-allow-headers").contains(header));
    }
    for (key, expected) in [
        ("the-key", StatusCode::OK),
        ("wrong", StatusCode::UNAUTHORIZED),
    ] {
        let request = gateway
            .http
            .post(format!("{}{CHAT}", gateway.url))
            .header("origin", PAGE)
            .bearer_auth(key)
            .json(&chat_body("hello", json!({})));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), expected);
        // Without it, the page could not read the error.
        assert_eq!(allowed(response.headers()), Some(PAGE));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_origins_are_not_allowed() {
    let worker = FakeWorker::start();
    let named = gateway_for(&worker, &[PAGE]).await;
    let (_, headers) = preflight(&named, "https://elsewhere.example").await;
    assert_eq!(allowed(&headers), None);
    let any = gateway_for(&worker, &["*"]).await;
    let (_, headers) = preflight(&any, "https://elsewhere.example").await;
    assert_eq!(allowed(&headers), Some("*"));
    let none = gateway_for(&worker, &[]).await;
    let (status, headers) = preflight(&none, PAGE).await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(allowed(&headers), None);
}
