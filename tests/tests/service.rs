//! Behaviour while serving: keys, clients that leave, repeated prompts, a gateway that dies.

use std::time::{Duration, Instant};

use hearth_tests::{
    Metrics, Up, UpOptions, chat_body, chat_stream, cpu_time, hearth, queried_metrics, run,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

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
    assert_dashboard_is_answered(&up.metrics());
}

/// Asserts that a gateway that has answered exports what the dashboard and the alerts ask of gateways.
fn assert_dashboard_is_answered(metrics: &Metrics) {
    let of_others = [
        "hearth_operator_",
        "hearth_deployment_",
        "hearth_node_",
        "hearth_agent_",
    ];
    // They appear with the first one.
    let rare = ["hearth_failovers_total", "hearth_clients_cut_total"];
    let names = metrics.names();
    let missing: Vec<String> = queried_metrics()
        .into_iter()
        .filter(|name| !of_others.iter().any(|start| name.starts_with(start)))
        .filter(|name| !names.contains(name) && !rare.contains(&&**name))
        .collect();
    assert!(missing.is_empty(), "nobody exports {missing:?}: {names:?}");
}

/// Returns a prompt near the context length that shares no prefix with another.
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
    const CLIENTS: usize = 24;
    let up = Up::demo();
    // KV of one prompt, to know when the others were not computed.
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
    // All except the last block's tokens, whose logits must be computed.
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

/// Connects a client that asks for a long stream with all log-probabilities and reads only a few packets of it.
async fn mute_client(up: &Up, number: usize) -> TcpStream {
    let base = up.base();
    let address = base.trim_start_matches("http://").parse().expect("address");
    let socket = TcpSocket::new_v4().expect("socket");
    socket.set_recv_buffer_size(4096).expect("a small buffer");
    let mut stream = socket.connect(address).await.expect("connected");
    let mut body = chat_body("hearth-demo", &format!("{number}. Tell a long story."), 200);
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(20);
    body["ignore_eos"] = json!(true);
    let body = body.to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.expect("asked");
    stream
}

#[tokio::test]
async fn clients_that_never_read_starve_nobody() {
    const CLIENTS: usize = 20;
    // Longer than their answers take on a busy machine: those cut off before are never computed.
    let up = Up::start(&UpOptions {
        arguments: ["--client-stall", "30"].map(str::to_owned).to_vec(),
        ..UpOptions::default()
    });
    let mut mute = Vec::new();
    for number in 0..CLIENTS {
        mute.push(mute_client(&up, number).await);
    }
    let began = Instant::now();
    let body = chat_body("hearth-demo", "What is Hearth?", 16);
    let answer = chat_stream(&up.v1(), &body, |_, _| {}).await;
    assert_eq!(answer.expect("another is served").completion_tokens, 16);
    println!("another was served in {:?}", began.elapsed());
    // Their answers are computed although nobody reads them, and no worker's slot is held.
    let up = tokio::task::spawn_blocking(move || {
        up.wait_for("all of their answers are done", |metrics| {
            metrics.count("hearth_choices_finished_total") > CLIENTS as f64 && is_idle(metrics)
        });
        // Clients that read nothing are disconnected.
        up.wait_for("they are cut off", |metrics| {
            metrics.count("hearth_clients_cut_total") >= CLIENTS as f64
        });
        up
    });
    let up = up.await.expect("it comes to that");
    assert_eq!(up.metrics().sum("hearth_answers_waiting_bytes", &[]), 0.0);
    drop(mute);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_for_many_choices_starves_nobody() {
    let up = Up::demo();
    let mut many = chat_body("hearth-demo", "What is Hearth?", 600);
    many["n"] = json!(128);
    many["ignore_eos"] = json!(true);
    let alone = chat_body("hearth-demo", "Hello", 16);
    let expected = chat_stream(&up.v1(), &alone, |_, _| {})
        .await
        .expect("alone");
    let v1 = up.v1();
    let greedy = tokio::spawn(async move { chat_stream(&v1, &many, |_, _| {}).await });
    let up = tokio::task::spawn_blocking(move || {
        up.wait_for("several choices are computed", |metrics| {
            metrics.of_role("hearth_worker_running", "decode") > 2.0
        });
        up
    });
    let up = up.await.expect("it comes to that");
    let began = Instant::now();
    let answer = chat_stream(&up.v1(), &alone, |_, _| {}).await;
    println!(
        "16 tokens beside a request for 128 times 600: {:?}",
        began.elapsed()
    );
    assert_eq!(answer.expect("beside it"), expected);
    assert!(!greedy.is_finished());
    greedy.abort();
}

/// Returns a field of a process's memory in bytes, such as VmHWM, its peak.
fn memory_bytes(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.trim_start_matches(':').trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok())
        .expect("a size")
        * 1024
}

