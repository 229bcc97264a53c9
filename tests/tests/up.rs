//! `hearth up` as users see it: its output, the other commands, and how it ends.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use hearth_tests::{
    Up, UpOptions, chat_body, chat_stream, deployment, hearth, root, run, skipped, worker,
    write_certificates,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Longest end of what has nothing in flight, whatever hangs, on a busy machine; the grace period is 30 s.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn one_command_answers_a_question_and_ends_cleanly() {
    let options = UpOptions {
        arguments: ["--ask", "What is Hearth?", "--once"]
            .map(str::to_owned)
            .to_vec(),
        ..UpOptions::default()
    };
    let mut up = Up::spawn(&options);
    assert_eq!(up.wait(), 0, "{}", up.output());
    let output = up.output();
    for expected in [
        "is valid",
        "this machine:",
        "deepseek_v3",
        "plan 1",
        "prefill",
        "decode",
        "ready in",
        "OpenAI endpoint",
        "Hearth",
        "stopped",
    ] {
        assert!(output.contains(expected), "no {expected:?} in\n{output}");
    }
}

#[tokio::test]
async fn commands_beside_it_see_what_runs() {
    let up = Up::demo();
    // It is ready when every worker is reached: the first prompt goes where the plan says.
    let reached = reqwest::get(format!("{}/ready", up.base())).await;
    let reached: Value = reached.expect("a response").json().await.expect("JSON");
    assert_eq!(reached["prefill"], json!({"ready": 1, "of": 1}));
    assert_eq!(reached["decode"], json!({"ready": 1, "of": 1}));
    chat_stream(
        &up.v1(),
        &chat_body("hearth-demo", "What is Hearth?", 16),
        |_, _| {},
    )
    .await
    .expect("answer");

    let status = up.status();
    assert_eq!(status["servedName"], "hearth-demo");
    assert_eq!(
        status["processes"].as_array().map(Vec::len),
        Some(3),
        "{status:#}"
    );
    assert!(
        status["measured"]["ttftMs"]
            .as_f64()
            .is_some_and(|ms| ms > 0.0),
        "{status:#}"
    );

    let state = up.state_dir();
    let (code, table, _) = run(hearth().arg("status").arg("--state-dir").arg(state));
    assert_eq!(code, 0);
    assert!(
        table.contains("1/1") && table.contains("hearth-demo"),
        "{table}"
    );

    let (code, answer, errors) = run(hearth()
        .args(["chat", "--message", "What is Hearth?", "--state-dir"])
        .arg(state));
    assert_eq!(code, 0, "{errors}");
    assert!(answer.to_lowercase().contains("hearth"), "{answer}");

    let mut chat = hearth();
    chat.args(["chat", "--state-dir"])
        .arg(state)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut chat = chat.spawn().expect("chat");
    chat.stdin
        .take()
        .expect("stdin")
        .write_all(b"What is Hearth?\nWhat is a KV cache?\n")
        .expect("write");
    let output = chat.wait_with_output().expect("chat ends with its input");
    assert!(output.status.success());
    assert_eq!(
        String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter(|line| !line.is_empty())
            .count(),
        2
    );

    let (code, logs, _) = run(hearth()
        .args(["logs", "demo", "decode-0", "--state-dir"])
        .arg(state));
    assert_eq!(code, 0);
    assert!(logs.contains("serving"), "{logs}");
}

#[test]
fn the_plan_is_shown_without_starting_anything() {
    let state = tempfile::tempdir().expect("directory");
    let file = root().join("manifests/examples/demo.yaml");
    let plan = |format: &str| {
        let (code, stdout, stderr) = run(hearth()
            .arg("plan")
            .arg("-f")
            .arg(&file)
            .args(["-o", format, "--state-dir"])
            .arg(state.path()));
        assert_eq!(code, 0, "{stderr}");
        stdout
    };
    let table = plan("table");
    for expected in ["ROLE", "prefill", "decode", "Why", "Not chosen"] {
        assert!(table.contains(expected), "no {expected} in\n{table}");
    }
    let json: Value = serde_json::from_str(&plan("json")).expect("JSON alone on standard output");
    assert_eq!(json["ranks"].as_array().map(Vec::len), Some(3), "{json:#}");
    assert!(plan("yaml").contains("ranks:"));
}

