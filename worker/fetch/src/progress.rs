//! Progress reports of a fetch.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Minimum time between two reports of one phase.
const PERIOD: Duration = Duration::from_millis(100);
/// Time over which the rate is averaged.
const RATE_WINDOW: Duration = Duration::from_secs(5);
/// Interval at which a download whose size is hidden is logged.
const LOG_PERIOD: Duration = Duration::from_secs(30);

/// Phase of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Another process is fetching the same model.
    Waiting,
    /// The downloaded part of the archive is being read again for its checksum.
    Checking,
    /// A request is being made to the server.
    Connecting,
    /// Bytes are arriving.
    Downloading,
    /// Files are being written; bytes are those read from the archive.
    Unpacking,
}

impl Phase {
    /// The phase in one word, such as `downloading`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Checking => "checking",
            Self::Connecting => "connecting",
            Self::Downloading => "downloading",
            Self::Unpacking => "unpacking",
        }
    }
}

/// A progress report.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Current phase.
    pub phase: Phase,
    /// Bytes of the archive, or of all files, that this phase has processed.
    pub bytes: u64,
    /// Size of the archive, or of all files, in bytes, if it is known.
    pub total_bytes: Option<u64>,
    /// Rate over the last few seconds; 0 if unknown.
    pub bytes_per_second: u64,
    /// The node that the bytes come from, if it is no server.
    pub from_node: Option<String>,
    /// Reason for the lost connection, until bytes arrive again.
    pub trouble: Option<String>,
}

/// Callback for progress; called at most every 100 ms and at each change of phase, from any thread.
pub type Observer = Arc<dyn Fn(&Progress) + Send + Sync>;

/// Thins out reports and adds the rate.
pub(crate) struct Reporter {
    observer: Observer,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: Option<(Instant, Phase)>,
    rate: Rate,
    trouble: Option<String>,
    from_node: Option<String>,
    /// Bytes of the files before this one, and of all files if that is known, if there are several.
    among: Option<(u64, Option<u64>)>,
    /// Whether sizes and troubles go to the log only.
    is_hidden: bool,
    logged: Option<Instant>,
}

impl Reporter {
    pub(crate) fn new(observer: Observer) -> Self {
        Self {
            observer,
            state: Mutex::default(),
        }
    }

    /// Sets whether sizes and troubles are hidden from the observer from now on.
    pub(crate) fn hide(&self, is_hidden: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_hidden = is_hidden;
    }

    /// Sets the node that bytes come from, from now on.
    pub(crate) fn come_from(&self, node: Option<&str>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.from_node = node.map(str::to_owned);
    }

    /// Whether they are hidden from the observer.
    pub(crate) fn is_hidden(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_hidden
    }

    /// Counts the bytes of the next file after those of the files before it, out of those of all files.
    pub(crate) fn go_on_after(&self, before_bytes: u64, whole_bytes: Option<u64>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.among = Some((before_bytes, whole_bytes));
    }

    /// Reports the phase and how far it is.
    pub(crate) fn tell(&self, phase: Phase, bytes: u64, total_bytes: Option<u64>) {
        let now = Instant::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, total_bytes) = match state.among {
            // A sum of what servers announced may be too small.
            Some((before_bytes, whole_bytes)) => {
                let bytes = before_bytes + bytes;
                (
                    bytes,
                    whole_bytes.filter(|whole_bytes| *whole_bytes >= bytes),
                )
            }
            None => (bytes, total_bytes),
        };
        let is_new = state.last.is_none_or(|(_, before)| before != phase);
        // The rate is of all files: between two of them a connection is only asked for the next one.
        let goes_on = state.among.is_some()
            && matches!(phase, Phase::Connecting | Phase::Downloading)
            && state
                .last
                .is_some_and(|(_, before)| before != Phase::Checking);
        if is_new && !goes_on {
            state.rate = Rate::default();
        }
        if !is_new && state.last.is_some_and(|(at, _)| now - at < PERIOD) {
            return;
        }
        state.last = Some((now, phase));
        if phase == Phase::Downloading {
            state.trouble = None;
        }
        let mut progress = Progress {
            phase,
            bytes,
            total_bytes,
            bytes_per_second: state.rate.add(now, bytes),
            from_node: state.from_node.clone(),
            trouble: state.trouble.clone(),
        };
        if state.is_hidden {
            if state.logged.is_none_or(|at| now - at >= LOG_PERIOD) {
                state.logged = Some(now);
                tracing::info!(phase = phase.as_str(), bytes, total_bytes, "fetching");
            }
            progress = Progress {
                phase,
                // Those of the files that are verified.
                bytes: state.among.map_or(0, |(before_bytes, _)| before_bytes),
                total_bytes: None,
                bytes_per_second: 0,
                from_node: None,
                trouble: None,
            };
        }
        drop(state);
        (self.observer)(&progress);
    }

    /// Reports that the connection was lost and will be made again.
    pub(crate) fn trouble(&self, why: String, bytes: u64, total_bytes: Option<u64>) {
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.trouble = Some(why);
            state.last = None;
        }
        self.tell(Phase::Connecting, bytes, total_bytes);
    }
}

