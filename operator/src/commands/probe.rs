//! `hearth probe`: checks the health of an HTTP address, for images that have no shell to do so.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::DurationText;

use crate::http;
use crate::terminal::ui;

const EXAMPLES: &str = "Examples:\n  hearth probe http://127.0.0.1:8080/health\n  \
    hearth probe http://hearth-operator.hearth-system:8081/readyz --wait 60s";

/// Delay between two attempts.
const AGAIN: Duration = Duration::from_secs(1);
/// Timeout of one attempt.
const PATIENCE: Duration = Duration::from_secs(5);

/// Arguments of `probe`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ProbeArgs {
    /// URL to check
    url: String,
    /// Keep retrying for this long
    #[arg(long, value_name = "DURATION", default_value = "0s")]
    wait: DurationText,
}

/// Prints the response; fails unless its status is a success.
pub(crate) fn run(args: &ProbeArgs) -> anyhow::Result<()> {
    let until = Instant::now() + args.wait.get();
    let client = http::client(&args.url, None, Some(PATIENCE))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        loop {
            match ask(&client, &args.url).await {
                Ok(answer) => return ui::print_data(&answer),
                Err(error) if Instant::now() >= until => return Err(error),
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    })
}

async fn ask(client: &reqwest::Client, url: &str) -> anyhow::Result<String> {
    let response = client.get(url).send().await;
    let response = response.with_context(|| format!("{url} does not answer"))?;
    let status = response.status();
    let answer = response.text().await.unwrap_or_default();
    if !status.is_success() {
        bail!("{url} answers {status}: {}", answer.trim());
    }
    Ok(answer)
}
