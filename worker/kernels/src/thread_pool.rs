//! A fork-join thread pool for operations of a few microseconds.
//!
//! Waiting threads spin for a few microseconds and then park, so that the pool keeps its pace beside other
//! busy processes, where a spinning barrier collapses. Where jobs come at short intervals (a layer's experts, between which a
//! device computes) threads wait through the next one too, and let others run meanwhile: a parked thread is late by tens of
//! microseconds, in a virtual machine by more than a hundred. No one waits for a thread that has not started: the
//! caller computes all unclaimed pieces, and a thread that wakes up late finds the work done. This also lets the
//! CPUs change while jobs run: with fewer CPUs than threads, the last threads stay parked.

use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::KernelError;
use crate::affinity::{self, ThreadId};

/// Time that a thread spins before it parks. A decode step issues operations microseconds apart.
const SPIN: Duration = Duration::from_micros(12);

/// Longest interval between jobs that threads wait through without parking.
const MOST_SPIN: Duration = Duration::from_millis(1);

/// A pool of threads, including the calling thread.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a job runs: one job at a time.
    serial: Mutex<()>,
    placement: Mutex<Placement>,
}

/// The pool's threads and the CPUs that they are bound to.
struct Placement {
    /// Threads by number; the caller's is known once it has bound itself.
    threads: Vec<Option<ThreadId>>,
    /// One per thread; empty: the system places them.
    cpus: Vec<usize>,
}

/// Identity of a piece of work.
#[derive(Clone, Copy)]
pub struct Piece<'j> {
    /// Index of the piece, `0..pieces`.
    pub index: usize,
    /// Number of the thread that computes it, `0..threads`; 0 is the caller.
    /// Threads never share a number at the same time.
    pub worker: usize,
    aborted: &'j AtomicBool,
}

impl Piece<'_> {
    /// Whether another piece has panicked: a piece that waits for others must then give up.
    pub fn aborted(&self) -> bool {
        self.aborted.load(Ordering::Relaxed)
    }
}

