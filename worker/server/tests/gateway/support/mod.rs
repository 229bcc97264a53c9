//! A gateway in this process with fake workers on real sockets.
//!
//! A fake worker's tokens are a function of prompt, seed and index, so that a stream that moved can be compared with
//! one that did not. A prompt with `say:TEXT` is answered with TEXT, one byte per token.

pub(crate) mod model;
pub(crate) mod worker;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use hearth_server::router::WorkerPool;
use hearth_server::{Gateway, GatewayConfig, GatewayError};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) use model::{MODEL, model_dir};
pub(crate) use worker::{FakeWorker, Fault};

/// A listening gateway.
pub(crate) struct Running {
    pub(crate) url: String,
    pub(crate) address: std::net::SocketAddr,
    /// `http://HOST:PORT/metrics`.
    pub(crate) metrics_url: String,
    pub(crate) http: reqwest::Client,
    /// Its workers, which can be changed.
    pub(crate) pool: Arc<WorkerPool>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<u64, GatewayError>>,
    _model: tempfile::TempDir,
}

/// Starts a gateway with `workers`, its configuration changed by `adjust`, and waits until it is ready.
pub(crate) async fn gateway(
    workers: &[&FakeWorker],
    adjust: impl FnOnce(&mut GatewayConfig),
) -> Running {
    let running = unready_gateway(workers, adjust).await;
    eventually(|| async {
        let response = running
            .http
            .get(format!("{}/ready", running.url))
            .send()
            .await;
        response.is_ok_and(|response| response.status() == 200)
    })
    .await;
    running
}

/// Starts as [`gateway`] does, without the wait.
pub(crate) async fn unready_gateway(
    workers: &[&FakeWorker],
    adjust: impl FnOnce(&mut GatewayConfig),
) -> Running {
    let model = model_dir();
    let decode = workers.iter().map(|worker| worker.endpoint()).collect();
    let mut config = GatewayConfig::new(MODEL, model.path(), decode);
    adjust(&mut config);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let gateway = Gateway::start(config).unwrap();
    let pool = gateway.pool().clone();
    let metrics = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let metrics_url = format!("http://{}/metrics", metrics.local_addr().unwrap());
    tokio::spawn(gateway.serve_metrics(metrics));
    let task = tokio::spawn(gateway.serve(listener, async {
        let _ = stopped.await;
    }));
    Running {
        url: format!("http://{address}"),
        address,
        metrics_url,
        http: reqwest::Client::new(),
        pool,
        stop: Some(stop),
        task,
        _model: model,
    }
}

impl Running {
    /// Posts a body and returns the status and the answer.
    pub(crate) async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self
            .http
            .post(format!("{}{path}", self.url))
            .json(&body)
            .send()
            .await
            .unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        (
            status,
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        )
    }

    /// Posts a chat request to the served model, with `say` as the user's message.
    pub(crate) async fn chat(&self, say: &str, extra: Value) -> (u16, Value) {
        self.post("/v1/chat/completions", chat_body(say, extra))
            .await
    }

    /// Streams a chat request and returns all events.
    pub(crate) async fn stream(&self, path: &str, body: Value) -> Vec<String> {
        let mut events = self.open(path, body).await;
        let mut all = Vec::new();
        while let Some(event) = events.next().await {
            all.push(event);
        }
        all
    }

    /// Opens a stream of events.
    pub(crate) async fn open(&self, path: &str, body: Value) -> Events {
        let response = self
            .http
            .post(format!("{}{path}", self.url))
            .json(&body)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Events {
            response,
            buffer: Vec::new(),
        }
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let response = self
            .http
            .get(format!("{}{path}", self.url))
            .send()
            .await
            .unwrap();
        let status = response.status().as_u16();
        (status, response.text().await.unwrap())
    }

    /// Reads all metrics.
    pub(crate) async fn metrics(&self) -> String {
        let response = self.http.get(&self.metrics_url).send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.text().await.unwrap()
    }

    /// Reads a metric's value, summed over labels that contain `labels`.
    pub(crate) async fn metric(&self, name: &str, labels: &str) -> f64 {
        let text = self.metrics().await;
        text.lines()
            .filter(|line| !line.starts_with('#'))
            .filter(|line| {
                line.strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with(['{', ' ']))
            })
            .filter(|line| line.contains(labels))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Asks the gateway to stop; the handle is ready when it has.
    pub(crate) fn shut_down(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
    }

    pub(crate) async fn ended(self) -> Result<u64, GatewayError> {
        self.task.await.unwrap()
    }
}

/// Data of server-sent events.
pub(crate) struct Events {
    response: reqwest::Response,
    buffer: Vec<u8>,
}

impl Events {
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            let end = self.buffer.windows(2).position(|pair| pair == b"\n\n");
            if let Some(end) = end {
                // A packet may end inside a character, an event does not.
                let event = String::from_utf8(self.buffer[..end].to_vec()).unwrap();
                self.buffer.drain(..end + 2);
                match event.strip_prefix("data: ") {
                    Some(data) => return Some(data.to_owned()),
                    None => continue,
                }
            }
            let chunk = self.response.chunk().await.ok()??;
            self.buffer.extend_from_slice(&chunk);
        }
    }

    /// Returns the next event with text.
    pub(crate) async fn next_text(&mut self) -> Option<String> {
        while let Some(event) = self.next().await {
            let value: Value = serde_json::from_str(&event).ok()?;
            let text = value["choices"][0]["delta"]["content"]
                .as_str()
                .unwrap_or_default();
            if !text.is_empty() {
                return Some(text.to_owned());
            }
        }
        None
    }
}

/// Builds a chat request to the served model.
pub(crate) fn chat_body(say: &str, extra: Value) -> Value {
    let mut body =
        serde_json::json!({"model": MODEL, "messages": [{"role": "user", "content": say}]});
    merge(&mut body, extra);
    body
}

/// Builds a text completion request to the served model.
pub(crate) fn completion_body(prompt: Value, extra: Value) -> Value {
    let mut body = serde_json::json!({"model": MODEL, "prompt": prompt});
    merge(&mut body, extra);
    body
}

fn merge(body: &mut Value, extra: Value) {
    if let (Some(body), Value::Object(extra)) = (body.as_object_mut(), extra) {
        body.extend(extra);
    }
}

/// Parses the events as JSON, without `[DONE]`, which must be the last.
pub(crate) fn chunks(events: &[String]) -> Vec<Value> {
    let (last, rest) = events.split_last().unwrap();
    assert_eq!(last, "[DONE]", "{events:#?}");
    rest.iter()
        .map(|event| serde_json::from_str(event).unwrap())
        .collect()
}

/// Text of a streamed choice.
pub(crate) fn streamed_text(chunks: &[Value], index: u64) -> String {
    chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap())
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| {
            choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str())
        })
        .collect()
}

/// Waits until a condition holds; fails after ten seconds.
pub(crate) async fn eventually<F: Future<Output = bool>>(mut holds: impl FnMut() -> F) {
    for _ in 0..1000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not become true in ten seconds");
}

/// Runs requests concurrently.
pub(crate) async fn all<T>(requests: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<T> {
    futures::stream::iter(requests)
        .buffered(1000)
        .collect()
        .await
}
