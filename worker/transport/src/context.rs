//! Request id and trace context, carried as metadata.

use opentelemetry::trace::SpanContext;
use tonic::{
    Request,
    metadata::{AsciiMetadataValue, MetadataMap},
};

use crate::trace_context::{self, TRACEPARENT, TRACESTATE};

const REQUEST_ID: &str = "x-request-id";

/// Largest request id that is accepted.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Context that a call carries besides its message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallContext {
    /// Id of the request at the gateway.
    pub request_id: Option<String>,
    /// The caller's span, of the trace that the call belongs to.
    pub trace: Option<SpanContext>,
}

impl CallContext {
    /// Reads the context sent by a caller; malformed parts are omitted.
    pub fn of(metadata: &MetadataMap) -> Self {
        let text = |key| metadata.get(key).and_then(|v| v.to_str().ok());
        let states = metadata.get_all(TRACESTATE).iter();
        Self {
            request_id: text(REQUEST_ID)
                .filter(|id| id.len() <= MAX_REQUEST_ID_BYTES)
                .map(str::to_owned),
            trace: trace_context::read(
                text(TRACEPARENT),
                states.filter_map(|state| state.to_str().ok()),
            ),
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
        let trace = self.trace.as_ref();
        put(TRACEPARENT, trace.map(trace_context::traceparent));
        let state = trace.map(|trace| trace.trace_state().header());
        put(TRACESTATE, state.filter(|state| !state.is_empty()));
        request
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_context_survives_a_call() {
        let context = CallContext {
            request_id: Some("chatcmpl-1".to_owned()),
            trace: trace_context::read(
                Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
                ["a=1,b=2"].into_iter(),
            ),
        };
        assert!(context.trace.is_some());
        assert_eq!(CallContext::of(context.request(()).metadata()), context);
        let empty = CallContext::default();
        assert_eq!(CallContext::of(empty.request(()).metadata()), empty);
        let odd = CallContext {
            request_id: Some("line\nbreak".to_owned()),
            trace: None,
        };
        assert_eq!(CallContext::of(odd.request(()).metadata()), empty);
    }
}
