//! On which CPUs threads run: asked of the kernel, and told to it.
//!
//! The kernel keeps a mask for each thread within the CPUs of its control group (its cpuset). What shrinks or widens the
//! cpuset changes the masks of threads that run: they never fail for it, but kernels before 6.2 forget what the thread was bound to.

use std::io;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// A thread by the kernel's number.
pub type ThreadId = Pid;

/// The calling thread.
pub fn this_thread() -> ThreadId {
    rustix::thread::gettid()
}

/// Binds a thread, the calling one if none is named, to those of `cpus` that its cpuset has.
///
/// # Errors
/// When the cpuset has none of them, a CPU has a number that no kernel gives, or the thread has ended.
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

/// The CPUs that a thread, the calling one if none is named, is bound to, ascending.
///
/// # Errors
/// When the thread has ended.
pub fn bound(thread: Option<ThreadId>) -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(thread)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect())
}

/// Frees the calling thread of what it was bound to and tells the CPUs that it may run on now, ascending: those of its
/// cpuset. A thread that stays bound is told its own mask alone, whatever its cpuset has become.
///
/// # Errors
/// When the system refuses.
pub fn release() -> io::Result<Vec<usize>> {
    let every: Vec<usize> = (0..CpuSet::MAX_CPU).collect();
    bind(None, &every)?;
    bound(None)
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
    fn cpus_that_there_are_not_are_an_error() {
        assert!(bind(None, &[1000]).is_err());
        let error = bind(None, &[5000]).unwrap_err();
        assert!(error.to_string().contains("CPU 5000"), "{error}");
    }
}
