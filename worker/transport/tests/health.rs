//! Answers to probes, from the start of a process to its end.

#![allow(clippy::unwrap_used)] // helpers of tests

use hearth_transport::{
    Clients, Health, LIVE, TransportError, Worker,
    tonic::Code,
    tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus},
};

async fn ask(worker: &Worker, service: &str) -> Result<ServingStatus, Code> {
    let request = HealthCheckRequest {
        service: service.to_owned(),
    };
    let answer = worker.health().check(request).await;
    answer
        .map(|answer| answer.into_inner().status())
        .map_err(|status| status.code())
}

#[tokio::test]
async fn probes_follow_a_process_from_start_to_end() {
    let health = Health::starting().await;
    let port = health.listen("127.0.0.1:0").unwrap();
    let endpoint = port.address().to_string().parse().unwrap();
    let worker = Clients::default().worker(&endpoint).unwrap();
    assert_eq!(ask(&worker, "").await, Ok(ServingStatus::NotServing));
    assert_eq!(ask(&worker, LIVE).await, Ok(ServingStatus::Serving));
    assert_eq!(ask(&worker, "other").await, Err(Code::NotFound));
    health.set_ready(true).await;
    assert_eq!(ask(&worker, "").await, Ok(ServingStatus::Serving));
    health.set_ready(false).await;
    assert_eq!(ask(&worker, "").await, Ok(ServingStatus::NotServing));
    health.set_ready(true).await;
    health.clone().end().await;
    assert_eq!(ask(&worker, "").await, Ok(ServingStatus::NotServing));
    // An engine that recovers while the process drains does not take requests again.
    health.set_ready(true).await;
    assert_eq!(ask(&worker, "").await, Ok(ServingStatus::NotServing));
    assert_eq!(ask(&worker, LIVE).await, Ok(ServingStatus::Serving));
    let address = port.address().to_string();
    assert!(matches!(
        health.listen(&address),
        Err(TransportError::Bind { .. })
    ));
    drop(port);
    let again = loop {
        match health.listen(&address) {
            Ok(port) => break port,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    };
    assert_eq!(ask(&worker, LIVE).await, Ok(ServingStatus::Serving));
    drop(again);
}
