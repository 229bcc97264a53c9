//! CPU affinity of threads: queried from the kernel, and set.
//!
//! The kernel keeps a mask for each thread, within the CPUs of its control group (its cpuset). Shrinking or widening
//! the cpuset changes the masks of running threads: they never fail because of it,
//! but kernels before 6.2 forget what the thread was bound to.

use std::io;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// A thread, by the kernel's ID.
pub type ThreadId = Pid;

/// Returns the calling thread's ID.
pub fn this_thread() -> ThreadId {
    rustix::thread::gettid()
}

/// Binds a thread (the calling one if `None`) to those of `cpus` that are in its cpuset.
///
/// # Errors
/// Fails if the cpuset has none of them, a CPU number is beyond the kernel's maximum, or the thread has ended.
pub fn bind(thread: Option<ThreadId>, cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(io::Error::other(format!("CPU {cpu} does not exist")));
        }
        set.set(cpu);
    }
    Ok(sched_setaffinity(thread, &set)?)
}

/// Returns the CPUs that a thread (the calling one if `None`) is bound to, ascending.
///
/// # Errors
/// Fails if the thread has ended.
pub fn bound(thread: Option<ThreadId>) -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(thread)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// Unbinds the calling thread and returns the CPUs that it may run on now, ascending: those of its
/// cpuset. A thread that stays bound only sees its own mask, whatever its cpuset has become.
///
/// # Errors
/// Fails if the system refuses.
pub fn release() -> io::Result<Vec<usize>> {
    let every: Vec<usize> = (0..CpuSet::MAX_CPU).collect();
    bind(None, &every)?;
    bound(None)
}

/// Binds the calling thread to the CPUs of the process's first thread. A thread that a compute thread started shares that
/// one's CPU otherwise.
///
/// # Errors
/// Fails if the system refuses.
pub fn bind_as_process() -> io::Result<()> {
    let cpus = bound(Some(rustix::process::getpid()))?;
    bind(None, &cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_thread_is_told_its_mask_and_a_released_one_its_cpuset() {
        std::thread::spawn(|| {
            let all = release().unwrap();
            let last = all[all.len() - 1];
            bind(None, &[last]).unwrap();
            assert_eq!(bound(Some(this_thread())).unwrap(), [last]);
            assert_eq!(release().unwrap(), all);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn what_a_bound_thread_starts_may_run_where_the_process_may() {
        let process = bound(Some(rustix::process::getpid())).unwrap();
        std::thread::spawn(move || {
            bind(None, &process[..1]).unwrap();
            let started = std::thread::spawn(|| {
                let inherited = bound(None).unwrap();
                bind_as_process().unwrap();
                (inherited, bound(None).unwrap())
            });
            assert_eq!(started.join().unwrap(), (process[..1].to_vec(), process));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn cpus_that_there_are_not_are_an_error() {
        assert!(bind(None, &[1000]).is_err());
        let error = bind(None, &[5000]).unwrap_err();
        assert!(error.to_string().contains("CPU 5000"), "{error}");
    }
}
