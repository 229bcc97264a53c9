//! A simple client: one streamed chat completion, event by event.

use anyhow::{Context, bail};
use futures::StreamExt;
use serde_json::{Value, json};

/// A streamed answer, put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The full text.
    pub text: String,
    /// Token texts in order, from `logprobs` if requested.
    pub tokens: Vec<String>,
    /// Their log-probabilities: equal bits give equal values.
    pub logprobs: Vec<f64>,
    /// `stop`, `length` …
    pub finish_reason: String,
    /// Number of completion tokens according to `usage`, if requested.
    pub completion_tokens: u64,
}

/// Builds a greedy, streamed request with usage and token texts.
pub fn chat_body(model: &str, question: &str, max_tokens: u32) -> Value {
    json!({
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": true,
        "stream_options": {"include_usage": true},
        "logprobs": true,
    })
}

/// Sends `body` (with `"stream": true`) and collects the answer; `each` receives every piece of text.
///
/// # Errors
/// The endpoint's error response, or a broken stream.
pub async fn chat_stream(
    v1: &str,
    body: &Value,
    mut each: impl FnMut(usize, &str),
) -> anyhow::Result<Answer> {
    let response = reqwest::Client::new()
        .post(format!("{v1}/chat/completions"))
        .json(body)
        .send()
        .await?;
    let status = response.status();
    if !status.is_success() {
        bail!("{status}: {}", response.text().await?);
    }
    let mut bytes = response.bytes_stream();
    let mut pending = Vec::new();
    let mut answer = Answer::default();
    let mut pieces = 0;
    while let Some(chunk) = bytes.next().await {
        pending.extend_from_slice(&chunk.context("the stream broke")?);
        while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            let line = String::from_utf8(line)?;
            let Some(data) = line.trim().strip_prefix("data: ") else {
                continue;
            };
            if data == "[DONE]" {
                return Ok(answer);
            }
            let event: Value = serde_json::from_str(data)?;
            if !event["error"].is_null() {
                bail!("{}", event["error"]);
            }
            take(&event, &mut answer);
            if let Some(text) = event["choices"][0]["delta"]["content"]
                .as_str()
                .filter(|text| !text.is_empty())
            {
                pieces += 1;
                each(pieces, text);
            }
        }
    }
    bail!("the stream ended without [DONE]: {answer:?}")
}

fn take(event: &Value, answer: &mut Answer) {
    let choice = &event["choices"][0];
    answer
        .text
        .push_str(choice["delta"]["content"].as_str().unwrap_or_default());
    for token in choice["logprobs"]["content"]
        .as_array()
        .into_iter()
        .flatten()
    {
        answer
            .tokens
            .push(token["token"].as_str().unwrap_or_default().to_owned());
        answer.logprobs.extend(token["logprob"].as_f64());
    }
    if let Some(reason) = choice["finish_reason"].as_str() {
        reason.clone_into(&mut answer.finish_reason);
    }
    if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
        answer.completion_tokens = tokens;
    }
}
