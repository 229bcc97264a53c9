//! `hearth probe`: checks an HTTP address, or asks a model one question, for images that have no shell to do so.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use hearth_crds::DurationText;
use serde_json::json;

use crate::commands::chat::base_url;
use crate::http;
use crate::http::openai::{Client, Refusal};
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
    /// Keep retrying for this long; with --ask not after a refusal that stays one, such as 401, 403 or 404
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

/// Asks until there is an answer, or a refusal that stays one. What was printed cannot be taken back: from the first piece on
/// nothing is tried again. All attempts together take no longer than `--wait`, or than one may take.
async fn ask(args: &ProbeArgs, question: &str) -> anyhow::Result<()> {
    let began = Instant::now();
    let wait = args.wait.get();
    let base = match base_url(&args.url) {
        Ok(base) => base,
        Err(remedy) => bail!("{} is no endpoint\n  {remedy}", args.url),
    };
    let model = args.model.as_deref().unwrap_or_default();
    let mut client = Client::new(&base, model, args.api_key.as_deref(), None)?;
    let mut before = None;
    loop {
        let mut is_begun = false;
        let patience = patience(wait, began.elapsed());
        let attempt = answer(&mut client, question, &mut is_begun);
        let outcome = match tokio::time::timeout(patience, attempt).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let slow = anyhow!(
                    "{base} did not finish its answer within {} s\n  hearth logs, or kubectl hearth logs, shows what it does",
                    patience.as_secs()
                );
                // It had less time than an answer may take: why it had to be asked again says more.
                let said = before.take();
                let said = said.filter(|_| !is_begun && patience < ANSWER_PATIENCE);
                Err(said.unwrap_or(slow))
            }
        };
        match outcome {
            Err(error) if !is_begun && may_mend(&error) && began.elapsed() < wait => {
                before = Some(error);
                tokio::time::sleep(AGAIN).await;
            }
            outcome => return outcome,
        }
    }
}

/// Time for an attempt that begins after `elapsed`: the attempts together take no longer than `wait`, or than one may.
fn patience(wait: Duration, elapsed: Duration) -> Duration {
    let left = wait.max(ANSWER_PATIENCE).saturating_sub(elapsed);
    left.min(ANSWER_PATIENCE)
}

/// Whether asking again may help: an endpoint that cannot be reached may be starting.
fn may_mend(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_none_or(Refusal::may_mend)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_attempts_end_with_the_wait_or_with_one_answer() {
        for (wait_s, elapsed_s, patience_s) in [
            (0, 0, 120),
            (5, 4, 116),
            (240, 0, 120),
            (240, 120, 120),
            (240, 200, 40),
            (240, 241, 0),
        ] {
            let [wait, elapsed] = [wait_s, elapsed_s].map(Duration::from_secs);
            assert_eq!(patience(wait, elapsed).as_secs(), patience_s, "{wait_s}");
        }
    }
}
