//! Bad input gets a clear error: over HTTP, and from the worker's tools.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use hearth_tests::{Up, UpOptions, chat_body, chat_stream, root, run, worker};
use serde_json::{Value, json};

/// A copy of the demo model in `directory`, to be damaged.
fn copy_of_demo(directory: &Path) -> PathBuf {
    let model = directory.join("model");
    std::fs::create_dir(&model).expect("directory");
    for entry in std::fs::read_dir(root().join("models/hearth-demo"))
        .expect("demo model")
        .flatten()
    {
        std::fs::copy(entry.path(), model.join(entry.file_name())).expect("copy");
    }
    model
}

fn generate(model: &Path) -> String {
    let (code, stdout, stderr) = run(worker()
        .args([
            "generate",
            "--tokens",
            "1,2,3",
            "--max-tokens",
            "2",
            "--model",
        ])
        .arg(model));
    assert_eq!(code, 1, "accepted:\n{stdout}");
    assert!(
        stderr.contains("error: ") && !stderr.contains("panicked"),
        "{stderr}"
    );
    stderr
}

fn edit_config(model: &Path, edit: impl FnOnce(&mut Value)) {
    let path = model.join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    edit(&mut config);
    std::fs::write(path, config.to_string()).expect("write");
}

#[test]
fn damaged_models_are_refused_by_name() {
    type Damage = fn(&Path);
    let cases: [(&str, Damage, &[&str]); 7] = [
        (
            "truncated weights",
            |model| {
                let path = model.join("model.safetensors");
                let bytes = std::fs::read(&path).expect("weights");
                std::fs::write(path, &bytes[..bytes.len() / 2]).expect("write");
            },
            &["model.safetensors", "shorter", "download"],
        ),
        (
            "header longer than the file",
            |model| {
                let path = model.join("model.safetensors");
                let mut bytes = std::fs::read(&path).expect("weights");
                bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
                std::fs::write(path, bytes).expect("write");
            },
            &["model.safetensors", "header"],
        ),
        (
            "unsupported architecture",
            |model| edit_config(model, |config| config["model_type"] = json!("mamba")),
            &["mamba", "deepseek_v3"],
        ),
        (
            "config without a field",
            |model| {
                edit_config(model, |config| {
                    config
                        .as_object_mut()
                        .expect("object")
                        .remove("hidden_size");
                })
            },
            &["hidden_size"],
        ),
        (
            "wrong shape",
            |model| {
                edit_config(model, |config| {
                    config["vocab_size"] =
                        json!(config["vocab_size"].as_u64().expect("number") + 1);
                })
            },
            &["embed_tokens"],
        ),
        (
            "unknown rope type",
            |model| {
                edit_config(model, |config| {
                    config["rope_scaling"] = json!({"rope_type": "wavy", "factor": 2.0});
                })
            },
            &["wavy"],
        ),
        (
            "no weights",
            |model| std::fs::remove_file(model.join("model.safetensors")).expect("remove"),
            &["safetensors"],
        ),
    ];
    for (name, damage, expected) in cases {
        let directory = tempfile::tempdir().expect("directory");
        let model = copy_of_demo(directory.path());
        damage(&model);
        let message = generate(&model);
        for word in expected {
            assert!(message.contains(word), "{name}: no {word:?} in\n{message}");
        }
    }
}

#[test]
fn a_model_that_does_not_load_is_told_by_hearth_up() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    std::fs::write(model.join("model.safetensors"), b"nothing").expect("write");
    let file = deployment(directory.path(), &model);
    let mut up = Up::spawn(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    assert_eq!(up.wait(), 1);
    let output = up.output();
    assert!(
        output.contains("error: ") && output.contains("model.safetensors"),
        "{output}"
    );
}

