//! Bad input gets a clear error, over HTTP and from `hearth up`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use hearth_tests::{Up, UpOptions, chat_body, chat_stream, copy_of_demo, deployment};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Returns options to serve the demo's deployment with the test's own model.
fn over(directory: &Path, model: &Path) -> UpOptions {
    let file = deployment(directory, |spec| {
        spec["model"]["source"] = json!({"hostPath": {"path": model}});
    });
    UpOptions {
        file: Some(file),
        ..UpOptions::default()
    }
}

#[test]
fn a_model_that_does_not_load_is_told_by_hearth_up() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    std::fs::write(model.join("model.safetensors"), b"nothing").expect("write");
    let mut up = Up::spawn(&over(directory.path(), &model));
    assert_eq!(up.wait(), 1);
    let output = up.output();
    assert!(
        output.contains("error: ") && output.contains("model.safetensors"),
        "{output}"
    );
}

#[test]
fn a_tokenizer_larger_than_the_vocabulary_is_told_by_hearth_up() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    let path = model.join("tokenizer.json");
    let mut tokenizer: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("tokenizer")).expect("JSON");
    let added = tokenizer["added_tokens"].as_array_mut().expect("tokens");
    let mut token = added[0].clone();
    token["id"] = json!(2048);
    token["content"] = json!("<|more|>");
    added.push(token);
    std::fs::write(path, tokenizer.to_string()).expect("write");
    let mut up = Up::spawn(&over(directory.path(), &model));
    assert_eq!(up.wait(), 1);
    let output = up.output();
    let message = &output[output.find("error: ").expect("an error")..];
    for expected in ["tokenizer.json", "2049", "config.json", "vocab_size 2048"] {
        assert!(message.contains(expected), "no {expected:?} in\n{message}");
    }
}

#[tokio::test]
async fn weights_deleted_under_a_running_worker_do_not_stop_it() {
    let directory = tempfile::tempdir().expect("directory");
    let model = copy_of_demo(directory.path());
    let mut up = Up::start(&over(directory.path(), &model));
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

    // A worker that no longer finds its weights reports it where the user looks; one that still has them keeps
    // serving.
    up.signal("decode-0", Signal::KILL);
    up.wait_for_output("model.safetensors");
    let status = up.status();
    let processes = status["processes"].as_array().expect("processes");
    for process in processes {
        let is_gone = process["rank"] == "decode-0";
        assert_eq!(process["ready"], !is_gone, "{status:#}");
    }
}

const HUGE_BYTES: usize = 100 << 20;

/// Performs one raw HTTP exchange; returns status and body.
fn raw(up: &Up, head: &str, body: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(up.base().trim_start_matches("http://")).expect("connect");
    stream.write_all(head.as_bytes()).expect("head");
    // The server may answer and close before it has read all of a hostile body.
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

fn post_chunked(path: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
}

/// Builds a body of spaces in chunks of one mebibyte.
fn chunked(bytes: usize) -> Vec<u8> {
    let piece = vec![b' '; 1 << 20];
    let mut body = Vec::new();
    for _ in 0..bytes >> 20 {
        body.extend_from_slice(b"100000\r\n");
        body.extend_from_slice(&piece);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(b"0\r\n\r\n");
    body
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

    // 100 MB, with and without their length announced.
    let (status, text) = raw(&up, &post(path, HUGE_BYTES), &vec![b' '; HUGE_BYTES]);
    assert_eq!(status, 413, "{text}");
    assert!(text.contains("\"error\""), "{text}");
    let (status, text) = raw(&up, &post_chunked(path), &chunked(HUGE_BYTES));
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

    for (head, body) in [
        (post(path, valid.len()), valid.to_owned()),
        (
            post_chunked(path),
            format!("{:x}\r\n{valid}\r\n0\r\n\r\n", valid.len()),
        ),
    ] {
        let (status, text) = raw(&up, &head, body.as_bytes());
        assert_eq!(status, 200, "{text}");
    }
    for process in up.status()["processes"]
        .as_array()
        .cloned()
        .unwrap_or_default()
    {
        assert_eq!(process["restarts"], 0, "{process}");
    }
}
