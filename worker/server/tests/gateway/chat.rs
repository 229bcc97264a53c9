//! Chat completions: every parameter, whole and streamed.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::support::model::{self, CONTEXT, END};
use crate::support::{FakeWorker, chat_body, chunks, eventually, gateway, streamed_text};
use hearth_transport::v1::{LogitBias, grammar::Kind};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_has_the_form_that_clients_read() {
    let worker = FakeWorker::start();
    worker.behaviour.cached_tokens.store(4, Ordering::SeqCst);
    let gateway = gateway(&[&worker], |_| {}).await;
    let (status, answer) = gateway.chat("say:Hello.", json!({"seed": 5})).await;
    assert_eq!(status, 200, "{answer}");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], crate::support::MODEL);
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    let fingerprint = answer["system_fingerprint"].as_str().unwrap();
    assert!(
        fingerprint.starts_with("fp_") && fingerprint.ends_with("_seed_5"),
        "{fingerprint}"
    );
    let prompt = model::encode("<|begin|><|user|>say:Hello.<|assistant|>");
    assert_eq!(
        answer["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": "Hello.", "refusal": null},
                "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": prompt.len(), "completion_tokens": 7, "total_tokens": prompt.len() + 7,
               "prompt_tokens_details": {"cached_tokens": 4}})
    );
    assert_eq!(worker.behaviour.last_call().prompt_tokens, prompt);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_has_the_form_that_clients_read() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = chat_body(
        "say:Grüße 🦀!",
        json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let all = chunks(&gateway.stream("/v1/chat/completions", body).await);
    assert_eq!(
        all[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert_eq!(streamed_text(&all, 0), "Grüße 🦀!");
    let (usage, rest) = all.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 14);
    assert_eq!(rest.last().unwrap()["choices"][0]["finish_reason"], "stop");
    for chunk in rest {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], usage["id"]);
        assert_eq!(chunk["system_fingerprint"], usage["system_fingerprint"]);
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    // No text ends inside a character.
    assert!(
        all.iter()
            .all(|chunk| !chunk.to_string().contains('\u{FFFD}'))
    );

    let plain = chat_body("say:x", json!({"stream": true}));
    let all = chunks(&gateway.stream("/v1/chat/completions", plain).await);
    assert!(all.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sampling_parameter_reaches_the_worker() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let extra = json!({
        "temperature": 0.25, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "frequency_penalty": 0.5,
        "presence_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {"65": -100, "3": 1.5},
        "seed": -1, "max_tokens": 9, "max_completion_tokens": 9, "logprobs": true, "top_logprobs": 3,
    });
    let (status, answer) = gateway.chat("say:abc", extra).await;
    assert_eq!(status, 200, "{answer}");
    let call = worker.behaviour.last_call();
    let sampling = call.sampling.unwrap();
    assert_eq!(
        (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p
        ),
        (0.25, 0.75, 7, 0.125)
    );
    assert_eq!(
        (
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty
        ),
        (0.5, -0.5, 1.5)
    );
    assert_eq!(sampling.seed, u64::MAX);
    assert_eq!(
        sampling.logit_bias,
        [
            LogitBias {
                token: 3,
                bias: 1.5
            },
            LogitBias {
                token: 65,
                bias: -100.0
            }
        ]
    );
    assert_eq!(
        (call.max_tokens, call.logprobs, call.top_logprobs),
        (9, true, 3)
    );
    assert_eq!(call.stop_token_ids, [END]);
    assert_eq!(call.model_fingerprint, "weights-1");
    assert_eq!(call.grammar, None);
    assert_eq!(call.prefill_endpoint, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_request_leaves_open_comes_from_generation_config() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    gateway
        .chat(
            "say:x",
            json!({"user": "someone", "metadata": {"a": "b"}, "store": false, "n": null}),
        )
        .await;
    let call = worker.behaviour.last_call();
    let sampling = call.sampling.unwrap();
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.top_k),
        (0.5, 0.9, 20)
    );
    assert_eq!((sampling.min_p, sampling.repetition_penalty), (0.0, 1.0));
    // A seed is chosen, small enough for every client to repeat.
    assert!(sampling.seed < 1 << 53);
    assert_eq!(call.max_tokens as usize, CONTEXT - call.prompt_tokens.len());

    let greedy = model::model_dir_with(
        model::TEMPLATE,
        json!({"do_sample": false, "max_new_tokens": 32}),
    );
    let gateway = crate::support::gateway(&[&worker], |config| {
        config.model_dir = greedy.path().to_owned()
    })
    .await;
    gateway.chat("say:x", json!({})).await;
    let call = worker.behaviour.last_call();
    assert_eq!(
        (call.sampling.unwrap().temperature, call.max_tokens),
        (0.0, 32)
    );
    gateway.chat("say:x", json!({"top_p": 0.5})).await;
    assert_eq!(
        worker.behaviour.last_call().sampling.unwrap().temperature,
        1.0
    );
    gateway
        .chat("say:x", json!({"temperature": 0.7, "top_p": 0}))
        .await;
    let sampling = worker.behaviour.last_call().sampling.unwrap();
    assert_eq!(sampling.temperature, 0.7);
    assert!(
        sampling.top_p > 0.0 && sampling.top_p < 1e-30,
        "0 would be read as off"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_differ_by_their_seed_and_repeat_by_it() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (status, answer) = gateway
        .chat("tell me", json!({"n": 3, "seed": 10, "max_tokens": 20}))
        .await;
    assert_eq!(status, 200, "{answer}");
    let texts: Vec<&str> = (0..3)
        .map(|i| answer["choices"][i]["message"]["content"].as_str().unwrap())
        .collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    assert!((0..3).all(|i| answer["choices"][i]["index"] == i));
    assert_eq!(answer["usage"]["completion_tokens"], 60);
    let (_, single) = gateway
        .chat("tell me", json!({"seed": 12, "max_tokens": 20}))
        .await;
    assert_eq!(single["choices"][0]["message"]["content"], texts[2]);
    assert_eq!(single["choices"][0]["finish_reason"], "length");

    let body = chat_body(
        "tell me",
        json!({"n": 3, "seed": 10, "max_tokens": 20, "stream": true}),
    );
    let all = chunks(&gateway.stream("/v1/chat/completions", body).await);
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(streamed_text(&all, i as u64), *text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_seed_of_a_request_without_one_repeats_its_answer() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (_, first) = gateway.chat("tell me", json!({"max_tokens": 30})).await;
    let (_, other) = gateway.chat("tell me", json!({"max_tokens": 30})).await;
    assert_ne!(first["choices"], other["choices"]);
    let fingerprint = first["system_fingerprint"].as_str().unwrap();
    let seed: u64 = fingerprint.rsplit('_').next().unwrap().parse().unwrap();
    let (_, again) = gateway
        .chat("tell me", json!({"max_tokens": 30, "seed": seed}))
        .await;
    assert_eq!(again["choices"], first["choices"]);
    assert_eq!(again["system_fingerprint"], first["system_fingerprint"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_strings_end_the_answer_and_the_work() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    for stop in [json!("END"), json!(["never", "END", "ENDING"])] {
        let (_, answer) = gateway
            .chat("say:one ENtwo END three", json!({"stop": stop}))
            .await;
        let choice = &answer["choices"][0];
        assert_eq!(
            (
                choice["message"]["content"].as_str(),
                choice["finish_reason"].as_str()
            ),
            (Some("one ENtwo "), Some("stop"))
        );
        assert_eq!(answer["usage"]["completion_tokens"], 13);
    }
    let body = chat_body(
        "say:one ENtwo END three",
        json!({"stop": "END", "stream": true}),
    );
    let all = chunks(&gateway.stream("/v1/chat/completions", body).await);
    assert_eq!(streamed_text(&all, 0), "one ENtwo ");
    // Held-back text is released when the answer ends.
    let (_, answer) = gateway.chat("say:tail EN", json!({"stop": "END"})).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "tail EN");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_come_with_bytes_and_alternatives() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (_, answer) = gateway
        .chat("say:aé", json!({"logprobs": true, "top_logprobs": 2}))
        .await;
    let content = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert_eq!(
        content.len(),
        3,
        "one for each token of text, none for the end token"
    );
    assert_eq!(
        content[0],
        json!({"token": "a", "logprob": -0.5, "bytes": [97],
               "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]},
                                {"token": "b", "logprob": -1.5, "bytes": [98]}]})
    );
    assert_eq!(
        (&content[1]["bytes"], &content[1]["token"]),
        (&json!([195]), &json!("\u{FFFD}"))
    );
    let (_, bare) = gateway.chat("say:ab", json!({"logprobs": true})).await;
    assert_eq!(
        bare["choices"][0]["logprobs"]["content"][1]["top_logprobs"],
        json!([])
    );

    // A stop string removes the log-probabilities of its tokens too, streamed or not.
    let extra = json!({"logprobs": true, "stop": "cd", "stream": true});
    let all = chunks(
        &gateway
            .stream("/v1/chat/completions", chat_body("say:abcdef", extra))
            .await,
    );
    let tokens: String = all
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .map(|logged| logged["token"].as_str().unwrap())
        .collect();
    assert_eq!(tokens, "ab");
}

#[tokio::test(flavor = "multi_thread")]
async fn response_formats_become_grammars() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let grammar = || {
        worker
            .behaviour
            .last_call()
            .grammar
            .and_then(|grammar| grammar.kind)
    };
    let (status, _) = gateway
        .chat(
            "say:{}",
            json!({"response_format": {"type": "json_object"}}),
        )
        .await;
    assert_eq!((status, grammar()), (200, Some(Kind::JsonObject(true))));
    gateway
        .chat("say:{}", json!({"response_format": {"type": "text"}}))
        .await;
    assert_eq!(grammar(), None);
    let schema = json!({"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema}});
    let (status, _) = gateway
        .chat("say:{}", json!({"response_format": format}))
        .await;
    // A schema that names properties means only those.
    let mut closed = schema.clone();
    closed["additionalProperties"] = json!(false);
    assert_eq!(
        (status, grammar()),
        (200, Some(Kind::JsonSchema(closed.to_string())))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn template_arguments_and_roles_reach_the_template() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let body = json!({
        "model": crate::support::MODEL,
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "Well.", "refusal": null, "annotations": []},
            {"role": "user", "content": "say:ok", "name": "ann"},
        ],
        "chat_template_kwargs": {"mood": "calm"},
    });
    let (status, answer) = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(
        model::decode(&worker.behaviour.last_call().prompt_tokens),
        "<|begin|><|system|>Be brief.<|user|>one\ntwo<|assistant|>Well.<|end|><|user|>say:ok(calm)<|assistant|>"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_stays_in_the_content_and_end_tokens_can_be_passed() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    let (_, answer) = gateway.chat("say:<think>hm</think>yes", json!({})).await;
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        "<think>hm</think>yes"
    );
    let (_, answer) = gateway
        .chat("say:ab", json!({"ignore_eos": true, "max_tokens": 10}))
        .await;
    assert_eq!(
        worker.behaviour.last_call().stop_token_ids,
        Vec::<u32>::new()
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["message"]["content"], "ab");
    assert_eq!(answer["usage"]["completion_tokens"], 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_may_fill_the_context_and_no_more() {
    let worker = FakeWorker::start();
    let gateway = gateway(&[&worker], |_| {}).await;
    worker.behaviour.length.store(10_000, Ordering::SeqCst);
    let (status, answer) = gateway.chat("go on", json!({"max_tokens": 100_000})).await;
    assert_eq!(
        (status, answer["choices"][0]["finish_reason"].as_str()),
        (200, Some("length"))
    );
    assert_eq!(answer["usage"]["total_tokens"], CONTEXT);
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_asks_for_many_choices_leaves_places_to_the_others() {
    const CHOICES: usize = 16;
    let many = json!({"n": CHOICES, "seed": 10, "max_tokens": 30});
    let wide = FakeWorker::start();
    wide.behaviour.description.lock().unwrap().max_batch = 64;
    let undisturbed = gateway(&[&wide], |_| {}).await;
    let (_, expected) = undisturbed.chat("tell me", many.clone()).await;
    let worker = FakeWorker::start();
    worker.behaviour.description.lock().unwrap().max_batch = 4;
    *worker.behaviour.pace.lock().unwrap() = Duration::from_millis(30);
    let gateway = gateway(&[&worker], |_| {}).await;
    let calls = || worker.behaviour.calls.lock().unwrap().len();
    let other = async {
        eventually(|| async { calls() >= 2 }).await;
        let (status, answer) = gateway.chat("say:x", json!({})).await;
        assert_eq!(status, 200, "{answer}");
        calls() - 1
    };
    let ((status, answer), begun) = tokio::join!(gateway.chat("tell me", many), other);
    assert_eq!(status, 200, "{answer}");
    assert!(begun <= 4, "{begun} choices had begun before the other's");
    assert_eq!(calls(), CHOICES + 1);
    assert_eq!(answer["choices"], expected["choices"]);
    assert_eq!(answer["usage"], expected["usage"]);
}
