//! `hearth chat`: a conversation with a running deployment over its own OpenAI endpoint.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use futures::StreamExt;
use serde_json::{Value, json};

use crate::cli::StateArgs;
use crate::http;
use crate::state::StateDir;
use crate::ui;

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
    /// Another endpoint than this machine's, such as http://host:8080
    #[arg(long, value_name = "URL", value_parser = base_url)]
    url: Option<String>,
    /// PEM certificate of an HTTPS endpoint, or of its authority (default: the system's authorities)
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Model name at --url (default: the first that it serves)
    #[arg(long, requires = "url")]
    model: Option<String>,
    /// API key
    #[arg(long, env = "HEARTH_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    #[command(flatten)]
    state: StateArgs,
}

/// Base of the API at a URL: an address alone means the `/v1` there.
fn base_url(text: &str) -> Result<String, String> {
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
        let trusted = args.ca.as_ref().or(running.certificate.as_ref());
        return Client::new(&running.endpoint, &running.served_name, key, trusted);
    };
    let model = args.model.as_deref().unwrap_or_default();
    let mut client = Client::new(url, model, key, args.ca.as_ref())?;
    if args.model.is_none() {
        client.model = client.first_model().await?;
    }
    Ok(client)
}

async fn converse(client: &Client, messages: &mut Vec<Value>) -> anyhow::Result<()> {
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
        if let Err(error) = turn(client, messages, line).await {
            if !terminal {
                return Err(error);
            }
            messages.truncate(before);
            ui::print_error(&error);
        }
    }
    Ok(())
}

async fn turn(client: &Client, messages: &mut Vec<Value>, text: &str) -> anyhow::Result<()> {
    messages.push(json!({"role": "user", "content": text}));
    let mut answer = String::new();
    client
        .stream(messages, |piece| {
            answer.push_str(piece);
            ui::print_data(piece)
        })
        .await?;
    ui::print_data("\n")?;
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
    /// A client of `base` (`http://host:port/v1`). `trusted` is a PEM file with the certificate of an HTTPS endpoint,
    /// or of its authority.
    ///
    /// # Errors
    /// A file that holds no certificate.
    pub(crate) fn new(
        base: &str,
        model: &str,
        key: Option<&str>,
        trusted: Option<&PathBuf>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            http: http::client(base, trusted.map(PathBuf::as_path), None)?,
            base: base.to_owned(),
            model: model.to_owned(),
            key: key.map(str::to_owned),
        })
    }

    /// Streams the answer to `messages` into `sink`, piece by piece.
    ///
    /// # Errors
    /// What the endpoint said instead of an answer, or that it cannot be reached; the sink's own errors.
    pub(crate) async fn stream(
        &self,
        messages: &[Value],
        mut sink: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let body = json!({"model": self.model, "messages": messages, "stream": true});
        let request = self.authorise(
            self.http
                .post(format!("{}/chat/completions", self.base))
                .json(&body),
        );
        let response = checked(
            request
                .send()
                .await
                .map_err(|error| self.unreachable(error))?,
        )
        .await?;
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
                    sink(text)?;
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
        let response = checked(
            request
                .send()
                .await
                .map_err(|error| self.unreachable(error))?,
        )
        .await?;
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

    fn unreachable(&self, error: reqwest::Error) -> anyhow::Error {
        let error = anyhow::Error::new(error);
        let remedy = if error.root_cause().to_string().contains("certificate") {
            "name the server's certificate, or its authority's: --ca FILE"
        } else {
            "is it up? hearth status tells"
        };
        error.context(format!("{} cannot be reached\n  {remedy}", self.base))
    }
}

/// The response, or the endpoint's own error message.
async fn checked(response: reqwest::Response) -> anyhow::Result<reqwest::Response> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body: Value = response.json().await.unwrap_or_default();
    if status == reqwest::StatusCode::UNAUTHORIZED {
        bail!(
            "the endpoint lets in whoever has a key, and was given none that it knows\n  \
             give it one: --api-key KEY, or HEARTH_API_KEY"
        );
    }
    match body["error"]["message"].as_str() {
        Some(message) => bail!("{message}"),
        None => bail!("the endpoint answered {status}"),
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
