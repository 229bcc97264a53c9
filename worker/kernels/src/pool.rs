//! A fork-join thread pool for operations of a few microseconds.
//!
//! Threads that wait spin for a few microseconds and then park, so that the pool keeps its pace beside other
//! busy processes: a barrier that spins collapses there. Nobody waits for a thread that has not begun: the
//! caller computes whatever is unclaimed, and a thread that wakes up late finds the work done.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::KernelError;

/// How long a thread spins before it parks. A decode step issues operations microseconds apart.
const SPIN: Duration = Duration::from_micros(12);

/// A pool of threads, the calling thread among them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs: one at a time.
    serial: Mutex<()>,
    cpus: Vec<usize>,
}

/// What a piece of work knows about itself.
#[derive(Clone, Copy)]
pub struct Piece<'j> {
    /// Which piece, `0..pieces`.
    pub index: usize,
    /// Which thread computes it, `0..threads`; 0 is the caller. No two threads share a number at one time.
    pub worker: usize,
    aborted: &'j AtomicBool,
}

impl Piece<'_> {
    /// Whether another piece has panicked: one that waits for others must give up then.
    pub fn aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }
}

struct Shared {
    slot: Mutex<Slot>,
    /// Counts jobs; what idle threads spin on.
    epoch: AtomicU64,
    /// Threads inside the current job, the caller aside. Written under the slot's lock.
    active: AtomicUsize,
    work: Condvar,
    done: Condvar,
}

struct Slot {
    job: Option<JobRef>,
    parked: usize,
    shutdown: bool,
}

/// The current job, on its caller's stack.
#[derive(Clone, Copy)]
struct JobRef(*const Job<'static>);

// SAFETY: a `Job` is Sync (its closure is), and `Pool::run` keeps it alive until no thread is inside.
unsafe impl Send for JobRef {}

struct Job<'f> {
    call: &'f (dyn Fn(Piece<'_>) + Sync),
    pieces: usize,
    next: AtomicUsize,
    aborted: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    borrow: PhantomData<&'f ()>,
}

impl Job<'_> {
    /// Claims and computes pieces until none is left.
    fn work(&self, worker: usize) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.pieces || self.aborted.load(Ordering::Relaxed) {
                return;
            }
            let piece = Piece {
                index,
                worker,
                aborted: &self.aborted,
            };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| (self.call)(piece))) {
                self.aborted.store(true, Ordering::Relaxed);
                lock(&self.panic).get_or_insert(payload);
            }
        }
    }
}

