//! The prefill worker's service: streams the KV of a prompt layer by layer, while later layers are still computed.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use hearth_engine::{PrefillEvent, PrefillInput};
use hearth_transport::spans::Tracer;
use hearth_transport::{CallContext, deadline, kv, v1};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::rank::Worker;
use super::spans::{PromptSpans, request_log};
use crate::convert;

/// Implements `hearth.v1.Prefill` on the engine.
pub(super) struct PrefillService {
    worker: Arc<Worker>,
    tracer: Tracer,
}

impl PrefillService {
    pub(super) fn new(worker: Arc<Worker>, tracer: Tracer) -> Self {
        Self { worker, tracer }
    }
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for PrefillService {
    type PrefillStream = Pin<Box<dyn Stream<Item = Result<v1::PrefillEvent, Status>> + Send>>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let context = CallContext::of(request.metadata());
        let time_left = deadline::remaining(request.metadata());
        let request = request.into_inner();
        let span = self
            .tracer
            .answer("hearth.v1.Prefill/Prefill", context.trace.as_ref());
        let log = request_log(&request.request_id, &span);
        let mut spans = PromptSpans::begin(span, &request);
        self.worker.check_fingerprint(&request.model_fingerprint)?;
        self.worker.check_numerics(&request.numerics)?;
        if request.kv_layout != self.worker.kv_layout {
            return Err(Status::failed_precondition(format!(
                "KV layouts differ: the caller has {}, this worker {}; both must run the same plan",
                request.kv_layout, self.worker.kv_layout
            )));
        }
        let input = PrefillInput {
            request_id: request.request_id,
            tokens: request.tokens,
            first_token: request.first_token as usize,
            alone: request.alone,
        };
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let sink = Box::new(move |event| sender.send(event).is_ok());
        let handle = log
            .in_scope(|| self.worker.engine.prefill(input, sink))
            .map_err(|error| convert::status(&error))?;
        let stream = async_stream::stream! {
            while let Some(event) = receiver.recv().await {
                if let Some(spans) = &mut spans {
                    spans.note(&event);
                }
                match event {
                    PrefillEvent::Started { .. } => {}
                    PrefillEvent::Kv { layer, first_token, tokens, data } => {
                        for piece in kv::pieces(layer as u32, first_token as u32, tokens as u32, data) {
                            yield Ok(v1::PrefillEvent { event: Some(v1::prefill_event::Event::Kv(piece)) });
                        }
                    }
                    PrefillEvent::Done { logits, cached_tokens } => {
                        let logits: Bytes = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
                        let done = v1::PrefillDone { logits, cached_tokens: cached_tokens as u32 };
                        yield Ok(v1::PrefillEvent { event: Some(v1::prefill_event::Event::Done(done)) });
                    }
                    PrefillEvent::Failed(error) => {
                        log.in_scope(|| tracing::info!(%error, "the prompt is not read to its end"));
                        yield Err(convert::status(&error));
                        break;
                    }
                }
            }
            // Dropping the stream cancels the request.
            drop((handle, spans));
        };
        Ok(Response::new(Box::pin(deadline::limited(
            stream, time_left, None,
        ))))
    }
}
