//! Request id and trace context, carried as metadata.

use std::{fmt, str::FromStr};

use tonic::{
    Request,
    metadata::{AsciiMetadataValue, MetadataMap},
};

const REQUEST_ID: &str = "x-request-id";
const TRACEPARENT: &str = "traceparent";

/// Largest request id that is accepted.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// W3C trace context, version 00 (<https://www.w3.org/TR/trace-context/>).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// Trace id, not zero.
    pub trace_id: u128,
    /// Id of the caller's span, not zero.
    pub parent_id: u64,
    /// Bit 0: sampled.
    pub flags: u8,
}

impl TraceParent {
    /// Returns the same trace with another span as parent.
    pub fn child(self, span_id: u64) -> Self {
        Self {
            parent_id: span_id,
            ..self
        }
    }
}

/// Text that is not a valid `traceparent`; the standard says to continue without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a traceparent is 00-<32 hex digits>-<16 hex digits>-<2 hex digits>")]
pub struct TraceParentError;

impl FromStr for TraceParent {
    type Err = TraceParentError;

    fn from_str(text: &str) -> Result<Self, TraceParentError> {
        let mut parts = text.split('-');
        let mut field = |digits: usize| {
            parts
                .next()
                .filter(|p| {
                    p.len() == digits && p.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
                })
                .ok_or(TraceParentError)
        };
        let version = field(2)?;
        let hex = |_| TraceParentError;
        let parsed = Self {
            trace_id: u128::from_str_radix(field(32)?, 16).map_err(hex)?,
            parent_id: u64::from_str_radix(field(16)?, 16).map_err(hex)?,
            flags: u8::from_str_radix(field(2)?, 16).map_err(hex)?,
        };
        // A later version may have more fields; ff is not a version.
        let more = parts.next().is_some();
        let known = version == "00" && !more || version != "00" && version != "ff";
        (known && parsed.trace_id != 0 && parsed.parent_id != 0)
            .then_some(parsed)
            .ok_or(TraceParentError)
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            trace_id,
            parent_id,
            flags,
        } = self;
        write!(f, "00-{trace_id:032x}-{parent_id:016x}-{flags:02x}")
    }
}

/// Context that a call carries besides its message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallContext {
    /// Id of the request at the gateway.
    pub request_id: Option<String>,
    /// Trace that the call belongs to.
    pub trace: Option<TraceParent>,
}

impl CallContext {
    /// Reads the context sent by a caller; malformed parts are omitted.
    pub fn of(metadata: &MetadataMap) -> Self {
        let text = |key| metadata.get(key).and_then(|v| v.to_str().ok());
        Self {
            request_id: text(REQUEST_ID)
                .filter(|id| id.len() <= MAX_REQUEST_ID_BYTES)
                .map(str::to_owned),
            trace: text(TRACEPARENT).and_then(|t| t.parse().ok()),
        }
    }

    /// Wraps a message in a request that carries this context.
    pub fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        let mut put = |key, value: Option<String>| {
            let value = value.and_then(|v| AsciiMetadataValue::try_from(v).ok());
            if let Some(value) = value {
                request.metadata_mut().insert(key, value);
            }
        };
        put(REQUEST_ID, self.request_id.clone());
        put(TRACEPARENT, self.trace.map(|t| t.to_string()));
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn the_context_survives_a_call() {
        let context = CallContext {
            request_id: Some("chatcmpl-1".to_owned()),
            trace: Some(EXAMPLE.parse().unwrap()),
        };
        assert_eq!(CallContext::of(context.request(()).metadata()), context);
        let empty = CallContext::default();
        assert_eq!(CallContext::of(empty.request(()).metadata()), empty);
        let odd = CallContext {
            request_id: Some("line\nbreak".to_owned()),
            trace: None,
        };
        assert_eq!(CallContext::of(odd.request(()).metadata()), empty);
    }

    #[test]
    fn traceparents_follow_the_standard() {
        let trace: TraceParent = EXAMPLE.parse().unwrap();
        assert_eq!(trace.to_string(), EXAMPLE);
        assert_eq!(trace.child(1).trace_id, trace.trace_id);
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(
                wrong.parse::<TraceParent>(),
                Err(TraceParentError),
                "{wrong}"
            );
        }
        let later = format!("01{}-more", &EXAMPLE[2..]);
        assert!(later.parse::<TraceParent>().is_ok());
    }
}
