//! The decode worker's service: streams tokens for a prompt that is computed here or fetched from a prefill worker.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hearth_engine::{Engine, EngineError, GenerateEvent, RequestId};
use hearth_transport::spans::{Span, Tracer};
use hearth_transport::{CallContext, Clients, Endpoint, Worker as Peer, deadline, v1};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::rank::Worker;
use super::spans::{AnswerSpans, ImportSpans, request_log};
use crate::convert;

/// Time limit for a prefill worker to report its progress.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of checks after which a worker that responds, but neither computes nor delivers, is given up.
const IDLE_LOOKS: u32 = 30;

/// Implements `hearth.v1.Decode` on the engine.
pub(super) struct DecodeService {
    worker: Arc<Worker>,
    prefill: Clients,
    tracer: Tracer,
    silence: Duration,
}

impl DecodeService {
    /// Creates the service. A prefill worker that sends nothing for `silence` is asked whether it makes progress: a
    /// prompt queued behind others stays silent for long, and so does a layer on a slow machine.
    pub(super) fn new(
        worker: Arc<Worker>,
        (prefill, tracer): (Clients, Tracer),
        silence: Duration,
    ) -> Self {
        Self {
            worker,
            prefill,
            tracer,
            silence,
        }
    }

    /// Builds the request to the prefill worker, if the caller's request names one.
    fn remote(
        &self,
        request: &v1::GenerateRequest,
        context: CallContext,
        time_left: Option<Duration>,
    ) -> Result<Option<RemotePrefill>, Status> {
        if request.prefill_endpoint.is_empty() {
            self.worker.check_numerics(&request.prompt_numerics)?;
            return Ok(None);
        }
        if self.worker.membership.is_some() {
            return Err(Status::failed_precondition(format!(
                "{} has the KV of some layers alone, and its ring reads prompts itself: plan without prefill workers",
                self.worker.name
            )));
        }
        let endpoint: Endpoint = request
            .prefill_endpoint
            .parse()
            .map_err(|error| Status::invalid_argument(format!("prefill_endpoint: {error}")))?;
        Ok(Some(RemotePrefill {
            endpoint,
            request: v1::PrefillRequest {
                request_id: request.request_id.clone(),
                tokens: request.prompt_tokens.clone(),
                first_token: 0,
                model_fingerprint: self.worker.model_fingerprint.clone(),
                kv_layout: self.worker.kv_layout.clone(),
                numerics: request.prompt_numerics.clone(),
                alone: request.read_alone,
            },
            context,
            deadline: time_left.and_then(|left| Instant::now().checked_add(left)),
            clients: self.prefill.clone(),
            silence: self.silence,
            engine: self.worker.engine.clone(),
        }))
    }
}

#[tonic::async_trait]
impl v1::decode_server::Decode for DecodeService {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let context = CallContext::of(request.metadata());
        let time_left = deadline::remaining(request.metadata());
        let request = request.into_inner();
        let span = self
            .tracer
            .answer("hearth.v1.Decode/Generate", context.trace.as_ref());
        let log = request_log(&request.request_id, &span);
        let mut spans = AnswerSpans::begin(span, &request);
        self.worker.check_fingerprint(&request.model_fingerprint)?;
        let remote = self.remote(&request, context, time_left)?;
        let input = convert::generate_input(request)?;
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let sink = Box::new(move |event| sender.send(event).is_ok());
        let engine = self.worker.engine.clone();
        // Compiling a grammar may take a second: keep the threads that answer health checks free.
        let accepting = log.clone();
        let accepted = tokio::task::spawn_blocking(move || {
            accepting.in_scope(|| engine.generate(input, sink))
        });
        let accepted = accepted.await;
        let handle = accepted
            .map_err(|error| Status::internal(error.to_string()))?
            .map_err(|error| convert::status(&error))?;

