//! Any bytes as the body of a chat or a text completion; a request that is accepted lies within its limits.

#![no_main]

use hearth_server::ApiError;
use hearth_server::wire::{
    GenerationOptions, MAX_CHOICES, MAX_PROMPTS, MAX_STOPS, MAX_TOP_LOGPROBS, ToolChoice, parse_chat,
    parse_completion,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match parse_chat(data) {
        Ok(request) => {
            check_options(&request.options);
            assert!(!request.messages.is_empty());
            assert!(request.logprobs.is_none_or(|top| top <= MAX_TOP_LOGPROBS));
            assert!(request.messages.iter().all(|message| message.template_value["role"].is_string()));
            if let ToolChoice::Named(name) = &request.tool_choice {
                assert!(request.tools.iter().any(|tool| tool.name == *name));
            }
        }
        Err(error) => check_error(&error),
    }
    match parse_completion(data) {
        Ok(request) => {
            check_options(&request.options);
            assert!((1..=MAX_PROMPTS).contains(&request.prompts.len()));
            assert!(request.prompts.len() * request.options.n as usize <= MAX_CHOICES as usize);
        }
        Err(error) => check_error(&error),
    }
});

fn check_options(options: &GenerationOptions) {
    assert!((1..=MAX_CHOICES).contains(&options.n));
    assert!(options.max_tokens.is_none_or(|tokens| tokens > 0));
    assert!(options.temperature.is_none_or(|temperature| (0.0..=2.0).contains(&temperature)));
    assert!(options.top_p.is_none_or(|p| (0.0..=1.0).contains(&p)));
    assert!(options.stop.len() <= MAX_STOPS && options.stop.iter().all(|stop| !stop.is_empty()));
    assert!(options.logit_bias.iter().all(|(_, bias)| (-100.0..=100.0).contains(bias)));
}

/// Refusals are short, whatever was sent, and are JSON.
fn check_error(error: &ApiError) {
    assert_eq!(error.status, 400);
    assert!(!error.message.is_empty() && error.message.len() < 2000, "{}", error.message.len());
    let json: serde_json::Value = serde_json::from_str(&error.to_json()).expect("an error is JSON");
    assert_eq!(json["error"]["message"], error.message.as_str());
}
