//! One stream of tokens over workers that may die: **a dead worker loses nothing**.
//!
//! A broken stream is requested again, with the tokens received so far, from another worker or from the same one after
//! its restart. The new worker recomputes those tokens without sending them, and continues. Since logits are
//! batch-invariant and sampling is a function of seed and position, it continues with the tokens that the first would
//! have produced; the index that each token carries shows that none is lost or duplicated.
//!
//! Workers of the same model but with other numerics (another instruction set, a GPU) may choose other tokens where
//! two are nearly equal. A request is therefore pinned to the numerics that read its prompt and to those that write
//! its answer, which need not be the same; the boundary between the two never moves. The pin begins with the first
//! chunk that the client receives, which names the numerics: until then a request that a worker refused may go to any
//! other. A broken stream waits for workers with the same numerics, for a bounded time while they may come back, and
//! only then takes others.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hearth_transport::spans::{KeyValue, Span};
use hearth_transport::v1::{
    FinishReason, GenerateEvent, GenerateRequest, Grammar, Sampling, Token, generate_event,
};
use hearth_transport::{CallContext, RpcError, RpcErrorKind, Worker, tonic};
use tokio::time::{Instant, sleep, timeout_at};

use crate::router::{
    AcquireError, Lease, Pin, PrefillLease, Role, Route, Want, WorkerId, WorkerPool,
};

/// First and longest pause between attempts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// Longest time for which a request that waited keeps those that follow it to the same worker, until that has accepted it.
const TURN: Duration = Duration::from_millis(200);
/// Time by which a worker's deadline exceeds ours.
const SLACK: Duration = Duration::from_secs(2);
/// Maximum number of characters of an error text that are shown.
const MESSAGE_CHARS: usize = 400;

/// One choice to generate.
#[derive(Clone, Debug)]
pub struct Job {
    /// Identifier of the choice; each attempt appends its number.
    pub request_id: String,
    /// The prompt, at least one token.
    pub prompt: Arc<[u32]>,
    /// Sampling parameters; their seed is that of choice 0.
    pub sampling: Arc<Sampling>,
    /// Seed of this choice.
    pub seed: u64,
    /// Upper bound on generated tokens; together with the prompt it fits the context.
    pub max_tokens: u32,
    /// Tokens that end the answer.
    pub stop_tokens: Arc<[u32]>,
    /// Grammar that the answer must follow.
    pub grammar: Option<Arc<Grammar>>,
    /// Number of alternatives to report; `None` for no log-probabilities.
    pub logprobs: Option<u32>,
    /// Span of the request; those of the job are parts of it.
    pub span: Arc<Span>,
    /// Time until which to wait for a first worker. `None` if the request was already admitted: it waits until the
    /// overall deadline, however long the queue is, as long as there are workers.
    pub queue_deadline: Option<Instant>,
    /// Time for a worker to replace one that died mid-stream, and for any to be ready for an admitted request.
    pub replacement_timeout: Duration,
    /// Deadline of the whole job.
    pub deadline: Instant,
    /// Number of attempts that may end without a new token.
    pub max_fruitless_attempts: u32,
}

/// Output of a job: one `Started`, tokens without a gap, one `Finished`.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A worker has started.
    Started {
        /// Prompt tokens whose KV was reused.
        cached_tokens: u32,
        /// Model and numerics of the worker.
        pin: Pin,
        /// Role of the worker that reads the prompt.
        reader: Role,
    },
    /// The next token.
    Token(Token),
    /// The end.
    Finished(FinishReason),
}

/// Reason a job ended without its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobError {
    /// No worker was available.
    Acquire(AcquireError),
    /// A worker rejected the request, as any other would.
    Rejected(String),
    /// The time for the whole answer ran out.
    Deadline {
        /// Number of tokens received.
        tokens: usize,
    },
    /// The worker died, and none took its place in time.
    Lost {
        /// Number of tokens received.
        tokens: usize,
        /// Time that the stream waited.
        waited: Duration,
    },
    /// Workers failed repeatedly.
    Failed {
        /// Attempts without a new token.
        attempts: u32,
        /// Error of the last attempt.
        last: String,
    },
}

