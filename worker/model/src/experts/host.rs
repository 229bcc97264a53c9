//! Experts on another backend than the rest of the model: the host's CPUs, beside a device (OSDI '26, section 3.3).
//!
//! The device runs attention, dense blocks, routers, shared experts and the head. A thread owns the host's backend: it
//! takes the normalised rows and the router's choice, and returns the sum of the experts' outputs, while the device goes
//! on with the shared experts or with another flight. A layer takes one round trip.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_kernels::{Backend, KernelError, Routing};

use super::chosen::ChosenExperts;
use super::{Experts, PendingExperts, RoutedLayer};
use crate::{ModelError, Residency, ResidencyError, ResidencyStats};

/// Longest time between two looks at whether a pass is still wanted.
const CHECK_PERIOD: Duration = Duration::from_millis(20);

/// Experts that a thread computes on a backend of its own.
pub(crate) struct HostExperts<B: Backend> {
    device: Arc<B>,
    /// `None` once the thread is to end.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Option<JoinHandle<()>>,
    numerics: String,
    stats: Box<dyn Fn() -> ResidencyStats + Send + Sync>,
    begin_pass: Box<dyn Fn(usize) + Send + Sync>,
}

/// A layer's experts for some rows.
struct Job {
    layer: RoutedLayer,
    routing: Routing,
    /// Normalised rows `[rows, hidden]`.
    x: Vec<f32>,
    hidden: usize,
    is_given_up: Arc<AtomicBool>,
    reply: SyncSender<Result<Vec<f32>, ModelError>>,
}

impl<B: Backend> HostExperts<B> {
    /// Starts the thread that computes experts with `host`, whose weights `residency` provides.
    ///
    /// # Errors
    /// [`ResidencyError::System`] if no thread can be started; [`ModelError::Kernel`] if it cannot be bound.
    pub(crate) fn start<H: Backend>(
        device: Arc<B>,
        host: Arc<H>,
        residency: Arc<dyn Residency<H>>,
    ) -> Result<Self, ModelError> {
        let (jobs, inbox) = channel();
        let (bound, is_bound) = sync_channel(1);
        let numerics = host.numerics();
        let of_thread = Arc::clone(&residency);
        let thread = std::thread::Builder::new()
            .name("experts".to_owned())
            .spawn(move || {
                // Nobody waits for a thread whose start was given up.
                let _ = bound.send(host.bind_thread());
                drop(bound);
                serve(&*host, &*of_thread, &inbox);
            })
            .map_err(|source| ResidencyError::System {
                what: "start the thread that computes experts".to_owned(),
                source,
                remedy: "raise the limit of processes (ulimit -u, or the Pod's pids limit)",
            })?;
        match is_bound.recv() {
            Ok(result) => result?,
            Err(_) => return Err(ModelError::ExpertsEnded),
        }
        let of_pass = Arc::clone(&residency);
        Ok(Self {
            device,
            jobs: Mutex::new(Some(jobs)),
            thread: Some(thread),
            numerics,
            stats: Box::new(move || residency.stats()),
            begin_pass: Box::new(move |rows| of_pass.begin_pass(rows)),
        })
    }

    fn send(&self, job: Job) -> Result<(), ModelError> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = jobs.as_ref().map(|jobs| jobs.send(job));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(_)) | None => Err(ModelError::ExpertsEnded),
        }
    }
}

impl<B: Backend> Drop for HostExperts<B> {
    fn drop(&mut self) {
        let jobs = self.jobs.get_mut().unwrap_or_else(PoisonError::into_inner);
        *jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by itself.
            let _ = thread.join();
        }
    }
}

impl<B: Backend> Experts<B> for HostExperts<B> {
    fn begin_pass(&self, rows: usize) {
        (self.begin_pass)(rows);
    }

    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
    ) -> Result<Box<dyn PendingExperts<B>>, ModelError> {
        let (routing, rows) = self.device.routing_and_rows(chosen, x)?;
        let (reply, output) = sync_channel(1);
        let is_given_up = Arc::new(AtomicBool::new(false));
        self.send(Job {
            layer,
            routing,
            x: rows,
            hidden: self.device.shape(x).1,
            is_given_up: Arc::clone(&is_given_up),
            reply,
        })?;
        Ok(Box::new(OnHost {
            device: Arc::clone(&self.device),
            output,
            is_given_up,
        }))
    }

    fn numerics(&self) -> Option<String> {
        Some(self.numerics.clone())
    }

    fn stats(&self) -> ResidencyStats {
        (self.stats)()
    }
}

/// Experts that the thread computes.
struct OnHost<B: Backend> {
    device: Arc<B>,
    output: Receiver<Result<Vec<f32>, ModelError>>,
    is_given_up: Arc<AtomicBool>,
}

impl<B: Backend> PendingExperts<B> for OnHost<B> {
    fn finish(
        self: Box<Self>,
        x: &B::Tensor,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let (rows, hidden) = self.device.shape(x);
        loop {
            match self.output.recv_timeout(CHECK_PERIOD) {
                Ok(output) => return Ok(self.device.upload(rows, hidden, &output?)?),
                Err(RecvTimeoutError::Timeout) => check()?,
                Err(RecvTimeoutError::Disconnected) => return Err(ModelError::ExpertsEnded),
            }
        }
    }
}

impl<B: Backend> Drop for OnHost<B> {
    fn drop(&mut self) {
        // After `finish` nothing looks at it any more.
        self.is_given_up.store(true, Ordering::Relaxed);
    }
}

/// Computes jobs in order until there are no more.
fn serve<H: Backend>(host: &H, residency: &dyn Residency<H>, jobs: &Receiver<Job>) {
    while let Ok(job) = jobs.recv() {
        let output = job.run(host, residency);
        // Nobody waits for a pass that was given up.
        let _ = job.reply.send(output);
    }
}

impl Job {
    fn run<H: Backend>(
        &self,
        host: &H,
        residency: &dyn Residency<H>,
    ) -> Result<Vec<f32>, ModelError> {
        let rows = self.x.len().checked_div(self.hidden).unwrap_or(0);
        let chosen = ChosenExperts::new(self.layer, &self.routing);
        residency.announce(chosen.ids());
        let mut check = || match self.is_given_up.load(Ordering::Relaxed) {
            true => Err(ModelError::GivenUp),
            false => Ok(()),
        };
        check()?;
        let x = host.upload(rows, self.hidden, &self.x)?;
        let total = chosen.run(host, residency, &x, &mut check)?;
        let output: Result<Vec<f32>, KernelError> = host.download(&total);
        Ok(output?)
    }
}
