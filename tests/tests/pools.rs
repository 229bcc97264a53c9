//! Deployments shaped differently from the demo: pools of several workers, no prefill worker, another cache.

use std::time::{Duration, Instant};

use hearth_tests::{
    Answer, Metrics, Up, UpOptions, chat_body, chat_stream, deployment, hearth, run,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

const QUESTION: &str = "What is Hearth?";
const DECODE: [&str; 2] = ["decode-0", "decode-1"];

/// Serves the demo with a changed spec; the directory holds its file.
fn serve(edit: impl FnOnce(&mut Value)) -> (Up, TempDir) {
    let directory = tempfile::tempdir().expect("directory");
    let file = deployment(directory.path(), edit);
    let up = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    (up, directory)
}

fn two_of_each() -> (Up, TempDir) {
    serve(|spec| {
        spec["prefill"]["replicas"] = json!(2);
        spec["decode"]["replicas"] = json!(2);
    })
}

/// Returns a prompt long enough for the prefill worker.
fn long_question() -> String {
    format!("{}{QUESTION}", "The lab has a server. ".repeat(30))
}

/// Returns a seeded request that never ends before its 300 tokens: the end-of-text token is banned.
fn seeded() -> Value {
    let mut body = chat_body("hearth-demo", QUESTION, 300);
    body["temperature"] = json!(1.1);
    body["seed"] = json!(21);
    body["logit_bias"] = json!({"1": -100});
    body
}

/// Returns a request for a long answer prescribed by a schema, seeded so that its words are drawn.
fn structured() -> Value {
    let mut body = chat_body("hearth-demo", QUESTION, 800);
    body["temperature"] = json!(1.0);
    body["seed"] = json!(4);
    let word = json!({"enum": ["prefill", "decode", "gateway", "ring"]});
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"name": "roles", "strict": true, "schema": {
        "type": "object",
        "properties": {"roles": {"type": "array", "minItems": 24, "maxItems": 24, "items": word}},
        "required": ["roles"],
        "additionalProperties": false,
    }}});
    body
}

/// Returns the decode worker that runs the only stream; `None` while it moves from one to the other.
fn running(metrics: &Metrics) -> Option<&'static str> {
    let has_it = |rank: &&str| metrics.of_rank("hearth_worker_requests", rank) > 0.0;
    DECODE.into_iter().find(has_it)
}

async fn undisturbed(up: &Up, body: &Value) -> Answer {
    chat_stream(&up.v1(), body, |_, _| {})
        .await
        .expect("undisturbed")
}

/// Kills the worker that runs the stream; returns the answer, the killed worker, and the one that ran the stream some
/// tokens later.
async fn with_its_worker_killed(
    up: &Up,
    body: &Value,
) -> (Answer, &'static str, Option<&'static str>) {
    let (mut killed, mut next, mut at) = ("", None, 0);
    let answer = chat_stream(&up.v1(), body, |pieces, _| {
        if pieces == 12 {
            killed = running(&up.metrics()).expect("a worker runs it");
            up.signal(killed, Signal::KILL);
            at = pieces;
        } else if at > 0 && next.is_none() {
            // Until the connection breaks, data that it had sent is still read.
            next = running(&up.metrics()).filter(|rank| *rank != killed);
        }
    })
    .await
    .expect("the stream survives");
    (answer, killed, next)
}

#[tokio::test]
async fn a_stream_goes_on_at_the_other_worker() {
    let (up, _directory) = two_of_each();
    assert_eq!(
        up.status()["processes"].as_array().map(Vec::len),
        Some(5),
        "{:#}",
        up.status()
    );
    for body in [seeded(), structured()] {
        let expected = undisturbed(&up, &body).await;
        let failovers = up.metrics().count("hearth_failovers_total");
        let (answer, killed, next) = with_its_worker_killed(&up, &body).await;
        assert_eq!(answer, expected);
        let other = DECODE.into_iter().find(|rank| *rank != killed);
        assert_eq!(next, other, "{killed} was killed");
        let metrics = up.wait_for("both serve again", |metrics| {
            DECODE
                .iter()
                .all(|rank| metrics.of_rank("hearth_worker_ready", rank) > 0.0)
        });
        assert!(metrics.count("hearth_failovers_total") > failovers);
    }
    let text = undisturbed(&up, &structured()).await.text;
    let value: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(value["roles"].as_array().map(Vec::len), Some(24), "{text}");
}

