//! Reading a request's body within its limits.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout_at};

use super::room::{LAST_WITHIN, Room};
use crate::config::Limits;
use crate::error::{ApiError, ErrorType};

/// Time for a client to read the refusal of a body that it is still sending.
const LINGER: Duration = Duration::from_secs(1);
/// Retry delay given to clients with a large body when too many of them are being read.
const RETRY_ROOM: Duration = Duration::from_secs(2);

/// Reads the bytes of a JSON body. A body longer than `large` bytes waits, unread, for room as it arrives.
///
/// # Errors
/// 415 for another type, 413 for a body that is too long (found by its Content-Length before a byte is read, else at
/// the limit), 408 for one that does not arrive, 503 for one that found no room in time, 400 for one that breaks off.
pub(super) async fn read(
    headers: &HeaderMap,
    mut body: Body,
    limits: &Limits,
    large: usize,
    room: &mut Room,
) -> Result<Bytes, ApiError> {
    check_coding(headers)?;
    check_type(headers)?;
    let limit = limits.body_bytes;
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if let Some(length) = announced.filter(|length| *length > limit as u64) {
        linger(body);
        return Err(too_large(&format!("{length} bytes"), limit));
    }
    let longest = announced.map_or(limit, |length| length as usize);
    let mut deadline = Instant::now() + limits.body_timeout;
    let mut is_last = false;
    let mut bytes = BytesMut::new();
    loop {
        if bytes.len() > large && !is_last {
            let grown = timeout_at(deadline, room.grow(bytes.len())).await;
            is_last = grown.map_err(|_| no_room("read"))?;
            if is_last {
                deadline = deadline.min(Instant::now() + LAST_WITHIN);
            }
            // Reserved at once, so that growing copies nothing; only what arrives takes physical memory.
            bytes.reserve(longest.saturating_sub(bytes.len()));
        }
        let stalled = Instant::now() + limits.body_stall;
        let frame = timeout_at(deadline.min(stalled), body.frame()).await;
        let data = match frame.map_err(|_| too_slow(limits, Instant::now() < deadline))? {
            None => return Ok(bytes.freeze()),
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            Some(Err(error)) => return Err(broken_off(&error)),
        };
        if bytes.len() + data.len() > limit {
            return Err(too_large("longer", limit));
        }
        bytes.extend_from_slice(&data);
    }
}

fn broken_off(error: &axum::Error) -> ApiError {
    ApiError::invalid(format!("the request body was cut off: {error}")).with_code("body_incomplete")
}

fn too_slow(limits: &Limits, has_stalled: bool) -> ApiError {
    let words = match has_stalled {
        true => format!(
            "no part of the request body arrived for {} s",
            limits.body_stall.as_secs_f32()
        ),
        false => format!(
            "the request body did not arrive within {} s, or {} s while many large ones arrive at once",
            limits.body_timeout.as_secs_f32(),
            LAST_WITHIN.as_secs()
        ),
    };
    ApiError::new(
        StatusCode::REQUEST_TIMEOUT,
        ErrorType::InvalidRequest,
        words,
    )
    .with_code("body_timeout")
}

/// Refusal of a large request while others are being `done` and leave it no memory.
pub(super) fn no_room(done: &str) -> ApiError {
    ApiError::unavailable(
        format!("other large requests are being {done}, and the time to wait for them ran out. Try again in a moment"),
        RETRY_ROOM,
    )
    .with_code("large_requests")
}

/// Keeps the connection open for a moment, unread: closing it at once would reset it, and a client that is still
/// sending might lose the answer.
fn linger(body: Body) {
    tokio::spawn(async move {
        tokio::time::sleep(LINGER).await;
        drop(body);
    });
}

fn too_large(size: &str, limit: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        ErrorType::InvalidRequest,
        format!("the request body is {size}: at most {limit} bytes are accepted"),
    )
    .with_code("body_too_large")
}

/// Refuses transfer codings other than chunked. (If the request also has a Content-Length, hyper ends the connection
/// after the answer, as RFC 9112, 6.3 requires.)
fn check_coding(headers: &HeaderMap) -> Result<(), ApiError> {
    let mut codings = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else {
        return Ok(());
    };
    if codings.next().is_none() && coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ErrorType::InvalidRequest,
        format!(
            "the request body has Transfer-Encoding {}: send it chunked and uncompressed",
            String::from_utf8_lossy(coding.as_bytes())
        ),
    )
    .with_code("unsupported_media_type"))
}

/// Checks the body's type: a missing one counts as JSON, another is refused, such as the one that curl's `-d` sends.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let refused = |message: String| {
        Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            ErrorType::InvalidRequest,
            message,
        )
        .with_code("unsupported_media_type"))
    };
    if let Some(encoding) = headers.get(header::CONTENT_ENCODING)
        && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return refused(format!(
            "the request body has Content-Encoding {}: send it uncompressed",
            String::from_utf8_lossy(encoding.as_bytes())
        ));
    }
    let Some(value) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let text = String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase();
    let mut parts = text.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default();
    let is_json = essence == "application/json"
        || (essence.starts_with("application/") && essence.ends_with("+json"));
    let is_utf8 = parts.all(|part| match part.strip_prefix("charset=") {
        Some(charset) => matches!(charset.trim_matches('"'), "utf-8" | "utf8" | "us-ascii"),
        None => true,
    });
    if is_json && is_utf8 {
        return Ok(());
    }
    refused(format!(
        "the request body has Content-Type {}: send application/json in UTF-8",
        crate::wire::clip(&text, 80)
    ))
}
