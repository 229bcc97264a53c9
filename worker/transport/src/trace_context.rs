//! W3C trace context, version 00 (<https://www.w3.org/TR/trace-context/>), in the headers of a call.

use opentelemetry::trace::{SpanContext, TraceState};
use opentelemetry::{SpanId, TraceFlags, TraceId};

/// Header with the trace and the caller's span.
pub const TRACEPARENT: &str = "traceparent";
/// Header with what other tracing systems pass on.
pub const TRACESTATE: &str = "tracestate";

/// Largest `tracestate` that is passed on: what the standard asks for at least.
const MAX_STATE_BYTES: usize = 512;

/// Reads the caller's span from its headers: `traceparent`, and `tracestate` as often as it is there. `None`: there is no trace,
/// or a malformed one, without which the standard says to continue. A `tracestate` that is malformed or too long is left out.
pub fn read<'a>(
    traceparent: Option<&str>,
    tracestate: impl Iterator<Item = &'a str>,
) -> Option<SpanContext> {
    let text = traceparent?;
    let mut parts = text.split('-');
    let mut field = |digits: usize| {
        let is_hex = |b| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        parts
            .next()
            .filter(|part| part.len() == digits && part.bytes().all(is_hex))
    };
    let version = field(2)?;
    let trace_id = TraceId::from_hex(field(32)?).ok()?;
    let span_id = SpanId::from_hex(field(16)?).ok()?;
    let flags = u8::from_str_radix(field(2)?, 16).ok()?;
    // A later version may have more fields; ff is not a version.
    let more = parts.next().is_some();
    let is_known = version == "00" && !more || version != "00" && version != "ff";
    let state = state(tracestate).unwrap_or_default();
    let span = SpanContext::new(trace_id, span_id, TraceFlags::new(flags), true, state);
    (is_known && span.is_valid()).then_some(span)
}

fn state<'a>(values: impl Iterator<Item = &'a str>) -> Option<TraceState> {
    let values: Vec<&str> = values.collect();
    if values.iter().map(|value| value.len()).sum::<usize>() > MAX_STATE_BYTES {
        return None;
    }
    let members = values.iter().flat_map(|value| value.split(','));
    let members = members.map(str::trim).filter(|member| !member.is_empty());
    let pairs: Option<Vec<_>> = members.map(|member| member.split_once('=')).collect();
    TraceState::from_key_value(pairs?).ok()
}

/// Writes a span as `traceparent`.
pub fn traceparent(span: &SpanContext) -> String {
    format!(
        "00-{}-{}-{:02x}",
        span.trace_id(),
        span.span_id(),
        span.trace_flags()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(text: &str) -> Option<SpanContext> {
        read(Some(text), std::iter::empty())
    }

    #[test]
    fn traceparents_follow_the_standard() {
        let span = parse(EXAMPLE).unwrap();
        assert!(span.is_remote() && span.is_sampled());
        assert_eq!(traceparent(&span), EXAMPLE);
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
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        let later = format!("01{}-more", &EXAMPLE[2..]);
        assert!(parse(&later).is_some());
        assert_eq!(read(None, ["a=b"].into_iter()), None);
    }

    #[test]
    fn a_state_is_joined_or_left_out() {
        let state = |values: &[&'static str]| {
            let span = read(Some(EXAMPLE), values.iter().copied()).unwrap();
            span.trace_state().header()
        };
        assert_eq!(state(&["a=1 , b=2", "c=3"]), "a=1,b=2,c=3");
        assert_eq!(state(&[]), "");
        assert_eq!(state(&["a=1,nonsense"]), "");
        let long: &'static str = Box::leak("a=1,".repeat(200).into_boxed_str());
        assert_eq!(state(&[long]), "");
    }
}
