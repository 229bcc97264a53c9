//! What makes a profile impossible.

/// Nothing can be planned on such a machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// No CPU may be used.
    #[error(
        "no CPU can be used: online are {online}, this process may use {allowed}\n  \
         check the container's CPU set (cpuset.cpus) and the service's CPUAffinity"
    )]
    NoCpu {
        /// CPUs that are online, as the kernel lists them.
        online: String,
        /// CPUs that the process may use.
        allowed: String,
    },
    /// The kernel does not tell how much memory there is.
    #[error("{path} does not report MemTotal\n  mount /proc into the container")]
    NoMemory {
        /// The file.
        path: String,
    },
    /// The clock is outside of the calendar.
    #[error("the time of the measurement cannot be written as a date: {0}\n  set the clock")]
    Clock(String),
}
