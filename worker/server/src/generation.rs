//! A request's choices, run together: jobs on workers on one side, deltas of text and calls on the other.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::stream::SelectAll;
use futures::{Stream, StreamExt};
use hearth_transport::spans::Span;
use hearth_transport::v1::{Grammar, Sampling, grammar};
use http::StatusCode;
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::app::App;
use crate::choice::{Choice, ChoiceOptions, Delta};
use crate::demand::{OpenGuard, UnansweredGuard};
use crate::error::{ApiError, ErrorType};
use crate::failover::{self, Event, Job, JobError};
use crate::metrics::{Metrics, Operation, RunningGuard};
use crate::router::{AcquireError, Pin as WorkerPin, Role};
use crate::schema;
use crate::wire::response::{FinishReason, PromptTokensDetails, Usage};

/// Retry delay given to clients when the queue is full.
const RETRY_FULL: Duration = Duration::from_secs(2);
/// Retry delay given to clients while workers start.
const RETRY_STARTING: Duration = Duration::from_secs(5);

/// A request that passed all checks.
pub(crate) struct Submission {
    /// `chatcmpl-…` or `cmpl-…`.
    pub(crate) id: String,
    pub(crate) operation: Operation,
    /// Prompts, each with its bound on generated tokens.
    pub(crate) prompts: Vec<(Arc<[u32]>, u32)>,
    /// Choices for each prompt.
    pub(crate) n: u32,
    /// Sampling of choice 0; choice i has the seed plus i.
    pub(crate) sampling: Arc<Sampling>,
    pub(crate) grammar: Option<Arc<Grammar>>,
    pub(crate) logprobs: Option<u32>,
    pub(crate) choice: Arc<ChoiceOptions>,
    /// Span of the request.
    pub(crate) span: Arc<Span>,
    /// Time when the request had arrived in full.
    pub(crate) arrived: Instant,
    /// Its share of the memory for large requests.
    pub(crate) room: Option<OwnedSemaphorePermit>,
}

impl Submission {
    /// Bytes that it holds until its last choice has ended.
    pub(crate) fn held_bytes(&self) -> usize {
        let prompts = self.prompts.iter();
        let prompts: usize = prompts
            .map(|(prompt, _)| size_of_val::<[u32]>(prompt))
            .sum();
        let biases = size_of_val(self.sampling.logit_bias.as_slice());
        let grammar = match self
            .grammar
            .as_deref()
            .and_then(|grammar| grammar.kind.as_ref())
        {
            Some(grammar::Kind::JsonSchema(text) | grammar::Kind::Lark(text)) => text.len(),
            Some(grammar::Kind::JsonObject(_)) | None => 0,
        };
        let stops: usize = self.choice.stop.iter().map(String::len).sum();
        prompts + biases + grammar + stops
    }
}

/// Event of a submission.
#[derive(Debug)]
pub(crate) enum ChoiceEvent {
    /// A worker has started the choice.
    Started { index: u32, fingerprint: String },
    /// New output.
    Delta { index: u32, delta: Delta },
    /// The end of the choice, with its last output.
    Finished {
        index: u32,
        delta: Delta,
        reason: FinishReason,
    },
    /// The end of all choices.
    Done(Usage),
}

pub(crate) type ChoiceStream = Pin<Box<dyn Stream<Item = Result<ChoiceEvent, ApiError>> + Send>>;

/// Runs a submission. The stream ends after `Done` or an error; dropping it cancels all choices.
///
/// The very first choice waits alone for a worker, as one request in the queue. For each prompt, the first choice goes
/// ahead; the others follow once it has its first token, so that they find the prompt's KV cache computed. At most
/// the pool's share for one request runs at a time: when one choice has ended, the next one goes to the end of the
/// queue, behind requests that arrived in the meantime.
pub(crate) fn run(app: Arc<App>, submission: Submission) -> ChoiceStream {
    let events = AssertUnwindSafe(run_choices(app.clone(), submission)).catch_unwind();
    Box::pin(async_stream::stream! {
        let mut events = std::pin::pin!(events);
        loop {
            let item = tokio::select! {
                biased;
                () = app.closing.cancelled() => {
                    app.cut_off.fetch_add(1, Ordering::Relaxed);
                    Some(Err(closing_error()))
                }
                item = events.next() => item.map(|item| item.unwrap_or_else(|_| Err(fault()))),
            };
            let Some(item) = item else { return };
            let is_last = item.is_err();
            yield item;
            if is_last {
                return;
            }
        }
    })
}

