//! Messages and prompts that are refused, checked by the error message.

use serde_json::{Value, json};

use crate::refusals::{CHAT, COMPLETIONS, refused};
use crate::support::model::CONTEXT;
use crate::support::{FakeWorker, chat_body, completion_body, gateway};

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_checked() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let message = |message: Value| json!({"messages": [message]});
    let call = |function: Value| {
        message(
            json!({"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}),
        )
    };
    let invalid = "invalid_value";
    let missing = "missing_required_parameter";
    let cases = [
        (json!({"messages": []}), "messages", invalid, "is empty"),
        (
            json!({"messages": "hello"}),
            "messages",
            invalid,
            "is \"hello\": it must be an array",
        ),
        (
            message(json!("hello")),
            "messages[0]",
            invalid,
            "it must be an object",
        ),
        (
            message(json!({"content": "x"})),
            "messages[0].role",
            missing,
            "is missing",
        ),
        (
            message(json!({"role": "robot", "content": "x"})),
            "messages[0].role",
            invalid,
            "is 'robot'",
        ),
        (
            message(json!({"role": "function", "content": "x"})),
            "messages[0].role",
            invalid,
            "deprecated",
        ),
        (
            message(json!({"role": "user"})),
            "messages[0].content",
            missing,
            "is missing",
        ),
        (
            message(json!({"role": "assistant"})),
            "messages[0].content",
            missing,
            "is missing",
        ),
        (
            message(json!({"role": "user", "content": 5})),
            "messages[0].content",
            invalid,
            "a string or an array of text parts",
        ),
        (
            message(
                json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            ),
            "messages[0].content[0].type",
            "unsupported_content",
            "the model reads text",
        ),
        (
            message(json!({"role": "tool", "content": "x"})),
            "messages[0].tool_call_id",
            missing,
            "is missing",
        ),
        (
            message(json!({"role": "assistant", "content": "x", "audio": {"id": "1"}})),
            "messages[0].audio",
            "unsupported_parameter",
            "text",
        ),
        (
            call(json!({"name": "f"})),
            "messages[0].tool_calls[0].function.arguments",
            missing,
            "is missing",
        ),
        (
            call(json!({"name": "f g", "arguments": "{}"})),
            "messages[0].tool_calls[0].function.name",
            invalid,
            "64 letters",
        ),
    ];
    for (extra, param, code, words) in cases {
        refused(
            &gateway,
            CHAT,
            chat_body("x", extra),
            400,
            Some(param),
            code,
            &[words],
        )
        .await;
    }
    let body = json!({"model": "fake-model"});
    refused(
        &gateway,
        CHAT,
        body.clone(),
        400,
        Some("messages"),
        missing,
        &["'messages' is missing"],
    )
    .await;
    refused(
        &gateway,
        COMPLETIONS,
        body,
        400,
        Some("prompt"),
        missing,
        &["'prompt' is missing"],
    )
    .await;
    refused(
        &gateway,
        CHAT,
        json!({"messages": []}),
        400,
        Some("model"),
        missing,
        &["'model' is missing"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_checked() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let many = vec!["x"; 129];
    let cases = [
        (json!(5), "prompt", "is 5: it must be a string"),
        (json!([]), "prompt", "empty array"),
        (json!(""), "prompt", "is empty: give at least one token"),
        (json!([[]]), "prompt", "is empty: give at least one token"),
        (json!([1, "a"]), "prompt[1]", "a token id"),
        (json!([1, -1]), "prompt[1]", "is -1: it must be a token id"),
        (
            json!(["a", 1]),
            "prompt[1]",
            "a string or an array of token ids",
        ),
        (
            json!([272]),
            "prompt",
            "has token 272: the model's tokens are 0 to 271",
        ),
        (json!(many), "prompt", "at most 128"),
    ];
    for (prompt, param, words) in cases {
        refused(
            &gateway,
            COMPLETIONS,
            completion_body(prompt, json!({})),
            400,
            Some(param),
            "invalid_value",
            &[words],
        )
        .await;
    }
    let body = completion_body(json!(vec!["x"; 100]), json!({"n": 2}));
    refused(
        &gateway,
        COMPLETIONS,
        body,
        400,
        Some("n"),
        "invalid_value",
        &["200 choices"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_longer_than_the_context_is_told_by_how_much() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = completion_body(json!("x".repeat(CONTEXT + 7)), json!({}));
    refused(
        &gateway,
        COMPLETIONS,
        body,
        400,
        Some("prompt"),
        "context_length_exceeded",
        &["context is 512 tokens", "has 519", "shorten it by 8"],
    )
    .await;
    let body = completion_body(json!("x".repeat(CONTEXT)), json!({}));
    refused(
        &gateway,
        COMPLETIONS,
        body,
        400,
        Some("prompt"),
        "context_length_exceeded",
        &["by 1 "],
    )
    .await;
    let body = chat_body(&"x".repeat(600), json!({}));
    refused(
        &gateway,
        CHAT,
        body,
        400,
        Some("messages"),
        "context_length_exceeded",
        &["512"],
    )
    .await;

    // A worker that holds less lowers it.
    let small = FakeWorker::start();
    small.behaviour.description.lock().unwrap().context_length = 100;
    let gateway = crate::support::gateway(&[&small], |_| {}).await;
    let body = completion_body(json!("x".repeat(100)), json!({}));
    refused(
        &gateway,
        COMPLETIONS,
        body,
        400,
        Some("prompt"),
        "context_length_exceeded",
        &["100 tokens"],
    )
    .await;
    assert!(
        gateway
            .get("/v1/models")
            .await
            .1
            .contains("\"max_model_len\":100")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bound_beyond_all_numbers_is_a_bound() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    for bound in ["18446744073709551615", "99999999999999999999", "5e9", "7.0"] {
        for name in ["max_tokens", "max_completion_tokens"] {
            let body = chat_body("say:hello", json!({"seed": 1})).to_string();
            let body = body.replacen("\"seed\":1", &format!("\"{name}\":{bound}"), 1);
            let request = gateway.http.post(format!("{}{CHAT}", gateway.url));
            let answer = request
                .header("content-type", "application/json")
                .body(body)
                .send()
                .await
                .unwrap();
            assert_eq!(answer.status(), 200, "{name} {bound}");
            let answer: Value = answer.json().await.unwrap();
            assert_eq!(answer["choices"][0]["message"]["content"], "hello");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_in_the_url_that_is_no_text_is_refused_as_all_else_is() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (status, answer) = gateway.get("/v1/models/%ff").await;
    let answer: Value = serde_json::from_str(&answer).expect("an error object");
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("invalid_utf8"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_two_lengths_end_their_connection_and_those_of_other_codings_are_refused() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = chat_body("say:hello", json!({})).to_string();
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    for (headers, status, words) in [
        ("Transfer-Encoding: chunked\r\n", 200, "hello"),
        (
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            200,
            "hello",
        ),
        (
            "Transfer-Encoding: gzip, chunked\r\n",
            415,
            "unsupported_media_type",
        ),
    ] {
        let mut stream = tokio::net::TcpStream::connect(gateway.address)
            .await
            .unwrap();
        let request = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\n{headers}\r\n{chunked}\
             GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // Unread bytes of a refused body may end the connection with a reset.
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(words),
            "{headers}: {answer}"
        );
        if headers.contains("Content-Length") {
            assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{answer}");
        }
    }
}
