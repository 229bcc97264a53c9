//! Interpretation of a server's answer: facts about the file, and whether a refusal or no answer ends the download.

use std::time::{Duration, SystemTime};

use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, HeaderName, LAST_MODIFIED, RETRY_AFTER};
use reqwest::{Response, StatusCode};

use crate::FetchError;
use crate::address_policy::{Guard, Refused};
use crate::connection::{cause_of, innermost, tls_reason};
use crate::digest::sha256_of;
use crate::part::FileFacts;
use crate::place::{HubPlace, Place};
use crate::retry::retry_after;

/// A try that did not complete the download.
pub(crate) enum Failure {
    /// No further try can help.
    Final(FetchError),
    /// Worth another try.
    Lost {
        reason: String,
        /// Wait that the server asks for.
        asked: Option<Duration>,
    },
}

impl Failure {
    pub(crate) fn lost(reason: String) -> Self {
        Self::Lost {
            reason,
            asked: None,
        }
    }
}

/// Collects what the answer says about the whole file.
pub(crate) fn facts(place: &Place, response: &Response, guard: &Guard) -> FileFacts {
    let text = |name: HeaderName| {
        let value = response.headers().get(name)?.to_str().ok()?;
        Some(value.to_owned())
    };
    FileFacts {
        url_sha256: sha256_of(place.url.as_str()),
        etag: text(ETAG).filter(|etag| !etag.starts_with("W/")),
        last_modified: text(LAST_MODIFIED),
        total_bytes: response.content_length(),
        asked: guard.asked(),
        // The same name may resolve to another server by now.
        from_sha256: sha256_of(&format!("{} {:?}", response.url(), response.remote_addr())),
        is_inside: guard.keeps_back(),
        ..FileFacts::default()
    }
}

/// First byte and length of the file in `Content-Range: bytes 5-9/10`, or `bytes */10`.
pub(crate) fn content_range(headers: &HeaderMap) -> Option<(Option<u64>, Option<u64>)> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let first = range
        .split_once('-')
        .and_then(|(first, _)| first.parse().ok());
    Some((first, total.parse().ok()))
}

/// Returns the failure for an answer that is not a file.
pub(crate) fn refusal(place: &Place, status: StatusCode, headers: &HeaderMap) -> Failure {
    let url = place.shown.clone();
    let shown = status.to_string();
    let is_passing = status.is_server_error()
        || matches!(
            status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS
        );
    if is_passing {
        let header = headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok());
        return Failure::Lost {
            reason: format!("the server answers {shown}"),
            asked: header.and_then(|text| retry_after(text, SystemTime::now())),
        };
    }
    if let Some(hub) = &place.hub {
        return Failure::Final(hub_refusal(hub, url, status, headers));
    }
    Failure::Final(match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => FetchError::NotFound { url, status: shown },
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED => FetchError::Denied { url, status: shown },
        _ => FetchError::Answer { url, answer: shown },
    })
}

/// Returns the error for a refusal of a hub. It answers 401 for what does not exist, too, to whoever gives no token.
fn hub_refusal(hub: &HubPlace, url: String, status: StatusCode, headers: &HeaderMap) -> FetchError {
    const REASON: HeaderName = HeaderName::from_static("x-error-code");
    let reason = headers.get(REASON).and_then(|value| value.to_str().ok());
    let answer = match reason.filter(|reason| reason.bytes().all(|b| b.is_ascii_alphanumeric())) {
        Some(reason) => format!("{status} ({reason})"),
        None => status.to_string(),
    };
    let HubPlace {
        repo,
        revision,
        file,
    } = hub.clone();
    let what = match file {
        Some(file) => format!("{file} of {repo} at {revision}"),
        None => format!("{repo} at {revision}"),
    };
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => FetchError::HubNotFound { what, answer },
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED => FetchError::HubDenied { what, answer },
        _ => FetchError::Answer { url, answer },
    }
}

/// Returns the failure for a request that got no answer, directly or through a proxy.
pub(crate) fn unanswered(place: &Place, proxy: Option<&str>, error: &reqwest::Error) -> Failure {
    let url = place.shown.clone();
    if error.is_builder() && place.credentials.is_some() {
        return Failure::Final(FetchError::Token { url });
    }
    if let Some(refused) = cause_of::<Refused>(error) {
        return Failure::Final(forbidden(place, *refused));
    }
    if let Some(reason) = tls_reason(error) {
        return Failure::Final(FetchError::Tls { url, reason });
    }
    let what = if error.is_connect() {
        "no connection"
    } else {
        "the connection was lost"
    };
    let way = proxy.map_or_else(String::new, |proxy| format!(" through the proxy {proxy}"));
    Failure::lost(format!("{what}{way}: {}", innermost(error)))
}

/// Returns the error for a URL that Hearth is not allowed to fetch.
pub(crate) fn forbidden(place: &Place, refused: Refused) -> FetchError {
    FetchError::Forbidden {
        url: place.shown.clone(),
        why: refused.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_answers() {
        let range = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_RANGE, text.parse().unwrap());
            content_range(&headers)
        };
        assert_eq!(range("bytes 5-9/10"), Some((Some(5), Some(10))));
        assert_eq!(range("bytes 5-9/*"), Some((Some(5), None)));
        assert_eq!(range("bytes */10"), Some((None, Some(10))));
        assert_eq!(range("items 5-9/10"), None);
        assert_eq!(content_range(&HeaderMap::new()), None);
    }
}
