//! What a simulation yields.

use super::Arrival;
use hearth_schedule::ScheduleError;

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Has not ended; in no report of a simulation that ended.
    Open,
    /// Ended with its whole answer, or its whole export.
    Complete,
    /// Ended by its client.
    Cancelled,
    /// Refused at the door.
    Refused(ScheduleError),
}

/// One request of the trace. Times are microseconds from the start.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestReport {
    /// When it came.
    pub(crate) arrived_us: f64,
    /// When it left the queue.
    pub(crate) admitted_us: Option<f64>,
    /// When its first token was there.
    pub(crate) first_token_us: Option<f64>,
    /// When it ended.
    pub(crate) ended_us: Option<f64>,
    /// How it ended.
    pub(crate) outcome: Outcome,
    /// Prompt tokens whose KV was found at admission.
    pub(crate) cached_tokens: usize,
    /// The answer.
    pub(crate) answer: Vec<u32>,
}

impl RequestReport {
    /// Time to first token in microseconds.
    pub(crate) fn ttft_us(&self) -> Option<f64> {
        Some(self.first_token_us? - self.arrived_us)
    }

    /// Time per output token behind the first, in microseconds.
    pub(crate) fn tpot_us(&self) -> Option<f64> {
        let intervals = self.answer.len().checked_sub(1).filter(|n| *n > 0)?;
        Some((self.ended_us? - self.first_token_us?) / intervals as f64)
    }
}

/// Measured values, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Distribution {
    sorted: Vec<f64>,
}

impl FromIterator<f64> for Distribution {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Self { sorted }
    }
}

impl Distribution {
    /// Number of values.
    pub(crate) fn count(&self) -> usize {
        self.sorted.len()
    }

    /// Arithmetic mean; `None` without values.
    pub(crate) fn mean(&self) -> Option<f64> {
        let count = self.sorted.len();
        (count > 0).then(|| self.sorted.iter().sum::<f64>() / count as f64)
    }

    /// The smallest value that `percent` of 100 values do not exceed (nearest rank); `None` without values.
    pub(crate) fn percentile(&self, percent: f64) -> Option<f64> {
        let rank = (percent / 100.0 * self.sorted.len() as f64).ceil() as usize;
        self.sorted
            .get(
                rank.saturating_sub(1)
                    .min(self.sorted.len().checked_sub(1)?),
            )
            .copied()
    }

    /// The largest value; `None` without values.
    pub(crate) fn max(&self) -> Option<f64> {
        self.sorted.last().copied()
    }
}

/// A simulation that ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SimulationReport {
    /// One for each arrival, in their order.
    pub(crate) requests: Vec<RequestReport>,
    /// Steps that computed something.
    pub(crate) steps: usize,
    /// Rows computed, replays included.
    pub(crate) computed_tokens: usize,
    /// Times that a sequence gave up its blocks.
    pub(crate) preemptions: usize,
    /// Most decode rows of a step.
    pub(crate) peak_batch: usize,
    /// Most prompt tokens of a step.
    pub(crate) peak_chunk_tokens: usize,
    /// Most blocks in use.
    pub(crate) peak_used_blocks: usize,
    /// When the last request ended, in microseconds.
    pub(crate) makespan_us: f64,
}

impl SimulationReport {
    pub(crate) fn new(arrivals: &[Arrival]) -> Self {
        let requests = arrivals.iter().map(|arrival| RequestReport {
            arrived_us: arrival.at_us,
            admitted_us: None,
            first_token_us: None,
            ended_us: None,
            outcome: Outcome::Open,
            cached_tokens: 0,
            answer: Vec::new(),
        });
        Self {
            requests: requests.collect(),
            steps: 0,
            computed_tokens: 0,
            preemptions: 0,
            peak_batch: 0,
            peak_chunk_tokens: 0,
            peak_used_blocks: 0,
            makespan_us: 0.0,
        }
    }

    /// Times to first token, in microseconds.
    pub(crate) fn ttft_us(&self) -> Distribution {
        self.requests
            .iter()
            .filter_map(RequestReport::ttft_us)
            .collect()
    }
}
