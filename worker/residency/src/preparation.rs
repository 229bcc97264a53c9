//! What the first copy of a weight does beside copying, done ahead by threads of their own: pages are mapped and registered,
//! and codes that no kernel takes are looked for. One copying thread alone would do it at a fraction of the link's rate, and
//! the first prompt would wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use hearth_model::ModuleId;

/// Threads that prepare modules; dropped, they end.
pub(crate) struct Preparation {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

struct Work {
    /// Prepares one module, and returns its bytes; `None` ends the preparation.
    prepare: Box<dyn Fn(ModuleId) -> Option<u64> + Send + Sync>,
    modules: Vec<ModuleId>,
    next: AtomicUsize,
    /// Threads that have not ended.
    left: AtomicUsize,
    bytes: AtomicU64,
    has_ended: AtomicBool,
    began: Instant,
}

impl Preparation {
    /// Starts `threads` threads that call `prepare` for the modules in the order of a pass. Nothing depends on them: without
    /// any of them, a first copy takes longer.
    pub(crate) fn start(
        mut modules: Vec<ModuleId>,
        threads: usize,
        prepare: impl Fn(ModuleId) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        modules.sort();
        let work = Arc::new(Work {
            prepare: Box::new(prepare),
            modules,
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(threads),
            bytes: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
            began: Instant::now(),
        });
        let thread = |_| {
            let work = Arc::clone(&work);
            let name = "preparation".to_owned();
            let thread = std::thread::Builder::new().name(name);
            let started = thread.spawn(move || work.run());
            started.inspect_err(
                |error| tracing::warn!(%error, "a thread that prepares weights cannot be started"),
            )
        };
        let threads = (0..threads).map(thread).filter_map(Result::ok).collect();
        Self { work, threads }
    }
}

impl Work {
    fn run(&self) {
        // Whatever else computes goes first. Where it cannot be asked for, it does not.
        let _ = rustix::process::nice(19);
        while !self.has_ended.load(Ordering::Relaxed) {
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(&module) = self.modules.get(next) else {
                break;
            };
            match (self.prepare)(module) {
                Some(bytes) => drop(self.bytes.fetch_add(bytes, Ordering::Relaxed)),
                None => self.has_ended.store(true, Ordering::Relaxed),
            }
        }
        let is_last = self.left.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last && !self.has_ended.load(Ordering::Relaxed) {
            let (bytes, seconds) = (
                self.bytes.load(Ordering::Relaxed),
                self.began.elapsed().as_secs_f64(),
            );
            tracing::info!(bytes, seconds, "weights are ready to be copied");
        }
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        self.work.has_ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported by it.
            let _ = thread.join();
        }
    }
}
