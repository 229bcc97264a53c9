//! HTTP requests to gateways.

use std::time::Duration;

use futures::StreamExt;
use hearth_controller_core::names::{GATEWAY_PORT, METRICS_PORT, host_port};

/// Scrape timeout: a gateway responds immediately or is busy with more important work.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Response size limit, larger than any gateway's response.
const MOST_BYTES: usize = 4 << 20;

/// Builds the HTTP client. Gateways are scraped too rarely for their connections to be kept, no proxy knows Pods'
/// addresses, and a Pod's response must not redirect the operator elsewhere.
pub(super) fn client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .tls_certs_only([])
        .timeout(TIMEOUT)
        .pool_max_idle_per_host(0)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .build()
}

/// Scrapes a gateway; one of an earlier version has its metrics on the API port.
pub(super) async fn metrics(client: &reqwest::Client, address: &str) -> Result<String, String> {
    match scrape(client, &host_port(address, METRICS_PORT)).await {
        Ok(text) => Ok(text),
        Err(error) => scrape(client, &host_port(address, GATEWAY_PORT))
            .await
            .map_err(|_| error),
    }
}

async fn scrape(client: &reqwest::Client, endpoint: &str) -> Result<String, String> {
    text(client.get(format!("http://{endpoint}/metrics"))).await
}

/// Asks a gateway for the number of choices without a token: it answers once there is one, or after `patience`.
pub(super) async fn unanswered(
    client: &reqwest::Client,
    address: &str,
    patience: Duration,
) -> Result<u64, String> {
    let endpoint = host_port(address, METRICS_PORT);
    let wait_s = patience.as_secs();
    let request = client.get(format!("http://{endpoint}/unanswered?wait_s={wait_s}"));
    let text = text(request.timeout(patience + TIMEOUT)).await?;
    text.parse().map_err(|_| format!("{text:.40} is no number"))
}

/// Body of a response.
async fn text(request: reqwest::RequestBuilder) -> Result<String, String> {
    let response = request.send().await.map_err(|error| error.to_string())?;
    if !response.status().is_success() {
        return Err(response.status().to_string());
    }
    let mut chunks = response.bytes_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.next().await {
        bytes.extend_from_slice(&chunk.map_err(|error| error.to_string())?);
        if bytes.len() > MOST_BYTES {
            return Err(format!("more than {MOST_BYTES} bytes"));
        }
    }
    String::from_utf8(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "hearth_requests_queued 0\n# EOF\n";

    #[tokio::test]
    async fn a_gateway_is_scraped_over_http() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("port");
        let port = listener.local_addr().expect("address").port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("client");
            let mut request = [0; 1024];
            let read = stream.read(&mut request).await.expect("request");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", TEXT.len());
            stream
                .write_all((head + TEXT).as_bytes())
                .await
                .expect("answer");
            String::from_utf8_lossy(&request[..read]).into_owned()
        });
        let client = client().expect("client");
        let text = scrape(&client, &format!("127.0.0.1:{port}")).await;
        assert_eq!(text.as_deref(), Ok(TEXT));
        assert!(
            scrape(&client, &format!("127.0.0.1:{port}")).await.is_err(),
            "nobody listens any more"
        );
        assert!(server.await.expect("server").starts_with("GET /metrics "));
    }

    #[tokio::test]
    async fn a_gateway_sends_the_operator_nowhere() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let bind = async || tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let (gateway, inside) = (bind().await.expect("port"), bind().await.expect("port"));
        let endpoint = gateway.local_addr().expect("address").to_string();
        let elsewhere = inside.local_addr().expect("address");
        let server = tokio::spawn(async move {
            let (mut stream, _) = gateway.accept().await.expect("client");
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await.expect("request");
            let answer = format!(
                "HTTP/1.1 302 Found\r\nlocation: http://{elsewhere}/latest/meta-data\r\ncontent-length: 0\r\n\r\n"
            );
            stream.write_all(answer.as_bytes()).await.expect("answer");
        });
        let answer = scrape(&client().expect("client"), &endpoint).await;
        assert_eq!(answer, Err("302 Found".to_owned()));
        server.await.expect("server");
        let follows = tokio::time::timeout(Duration::from_millis(200), inside.accept()).await;
        assert!(follows.is_err(), "the redirect was followed");
    }
}