#[tokio::test]
async fn a_worker_that_stands_still_is_told_as_hung_and_its_stream_goes_on_at_the_other() {
    let (up, _directory) = two_of_each();
    let began = Instant::now();
    let expected = undisturbed(&up, &seeded()).await;
    // A worker is abandoned after 3 s of silence; then all is computed again, on a machine that other tests may keep busy.
    let longest = Duration::from_secs(5) + 3 * began.elapsed();
    let (mut stopped, mut at, mut waited) = ("", Instant::now(), Duration::ZERO);
    let answer = chat_stream(&up.v1(), &seeded(), |pieces, _| {
        if pieces == 12 {
            stopped = running(&up.metrics()).expect("a worker runs it");
            up.signal(stopped, Signal::STOP);
            at = Instant::now();
        }
        // Longest silence of the stream: data sent before is still read.
        if !stopped.is_empty() {
            waited = waited.max(at.elapsed());
            at = Instant::now();
        }
    })
    .await
    .expect("the stream moves");
    assert_eq!(answer, expected);
    println!("nothing came for {waited:?}");
    assert!(waited < longest, "it took {waited:?} of {longest:?}");
    let process = |up: &Up| {
        let status = up.status();
        let processes = status["processes"].as_array().cloned().unwrap_or_default();
        let of_rank = processes
            .into_iter()
            .find(|process| process["rank"] == stopped);
        of_rank.unwrap_or_default()
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while process(&up)["hung"] != true {
        assert!(Instant::now() < deadline, "{:#}", process(&up));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (_, table, _) = run(hearth().args(["status", "--state-dir"]).arg(up.state_dir()));
    assert!(table.contains("1/2 hung"), "{table}");
    up.signal(stopped, Signal::CONT);
    up.wait_for("both serve again", |metrics| {
        DECODE
            .iter()
            .all(|rank| metrics.of_rank("hearth_worker_ready", rank) > 0.0)
    });
}

#[tokio::test]
async fn both_workers_of_each_pool_take_part() {
    let (up, _directory) = two_of_each();
    let v1 = up.v1();
    let requests = (0..8).map(|number| {
        let v1 = &v1;
        async move {
            // Each has a distinct prefix, which no worker has cached.
            let question = format!("{number}. {}", long_question());
            let body = chat_body("hearth-demo", &question, 24);
            chat_stream(v1, &body, |_, _| {}).await.expect("answer")
        }
    });
    futures::future::join_all(requests).await;
    up.wait_for("all four have worked", |metrics| {
        ["prefill-0", "prefill-1", "decode-0", "decode-1"]
            .iter()
            .all(|rank| metrics.of_rank("hearth_worker_kv_moved_bytes_total", rank) > 0.0)
    });
}

#[tokio::test]
async fn without_a_prefill_worker_answers_are_the_same() {
    let bodies = [chat_body("hearth-demo", &long_question(), 60), seeded()];
    let (demo, _directory) = serve(|_| {});
    let mut expected = Vec::new();
    for body in &bodies {
        expected.push(undisturbed(&demo, body).await);
    }
    drop(demo);
    let (up, _directory) = serve(|spec| spec["prefill"] = json!({"mode": "Chunked"}));
    let status = up.status();
    let processes = status["processes"].as_array().cloned().unwrap_or_default();
    let ranks: Vec<&Value> = processes.iter().map(|process| &process["rank"]).collect();
    assert_eq!(ranks, ["gateway-0", "decode-0"]);
    for (body, expected) in bodies.iter().zip(&expected) {
        assert_eq!(undisturbed(&up, body).await, *expected);
    }
    // A death costs nothing here either.
    let mut is_killed = false;
    let answer = chat_stream(&up.v1(), &bodies[1], |pieces, _| {
        if pieces == 9 {
            up.signal("decode-0", Signal::KILL);
            is_killed = true;
        }
    })
    .await
    .expect("the stream survives");
    assert_eq!(answer, expected[1]);
    assert!(is_killed);
}

#[tokio::test]
async fn the_cache_has_the_type_and_the_size_that_the_spec_says() {
    const MEMORY_BYTES: f64 = (8 << 20) as f64;
    let (up, _directory) = serve(|spec| {
        spec["decode"]["kvCache"] = json!({"keyType": "F32", "valueType": "F32", "memory": "8Mi"});
    });
    undisturbed(&up, &chat_body("hearth-demo", &long_question(), 60)).await;
    let plan: Value = {
        let text = std::fs::read(up.state_dir().join("demo/plan.json")).expect("plan");
        serde_json::from_slice(&text).expect("JSON")
    };

    let ranks = plan["ranks"].as_array().expect("ranks");
    let kv = &ranks
        .iter()
        .find(|rank| rank["name"] == "decode-0")
        .expect("decode-0")["kv"];
    assert_eq!(
        (&kv["keyType"], &kv["memoryBytes"]),
        (&json!("F32"), &json!(8 << 20))
    );
    let block_tokens = kv["blockTokens"].as_f64().expect("block");
    // A report in the middle of the request covers a part; everything has moved once no blocks are held.
    let metrics = up.wait_for("the KV has moved", |metrics| {
        metrics.of_rank("hearth_worker_kv_moved_bytes_total", "decode-0") > 0.0
            && metrics.of_rank("hearth_worker_kv_blocks_used", "decode-0") == 0.0
    });
    let prompt_tokens = metrics.sum("hearth_prompt_tokens_total", &[]);
    let token_bytes =
        metrics.of_rank("hearth_worker_kv_moved_bytes_total", "decode-0") / prompt_tokens;
    let config: Value = {
        let path = hearth_tests::root().join("models/hearth-demo/config.json");
        serde_json::from_slice(&std::fs::read(path).expect("config")).expect("JSON")
    };
    let number = |field: &str| config[field].as_f64().expect("number");
    let values =
        number("num_hidden_layers") * (number("kv_lora_rank") + number("qk_rope_head_dim"));
    assert_eq!(token_bytes, values * 4.0, "bytes that a token's KV has");
    let blocks = metrics.of_rank("hearth_worker_kv_blocks", "decode-0");
    let held = blocks * block_tokens * token_bytes;
    assert!(
        held <= MEMORY_BYTES && held > 0.9 * MEMORY_BYTES,
        "{blocks} blocks hold {held} bytes"
    );
    let answer = undisturbed(&up, &chat_body("hearth-demo", QUESTION, 60)).await;
    assert!(answer.text.contains("Hearth"), "{answer:?}");
}