        // The stream owns the request and its import: dropping it cancels both.
        let stream = async_stream::stream! {
            let mut import = None;
            while let Some(event) = receiver.recv().await {
                if let Some(spans) = &mut spans {
                    spans.note(&event);
                }
                if let GenerateEvent::NeedsKv { first_token } = event
                    && let Some(remote) = remote.clone()
                {
                    let call = spans.as_ref().map(|spans| spans.part().call("hearth.v1.Prefill/Prefill"));
                    let task = remote.import((handle.id(), log.clone()), call, first_token);
                    import = Some(AbortOnDropHandle::new(tokio::spawn(task)));
                    continue;
                }
                match convert::generate_event(event) {
                    Ok(Some(event)) => yield Ok(event),
                    Ok(None) => {}
                    Err(status) => {
                        log.in_scope(|| tracing::info!(code = ?status.code(), message = status.message(), "the answer ends here"));
                        yield Err(status);
                        break;
                    }
                }
            }
            drop((import, handle, spans));
        };
        Ok(Response::new(Box::pin(deadline::limited(
            stream, time_left, None,
        ))))
    }
}

/// A prompt that a prefill worker computes.
#[derive(Clone)]
struct RemotePrefill {
    endpoint: Endpoint,
    request: v1::PrefillRequest,
    context: CallContext,
    /// The caller's deadline, after which the KV is no longer needed.
    deadline: Option<Instant>,
    clients: Clients,
    silence: Duration,
    engine: Engine,
}

impl RemotePrefill {
    /// Fetches the KV from `first_token` on into the engine. If the prefill worker is lost, the request ends
    /// with a retryable error: the gateway knows the other workers and sends it again.
    async fn import(
        mut self,
        (id, log): (RequestId, tracing::Span),
        call: Option<Span>,
        first_token: usize,
    ) {
        self.request.first_token = first_token as u32;
        let engine = self.engine.clone();
        let endpoint = self.endpoint.clone();
        let mut spans = call.map(|call| ImportSpans::begin(call, &endpoint));
        if let Some(spans) = &spans {
            self.context.trace = spans.call().context();
        }
        if let Err(status) = self.fetch(id, spans.as_mut()).await {
            log.in_scope(|| {
                tracing::warn!(%endpoint, code = ?status.code(), message = status.message(), "prefill did not deliver");
            });
            if let Some(spans) = &spans {
                spans.call().fail("failed", status.message());
            }
            let detail = format!("prefill worker {endpoint}: {}", status.message());
            engine.import_failed(id, EngineError::Prefill { detail });
        }
    }

    async fn fetch(self, id: RequestId, mut spans: Option<&mut ImportSpans>) -> Result<(), Status> {
        let worker = self
            .clients
            .worker(&self.endpoint)
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = self.context.request(self.request);
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        let look = || work_of(worker.clone());
        let mut client = worker.prefill();
        let mut events = unless_hung(client.prefill(request), self.silence, look)
            .await?
            .into_inner();
        while let Some(event) = unless_hung(events.message(), self.silence, look).await? {
            match event.event {
                Some(v1::prefill_event::Event::Kv(kv)) => {
                    if let Some(spans) = &mut spans {
                        spans.arrived(kv.data.len());
                    }
                    self.engine
                        .import_kv(id, kv.layer as usize, kv.first_token as usize, kv.data);
                }
                Some(v1::prefill_event::Event::Done(done)) => {
                    let (values, rest) = done.logits.as_chunks::<4>();
                    if !rest.is_empty() {
                        return Err(Status::internal(
                            "the logits are not a whole number of f32 values",
                        ));
                    }
                    self.engine.import_done(
                        id,
                        values
                            .iter()
                            .map(|bytes| f32::from_le_bytes(*bytes))
                            .collect(),
                    );
                    return Ok(());
                }
                None => {}
            }
        }
        Err(Status::unavailable(
            "the stream ended before the last token",
        ))
    }
}

/// Progress reported by a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WorkDone {
    /// Number of forward passes completed.
    steps: u64,
    /// Whether a forward pass is running.
    is_computing: bool,
}