impl JobError {
    /// Word for it in spans.
    const fn label(&self) -> &'static str {
        match self {
            Self::Acquire(_) => "no_worker",
            Self::Rejected(_) => "rejected",
            Self::Deadline { .. } => "deadline",
            Self::Lost { .. } => "worker_lost",
            Self::Failed { .. } => "workers_failed",
        }
    }
}

/// Receiver of reports about broken streams, for the metrics.
pub trait FailoverObserver: Send + Sync {
    /// Reports that a stream is moved; `kind` is [`RpcErrorKind::label`], `tokens` the number that it keeps.
    fn moved(&self, kind: &'static str, tokens: usize);
    /// Reports that a stream continues with other numerics: its tokens may differ from those of an undisturbed run.
    fn changed_numerics(&self);
}

/// Runs a job. Dropping the stream cancels it on the worker, and on the prefill worker behind it.
pub fn run(
    pool: Arc<WorkerPool>,
    job: Job,
    observer: Arc<dyn FailoverObserver>,
) -> impl Stream<Item = Result<Event, JobError>> + Send {
    async_stream::stream! {
        let mut progress = Progress::default();
        loop {
            let mut attempt = match Attempt::begin(&pool, &job, &mut progress).await {
                Ok(attempt) => attempt,
                Err(Failure::Retry(error)) => {
                    match progress.failed(&pool, &job, &error, observer.as_ref()).await {
                        Ok(()) => continue,
                        Err(error) => {
                            yield Err(error);
                            return;
                        }
                    }
                }
                Err(Failure::Fatal(error)) => {
                    yield Err(error);
                    return;
                }
            };
            let error = loop {
                match attempt.next(&job, &mut progress, observer.as_ref()).await {
                    Ok(event) => {
                        let is_last = matches!(event, Event::Finished(_));
                        yield Ok(event);
                        if is_last {
                            return;
                        }
                    }
                    Err(failure) => {
                        failure.note_in(&attempt.span);
                        break failure;
                    }
                }
            };
            // The slot on the worker is free while the next worker is sought.
            drop(attempt);
            let ended = match error {
                Failure::Fatal(error) => Err(error),
                Failure::Retry(error) => match progress.ended(&job) {
                    Some(reason) => {
                        yield Ok(Event::Finished(reason));
                        return;
                    }
                    None => progress.failed(&pool, &job, &error, observer.as_ref()).await,
                },
            };
            if let Err(error) = ended {
                yield Err(error);
                return;
            }
        }
    }
}

enum Failure {
    /// Another attempt may well succeed.
    Retry(RpcError),
    Fatal(JobError),
}

impl Failure {
    fn note_in(&self, span: &Span) {
        match self {
            Self::Retry(error) => span.fail(error.kind().label(), error),
            Self::Fatal(error) => span.fail(error.label(), ""),
        }
    }
}

/// State that is kept across attempts.
#[derive(Default)]
struct Progress {
    tokens: Vec<u32>,
    /// Numerics of what the client has received; `None` before it has received anything.
    pin: Option<Pin>,
    /// Whether the last worker had other numerics than the pin, after a wait for the same.
    took_others: bool,
    avoid: Option<WorkerId>,
    /// The attempt's prefill worker, until it has delivered.
    prefill: Option<WorkerId>,
    has_started: bool,
    attempts: u32,
    fruitless: u32,
    pause: Duration,
}

impl Progress {
    /// Returns the finish reason if all tokens arrived and only the final message is missing.
    fn ended(&self, job: &Job) -> Option<FinishReason> {
        let last = self.tokens.last()?;
        if job.stop_tokens.contains(last) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() as u64 >= u64::from(job.max_tokens)).then_some(FinishReason::Length)
    }

