//! What the kernel says of a process.

use std::time::Duration;

/// Clock ticks of `/proc/PID/stat` in a second: Linux counts hundredths for programs, whatever the kernel's own clock.
const TICKS_PER_SECOND: f64 = 100.0;

/// CPU time so far of a process and all its threads; none of one that has ended.
pub fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may hold anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = fields.filter_map(|field| field.parse::<f64>().ok()).sum();
    Duration::from_secs_f64(ticks / TICKS_PER_SECOND)
}
