//! Experts on another backend than the rest of the model: the host's CPUs, beside a device (OSDI '26, section 3.3).
//!
//! The device runs attention, dense blocks, routers, shared experts and the head. The host takes the normalised rows and the
//! router's choice, and returns the sum of the experts' outputs, while the device goes on with the shared experts. The
//! thread of the model computes it where it would only wait; with two flights a thread of its own does, while the device
//! goes on with the other one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_kernels::trace::{Trace, TraceEvent, TraceLane};
use hearth_kernels::{Backend, KernelError};

use super::chosen::ChosenExperts;
use super::hot::{self, OnDevice, Split};
use super::{Check, Experts, PendingExperts, RoutedLayer};
use crate::peers::GroupPass;
use crate::residency::ExpertCache;
use crate::{ModelError, Residency, ResidencyError, ResidencyStats};

/// Longest time between two looks at whether a pass is still wanted.
const CHECK_PERIOD: Duration = Duration::from_millis(20);
/// Share of the newest measurement in the time that an expert takes.
const NEWEST_SHARE: f64 = 0.1;

/// Experts that a thread computes on a backend of its own.
pub(crate) struct HostExperts<B: Backend> {
    device: Arc<B>,
    host: Host,
    /// Some experts are on the device too.
    cache: Option<Arc<dyn ExpertCache<B>>>,
    stats: Box<dyn Fn() -> ResidencyStats + Send + Sync>,
}

impl<B: Backend> HostExperts<B> {
    /// Starts the thread that computes experts with `host`, whose weights `residency` provides; `trace` receives what it
    /// does.
    ///
    /// # Errors
    /// [`ResidencyError::System`] if no thread can be started.
    pub(crate) fn start<H: Backend>(
        device: Arc<B>,
        host: Arc<H>,
        residency: Arc<dyn Residency<H>>,
        cache: Option<Arc<dyn ExpertCache<B>>>,
        trace: Option<Arc<Trace>>,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            device,
            host: Host::start(host, Arc::clone(&residency), trace)?,
            cache,
            stats: Box::new(move || residency.stats()),
        })
    }
}

impl<B: Backend> Experts<B> for HostExperts<B> {
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
        _group: Option<&Arc<GroupPass>>,
    ) -> Result<PendingExperts<B>, ModelError> {
        let (routing, rows) = self.device.routing_and_rows(chosen, x)?;
        let mut chosen = ChosenExperts::new(layer, &routing);
        let (count, hidden) = self.device.shape(x);
        if let Some(cache) = self
            .cache
            .as_ref()
            .filter(|_| count <= hot::CACHED_STEP_ROWS)
            && let Some(on_device) = OnDevice::take(&**cache, &mut chosen, self.host.expert_ms())
        {
            let places = (&self.device, cache);
            let on_host = (&self.host, chosen);
            let split = Split::begin(places, routing, on_device, on_host, (x, rows))?;
            return Ok(PendingExperts::new(|x, check| split.finish(x, check)));
        }
        let output = self.host.begin(chosen, None, rows, hidden)?;
        let device = Arc::clone(&self.device);
        Ok(PendingExperts::new(move |_, check| {
            // What was queued since runs meanwhile.
            device.submit()?;
            Ok(device.upload(count, hidden, &output.wait(check)?)?)
        }))
    }

    fn keep_host_waiting(&self) -> bool {
        true
    }

    fn run_beside(&mut self) {
        self.host.is_beside = true;
    }

    fn numerics(&self, of_device: &str) -> Option<String> {
        let of_host = &self.host.numerics;
        (of_host != of_device).then(|| match self.cache {
            // Either of them computes an expert, as it happens to be cached.
            Some(_) => format!("{of_host} or the device"),
            None => of_host.clone(),
        })
    }

    fn stats(&self) -> ResidencyStats {
        match &self.cache {
            Some(cache) => (self.stats)() + cache.stats(),
            None => (self.stats)(),
        }
    }
}

