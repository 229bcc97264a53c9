//! Shutdown of a gateway, which loses no request of a client that kept its connection.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_transport::tonic::Status;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

use crate::failover::{PATH, body, paced, slow};
use crate::support::{FakeWorker, Fault, Running, chat_body, eventually, gateway};

/// Proxy that passes each new connection to the gateway currently in charge, as a Service does.
struct Proxy {
    address: SocketAddr,
    target: Arc<Mutex<SocketAddr>>,
    opened: Arc<AtomicUsize>,
}

impl Proxy {
    async fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = Arc::new(Mutex::new(target));
        let opened = Arc::new(AtomicUsize::new(0));
        let proxy = Self {
            address,
            target: target.clone(),
            opened: opened.clone(),
        };
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let target = *target.lock().unwrap();
                opened.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let mut gateway = TcpStream::connect(target).await?;
                    copy_bidirectional(&mut client, &mut gateway).await
                });
            }
        });
        proxy
    }
}

/// Sends requests over kept connections until told to stop; returns the number of answers, and failures in words.
async fn asks(
    http: reqwest::Client,
    url: String,
    number: usize,
    stop: Arc<AtomicBool>,
) -> (usize, Vec<String>) {
    let (mut answers, mut failures) = (0, Vec::new());
    let mut round = 0;
    while !stop.load(Ordering::SeqCst) {
        round += 1;
        let text = format!("{number} {round}");
        let is_streamed = round % 2 == 0;
        let body = chat_body(&format!("say:{text}"), json!({"stream": is_streamed}));
        let outcome = async {
            let response = http
                .post(&url)
                .json(&body)
                .send()
                .await?
                .error_for_status()?;
            response.text().await
        };
        match outcome.await {
            // A stream carries one letter per event.
            Ok(answer) if is_streamed && answer.ends_with("data: [DONE]\n\n") => answers += 1,
            Ok(answer) if answer.contains(&format!("\"content\":\"{text}\"")) => answers += 1,
            Ok(answer) => failures.push(format!("{text}: {answer}")),
            Err(error) => failures.push(format!("{text}: {error:?}")),
        }
        // Until the connection is free again, shortly after the end of the answer.
        tokio::time::sleep(Duration::from_millis(20 + number as u64 * 5)).await;
    }
    (answers, failures)
}

async fn one_takes_over_from_another(client: impl Fn() -> reqwest::Client) {
    let worker = FakeWorker::start();
    let mut first = gateway(&[&worker], |_| {}).await;
    let second = gateway(&[&worker], |_| {}).await;
    let proxy = Proxy::start(first.address).await;
    let url = format!("http://{}{PATH}", proxy.address);
    let stop = Arc::new(AtomicBool::new(false));
    let clients: Vec<_> = (0..16)
        .map(|number| tokio::spawn(asks(client(), url.clone(), number, stop.clone())))
        .collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = proxy.opened.load(Ordering::SeqCst);
    assert!(
        before <= 16,
        "connections were not kept: {before} were opened"
    );
    *proxy.target.lock().unwrap() = second.address;
    first.shut_down();
    first.ended().await.unwrap();
    let served = worker.behaviour.calls.lock().unwrap().len();
    tokio::time::sleep(Duration::from_secs(1)).await;
    stop.store(true, Ordering::SeqCst);
    let mut answers = 0;
    for client in clients {
        let (count, failures) = client.await.unwrap();
        assert!(failures.is_empty(), "{failures:#?}");
        answers += count;
    }
    let calls = worker.behaviour.calls.lock().unwrap().len();
    assert_eq!(calls, answers, "each was asked once");
    assert!(calls > served + 16, "all went on at the second gateway");
    let after = proxy.opened.load(Ordering::SeqCst) - before;
    assert!(
        after <= 16,
        "{after} connections were opened in the place of {before}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_connections_move_to_another_gateway_without_a_failure() {
    one_takes_over_from_another(reqwest::Client::new).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_connections_move_to_another_gateway_without_a_failure() {
    let client = || {
        let builder = reqwest::Client::builder();
        builder.http2_prior_knowledge().build().unwrap()
    };
    one_takes_over_from_another(client).await;
}

async fn send(stream: &mut TcpStream, body: &serde_json::Value) {
    let body = body.to_string();
    let request = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
}

/// Reads until `end` arrives.
async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.contains(end) {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).await.unwrap();
        assert!(count > 0, "it ended: {text}");
        text += std::str::from_utf8(&bytes[..count]).unwrap();
    }
    text
}