    /// Records a failed attempt and pauses, or gives up.
    async fn failed(
        &mut self,
        pool: &WorkerPool,
        job: &Job,
        error: &RpcError,
        observer: &dyn FailoverObserver,
    ) -> Result<(), JobError> {
        if let (RpcErrorKind::Gone | RpcErrorKind::Deadline | RpcErrorKind::Mismatch, Some(id)) =
            (error.kind(), self.avoid)
        {
            pool.suspect(id);
        }
        if let Some(id) = self.prefill.take() {
            pool.suspect(id);
        }
        let is_busy = error.kind() == RpcErrorKind::Busy;
        let is_too_late = |deadline| Instant::now() >= deadline;
        if is_busy && self.tokens.is_empty() && job.queue_deadline.is_some_and(is_too_late) {
            return Err(JobError::Acquire(AcquireError::TimedOut));
        }
        // A full worker is not a failure of the request.
        self.fruitless += u32::from(!is_busy);
        observer.moved(error.kind().label(), self.tokens.len());
        job.span.event("moves to another worker", || {
            [
                KeyValue::new("error.type", error.kind().label()),
                KeyValue::new("hearth.tokens_kept", self.tokens.len() as i64),
            ]
        });
        tracing::warn!(
            request = %job.request_id,
            trace = job.span.trace_id().map(tracing::field::display),
            tokens = self.tokens.len(),
            attempt = self.attempts,
            %error,
            "stream moves to another worker"
        );
        if self.fruitless >= job.max_fruitless_attempts {
            return Err(JobError::Failed {
                attempts: self.fruitless,
                last: clip(&error.to_string()),
            });
        }
        self.pause = (self.pause * 2).clamp(PAUSE.0, PAUSE.1);
        timeout_at(job.deadline, sleep(self.pause))
            .await
            .map_err(|_| self.out_of_time())
    }

    /// Pins the job to the worker's numerics; the weights never change within a request. Called for each chunk that the
    /// client receives: the first one shows a fingerprint of the numerics.
    fn pin_to(&mut self, pin: &Pin, job: &Job, observer: &dyn FailoverObserver) {
        if self.pin.as_ref() == Some(pin) {
            return;
        }
        self.took_others = false;
        if let Some(before) = self.pin.replace(pin.clone()) {
            tracing::warn!(
                request = %job.request_id,
                trace = job.span.trace_id().map(tracing::field::display),
                tokens = self.tokens.len(),
                ?before,
                after = ?pin,
                "the stream continues with other numerics: later tokens may differ"
            );
            observer.changed_numerics();
        }
    }

    /// Pin that the next worker must match. A worker that does everything `alone` reads the prompt itself, as far as the
    /// tokens already delivered allow it.
    fn wanted(&self, alone: bool) -> Option<Pin> {
        let mut pin = self.pin.clone()?;
        if alone && self.tokens.is_empty() {
            pin.prompt_numerics.clone_from(&pin.numerics);
        }
        Some(pin)
    }

    fn was_tried(&self) -> bool {
        self.attempts > 0
    }

    /// Deadline for finding a worker.
    fn wait_until(&self, job: &Job) -> Instant {
        let until = match job.queue_deadline {
            Some(queue) if !self.was_tried() => queue,
            None if self.pin.is_none() => job.deadline,
            _ => Instant::now() + job.replacement_timeout,
        };
        until.min(job.deadline)
    }

    /// Error of a job for which no worker was found within `waited`.
    fn without_worker(&self, job: &Job, error: AcquireError, waited: Duration) -> JobError {
        let is_late = Instant::now() >= job.deadline;
        match error {
            AcquireError::Ending if self.pin.is_none() => JobError::Acquire(error),
            AcquireError::NotReady { .. } if !self.was_tried() && !is_late => {
                JobError::Acquire(error)
            }
            _ if self.was_tried() && !is_late => JobError::Lost {
                tokens: self.tokens.len(),
                waited,
            },
            _ if self.was_tried() || job.queue_deadline.is_none() => self.out_of_time(),
            error => JobError::Acquire(error),
        }
    }

    fn out_of_time(&self) -> JobError {
        JobError::Deadline {
            tokens: self.tokens.len(),
        }
    }
}

/// One stream from one worker.
struct Attempt {
    /// Span of the call.
    span: Span,
    lease: Lease,
    prefill: Option<PrefillLease>,
    stream: tonic::Streaming<GenerateEvent>,
}

