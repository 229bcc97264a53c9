//! Text completions: every kind of prompt and parameter, whole and streamed.

use serde_json::{Value, json};

use crate::support::model::{self, CONTEXT};
use crate::support::{FakeWorker, chunks, completion_body, gateway, streamed_text};

const PATH: &str = "/v1/completions";

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_has_the_form_that_clients_read() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (status, answer) = gateway
        .post(
            PATH,
            completion_body(json!("say:Hello."), json!({"seed": 1})),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(
        answer["choices"],
        json!([{"text": "Hello.", "index": 0, "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17,
               "prompt_tokens_details": {"cached_tokens": 0}})
    );
    assert_eq!(
        worker.behaviour.last_call().prompt_tokens,
        model::encode("say:Hello.")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_tokens_are_the_default() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (_, answer) = gateway
        .post(PATH, completion_body(json!("go"), json!({})))
        .await;
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_texts_tokens_or_arrays_of_either() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let tokens = |text: &str| json!(model::encode(text));
    let cases = [
        (json!("say:a"), vec!["a"]),
        (json!(["say:a", "say:b"]), vec!["a", "b"]),
        (tokens("say:c"), vec!["c"]),
        (json!([tokens("say:d"), tokens("say:e")]), vec!["d", "e"]),
    ];
    for (prompt, texts) in cases {
        let (status, answer) = gateway
            .post(PATH, completion_body(prompt.clone(), json!({})))
            .await;
        assert_eq!(status, 200, "{prompt}: {answer}");
        let got: Vec<&str> = answer["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| c["text"].as_str().unwrap())
            .collect();
        assert_eq!(got, texts, "{prompt}");
        assert_eq!(answer["usage"]["prompt_tokens"], 5 * texts.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_of_several_prompts_are_numbered_by_prompt() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = |stream| {
        completion_body(
            json!(["one", "two"]),
            json!({"n": 2, "seed": 3, "stream": stream}),
        )
    };
    let (_, answer) = gateway.post(PATH, body(false)).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert_eq!(answer["usage"]["prompt_tokens"], 6);
    assert_eq!(answer["usage"]["completion_tokens"], 64);
    let (_, two) = gateway
        .post(PATH, completion_body(json!("two"), json!({"seed": 4})))
        .await;
    assert_eq!(choices[3]["text"], two["choices"][0]["text"]);
    let all = chunks(&gateway.stream(PATH, body(true)).await);
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
        assert_eq!(choice["text"], streamed_text(&all, i as u64));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_can_be_echoed() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    for prompt in [json!("say:b"), json!(model::encode("say:b"))] {
        let (_, answer) = gateway
            .post(PATH, completion_body(prompt.clone(), json!({"echo": true})))
            .await;
        assert_eq!(answer["choices"][0]["text"], "say:bb");
        let body = completion_body(prompt, json!({"echo": true, "stream": true}));
        assert_eq!(
            streamed_text(&chunks(&gateway.stream(PATH, body).await), 0),
            "say:bb"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_have_the_older_form() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (_, answer) = gateway
        .post(
            PATH,
            completion_body(json!("say:aé."), json!({"logprobs": 2})),
        )
        .await;
    assert_eq!(
        answer["choices"][0]["logprobs"],
        json!({
            "tokens": ["a", "\u{FFFD}", "\u{FFFD}", "."],
            "token_logprobs": [-0.5, -0.5, -0.5, -0.5],
            "top_logprobs": [{"a": -0.5, "b": -1.5}, {"\u{FFFD}": -1.5}, {"\u{FFFD}": -1.5}, {".": -0.5, "/": -1.5}],
            "text_offset": [0, 1, 1, 2],
        })
    );
    let (_, bare) = gateway
        .post(
            PATH,
            completion_body(json!("say:a"), json!({"logprobs": 0})),
        )
        .await;
    assert_eq!(bare["choices"][0]["logprobs"]["top_logprobs"], Value::Null);
    assert_eq!(bare["choices"][0]["logprobs"]["tokens"], json!(["a"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_with_usage_when_asked() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let extra = json!({"stream": true, "stream_options": {"include_usage": true}, "suffix": null, "best_of": 1});
    let all = chunks(
        &gateway
            .stream(PATH, completion_body(json!("say:abc"), extra))
            .await,
    );
    let (usage, rest) = all.split_last().unwrap();
    assert_eq!(
        (&usage["choices"], &usage["usage"]["total_tokens"]),
        (&json!([]), &json!(11))
    );
    assert!(
        rest.iter()
            .all(|chunk| chunk.get("usage") == Some(&Value::Null))
    );
    assert_eq!(rest.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert_eq!(streamed_text(rest, 0), "abc");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_may_leave_room_for_one_token() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (status, answer) = gateway
        .post(
            PATH,
            completion_body(json!("x".repeat(CONTEXT - 1)), json!({})),
        )
        .await;
    assert_eq!(
        (status, &answer["usage"]["completion_tokens"]),
        (200, &json!(1))
    );
}