#[test]
fn errors_name_the_field_the_value_and_the_remedy() {
    let state = tempfile::tempdir().expect("directory");
    let cases = [
        ("maxBatch: 8", "maxBatch: 0", "spec.decode.maxBatch is 0"),
        ("maxBatch: 8", "maxBatsch: 8", "maxBatsch"),
        ("name: hearth-demo", "name: no-such-model", "no-such-model"),
        (
            "contextLength: 2048",
            "contextLength: 900000",
            "contextLength",
        ),
        (
            "contextLength: 2048",
            "contextLength: 99999999999999999999",
            "spec.model.contextLength is 99999999999999999999\n  no field holds so large a number",
        ),
        (
            "spec:",
            "spec:\n  strategy: {type: Hybrid}",
            "write strategy: Hybrid\n",
        ),
    ];
    let demo =
        std::fs::read_to_string(root().join("manifests/examples/demo.yaml")).expect("demo.yaml");
    for (from, to, expected) in cases {
        assert!(demo.contains(from), "demo.yaml has no {from:?}");
        let file = state.path().join("bad.yaml");
        std::fs::write(&file, demo.replace(from, to)).expect("write");
        let (code, stdout, stderr) = run(hearth()
            .arg("up")
            .arg("-f")
            .arg(&file)
            .args(["--port", "0", "--state-dir"])
            .arg(state.path()));
        assert_eq!(code, 1, "{to}: {stdout}{stderr}");
        assert!(
            stderr.contains("error: ") && stderr.contains(expected),
            "{to}:\n{stderr}"
        );
        let message = &stderr[stderr.find("error: ").unwrap_or_default()..];
        assert!(
            message.lines().count() >= 2,
            "no remedy for {to}:\n{message}"
        );
        assert!(!message.contains("panicked"), "{message}");
    }
}

#[test]
fn a_port_in_use_names_its_holder_and_another_port() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("port");
    let port = listener.local_addr().expect("address").port();
    let state = tempfile::tempdir().expect("directory");
    let file = root().join("manifests/examples/demo.yaml");
    let (code, _, stderr) = run(hearth()
        .arg("up")
        .arg("-f")
        .arg(file)
        .args(["--port", &port.to_string(), "--state-dir"])
        .arg(state.path()));
    assert_eq!(code, 1);
    assert!(
        stderr.contains(&format!(
            "port {port} is in use by process {}",
            std::process::id()
        )),
        "{stderr}"
    );
    assert!(stderr.contains("--port"), "{stderr}");
}

#[test]
fn a_second_up_is_told_of_the_first_and_not_to_take_another_port() {
    let first = Up::demo();
    let up = first.status()["pid"].clone();
    let own = first.base().replace("http://127.0.0.1:", "");
    for port in [own.as_str(), "0"] {
        let (code, _, stderr) = run(hearth()
            .arg("up")
            .arg("-f")
            .arg(root().join("manifests/examples/demo.yaml"))
            .args(["--port", port, "--state-dir"])
            .arg(first.state_dir()));
        assert_eq!(code, 1, "{stderr}");
        let expected = format!(
            "error: demo is already served at {} by process {up}\n",
            first.v1()
        );
        assert!(stderr.starts_with(&expected), "{stderr}");
    }
}

#[test]
fn the_line_to_try_works_as_pasted() {
    let up = Up::demo();
    let output = up.output();
    let line = output
        .lines()
        .find_map(|line| line.trim().strip_prefix("try "))
        .and_then(|line| line.trim().strip_suffix(" or"))
        .unwrap_or_else(|| panic!("no line to try in\n{output}"));
    let (code, answer, errors) = run(std::process::Command::new("bash")
        .args(["-c", &format!("{line} -m 'What is Hearth?'")])
        .env("PATH", "/usr/bin:/bin"));
    assert_eq!(code, 0, "{line}: {errors}");
    assert!(answer.contains("Hearth"), "{answer}");
}