fn run_choices(
    app: Arc<App>,
    submission: Submission,
) -> impl Stream<Item = Result<ChoiceEvent, ApiError>> + Send {
    async_stream::stream! {
        let mut tally = RequestTally::new(&app.metrics, &submission);
        let submission = Arc::new(submission);
        let n = submission.n;
        let mut running = SelectAll::new();
        let mut under_way = 0;
        let prompts = submission.prompts.len() as u32;
        let mut due = VecDeque::from([0]);
        let mut is_let_in = false;
        loop {
            while !due.is_empty()
                && (under_way == 0 || under_way < app.pool.share())
                && let Some(index) = due.pop_front()
            {
                running.push(run_choice(app.clone(), submission.clone(), index));
                under_way += 1;
            }
            let Some(item) = running.next().await else { break };
            let event = match item {
                Ok(event) => event,
                Err(error) => {
                    tally.failed(&error);
                    yield Err(error);
                    return;
                }
            };
            if !std::mem::replace(&mut is_let_in, true) {
                due.extend((1..prompts).map(|prompt| prompt * n));
            }
            if let RunEvent::FirstToken { index } = event {
                if index % n == 0 {
                    // Before other prompts, while this one's KV cache is still there.
                    (index + 1..index + n).rev().for_each(|other| due.push_front(other));
                }
                continue;
            }
            under_way -= usize::from(matches!(event, RunEvent::Finished { .. }));
            if let Some(event) = tally.note(event, n) {
                yield Ok(event);
            }
        }
        yield Ok(ChoiceEvent::Done(tally.done()));
    }
}

enum RunEvent {
    Started {
        index: u32,
        cached_tokens: u32,
        pin: WorkerPin,
    },
    FirstToken {
        index: u32,
    },
    Delta {
        index: u32,
        delta: Delta,
    },
    Finished {
        index: u32,
        delta: Delta,
        reason: FinishReason,
        tokens: u32,
    },
}

fn run_choice(
    app: Arc<App>,
    submission: Arc<Submission>,
    index: u32,
) -> Pin<Box<dyn Stream<Item = Result<RunEvent, ApiError>> + Send>> {
    Box::pin(async_stream::stream! {
        let job = job_of(&app, &submission, index);
        let prompt_tokens = job.prompt.len();
        let limit = app.limits.request_timeout;
        let mut choice = Choice::new(submission.choice.clone());
        let mut tally = ChoiceTally::new(&app.metrics, submission.operation, prompt_tokens);
        let mut events = std::pin::pin!(failover::run(app.pool.clone(), job, app.metrics.clone()));
        while let Some(event) = events.next().await {
            match event {
                Err(error) => {
                    tally.ended("error");
                    yield Err(error_of(error, limit, submission.grammar.as_deref()));
                    return;
                }
                Ok(Event::Started { cached_tokens, pin, reader }) => {
                    tally.started(prompt_tokens, cached_tokens, reader);
                    yield Ok(RunEvent::Started { index, cached_tokens, pin });
                }
                Ok(Event::Token(token)) => {
                    if tally.token(submission.arrived) {
                        yield Ok(RunEvent::FirstToken { index });
                    }
                    let (delta, ended) = choice.push(&token);
                    if let Some(reason) = ended {
                        tally.ended(reason.as_str());
                        yield Ok(RunEvent::Finished { index, delta, reason, tokens: tally.tokens });
                        return;
                    }
                    if !delta.is_empty() {
                        yield Ok(RunEvent::Delta { index, delta });
                    }
                }
                Ok(Event::Finished(reason)) => {
                    if tally.tokens == 0 {
                        yield Ok(RunEvent::FirstToken { index });
                    }
                    let (delta, reason) = choice.finish(reason);
                    tally.ended(reason.as_str());
                    yield Ok(RunEvent::Finished { index, delta, reason, tokens: tally.tokens });
                    return;
                }
            }
        }
    })
}

