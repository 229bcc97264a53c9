//! What holds while it serves: keys, clients that leave, prompts that come again, a gateway that dies.

use std::time::{Duration, Instant};

use hearth_tests::{Metrics, Up, UpOptions, chat_body, chat_stream, hearth, run};
use rustix::process::Signal;
use serde_json::{Value, json};

#[tokio::test]
async fn only_holders_of_a_key_are_served() {
    let directory = tempfile::tempdir().expect("directory");
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "first-key\nsecond-key\n").expect("write");
    let up = Up::start(&UpOptions {
        arguments: vec!["--api-keys".to_owned(), keys.display().to_string()],
        ..UpOptions::default()
    });
    let body = chat_body("hearth-demo", "What is Hearth?", 8);
    for (key, expected) in [
        (None, 401),
        (Some("another"), 401),
        (Some("first-key"), 200),
        (Some("second-key"), 200),
    ] {
        let mut request = reqwest::Client::new()
            .post(format!("{}/chat/completions", up.v1()))
            .json(&body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.expect("response");
        assert_eq!(response.status().as_u16(), expected, "{key:?}");
        let text = response.text().await.expect("text");
        let is_error = serde_json::from_str::<Value>(&text)
            .is_ok_and(|answer| answer["error"]["code"] == "invalid_api_key");
        assert_eq!(is_error, expected == 401, "{text}");
    }
    let chat = |key: &[&str]| {
        run(hearth()
            .args(["chat", "--message", "What is Hearth?"])
            .args(key)
            .arg("--state-dir")
            .arg(up.state_dir())
            .env_remove("HEARTH_API_KEY"))
    };
    let (code, answer, errors) = chat(&["--api-key", "second-key"]);
    assert_eq!(code, 0, "{errors}");
    assert!(answer.contains("Hearth"), "{answer}");
    let (code, _, errors) = chat(&[]);
    assert_eq!(code, 1);
    assert!(errors.contains("key"), "{errors}");
    assert!(
        !up.logs().contains("second-key"),
        "a key is in the logs: {}",
        up.logs()
    );
}

/// A prompt near the context's length that shares no beginning with another.
fn long_prompt(number: usize) -> Value {
    let text = format!(
        "{number}. {}",
        "The lab has a server and a laptop. ".repeat(150)
    );
    chat_body("hearth-demo", &text, 64)
}

fn is_idle(metrics: &Metrics) -> bool {
    ["prefill", "decode"].iter().all(|role| {
        metrics.of_role("hearth_worker_running", role) == 0.0
            && metrics.of_role("hearth_worker_waiting", role) == 0.0
            && metrics.of_role("hearth_worker_kv_blocks_used", role) == 0.0
    })
}

#[tokio::test]
async fn clients_that_leave_while_their_prompts_are_read_free_both_workers() {
    const CLIENTS: usize = 8;
    let up = Up::demo();
    // One prompt's worth of KV, to know when the others were not computed.
    let mut one = long_prompt(100);
    one["max_tokens"] = json!(1);
    chat_stream(&up.v1(), &one, |_, _| {})
        .await
        .expect("answer");
    let moved =
        |metrics: &Metrics| metrics.of_role("hearth_worker_kv_moved_bytes_total", "prefill");
    let one_prompt = moved(&up.wait_for("a prompt was moved", |m| moved(m) > 0.0 && is_idle(m)));
    let generated = up.metrics().sum("hearth_generated_tokens_total", &[]);

    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let v1 = up.v1();
        clients.spawn(async move { chat_stream(&v1, &long_prompt(number), |_, _| {}).await });
    }
    let up = tokio::task::spawn_blocking(move || {
        up.wait_for("prompts are read, and KV is held at both ends", |metrics| {
            ["prefill", "decode"].iter().all(|role| {
                metrics.of_role("hearth_worker_running", role) > 0.0
                    && metrics.of_role("hearth_worker_kv_blocks_used", role) > 0.0
            })
        });
        up
    });
    let up = up.await.expect("it comes to that");
    clients.shutdown().await;
    let metrics = up.wait_for("both workers are free", is_idle);
    let computed = (moved(&metrics) - one_prompt) / one_prompt;
    assert!(
        computed < CLIENTS as f64 - 1.5,
        "{computed} of {CLIENTS} prompts were computed for nobody"
    );
    assert!(metrics.sum("hearth_requests_running", &[]) == 0.0);
    println!(
        "{computed:.1} of {CLIENTS} prompts were moved, {} tokens generated",
        metrics.sum("hearth_generated_tokens_total", &[]) - generated
    );
    let answer = chat_stream(&up.v1(), &one, |_, _| {}).await;
    assert_eq!(answer.expect("still serves").completion_tokens, 1);
}

