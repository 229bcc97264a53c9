//! `hearth probe`: checks an HTTP address, or asks a model one question, for images that have no shell to do so.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::DurationText;
use serde_json::json;

use crate::commands::chat::base_url;
use crate::http;
use crate::http::openai::Client;
use crate::terminal::ui;

const EXAMPLES: &str = "Examples:\n  hearth probe http://127.0.0.1:8080/health\n  \
    hearth probe http://hearth-operator.hearth-system:8081/readyz --wait 60s\n  \
    hearth probe http://demo.default/v1 --ask 'What is Hearth?' --wait 2m";

/// Delay between two attempts.
const AGAIN: Duration = Duration::from_secs(1);
/// Timeout of one attempt to check an address.
const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of one attempt to get a whole answer of a model, which may have to start first.
const ANSWER_PATIENCE: Duration = Duration::from_secs(120);

/// Arguments of `probe`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ProbeArgs {
    /// URL to check; with --ask that of an OpenAI endpoint, with or without /v1
    url: String,
    /// Keep retrying for this long
    #[arg(long, value_name = "DURATION", default_value = "0s")]
    wait: DurationText,
    /// Ask the model this and print its answer as it comes
    #[arg(long, value_name = "TEXT")]
    ask: Option<String>,
    /// Name of the model to ask (default: the first that the endpoint serves)
    #[arg(long, value_name = "NAME", requires = "ask")]
    model: Option<String>,
    /// API key of the endpoint
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

/// Prints the response; fails unless its status is a success, or unless the model answers.
pub(crate) fn run(args: &ProbeArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        match &args.ask {
            Some(question) => ask(args, question).await,
            None => check(args).await,
        }
    })
}

async fn check(args: &ProbeArgs) -> anyhow::Result<()> {
    let until = Instant::now() + args.wait.get();
    let client = http::client(&args.url, None, Some(PATIENCE))?;
    loop {
        match health(&client, &args.url).await {
            Ok(answer) => return ui::print_data(&answer),
            Err(error) if Instant::now() >= until => return Err(error),
            Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}

async fn health(client: &reqwest::Client, url: &str) -> anyhow::Result<String> {
    let response = client.get(url).send().await;
    let response = response.with_context(|| format!("{url} does not answer"))?;
    let status = response.status();
    let answer = response.text().await.unwrap_or_default();
    if !status.is_success() {
        bail!("{url} answers {status}: {}", answer.trim());
    }
    Ok(answer)
}

/// Asks until there is an answer. What was printed cannot be taken back: from the first piece on nothing is tried again.
async fn ask(args: &ProbeArgs, question: &str) -> anyhow::Result<()> {
    let until = Instant::now() + args.wait.get();
    let base = match base_url(&args.url) {
        Ok(base) => base,
        Err(remedy) => bail!("{} is no endpoint\n  {remedy}", args.url),
    };
    let model = args.model.as_deref().unwrap_or_default();
    let mut client = Client::new(&base, model, args.api_key.as_deref(), None)?;
    loop {
        let mut is_begun = false;
        let attempt = answer(&mut client, question, &mut is_begun);
        let outcome = match tokio::time::timeout(ANSWER_PATIENCE, attempt).await {
            Ok(outcome) => outcome,
            Err(_) => Err(anyhow::anyhow!(
                "{base} did not finish its answer within {} s\n  hearth logs, or kubectl hearth logs, shows what it does",
                ANSWER_PATIENCE.as_secs()
            )),
        };
        match outcome {
            Err(_) if !is_begun && Instant::now() < until => tokio::time::sleep(AGAIN).await,
            outcome => return outcome,
        }
    }
}

/// Prints the answer as it comes. `is_begun` tells whether anything was printed.
async fn answer(client: &mut Client, question: &str, is_begun: &mut bool) -> anyhow::Result<()> {
    if client.model.is_empty() {
        client.model = client.first_model().await?;
    }
    let messages = [json!({"role": "user", "content": question})];
    let streamed = client.stream(&messages, |piece| {
        *is_begun |= !piece.is_empty();
        ui::print_data(piece)
    });
    streamed.await?;
    if !*is_begun {
        bail!(
            "{} answered nothing\n  ask something else: a model may end at once",
            client.model
        );
    }
    ui::print_data("\n")
}
