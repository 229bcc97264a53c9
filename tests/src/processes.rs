//! What the kernel tells of a process.

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

/// Whether a process has ended with all its threads, and so given back its ports, even if nobody has waited for it yet.
pub fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let others = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    stat.is_empty() || (state.starts_with('Z') && others <= 1)
}