fn job_of(app: &App, submission: &Submission, index: u32) -> Job {
    let (prompt, max_tokens) = &submission.prompts[(index / submission.n) as usize];
    let sampling = submission.sampling.clone();
    let hold = app.pool.hold();
    let seed = sampling.seed.wrapping_add(u64::from(index % submission.n));
    Job {
        request_id: format!("{}-{index}", submission.id),
        prompt: prompt.clone(),
        sampling,
        seed,
        max_tokens: *max_tokens,
        stop_tokens: submission.choice.stop_tokens.clone(),
        grammar: submission.grammar.clone(),
        logprobs: submission.logprobs,
        span: submission.span.clone(),
        // The queue admits a request with its first choice, and does not refuse it midway.
        queue_deadline: (index == 0)
            .then(|| Instant::now() + hold.unwrap_or(app.routing.queue_timeout)),
        replacement_timeout: app.routing.queue_timeout,
        // What it waits for workers is not of its own time.
        deadline: submission.arrived + app.limits.request_timeout + hold.unwrap_or_default(),
        max_fruitless_attempts: app.routing.max_fruitless_attempts,
    }
}

/// Returns a fingerprint of model, numerics and seed: where it is equal, an equal request gives an equal answer.
pub(crate) fn system_fingerprint(pin: &WorkerPin, seed: u64) -> String {
    let mut hasher = Sha256::new();
    hasher.update(pin.fingerprint.as_bytes());
    hasher.update([0]);
    hasher.update(pin.numerics.as_bytes());
    if pin.prompt_numerics != pin.numerics {
        hasher.update([0]);
        hasher.update(pin.prompt_numerics.as_bytes());
    }
    let digest = hasher.finalize();
    let hex: String = digest
        .iter()
        .take(5)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("fp_{hex}_seed_{seed}")
}

/// Counters of one request; one that is dropped without an end was cancelled.
struct RequestTally {
    metrics: Arc<Metrics>,
    operation: Operation,
    arrived: Instant,
    seed: u64,
    usage: Usage,
    span: Arc<Span>,
    is_over: bool,
}

impl RequestTally {
    fn new(metrics: &Arc<Metrics>, submission: &Submission) -> Self {
        let prompt_tokens: usize = submission
            .prompts
            .iter()
            .map(|(prompt, _)| prompt.len())
            .sum();
        let span = submission.span.clone();
        span.set("gen_ai.operation.name", submission.operation.as_str());
        span.set("gen_ai.usage.input_tokens", prompt_tokens as i64);
        Self {
            metrics: metrics.clone(),
            span,
            operation: submission.operation,
            arrived: submission.arrived,
            seed: submission.sampling.seed,
            usage: Usage {
                prompt_tokens: prompt_tokens as u32,
                ..Usage::default()
            },
            is_over: false,
        }
    }

    fn note(&mut self, event: RunEvent, n: u32) -> Option<ChoiceEvent> {
        match event {
            RunEvent::Started {
                index,
                cached_tokens,
                pin,
            } => {
                if index % n == 0 {
                    let PromptTokensDetails { cached_tokens: sum } =
                        &mut self.usage.prompt_tokens_details;
                    *sum += cached_tokens;
                }
                Some(ChoiceEvent::Started {
                    index,
                    fingerprint: system_fingerprint(&pin, self.seed),
                })
            }
            RunEvent::FirstToken { .. } => None,
            RunEvent::Delta { index, delta } => Some(ChoiceEvent::Delta { index, delta }),
            RunEvent::Finished {
                index,
                delta,
                reason,
                tokens,
            } => {
                self.usage.completion_tokens += tokens;
                Some(ChoiceEvent::Finished {
                    index,
                    delta,
                    reason,
                })
            }
        }
    }

    fn failed(&mut self, error: &ApiError) {
        error.note_in(&self.span);
        self.over(Some(error.code.as_deref().unwrap_or(error.kind.as_str())));
    }

    fn done(&mut self) -> Usage {
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens;
        self.over(None);
        self.usage
    }

    fn over(&mut self, error: Option<&str>) {
        if !std::mem::replace(&mut self.is_over, true) {
            let tokens = i64::from(self.usage.completion_tokens);
            self.span.set("gen_ai.usage.output_tokens", tokens);
            self.metrics
                .request_finished(self.operation, self.arrived.elapsed(), error);
        }
    }
}

impl Drop for RequestTally {
    fn drop(&mut self) {
        if !self.is_over {
            self.span.end_without_result("cancelled");
        }
        self.over(Some("cancelled"));
    }
}

/// Counters of one choice.
struct ChoiceTally {
    metrics: Arc<Metrics>,
    operation: Operation,
    unanswered: Option<UnansweredGuard>,
    open: Option<OpenGuard>,
    running: Option<RunningGuard>,
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: u32,
    is_over: bool,
}

