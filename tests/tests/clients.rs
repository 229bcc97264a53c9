//! Real clients of the OpenAI API against a running `hearth up`.

use std::process::Command;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use futures::StreamExt;
use hearth_tests::{Up, python, root, run};

#[test]
fn the_openai_python_client_makes_its_everyday_calls() {
    let up = Up::demo();
    let (code, stdout, stderr) = run(Command::new(python())
        .arg(root().join("tests/python/openai_client.py"))
        .arg(up.v1()));
    print!("{stdout}");
    assert_eq!(code, 0, "{stdout}\n{stderr}");
    assert!(stdout.contains("checks hold"), "{stdout}");
}

#[tokio::test]
async fn async_openai_makes_its_everyday_calls() {
    use async_openai::types::chat::{
        ChatCompletionRequestUserMessage, CreateChatCompletionRequestArgs,
    };

    let up = Up::demo();
    let client = Client::with_config(
        OpenAIConfig::new()
            .with_api_base(up.v1())
            .with_api_key("none"),
    );

    let models = client.models().list().await.expect("models");
    assert!(models.data.iter().any(|model| model.id == "hearth-demo"));
    assert_eq!(
        client
            .models()
            .retrieve("hearth-demo")
            .await
            .expect("model")
            .id,
        "hearth-demo"
    );

    let request = || {
        let mut request = CreateChatCompletionRequestArgs::default();
        request
            .model("hearth-demo")
            .temperature(0.0)
            .max_completion_tokens(80u32);
        request.messages([ChatCompletionRequestUserMessage::from("What is Hearth?").into()]);
        request
    };
    let answer = client
        .chat()
        .create(request().build().expect("request"))
        .await
        .expect("answer");
    let text = answer.choices[0]
        .message
        .content
        .clone()
        .unwrap_or_default();
    assert!(text.contains("Hearth"), "{text}");

    let mut stream = client
        .chat()
        .create_stream(request().build().expect("request"))
        .await
        .expect("stream");
    let mut streamed = String::new();
    while let Some(event) = stream.next().await {
        for choice in event.expect("event").choices {
            streamed.push_str(&choice.delta.content.unwrap_or_default());
        }
    }
    assert_eq!(streamed, text);

    completes(&client).await;

    let mut unknown = CreateChatCompletionRequestArgs::default();
    unknown
        .model("no-such-model")
        .messages([ChatCompletionRequestUserMessage::from("hi").into()]);
    let error = client
        .chat()
        .create(unknown.build().expect("request"))
        .await
        .expect_err("unknown model");
    assert!(error.to_string().contains("hearth-demo"), "{error}");
}

/// Requests a completion of a prompt without a conversation.
async fn completes(client: &Client<OpenAIConfig>) {
    use async_openai::types::completions::CreateCompletionRequestArgs;

    let mut request = CreateCompletionRequestArgs::default();
    request
        .model("hearth-demo")
        .prompt("Hearth is")
        .max_tokens(8u32)
        .temperature(0.0);
    let answer = client
        .completions()
        .create(request.build().expect("request"))
        .await
        .expect("completion");
    assert!(!answer.choices[0].text.is_empty());
}