/// The demo's deployment over another directory.
fn deployment(directory: &Path, model: &Path) -> PathBuf {
    let demo =
        std::fs::read_to_string(root().join("manifests/examples/demo.yaml")).expect("demo.yaml");
    let mut deployment: Value = serde_norway::from_str(&demo).expect("demo.yaml is YAML");
    deployment["spec"]["model"]["source"] = json!({"hostPath": {"path": model}});
    let file = directory.join("deployment.yaml");
    std::fs::write(&file, deployment.to_string()).expect("write");
    file
}

#[tokio::test]
async fn weights_deleted_under_a_running_worker_do_not_stop_it() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    let file = deployment(directory.path(), &model);
    let up = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    let name = up.status()["servedName"].as_str().expect("name").to_owned();
    let body = chat_body(&name, "What is Hearth?", 24);
    let before = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("answer");
    std::fs::remove_file(model.join("model.safetensors")).expect("remove");
    let after = chat_stream(&up.v1(), &body, |_, _| {})
        .await
        .expect("mapped weights outlive their file");
    assert_eq!(after, before);
}

/// One raw HTTP exchange: status and body.
fn raw(up: &Up, head: &str, body: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(up.base().trim_start_matches("http://")).expect("connect");
    stream.write_all(head.as_bytes()).expect("head");
    // The server may answer and close before it has read a hostile body to its end.
    let _ = stream.write_all(body);
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    let text = String::from_utf8_lossy(&response).into_owned();
    let status = text
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .unwrap_or_else(|| panic!("no status in {text:?}"));
    (status, text)
}

fn post(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
}

#[test]
fn hostile_requests_get_openai_errors_and_the_server_stays_up() {
    let up = Up::demo();
    let path = "/v1/chat/completions";
    let valid =
        r#"{"model":"hearth-demo","messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;
    let long = format!(
        r#"{{"model":"hearth-demo","messages":[{{"role":"user","content":"{}"}}]}}"#,
        "word ".repeat(50_000)
    );
    let cases: [(&[u8], u16, &str); 8] = [
        (b"{\"model\": \"hearth-demo\", ", 400, "JSON"),
        (b"{\"model\": \"\xff\xfe\"}", 400, "UTF-8"),
        (b"", 400, "error"),
        (b"[]", 400, "error"),
        (br#"{"model":"hearth-demo","messages":[{"role":"user","content":"hi"}],"max_tokens":-1}"#, 400, "max_tokens"),
        (br#"{"model":"hearth-demo","messages":[{"role":"user","content":"hi"}],"max_tokens":0}"#, 400, "max_tokens"),
        (br#"{"model":"nope","messages":[{"role":"user","content":"hi"}]}"#, 404, "hearth-demo"),
        (long.as_bytes(), 400, "context"),
    ];
    for (body, status, expected) in cases {
        let (got, text) = raw(&up, &post(path, body.len()), body);
        assert_eq!(got, status, "{text}");
        assert!(
            text.contains("\"error\"") && text.contains(expected),
            "no {expected:?} in {text}"
        );
    }

    // 100 MB: refused by its length, whatever of it arrives.
    let (status, text) = raw(&up, &post(path, 100 << 20), &vec![b' '; 1 << 20]);
    assert_eq!(status, 413, "{text}");
    assert!(text.contains("\"error\""), "{text}");

    let (status, text) = raw(
        &up,
        "GET /v1/nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"",
    );
    assert_eq!((status, text.contains("\"error\"")), (404, true), "{text}");
    let (status, _) = raw(
        &up,
        &format!(
            "GET / HTTP/1.1\r\nHost: x\r\nX-Long: {}\r\nConnection: close\r\n\r\n",
            "x".repeat(1 << 20)
        ),
        b"",
    );
    assert!((400..500).contains(&status), "{status}");

    let (status, text) = raw(&up, &post(path, valid.len()), valid.as_bytes());
    assert_eq!(status, 200, "{text}");
    for process in up.status()["processes"]
        .as_array()
        .cloned()
        .unwrap_or_default()
    {
        assert_eq!(process["restarts"], 0, "{process}");
    }
}
