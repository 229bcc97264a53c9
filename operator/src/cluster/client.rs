//! Connection to the API server: timeouts, request counts, and backoff that it requests when it is busy.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use bytes::Bytes;
use hearth_crds::shown_url;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use kube::client::{Body, ClientBuilder, DynBody};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use serde_json::{Value, json};
use tower::{BoxError, Layer, Service};

use crate::cluster::failure::chain;
use crate::telemetry::Telemetry;

/// Longest time that the API server may take to begin a response.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest time that a connection may be silent within a response: longer than any watch stays quiet.
const SILENCE: Duration = Duration::from_secs(180);

/// What to do where no cluster is named.
const NO_KUBECONFIG: &str = "neither a kubeconfig (KUBECONFIG, else ~/.kube/config) nor a Pod's service account can be used\n  name one: --kubeconfig FILE, or KUBECONFIG";
/// The same for the operator, which takes no such argument.
const NO_CLUSTER: &str = "neither a kubeconfig (KUBECONFIG, else ~/.kube/config) nor a Pod's service account can be used\n  correct KUBECONFIG, or run this in the cluster";

/// What stands for no proxy in a kubeconfig that names none: kube would look in the environment for one, and what is there is for
/// the way out of the network, not for the API server.
const NO_PROXY: &str = "http://no-proxy.invalid";

/// Duration of one watch before it is renewed, in seconds: a connection that died silently is detected soon after.
pub(crate) const WATCH_SECONDS: u32 = 120;

/// Connects by the usual rules: with the user's kubeconfig, or with the Pod's service account.
///
/// # Errors
/// There is neither, or it is to be used through a proxy.
pub(crate) async fn connect(telemetry: Arc<Telemetry>) -> anyhow::Result<Client> {
    let mut config = usual().await.context(NO_CLUSTER)?;
    config.read_timeout = Some(SILENCE);
    client(config, telemetry)
}

/// Connects as a person says, for commands, and returns the address of the API server too: with the kubeconfig at `file`, or
/// the user's own; with its context `context`, or the current one. A person may look at a quiet log for as long as they
/// like.
///
/// # Errors
/// The file cannot be read, has no such context (the message names those that there are), or asks for a proxy.
pub(crate) async fn connect_to(
    file: Option<&Path>,
    context: Option<&str>,
    telemetry: Arc<Telemetry>,
) -> anyhow::Result<(Client, String)> {
    let mut config = match (file, context) {
        (None, None) => usual().await.context(NO_KUBECONFIG)?,
        (file, context) => {
            let known = kubeconfig(file)?;
            if let Some(context) = context {
                check_context(&known, context)?;
            }
            let options = KubeConfigOptions {
                context: context.map(str::to_owned),
                ..KubeConfigOptions::default()
            };
            as_configured(known, &options).await.map_err(|error| {
                anyhow!(
                    "the kubeconfig cannot be used: {}\n  correct it, or name another: --kubeconfig FILE",
                    chain(&error)
                )
            })?
        }
    };
    config.read_timeout = None;
    let address = config.cluster_url.to_string();
    let address = address.trim_end_matches('/').to_owned();
    Ok((client(config, telemetry)?, address))
}

/// The user's own kubeconfig, else the Pod's service account.
async fn usual() -> anyhow::Result<Config> {
    let found = match Kubeconfig::read() {
        Ok(known) => as_configured(known, &KubeConfigOptions::default()).await,
        Err(error) => Err(error),
    };
    let mut config = match found {
        Ok(config) => config,
        Err(error) => Config::incluster().map_err(|in_cluster| {
            // It names the file.
            anyhow!("{error}; Pod: {}", root(&in_cluster))
        })?,
    };
    config.apply_debug_overrides();
    Ok(config)
}

