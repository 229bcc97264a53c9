//! `hearth chat`: a conversation with a running deployment over its own OpenAI endpoint.

use std::cell::Cell;
use std::convert::Infallible;
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use super::status::waits_by_up;
use crate::environment::Environment;
use crate::http::openai::Client;
use crate::terminal::ui;
use crate::up::state::StateArgs;
use crate::up::state::StateDir;

const EXAMPLES: &str = "Examples:\n  hearth chat\n  hearth chat --message 'What is a KV cache?'";

/// Silence of an answer after which its endpoint is asked whom it waits for.
const SILENCE: Duration = Duration::from_secs(3);

/// Arguments of `hearth chat`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ChatArgs {
    /// Which deployment, where several run
    name: Option<String>,
    /// Endpoint to use instead of this machine's, such as http://host:8080
    #[arg(long, value_name = "URL", value_parser = base_url)]
    url: Option<String>,
    /// PEM certificate of an HTTPS endpoint, or of its authority (default: the system's authorities)
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Model name at --url (default: the first that it serves)
    #[arg(long, requires = "url")]
    model: Option<String>,
    #[command(flatten)]
    talk: TalkArgs,
    #[command(flatten)]
    state: StateArgs,
}

/// What is said, wherever the endpoint is.
#[derive(Args)]
pub(crate) struct TalkArgs {
    /// Ask this one question and print the answer
    #[arg(short, long, value_name = "TEXT")]
    message: Option<String>,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// API key
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
}

/// Base of the API at a URL: a bare address means its `/v1`.
pub(crate) fn base_url(text: &str) -> Result<String, String> {
    const EXAMPLE: &str = "write it as http://host:8080 or https://host:8080/v1";
    let mut url = reqwest::Url::parse(text).map_err(|error| format!("{error}; {EXAMPLE}"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(EXAMPLE.to_owned());
    }
    if url.path() == "/" {
        url.set_path("/v1");
    }
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

/// Chats until the end of input.
pub(crate) fn run(args: &ChatArgs, environment: &Environment) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (client, local) = connect(args, environment).await?;
        let waits = || match &local {
            Some((state, name)) => waits_by_up(state, name),
            None => Vec::new(),
        };
        talk(&client, &args.talk, &waits).await
    })
}

/// Asks the one question, or talks until the end of input. Besides the endpoint, `waits` tells whom answers wait for.
///
/// # Errors
/// The endpoint's, or that it cannot be reached.
pub(crate) async fn talk(
    client: &Client,
    args: &TalkArgs,
    waits: &dyn Fn() -> Vec<String>,
) -> anyhow::Result<()> {
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    match &args.message {
        Some(message) => turn(client, &mut messages, message, waits).await,
        None => converse(client, &mut messages, waits).await,
    }
}

/// Connects to the endpoint; with the name of a deployment of this machine, and where its state is.
async fn connect(
    args: &ChatArgs,
    environment: &Environment,
) -> anyhow::Result<(Client, Option<(StateDir, String)>)> {
    let key = args.talk.api_key.as_deref();
    let Some(url) = &args.url else {
        let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
        let running = state.choose(args.name.as_deref())?;
        let trusted = args.ca.as_ref().or(running.certificate.as_ref());
        let client = Client::new(&running.endpoint, &running.served_name, key, trusted)?;
        return Ok((client, Some((state, running.name))));
    };
    let model = args.model.as_deref().unwrap_or_default();
    let mut client = Client::new(url, model, key, args.ca.as_ref())?;
    if args.model.is_none() {
        client.model = client.first_model().await?;
    }
    Ok((client, None))
}

async fn converse(
    client: &Client,
    messages: &mut Vec<Value>,
    waits: &dyn Fn() -> Vec<String>,
) -> anyhow::Result<()> {
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        ui::say(format_args!(
            "{} at {}; an empty line or Ctrl-D ends",
            client.model, client.base
        ));
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if terminal {
            let _ = write!(std::io::stderr(), "> ");
        }
        let Some(line) = lines.next().transpose()? else {
            break;
        };
        let line = line.trim();
        if line.is_empty() {
            if terminal {
                break;
            }
            continue;
        }
        let before = messages.len();
        if let Err(error) = turn(client, messages, line, waits).await {
            if !terminal {
                return Err(error);
            }
            messages.truncate(before);
            ui::print_error(&error);
        }
    }
    Ok(())
}

async fn turn(
    client: &Client,
    messages: &mut Vec<Value>,
    text: &str,
    waits: &dyn Fn() -> Vec<String>,
) -> anyhow::Result<()> {
    messages.push(json!({"role": "user", "content": text}));
    let (mut answer, heard) = (String::new(), Cell::new(Instant::now()));
    let stream = client.stream(messages, |piece| {
        heard.set(Instant::now());
        answer.push_str(piece);
        ui::print_data(piece)
    });
    tokio::select! {
        ended = stream => ended?,
        never = tell_waits(client, &heard, waits) => match never {},
    }
    ui::print_data("\n")?;
    messages.push(json!({"role": "assistant", "content": answer}));
    Ok(())
}

/// Says whom the answer waits for when nothing of it has been heard for a while, each member once.
async fn tell_waits(
    client: &Client,
    heard: &Cell<Instant>,
    waits: &dyn Fn() -> Vec<String>,
) -> Infallible {
    let mut told = Vec::new();
    loop {
        tokio::time::sleep(SILENCE).await;
        if heard.get().elapsed() < SILENCE {
            continue;
        }
        let by_endpoint = client.waits_for().await;
        for member in by_endpoint.into_iter().chain(waits()) {
            if !told.contains(&member) {
                ui::say(format_args!("  the answer waits for {member}"));
                told.push(member);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::base_url;

    #[test]
    fn a_url_is_taken_with_and_without_v1() {
        for (text, base) in [
            ("http://host:8080", "http://host:8080/v1"),
            ("http://host:8080/", "http://host:8080/v1"),
            ("http://host:8080/v1", "http://host:8080/v1"),
            ("https://host/v1/", "https://host/v1"),
            ("https://host/llm/v1", "https://host/llm/v1"),
        ] {
            assert_eq!(base_url(text).unwrap(), base);
        }
        for text in ["host:8080", "127.0.0.1:8080", "ftp://host", ""] {
            let words = base_url(text).unwrap_err();
            assert!(words.contains("write it as http://host:8080"), "{words}");
        }
    }
}
