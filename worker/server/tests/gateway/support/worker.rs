//! A worker without a model.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use hearth_server::Endpoint;
use hearth_transport::tonic::service::Routes;
use hearth_transport::tonic::{Request, Response, Status, Streaming};
use hearth_transport::v1::control_server::Control;
use hearth_transport::v1::decode_server::Decode;
use hearth_transport::v1::{
    DescribeRequest, DescribeResponse, FinishReason, Finished, GenerateEvent, GenerateRequest,
    MemberPlacement, NumaMemory, Placement, Started, StatsRequest, StatsResponse, Token,
    TopLogprob, TraceRequest, TraceResponse, generate_event::Event,
};
use hearth_transport::{CallContext, Listener, ServerOptions, server};
use tokio::runtime::Runtime;

use super::model::{self, CONTEXT, END};

/// Failure of the next call.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// The stream ends with this status after this many tokens.
    Status(usize, Status),
    /// The stream ends silently after this many tokens.
    Cut(usize),
    /// An index is skipped after this many tokens.
    Gap(usize),
    /// Nothing more arrives after this many tokens.
    Hang(usize),
    /// All tokens arrive, and then the stream ends without its last event.
    NoEnd,
}

/// Properties and behaviour of a worker, shared by its lives.
pub(crate) struct Behaviour {
    pub(crate) description: Mutex<DescribeResponse>,
    pub(crate) stats: Mutex<StatsResponse>,
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    /// Every call, with its context.
    pub(crate) calls: Mutex<Vec<(GenerateRequest, CallContext)>>,
    /// Time between tokens.
    pub(crate) pace: Mutex<Duration>,
    /// Number of tokens before the end in answers that are not from `say:`.
    pub(crate) length: AtomicUsize,
    pub(crate) cached_tokens: AtomicUsize,
    /// Streams that are open.
    pub(crate) open: AtomicUsize,
    /// Streams that were dropped before their end.
    pub(crate) cancelled: AtomicUsize,
    /// Whether new calls are refused, probes included.
    pub(crate) is_closed: AtomicBool,
    /// Whether probes stay unanswered.
    pub(crate) is_deaf: AtomicBool,
}

impl Behaviour {
    pub(crate) fn last_call(&self) -> GenerateRequest {
        self.calls.lock().unwrap().last().unwrap().0.clone()
    }

    pub(crate) fn fault(&self, fault: Fault) {
        self.faults.lock().unwrap().push_back(fault);
    }
}

/// A worker with its own port and its own runtime, so that it can die at once.
pub(crate) struct FakeWorker {
    pub(crate) behaviour: Arc<Behaviour>,
    endpoint: Endpoint,
    life: Mutex<Option<Runtime>>,
}

impl FakeWorker {
    pub(crate) fn start() -> Self {
        let worker = Self::dormant();
        worker.revive();
        worker
    }

