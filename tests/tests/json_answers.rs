//! Constrained answers with the model's own tokens: no whitespace is wasted, and no schema kills a worker.

use hearth_tests::{Up, chat_body};
use serde_json::{Map, Value, json};

/// Posts a complete (not streamed) request; returns status and body.
async fn ask(up: &Up, format: &Value, seed: u64) -> (u16, Value) {
    let mut body = chat_body("hearth-demo", "Describe your cluster.", 80);
    let members = body.as_object_mut().expect("object");
    members.remove("stream_options");
    members.remove("logprobs");
    body["stream"] = json!(false);
    body["temperature"] = json!(1.5);
    body["seed"] = json!(seed);
    body["response_format"] = format.clone();
    let request = reqwest::Client::new()
        .post(format!("{}/chat/completions", up.v1()))
        .json(&body);
    let response = request.send().await.expect("response");
    let status = response.status().as_u16();
    (status, response.json().await.expect("JSON"))
}

fn schema(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
}

/// Returns the text between the strings of a JSON text, which may be cut off.
fn outside_strings(json: &str) -> String {
    let mut outside = String::new();
    let (mut in_string, mut escaped) = (false, false);
    for c in json.chars() {
        match c {
            '"' if !escaped => in_string = !in_string,
            c if !in_string => outside.push(c),
            _ => {}
        }
        escaped = in_string && c == '\\' && !escaped;
    }
    outside
}

fn object(count: usize, member: impl Fn(usize) -> Value) -> Value {
    let properties: Map<String, Value> = (0..count).map(|i| (format!("p{i}"), member(i))).collect();
    json!({"type": "object", "properties": properties})
}

/// Returns definitions, each of which requires the next.
fn chain(count: usize) -> Value {
    let link = |i: usize| match i + 1 == count {
        true => json!({"type": "null"}),
        false => {
            json!({"type": "object", "properties": {"a": {"$ref": format!("#/$defs/d{}", i + 1)}}, "required": ["a"]})
        }
    };
    let definitions: Map<String, Value> = (0..count).map(|i| (format!("d{i}"), link(i))).collect();
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

#[tokio::test]
async fn no_answer_in_json_wastes_tokens_on_blank_space() {
    let up = Up::demo();
    let nested = schema(json!({
        "type": "array",
        "items": {"type": "object", "properties": {"name": {"type": "string"}, "sizes": {"type": "array"}}, "required": ["name"]}
    }));
    let mut blanks = 0;
    for seed in 0..12 {
        for format in [&json!({"type": "json_object"}), &nested] {
            let (status, answer) = ask(&up, format, seed).await;
            assert_eq!(status, 200, "{answer}");
            let text = answer["choices"][0]["message"]["content"].as_str();
            let outside = outside_strings(text.expect("content"));
            assert!(
                !outside.contains(['\r', '\n', '\t']) && !outside.contains("  "),
                "{text:?}"
            );
            blanks += outside.matches(' ').count();
        }
    }
    assert!(blanks > 0, "the answers have no blank at all");
}

/// Checks that objects with named properties have no others, unless the schema allows them.
#[tokio::test]
async fn no_answer_invents_keys() {
    let up = Up::demo();
    let short = json!({"type": "string", "maxLength": 8});
    let small = |name: &str| json!({"type": "object", "properties": {name: short}});
    let cases = [
        (small("name"), &["/name"] as &[&str]),
        (json!({"allOf": [small("a"), small("b")]}), &["/a", "/b"]),
        (
            json!({"type": "object", "properties": {"o": small("x")}, "required": ["o"]}),
            &["/o", "/o/x"],
        ),
    ];
    let mut keys = 0;
    for (case, may_have) in &cases {
        for seed in 0..8 {
            let (status, answer) = ask(&up, &schema(case.clone()), seed).await;
            assert_eq!(status, 200, "{answer}");
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{case}: {choice}");
            let text = choice["message"]["content"].as_str().expect("content");
            let mut found = Vec::new();
            let value: Value = serde_json::from_str(text).expect("JSON");
            paths(&value, "", &mut found);
            keys += found.len();
            let is_named = |path: &String| may_have.contains(&path.as_str());
            assert!(found.iter().all(is_named), "{case}: {text}");
        }
    }
    assert!(keys > 0, "all objects are empty");
}

/// Collects JSON pointers to all members.
fn paths(value: &Value, at: &str, found: &mut Vec<String>) {
    for (key, member) in value.as_object().into_iter().flatten() {
        let path = format!("{at}/{key}");
        paths(member, &path, found);
        found.push(path);
    }
}

#[tokio::test]
async fn the_largest_schemas_are_followed_and_larger_ones_refused_in_words() {
    let up = Up::demo();
    let text = |_| json!({"type": "string"});
    let required = |count: usize| {
        let mut wide = object(count, text);
        let names: Vec<String> = (0..count).map(|i| format!("p{i}")).collect();
        wide["required"] = json!(names);
        wide
    };
    let alternatives = |count: usize| {
        let one = |i: usize| json!({"type": "object", "properties": {format!("p{i}"): {"type": "null"}}, "required": [format!("p{i}")]});
        json!({"anyOf": (0..count).map(one).collect::<Vec<Value>>()})
    };
    for (good, too_large, words) in [
        (
            object(400, text),
            object(401, text),
            "401 properties may be left out",
        ),
        (
            alternatives(1000),
            alternatives(1001),
            "'anyOf' has 1001 alternatives",
        ),
        (
            chain(160),
            chain(400),
            "deep within each other through '$ref'",
        ),
        (required(4999), required(5000), "more than 5000 schemas"),
    ] {
        let (status, answer) = ask(&up, &schema(good), 1).await;
        assert_eq!(status, 200, "{words}: {answer}");
        let (status, answer) = ask(&up, &schema(too_large), 1).await;
        assert_eq!(status, 400, "{words}");
        let error = &answer["error"];
        assert_eq!(error["param"], "response_format.json_schema.schema");
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|text| text.contains(words)),
            "{error}"
        );
    }
    for process in up.status()["processes"].as_array().expect("processes") {
        assert_eq!(process["restarts"], 0, "{process}");
    }
}
