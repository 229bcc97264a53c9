//! A worker that counts tokens instead of computing them.

#[allow(dead_code)] // not every test file uses it
pub(crate) mod certificates;

use std::{pin::Pin, time::Duration};

use futures::Stream;
use hearth_transport::{
    CallContext, server,
    tonic::{Request, Response, Status, service::Routes},
    v1::{
        Finished, GenerateEvent, GenerateRequest, KvLayer, PrefillDone, PrefillEvent,
        PrefillRequest, Started, Token, decode_server::Decode, generate_event, prefill_event,
        prefill_server::Prefill,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Number of tokens that requests a stream that stays silent after its start.
#[allow(dead_code)] // not every test file uses it
pub(crate) const SILENT: u32 = u32::MAX;

/// Sends `max_tokens` tokens, one per millisecond; reports each request id, and each stream that was dropped.
pub(crate) struct Counting {
    /// Events: `begin ID`, `gone ID`.
    pub(crate) log: mpsc::UnboundedSender<String>,
}

#[tonic::async_trait]
impl Decode for Counting {
    type GenerateStream = Events<GenerateEvent>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let context = CallContext::of(request.metadata());
        let id = context.request_id.unwrap_or_default();
        let log = self.log.clone();
        let message = request.into_inner();
        if message.max_tokens == 0 {
            return Err(Status::invalid_argument(
                "max_tokens is 0: ask for at least 1",
            ));
        }
        let (tx, rx) = mpsc::channel(1);
        let _ = log.send(format!("begin {id}"));
        tokio::spawn(async move {
            let wrap = |event| Ok(GenerateEvent { event: Some(event) });
            let started = generate_event::Event::Started(Started { cached_tokens: 0 });
            let tokens = (0..message.max_tokens).map(|index| {
                generate_event::Event::Token(Token {
                    id: index,
                    index,
                    ..Token::default()
                })
            });
            let finished = generate_event::Event::Finished(Finished { reason: 1 });
            let events = std::iter::once(started).chain(tokens).chain([finished]);
            for event in events {
                if tx.send(wrap(event)).await.is_err() {
                    let _ = log.send(format!("gone {id}"));
                    return;
                }
                if message.max_tokens == SILENT {
                    tx.closed().await;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }
}

#[tonic::async_trait]
impl Prefill for Counting {
    type PrefillStream = Events<PrefillEvent>;

    /// Sends `tokens[0]` messages of KV, 4 MiB each, then 8 MiB of logits.
    async fn prefill(
        &self,
        request: Request<PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let layers = request.into_inner().tokens.first().copied().unwrap_or(0);
        let kv = (0..layers).map(|layer| {
            prefill_event::Event::Kv(KvLayer {
                layer,
                first_token: 0,
                tokens: 1,
                data: vec![layer as u8; 4 << 20].into(),
            })
        });
        let done = prefill_event::Event::Done(PrefillDone {
            logits: vec![0; 8 << 20].into(),
            cached_tokens: 0,
        });
        let events: Vec<_> = kv
            .chain([done])
            .map(|event| Ok(PrefillEvent { event: Some(event) }))
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(events))))
    }
}

/// Returns its services and its log.
pub(crate) fn counting() -> (Routes, mpsc::UnboundedReceiver<String>) {
    let (log, seen) = mpsc::unbounded_channel();
    let routes = Routes::new(server::decode(Counting { log: log.clone() }))
        .add_service(server::prefill(Counting { log }));
    (routes, seen)
}

/// Creates a request for `max_tokens` tokens.
#[allow(dead_code)] // not every test file uses it
pub(crate) fn ask(max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt_tokens: vec![1],
        max_tokens,
        ..GenerateRequest::default()
    }
}