impl Attempt {
    async fn begin(
        pool: &Arc<WorkerPool>,
        job: &Job,
        progress: &mut Progress,
    ) -> Result<Self, Failure> {
        // After two failures the decode worker does everything by itself: the fault may lie in the hand-over.
        let alone = progress.fruitless > 1;
        let pin = progress.wanted(alone);
        let want = Want {
            prompt: &job.prompt,
            pin: pin.as_ref(),
            takes_others: progress.took_others,
            was_tried: progress.was_tried(),
            avoid: progress.avoid,
            alone,
            is_admitted: job.queue_deadline.is_none(),
        };
        let began = Instant::now();
        let waiting = job.span.part("wait for a worker");
        let Route {
            decode: mut lease,
            prefill,
            reads_alone,
            turn,
        } = match acquire(pool, job, want, progress.wait_until(job)).await {
            Ok(route) => route,
            Err(error) => {
                let error = progress.without_worker(job, error, began.elapsed());
                waiting.fail(error.label(), "");
                return Err(Failure::Fatal(error));
            }
        };
        drop(waiting);
        progress.took_others = pin.is_some_and(|pin| pin != lease.pin);
        progress.prefill = prefill.as_ref().map(PrefillLease::id);
        progress.avoid = Some(lease.id());
        progress.attempts += 1;
        let reader = prefill
            .as_ref()
            .map(|prefill| prefill.endpoint().to_string());
        let span = job.call(&lease, progress.attempts);
        let request = job.request(progress, (&lease.pin, &span), (reader, reads_alone));
        let mut client = lease.worker.decode();
        let call = turn.take(job.turn(), client.generate(request));
        let answer = tokio::select! {
            biased;
            answer = timeout_at(job.deadline, call) => answer.map_err(|_| Failure::Fatal(progress.out_of_time())),
            () = lease.lost() => Err(hung(&lease.worker, "it stopped answering")),
        };
        let answer = answer
            .and_then(|answer| answer.map_err(|status| sort(lease.worker.error(&status))))
            .inspect_err(|failure| failure.note_in(&span))?;
        Ok(Self {
            span,
            stream: answer.into_inner(),
            lease,
            prefill,
        })
    }

    /// Returns the next event that the client has not received.
    async fn next(
        &mut self,
        job: &Job,
        progress: &mut Progress,
        observer: &dyn FailoverObserver,
    ) -> Result<Event, Failure> {
        loop {
            let worker = self.lease.worker.clone();
            let message = tokio::select! {
                biased;
                message = timeout_at(job.deadline, self.stream.message()) => {
                    message.map_err(|_| Failure::Fatal(progress.out_of_time()))?
                }
                () = self.lease.lost() => return Err(hung(&worker, "it stopped answering")),
                () = lost(self.prefill.as_mut()) => {
                    // The decode worker is healthy, and would wait for it.
                    progress.avoid = None;
                    return Err(hung(&worker, "its prefill worker stopped answering"));
                }
            };
            self.lease.heard();
            let event = match message {
                Ok(Some(GenerateEvent { event })) => event,
                Ok(None) => return Err(Failure::Retry(RpcError::cut_short(worker.endpoint()))),
                Err(status) => return Err(sort(worker.error(&status))),
            };
            match event {
                Some(generate_event::Event::Started(started)) if !progress.has_started => {
                    progress.has_started = true;
                    progress.pin_to(&self.lease.pin, job, observer);
                    let reader = self.prefill.as_ref().map(|_| Role::Prefill);
                    return Ok(Event::Started {
                        cached_tokens: started.cached_tokens,
                        pin: self.lease.pin.clone(),
                        reader: reader.unwrap_or(Role::Decode),
                    });
                }
                Some(generate_event::Event::Token(token)) => {
                    if token.index as usize != progress.tokens.len() {
                        let words = format!(
                            "it sent token {} where {} was due",
                            token.index,
                            progress.tokens.len()
                        );
                        let error =
                            RpcError::of(RpcErrorKind::WorkerFault, worker.endpoint(), words);
                        return Err(Failure::Retry(error));
                    }
                    self.prefill = None;
                    self.lease.decoded();
                    progress.prefill = None;
                    progress.pin_to(&self.lease.pin, job, observer);
                    if progress.tokens.is_empty() {
                        self.span.event("first token", || []);
                    }
                    progress.tokens.push(token.id);
                    progress.fruitless = 0;
                    progress.pause = Duration::ZERO;
                    return Ok(Event::Token(token));
                }
                Some(generate_event::Event::Finished(finished)) => {
                    return Ok(Event::Finished(finished.reason()));
                }
                Some(generate_event::Event::Started(_)) | None => {}
            }
        }
    }
}