/// What a kubeconfig says of one of its contexts; of proxies it has the last word, and not the environment.
async fn as_configured(
    mut known: Kubeconfig,
    options: &KubeConfigOptions,
) -> Result<Config, KubeconfigError> {
    let clusters = known.clusters.iter_mut();
    for cluster in clusters.filter_map(|named| named.cluster.as_mut()) {
        let own = cluster.proxy_url.take().filter(|url| !url.is_empty());
        cluster.proxy_url = own.or_else(|| Some(NO_PROXY.to_owned()));
    }
    let mut config = Config::from_custom_kubeconfig(known, options).await?;
    if config.proxy_url == NO_PROXY.parse().ok() {
        config.proxy_url = None;
    }
    // A program that signs in is told of the cluster, too.
    let program = config.auth_info.exec.as_mut();
    if let Some(told) = program.and_then(|program| program.cluster.as_mut()) {
        told.proxy_url = told.proxy_url.take().filter(|url| url != NO_PROXY);
    }
    Ok(config)
}

fn kubeconfig(file: Option<&Path>) -> anyhow::Result<Kubeconfig> {
    match file {
        Some(file) => Kubeconfig::read_from(file).map_err(|error| {
            anyhow!(
                "{} cannot be read as a kubeconfig: {}\n  name another: --kubeconfig FILE",
                file.display(),
                root(&error)
            )
        }),
        None => Kubeconfig::read().map_err(|error| {
            anyhow!(
                "the kubeconfig cannot be read: {}\n  correct KUBECONFIG, or name another: --kubeconfig FILE",
                root(&error)
            )
        }),
    }
}

/// What is at the bottom of an error.
fn root(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.last().map(ToString::to_string).unwrap_or_default()
}

fn check_context(known: &Kubeconfig, context: &str) -> anyhow::Result<()> {
    let mut names = known.contexts.iter().map(|context| context.name.as_str());
    if names.any(|name| name == context) {
        return Ok(());
    }
    let names: Vec<&str> = known.contexts.iter().map(|it| it.name.as_str()).collect();
    match &*names {
        [] => bail!(
            "the kubeconfig has no context {context}, nor any other\n  name another file: --kubeconfig FILE"
        ),
        names => bail!(
            "the kubeconfig has no context {context}\n  there are: {}",
            names.join(", ")
        ),
    }
}

fn client(mut config: Config, telemetry: Arc<Telemetry>) -> anyhow::Result<Client> {
    if let Some(proxy) = &config.proxy_url {
        bail!(
            "the kubeconfig's proxy-url is {}, and Hearth reaches the API server through no proxy\n  \
             remove it if the server can be reached directly; else run kubectl proxy, and use a kubeconfig with its address, http://127.0.0.1:8001, as the server",
            shown_url(&proxy.to_string())
        );
    }
    config.connect_timeout = Some(Duration::from_secs(10));
    config.write_timeout = Some(ANSWER);
    config.reset_reader_on_write = true;
    // Retries are up to the caller, who knows the purpose of each request.
    config.default_retry = false;
    let builder = ClientBuilder::try_from(config)?;
    Ok(builder.with_layer(&Counted { telemetry }).build())
}

/// Layer that counts requests and limits their response time.
#[derive(Clone, Debug)]
struct Counted {
    telemetry: Arc<Telemetry>,
}

/// Service created by [`Counted`].
#[derive(Clone, Debug)]
struct CountedService<S> {
    inner: S,
    telemetry: Arc<Telemetry>,
}

impl<S> Layer<S> for Counted {
    type Service = CountedService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        CountedService {
            inner,
            telemetry: Arc::clone(&self.telemetry),
        }
    }
}

type Answer = Result<Response<Box<DynBody>>, BoxError>;

