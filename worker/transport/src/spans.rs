//! Spans: where the time of a request went, across processes. Where they go is the business of a program.

use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use opentelemetry::global::{BoxedTracer, ObjectSafeTracer};
pub use opentelemetry::trace::{SpanContext, SpanKind};
use opentelemetry::trace::{Status, TraceContextExt, Tracer as _};
use opentelemetry::{Context, TraceId};
pub use opentelemetry::{KeyValue, Value};

/// Starts spans; clones start them for the same receiver. The default records nothing: its spans only hand on the caller's trace, as
/// it came.
#[derive(Clone, Default)]
pub struct Tracer(Option<Arc<BoxedTracer>>);

impl Tracer {
    /// A tracer of a library that records spans.
    pub fn recording(tracer: impl ObjectSafeTracer + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(BoxedTracer::new(Box::new(tracer)))))
    }

    /// Starts a span for a call from another process, whose span is `caller`; `None`: it begins a trace.
    pub fn answer(&self, name: &'static str, caller: Option<&SpanContext>) -> Span {
        let parent = Context::new();
        let parent = match caller {
            Some(caller) => parent.with_remote_span_context(caller.clone()),
            None => parent,
        };
        self.start(name, SpanKind::Server, &parent)
    }

    fn start(&self, name: &'static str, kind: SpanKind, parent: &Context) -> Span {
        let context = match &self.0 {
            None => parent.clone(),
            Some(tracer) => {
                let builder = tracer.span_builder(name).with_kind(kind);
                parent.with_span(tracer.build_with_context(builder, parent))
            }
        };
        Span {
            is_recording: self.0.is_some() && context.span().is_recording(),
            tracer: self.clone(),
            context,
            has_failed: AtomicBool::new(false),
        }
    }
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "recording" } else { "off" })
    }
}

/// A part of a request, which ends when it is dropped.
#[derive(Debug)]
pub struct Span {
    tracer: Tracer,
    context: Context,
    is_recording: bool,
    has_failed: AtomicBool,
}

impl Span {
    /// Starts a span for a part of this one.
    pub fn part(&self, name: &'static str) -> Self {
        self.tracer.start(name, SpanKind::Internal, &self.context)
    }

    /// Starts a span for a call to another process.
    pub fn call(&self, name: &'static str) -> Self {
        self.tracer.start(name, SpanKind::Client, &self.context)
    }

    /// Whether anybody gets to see what is noted here: traces are on, and this one is sampled.
    pub fn is_recording(&self) -> bool {
        self.is_recording
    }

    /// What a called process continues: this span or, if traces are off, the caller's; `None` if there is none.
    pub fn context(&self) -> Option<SpanContext> {
        let context = self.context.span().span_context().clone();
        context.is_valid().then_some(context)
    }

    /// Id of its trace, for logs.
    pub fn trace_id(&self) -> Option<TraceId> {
        self.context().map(|context| context.trace_id())
    }

    /// Notes an attribute.
    pub fn set(&self, key: &'static str, value: impl Into<Value>) {
        if self.is_recording {
            self.context.span().set_attribute(KeyValue::new(key, value));
        }
    }

    /// Notes a moment.
    pub fn event<const N: usize>(
        &self,
        name: &'static str,
        attributes: impl FnOnce() -> [KeyValue; N],
    ) {
        if self.is_recording {
            self.context.span().add_event(name, attributes().to_vec());
        }
    }

    /// Notes that it failed, by the kind of error, of which there are few, and its message. What failed first counts.
    pub fn fail(&self, kind: impl Into<Value>, message: impl Display) {
        if self.end_without_result(kind) {
            let status = Status::error(message.to_string());
            self.context.span().set_status(status);
        }
    }

    /// Notes why it has no result, through no fault of this process: the caller's mistake, or nobody wants it any more. Returns false
    /// if that, or a failure, was noted before, or nobody gets to see it.
    pub fn end_without_result(&self, kind: impl Into<Value>) -> bool {
        let is_first = self.is_recording && !self.has_failed.swap(true, Ordering::Relaxed);
        if is_first {
            self.set("error.type", kind);
        }
        is_first
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // Otherwise the context is the caller's.
        if self.is_recording {
            self.context.span().end();
        }
    }
}
