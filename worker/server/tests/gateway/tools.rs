//! Tools: shown by the template, called in the model's form, parsed, enforced by grammar.

use hearth_server::tools::ToolFormat;
use hearth_transport::v1::grammar::Kind;
use serde_json::{Value, json};

use crate::support::model;
use crate::support::{FakeWorker, Running, chat_body, chunks, gateway, streamed_text};

const CALL: &str = "say:Wait.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])
}

/// Returns the answer of a worker that writes a call, whatever the template put around the prompt.
async fn ask(gateway: &Running, say: &str, extra: Value) -> Value {
    let mut body = chat_body(say, json!({"tools": tools()}));
    body.as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    let (status, answer) = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_told_from_content() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let answer = ask(&gateway, CALL, json!({})).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Wait.");
    let call = &choice["message"]["tool_calls"][0];
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(
        (&call["type"], &call["function"]),
        (
            &json!("function"),
            &json!({"name": "get_weather", "arguments": "{\"city\": \"Bern\"}"})
        )
    );
    let prompt = model::decode(&worker.behaviour.last_call().prompt_tokens);
    assert!(
        prompt.contains("tools:[{\"type\": \"function\", \"function\": {\"name\": \"get_weather\""),
        "{prompt}"
    );
    assert_eq!(worker.behaviour.last_call().grammar, None);

    let plain = ask(&gateway, "say:No call.", json!({})).await;
    assert_eq!(plain["choices"][0]["finish_reason"], "stop");
    assert_eq!(plain["choices"][0]["message"].get("tool_calls"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_streams_as_deltas() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = chat_body(CALL, json!({"tools": tools(), "stream": true}));
    let all = chunks(&gateway.stream("/v1/chat/completions", body).await);
    assert_eq!(streamed_text(&all, 0), "Wait.");
    let deltas: Vec<&Value> = all
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0))
        .collect();
    assert_eq!(deltas[0]["function"]["name"], "get_weather");
    assert_eq!(
        (&deltas[0]["index"], &deltas[0]["type"]),
        (&json!(0), &json!("function"))
    );
    assert!(deltas.len() > 5, "arguments come piece by piece");
    assert!(
        deltas[1..]
            .iter()
            .all(|delta| delta.get("id").is_none() && delta["function"].get("name").is_none())
    );
    let arguments: String = deltas
        .iter()
        .map(|delta| delta["function"]["arguments"].as_str().unwrap())
        .collect();
    assert_eq!(arguments, "{\"city\": \"Bern\"}");
    assert_eq!(
        all.last().unwrap()["choices"][0]["finish_reason"],
        "tool_calls"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_calls_come_unless_one_alone_is_allowed() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let second = "\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Genf\"}}\n</tool_call>";
    let both = format!("{CALL}{second}");
    let answer = ask(&gateway, &both, json!({})).await;
    let calls = answer["choices"][0]["message"]["tool_calls"]
        .as_array()
        .unwrap();
    assert_eq!(calls.len(), 2);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    let answer = ask(&gateway, &both, json!({"parallel_tool_calls": false})).await;
    assert_eq!(
        answer["choices"][0]["message"]["tool_calls"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_choice_decides_grammar_and_prompt() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let lark = || match worker
        .behaviour
        .last_call()
        .grammar
        .and_then(|grammar| grammar.kind)
    {
        Some(Kind::Lark(lark)) => Some(lark),
        None => None,
        other => panic!("{other:?}"),
    };
    ask(&gateway, CALL, json!({"tool_choice": "required"})).await;
    assert!(lark().unwrap().contains("get_weather"));
    ask(
        &gateway,
        CALL,
        json!({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
    )
    .await;
    assert!(lark().unwrap().contains("get_weather"));
    let answer = ask(&gateway, CALL, json!({"tool_choice": "none"})).await;
    assert_eq!(lark(), None);
    assert_eq!(
        answer["choices"][0]["finish_reason"], "stop",
        "nothing is parsed as a call"
    );
    assert!(!model::decode(&worker.behaviour.last_call().prompt_tokens).contains("tools:"));
    let mut strict = tools();
    strict[0]["function"]["strict"] = json!(true);
    ask(&gateway, CALL, json!({"tools": strict})).await;
    assert!(lark().unwrap().contains("TEXT"));
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}});
    ask(&gateway, CALL, json!({"response_format": format})).await;
    assert!(lark().unwrap().contains("answer"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_with_results_is_rendered() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = json!({
        "model": crate::support::MODEL,
        "tools": tools(),
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function", "index": 0,
                "function": {"name": "get_weather", "arguments": "{\"city\":\"Bern\"}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "user", "content": "say:Sunny."},
        ],
    });
    let (status, answer) = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "Sunny.");
    let prompt = model::decode(&worker.behaviour.last_call().prompt_tokens);
    // This template's form expects arguments as an object.
    let call = "<|assistant|><tool_call>{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\"}}</tool_call><|end|>";
    assert!(prompt.contains(call), "{prompt}");
    assert!(prompt.contains("<|user|>result:sunny"), "{prompt}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_are_checked() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let cases = [
        (
            json!({"tool_choice": "required"}),
            "tool_choice",
            "'tools' is empty or missing",
        ),
        (
            json!({"tools": tools(), "tool_choice": "maybe"}),
            "tool_choice",
            "'none', 'auto', 'required'",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "other"}}}),
            "tool_choice.function.name",
            "names 'other', which is not among 'tools'",
        ),
        (
            json!({"tools": tools(), "tool_choice": {"type": "allowed_tools"}}),
            "tool_choice.type",
            "only 'function'",
        ),
        (
            json!({"tools": [{"type": "custom"}]}),
            "tools[0].type",
            "only 'function' is supported",
        ),
        (
            function(json!({"name": "a b"})),
            "tools[0].function.name",
            "64 letters",
        ),
        (
            function(json!({"name": "f", "parameters": 5})),
            "tools[0].function.parameters",
            "a JSON schema",
        ),
        (
            json!({"tools": [tools()[0], tools()[0]]}),
            "tools[1].function.name",
            "two tools are named 'get_weather'",
        ),
    ];
    for (extra, param, words) in cases {
        let (status, answer) = gateway.chat("x", extra).await;
        assert_eq!(
            (status, answer["error"]["param"].as_str()),
            (400, Some(param)),
            "{answer}"
        );
        assert!(
            answer["error"]["message"].as_str().unwrap().contains(words),
            "{answer}"
        );
    }
    let bad = json!({"name": "f", "parameters": {"type": "thing"}});
    let mut extra = function(bad);
    extra["tool_choice"] = json!("required");
    let (status, answer) = gateway.chat("x", extra).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("invalid_json_schema")),
        "{answer}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_without_tools_is_no_reason_to_ignore_them() {
    let worker = FakeWorker::start();
    let template =
        "{% for message in messages %}<|user|>{{ message.content }}{% endfor %}<|assistant|>";
    let plain = model::model_dir_with(template, json!({}));
    let gateway = gateway(&[&worker], |config| {
        config.model_dir = plain.path().to_owned();
        config.tool_format = Some(ToolFormat::Hermes);
    })
    .await;
    let (status, answer) = gateway.chat(CALL, json!({"tools": tools()})).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("tools_unsupported")),
        "{answer}"
    );
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("does not show tools")
    );
    let (status, answer) = gateway
        .chat(CALL, json!({"tools": tools(), "tool_choice": "required"}))
        .await;
    assert_eq!(
        (status, &answer["choices"][0]["finish_reason"]),
        (200, &json!("tool_calls")),
        "{answer}"
    );

    let none = model::model_dir_with("", json!({}));
    let gateway = crate::support::gateway(&[&worker], |config| {
        config.model_dir = none.path().to_owned()
    })
    .await;
    let (status, answer) = gateway.chat("x", json!({})).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("no_chat_template")),
        "{answer}"
    );
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("/v1/completions")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demanded_call_that_is_cut_off_shows_no_marks() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let call = "say:<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for choice in [json!("required"), named] {
        for max_tokens in 1..60 {
            let answer = ask(
                &gateway,
                call,
                json!({"tool_choice": choice, "max_tokens": max_tokens}),
            )
            .await;
            let choice = &answer["choices"][0];
            assert_eq!(
                choice["message"]["content"].as_str().unwrap_or_default(),
                "",
                "{answer}"
            );
            let is_whole = choice["finish_reason"] == "tool_calls";
            assert!(is_whole || choice["finish_reason"] == "length", "{answer}");
        }
    }
    // Where the model may choose, its text is the answer.
    let answer = ask(&gateway, call, json!({"max_tokens": 5})).await;
    assert!(
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .starts_with("<tool_call>"),
        "{answer}"
    );
}
