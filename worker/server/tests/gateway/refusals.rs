//! Parameters that are refused, checked by the error message.

use serde_json::{Value, json};

use crate::support::model;
use crate::support::{FakeWorker, Running, chat_body, completion_body, gateway};

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// Posts and checks the whole error object; the message must contain all `words`.
pub(crate) async fn refused(
    gateway: &Running,
    path: &str,
    body: Value,
    status: u16,
    param: Option<&str>,
    code: &str,
    words: &[&str],
) {
    let (got, answer) = gateway.post(path, body.clone()).await;
    let shown = format!("{body}\n{answer:#}");
    assert_eq!(got, status, "{shown}");
    let error = answer["error"]
        .as_object()
        .unwrap_or_else(|| panic!("{shown}"));
    assert_eq!(
        error.keys().collect::<Vec<_>>(),
        ["message", "type", "param", "code"],
        "{shown}"
    );
    assert_eq!(error["type"], "invalid_request_error", "{shown}");
    assert_eq!(error["param"].as_str(), param, "{shown}");
    assert_eq!(error["code"], code, "{shown}");
    let message = error["message"].as_str().unwrap();
    for word in words {
        assert!(message.contains(word), "{word:?} is missing\n{shown}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_parameters_are_refused_by_name() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let cases = [
        (
            json!({"temprature": 1}),
            "temprature",
            "did you mean 'temperature'?",
        ),
        (
            json!({"frobnicate": null}),
            "frobnicate",
            "no such parameter",
        ),
        (
            json!({"stream": true, "stream_options": {"usage": true}}),
            "stream_options.usage",
            "unknown parameter",
        ),
        (
            json!({"messages": [{"role": "user", "content": "x", "mood": 1}]}),
            "messages[0].mood",
            "unknown parameter",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]}),
            "messages[0].content[0].cache",
            "unknown parameter",
        ),
        (
            json!({"response_format": {"type": "text", "schema": {}}}),
            "response_format.schema",
            "unknown parameter",
        ),
        (
            json!({"tools": [{"type": "function", "function": {"name": "f", "params": {}}}]}),
            "tools[0].function.params",
            "unknown parameter",
        ),
    ];
    for (extra, param, words) in cases {
        refused(
            &gateway,
            CHAT,
            chat_body("x", extra),
            400,
            Some(param),
            "unknown_parameter",
            &[words, param],
        )
        .await;
    }
    let body = completion_body(json!("x"), json!({"messages": []}));
    refused(
        &gateway,
        COMPLETIONS,
        body,
        400,
        Some("messages"),
        "unknown_parameter",
        &["'messages'"],
    )
    .await;
    assert_eq!(
        worker.behaviour.calls.lock().unwrap().len(),
        0,
        "nothing reached a worker"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_hearth_does_not_do_is_refused_with_the_reason() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let cases = [
        (
            json!({"audio": {"voice": "x"}}),
            "audio",
            "answers are text",
        ),
        (
            json!({"modalities": ["text", "audio"]}),
            "modalities",
            "answers are text",
        ),
        (json!({"store": true}), "store", "not kept"),
        (json!({"prediction": {}}), "prediction", "not used"),
        (
            json!({"web_search_options": {}}),
            "web_search_options",
            "give the model a tool",
        ),
        (json!({"functions": [{}]}), "functions", "use 'tools'"),
        (
            json!({"function_call": "auto"}),
            "function_call",
            "use 'tool_choice'",
        ),
        (json!({"service_tier": "flex"}), "service_tier", "one tier"),
        (
            json!({"reasoning_effort": "high"}),
            "reasoning_effort",
            "chat_template_kwargs",
        ),
        (json!({"verbosity": "low"}), "verbosity", "in the messages"),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            "stream_options.include_obfuscation",
            "no padding",
        ),
    ];
    for (extra, param, words) in cases {
        refused(
            &gateway,
            CHAT,
            chat_body("x", extra),
            400,
            Some(param),
            "unsupported_parameter",
            &[words, param],
        )
        .await;
    }
    let cases = [
        (json!({"suffix": "end"}), "suffix", "do not fill in"),
        (json!({"best_of": 3}), "best_of", "ask for them by 'n'"),
        (json!({"echo": true, "logprobs": 1}), "echo", "not computed"),
    ];
    for (extra, param, words) in cases {
        refused(
            &gateway,
            COMPLETIONS,
            completion_body(json!("x"), extra),
            400,
            Some(param),
            "unsupported_parameter",
            &[words],
        )
        .await;
    }
    // The same parameters with values that ask for nothing are fine.
    let nothing = json!({"modalities": ["text"], "store": false, "service_tier": "auto", "parallel_tool_calls": true,
        "functions": [], "audio": null, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {},
        "verbosity": "medium", "logprobs": false, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "stop": null});
    assert_eq!(gateway.chat("say:x", nothing).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn values_out_of_range_are_named() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let bias = format!("logit_bias.{}", model::VOCAB);
    let cases = [
        (
            json!({"temperature": 2.5}),
            "temperature",
            "is 2.5: it must be a number from 0 to 2",
        ),
        (
            json!({"temperature": "hot"}),
            "temperature",
            "is \"hot\": it must be a number",
        ),
        (json!({"top_p": -0.1}), "top_p", "from 0 to 1"),
        (
            json!({"top_k": 1.5}),
            "top_k",
            "is 1.5: it must be a whole number",
        ),
        (json!({"min_p": 2}), "min_p", "from 0 to 1"),
        (
            json!({"frequency_penalty": 3}),
            "frequency_penalty",
            "from -2 to 2",
        ),
        (
            json!({"presence_penalty": -3}),
            "presence_penalty",
            "from -2 to 2",
        ),
        (
            json!({"repetition_penalty": 0}),
            "repetition_penalty",
            "from 0.01 to 10",
        ),
        (
            json!({"max_tokens": 0}),
            "max_tokens",
            "is 0: it must be a whole number of at least 1",
        ),
        (
            json!({"max_tokens": -5}),
            "max_tokens",
            "is -5: it must be a whole number of at least 1",
        ),
        (
            json!({"max_completion_tokens": 0}),
            "max_completion_tokens",
            "is 0",
        ),
        (
            json!({"max_tokens": 5, "max_completion_tokens": 6}),
            "max_tokens",
            "they mean the same",
        ),
        (json!({"n": 0}), "n", "from 1 to 128"),
        (
            json!({"stop": ["x", "é".repeat(2049)]}),
            "stop",
            "a string of 4098 bytes: at most 4096",
        ),
        (
            json!({"logit_bias": {"7": 1, "07": 2}}),
            "logit_bias.7",
            "given twice",
        ),
        (json!({"n": 129}), "n", "from 1 to 128"),
        (json!({"seed": 1.5}), "seed", "a whole number"),
        (
            json!({"stop": ["a", "b", "c", "d", "e"]}),
            "stop",
            "has 5 strings: at most 4",
        ),
        (json!({"stop": ""}), "stop", "empty string"),
        (json!({"stop": [1]}), "stop[0]", "is 1: it must be a string"),
        (
            json!({"logit_bias": {"x": 1}}),
            "logit_bias.x",
            "is not a token id",
        ),
        (
            json!({"logit_bias": {"1": 101}}),
            "logit_bias.1",
            "from -100 to 100",
        ),
        (
            json!({"logit_bias": {model::VOCAB.to_string(): 1}}),
            bias.as_str(),
            "the model's tokens are 0 to 271",
        ),
        (
            json!({"logit_bias": []}),
            "logit_bias",
            "an object of token id to bias",
        ),
        (
            json!({"top_logprobs": 3}),
            "top_logprobs",
            "needs 'logprobs': true",
        ),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            "top_logprobs",
            "from 0 to 20",
        ),
        (json!({"stream": "yes"}), "stream", "true or false"),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
            "only allowed together with 'stream'",
        ),
        (
            json!({"metadata": {"a": 1}}),
            "metadata",
            "an object of strings",
        ),
        (json!({"user": 5}), "user", "a string"),
        (
            json!({"chat_template_kwargs": {"tools": []}}),
            "chat_template_kwargs.tools",
            "the request itself decides",
        ),
    ];
    for (extra, param, words) in cases {
        refused(
            &gateway,
            CHAT,
            chat_body("x", extra),
            400,
            Some(param),
            "invalid_value",
            &[words],
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_model_is_answered_with_the_one_that_is_served() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    for (path, body) in [
        (
            CHAT,
            json!({"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}),
        ),
        (COMPLETIONS, json!({"model": "gpt-9", "prompt": "x"})),
    ] {
        refused(
            &gateway,
            path,
            body,
            404,
            Some("model"),
            "model_not_found",
            &["'gpt-9'", "'fake-model'"],
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_given_twice_is_refused_by_its_path() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let model = model::MODEL;
    for (path, body, member) in [
        (
            CHAT,
            format!(
                r#"{{"model": "{model}", "messages": [{{"role": "user", "content": "x"}}], "n": 1, "n": 2}}"#
            ),
            "n",
        ),
        (
            CHAT,
            format!(
                r#"{{"model": "{model}", "messages": [{{"role": "user", "content": "x", "role": "system"}}]}}"#
            ),
            "messages[0].role",
        ),
        (
            COMPLETIONS,
            format!(r#"{{"model": "{model}", "prompt": "x", "prompt": "x"}}"#),
            "prompt",
        ),
    ] {
        let request = gateway
            .http
            .post(format!("{}{path}", gateway.url))
            .header("content-type", "application/json")
            .body(body.clone());
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 400, "{body}");
        let error = response.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(error["param"], member, "{error}");
        assert_eq!(error["code"], "duplicate_parameter", "{error}");
        let words = format!("'{member}' is given twice: give it once");
        assert!(
            error["message"].as_str().unwrap().starts_with(&words),
            "{error}"
        );
    }
    assert!(worker.behaviour.calls.lock().unwrap().is_empty());
}
