//! The kubelet's probes of a worker.

use std::time::Duration;

/// Probes a worker's health as a kubelet does: SERVING is 1, NOT_SERVING 2; `None` while nothing answers.
///
/// # Panics
/// When the answer is none of the health service.
pub async fn probe(address: &str, service: &str) -> Option<u8> {
    let mut message = vec![0x0a, service.len() as u8];
    message.extend(service.as_bytes());
    let mut body = vec![0, 0, 0, 0, message.len() as u8];
    body.extend(message);
    let client = reqwest::Client::builder()
        .http2_prior_knowledge()
        .build()
        .unwrap_or_else(|error| panic!("client: {error}"));
    let request = client
        .post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .timeout(Duration::from_secs(1))
        .body(body);
    let answer = request.send().await.ok()?.bytes().await.ok()?;
    assert_eq!(answer[..6], [0, 0, 0, 0, 2, 8], "{answer:?}");
    answer.get(6).copied()
}
