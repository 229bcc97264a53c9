//! Forms of answers that are refused, checked by the error message.

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
        (json!({"$ref": "#"}), "'$ref' refers to itself without end"),
        (
            json!({"type": "string", "pattern": "("}),
            "the pattern \"(\" is not a supported regular expression: unclosed group",
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

const DRAFT_4: &str = "http://json-schema.org/draft-04/schema#";
const DRAFT_6: &str = "http://json-schema.org/draft-06/schema#";
const DRAFT_7: &str = "http://json-schema.org/draft-07/schema#";
const DRAFT_2019: &str = "https://json-schema.org/draft/2019-09/schema";
const DRAFT_2020: &str = "https://json-schema.org/draft/2020-12/schema";

#[tokio::test(flavor = "multi_thread")]
async fn keywords_that_a_named_draft_does_not_know_are_refused() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let unenforced = "cannot be enforced while an answer is written: leave it out";
    let newer = "name a newer one, such as https://json-schema.org/draft/2020-12/schema, or leave '$schema' out";
    let object = |word: &str, value: Value| json!({"type": "object", "properties": {"a": {"type": "string"}}, word: value});
    let pair = json!({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]});
    let cases = [
        (DRAFT_4, json!({"const": "a"}), "'const'", newer),
        (
            DRAFT_4,
            object("propertyNames", json!({"maxLength": 1})),
            "'propertyNames'",
            unenforced,
        ),
        (
            DRAFT_4,
            json!({"type": "array", "contains": {"type": "null"}}),
            "'contains'",
            unenforced,
        ),
        (
            DRAFT_6,
            object("if", json!({"required": ["a"]})),
            "'if'",
            unenforced,
        ),
        (
            DRAFT_6,
            object("then", json!({"required": ["a"]})),
            "'then'",
            unenforced,
        ),
        (DRAFT_6, pair.clone(), "'prefixItems'", newer),
        (DRAFT_7, pair.clone(), "'prefixItems'", newer),
        (
            DRAFT_7,
            object("dependentRequired", json!({"a": ["b"]})),
            "'dependentRequired'",
            unenforced,
        ),
        (
            DRAFT_7,
            json!({"allOf": [object("x", json!(1))], "unevaluatedProperties": false}),
            "'unevaluatedProperties'",
            unenforced,
        ),
        (DRAFT_2019, pair.clone(), "'prefixItems'", newer),
        (
            DRAFT_2019,
            object("$dynamicRef", json!("#a")),
            "'$dynamicRef'",
            unenforced,
        ),
    ];
    let mut bodies: Vec<_> = cases
        .into_iter()
        .map(|(draft, mut schema, word, words)| {
            schema["$schema"] = json!(draft);
            (schema, vec![word, words])
        })
        .collect();
    // The draft of the enclosing schema applies within it and behind a reference, unless it names its own.
    let referred = json!({"$schema": DRAFT_7, "type": "array", "items": {"$ref": "#/definitions/pair"}, "definitions": {"pair": pair}});
    bodies.push((referred, vec!["at definitions.pair, 'prefixItems'"]));
    let mut old = pair.clone();
    old["$schema"] = json!(DRAFT_7);
    let nested = json!({"$schema": DRAFT_2020, "type": "object", "properties": {"p": old}});
    bodies.push((nested, vec!["at properties.p, 'prefixItems'", newer]));
    // A combination that no draft reads.
    let mut both = pair.clone();
    both["additionalItems"] = json!(false);
    bodies.push((
        both,
        vec!["'prefixItems' is not followed beside 'additionalItems'"],
    ));
    let divided = json!({"type": "array", "items": [{"type": "null"}], "allOf": [{"minItems": 1}], "additionalItems": false});
    bodies.push((
        divided,
        vec!["'additionalItems' is not followed beside 'allOf'"],
    ));
    let with = |schema: &Value| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        chat_body("say:x", json!({"response_format": format}))
    };
    for (schema, words) in bodies {
        let param = Some("response_format.json_schema.schema");
        refused(
            &gateway,
            CHAT,
            with(&schema),
            400,
            param,
            "invalid_json_schema",
            &words,
        )
        .await;
    }
    // A keyword passes under a draft that knows it, and unused definitions do not matter.
    let mut new = pair.clone();
    new["$schema"] = json!(DRAFT_2020);
    let list = json!({"$schema": DRAFT_7, "type": "array", "items": [{"const": 1}, {"type": "null"}], "additionalItems": false});
    let unused = json!({"$schema": DRAFT_4, "type": "null", "definitions": {"pair": pair}});
    for schema in [
        new,
        list,
        unused,
        json!({"$schema": DRAFT_6, "const": "a"}),
        pair,
    ] {
        let (status, answer) = gateway.post(CHAT, with(&schema)).await;
        assert_eq!(status, 200, "{schema}: {answer}");
    }
}
