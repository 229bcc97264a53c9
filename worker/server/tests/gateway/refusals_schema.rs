//! Forms of answers that are refused, by reading the message.

use serde_json::{Value, json};

use crate::refusals::{CHAT, refused};
use crate::support::{FakeWorker, chat_body, gateway};

#[tokio::test(flavor = "multi_thread")]
async fn schemas_are_checked_before_a_worker_sees_them() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let schema = |schema: Value| json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}});
    let path = "response_format.json_schema.schema";
    for (bad, words) in [
        (json!({"type": "thing"}), "'type' is \"thing\""),
        (
            json!({"$ref": "#"}),
            "'$ref' demands itself again without end",
        ),
        (
            json!({"type": "string", "pattern": "("}),
            "the pattern \"(\" is no regular expression that can be followed: unclosed group",
        ),
    ] {
        refused(
            &gateway,
            CHAT,
            chat_body("x", schema(bad)),
            400,
            Some(path),
            "invalid_json_schema",
            &["is not a JSON schema that can be followed", path, words],
        )
        .await;
    }
    refused(
        &gateway,
        CHAT,
        chat_body("x", schema(json!("x"))),
        400,
        Some(path),
        "invalid_value",
        &["a JSON schema"],
    )
    .await;
    let cases = [
        (
            json!({"type": "xml"}),
            "response_format.type",
            "invalid_value",
            "text, json_object or json_schema",
        ),
        (
            json!({"type": "json_schema"}),
            "response_format.json_schema",
            "missing_required_parameter",
            "is missing",
        ),
        (
            json!({"type": "json_schema", "json_schema": {"name": "a b"}}),
            "response_format.json_schema.name",
            "invalid_value",
            "letters",
        ),
        (
            json!("json"),
            "response_format",
            "invalid_value",
            "an object",
        ),
    ];
    for (format, param, code, words) in cases {
        refused(
            &gateway,
            CHAT,
            chat_body("x", json!({"response_format": format})),
            400,
            Some(param),
            code,
            &[words],
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_refuses_is_quoted() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let status = hearth_transport::tonic::Status::invalid_argument("the grammar is too ambiguous");
    worker
        .behaviour
        .fault(crate::support::Fault::Status(0, status));
    refused(
        &gateway,
        CHAT,
        chat_body("x", json!({})),
        400,
        None,
        "rejected_by_worker",
        &["the grammar is too ambiguous"],
    )
    .await;
    assert_eq!(
        worker.behaviour.calls.lock().unwrap().len(),
        1,
        "it is not tried again"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_follow_a_schema_is_told_in_words_about_the_schema() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let status = hearth_transport::tonic::Status::invalid_argument(
        "answer token 0 (96) does not follow the grammar: Parser Error: Current row has 2007 items; max is 2000",
    );
    let fault = crate::support::Fault::Status(0, status);
    worker.behaviour.fault(fault);
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}});
    refused(
        &gateway,
        CHAT,
        chat_body("x", json!({"response_format": format})),
        400,
        Some("response_format.json_schema.schema"),
        "invalid_json_schema",
        &["fewer properties that may be left out"],
    )
    .await;
}