/// Asks a worker for its progress; `None` if it does not answer.
async fn work_of(worker: Peer) -> Option<WorkDone> {
    let mut control = worker.control();
    let stats = control.stats(v1::StatsRequest {});
    let stats = timeout(LOOK_TIMEOUT, stats).await.ok()?.ok()?.into_inner();
    Some(WorkDone {
        steps: stats.steps,
        is_computing: stats.layer_seconds > 0.0,
    })
}

/// Waits for `call`, unless its worker hangs. A call may take as long as its worker computes, possibly for other
/// callers, and one step may take long; a worker whose computation is stuck detects that itself and exits.
///
/// # Errors
/// The errors of `call`; `UNAVAILABLE`, which is retried elsewhere, if the worker does not report its progress, or
/// makes none for [`IDLE_LOOKS`] silences.
async fn unless_hung<T, L: Future<Output = Option<WorkDone>>>(
    call: impl Future<Output = Result<T, Status>>,
    silence: Duration,
    look: impl Fn() -> L,
) -> Result<T, Status> {
    let mut call = pin!(call);
    let (mut before, mut idle_looks) = (None, 0);
    loop {
        tokio::select! {
            outcome = &mut call => return outcome,
            () = sleep(silence) => {}
        }
        let Some(work) = look().await else {
            let words =
                format!("it hangs: nothing for {silence:?}, and no reply to a health check");
            return Err(Status::unavailable(words));
        };
        let is_idle = !work.is_computing && before == Some(work.steps);
        idle_looks = if is_idle { idle_looks + 1 } else { 0 };
        if idle_looks >= IDLE_LOOKS {
            let words = format!(
                "it makes no progress: no layer and no step for {:?}",
                silence * IDLE_LOOKS
            );
            return Err(Status::unavailable(words));
        }
        before = Some(work.steps);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::{pending, ready};

    use super::*;

    const SILENCE: Duration = Duration::from_millis(5);
    /// Duration, in silences, of a call that outlasts every test.
    const NEVER: u32 = 1_000_000;

    /// Outcome of a call that takes `silences` with a worker whose checks return `works`, the last one repeatedly; and
    /// the number of checks that it took.
    async fn fate(silences: u32, works: &[Option<WorkDone>]) -> (Result<(), Status>, usize) {
        let looks = Cell::new(0);
        let look = || {
            let now = looks.replace(looks.get() + 1);
            ready(works[now.min(works.len() - 1)])
        };
        let call = async {
            sleep(SILENCE * silences).await;
            Ok(())
        };
        let outcome = unless_hung(call, SILENCE, look).await;
        (outcome, looks.get())
    }

    fn work(steps: u64, is_computing: bool) -> Option<WorkDone> {
        Some(WorkDone {
            steps,
            is_computing,
        })
    }

    #[tokio::test]
    async fn a_prompt_may_wait_while_others_are_computed() {
        let busy: Vec<Option<WorkDone>> = (0..1000).map(|steps| work(steps, false)).collect();
        assert!(fate(100, &busy).await.0.is_ok());
    }

    #[tokio::test]
    async fn a_long_step_is_no_hang() {
        assert!(fate(100, &[work(3, true)]).await.0.is_ok());
    }

    #[tokio::test]
    async fn a_worker_that_says_nothing_is_left_at_once_and_one_that_does_nothing_later() {
        for works in [&[None][..], &[work(1, true), None]] {
            let (outcome, looks) = fate(NEVER, works).await;
            assert_eq!(outcome.unwrap_err().code(), tonic::Code::Unavailable);
            assert_eq!(looks, works.len());
        }
        let idle = [work(3, false), work(4, true), work(4, false)];
        let (outcome, looks) = fate(NEVER, &idle).await;
        let status = outcome.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unavailable);
        assert!(
            status.message().contains("it makes no progress"),
            "{status}"
        );
        assert_eq!(looks, 2 + IDLE_LOOKS as usize);
    }

    #[tokio::test]
    async fn a_call_that_fails_says_so_itself() {
        let call = ready(Err::<(), _>(Status::aborted("why")));
        let never = pending::<Option<WorkDone>>;
        let status = unless_hung(call, SILENCE, never).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Aborted);
    }
}