/// What computes.
pub(super) struct Host {
    run: Arc<Run>,
    /// Whether the thread computes, instead of the one that waits.
    is_beside: bool,
    /// `None` once the thread is to end.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
    numerics: String,
    /// Microseconds that an expert takes, a running mean; 0: not measured yet.
    expert_us: Arc<AtomicU64>,
}

/// A layer's experts for some rows.
pub(super) struct Work {
    chosen: ChosenExperts,
    /// Rows of `x` that the experts read; `None`: all, in order.
    inputs: Option<Vec<u32>>,
    /// Normalised rows `[rows, hidden]`.
    x: Vec<f32>,
    hidden: usize,
}

/// Computes a job on the calling thread.
type Run = dyn Fn(&Work, Check<'_>) -> Result<Vec<f32>, ModelError> + Send + Sync;

/// Work for the thread.
struct Job {
    work: Work,
    is_given_up: Arc<AtomicBool>,
    reply: SyncSender<Result<Vec<f32>, ModelError>>,
}

/// The output of some work.
pub(super) enum HostOutput {
    /// The one who waits computes it.
    Here { work: Work, run: Arc<Run> },
    /// The thread does.
    Beside(Awaited),
}

/// Output of the thread; dropped, nobody wants it any more.
pub(super) struct Awaited {
    output: Receiver<Result<Vec<f32>, ModelError>>,
    is_given_up: Arc<AtomicBool>,
}

impl HostOutput {
    /// Whether the one who waits computes it.
    pub(super) fn is_here(&self) -> bool {
        matches!(self, Self::Here { .. })
    }

    /// Waits for the output `[rows, hidden]`; `check` is called meanwhile, and its error ends the wait.
    pub(super) fn wait(&self, check: Check<'_>) -> Result<Vec<f32>, ModelError> {
        let awaited = match self {
            Self::Here { work, run } => {
                // A panic ends the pass, as one of the thread does, and not the engine.
                let ran = catch_unwind(AssertUnwindSafe(|| run(work, check)));
                return ran.unwrap_or(Err(ModelError::ExpertsEnded));
            }
            Self::Beside(awaited) => awaited,
        };
        loop {
            match awaited.output.recv_timeout(CHECK_PERIOD) {
                Ok(output) => return output,
                Err(RecvTimeoutError::Timeout) => check()?,
                Err(RecvTimeoutError::Disconnected) => return Err(ModelError::ExpertsEnded),
            }
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        // Of no effect on a job that is done.
        self.is_given_up.store(true, Ordering::Relaxed);
    }
}

impl Host {
    fn start<H: Backend>(
        host: Arc<H>,
        residency: Arc<dyn Residency<H>>,
        trace: Option<Arc<Trace>>,
    ) -> Result<Self, ModelError> {
        let (jobs, inbox) = channel::<Job>();
        let numerics = host.numerics();
        let expert_us = Arc::new(AtomicU64::new(0));
        let run = running(host, residency, trace, Arc::clone(&expert_us));
        let of_thread = Arc::clone(&run);
        let thread = std::thread::Builder::new()
            .name("experts".to_owned())
            .spawn(move || {
                while let Ok(job) = inbox.recv() {
                    let mut check = || match job.is_given_up.load(Ordering::Relaxed) {
                        true => Err(ModelError::GivenUp),
                        false => Ok(()),
                    };
                    let output = check().and_then(|()| of_thread(&job.work, &mut check));
                    // Nobody waits for a pass that was given up.
                    let _ = job.reply.send(output);
                }
            })
            .map_err(|source| ResidencyError::System {
                what: "start the thread that computes experts".to_owned(),
                source,
                remedy: "raise the limit of processes (ulimit -u, or the Pod's pids limit)",
            })?;
        Ok(Self {
            run,
            is_beside: false,
            jobs: Mutex::new(Some(jobs)),
            thread: Some(thread),
            numerics,
            expert_us,
        })
    }

    /// Milliseconds that an expert takes; 0: not measured yet.
    fn expert_ms(&self) -> f64 {
        self.expert_us.load(Ordering::Relaxed) as f64 / 1e3
    }

    /// Begins to compute experts for the rows `x` `[rows, hidden]`, or those of them that `inputs` names.
    pub(super) fn begin(
        &self,
        chosen: ChosenExperts,
        inputs: Option<Vec<u32>>,
        x: Vec<f32>,
        hidden: usize,
    ) -> Result<HostOutput, ModelError> {
        let work = Work {
            chosen,
            inputs,
            x,
            hidden,
        };
        if !self.is_beside {
            let run = Arc::clone(&self.run);
            return Ok(HostOutput::Here { work, run });
        }
        let (reply, output) = sync_channel(1);
        let is_given_up = Arc::new(AtomicBool::new(false));
        let job = Job {
            work,
            is_given_up: Arc::clone(&is_given_up),
            reply,
        };
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let is_sent = jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        match is_sent {
            true => Ok(HostOutput::Beside(Awaited {
                output,
                is_given_up,
            })),
            false => Err(ModelError::ExpertsEnded),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let jobs = self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner);
        *jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by itself.
            let _ = thread.join();
        }
    }
}

/// Lets `host`, whose weights `residency` provides, compute on whatever thread calls; `trace` receives what it does, and
/// `expert_us` how long an expert takes.
fn running<H: Backend>(
    host: Arc<H>,
    residency: Arc<dyn Residency<H>>,
    trace: Option<Arc<Trace>>,
    expert_us: Arc<AtomicU64>,
) -> Arc<Run> {
    let owner = Mutex::new(None);
    Arc::new(move |work: &Work, check: Check<'_>| {
        let this = Some(std::thread::current().id());
        let mut owner = owner.lock().unwrap_or_else(PoisonError::into_inner);
        if *owner != this {
            host.bind_thread()?;
            *owner = this;
        }
        let began = Instant::now();
        let output = work.run(&*host, &*residency, &expert_us, check);
        if let Some(trace) = trace.as_ref().filter(|trace| trace.is_on()) {
            work.record(trace, began);
        }
        output
    })
}

