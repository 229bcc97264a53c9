//! Threads that load weights, and what they share with the thread that computes.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use hearth_model::ResidencyError;

/// What a loader copies.
pub(crate) trait Loading: Send + Sync + 'static {
    /// What both threads change.
    type State: Send;
    /// One copy.
    type Task;

    /// The state, with its lock.
    fn shared(&self) -> &Shared<Self::State>;

    /// Takes the next copy, if there is anything to copy.
    fn next(&self, state: &mut Self::State) -> Option<Self::Task>;

    /// Makes a copy, and enters its outcome in the state. The lock is not held.
    fn load(&self, task: Self::Task);
}

/// State of threads that wait for each other to change it.
pub(crate) struct Shared<S> {
    state: Mutex<S>,
    changed: Condvar,
    /// Changed under the lock alone, so that nobody who waits misses it.
    has_ended: AtomicBool,
}

impl<S> Shared<S> {
    pub(crate) fn new(state: S) -> Self {
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            has_ended: AtomicBool::new(false),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, S> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until another thread has changed something.
    pub(crate) fn wait<'a>(&self, state: MutexGuard<'a, S>) -> MutexGuard<'a, S> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the other threads that something has changed.
    pub(crate) fn changed(&self) {
        self.changed.notify_all();
    }

    /// Whether nothing more will be copied.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    fn end(&self) {
        let _held = self.lock();
        self.has_ended.store(true, Ordering::Release);
        self.changed();
    }
}

/// The threads; they end when this is dropped.
pub(crate) struct Loader<L: Loading> {
    loading: Arc<L>,
    threads: Vec<JoinHandle<()>>,
}

impl<L: Loading> Loader<L> {
    /// Starts one thread.
    ///
    /// # Errors
    /// As [`Self::start_threads`].
    pub(crate) fn start(loading: L) -> Result<Self, ResidencyError> {
        Self::start_threads(loading, 1)
    }

    /// Starts so many threads.
    ///
    /// # Errors
    /// [`ResidencyError::System`] if a thread cannot be started.
    pub(crate) fn start_threads(loading: L, threads: usize) -> Result<Self, ResidencyError> {
        let mut loader = Self {
            loading: Arc::new(loading),
            threads: Vec::with_capacity(threads),
        };
        for _ in 0..threads {
            let own = loader.loading();
            let thread = std::thread::Builder::new()
                .name("loader".to_owned())
                .spawn(move || run(&*own))
                .map_err(|source| ResidencyError::System {
                    what: "start a thread that loads experts".to_owned(),
                    source,
                    remedy: "raise the limit of processes (ulimit -u, or the Pod's pids limit)",
                })?;
            loader.threads.push(thread);
        }
        Ok(loader)
    }

    /// What is copied, for those who outlive a borrow.
    pub(crate) fn loading(&self) -> Arc<L> {
        Arc::clone(&self.loading)
    }
}

impl<L: Loading> Deref for Loader<L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.loading
    }
}

impl<L: Loading> Drop for Loader<L> {
    fn drop(&mut self) {
        self.loading.shared().end();
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported by it.
            let _ = thread.join();
        }
    }
}

/// Says that a thread has ended, even by a panic: nobody waits for it then.
struct Ending<'a, S>(&'a Shared<S>);

impl<S> Drop for Ending<'_, S> {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn run<L: Loading>(loading: &L) {
    let shared = loading.shared();
    let _ends = Ending(shared);
    let mut state = shared.lock();
    while !shared.has_ended() {
        state = match loading.next(&mut state) {
            None => shared.wait(state),
            Some(task) => {
                drop(state);
                loading.load(task);
                shared.changed();
                shared.lock()
            }
        };
    }
}
