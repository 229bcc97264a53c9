//! Calls over pipes and over TCP: streams, cancellation, sizes, and workers that die.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::{SILENT, ask, counting};
use futures::StreamExt;
use hearth_transport::{
    CallContext, ClientOptions, Clients, Endpoint, Listener, RpcErrorKind, ServerOptions,
    TransportError, Worker,
    loopback::Loopback,
    serve,
    v1::{PrefillRequest, generate_event::Event, prefill_event},
};

fn endpoint(text: &str) -> Endpoint {
    text.parse().unwrap()
}

/// Serves on a free port until the sender is used or dropped.
fn on_tcp() -> (
    Worker,
    tokio::sync::oneshot::Sender<()>,
    tokio::task::JoinHandle<Result<(), TransportError>>,
) {
    let (routes, _) = counting();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = endpoint(&listener.address().to_string());
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let served = tokio::spawn(async move {
        let options = ServerOptions::default();
        serve(listener, routes, &options, async {
            let _ = stopped.await;
        })
        .await
    });
    let worker = Clients::new(ClientOptions::default())
        .worker(&address)
        .unwrap();
    (worker, stop, served)
}

async fn indices(worker: &Worker, max_tokens: u32) -> Vec<u32> {
    let response = worker.decode().generate(ask(max_tokens)).await.unwrap();
    response
        .into_inner()
        .filter_map(|event| async {
            match event.unwrap().event {
                Some(Event::Token(token)) => Some(token.index),
                _ => None,
            }
        })
        .collect()
        .await
}

#[tokio::test]
async fn a_stream_arrives_whole_and_in_order() {
    let (routes, _log) = counting();
    let loopback = Loopback::start(endpoint("decode:1"), routes).unwrap();
    assert_eq!(
        indices(&loopback.worker(), 20).await,
        (0..20).collect::<Vec<_>>()
    );
    let (worker, _stop, _served) = on_tcp();
    assert_eq!(indices(&worker, 20).await, (0..20).collect::<Vec<_>>());
}

#[tokio::test]
async fn dropping_a_stream_reaches_the_worker() {
    let (routes, mut log) = counting();
    let loopback = Loopback::start(endpoint("decode:1"), routes).unwrap();
    let context = CallContext {
        request_id: Some("r7".to_owned()),
        trace: None,
    };
    let mut decode = loopback.worker().decode();
    let request = context.request(ask(1_000_000));
    let mut stream = decode.generate(request).await.unwrap().into_inner();
    assert!(stream.next().await.unwrap().is_ok());
    drop(stream);
    assert_eq!(log.recv().await.unwrap(), "begin r7");
    assert_eq!(log.recv().await.unwrap(), "gone r7");
}

#[tokio::test]
async fn a_killed_worker_is_gone_and_not_at_fault() {
    let (routes, _log) = counting();
    let loopback = Loopback::start(endpoint("decode:1"), routes).unwrap();
    let worker = loopback.worker();
    let mut stream = worker
        .decode()
        .generate(ask(1_000_000))
        .await
        .unwrap()
        .into_inner();
    for _ in 0..3 {
        stream.next().await.unwrap().unwrap();
    }
    loopback.kill();
    let status = loop {
        match stream.next().await {
            Some(Ok(_)) => {}
            Some(Err(status)) => break status,
            None => panic!("a broken stream must not look complete"),
        }
    };
    let error = worker.error(&status);
    assert_eq!(error.kind(), RpcErrorKind::Gone, "{status:?}");
    assert!(error.to_string().starts_with("worker decode:1: "));
    let again = worker.decode().generate(ask(1)).await.unwrap_err();
    assert_eq!(worker.error(&again).kind(), RpcErrorKind::Gone, "{again:?}");
}

