//! Web pages that may use the endpoint from a browser (CORS). Other clients are not affected.

use std::str::FromStr;
use std::time::Duration;

use hearth_transport::origin;
use http::{HeaderName, HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Time that a browser may cache the answer.
const MAX_AGE: Duration = Duration::from_secs(600);

/// An origin whose pages may use the endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CorsOrigin {
    /// `*`: every origin.
    Any,
    /// Scheme, host and port, as browsers send it.
    One(HeaderValue),
}

impl FromStr for CorsOrigin {
    type Err = String;

    /// Parses `*`, or an origin such as `http://localhost:3000`; `null` is the origin of local files.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(Self::Any);
        }
        origin::check(text)?;
        HeaderValue::from_str(text)
            .map(Self::One)
            .map_err(|error| error.to_string())
    }
}

/// Layer that tells browsers that pages of `origins` may send requests and read answers; `None` if there are none.
pub(crate) fn layer(origins: &[CorsOrigin]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let named = origins.iter().map(|origin| match origin {
        CorsOrigin::Any => None,
        CorsOrigin::One(origin) => Some(origin.clone()),
    });
    let origins = match named.collect::<Option<Vec<HeaderValue>>>() {
        Some(named) => AllowOrigin::list(named),
        None => AllowOrigin::any(),
    };
    let layer = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST])
        // Client libraries send headers of their own.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([
            HeaderName::from_static("x-request-id"),
            http::header::RETRY_AFTER,
        ])
        .max_age(MAX_AGE);
    Some(layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        for text in [
            "http://localhost:3000",
            "https://chat.example.com",
            "http://[::1]:8080",
            "tauri://localhost",
            "null",
        ] {
            let origin = HeaderValue::from_str(text).unwrap();
            assert_eq!(text.parse(), Ok(CorsOrigin::One(origin)));
        }
        assert_eq!("*".parse(), Ok(CorsOrigin::Any));
        for text in [
            "localhost:3000",
            "http://localhost/",
            "http://localhost:3000/path",
            "HTTP://localhost",
            "https://*.example.com",
            "",
            "http://",
            "http://a b",
        ] {
            let error = text.parse::<CorsOrigin>().unwrap_err();
            assert!(error.contains("without any path"), "{text}: {error}");
        }
    }
}
