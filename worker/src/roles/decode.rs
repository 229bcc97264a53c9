//! The decode worker's service: a stream of tokens, its prompt computed here or fetched from a prefill worker.

use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use hearth_engine::{Engine, EngineError, GenerateEvent, ImportFailure, RequestId};
use hearth_transport::{CallContext, Clients, Endpoint, deadline, v1};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

use super::rank::Worker;
use crate::convert;

/// `hearth.v1.Decode` over the engine.
pub(super) struct DecodeService {
    worker: Arc<Worker>,
    prefill: Clients,
}

impl DecodeService {
    pub(super) fn new(worker: Arc<Worker>, prefill: Clients) -> Self {
        Self { worker, prefill }
    }

    /// What to ask of the prefill worker, where the request names one.
    fn remote(
        &self,
        request: &v1::GenerateRequest,
        context: CallContext,
    ) -> Result<Option<RemotePrefill>, Status> {
        if request.prefill_endpoint.is_empty() {
            return Ok(None);
        }
        let endpoint: Endpoint = request
            .prefill_endpoint
            .parse()
            .map_err(|error| Status::invalid_argument(format!("prefill_endpoint: {error}")))?;
        let mut tokens = request.prompt_tokens.clone();
        tokens.extend(&request.generated_tokens);
        Ok(Some(RemotePrefill {
            endpoint,
            request: v1::PrefillRequest {
                request_id: request.request_id.clone(),
                tokens,
                first_token: 0,
                model_fingerprint: self.worker.model_fingerprint.clone(),
                kv_layout: self.worker.kv_layout.clone(),
            },
            context,
            clients: self.prefill.clone(),
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
        self.worker.check_fingerprint(&request.model_fingerprint)?;
        let mut remote = self.remote(&request, context)?;
        let input = convert::generate_input(request)?;
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let sink = Box::new(move |event| sender.send(event).is_ok());
        let handle = self
            .worker
            .engine
            .generate(input, sink)
            .map_err(|error| convert::status(&error))?;

        // The stream owns the request and its import: dropping it cancels both.
        let stream = async_stream::stream! {
            let mut import = None;
            while let Some(event) = receiver.recv().await {
                if let GenerateEvent::NeedsKv { first_token } = event
                    && let Some(remote) = remote.take()
                {
                    let task = tokio::spawn(remote.import(handle.id(), first_token));
                    import = Some(AbortOnDropHandle::new(task));
                    continue;
                }
                match convert::generate_event(event) {
                    Ok(Some(event)) => yield Ok(event),
                    Ok(None) => {}
                    Err(status) => {
                        yield Err(status);
                        break;
                    }
                }
            }
            drop((import, handle));
        };
        Ok(Response::new(Box::pin(deadline::limited(
            stream, time_left, None,
        ))))
    }
}

/// A prompt to be computed by a prefill worker.
struct RemotePrefill {
    endpoint: Endpoint,
    request: v1::PrefillRequest,
    context: CallContext,
    clients: Clients,
    engine: Engine,
}

impl RemotePrefill {
    /// Fetches the KV from `first_token` on into the engine. A prefill worker that is lost ends the request
    /// with a retriable error: the gateway knows the other workers and sends it again.
    async fn import(mut self, id: RequestId, first_token: usize) {
        self.request.first_token = first_token as u32;
        let engine = self.engine.clone();
        let endpoint = self.endpoint.clone();
        if let Err(status) = self.fetch(id).await {
            tracing::warn!(%endpoint, code = ?status.code(), message = status.message(), "prefill did not deliver");
            let detail = format!("prefill worker {endpoint}: {}", status.message());
            engine.import_failed(id, ImportFailure::Fail(EngineError::Prefill { detail }));
        }
    }

    async fn fetch(self, id: RequestId) -> Result<(), Status> {
        let worker = self
            .clients
            .worker(&self.endpoint)
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let request = self.context.request(self.request);
        let mut events = worker.prefill().prefill(request).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.event {
                Some(v1::prefill_event::Event::Kv(kv)) => {
                    self.engine
                        .import_kv(id, kv.layer as usize, kv.first_token as usize, kv.data);
                }
                Some(v1::prefill_event::Event::Done(done)) => {
                    let (values, rest) = done.logits.as_chunks::<4>();
                    if !rest.is_empty() {
                        return Err(Status::internal("logits are no whole number of f32"));
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