#[tokio::test]
async fn nobody_at_the_port_is_gone() {
    let free = Listener::bind("127.0.0.1:0").unwrap().address();
    let worker = Clients::default()
        .worker(&endpoint(&free.to_string()))
        .unwrap();
    let error = worker.error(&worker.decode().generate(ask(1)).await.unwrap_err());
    assert_eq!(error.kind(), RpcErrorKind::Gone);
    assert!(error.message().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_worker_that_comes_back_is_dialled_again() {
    let free = Listener::bind("127.0.0.1:0").unwrap().address().to_string();
    let worker = Clients::default().worker(&endpoint(&free)).unwrap();
    assert!(worker.decode().generate(ask(1)).await.is_err());
    let listener = Listener::bind(&free).unwrap();
    let (routes, _log) = counting();
    tokio::spawn(async move {
        serve(
            listener,
            routes,
            &ServerOptions::default(),
            std::future::pending(),
        )
        .await
    });
    assert_eq!(indices(&worker, 3).await, [0, 1, 2]);
}

#[tokio::test]
async fn the_requests_own_fault_is_told_apart() {
    let (routes, _log) = counting();
    let loopback = Loopback::start(endpoint("decode:1"), routes).unwrap();
    let worker = loopback.worker();
    let error = worker.error(&worker.decode().generate(ask(0)).await.unwrap_err());
    assert_eq!(error.kind(), RpcErrorKind::Rejected);
    assert_eq!(error.message(), "max_tokens is 0: ask for at least 1");
}

#[tokio::test]
async fn messages_of_many_mebibytes_pass() {
    let (worker, _stop, _served) = on_tcp();
    let request = PrefillRequest {
        tokens: vec![6],
        ..PrefillRequest::default()
    };
    let mut stream = worker
        .prefill()
        .prefill(request)
        .await
        .unwrap()
        .into_inner();
    let mut bytes = 0;
    while let Some(event) = stream.next().await {
        match event.unwrap().event.unwrap() {
            prefill_event::Event::Kv(kv) => {
                assert!(kv.data.iter().all(|b| u32::from(*b) == kv.layer));
                bytes += kv.data.len();
            }
            prefill_event::Event::Done(done) => bytes += done.logits.len(),
        }
    }
    assert_eq!(bytes, 6 * (4 << 20) + (8 << 20));
}

#[tokio::test]
async fn one_connection_carries_hundreds_of_calls_and_survives_their_end() {
    let (worker, _stop, _served) = on_tcp();
    let calls = (0..400).map(|_| {
        let mut decode = worker.decode();
        async move {
            let mut stream = decode.generate(ask(SILENT)).await.unwrap().into_inner();
            stream.next().await.unwrap().unwrap();
            stream
        }
    });
    let streams = tokio::time::timeout(
        std::time::Duration::from_secs(30),
        futures::future::join_all(calls),
    );
    drop(streams.await.unwrap());
    assert_eq!(indices(&worker, 3).await, [0, 1, 2]);
}

#[tokio::test]
async fn shutdown_waits_for_calls_in_flight() {
    let (worker, stop, served) = on_tcp();
    let mut stream = worker
        .decode()
        .generate(ask(50))
        .await
        .unwrap()
        .into_inner();
    stream.next().await.unwrap().unwrap();
    stop.send(()).unwrap();
    assert_eq!(stream.map(Result::unwrap).count().await, 51);
    drop(worker);
    served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let first = Listener::bind("127.0.0.1:0").unwrap();
    let address = first.address().to_string();
    let error = Listener::bind(&address).err().unwrap().to_string();
    assert!(
        error.contains(&address) && error.contains("choose another port"),
        "{error}"
    );
    assert!(Listener::bind("127.0.0.1").is_err());
}

#[tokio::test]
async fn clients_keep_one_connection_for_each_worker() {
    let (routes, mut log) = counting();
    let loopback = Loopback::start(endpoint("decode:1"), routes).unwrap();
    let clients = Clients::default();
    clients.keep(loopback.worker());
    let worker = clients.clone().worker(&endpoint("decode:1")).unwrap();
    assert_eq!(indices(&worker, 2).await, [0, 1]);
    assert!(log.recv().await.is_some());
    clients.forget(&endpoint("decode:1"));
    let dialled = clients.worker(&endpoint("decode.invalid:1")).unwrap();
    assert!(dialled.decode().generate(ask(1)).await.is_err());
}
