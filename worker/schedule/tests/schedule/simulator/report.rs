//! Results of a simulation.

use super::Arrival;
use hearth_schedule::ScheduleError;

/// Outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Has not ended; absent from the report of a completed simulation.
    Open,
    /// Ended with its whole answer, or its whole export.
    Complete,
    /// Cancelled by its client.
    Cancelled,
    /// Rejected on submission.
    Refused(ScheduleError),
}

/// One request of the trace. Times are microseconds from the start.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequestReport {
    /// Time of arrival.
    pub(crate) arrived_us: f64,
    /// Time at which it left the queue.
    pub(crate) admitted_us: Option<f64>,
    /// Time of its first token.
    pub(crate) first_token_us: Option<f64>,
    /// Time at which it ended.
    pub(crate) ended_us: Option<f64>,
    /// Outcome of the request.
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

    /// Time per output token after the first, in microseconds.
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

    /// Arithmetic mean; `None` if there are no values.
    pub(crate) fn mean(&self) -> Option<f64> {
        let count = self.sorted.len();
        (count > 0).then(|| self.sorted.iter().sum::<f64>() / count as f64)
    }

    /// Smallest value that at least `percent` percent of the values do not exceed (nearest rank); `None` if there are
    /// none.
    pub(crate) fn percentile(&self, percent: f64) -> Option<f64> {
        let rank = (percent / 100.0 * self.sorted.len() as f64).ceil() as usize;
        self.sorted
            .get(
                rank.saturating_sub(1)
                    .min(self.sorted.len().checked_sub(1)?),
            )
            .copied()
    }

    /// Largest value; `None` if there are no values.
    pub(crate) fn max(&self) -> Option<f64> {
        self.sorted.last().copied()
    }
}

/// Report of a completed simulation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SimulationReport {
    /// One entry per arrival, in the same order.
    pub(crate) requests: Vec<RequestReport>,
    /// Steps that computed something.
    pub(crate) steps: usize,
    /// Rows that were computed, including replays.
    pub(crate) computed_tokens: usize,
    /// Number of times that a sequence gave up its blocks.
    pub(crate) preemptions: usize,
    /// Most decode rows in a step.
    pub(crate) peak_batch: usize,
    /// Most prompt tokens in a step.
    pub(crate) peak_chunk_tokens: usize,
    /// Most blocks in use.
    pub(crate) peak_used_blocks: usize,
    /// Time at which the last request ended, in microseconds.
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
