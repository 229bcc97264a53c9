//! What gateways count, and what follows from two readings of it.

use std::collections::VecDeque;
use std::time::Duration;

use hearth_crds::PlanRole;
use serde::Serialize;
use tokio::time::Instant;

use crate::exposition::{TPOT, TTFT, label, sample};

/// Time that rates and means are of.
const WINDOW: Duration = Duration::from_secs(30);

/// One reading of a gateway.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counts {
    running: f64,
    queued: f64,
    /// The part of `queued` that waits at decode workers, which every gateway reports.
    at_workers: f64,
    generated_tokens: f64,
    kv_ratio: f64,
    ttft: Mean,
    tpot: Mean,
}

/// A sum and the number of what was added.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Mean {
    sum_s: f64,
    count: f64,
}

/// The readings of one gateway within the window, and the last one before it.
#[derive(Debug, Default)]
pub(super) struct History(VecDeque<(Instant, Counts)>);

/// What a deployment does now.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Usage {
    /// Choices that are being answered; unset, like all others, where no gateway was read.
    pub(super) running: Option<f64>,
    /// Choices that wait for a worker.
    pub(super) queued: Option<f64>,
    /// Tokens generated per second; unset after one reading.
    pub(super) tokens_per_second: Option<f64>,
    /// Means of the window; where nothing came in it, since the gateways started.
    pub(super) ttft_ms: Option<f64>,
    pub(super) tpot_ms: Option<f64>,
    /// Share of the decode workers' KV blocks that is in use, from 0 to 1.
    pub(super) kv_usage: Option<f64>,
}

impl Counts {
    /// Reads what a gateway serves at `/metrics`.
    pub(super) fn read(text: &str) -> Self {
        let mut counts = Self::default();
        for (name, labels, value) in text.lines().filter_map(sample) {
            match name {
                "hearth_requests_running" => counts.running = value,
                "hearth_requests_queued" => counts.queued = value,
                "hearth_kv_cache_usage_ratio" => counts.kv_ratio = value,
                "hearth_generated_tokens_total" => counts.generated_tokens += value,
                "hearth_worker_waiting" if is_decode(labels) => counts.at_workers += value,
                _ => {
                    counts.ttft.read(name, TTFT, value);
                    counts.tpot.read(name, TPOT, value);
                }
            }
        }
        counts
    }

    fn has_begun_anew(&self, last: &Self) -> bool {
        self.generated_tokens < last.generated_tokens
            || self.ttft.count < last.ttft.count
            || self.tpot.count < last.tpot.count
    }
}

fn is_decode(labels: &str) -> bool {
    label(labels, "role") == Some(PlanRole::Decode.as_str())
}

impl Mean {
    fn read(&mut self, name: &str, series: &str, value: f64) {
        match name.strip_prefix(series) {
            Some("_sum") => self.sum_s += value,
            Some("_count") => self.count += value,
            _ => {}
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            sum_s: self.sum_s + other.sum_s,
            count: self.count + other.count,
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            sum_s: self.sum_s - other.sum_s,
            count: self.count - other.count,
        }
    }

    fn milliseconds(self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum_s / self.count * 1e3)
    }
}

impl History {
    /// Adds a reading.
    pub(super) fn push(&mut self, now: Instant, counts: Counts) {
        let last = self.0.back();
        if last.is_some_and(|(_, last)| counts.has_begun_anew(last)) {
            self.0.clear();
        }
        self.0.push_back((now, counts));
        while self
            .0
            .get(1)
            .is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW)
        {
            self.0.pop_front();
        }
    }
}

