//! Clients that do not read their answers: no other client waits for them, and they are cut off.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::failover::{PATH, paced, slow};
use crate::support::{FakeWorker, chat_body, eventually, gateway};

const CHOICES: usize = 4;
const TOKENS: usize = 480;

/// A long stream with twenty alternatives per token: two megabytes, more than the system buffers by itself.
fn bulky(number: usize) -> Value {
    let extra = json!({"stream": true, "n": CHOICES, "logprobs": true, "top_logprobs": 20, "max_tokens": TOKENS, "ignore_eos": true});
    chat_body(&format!("client {number}"), extra)
}

/// Connects a client that sends a request and takes no more than a few packets.
async fn mute(address: SocketAddr, body: &Value) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    let body = body.to_string();
    let request = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// Reads everything up to the end.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Starts a worker that yields its tokens one after another, as many as are requested.
fn long_winded() -> FakeWorker {
    let worker = FakeWorker::start();
    worker.behaviour.length.store(10_000, Ordering::SeqCst);
    worker
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_never_read_hold_no_place_on_a_worker() {
    let worker = long_winded();
    worker.behaviour.description.lock().unwrap().max_batch = 2;
    let gateway = gateway(&[&worker], |config| {
        config.routing.ahead_per_worker = Some(2);
        config.routing.queue_timeout = Duration::from_secs(20);
        config.limits.backlog_bytes = 1 << 30;
    })
    .await;
    let mut clients = Vec::new();
    for number in 0..20 {
        clients.push(mute(gateway.address, &bulky(number)).await);
    }
    eventually(|| async { worker.behaviour.calls.lock().unwrap().len() > 3 }).await;
    let (status, answer) = gateway.chat("say:here", json!({})).await;
    assert_eq!(status, 200, "{answer}");
    // All answers are computed to their end, and wait.
    let began = Instant::now();
    let calls = || worker.behaviour.calls.lock().unwrap().len();
    while calls() <= 20 * CHOICES || worker.behaviour.open.load(Ordering::SeqCst) > 0 {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{} calls",
            calls()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(worker.behaviour.cancelled.load(Ordering::SeqCst), 0);
    assert_eq!(
        worker.behaviour.calls.lock().unwrap().len(),
        20 * CHOICES + 1
    );
    assert!(gateway.metric("hearth_answers_waiting_bytes", "").await > 1e6);
    // A client that reads after all gets the whole answer.
    let text = rest(&mut clients.swap_remove(7)).await;
    assert!(text.contains("data: [DONE]"));
    assert_eq!(text.matches("\"top_logprobs\"").count(), TOKENS * CHOICES);
    drop(clients);
    eventually(|| async { gateway.metric("hearth_answers_waiting_bytes", "").await == 0.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_takes_nothing_is_cut_off_and_its_work_ends() {
    let worker = long_winded();
    paced(&worker, 20);
    let gateway = gateway(&[&worker], |config| {
        config.limits.client_stall = Duration::from_millis(3500);
    })
    .await;
    let client = mute(gateway.address, &bulky(0)).await;
    let reading = gateway.stream(PATH, bulky(1));
    let cut = async {
        eventually(|| async { gateway.metric("hearth_clients_cut_total", "stalled").await == 1.0 })
            .await;
    };
    let (read, ()) = tokio::join!(reading, cut);
    assert_eq!(read.last().map(String::as_str), Some("[DONE]"));
    let cancelled = worker.behaviour.cancelled.load(Ordering::SeqCst);
    assert!((1..=CHOICES).contains(&cancelled), "{cancelled} choices");
    assert_eq!(
        gateway.metric("hearth_answers_waiting_bytes", "").await,
        0.0
    );
    drop(client);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_slowly_keeps_its_answer() {
    let worker = long_winded();
    let gateway = gateway(&[&worker], |config| {
        config.limits.client_stall = Duration::from_millis(1500);
    })
    .await;
    let mut client = mute(gateway.address, &bulky(0)).await;
    let began = Instant::now();
    let mut text = String::new();
    // It takes something at least every 100 ms, for much longer in total than the limit.
    loop {
        let mut bytes = [0; 16 << 10];
        let count = client.read(&mut bytes).await.unwrap();
        if count == 0 {
            break;
        }
        text += &String::from_utf8_lossy(&bytes[..count]);
        if began.elapsed() < Duration::from_secs(5) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    assert!(began.elapsed() > Duration::from_secs(5));
    assert!(text.contains("data: [DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_for_clients_is_bounded() {
    let worker = long_winded();
    let gateway = gateway(&[&worker], |config| {
        config.limits.backlog_bytes = 2 << 20;
        config.limits.client_stall = Duration::from_secs(60);
    })
    .await;
    let mut clients = Vec::new();
    for number in 0..12 {
        clients.push(mute(gateway.address, &bulky(number)).await);
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    eventually(|| async { gateway.metric("hearth_clients_cut_total", "backlog").await > 1.0 })
        .await;
    eventually(|| async {
        // Beyond the budget only for the moment in which a client may still begin to read.
        gateway.metric("hearth_answers_waiting_bytes", "").await <= f64::from(4 << 20)
    })
    .await;
    let read = gateway.stream(PATH, bulky(99)).await;
    assert_eq!(read.last().map(String::as_str), Some("[DONE]"));
    // Clients that were cut off read the reason.
    let mut told = 0;
    for client in &mut clients {
        told += usize::from(rest(client).await.contains("client_too_slow"));
    }
    assert!(told > 1, "{told} were told");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_http2_that_nobody_reads_is_cut_off_alone() {
    let worker = long_winded();
    slow(&worker);
    let gateway = gateway(&[&worker], |config| {
        config.limits.client_stall = Duration::from_millis(700);
    })
    .await;
    let client = reqwest::Client::builder()
        .http2_prior_knowledge()
        .http2_initial_stream_window_size(16 << 10)
        .build()
        .unwrap();
    let ask = |body: Value| {
        client
            .post(format!("{}{PATH}", gateway.url))
            .json(&body)
            .send()
    };
    let unread = ask(bulky(0)).await.unwrap();
    assert_eq!(unread.version(), reqwest::Version::HTTP_2);
    eventually(|| async { gateway.metric("hearth_clients_cut_total", "stalled").await == 1.0 })
        .await;
    let other = ask(chat_body("say:other", json!({}))).await.unwrap();
    assert!(
        other
            .text()
            .await
            .unwrap()
            .contains("\"content\":\"other\"")
    );
    let rest = unread.text().await.unwrap();
    assert!(rest.contains("client_too_slow") && !rest.contains("[DONE]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_that_stand_still_hold_up_nobody_and_are_cut() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |config| {
        config.limits.body_stall = Duration::from_secs(5);
    })
    .await;
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        8 << 20
    );
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&vec![b' '; 400 << 10]).await.unwrap();
        stalled.push(stream);
    }
    let began = Instant::now();
    let padding = " ".repeat(300 << 10);
    let (status, answer) = gateway.chat("say:here", json!({"user": padding})).await;
    assert_eq!(status, 200, "{answer}");
    let took = began.elapsed();
    println!("300 KB beside eight uploads that stand still: {took:?}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    for mut stream in stalled {
        let answer = rest(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
        assert!(answer.contains("no part of the request body arrived for 5 s"));
    }
}

/// Posts bytes to the chat route on a separate connection, and reads the answer until the connection ends.
async fn asked(address: SocketAddr, body: Vec<u8>) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    rest(&mut stream).await
}

/// Fills the memory for large requests in progress, with as many more waiting as the memory for bodies takes.
#[tokio::test(flavor = "multi_thread")]
async fn large_requests_that_wait_for_others_do_not_hold_up_those_that_need_nothing() {
    const HELD: usize = 67;
    const WAITING: usize = 20;
    let worker = long_winded();
    worker.behaviour.description.lock().unwrap().max_batch = 200;
    *worker.behaviour.pace.lock().unwrap() = Duration::from_millis(300);
    let gateway = gateway(&[&worker], |_| {}).await;
    let address = gateway.address;
    // Each holds a megabyte while it is answered, which is longer than this test.
    let schema = json!({"type": "null", "description": "x".repeat(1_000_000)});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let extra =
        json!({"response_format": format, "max_tokens": 450, "ignore_eos": true, "stream": true});
    let large = chat_body("x", extra).to_string().into_bytes();
    let held: Vec<_> = (0..HELD)
        .map(|_| tokio::spawn(asked(address, large.clone())))
        .collect();
    let began = Instant::now();
    while worker.behaviour.open.load(Ordering::SeqCst) < HELD {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "they never began"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let waiting: Vec<_> = (0..WAITING)
        .map(|_| tokio::spawn(asked(address, large.clone())))
        .collect();
    tokio::time::sleep(Duration::from_secs(3)).await;
    // A large body, of which almost nothing is left once it has been parsed.
    let mut padded = chat_body("say:x", json!({"max_tokens": 1}))
        .to_string()
        .into_bytes();
    padded.resize(300 << 10, b' ');
    let answer = tokio::time::timeout(Duration::from_secs(30), asked(address, padded)).await;
    let answer = answer.expect("it waited for the others");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // Requests that need memory held by others are told to try again.
    let mut refused = 0;
    for request in waiting {
        let answer = tokio::time::timeout(Duration::from_secs(30), request).await;
        let answer = answer.expect("it waited too long").unwrap();
        refused += usize::from(answer.contains("large_requests") && answer.contains("retry-after"));
    }
    assert_eq!(refused, WAITING);
    held.iter().for_each(tokio::task::JoinHandle::abort);
    eventually(|| async { worker.behaviour.open.load(Ordering::SeqCst) == 0 }).await;
}