#[test]
fn what_the_gateway_would_refuse_is_refused_before_anything_is_measured() {
    let directory = tempfile::tempdir().expect("directory");
    for name in ["own", "other"] {
        let made = directory.path().join(name);
        std::fs::create_dir(&made).expect("directory");
        write_certificates(&made, &["127.0.0.1"]);
    }
    let garbage = directory.path().join("garbage");
    std::fs::create_dir(&garbage).expect("directory");
    for name in ["tls.crt", "tls.key", "ca.crt"] {
        std::fs::write(garbage.join(name), "no PEM\n").expect("write");
    }
    let file = |path: &str| directory.path().join(path).display().to_string();
    let (cert, key) = (file("own/tls.crt"), file("own/tls.key"));
    let cases: [(&[&str], &str); 5] = [
        (
            &["--cors-origin", "localhost:3000"],
            "--cors-origin is \"localhost:3000\"\n  an origin is a scheme, a host and a port",
        ),
        (
            &[
                "--https-cert",
                &file("garbage/tls.crt"),
                "--https-key",
                &key,
            ],
            "--https-cert is ",
        ),
        (
            &[
                "--https-cert",
                &cert,
                "--https-key",
                &file("garbage/tls.key"),
            ],
            "--https-key is ",
        ),
        (
            &["--https-cert", &cert, "--https-key", &file("other/tls.key")],
            "which does not belong to --https-cert",
        ),
        (&["--tls-dir", &file("garbage")], "tls.crt of --tls-dir is "),
    ];
    for (arguments, expected) in cases {
        let (code, _, stderr) = run(hearth()
            .args(["up", "--port", "0", "-f"])
            .arg(root().join("manifests/examples/demo.yaml"))
            .args(arguments)
            .arg("--state-dir")
            .arg(directory.path()));
        assert_eq!(code, 1, "{stderr}");
        let error = stderr.strip_prefix("error: ");
        let error = error.unwrap_or_else(|| panic!("more than an error:\n{stderr}"));
        assert!(error.contains(expected), "no {expected:?} in {stderr}");
        assert_eq!(error.lines().count(), 2, "{stderr}");
    }
}

#[tokio::test]
async fn a_drain_says_how_many_answers_it_cut_off() {
    let options = UpOptions {
        arguments: ["--grace", "0"].map(str::to_owned).to_vec(),
        ..UpOptions::default()
    };
    let mut up = Up::start(&options);
    let mut body = chat_body("hearth-demo", "What is Hearth?", 2000);
    body["logit_bias"] = json!({"1": -100});
    let answer = chat_stream(&up.v1(), &body, |pieces, _| {
        if pieces == 3 {
            up.signal_up(Signal::INT);
        }
    })
    .await;
    assert!(answer.is_err(), "it had no time to end");
    assert_eq!(up.wait(), 0, "{}", up.output());
    let output = up.output();
    assert!(output.contains("streams in flight get 0 s"), "{output}");
    assert!(
        output.contains("stopped; 1 answer was cut off: it had not ended after 0 s (--grace)"),
        "{output}"
    );
}