/// What the gateways of a deployment have counted.
pub(super) fn usage<'a>(gateways: impl Iterator<Item = &'a History>) -> Usage {
    let mut usage = Usage::default();
    let (mut running, mut queued, mut kv_usage) = (0.0, 0.0, 0.0_f64);
    let (mut at_workers, mut rate, mut is_read) = (0.0_f64, None, false);
    let (mut ttft, mut ttft_ever) = (Mean::default(), Mean::default());
    let (mut tpot, mut tpot_ever) = (Mean::default(), Mean::default());
    for history in gateways {
        let (Some((then, base)), Some((now, newest))) = (history.0.front(), history.0.back())
        else {
            continue;
        };
        is_read = true;
        running += newest.running;
        queued += (newest.queued - newest.at_workers).max(0.0);
        at_workers = at_workers.max(newest.at_workers);
        kv_usage = kv_usage.max(newest.kv_ratio);
        let seconds = now.duration_since(*then).as_secs_f64();
        if seconds > 0.0 {
            let tokens = newest.generated_tokens - base.generated_tokens;
            rate = Some(rate.unwrap_or(0.0) + tokens / seconds);
        }
        ttft = ttft.plus(newest.ttft.minus(base.ttft));
        tpot = tpot.plus(newest.tpot.minus(base.tpot));
        ttft_ever = ttft_ever.plus(newest.ttft);
        tpot_ever = tpot_ever.plus(newest.tpot);
    }
    usage.running = is_read.then_some(running);
    usage.queued = is_read.then_some(queued + at_workers);
    usage.kv_usage = is_read.then_some(kv_usage);
    usage.tokens_per_second = rate;
    usage.ttft_ms = ttft.milliseconds().or_else(|| ttft_ever.milliseconds());
    usage.tpot_ms = tpot.milliseconds().or_else(|| tpot_ever.milliseconds());
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(running: u32, tokens: u32, answers: u32) -> String {
        format!(
            "hearth_requests_running {running}\nhearth_requests_queued 3\nhearth_kv_cache_usage_ratio 0.25\n\
             hearth_generated_tokens_total {tokens}\n\
             hearth_worker_waiting{{address=\"10.0.0.1:9400\",role=\"decode\"}} 2\n\
             hearth_worker_waiting{{address=\"10.0.0.2:9400\",role=\"prefill\"}} 7\n\
             {TTFT}_sum{{gen_ai_request_model=\"a\"}} {answers}\n{TTFT}_count{{gen_ai_request_model=\"a\"}} {answers}\n"
        )
    }

    fn history(readings: &[(u64, &str)]) -> History {
        let begin = Instant::now();
        let mut history = History::default();
        for (at_s, text) in readings {
            history.push(begin + Duration::from_secs(*at_s), Counts::read(text));
        }
        history
    }

    #[test]
    fn rates_are_of_two_readings_and_sums_of_all_gateways() {
        let one = history(&[(0, &text(2, 100, 4)), (10, &text(3, 300, 4))]);
        let two = history(&[(0, &text(1, 0, 0)), (10, &text(1, 50, 0))]);
        let usage = usage([&one, &two].into_iter());
        assert_eq!(usage.running, Some(4.0));
        assert_eq!(usage.queued, Some(4.0), "one each, and two at the workers");
        assert_eq!(usage.tokens_per_second, Some(25.0));
        assert_eq!(usage.ttft_ms, Some(1000.0), "of before: nothing came since");
        assert_eq!(usage.tpot_ms, None);
        assert_eq!(usage.kv_usage, Some(0.25));
    }

    #[test]
    fn one_reading_makes_no_rate_and_a_restart_begins_anew() {
        let one = history(&[(0, &text(0, 100, 1))]);
        assert_eq!(usage([&one].into_iter()).tokens_per_second, None);
        let again = history(&[
            (0, &text(0, 100, 1)),
            (2, &text(0, 5, 0)),
            (4, &text(0, 25, 0)),
        ]);
        assert_eq!(usage([&again].into_iter()).tokens_per_second, Some(10.0));
        assert_eq!(usage([].into_iter()), Usage::default());
    }

    #[test]
    fn what_is_older_than_the_window_does_not_count() {
        let readings = [0, 20, 40, 60].map(|at_s| (at_s, text(0, at_s as u32 * at_s as u32, 0)));
        let readings: Vec<(u64, &str)> = readings.iter().map(|(at, it)| (*at, &**it)).collect();
        let history = history(&readings);
        // From 20 s to 60 s: the last reading before the window, and the newest.
        let rate = (3600.0 - 400.0) / 40.0;
        assert_eq!(usage([&history].into_iter()).tokens_per_second, Some(rate));
    }
}