impl<S> Service<Request<Body>> for CountedService<S>
where
    S: Service<Request<Body>, Response = Response<Box<DynBody>>, Error = BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<Box<DynBody>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Answer> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let is_watch = request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        let verb = verb(request.method());
        let resource = resource(request.uri().path());
        let telemetry = Arc::clone(&self.telemetry);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = match tokio::time::timeout(ANSWER, answer).await {
                Ok(answer) => answer,
                Err(_) => Err(BoxError::from(format!(
                    "the API server did not answer in {} s",
                    ANSWER.as_secs()
                ))),
            };
            let code = match &answer {
                Ok(response) => response.status().as_u16(),
                Err(_) => 0,
            };
            if !is_watch {
                telemetry.requested(verb, resource, code);
            }
            with_readable_refusal(answer?).await
        })
    }
}

/// Moves the wait of a 429 into a Status: load shedding answers in plain text with a header, which would be lost.
async fn with_readable_refusal(
    response: Response<Box<DynBody>>,
) -> Result<Response<Box<DynBody>>, BoxError> {
    if response.status() != StatusCode::TOO_MANY_REQUESTS {
        return Ok(response);
    }
    let (mut parts, body) = response.into_parts();
    let header = parts.headers.get(header::RETRY_AFTER);
    let wait = header
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.parse::<u32>().ok())
        .unwrap_or(1);
    let said = body.collect().await?.to_bytes();
    let mut status = match serde_json::from_slice::<Value>(&said) {
        Ok(status @ Value::Object(_)) => status,
        _ => json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "TooManyRequests",
            "message": String::from_utf8_lossy(&said).trim(),
        }),
    };
    status["code"] = json!(429);
    if !status["details"].is_object() {
        status["details"] = json!({});
    }
    status["details"]["retryAfterSeconds"] = json!(wait.max(1));
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.remove(header::TRANSFER_ENCODING);
    let body = Full::new(Bytes::from(status.to_string())).map_err(BoxError::from);
    Ok(Response::from_parts(parts, Box::new(body)))
}

fn verb(method: &Method) -> &'static str {
    match method.as_str() {
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "get",
    }
}

/// Resource that a path addresses, such as `pods` or `inferencedeployments/status`; names are left out.
fn resource(path: &str) -> String {
    let mut parts = path.trim_matches('/').split('/');
    let skip = match parts.next() {
        Some("api") => 1,
        Some("apis") => 2,
        _ => return "other".to_owned(),
    };
    let mut parts = parts.skip(skip).peekable();
    let mut first = parts.next().unwrap_or("other");
    if first == "namespaces" {
        let _namespace = parts.next();
        first = parts.next().unwrap_or("namespaces");
    }
    let _name = parts.next();
    match parts.next() {
        Some(subresource) => format!("{first}/{subresource}"),
        None => first.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_wait_of_a_busy_server_survives() {
        for (said, message) in [
            ("try again later\n", "try again later"),
            (r#"{"kind":"Status","message":"storage"}"#, "storage"),
        ] {
            let body = Full::new(Bytes::from(said)).map_err(BoxError::from);
            let response = Response::builder()
                .status(429)
                .header("retry-after", "7")
                .body(Box::new(body) as Box<DynBody>);
            let answer = with_readable_refusal(response.unwrap()).await.unwrap();
            let text = answer.into_body().collect().await.unwrap().to_bytes();
            let status: kube::core::Status = serde_json::from_slice(&text).unwrap();
            assert_eq!((status.code, &*status.message), (429, message));
            assert_eq!(status.details.unwrap().retry_after_seconds, 7);
        }
    }

    #[test]
    fn requests_are_counted_by_what_they_are_of() {
        for (path, expected) in [
            ("/api/v1/namespaces/default/pods/demo", "pods"),
            ("/api/v1/nodes", "nodes"),
            (
                "/apis/hearth.dev/v1alpha1/namespaces/x/inferencedeployments/demo/status",
                "inferencedeployments/status",
            ),
            (
                "/apis/policy/v1/namespaces/x/poddisruptionbudgets/a",
                "poddisruptionbudgets",
            ),
            ("/version", "other"),
        ] {
            assert_eq!(resource(path), expected, "{path}");
        }
    }
}