#[tokio::test]
async fn a_prompt_that_comes_again_is_not_computed_again() {
    let up = Up::demo();
    let question = format!("{}What is Hearth?", "The lab has a server. ".repeat(20));
    let usage = async |question: &str| -> (u64, u64, String) {
        let mut body = chat_body("hearth-demo", question, 30);
        for field in ["stream", "stream_options"] {
            body.as_object_mut().expect("object").remove(field);
        }
        let response = reqwest::Client::new()
            .post(format!("{}/chat/completions", up.v1()))
            .json(&body)
            .send()
            .await
            .expect("response");
        let answer: Value = response.json().await.expect("JSON");
        let usage = &answer["usage"];
        (
            usage["prompt_tokens"].as_u64().expect("prompt_tokens"),
            usage["prompt_tokens_details"]["cached_tokens"]
                .as_u64()
                .expect("cached_tokens"),
            answer["choices"][0]["message"]["content"].to_string(),
        )
    };
    let (prompt, cached, first) = usage(&question).await;
    assert_eq!(cached, 0);
    let (_, cached, second) = usage(&question).await;
    // All but the last block's tokens, whose logits must be computed.
    assert!(
        cached < prompt && cached + 2 * 16 >= prompt,
        "{cached} of {prompt} tokens"
    );
    assert_eq!(second, first);
    let (_, shared, _) = usage(&format!("{question} And a ring?")).await;
    assert!(shared > 0 && shared <= cached, "{shared}");
    let metrics = up.wait_for("the worker tells of its cache", |metrics| {
        metrics.of_role("hearth_worker_prefix_hit_tokens_total", "decode") > 0.0
    });
    assert_eq!(
        metrics.sum("hearth_prompt_cached_tokens_total", &[]),
        (cached + shared) as f64
    );
}

#[tokio::test]
async fn a_killed_gateway_serves_again() {
    let up = Up::demo();
    let body = chat_body("hearth-demo", "What is Hearth?", 40);
    let expected = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("answer");
    let workers = [up.pid("prefill-0"), up.pid("decode-0")];
    up.signal("gateway-0", Signal::KILL);
    let deadline = Instant::now() + Duration::from_secs(60);
    let answer = loop {
        match chat_stream(&up.v1(), &body, |_, _| {}).await {
            Ok(answer) => break answer,
            Err(error) => assert!(Instant::now() < deadline, "{error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(answer, expected);
    assert_eq!([up.pid("prefill-0"), up.pid("decode-0")], workers);
    assert!(up.output().contains("gateway-0"), "{}", up.output());
}

#[tokio::test]
async fn a_second_ctrl_c_stops_at_once() {
    let mut up = Up::demo();
    // A stream that does not end, since its worker stands still: the first Ctrl-C would wait for all of its grace.
    let mut body = chat_body("hearth-demo", "What is Hearth?", 1500);
    body["logit_bias"] = json!({"1": -100});
    let (v1, began) = (up.v1(), tokio::sync::oneshot::channel());
    let (mut tell, started) = (Some(began.0), began.1);
    let stream = tokio::spawn(async move {
        chat_stream(&v1, &body, |_, _| {
            if let Some(tell) = tell.take() {
                let _ = tell.send(());
            }
        })
        .await
    });
    started.await.expect("the stream begins");
    up.signal("decode-0", Signal::STOP);
    let pids = ["gateway-0", "prefill-0", "decode-0"].map(|rank| up.pid(rank));
    up.signal_up(Signal::INT);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !up.output().contains("draining") {
        assert!(Instant::now() < deadline, "{}", up.output());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(
        std::path::Path::new(&format!("/proc/{}", pids[0])).exists(),
        "the first Ctrl-C did not wait for the stream"
    );
    let second = Instant::now();
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 0, "{}", up.output());
    let took = second.elapsed();
    assert!(took < Duration::from_secs(5), "it took {took:?}");
    for pid in pids {
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            "process {pid} is left"
        );
    }
    assert!(stream.await.expect("task").is_err());
}
