//! `hearth chat`: a conversation with a running deployment over its own OpenAI endpoint.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Context, bail};
use clap::Args;
use futures::StreamExt;
use serde_json::{Value, json};

use crate::cli::StateArgs;
use crate::state::StateDir;

const EXAMPLES: &str = "Examples:\n  hearth chat\n  hearth chat --message 'What is a KV cache?'";

/// Arguments of `hearth chat`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ChatArgs {
    /// Which deployment, where several run
    name: Option<String>,
    /// Ask this one question and print the answer
    #[arg(short, long, value_name = "TEXT")]
    message: Option<String>,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Another endpoint than this machine's, such as http://host:8080/v1
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Model name at --url (default: the first that it serves)
    #[arg(long, requires = "url")]
    model: Option<String>,
    /// API key
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    state: StateArgs,
}

/// Talks until the end of input.
pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = connect(args).await?;
        let mut messages = Vec::new();
        if let Some(system) = &args.system {
            messages.push(json!({"role": "system", "content": system}));
        }
        match &args.message {
            Some(message) => turn(&client, &mut messages, message).await,
            None => converse(&client, &mut messages).await,
        }
    })
}

async fn connect(args: &ChatArgs) -> anyhow::Result<Client> {
    let key = args.api_key.as_deref();
    let Some(url) = &args.url else {
        let running =
            StateDir::locate(args.state.state_dir.as_deref())?.choose(args.name.as_deref())?;
        return Ok(Client::new(&running.endpoint, &running.served_name, key));
    };
    let mut client = Client::new(url, args.model.as_deref().unwrap_or_default(), key);
    if args.model.is_none() {
        client.model = client.first_model().await?;
    }
    Ok(client)
}

async fn converse(client: &Client, messages: &mut Vec<Value>) -> anyhow::Result<()> {
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        eprintln!(
            "{} at {}; an empty line or Ctrl-D ends",
            client.model, client.base
        );
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if terminal {
            eprint!("> ");
            std::io::stderr().flush()?;
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
        if let Err(error) = turn(client, messages, line).await {
            if !terminal {
                return Err(error);
            }
            messages.truncate(before);
            crate::ui::print_error(&error);
        }
    }
    Ok(())
}

async fn turn(client: &Client, messages: &mut Vec<Value>, text: &str) -> anyhow::Result<()> {
    messages.push(json!({"role": "user", "content": text}));
    let mut out = std::io::stdout();
    let mut answer = String::new();
    client
        .stream(messages, |piece| {
            answer.push_str(piece);
            let _ = write!(out, "{piece}").and_then(|()| out.flush());
        })
        .await?;
    let _ = writeln!(out);
    messages.push(json!({"role": "assistant", "content": answer}));
    Ok(())
}

/// A client of one OpenAI endpoint.
pub(crate) struct Client {
    http: reqwest::Client,
    base: String,
    model: String,
    key: Option<String>,
}

impl Client {
    /// A client of `base` (`http://host:port/v1`).
    pub(crate) fn new(base: &str, model: &str, key: Option<&str>) -> Self {
        Self {
            http: reqwest::Client::new(),
            base: base.trim_end_matches('/').to_owned(),
            model: model.to_owned(),
            key: key.map(str::to_owned),
        }
    }

    /// Streams the answer to `messages` into `sink`, piece by piece.
    ///
    /// # Errors
    /// What the endpoint said instead of an answer, or that it cannot be reached.
    pub(crate) async fn stream(
        &self,
        messages: &[Value],
        mut sink: impl FnMut(&str),
    ) -> anyhow::Result<()> {
        let body = json!({"model": self.model, "messages": messages, "stream": true});
        let request = self.authorise(
            self.http
                .post(format!("{}/chat/completions", self.base))
                .json(&body),
        );
        let response = checked(request.send().await.with_context(|| self.unreachable())?).await?;
        let mut bytes = response.bytes_stream();
        let mut pending = Vec::new();
        while let Some(piece) = bytes.next().await {
            pending.extend_from_slice(&piece.context("the answer was cut off")?);
            while let Some(end) = pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                let Some(data) = line.trim().strip_prefix("data: ") else {
                    continue;
                };
                if data == "[DONE]" {
                    return Ok(());
                }
                let event: Value =
                    serde_json::from_str(data).context("the endpoint sent what is no JSON")?;
                if let Some(message) = event["error"]["message"].as_str() {
                    bail!("{message}");
                }
                if let Some(text) = event["choices"][0]["delta"]["content"].as_str() {
                    sink(text);
                }
            }
        }
        bail!(
            "the answer was cut off: {} closed the stream\n  hearth logs shows why",
            self.base
        )
    }

    async fn first_model(&self) -> anyhow::Result<String> {
        let request = self.authorise(self.http.get(format!("{}/models", self.base)));
        let response = checked(request.send().await.with_context(|| self.unreachable())?).await?;
        let list: Value = response
            .json()
            .await
            .context("the endpoint sent what is no JSON")?;
        let id = list["data"][0]["id"].as_str();
        id.map(str::to_owned)
            .with_context(|| format!("{} serves no model", self.base))
    }

    fn authorise(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    fn unreachable(&self) -> String {
        format!(
            "{} cannot be reached\n  is it up? hearth status tells",
            self.base
        )
    }
}

/// The response, or the endpoint's own error message.
async fn checked(response: reqwest::Response) -> anyhow::Result<reqwest::Response> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body: Value = response.json().await.unwrap_or_default();
    match body["error"]["message"].as_str() {
        Some(message) => bail!("{message}"),
        None => bail!("the endpoint answered {status}"),
    }
}
