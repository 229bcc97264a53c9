//! Common part of all routes that generate: from a request's body to its answer, streamed or whole.

use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use bytes::Bytes;
use hearth_transport::spans::Span;
use serde::Serialize;
use tokio::time::Instant;

use super::prepare_limiter::{PrepareLimiter, Prepared, Work};
use super::stream::{self, ChunkWriter};
use super::{Context, models};
use crate::app::{App, unix_seconds};
use crate::error::ApiError;
use crate::generation::{self, ChoiceStream, Submission};
use crate::wire::GenerationOptions;
use crate::wire::response::Usage;

/// One route that generates.
pub(super) trait Endpoint: 'static {
    /// Prefix of its ids.
    const ID: &'static str;
    /// Name of a request's span: method and route.
    const SPAN: &'static str;
    /// A parsed request.
    type Request: Send + 'static;
    /// Writer of its chunks.
    type Writer: ChunkWriter;
    /// A whole answer.
    type Answer: Serialize;

    /// Parses a body.
    fn parse(body: &[u8]) -> Result<Self::Request, ApiError>;

    /// Returns the requested model and the generation options.
    fn asks(request: &Self::Request) -> (&str, &GenerationOptions);

    /// Bytes of the schemas that constrain answers, as JSON text.
    fn schema_bytes(request: &Self::Request) -> usize;

    /// Renders templates, tokenises and checks schemas: the part that takes time on long prompts.
    fn prepare(
        app: &App,
        asked: Asked<'_, Self::Request>,
        head: Head,
    ) -> Result<(Submission, Self::Writer), ApiError>;

    /// Collects the whole answer of `choices` choices.
    fn collect(
        events: ChoiceStream,
        writer: Self::Writer,
        choices: u32,
    ) -> impl Future<Output = Result<Self::Answer, ApiError>> + Send;
}

/// Answers a request. Its span ends with the last choice, or with the error that is the answer.
pub(super) async fn create<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(context): Extension<Context>,
    Extension(limiter): Extension<PrepareLimiter>,
    request: Request,
) -> Result<Response, ApiError> {
    let span = Arc::new(app.tracer.answer(E::SPAN, context.trace.as_ref()));
    if span.is_recording() {
        let id = format!("{}-{}", E::ID, context.id);
        span.set("hearth.request.id", id);
    }
    let outcome = answer::<E>(app, (context.id, span.clone()), limiter, request).await;
    let status = match &outcome {
        Ok(response) => response.status(),
        Err(error) => error.status,
    };
    span.set("http.response.status_code", i64::from(status.as_u16()));
    if let Err(error) = &outcome {
        error.note_in(&span);
    }
    outcome
}

async fn answer<E: Endpoint>(
    app: Arc<App>,
    (id, span): (String, Arc<Span>),
    limiter: PrepareLimiter,
    request: Request,
) -> Result<Response, ApiError> {
    let preparing = span.part("prepare");
    let (parts, body) = request.into_parts();
    let body = limiter.read(&parts.headers, body, &app.limits).await?;
    let arrived = Instant::now();
    let prepared = {
        let app = app.clone();
        let work = move |body: Bytes, work: &Work| {
            let request = E::parse(&body)?;
            drop(body);
            let (model, options) = E::asks(&request);
            models::check(&app, model)?;
            let stream = options.stream;
            let head = Head {
                id: format!("{}-{id}", E::ID),
                created: unix_seconds(),
                model: app.model.name.clone(),
                fingerprint: String::new(),
                include_usage: options.include_usage,
            };
            work.go_on()?;
            if !work.takes(E::schema_bytes(&request)) {
                return Ok(None);
            }
            let asked = Asked {
                request: &request,
                span: span.clone(),
                arrived,
                work,
            };
            Ok(Some((E::prepare(&app, asked, head)?, stream)))
        };
        limiter.prepare(body, work).await
    };
    let Prepared {
        value: ((mut submission, writer), stream),
        body_room,
    } = prepared?;
    let (bytes, patience) = (submission.held_bytes(), app.routing.queue_timeout);
    submission.room = limiter.keep(bytes, patience).await?;
    drop((body_room, preparing));
    let choices = submission.prompts.len() as u32 * submission.n;
    let events = stream::begun(generation::run(app.clone(), submission)).await?;
    let (backlog, version) = (&app.backlog, parts.version);
    if stream {
        Ok(stream::respond(backlog, version, events, writer))
    } else {
        let answer = E::collect(events, writer, choices).await?;
        stream::whole(backlog, version, &answer)
    }
}

/// A request to be prepared.
pub(super) struct Asked<'a, R> {
    pub(super) request: &'a R,
    /// The request's span.
    pub(super) span: Arc<Span>,
    /// Time when the request had arrived in full.
    pub(super) arrived: Instant,
    pub(super) work: &'a Work,
}

/// Fields that all chunks of an answer carry.
pub(super) struct Head {
    /// `chatcmpl-…` or `cmpl-…`.
    pub(super) id: String,
    /// Unix time in seconds.
    pub(super) created: u64,
    /// The served model.
    pub(super) model: String,
    /// Empty until a worker has started.
    pub(super) fingerprint: String,
    /// Whether a stream ends with the usage.
    pub(super) include_usage: bool,
}

impl Head {
    /// Keeps the fingerprint of the first choice's worker for all choices.
    pub(super) fn note_fingerprint(&mut self, fingerprint: String) {
        if self.fingerprint.is_empty() {
            self.fingerprint = fingerprint;
        }
    }

    /// `usage` of a chunk: absent if not requested, null before the last chunk.
    pub(super) fn usage(&self, usage: Option<Usage>) -> Option<Option<Usage>> {
        self.include_usage.then_some(usage)
    }
}
