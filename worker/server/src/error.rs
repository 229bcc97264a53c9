//! Errors as the OpenAI API shows them: one object, the right status, and a message that says what to do.

use std::borrow::Cow;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hearth_transport::spans::Span;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

/// The `type` of an error object, by which client libraries choose their exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    /// The request is wrong; repeating it will not help.
    InvalidRequest,
    /// No key, or an unknown one.
    Authentication,
    /// More requests than this gateway takes at the moment.
    RateLimit,
    /// The gateway or its workers failed.
    Server,
}

impl ErrorType {
    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::RateLimit => "rate_limit_error",
            Self::Server => "server_error",
        }
    }
}

/// An answer that is an error: HTTP status and the object `{"error": {message, type, param, code}}`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// The object's `type`.
    pub kind: ErrorType,
    /// The problem, with the value, and the remedy.
    pub message: String,
    /// Parameter at fault, as a path: `messages[2].content`.
    pub param: Option<String>,
    /// Code that a program can match.
    pub code: Option<Cow<'static, str>>,
    /// Time to wait before trying again; becomes the `Retry-After` header, in whole seconds, at least 1.
    pub retry_after: Option<Duration>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    /// Notes it in the span of the request that it is the answer to; only a fault of ours is one of the span, too.
    pub(crate) fn note_in(&self, span: &Span) {
        let code = self.code.clone();
        let code = code.unwrap_or(Cow::Borrowed(self.kind.as_str()));
        if self.status.is_server_error() {
            span.fail(code, &self.message);
        } else {
            span.end_without_result(code);
        }
    }

    /// An error of any status.
    pub fn new(status: StatusCode, kind: ErrorType, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
        }
    }

    /// 400: the request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorType::InvalidRequest, message)
    }

    /// 400 with the parameter that is at fault.
    pub fn parameter(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            code: Some(Cow::Borrowed("invalid_value")),
            ..Self::invalid(message)
        }
    }

    /// 500: a fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            ErrorType::Server,
            message,
        )
    }

    /// 503 with the time to wait.
    pub fn unavailable(message: impl Into<String>, retry_after: Duration) -> Self {
        Self {
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, ErrorType::Server, message)
        }
    }

    /// 429 with the time to wait.
    pub fn too_many(message: impl Into<String>, retry_after: Duration) -> Self {
        Self {
            retry_after: Some(retry_after),
            code: Some(Cow::Borrowed("rate_limit_exceeded")),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorType::RateLimit, message)
        }
    }

    /// The same error with a code.
    #[must_use]
    pub fn with_code(mut self, code: impl Into<Cow<'static, str>>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The same error with a parameter.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// The object as JSON text: an HTTP body, or the data of an SSE event.
    pub fn to_json(&self) -> String {
        let envelope = Envelope {
            error: Body {
                message: &self.message,
                kind: self.kind.as_str(),
                param: self.param.as_deref(),
                code: self.code.as_deref(),
            },
        };
        serde_json::to_string(&envelope).unwrap_or_default()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(axum::body::Body::from(Bytes::from(self.to_json())));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        if let Some(wait) = self.retry_after {
            let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