/// Reads to the end of the stream, which must not be a reset, and returns what came before it.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// A gateway that answers new clients for so long once it is told to stop, and a stream of 500 tokens through it that has begun.
async fn beside_a_stream(worker: &FakeWorker, drain_late: Duration) -> (Running, TcpStream) {
    let gateway = gateway(&[worker], |config| config.limits.drain_late = drain_late).await;
    let mut kept = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut kept, &body(500)).await;
    read_until(&mut kept, "\"content\":").await;
    (gateway, kept)
}

/// Waits until the drain has begun, as a new client can tell.
async fn turns_new_clients_away(gateway: &Running) {
    eventually(|| async {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        send(&mut stream, &chat_body("say:new", json!({}))).await;
        read_until(&mut stream, "\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 503")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_clients_are_told_to_come_again() {
    let worker = FakeWorker::start();
    slow(&worker);
    let (mut gateway, mut kept) = beside_a_stream(&worker, Duration::ZERO).await;
    gateway.shut_down();
    turns_new_clients_away(&gateway).await;
    let mut new = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut new, &chat_body("say:new", json!({}))).await;
    let answer = read_to_end(&mut new).await;
    assert!(
        answer.contains("retry-after: ") && answer.contains("connection: close"),
        "{answer}"
    );
    assert!(answer.contains("\"code\":\"shutting_down\""), "{answer}");
    // Its state can still be read.
    let (status, ready) = gateway.get("/ready").await;
    assert!(
        status == 503 && ready.contains("\"draining\":true"),
        "{ready}"
    );
    assert_eq!(gateway.get("/health").await.0, 200);
    read_until(&mut kept, "[DONE]").await;
    drop(kept);
    let address = gateway.address;
    gateway.ended().await.unwrap();
    assert!(
        TcpStream::connect(address).await.is_err(),
        "the port is still open"
    );
}

/// Some clients learn late that another gateway takes the place of one, whose streams may take minutes to end.
#[tokio::test(flavor = "multi_thread")]
async fn new_clients_are_answered_for_a_while_beside_the_last_streams() {
    let worker = FakeWorker::start();
    paced(&worker, 20);
    let (mut gateway, mut kept) = beside_a_stream(&worker, Duration::from_secs(3)).await;
    gateway.shut_down();
    eventually(|| async { gateway.get("/ready").await.1.contains("\"draining\":true") }).await;
    let mut new = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut new, &chat_body("say:new", json!({}))).await;
    let answer = read_to_end(&mut new).await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
        "{answer}"
    );
    assert!(answer.contains("\"content\":\"new\""), "{answer}");
    turns_new_clients_away(&gateway).await;
    read_until(&mut kept, "[DONE]").await;
    drop(kept);
    gateway.ended().await.unwrap();
}

/// Stops gateway and workers together, as when a node is drained: another gateway has other workers.
#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_worker_when_none_is_left_is_told_to_come_again() {
    let worker = FakeWorker::start();
    let mut gateway = gateway(&[&worker], |config| {
        config.limits.drain_grace = Duration::from_secs(120);
    })
    .await;
    worker.kill();
    eventually(|| async { gateway.get("/ready").await.0 == 503 }).await;
    let mut streams = Vec::new();
    for extra in [json!({}), json!({"n": 3}), json!({"stream": true})] {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        send(&mut stream, &chat_body("say:late", extra)).await;
        streams.push(stream);
    }
    eventually(|| async { gateway.metric("hearth_requests_queued", "").await >= 3.0 }).await;
    let began = Instant::now();
    gateway.shut_down();
    for stream in &mut streams {
        let answer = read_to_end(stream).await;
        assert!(
            answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: "),
            "{answer}"
        );
        assert!(answer.contains("\"code\":\"shutting_down\""), "{answer}");
    }
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "it waited {:?}",
        began.elapsed()
    );
    gateway.ended().await.unwrap();
}