/// It has nothing to lose.
#[test]
fn a_worker_that_hangs_with_nothing_in_flight_is_not_waited_for() {
    let mut up = Up::demo();
    let pid = up.pid("decode-0");
    up.signal("decode-0", Signal::STOP);
    let told = Instant::now();
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 0);
    let took = told.elapsed();
    assert!(took < SOON, "{took:?}");
    assert!(up.output().ends_with("✔ stopped\n"), "{}", up.output());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_worker_that_says_nothing_while_it_starts_is_named_and_not_waited_for_at_the_end() {
    let directory = tempfile::tempdir().expect("directory");
    let script = directory.path().join("worker");
    let real = worker().get_program().to_string_lossy().into_owned();
    let text = format!(
        "#!/bin/sh\nif [ \"$1\" = decode ]; then trap '' TERM; exec sleep 600; fi\nexec '{real}' \"$@\"\n"
    );
    std::fs::write(&script, text).expect("the script");
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).expect("a program");
    let mut up = Up::spawn(&UpOptions {
        environment: vec![("HEARTH_WORKER".to_owned(), script.display().to_string())],
        ..UpOptions::default()
    });
    up.wait_for_output("decode-0 starts and has said nothing for 10 s: it may hang");
    let told = Instant::now();
    up.signal_up(Signal::INT);
    assert_eq!(up.wait(), 0);
    let took = told.elapsed();
    assert!(took < SOON, "{took:?}");
    let output = up.output();
    assert!(output.ends_with("✔ stopped\n"), "{output}");
    // What has not changed is not said again.
    let waiting = output.matches("ready; waiting for").count();
    assert!(waiting <= 2, "{output}");
}

#[test]
fn what_is_wrong_on_every_machine_is_refused_before_this_one_is_measured() {
    type Edit = fn(&mut Value);
    let as_it_is: Edit = |_| {};
    let cases: [(&str, Edit, &[&str], &[&str]); 8] = [
        (
            "plan",
            |spec| {
                spec["strategy"] = json!("PipedRing");
                spec["prefill"] = json!({"mode": "DistributedStreamLoading"});
                spec["decode"] = json!({"replicas": 2, "dualBatch": "On"});
            },
            &[],
            &[
                "spec.prefill.mode is \"DistributedStreamLoading\"",
                "spec.decode.replicas is 2",
                "spec.decode.dualBatch is \"On\"",
            ],
        ),
        (
            "plan",
            |spec| {
                spec["prefill"] = json!({"gpusPerWorker": 0});
                spec["decode"] = json!({"dualBatch": "On"});
            },
            &[],
            &["spec.decode.dualBatch is \"On\""],
        ),
        (
            "plan",
            |spec| spec["model"]["contextLength"] = json!(900_000),
            &[],
            &["spec.model.contextLength is 900000", "at most"],
        ),
        (
            "plan",
            |spec| spec["decode"] = json!({"kvCache": {"memory": "1Mi"}}),
            &[],
            &["spec.decode.kvCache.memory is 1Mi", "raise it to"],
        ),
        (
            "plan",
            as_it_is,
            &["--node", "attic:memory=0"],
            &["memory is \"0\""],
        ),
        (
            "plan",
            as_it_is,
            &["--node", "attic:memory=2Gi", "--node", "cellar:memory=1Mi"],
            &[
                "memory is \"1Mi\": 128 MiB of a node stay free",
                "cellar:memory=2Gi",
            ],
        ),
        (
            "plan",
            as_it_is,
            &["--node", "attic:memory=420"],
            &["memory is \"420\", which is in bytes: write a unit, as in attic:memory=420Mi"],
        ),
        (
            "up",
            as_it_is,
            &["--profiles", "nodes.yaml"],
            &["'--profiles <FILE>'", "'hearth plan --profiles FILE'"],
        ),
    ];
    for (command, edit, arguments, expected) in cases {
        refused_unmeasured(command, edit, arguments, expected);
    }
}

/// Other strategies' advice would be refused by a ring, too.
#[test]
fn what_a_ring_lacks_is_refused_in_its_own_words() {
    let edit = |spec: &mut Value| {
        spec["strategy"] = json!("PipedRing");
        spec["prefill"] = json!({"gpusPerWorker": 2});
        spec["decode"] = json!({"scaling": {"mode": "Auto"}});
    };
    let expected = [
        "spec.prefill.gpusPerWorker is 2\n  a ring reads prompts itself",
        "spec.decode.scaling.mode is not \"Static\"\n  a ring is one decode worker",
    ];
    refused_unmeasured("plan", edit, &[], &expected);
}

