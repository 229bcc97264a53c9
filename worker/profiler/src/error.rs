//! Errors that make a profile impossible.

/// A machine for which nothing can be planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// No CPU may be used.
    #[error(
        "no CPU can be used: online are {online}, this process may use {allowed}\n  \
         check the container's CPU set (cpuset.cpus) and the service's CPUAffinity"
    )]
    NoCpu {
        /// CPUs that are online, as listed by the kernel.
        online: String,
        /// CPUs that the process may use.
        allowed: String,
    },
    /// The kernel does not report the amount of memory.
    #[error("{path} does not report MemTotal\n  mount /proc into the container")]
    NoMemory {
        /// Path of the file.
        path: String,
    },
    /// The clock's time is outside the calendar.
    #[error("the time of the measurement cannot be written as a date: {0}\n  set the clock")]
    Clock(String),
}