/// Posts a body; returns the status, the error's code, and the time taken.
async fn post(client: &reqwest::Client, v1: &str, body: String) -> (u16, String, Duration) {
    let began = Instant::now();
    let request = client.post(format!("{v1}/chat/completions"));
    let request = request
        .header("content-type", "application/json")
        .body(body);
    let response = request.send().await.expect("response");
    let status = response.status().as_u16();
    let answer: Value = response.json().await.expect("JSON");
    let code = answer["error"]["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    (status, code, began.elapsed())
}

/// Returns a request with additional members besides model and message.
fn with(extra: Value) -> String {
    let mut body =
        json!({"model": "hearth-demo", "messages": [{"role": "user", "content": "Hello"}]});
    let members = extra.as_object().expect("object").clone();
    body.as_object_mut().expect("object").extend(members);
    body.to_string()
}

/// Returns bodies near the limit of 8 MiB, each hard in a different way, with the codes by which they may be refused.
fn hard_bodies() -> Vec<(&'static str, String, &'static str)> {
    let message = |text: String| with(json!({"messages": [{"role": "user", "content": text}]}));
    let schema = |schema: Value| {
        with(
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        )
    };
    let words = |count: usize| {
        (0..count)
            .map(|i| format!("word number {i}"))
            .collect::<Vec<_>>()
    };
    let many = vec![json!({"role": "user", "content": "Hello"}); 100_000];
    let tool = |i: usize| {
        let parameters = json!({"type": "object", "properties": {"x": {"enum": words(3000)}}});
        json!({"type": "function", "function": {"name": format!("f{i}"), "parameters": parameters, "strict": true}})
    };
    let tools: Vec<Value> = (0..100).map(tool).collect();
    vec![
        (
            "a message of words",
            message("The lab has a server. ".repeat(380_000)),
            "context_length_exceeded",
        ),
        (
            "a message of one letter",
            message("a".repeat(8_000_000)),
            "context_length_exceeded",
        ),
        (
            "a message of blanks",
            message(format!("a{}a", " ".repeat(8_000_000))),
            "context_length_exceeded",
        ),
        (
            "100,000 messages",
            with(json!({"messages": many})),
            "too_many_values",
        ),
        (
            "an enum of 5 MB",
            schema(json!({"enum": words(250_000)})),
            "invalid_json_schema context_length_exceeded",
        ),
        (
            "a hundred tools with large enums",
            with(json!({"tools": tools, "tool_choice": "required"})),
            "invalid_value",
        ),
        (
            "a string in 4,000,000 pieces",
            with(json!({"stop": "x"})).replace("\"x\"", &format!("[{}0]", "0,".repeat(4_000_000))),
            "too_many_values",
        ),
        (
            "128 choices with stop strings of 1.9 MB",
            with(json!({"n": 128, "max_tokens": 5, "stop": vec!["x".repeat(1_900_000); 4]})),
            "invalid_value",
        ),
        ("100,000 brackets", "[".repeat(100_000), "invalid_json"),
    ]
}

#[tokio::test]
async fn large_requests_are_refused_soon_and_delay_nobody() {
    let up = Up::demo();
    let (v1, client) = (up.v1(), reqwest::Client::new());
    let pid = up.pid("gateway-0");
    let before = memory_bytes(pid, "VmRSS");
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("the peak is forgotten");
    let large = with(
        json!({"messages": [{"role": "user", "content": "The lab has a server. ".repeat(380_000)}]}),
    );
    let began = Instant::now();
    let all = futures::future::join_all((0..10).map(|_| post(&client, &v1, large.clone())));
    let others = async {
        let mut longest = Duration::ZERO;
        let small = with(json!({"max_tokens": 1}));
        for _ in 0..20 {
            let (status, _, took) = post(&client, &v1, small.clone()).await;
            assert_eq!(status, 200);
            longest = longest.max(took);
        }
        longest
    };
    let (all, longest) = tokio::join!(all, others);
    let peak = memory_bytes(pid, "VmHWM");
    println!(
        "ten of 8 MB at once: refused within {:?}, memory from {} to at most {} MiB, others served within {longest:?}",
        began.elapsed(),
        before >> 20,
        peak >> 20
    );
    assert!(
        all.iter()
            .all(|(_, code, _)| code == "context_length_exceeded"),
        "{all:?}"
    );
    assert!(peak < before + (100 << 20), "from {before} to {peak} bytes");
    for (what, body, expected) in hard_bodies() {
        let (bytes, before) = (body.len(), cpu_time(pid));
        let answer = tokio::time::timeout(Duration::from_secs(60), post(&client, &v1, body)).await;
        let (status, code, took) = answer.unwrap_or_else(|_| panic!("no answer to {what}"));
        let computed = cpu_time(pid) - before;
        println!(
            "{what} ({bytes} bytes): {status} {code} after {took:?}, {computed:?} of CPU time"
        );
        assert!((400..500).contains(&status), "{what}: {status}");
        assert!(expected.split(' ').any(|one| one == code), "{what}: {code}");
        // Half a second on a fast machine with a fast build; this bound assumes neither. Other processes' CPU time
        // does not count.
        assert!(computed < Duration::from_secs(5), "{what}: {computed:?}");
    }
    println!(
        "memory after them: at most {} MiB",
        memory_bytes(pid, "VmHWM") >> 20
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_with_large_schemas_hold_up_no_small_one() {
    const HEAVY: usize = 10;
    let up = Up::demo();
    let (v1, client) = (up.v1(), reqwest::Client::new());
    let held_to = |schema: Value| {
        with(
            json!({"max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        )
    };
    let names: Vec<String> = (0..4000).map(|i| format!("property {i}")).collect();
    let types: serde_json::Map<String, Value> = names
        .iter()
        .map(|name| (name.clone(), json!({"type": "null"})))
        .collect();
    let properties = json!({"type": "object", "properties": types, "required": names});
    for (what, schema) in [
        ("a const of 240 KB", json!({"const": "x".repeat(240_000)})),
        ("4,000 properties", properties),
    ] {
        let mut heavy = tokio::task::JoinSet::new();
        for _ in 0..HEAVY {
            let (client, v1, body) = (client.clone(), v1.clone(), held_to(schema.clone()));
            heavy.spawn(async move { post(&client, &v1, body).await });
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (status, _, took) = post(&client, &v1, with(json!({"max_tokens": 1}))).await;
        assert_eq!(status, 200);
        let done = std::iter::from_fn(|| heavy.try_join_next()).count();
        println!("beside {HEAVY} with {what}: {took:?}, {done} of them done");
        assert!(done < HEAVY, "it waited for all of them");
        while let Some(done) = heavy.join_next().await {
            let (status, code, _) = done.expect("an answer");
            assert!(status == 200 || status == 400, "{status} {code}");
        }
    }
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
    // An endless stream, since its worker is stopped: the first Ctrl-C would wait for all of its grace period.
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
    up.wait_for_output("draining: streams in flight");
    // Once it has said nothing for three seconds.
    up.wait_for_output("draining waits for decode-0, which hangs: ");
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
    assert!(
        up.output()
            .ends_with("stopped at once: what was in flight was cut off\n"),
        "{}",
        up.output()
    );
}