/// Starts a gateway that probes its workers only once, and a request that a worker has refused because it had just
/// begun to drain.
async fn refused_by(worker: &FakeWorker, others: &[&FakeWorker]) -> (Running, TcpStream) {
    let mut workers = vec![worker];
    workers.extend(others);
    let gateway = gateway(&workers, |config| {
        config.routing.look_interval = Duration::from_secs(3600);
        config.routing.same_numerics_wait = Duration::from_secs(300);
        config.routing.queue_timeout = Duration::from_secs(300);
        config.limits.drain_grace = Duration::from_secs(300);
    })
    .await;
    worker.behaviour.stats.lock().unwrap().draining = true;
    let refusal = Fault::Status(0, Status::unavailable("draining"));
    worker.behaviour.fault(refusal);
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut stream, &chat_body("say:late", json!({"stream": true}))).await;
    eventually(|| async { gateway.metric("hearth_failovers_total", "gone").await == 1.0 }).await;
    (gateway, stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_was_refused_by_a_draining_worker_is_told_to_come_again_too() {
    let worker = FakeWorker::start();
    let (mut gateway, mut stream) = refused_by(&worker, &[]).await;
    gateway.shut_down();
    let answer = tokio::time::timeout(Duration::from_secs(120), read_to_end(&mut stream));
    let answer = answer.await.expect("nobody waits for a replacement");
    assert!(
        answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: "),
        "{answer}"
    );
    assert!(answer.contains("\"code\":\"shutting_down\""), "{answer}");
    assert_eq!(worker.behaviour.calls.lock().unwrap().len(), 1);
    gateway.ended().await.unwrap();
}

/// Lets a choice of an admitted request wait as long as the running ones do, which would end with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_choice_that_waits_does_not_end_those_that_run() {
    let worker = FakeWorker::start();
    paced(&worker, 20);
    worker.behaviour.description.lock().unwrap().max_batch = 4;
    let mut gateway = gateway(&[&worker], |config| {
        config.routing.ahead_per_worker = Some(0);
        config.limits.drain_grace = Duration::from_secs(120);
    })
    .await;
    let mut streams = Vec::new();
    for n in [1, 1, 1, 2] {
        let mut request = body(150);
        request["n"] = json!(n);
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        send(&mut stream, &request).await;
        let begun = read_until(&mut stream, "\"content\":").await;
        streams.push((n, stream, begun));
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let calls = worker.behaviour.calls.lock().unwrap().len();
    assert_eq!(calls, 4, "the second choice has no place");
    worker.kill();
    eventually(|| async { gateway.get("/ready").await.0 == 503 }).await;
    gateway.shut_down();
    // Longer than new requests are held.
    tokio::time::sleep(Duration::from_secs(32)).await;
    worker.revive();
    for (n, mut stream, begun) in streams {
        let rest = tokio::time::timeout(Duration::from_secs(60), read_to_end(&mut stream));
        let answer = begun + &rest.await.expect("it ends");
        let finished = answer.matches("\"finish_reason\":\"length\"").count();
        assert_eq!(finished, n, "{answer}");
        assert!(answer.contains("[DONE]"), "{answer}");
    }
    gateway.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_answer_on_a_kept_connection_says_that_it_ends() {
    let worker = FakeWorker::start();
    let mut gateway = gateway(&[&worker], |_| {}).await;
    let mut kept = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut kept, &chat_body("say:one", json!({}))).await;
    let answer = read_until(&mut kept, "}}").await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && !answer.contains("connection: close"),
        "{answer}"
    );
    gateway.shut_down();
    turns_new_clients_away(&gateway).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    send(&mut kept, &chat_body("say:two", json!({}))).await;
    let answer = read_to_end(&mut kept).await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
        "{answer}"
    );
    assert!(answer.contains("\"content\":\"two\""), "{answer}");
    gateway.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_are_closed_and_hold_nothing_up() {
    let worker = FakeWorker::start();
    let mut gateway = gateway(&[&worker], |_| {}).await;
    let mut used = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut used, &chat_body("say:one", json!({}))).await;
    read_until(&mut used, "}}").await;
    let mut unused = TcpStream::connect(gateway.address).await.unwrap();
    let mut half = TcpStream::connect(gateway.address).await.unwrap();
    half.write_all(b"PRI * HTTP/2.0\r\n\r\n").await.unwrap();
    let began = Instant::now();
    gateway.shut_down();
    assert_eq!(read_to_end(&mut used).await, "");
    assert!(
        began.elapsed() >= Duration::from_secs(2),
        "it was closed at once"
    );
    assert_eq!(read_to_end(&mut unused).await, "");
    gateway.ended().await.unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_outlives_the_drains_begin_leaves_room_for_one_more_request() {
    let worker = FakeWorker::start();
    slow(&worker);
    // The head of this answer is sent before the shutdown begins.
    let (mut gateway, mut kept) = beside_a_stream(&worker, Duration::ZERO).await;
    gateway.shut_down();
    turns_new_clients_away(&gateway).await;
    read_until(&mut kept, "[DONE]\n\n\r\n0\r\n\r\n").await;
    send(&mut kept, &chat_body("say:more", json!({}))).await;
    let answer = read_to_end(&mut kept).await;
    assert!(
        answer.contains("connection: close") && answer.contains("\"content\":\"more\""),
        "{answer}"
    );
    gateway.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_were_sent_in_time_are_answered() {
    let worker = FakeWorker::start();
    let mut gateway = gateway(&[&worker], |_| {}).await;
    let mut kept = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        send(&mut stream, &chat_body("say:kept", json!({}))).await;
        read_until(&mut stream, "}}").await;
        kept.push(stream);
    }
    // All at once: on kept connections, on new ones that may not have been accepted, and the shutdown.
    let mut new = Vec::new();
    for stream in &mut kept {
        send(stream, &chat_body("say:last", json!({}))).await;
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        send(&mut stream, &chat_body("say:last", json!({}))).await;
        new.push(stream);
    }
    gateway.shut_down();
    for stream in kept.iter_mut().chain(&mut new) {
        let answer = read_until(stream, "}}").await;
        assert!(answer.contains("\"content\":\"last\""), "{answer}");
    }
    gateway.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_kept_for_longer_than_headers_may_take() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.limits.header_timeout = Duration::from_millis(200);
        config.limits.keep_alive = Duration::from_millis(1500);
    })
    .await;
    let mut kept = TcpStream::connect(gateway.address).await.unwrap();
    for _ in 0..2 {
        send(&mut kept, &chat_body("say:one", json!({}))).await;
        read_until(&mut kept, "}}").await;
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    send(&mut kept, &chat_body("say:two", json!({}))).await;
    read_until(&mut kept, "}}").await;
    let idle = Instant::now();
    assert_eq!(read_to_end(&mut kept).await, "");
    assert!(
        idle.elapsed() >= Duration::from_millis(1400),
        "{:?}",
        idle.elapsed()
    );
    // Headers that do not end are another matter, even those of a later request.
    let mut slow = TcpStream::connect(gateway.address).await.unwrap();
    send(&mut slow, &chat_body("say:one", json!({}))).await;
    read_until(&mut slow, "}}").await;
    slow.write_all(b"POST / HTTP/1.1\r\n").await.unwrap();
    let begun = Instant::now();
    assert_eq!(read_to_end(&mut slow).await, "");
    assert!(
        begun.elapsed() < Duration::from_millis(1200),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_says_anything_is_let_go() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.limits.header_timeout = Duration::from_millis(300);
    })
    .await;
    let mut silent = TcpStream::connect(gateway.address).await.unwrap();
    let end = tokio::time::timeout(Duration::from_secs(5), read_to_end(&mut silent));
    assert_eq!(end.await.unwrap(), "");
}