impl ChoiceTally {
    fn new(metrics: &Arc<Metrics>, operation: Operation, prompt_tokens: usize) -> Self {
        let (unanswered, open) = metrics.demand.arrived(prompt_tokens);
        Self {
            metrics: metrics.clone(),
            operation,
            unanswered: Some(unanswered),
            open: Some(open),
            running: None,
            first: None,
            last: None,
            tokens: 0,
            is_over: false,
        }
    }

    fn started(&mut self, prompt_tokens: usize, cached_tokens: u32, reader: Role) {
        let metrics = &self.metrics;
        self.running = Some(metrics.choice_started(prompt_tokens, cached_tokens, reader));
    }

    /// Counts a token; true for the first.
    fn token(&mut self, arrived: Instant) -> bool {
        let now = Instant::now();
        self.last = Some(now);
        self.tokens += 1;
        self.metrics.token();
        if self.first.is_some() {
            return false;
        }
        self.first = Some(now);
        self.unanswered = None;
        self.metrics.first_token(self.operation, now - arrived);
        true
    }

    fn ended(&mut self, reason: &str) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        (self.unanswered, self.open, self.running) = (None, None, None);
        let span = match (self.first, self.last) {
            (Some(first), Some(last)) => last - first,
            _ => Duration::ZERO,
        };
        self.metrics
            .choice_finished(self.operation, reason, self.tokens, span);
    }
}

impl Drop for ChoiceTally {
    fn drop(&mut self) {
        self.ended("cancelled");
    }
}

/// Error for a panic of the gateway, which ends one answer.
fn fault() -> ApiError {
    ApiError::internal("an internal error of the gateway ended the answer: see its log")
}

/// Error for new requests, and for answers that do not end in time, once the gateway shuts down.
pub(crate) fn closing_error() -> ApiError {
    ApiError::unavailable(
        "the gateway is shutting down: try again in a moment",
        RETRY_STARTING,
    )
    .with_code("shutting_down")
}

fn error_of(error: JobError, limit: Duration, grammar: Option<&Grammar>) -> ApiError {
    match error {
        JobError::Acquire(AcquireError::QueueFull { waiting, limit }) => ApiError::too_many(
            format!("the queue is full: {waiting} requests wait, {limit} may. Try again in a moment"),
            RETRY_FULL,
        )
        .with_code("queue_full"),
        JobError::Acquire(AcquireError::TimedOut) => ApiError::too_many(
            "all workers are busy, and the time to wait for a free slot ran out. Try again in a moment",
            RETRY_FULL,
        )
        .with_code("queue_timeout"),
        JobError::Acquire(AcquireError::NotReady { workers: 0 }) => ApiError::unavailable(
            "no decode worker has joined this gateway yet, and the time to wait for one ran out. Try again",
            RETRY_STARTING,
        )
        .with_code("workers_starting"),
        JobError::Acquire(AcquireError::NotReady { workers }) => ApiError::unavailable(
            format!("none of {workers} decode workers is ready yet, and the time to wait for one ran out. Try again"),
            RETRY_STARTING,
        )
        .with_code("workers_starting"),
        JobError::Acquire(AcquireError::Ending) => closing_error(),
        JobError::Rejected(message) => schema::rejected(message, grammar),
        JobError::Deadline { tokens } => ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            ErrorType::Server,
            format!(
                "the answer took longer than {} s and came to {tokens} tokens: ask for fewer with max_tokens",
                limit.as_secs()
            ),
        )
        .with_code("request_timeout"),
        JobError::Lost { tokens, waited } => ApiError::unavailable(
            format!(
                "the worker of this answer was lost after {tokens} tokens, and none took its place within {} s: \
                 the workers' logs tell why. Try again when one is ready",
                waited.as_secs()
            ),
            RETRY_STARTING,
        )
        .with_code("worker_lost"),
        JobError::Failed { attempts, last } => ApiError::new(
            StatusCode::BAD_GATEWAY,
            ErrorType::Server,
            format!("workers failed on this request {attempts} times, most recently with: {last}"),
        )
        .with_code("workers_failed"),
    }
}

/// Draws a seed for a request that names none: below 2^53, so that every client can repeat it as a JSON number.
pub(crate) fn random_seed() -> u64 {
    rand::random_range(0..1 << 53)
}