struct Shared {
    slot: Mutex<Slot>,
    /// Job counter on which idle threads spin.
    epoch: AtomicU64,
    /// Threads inside the current job, excluding the caller. Written under the slot's lock.
    active: AtomicUsize,
    /// Threads that take part in jobs, including the caller.
    at_work: AtomicUsize,
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

// SAFETY: a `Job` is Sync (its closure is), and `ThreadPool::run` keeps it alive until no thread is inside.
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

impl ThreadPool {
    /// Starts `threads - 1` threads; the caller of [`run`](Self::run) is the last one.
    /// They may run on the calling thread's CPUs.
    ///
    /// # Errors
    /// [`KernelError::Device`] if a thread cannot be started.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot {
                job: None,
                parked: 0,
                shutdown: false,
            }),
            epoch: AtomicU64::new(0),
            active: AtomicUsize::new(0),
            at_work: AtomicUsize::new(threads),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut pool = Self {
            shared,
            workers: Vec::new(),
            serial: Mutex::new(()),
            placement: Mutex::new(Placement {
                threads: vec![None; threads],
                cpus: Vec::new(),
            }),
        };
        let (report, reports) = std::sync::mpsc::channel();
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let report = report.clone();
            let handle = std::thread::Builder::new()
                .name(format!("kernels-{worker}"))
                .spawn(move || {
                    // The receiver waits for every thread, so it still exists.
                    let _ = report.send((worker, affinity::this_thread()));
                    drop(report);
                    shared.serve(worker);
                })
                .map_err(|e| KernelError::Device {
                    device: "cpu".into(),
                    detail: format!("thread {worker} of {threads} could not be started: {e}"),
                })?;
            pool.workers.push(handle);
        }
        drop(report);
        for (worker, thread) in reports {
            lock(&pool.placement).threads[worker] = Some(thread);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Threads that take part in jobs, including the caller: all of them, unless there are fewer CPUs.
    pub fn threads_at_work(&self) -> usize {
        self.shared.at_work.load(Ordering::Relaxed)
    }

    /// Binds thread `i` to `cpus[i]`, even while jobs run. With fewer CPUs than threads, only as many threads take
    /// part from now on, and the others return when there are more again; with none, all take part wherever they are.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the system refuses a CPU; the other threads are still bound.
    pub fn bind(&self, cpus: &[usize]) -> Result<(), KernelError> {
        let mut placement = lock(&self.placement);
        placement.cpus = cpus.to_vec();
        let at_work = match cpus.len() {
            0 => self.threads(),
            cpus => cpus.min(self.threads()),
        };
        self.shared.at_work.store(at_work, Ordering::Relaxed);
        let mut outcome = Ok(());
        for (thread, &cpu) in placement.threads.iter().zip(cpus) {
            if let Some(thread) = thread {
                outcome = outcome.and(bind_to_cpu(Some(*thread), cpu));
            }
        }
        outcome
    }

    /// Makes the calling thread the caller of all later [`run`](Self::run)s:
    /// it is bound along with the others, now and whenever they are.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the system refuses.
    pub fn bind_caller(&self) -> Result<(), KernelError> {
        let mut placement = lock(&self.placement);
        placement.threads[0] = Some(affinity::this_thread());
        let cpu = placement.cpus.first();
        cpu.map_or(Ok(()), |&cpu| bind_to_cpu(None, cpu))
    }

    /// Computes pieces `0..pieces` on all threads and returns when all are done. Pieces are claimed in
    /// ascending order, so a piece may wait for earlier ones (watching [`Piece::aborted`]); which thread
    /// computes a piece must not matter. Calls from several threads run one after another; a piece must not
    /// call `run`. A panic in a piece is re-raised here after all threads have left.
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

impl Drop for ThreadPool {
    fn drop(&mut self) {
        lock(&self.shared.slot).shutdown = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of pieces and has none of its own.
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
        let (mut seen, mut patience) = (0, SPIN);
        while let Some(job) = self.next_job(worker, &mut seen, &mut patience) {
            // SAFETY: `active` was incremented under the lock while the job was in the slot, and its caller
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

    /// Waits for a job newer than `seen` and enters it; `None` at shutdown. `patience`: time for which it spins, which follows
    /// from how long the last job took to come.
    fn next_job(&self, worker: usize, seen: &mut u64, patience: &mut Duration) -> Option<JobRef> {
        loop {
            let begin = Instant::now();
            loop {
                let waited = begin.elapsed();
                if self.epoch.load(Ordering::Acquire) != *seen || waited >= *patience {
                    break;
                }
                match waited < SPIN {
                    true => pause(),
                    false => std::thread::yield_now(),
                }
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
            let waited = begin.elapsed();
            *patience = match waited > MOST_SPIN {
                true => SPIN,
                false => (2 * waited).clamp(SPIN, MOST_SPIN),
            };
            *seen = self.epoch.load(Ordering::Acquire);
            if worker >= self.at_work.load(Ordering::Relaxed) {
                continue;
            }
            if let Some(job) = slot.job {
                self.active.fetch_add(1, Ordering::Relaxed);
                return Some(job);
            }
        }
    }
}

/// Takes a lock whose data stay valid if a holder panicked: every critical section here is a few plain stores.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a few dozen cycles.
fn pause() {
    for _ in 0..8 {
        std::hint::spin_loop();
    }
}

/// Binds a thread (the calling one if `None`) to one CPU.
fn bind_to_cpu(thread: Option<ThreadId>, cpu: usize) -> Result<(), KernelError> {
    affinity::bind(thread, &[cpu]).map_err(|e| KernelError::Device {
        device: "cpu".into(),
        detail: format!(
            "a thread cannot be bound to CPU {cpu}: {e}\n  is it online and in this container's cpuset?"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_piece_runs_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads).unwrap();
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
        let pool = ThreadPool::new(3).unwrap();
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
        let pool = ThreadPool::new(3).unwrap();
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
        let pool = ThreadPool::new(2).unwrap();
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
    fn a_cpu_that_does_not_exist_is_refused_by_its_number() {
        let pool = ThreadPool::new(2).unwrap();
        let error = pool.bind(&[999, 999]).unwrap_err();
        assert!(error.to_string().contains("999"), "{error}");
    }

    /// Numbers of the threads that take part in a job whose pieces wait for `threads` of them, or until a timeout.
    fn at_work(pool: &ThreadPool, threads: usize) -> HashSet<usize> {
        let seen = Mutex::new(HashSet::new());
        let deadline = Instant::now() + Duration::from_secs(2);
        pool.run(pool.threads(), |piece| {
            seen.lock().unwrap().insert(piece.worker);
            while seen.lock().unwrap().len() < threads && Instant::now() < deadline {
                std::thread::yield_now();
            }
        });
        seen.into_inner().unwrap()
    }

    #[test]
    fn threads_follow_their_cpus_and_no_more_of_them_compute_than_there_are_cpus() {
        std::thread::spawn(|| {
            let all = affinity::release().unwrap();
            let pool = ThreadPool::new(3).unwrap();
            pool.bind_caller().unwrap();
            let threads = || lock(&pool.placement).threads.clone();
            let is_bound_to = |thread: usize, cpu: usize| {
                let id = threads()[thread];
                assert_eq!(affinity::bound(id).unwrap(), [cpu], "thread {thread}");
            };
            assert_eq!(at_work(&pool, 3), HashSet::from([0, 1, 2]));
            // One CPU is left: the caller computes alone.
            pool.bind(&all[..1]).unwrap();
            is_bound_to(0, all[0]);
            assert_eq!(pool.threads_at_work(), 1);
            assert_eq!(at_work(&pool, 1), HashSet::from([0]));
            // There are three again, even if not distinct.
            let last = all[all.len() - 1];
            pool.bind(&[last, all[0], last]).unwrap();
            for (thread, cpu) in [(0, last), (1, all[0]), (2, last)] {
                is_bound_to(thread, cpu);
            }
            assert_eq!(at_work(&pool, 3), HashSet::from([0, 1, 2]));
        })
        .join()
        .unwrap();
    }
}
