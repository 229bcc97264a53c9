//! Mutual TLS between gateway and workers, from certificates in a directory.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hearth_tests::{
    Up, UpOptions, chat_body, chat_stream, hearth, run, worker, write_certificates,
};
use serde_json::Value;

#[tokio::test]
async fn workers_speak_only_to_holders_of_a_certificate() {
    let certificates = tempfile::tempdir().expect("directory");
    write_certificates(certificates.path(), &["127.0.0.1", "localhost"]);
    let arguments = vec![
        "--tls-dir".to_owned(),
        certificates.path().display().to_string(),
    ];
    let up = Up::start(&UpOptions {
        arguments,
        ..UpOptions::default()
    });
    // Long enough for the prefill worker to compute the prompt: both hops are encrypted.
    let question = format!(
        "{}What is Hearth?",
        "The lab has a server and a laptop. ".repeat(12)
    );
    let answer = chat_stream(
        &up.v1(),
        &chat_body("hearth-demo", &question, 16),
        |_, _| {},
    )
    .await
    .expect("answer");
    assert!(answer.completion_tokens > 0);

    assert_traces_need_a_certificate(&up);

    let plan: Value = {
        let text = std::fs::read(up.state_dir().join("demo/plan.json")).expect("plan");
        serde_json::from_slice(&text).expect("JSON")
    };
    for rank in plan["ranks"]
        .as_array()
        .expect("ranks")
        .iter()
        .filter(|rank| rank["role"] != "Gateway")
    {
        let mut stream =
            TcpStream::connect(rank["endpoint"].as_str().expect("endpoint")).expect("connect");
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .expect("timeout");
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            .expect("preface");
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        // A plain HTTP/2 server would answer with its settings (frame type 4); TLS answers with an alert or closes.
        assert!(
            reply.get(3) != Some(&4),
            "{} speaks plain HTTP/2",
            rank["name"]
        );
    }
}

/// Whoever has the directory of `hearth up` may record; whoever connects without a certificate may not.
fn assert_traces_need_a_certificate(up: &Up) {
    let mut command = hearth();
    command.args(["trace", "--seconds", "1", "--state-dir"]);
    let (code, trace, said) = run(command.arg(up.state_dir()));
    assert_eq!(code, 0, "{said}");
    assert!(trace.contains("decode-0: cpu"), "{trace}");
    let plan = up.state_dir().join("demo/plan.json");
    let mut command = worker();
    command.args(["trace", "--seconds", "1", "--plan"]);
    let (code, _, said) = run(command.arg(plan));
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("error: "), "{said}");
}

#[test]
fn a_certificate_that_is_missing_is_named() {
    let empty = tempfile::tempdir().expect("directory");
    let arguments = vec!["--tls-dir".to_owned(), empty.path().display().to_string()];
    let mut up = Up::spawn(&UpOptions {
        arguments,
        ..UpOptions::default()
    });
    assert_eq!(up.wait(), 1);
    assert!(
        up.output().contains("tls.crt is not in it"),
        "{}",
        up.output()
    );
}