/// Acquires workers for a job. An admitted job whose client has received nothing gives up once no worker has been ready
/// for as long as a replacement may take. While the gateway shuts down, a job that was not admitted gives up when no
/// worker is left, whether one was tried or not: another gateway has some. A stream that has begun would be lost, and
/// waits for a worker that restarts in place.
async fn acquire(
    pool: &Arc<WorkerPool>,
    job: &Job,
    want: Want<'_>,
    deadline: Instant,
) -> Result<Route, AcquireError> {
    let has_begun = want.pin.is_some();
    tokio::select! {
        biased;
        route = pool.acquire(want, deadline) => route,
        error = pool.deserted(job.replacement_timeout), if want.is_admitted && !has_begun => Err(error),
        error = pool.left(), if !want.is_admitted && !has_begun => Err(error),
    }
}

/// Returns when a prefill worker that is still waited for hangs.
async fn lost(prefill: Option<&mut PrefillLease>) {
    match prefill {
        Some(prefill) => prefill.lost().await,
        None => std::future::pending().await,
    }
}

impl Job {
    /// Longest time for which its call keeps those that follow it to the same worker. A worker compiles a grammar before it
    /// accepts the call, for up to a second: such a call is sent in its turn, and not waited for.
    fn turn(&self) -> Duration {
        match self.grammar {
            Some(_) => Duration::ZERO,
            None => TURN,
        }
    }

    /// Starts the span of a call.
    fn call(&self, lease: &Lease, attempt: u32) -> Span {
        let span = self.span.call("hearth.v1.Decode/Generate");
        if span.is_recording() {
            span.set("rpc.system", "grpc");
            span.set("server.address", lease.worker.endpoint().to_string());
            span.set("hearth.attempt", i64::from(attempt));
        }
        span
    }

    fn request(
        &self,
        progress: &Progress,
        (pin, span): (&Pin, &Span),
        (prefill, reads_alone): (Option<String>, bool),
    ) -> tonic::Request<GenerateRequest> {
        let request_id = format!("{}.{}", self.request_id, progress.attempts);
        let sampling = Sampling {
            seed: self.seed,
            ..self.sampling.as_ref().clone()
        };
        let message = GenerateRequest {
            request_id: request_id.clone(),
            model_fingerprint: pin.fingerprint.clone(),
            prompt_numerics: pin.prompt_numerics.clone(),
            prompt_tokens: self.prompt.to_vec(),
            generated_tokens: progress.tokens.clone(),
            sampling: Some(sampling),
            max_tokens: self.max_tokens,
            stop_token_ids: self.stop_tokens.to_vec(),
            prefill_endpoint: prefill.unwrap_or_default(),
            read_alone: reads_alone,
            grammar: self.grammar.as_deref().cloned(),
            logprobs: self.logprobs.is_some(),
            top_logprobs: self.logprobs.unwrap_or(0),
        };
        let context = CallContext {
            request_id: Some(request_id),
            trace: span.context(),
        };
        let mut request = context.request(message);
        // Workers end requests that are no longer waited for; our own deadline comes first.
        request.set_timeout(self.deadline.saturating_duration_since(Instant::now()) + SLACK);
        request
    }
}

fn hung(worker: &Worker, words: &str) -> Failure {
    Failure::Retry(RpcError::of(RpcErrorKind::Gone, worker.endpoint(), words))
}

fn sort(error: RpcError) -> Failure {
    match error.kind() {
        RpcErrorKind::Rejected => Failure::Fatal(JobError::Rejected(clip(error.message()))),
        // A deadline here is the worker's own, such as for a hung prefill worker; ours is checked in the gateway.
        _ => Failure::Retry(error),
    }
}

fn clip(text: &str) -> String {
    text.chars().take(MESSAGE_CHARS).collect()
}
