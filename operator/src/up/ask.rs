//! One question to a running deployment, its answer streamed to standard output.

use std::path::Path;

use serde_json::json;

use crate::http::openai::Client;
use crate::terminal::ui::{print_beside, say};
use crate::up::state::Running;

/// Returns the first key of an API key file.
pub(super) fn first_key(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with('#'))
        .map(str::to_owned)
}

/// Asks the question and prints the answer.
///
/// # Errors
/// The endpoint's error.
pub(super) async fn ask(
    running: &Running,
    question: &str,
    key: Option<&str>,
) -> anyhow::Result<()> {
    say(format_args!("\n  > {question}"));
    let trusted = running.certificate.as_ref();
    let client = Client::new(&running.endpoint, &running.served_name, key, trusted)?;
    let messages = [json!({"role": "user", "content": question})];
    client.stream(&messages, print_beside).await?;
    print_beside("\n")?;
    say("");
    Ok(())
}