    /// Creates a worker whose port is known and that does not run yet.
    pub(crate) fn dormant() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let behaviour = Behaviour {
            description: Mutex::new(DescribeResponse {
                role: "decode".into(),
                name: format!("fake-{port}"),
                model_fingerprint: "weights-1".into(),
                kv_layout: "layout-1".into(),
                numerics: "numerics-1".into(),
                plan_generation: 3,
                max_batch: 8,
                context_length: CONTEXT as u32,
                version: String::new(),
                group: String::new(),
                waits_for: String::new(),
                members: vec![MemberPlacement {
                    name: "stage-0".into(),
                    endpoint: "10.0.0.9:9400".into(),
                    placement: Some(Placement {
                        cpus: "5".into(),
                        ..Placement::default()
                    }),
                }],
                placement: Some(Placement {
                    cpus: "2-3".into(),
                    numa_nodes: "0".into(),
                    threads: 2,
                    gpu_uuid: String::new(),
                    memory_numa_nodes: "0".into(),
                    memory: vec![NumaMemory {
                        numa_node: 0,
                        weight_bytes: 700,
                        own_bytes: 50,
                    }],
                    shortfalls: vec!["1 of 2 \"threads\" compute".into()],
                }),
            }),
            stats: Mutex::new(StatsResponse {
                kv_blocks_total: 100,
                kv_blocks_used: 25,
                weight_bytes_read: 4096,
                ..StatsResponse::default()
            }),
            faults: Mutex::default(),
            calls: Mutex::default(),
            pace: Mutex::new(Duration::ZERO),
            length: AtomicUsize::new(40),
            cached_tokens: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            cancelled: AtomicUsize::new(0),
            is_closed: AtomicBool::new(false),
            is_deaf: AtomicBool::new(false),
        };
        Self {
            behaviour: Arc::new(behaviour),
            endpoint: format!("127.0.0.1:{port}").parse().unwrap(),
            life: Mutex::new(None),
        }
    }

    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint.clone()
    }

    /// Ends the worker as `kill -9` would: its sockets close without a message.
    pub(crate) fn kill(&self) {
        if let Some(runtime) = self.life.lock().unwrap().take() {
            runtime.shutdown_background();
        }
    }

    /// Starts the worker, always on the same port.
    pub(crate) fn revive(&self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let service = Service(self.behaviour.clone());
        let routes =
            Routes::new(server::decode(service.clone())).add_service(server::control(service));
        let address = self.endpoint.to_string();
        let listener = {
            let _guard = runtime.enter();
            let mut tries = 0;
            loop {
                match Listener::bind(&address) {
                    Ok(listener) => break listener,
                    Err(_) if tries < 100 => std::thread::sleep(Duration::from_millis(20)),
                    Err(error) => panic!("{error}"),
                }
                tries += 1;
            }
        };
        runtime.spawn(async move {
            hearth_transport::serve(
                listener,
                routes,
                &ServerOptions::default(),
                std::future::pending(),
            )
            .await
        });
        *self.life.lock().unwrap() = Some(runtime);
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns token `index` of the answer: the text after the last `say:` and then the end, else letters by hash.
pub(crate) fn token_at(request: &GenerateRequest, index: usize, length: usize) -> u32 {
    let prompt = model::decode(&request.prompt_tokens);
    let seed = request
        .sampling
        .as_ref()
        .map_or(0, |sampling| sampling.seed);
    if let Some((_, said)) = prompt.rsplit_once("say:") {
        let said = said.strip_suffix("<|assistant|>").unwrap_or(said);
        return model::encode(said).get(index).copied().unwrap_or(END);
    }
    if index >= length {
        return END;
    }
    let mut hasher = DefaultHasher::new();
    let prompt = (&request.prompt_tokens, &request.prompt_numerics);
    (prompt, seed, index).hash(&mut hasher);
    u32::from(b"abcdefghijklmnopqrstuvwxyz ".as_slice()[(hasher.finish() % 27) as usize])
}

#[derive(Clone)]
struct Service(Arc<Behaviour>);

/// Counts an open stream, and whether it ended by itself.
struct OpenStream {
    behaviour: Arc<Behaviour>,
    has_ended: bool,
}

impl OpenStream {
    fn end(&mut self) {
        self.has_ended = true;
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.behaviour.open.fetch_sub(1, Ordering::SeqCst);
        if !self.has_ended {
            self.behaviour.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[hearth_transport::tonic::async_trait]
impl Decode for Service {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateEvent, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let context = CallContext::of(request.metadata());
        let request = request.into_inner();
        let behaviour = self.0.clone();
        behaviour
            .calls
            .lock()
            .unwrap()
            .push((request.clone(), context));
        let fault = behaviour.faults.lock().unwrap().pop_front();
        if let Some(Fault::Status(0, status)) = fault {
            return Err(status);
        }
        behaviour.open.fetch_add(1, Ordering::SeqCst);
        let mut guard = OpenStream {
            behaviour: behaviour.clone(),
            has_ended: false,
        };
        let stream = async_stream::stream! {
            let cached = behaviour.cached_tokens.load(Ordering::SeqCst) as u32;
            yield Ok(event(Event::Started(Started { cached_tokens: cached })));
            let first = request.generated_tokens.len();
            let length = behaviour.length.load(Ordering::SeqCst);
            let mut reason = FinishReason::Length;
            for index in first..request.max_tokens as usize {
                let sent = index - first;
                match &fault {
                    Some(Fault::Status(after, status)) if sent == *after => {
                        guard.end();
                        yield Err(status.clone());
                        return;
                    }
                    Some(Fault::Cut(after)) if sent == *after => {
                        guard.end();
                        return;
                    }
                    Some(Fault::Hang(after)) if sent == *after => std::future::pending::<()>().await,
                    _ => {}
                }
                let pace = *behaviour.pace.lock().unwrap();
                if pace > Duration::ZERO {
                    tokio::time::sleep(pace).await;
                }
                let id = token_at(&request, index, length);
                let skip = usize::from(matches!(fault, Some(Fault::Gap(after)) if sent >= after));
                let top = (0..request.top_logprobs)
                    .map(|i| TopLogprob { id: (id + i) % 256, logprob: -0.5 - i as f32 })
                    .collect();
                yield Ok(event(Event::Token(Token {
                    id,
                    index: (index + skip) as u32,
                    logprob: if request.logprobs { -0.5 } else { 0.0 },
                    top_logprobs: top,
                })));
                if request.stop_token_ids.contains(&id) {
                    reason = FinishReason::Stop;
                    break;
                }
            }
            guard.end();
            if !matches!(fault, Some(Fault::NoEnd)) {
                yield Ok(event(Event::Finished(Finished { reason: reason.into() })));
            }
        };
        Ok(Response::new(Box::pin(stream)))
    }
}

fn event(event: Event) -> GenerateEvent {
    GenerateEvent { event: Some(event) }
}

#[hearth_transport::tonic::async_trait]
impl Control for Service {
    async fn describe(
        &self,
        _: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        if self.0.is_deaf.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        if self.0.is_closed.load(Ordering::SeqCst) {
            return Err(Status::unavailable("ending"));
        }
        Ok(Response::new(self.0.description.lock().unwrap().clone()))
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Result<Response<StatsResponse>, Status> {
        Ok(Response::new(*self.0.stats.lock().unwrap()))
    }

    type TraceStream = Pin<Box<dyn Stream<Item = Result<TraceResponse, Status>> + Send>>;

    async fn trace(
        &self,
        _: Request<Streaming<TraceRequest>>,
    ) -> Result<Response<Self::TraceStream>, Status> {
        Err(Status::unimplemented("these workers record nothing"))
    }
}
