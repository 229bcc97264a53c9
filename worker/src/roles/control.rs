//! Information that every worker provides about itself.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hearth_transport::v1;
use tonic::{Request, Response, Status, Streaming};

use super::group::Membership;
use super::rank::Worker;

/// Time between two looks at whether the worker is about to end, while it records.
const DRAIN_PERIOD: Duration = Duration::from_millis(100);

/// Implements `hearth.v1.Control` for one worker.
pub(super) struct ControlService {
    worker: Arc<Worker>,
}

impl ControlService {
    pub(super) fn new(worker: Arc<Worker>) -> Self {
        Self { worker }
    }
}

#[tonic::async_trait]
impl v1::control_server::Control for ControlService {
    type TraceStream = Pin<Box<dyn Stream<Item = Result<v1::TraceResponse, Status>> + Send>>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        let worker = &self.worker;
        Ok(Response::new(v1::DescribeResponse {
            role: worker.role.as_str().to_owned(),
            name: worker.name.clone(),
            model_fingerprint: worker.model_fingerprint.clone(),
            kv_layout: worker.kv_layout.clone(),
            numerics: worker.numerics.clone(),
            plan_generation: worker.plan_generation,
            max_batch: worker.max_batch,
            context_length: worker.context_length,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            placement: Some(worker.binding.placement()),
            group: worker.group(),
            waits_for: worker.waits_for().unwrap_or_default(),
            members: worker
                .membership
                .as_ref()
                .map_or_else(Vec::new, Membership::members),
        }))
    }

    async fn stats(
        &self,
        _: Request<v1::StatsRequest>,
    ) -> Result<Response<v1::StatsResponse>, Status> {
        let stats = self.worker.engine.stats();
        Ok(Response::new(v1::StatsResponse {
            running: stats.running as u32,
            waiting: stats.waiting as u32,
            kv_blocks_total: stats.kv_blocks_total as u32,
            kv_blocks_used: stats.kv_blocks_used as u32,
            prefix_hit_tokens: stats.prefix_hit_tokens,
            prefix_query_tokens: stats.prefix_query_tokens,
            prompt_tokens: stats.prompt_tokens,
            generated_tokens: stats.generated_tokens,
            weight_bytes_read: stats.weight_bytes_read,
            kv_bytes_moved: stats.kv_bytes_moved,
            peer_kv_bytes: stats.sent_kv.own_bytes,
            peer_kv_passed_on_bytes: stats.sent_kv.passed_on_bytes,
            steps: stats.steps,
            step_seconds: stats.step_seconds,
            preemptions: stats.preemptions,
            resident_bytes: stats.resident_bytes,
            draining: stats.draining,
            expert_copy_bytes: stats.streamed.copied_bytes,
            expert_copy_seconds: stats.streamed.copy_ns as f64 / 1e9,
            expert_wait_seconds: stats.streamed.wait_ns as f64 / 1e9,
            device_peak_bytes: stats.device.peak_bytes,
            device_budget_bytes: stats.device.budget_bytes,
            layer_seconds: self
                .worker
                .engine
                .at_layer_for()
                .map_or(0.0, |time| time.as_secs_f64()),
        }))
    }

    async fn trace(
        &self,
        request: Request<Streaming<v1::TraceRequest>>,
    ) -> Result<Response<Self::TraceStream>, Status> {
        let mut asked = request.into_inner();
        let first = asked.message().await?.unwrap_or_default();
        let (recording, turn) = self.worker.traces.begin(first.seconds)?;
        let time = Duration::from_secs(first.seconds.into());
        let worker = Arc::clone(&self.worker);
        // Dropping the stream ends the recording.
        let stream = async_stream::stream! {
            tokio::select! {
                () = tokio::time::sleep(time) => {}
                () = ended(&mut asked) => {}
                () = drained(&worker) => {}
            }
            // It may wait for a pass of the device.
            let ending = tokio::task::spawn_blocking(move || worker.traces.end(recording));
            let Ok((pieces, dropped)) = ending.await else {
                yield Err(Status::internal("the trace cannot be ended"));
                return;
            };
            for events_json in pieces {
                yield Ok(v1::TraceResponse { events_json, dropped: 0 });
            }
            yield Ok(v1::TraceResponse { events_json: Vec::new(), dropped });
            drop(turn);
        };
        Ok(Response::new(Box::pin(stream)))
    }
}

/// Returns when the caller sends no more.
async fn ended(asked: &mut Streaming<v1::TraceRequest>) {
    while let Ok(Some(_)) = asked.message().await {}
}

/// Returns when the worker is about to end: its end waits for calls that are not over.
async fn drained(worker: &Worker) {
    while !worker.engine.stats().draining {
        tokio::time::sleep(DRAIN_PERIOD).await;
    }
}
