//! What all routes that generate have in common: from a request's body to its answer, streamed or whole.

use std::future::Future;
use std::num::NonZero;
use std::sync::Arc;

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use hearth_transport::TraceParent;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::stream::{self, ChunkWriter};
use super::{Context, body, models};
use crate::app::{App, unix_seconds};
use crate::error::ApiError;
use crate::generation::{self, ChoiceStream, Submission};
use crate::wire::GenerationOptions;
use crate::wire::response::Usage;

/// Fewest and most requests that are prepared at a time.
const PLACES: (usize, usize) = (2, 8);

/// One route that generates.
pub(super) trait Endpoint: 'static {
    /// What its ids begin with.
    const ID: &'static str;
    /// A request that was understood.
    type Request: Send + 'static;
    /// Writes its answers.
    type Writer: ChunkWriter;

    /// Reads a body.
    fn parse(body: &[u8]) -> Result<Self::Request, ApiError>;

    /// The model that is asked for, and how it is to generate.
    fn asks(request: &Self::Request) -> (&str, &GenerationOptions);

    /// Templates, tokenisation and schemas: what takes time on long prompts.
    fn prepare(
        app: &App,
        request: &Self::Request,
        head: Head,
        trace: Option<TraceParent>,
        arrived: Instant,
    ) -> Result<(Submission, Self::Writer), ApiError>;

    /// The whole answer of `choices` choices.
    fn collect(
        events: ChoiceStream,
        writer: Self::Writer,
        choices: u32,
    ) -> impl Future<Output = Result<Response, ApiError>> + Send;
}

/// Answers a request.
pub(super) async fn create<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(context): Extension<Context>,
    Extension(desk): Extension<Desk>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let body = body::read(&parts.headers, body, &app.limits).await?;
    let arrived = Instant::now();
    let request = E::parse(&body)?;
    drop(body);
    let (model, options) = E::asks(&request);
    models::check(&app, model)?;
    let stream = options.stream;
    let head = Head {
        id: format!("{}-{}", E::ID, context.id),
        created: unix_seconds(),
        model: app.model.name.clone(),
        fingerprint: String::new(),
        include_usage: options.include_usage,
    };
    let (submission, writer) = {
        let app = app.clone();
        let work = move || E::prepare(&app, &request, head, context.trace, arrived);
        desk.prepare(work).await?
    };
    let choices = submission.prompts.len() as u32 * submission.n;
    let events = stream::begun(generation::run(app, submission)).await?;
    if stream {
        Ok(stream::respond(events, writer))
    } else {
        E::collect(events, writer, choices).await
    }
}

/// What all chunks of an answer carry.
pub(super) struct Head {
    /// `chatcmpl-…` or `cmpl-…`.
    pub(super) id: String,
    /// Unix time in seconds.
    pub(super) created: u64,
    /// The served model.
    pub(super) model: String,
    /// Empty until a worker has begun.
    pub(super) fingerprint: String,
    /// A stream ends with the usage.
    pub(super) include_usage: bool,
}

impl Head {
    /// The first choice's worker stands for all.
    pub(super) fn note_fingerprint(&mut self, fingerprint: String) {
        if self.fingerprint.is_empty() {
            self.fingerprint = fingerprint;
        }
    }

    /// `usage` of a chunk: absent where it is not asked for, null before the last chunk.
    pub(super) fn usage(&self, usage: Option<Usage>) -> Option<Option<Usage>> {
        self.include_usage.then_some(usage)
    }
}

/// Where requests are prepared, a few at a time: as many as there are CPUs, since it is all computation. The tokenizer
/// keeps the words that it has seen once for each thread, so that threads must be few; and the request of a client
/// that has left while it waits here is never prepared.
#[derive(Clone)]
pub(super) struct Desk(Arc<Semaphore>);

impl Desk {
    /// A place for each CPU that this process may use, within [`PLACES`].
    pub(super) fn new() -> Self {
        let cpus = std::thread::available_parallelism().map_or(PLACES.0, NonZero::get);
        Self(Arc::new(Semaphore::new(cpus.clamp(PLACES.0, PLACES.1))))
    }

    async fn prepare<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let lost = || ApiError::internal("the request could not be prepared");
        let place = self.0.clone().acquire_owned().await.map_err(|_| lost())?;
        let work = move || {
            // Held to the end of the work, though its client leave in between.
            let _place = place;
            work()
        };
        let prepared = tokio::task::spawn_blocking(work).await;
        prepared.map_err(|_| lost())?
    }
}
