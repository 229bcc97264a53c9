//! Kernel statistics of a process.

use std::time::Duration;

/// Clock ticks per second in `/proc/PID/stat`: Linux reports hundredths to programs, whatever the kernel's own clock.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns the CPU time so far of a process and all its threads; zero if it has ended.
pub fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may contain anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = fields.filter_map(|field| field.parse::<f64>().ok()).sum();
    Duration::from_secs_f64(ticks / TICKS_PER_SECOND)
}
