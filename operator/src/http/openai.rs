//! OpenAI API client with only what a conversation needs.

use std::path::PathBuf;

use anyhow::{Context, bail};
use futures::StreamExt;
use reqwest::StatusCode;
use serde_json::{Value, json};

/// Characters of an unexpected answer that are shown.
const SHOWN_CHARS: usize = 200;

/// A client of one OpenAI endpoint.
pub(crate) struct Client {
    http: reqwest::Client,
    /// Base of the API, such as `http://host:8080/v1`.
    pub(crate) base: String,
    /// Name of the model to request.
    pub(crate) model: String,
    key: Option<String>,
    /// The program that tells of the endpoint's state and logs.
    pub(crate) program: &'static str,
}

impl Client {
    /// Creates a client of `base` (`http://host:port/v1`). `trusted` is a PEM file with the certificate of an HTTPS
    /// endpoint, or of its authority.
    ///
    /// # Errors
    /// The file has no certificate.
    pub(crate) fn new(
        base: &str,
        model: &str,
        key: Option<&str>,
        trusted: Option<&PathBuf>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            http: super::client(base, trusted.map(PathBuf::as_path), None)?,
            base: base.to_owned(),
            model: model.to_owned(),
            key: key.map(str::to_owned),
            program: "hearth",
        })
    }

    /// Streams the answer to `messages` into `sink`, chunk by chunk.
    ///
    /// # Errors
    /// The endpoint's error, or that it is unreachable; the sink's own errors.
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
                    serde_json::from_str(data).context("the endpoint sent invalid JSON")?;
                if let Some(message) = event["error"]["message"].as_str() {
                    bail!("{message}");
                }
                if let Some(text) = event["choices"][0]["delta"]["content"].as_str() {
                    sink(text)?;
                }
            }
        }
        bail!(
            "the answer was cut off: {} closed the stream\n  {} logs shows why",
            self.base,
            self.program
        )
    }

    /// Returns the name of the first model that the endpoint serves.
    ///
    /// # Errors
    /// The endpoint's error, or that it is unreachable.
    pub(crate) async fn first_model(&self) -> anyhow::Result<String> {
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
            .context("the endpoint sent invalid JSON")?;
        let id = list["data"][0]["id"].as_str();
        id.map(str::to_owned)
            .with_context(|| format!("{} serves no model", self.base))
    }

    /// Members of workers' groups that answers wait for, as the gateway tells; none if it does not say.
    pub(crate) async fn waits_for(&self) -> Vec<String> {
        let url = format!("{}/ready", self.base.trim_end_matches("/v1"));
        let Ok(response) = self.http.get(url).send().await else {
            return Vec::new();
        };
        let body: Value = response.json().await.unwrap_or_default();
        let members = super::waits_for(&body).map(|(_, member)| member);
        members.map(str::to_owned).collect()
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
            "name the server's certificate, or its authority's: --ca FILE".to_owned()
        } else {
            format!("is it up? {} status tells", self.program)
        };
        error.context(format!("{} cannot be reached\n  {remedy}", self.base))
    }
}

/// An answer of the endpoint that is no success.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    status: StatusCode,
    /// The endpoint's own words, and what to do where these do not say.
    message: String,
}

impl Refusal {
    /// Whether the same request may succeed later with nothing done about it: the endpoint starts, or is busy.
    pub(crate) fn may_mend(&self) -> bool {
        let is_for_now = matches!(
            self.status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
        );
        is_for_now || self.status.is_server_error()
    }
}

/// Returns the response, or why the endpoint refuses.
async fn checked(response: reqwest::Response) -> anyhow::Result<reqwest::Response> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    let body: Value = serde_json::from_str(&text).unwrap_or_default();
    let message = match (status, body["error"]["message"].as_str()) {
        (StatusCode::UNAUTHORIZED, _) => {
            "the endpoint lets in whoever has a key, and was given none that it knows\n  \
             give it one: --api-key KEY, or HEARTH_API_KEY"
                .to_owned()
        }
        (_, Some(message)) => message.to_owned(),
        (_, None) => in_words(status, &text),
    };
    bail!(Refusal { status, message })
}

/// Says what an answer without an error of the API is.
fn in_words(status: StatusCode, text: &str) -> String {
    let mut words = format!("the endpoint answered {status}");
    let line = text.trim().lines().next().unwrap_or_default();
    if !line.is_empty() {
        let shown: String = line.chars().take(SHOWN_CHARS).collect();
        words += &format!(": {shown}");
    }
    words += match status {
        StatusCode::FORBIDDEN => {
            "\n  what stands in front of it, such as an ingress, has to let you in"
        }
        StatusCode::NOT_FOUND => {
            "\n  name the address of an OpenAI endpoint, such as http://host:8080/v1"
        }
        _ => "",
    };
    words
}