/// Asserts that a command refuses a deployment before it measures this machine, and what it says.
fn refused_unmeasured(
    command: &str,
    edit: impl FnOnce(&mut Value),
    arguments: &[&str],
    expected: &[&str],
) {
    let directory = tempfile::tempdir().expect("directory");
    let file = deployment(directory.path(), edit);
    let (code, _, stderr) = run(hearth()
        .args([command, "-f"])
        .arg(&file)
        .args(arguments)
        .arg("--state-dir")
        .arg(directory.path()));
    assert_ne!(code, 0, "{stderr}");
    for words in expected {
        assert!(stderr.contains(words), "no {words:?} in {stderr}");
    }
    assert!(!stderr.contains("this machine:"), "{stderr}");
}

#[tokio::test]
async fn ctrl_c_finishes_streams_in_flight_and_leaves_no_process() {
    let mut up = Up::demo();
    let pids: Vec<u32> = ["gateway-0", "prefill-0", "decode-0"]
        .iter()
        .map(|rank| up.pid(rank))
        .collect();
    let body = {
        let mut body = chat_body("hearth-demo", "What is Hearth?", 300);
        body["logit_bias"] = json!({"1": -100});
        body
    };
    let expected = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("undisturbed");
    let answer = chat_stream(&up.v1(), &body, |pieces, _| {
        if pieces == 3 {
            up.signal_up(Signal::INT);
        }
    })
    .await
    .expect("a stream in flight is finished");
    assert_eq!(answer, expected);
    assert_eq!(up.wait(), 0);
    for pid in pids {
        assert!(
            !std::path::Path::new(&format!("/proc/{pid}")).exists(),
            "process {pid} is left"
        );
    }
    assert!(up.status().is_null());
}

#[test]
fn workers_end_with_a_killed_hearth_up() {
    let up = Up::demo();
    let pids: Vec<u32> = ["gateway-0", "prefill-0", "decode-0"]
        .iter()
        .map(|rank| up.pid(rank))
        .collect();
    up.signal_up(Signal::KILL);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(40);
    while pids
        .iter()
        .any(|pid| std::path::Path::new(&format!("/proc/{pid}/exe")).exists() && !zombie(*pid))
    {
        assert!(
            std::time::Instant::now() < deadline,
            "workers outlive hearth up"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')')
        .is_none_or(|(_, rest)| rest.trim_start().starts_with('Z'))
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    use std::process::Command;
    let (code, _, stderr) = run(Command::new("bash").args([
        "-c",
        &format!(
            "set -o pipefail; {} crd | head -n 2",
            hearth().get_program().display()
        ),
    ]));
    assert!(!stderr.contains("panicked"), "{stderr}");
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn a_wrong_models_directory_is_refused() {
    let state = tempfile::tempdir().expect("directory");
    let file = root().join("manifests/examples/demo.yaml");
    let mut plan = hearth();
    plan.arg("plan")
        .arg("-f")
        .arg(file)
        .arg("--state-dir")
        .arg(state.path())
        .env("HEARTH_MODELS", "/no/such/place");
    let (code, _, stderr) = run(&mut plan);
    assert_eq!(code, 1, "{stderr}");
    assert!(
        stderr.contains("HEARTH_MODELS is /no/such/place"),
        "{stderr}"
    );
}

#[tokio::test]
async fn any_address_serves_both_ip_versions() {
    let options = UpOptions {
        arguments: ["--host", "::"].map(str::to_owned).to_vec(),
        ..UpOptions::default()
    };
    let up = Up::start(&options);
    let body = chat_body("hearth-demo", "What is Hearth?", 8);
    let ipv4 = chat_stream(&up.v1(), &body, |_, _| {}).await;
    let ipv4 = ipv4.expect("an answer by IPv4");
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        skipped("the endpoint by IPv6: this machine has none");
        return;
    }
    let v1 = up.v1().replace("127.0.0.1", "[::1]");
    let ipv6 = chat_stream(&v1, &body, |_, _| {}).await;
    assert_eq!(ipv6.expect("an answer by IPv6"), ipv4);
}
