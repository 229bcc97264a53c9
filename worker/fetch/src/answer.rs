//! Interpretation of a server's answer: facts about the file, and whether a refusal or no answer ends the download.

use std::time::{Duration, SystemTime};

use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, HeaderName, LAST_MODIFIED, RETRY_AFTER};
use reqwest::{Response, StatusCode};

use crate::address_policy::{Guard, Refused};
use crate::connection::{MAX_REDIRECTS, cause_of, innermost, tls_reason};
use crate::part::{FileFacts, sha256_of};
use crate::retry::retry_after;
use crate::{FetchError, Source};

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
pub(crate) fn facts(source: &Source, response: &Response, guard: &Guard) -> FileFacts {
    let text = |name: HeaderName| {
        let value = response.headers().get(name)?.to_str().ok()?;
        Some(value.to_owned())
    };
    FileFacts {
        url_sha256: sha256_of(source.url().as_str()),
        etag: text(ETAG).filter(|etag| !etag.starts_with("W/")),
        last_modified: text(LAST_MODIFIED),
        total_bytes: response.content_length(),
        asked: guard.asked(),
        // The same name may resolve to another server by now.
        from_sha256: sha256_of(&format!("{} {:?}", response.url(), response.remote_addr())),
        is_inside: guard.keeps_back(),
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
pub(crate) fn refusal(source: &Source, status: StatusCode, headers: &HeaderMap) -> Failure {
    let url = source.shown();
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
    Failure::Final(match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => FetchError::NotFound { url, status: shown },
        StatusCode::UNAUTHORIZED
        | StatusCode::FORBIDDEN
        | StatusCode::PROXY_AUTHENTICATION_REQUIRED => FetchError::Denied { url, status: shown },
        _ => FetchError::Answer { url, answer: shown },
    })
}

/// Returns the failure for a request that got no answer.
pub(crate) fn unanswered(source: &Source, error: &reqwest::Error) -> Failure {
    let url = source.shown();
    if let Some(refused) = cause_of::<Refused>(error) {
        return Failure::Final(forbidden(source, *refused));
    }
    if error.is_redirect() {
        let limit = MAX_REDIRECTS;
        return Failure::Final(FetchError::Redirects { url, limit });
    }
    if let Some(reason) = tls_reason(error) {
        return Failure::Final(FetchError::Tls { url, reason });
    }
    let what = if error.is_connect() {
        "no connection"
    } else {
        "the connection was lost"
    };
    Failure::lost(format!("{what}: {}", innermost(error)))
}

/// Returns the error for a URL that Hearth is not allowed to fetch.
pub(crate) fn forbidden(source: &Source, refused: Refused) -> FetchError {
    FetchError::Forbidden {
        url: source.shown(),
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