/// Bytes per second over [`RATE_WINDOW`].
#[derive(Default)]
struct Rate {
    seen: VecDeque<(Instant, u64)>,
}

impl Rate {
    fn add(&mut self, now: Instant, bytes: u64) -> u64 {
        if self.seen.back().is_some_and(|&(_, before)| before > bytes) {
            // The download started over.
            self.seen.clear();
        }
        self.seen.push_back((now, bytes));
        while self.seen.len() > 2 && now - self.seen[0].0 > RATE_WINDOW {
            self.seen.pop_front();
        }
        let (began, before) = self.seen[0];
        let seconds = (now - began).as_secs_f64();
        if seconds <= 0.0 {
            return 0;
        }
        ((bytes - before) as f64 / seconds) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_of_the_last_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut rate = Rate::default();
        assert_eq!(rate.add(at(0), 5_000), 0);
        assert_eq!(rate.add(at(1), 6_000), 1_000);
        assert_eq!(rate.add(at(2), 10_000), 2_500);
        for second in 3..20 {
            rate.add(at(second), 10_000);
        }
        assert_eq!(rate.add(at(20), 10_000), 0);
        // From the start again.
        assert_eq!(rate.add(at(21), 100), 0);
        assert_eq!(rate.add(at(22), 300), 200);
    }

    #[test]
    fn files_count_after_those_before_them() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let reporter = Reporter::new(Arc::new(move |progress: &Progress| {
            sink.lock().unwrap().push(progress.clone());
        }));
        reporter.go_on_after(0, Some(300));
        reporter.tell(Phase::Downloading, 100, Some(100));
        reporter.go_on_after(100, Some(300));
        reporter.tell(Phase::Connecting, 0, None);
        std::thread::sleep(Duration::from_millis(20));
        reporter.tell(Phase::Downloading, 100, Some(200));
        let seen = seen.lock().unwrap();
        let bytes: Vec<_> = seen.iter().map(|p| (p.bytes, p.total_bytes)).collect();
        assert_eq!(
            bytes,
            [(100, Some(300)), (100, Some(300)), (200, Some(300))]
        );
        // The rate did not begin anew with the second file.
        assert!(seen[2].bytes_per_second > 0);
    }

    #[test]
    fn reports_are_thinned_out_but_for_changes() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let reporter = Reporter::new(Arc::new(move |progress: &Progress| {
            sink.lock().unwrap().push(progress.clone());
        }));
        for bytes in 0..1000 {
            reporter.tell(Phase::Downloading, bytes, None);
        }
        reporter.trouble("lost".to_owned(), 1000, Some(2000));
        reporter.tell(Phase::Downloading, 1001, Some(2000));
        let seen = seen.lock().unwrap();
        assert!(seen.len() < 100, "{}", seen.len());
        let [.., trouble, last] = seen.as_slice() else {
            panic!("{seen:?}")
        };
        assert_eq!(trouble.phase, Phase::Connecting);
        assert_eq!(trouble.trouble.as_deref(), Some("lost"));
        assert_eq!((last.bytes, last.trouble.as_deref()), (1001, None));
    }
}
