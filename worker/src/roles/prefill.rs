//! The prefill worker's service: streams the KV of a prompt layer by layer, while later layers are still computed.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use hearth_engine::{PrefillEvent, PrefillInput};
use hearth_transport::{deadline, kv, v1};
use tokio::sync::mpsc;
use tonic::{Request, Response, Status};

use super::rank::Worker;
use crate::convert;

/// Implements `hearth.v1.Prefill` on the engine.
pub(super) struct PrefillService {
    worker: Arc<Worker>,
}

impl PrefillService {
    pub(super) fn new(worker: Arc<Worker>) -> Self {
        Self { worker }
    }
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for PrefillService {
    type PrefillStream = Pin<Box<dyn Stream<Item = Result<v1::PrefillEvent, Status>> + Send>>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let time_left = deadline::remaining(request.metadata());
        let request = request.into_inner();
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
        let handle = self
            .worker
            .engine
            .prefill(input, sink)
            .map_err(|error| convert::status(&error))?;
        let stream = async_stream::stream! {
            while let Some(event) = receiver.recv().await {
                match event {
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
                        yield Err(convert::status(&error));
                        break;
                    }
                }
            }
            // Dropping the stream cancels the request.
            drop(handle);
        };
        Ok(Response::new(Box::pin(deadline::limited(
            stream, time_left, None,
        ))))
    }
}