impl Pool {
    /// Starts `threads - 1` threads; the caller of [`run`](Self::run) is the last one. With `cpus`, thread
    /// `i` is bound to `cpus[i % cpus.len()]`; the caller's own binding is left to it
    /// ([`pin_caller`](Self::pin_caller)).
    ///
    /// # Errors
    /// [`KernelError::Device`] when a thread cannot be started or bound to its CPU.
    pub fn new(threads: usize, cpus: &[usize]) -> Result<Self, KernelError> {
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot {
                job: None,
                parked: 0,
                shutdown: false,
            }),
            epoch: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            workers: Vec::new(),
            serial: Mutex::new(()),
            cpus: cpus.to_vec(),
        };
        let (report, reports) = std::sync::mpsc::channel();
        for worker in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let cpu = (!cpus.is_empty()).then(|| cpus[worker % cpus.len()]);
            let report = report.clone();
            let handle = std::thread::Builder::new()
                .name(format!("kernels-{worker}"))
                .spawn(move || {
                    let bound = cpu.map_or(Ok(()), bind_to_cpu);
                    let failed = bound.is_err();
                    // The receiver waits for every thread, so it is there.
                    let _ = report.send(bound);
                    drop(report);
                    if !failed {
                        shared.serve(worker);
                    }
                })
                .map_err(|e| KernelError::Device {
                    device: "cpu".into(),
                    detail: format!("thread {worker} of {threads} could not be started: {e}"),
                })?;
            pool.workers.push(handle);
        }
        drop(report);
        for bound in reports {
            bound?;
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Binds the calling thread to the first of the pool's CPUs, if it has any.
    ///
    /// # Errors
    /// [`KernelError::Device`] when the system refuses.
    pub fn pin_caller(&self) -> Result<(), KernelError> {
        self.cpus.first().map_or(Ok(()), |&cpu| bind_to_cpu(cpu))
    }

    /// Computes pieces `0..pieces` on all threads and returns when every one is done. Pieces are claimed in
    /// ascending order, so a piece may wait for earlier ones (watching [`Piece::aborted`]); which thread
    /// computes a piece must not matter. Calls from several threads run one after another; a piece must not
    /// call `run`. A panic in a piece is raised here after all threads have left.
    pub fn run(&self, pieces: usize, call: impl Fn(Piece<'_>) + Sync) {
        let _serial = lock(&self.serial);
        let job = Job {
            call: &call,
            pieces,
            next: AtomicUsize::new(0),
            aborted: AtomicBool::new(false),
            panic: Mutex::new(None),
            borrow: PhantomData,
        };
        if pieces > 1 && !self.workers.is_empty() {
            self.shared.publish(&job);
            job.work(0);
            self.shared.retire();
        } else {
            job.work(0);
        }
        let payload = lock(&job.panic).take();
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.slot).shutdown = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of pieces; it has none of its own to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn publish(&self, job: &Job<'_>) {
        // The lifetime is erased here; `retire` restores the promise before the job leaves the stack.
        let job = JobRef(std::ptr::from_ref(job).cast());
        let mut slot = lock(&self.slot);
        slot.job = Some(job);
        self.epoch.fetch_add(1, Ordering::Release);
        let parked = slot.parked;
        drop(slot);
        if parked > 0 {
            self.work.notify_all();
        }
    }

    /// Closes the job to late threads and waits for those inside it.
    fn retire(&self) {
        lock(&self.slot).job = None;
        let begin = Instant::now();
        while self.active.load(Ordering::Acquire) > 0 {
            if begin.elapsed() > SPIN {
                let mut slot = lock(&self.slot);
                while self.active.load(Ordering::Acquire) > 0 {
                    slot = self.done.wait(slot).unwrap_or_else(PoisonError::into_inner);
                }
                return;
            }
            pause();
        }
    }

    fn serve(&self, worker: usize) {
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            // SAFETY: `active` was raised under the lock while the job stood in the slot, and its caller
            // does not leave `retire` before `active` is 0 again.
            unsafe { (*job.0).work(worker) };
            let slot = lock(&self.slot);
            let left = self.active.fetch_sub(1, Ordering::Release) - 1;
            drop(slot);
            if left == 0 {
                self.done.notify_one();
            }
        }
    }

    /// Waits for a job newer than `seen` and enters it; `None` at shutdown.
    fn next_job(&self, seen: &mut u64) -> Option<JobRef> {
        loop {
            let begin = Instant::now();
            while self.epoch.load(Ordering::Acquire) == *seen && begin.elapsed() < SPIN {
                pause();
            }
            let mut slot = lock(&self.slot);
            while self.epoch.load(Ordering::Acquire) == *seen && !slot.shutdown {
                slot.parked += 1;
                slot = self.work.wait(slot).unwrap_or_else(PoisonError::into_inner);
                slot.parked -= 1;
            }
            if slot.shutdown {
                return None;
            }
            *seen = self.epoch.load(Ordering::Acquire);
            if let Some(job) = slot.job {
                self.active.fetch_add(1, Ordering::Relaxed);
                return Some(job);
            }
        }
    }
}

/// A lock whose data stay valid if a holder panicked: every critical section here is a few plain stores.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A few dozen cycles of waiting.
fn pause() {
    for _ in 0..8 {
        std::hint::spin_loop();
    }
}

/// Binds the calling thread to one CPU.
fn bind_to_cpu(cpu: usize) -> Result<(), KernelError> {
    let fault = |detail: String| KernelError::Device {
        device: "cpu".into(),
        detail,
    };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(fault(format!("CPU {cpu} does not exist")));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| {
        fault(format!(
            "a thread cannot be bound to CPU {cpu}: {e}\n  is it online and in this container's cpuset?"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_piece_runs_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads, &[]).unwrap();
            assert_eq!(pool.threads(), threads);
            for pieces in [0, 1, 2, 63, 1000] {
                let counts: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                pool.run(pieces, |piece| {
                    assert!(piece.worker < threads);
                    counts[piece.index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn late_pieces_may_wait_for_early_ones() {
        let pool = Pool::new(3, &[]).unwrap();
        for _ in 0..200 {
            let early = AtomicUsize::new(0);
            pool.run(8, |piece| {
                if piece.index < 4 {
                    early.fetch_add(1, Ordering::Release);
                } else {
                    while early.load(Ordering::Acquire) < 4 && !piece.aborted() {
                        std::thread::yield_now();
                    }
                }
            });
            assert_eq!(early.load(Ordering::Relaxed), 4);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3, &[]).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, |piece| assert_ne!(piece.index, 7, "piece seven"));
        }));
        let message = caught.unwrap_err();
        let message = message.downcast_ref::<String>().unwrap();
        assert!(message.contains("piece seven"), "{message}");
        let seen = Mutex::new(HashSet::new());
        pool.run(20, |piece| {
            seen.lock().unwrap().insert(piece.index);
        });
        assert_eq!(seen.lock().unwrap().len(), 20);
    }

    #[test]
    fn several_callers_share_one_pool() {
        let pool = Pool::new(2, &[]).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(5, |piece| {
                            total.fetch_add(piece.index, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 3 * 100 * 10);
    }

    #[test]
    fn pinning_to_a_cpu_that_does_not_exist_is_refused_by_its_number() {
        let Err(error) = Pool::new(2, &[999]) else {
            panic!("CPU 999 was accepted");
        };
        assert!(error.to_string().contains("999"), "{error}");
    }
}