impl Work {
    /// Records that it ran from `began` until now.
    fn record(&self, trace: &Trace, began: Instant) {
        let (layer, rows) = (self.chosen.layer(), self.rows());
        let experts = self.chosen.ids().len();
        trace.record(TraceEvent {
            lane: TraceLane::HostExperts,
            name: format!("layer {layer}: rows {rows}, experts {experts}").into(),
            begin_ns: trace.ns_at(began),
            end_ns: trace.ns_at(Instant::now()),
        });
    }

    /// Rows that the experts were given.
    fn rows(&self) -> usize {
        self.x.len().checked_div(self.hidden).unwrap_or(0)
    }

    fn run<H: Backend>(
        &self,
        host: &H,
        residency: &dyn Residency<H>,
        expert_us: &AtomicU64,
        check: Check<'_>,
    ) -> Result<Vec<f32>, ModelError> {
        let started = Instant::now();
        let rows = self.rows();
        residency.announce(self.chosen.layer(), self.chosen.ids());
        let mut x = host.upload(rows, self.hidden, &self.x)?;
        if let Some(inputs) = &self.inputs {
            x = host.rows(&x, inputs)?;
        }
        let total = self.chosen.run(host, residency, &x, check)?;
        let output: Result<Vec<f32>, KernelError> = host.download(&total);
        if rows > hot::CACHED_STEP_ROWS {
            return Ok(output?);
        }
        let each_us = started.elapsed().as_secs_f64() * 1e6 / self.chosen.ids().len().max(1) as f64;
        let mean_us = match expert_us.load(Ordering::Relaxed) {
            0 => each_us,
            mean => (1.0 - NEWEST_SHARE) * mean as f64 + NEWEST_SHARE * each_us,
        };
        expert_us.store(mean_us.max(1.0) as u64, Ordering::Relaxed);
        Ok(output?)
    }
}
