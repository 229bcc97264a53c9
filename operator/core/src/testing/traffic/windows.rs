//! What a simulated gateway and its workers count, over sliding windows, as the operator reads it.

use std::collections::VecDeque;

use super::shapes::Request;
use crate::observed::Demand;

/// Seconds of a span of arrivals, of its last part, and of what answers and times are taken over.
const SPAN_S: f64 = 60.0;
const RECENT_S: f64 = 15.0;
const LONG_S: f64 = 300.0;
/// Seconds over which an autoscaler of CPUs sees their use.
const USE_S: f64 = 15.0;

/// Counts with their times, the newest last.
#[derive(Debug, Default)]
struct Series(VecDeque<(f64, f64)>);

impl Series {
    fn push(&mut self, at_s: f64, value: f64) {
        self.0.push_back((at_s, value));
        while self
            .0
            .front()
            .is_some_and(|(old_s, _)| at_s - old_s > LONG_S)
        {
            self.0.pop_front();
        }
    }

    fn within(&self, from_s: f64, to_s: f64) -> impl Iterator<Item = f64> {
        let newest_first = self
            .0
            .iter()
            .rev()
            .skip_while(move |(at_s, _)| *at_s > to_s);
        let within = newest_first.take_while(move |(at_s, _)| *at_s > from_s);
        within.map(|(_, value)| *value)
    }

    fn sum(&self, from_s: f64, to_s: f64) -> f64 {
        self.within(from_s, to_s).sum()
    }

    fn mean(&self, from_s: f64, to_s: f64) -> Option<f64> {
        let count = self.within(from_s, to_s).count();
        (count > 0).then(|| self.sum(from_s, to_s) / count as f64)
    }

    /// The value that nine of ten do not exceed.
    fn p90(&self, from_s: f64, to_s: f64) -> Option<f64> {
        let mut values: Vec<f64> = self.within(from_s, to_s).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() * 9 / 10).copied()
    }
}

/// The counts of one simulation.
#[derive(Debug, Default)]
pub(super) struct Windows {
    prompts: Series,
    read_tokens: Series,
    ttft_ms: Series,
    tpot_ms: Series,
    outputs: Series,
    steps: Series,
    step_tokens: Series,
    /// Requests that wait for a slot and that are answered, in each tick.
    queued: Series,
    running: Series,
    /// Seconds of computation in each tick, by pool.
    busy_s: [Series; 2],
}

impl Windows {
    pub(super) fn arrived(&mut self, request: &Request) {
        self.prompts.push(request.at_s, request.prompt_tokens);
    }

    pub(super) fn read(&mut self, now_s: f64, tokens: f64) {
        self.read_tokens.push(now_s, tokens);
    }

    pub(super) fn stepped(&mut self, now_s: f64, steps: f64, tokens: f64) {
        self.steps.push(now_s, steps);
        self.step_tokens.push(now_s, tokens);
    }

    pub(super) fn first(&mut self, now_s: f64, ttft_ms: f64) {
        self.ttft_ms.push(now_s, ttft_ms);
    }

    pub(super) fn ended(&mut self, now_s: f64, tokens: f64, tpot_ms: f64) {
        self.outputs.push(now_s, tokens);
        self.tpot_ms.push(now_s, tpot_ms);
    }

    pub(super) fn held(&mut self, now_s: f64, queued: usize, running: usize) {
        self.queued.push(now_s, queued as f64);
        self.running.push(now_s, running as f64);
    }

    pub(super) fn worked(&mut self, now_s: f64, pool: usize, busy_s: f64) {
        self.busy_s[pool].push(now_s, busy_s);
    }

    /// Mean number of workers of each pool that computed lately.
    pub(super) fn busy_workers(&self, now_s: f64) -> [f64; 2] {
        let busy = |pool: usize| self.busy_s[pool].sum(now_s - USE_S, now_s) / USE_S.min(now_s);
        [busy(0), busy(1)]
    }

    pub(super) fn demand(&self, now_s: f64, queued: usize, unanswered: usize) -> Demand {
        let span_s = SPAN_S.min(now_s);
        let (from_s, long_s) = (now_s - SPAN_S, now_s - LONG_S);
        let prompt_tokens = self.prompts.mean(long_s, now_s);
        let variance = prompt_tokens.map_or(0.0, |mean| {
            let squares = self
                .prompts
                .within(long_s, now_s)
                .map(|it| (it - mean).powi(2));
            let count = self.prompts.within(long_s, now_s).count();
            squares.sum::<f64>() / count as f64 / (mean * mean)
        });
        let (steps, step_tokens) = (
            self.steps.sum(from_s, now_s),
            self.step_tokens.sum(from_s, now_s),
        );
        let read_tokens = self.read_tokens.sum(long_s, now_s);
        let [reading_s, stepping_s] =
            [(0, long_s), (1, from_s)].map(|(pool, from_s)| self.busy_s[pool].sum(from_s, now_s));
        Demand {
            age_s: 0.0,
            span_s,
            arrivals: self.prompts.within(from_s, now_s).count() as f64,
            long_span_s: LONG_S.min(now_s),
            long_arrivals: self.prompts.within(long_s, now_s).count() as f64,
            recent_span_s: RECENT_S.min(now_s),
            recent_arrivals: self.prompts.within(now_s - RECENT_S, now_s).count() as f64,
            prompt_tokens,
            prompt_cv2: variance,
            output_tokens: self.outputs.mean(long_s, now_s),
            queued: queued as f64,
            queued_least: self
                .queued
                .within(now_s - RECENT_S, now_s)
                .reduce(f64::min)
                .unwrap_or(0.0),
            running: self.running.mean(now_s - RECENT_S, now_s),
            unanswered: unanswered as f64,
            held: 0.0,
            idle_s: None,
            ttft_p90_ms: self.ttft_ms.p90(from_s, now_s),
            tpot_p90_ms: self.tpot_ms.p90(from_s, now_s),
            prefill_ms_per_token: (read_tokens > 0.0).then(|| reading_s * 1e3 / read_tokens),
            // All of them.
            handed_over: prompt_tokens.map(|_| 1.0),
            handed_over_tokens: prompt_tokens.map(|_| 1.0),
            step_ms: (steps > 0.0).then(|| stepping_s * 1e3 / steps),
            step_tokens: (steps > 0.0).then(|| step_tokens / steps),
        }
    }
}
