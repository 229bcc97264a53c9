//! Decode steps whose tokens the device chooses: each after the tokens of the one before have landed, and each launched ahead of
//! them, as the engine does where passes are queued.

use std::collections::VecDeque;
use std::fmt;

use hearth_kernels::Backend;
use hearth_model::{Model, Rows};
use serde::Serialize;

use super::lanes::{Clock, LaneReport};
use super::session::Session;

/// Steps before timing starts.
const WARMUP_STEPS: usize = 2;

/// Mean time of a decode step whose tokens the device chooses.
#[derive(Serialize)]
pub(crate) struct AheadReport {
    /// If each step waits for the tokens of the one before.
    waiting_step_ms: f64,
    /// If each step is launched before the tokens of the one before have landed.
    ahead_step_ms: f64,
    /// `ahead_step_ms / waiting_step_ms`.
    ratio: f64,
    /// What the lanes of a modelled device did either way.
    #[serde(skip_serializing_if = "Option::is_none")]
    waiting_lanes: Option<LaneReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ahead_lanes: Option<LaneReport>,
}

impl fmt::Display for AheadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.3} ms a step that waits for the tokens before it, {:.3} ms a step launched ahead: {:.3}",
            self.waiting_step_ms, self.ahead_step_ms, self.ratio
        )
    }
}

/// Measures `steps` steps each way, from the tokens `first` at the position `from` of each sequence; `None` if the device
/// does not queue passes, or the host chooses tokens.
pub(crate) fn measure<B: Backend>(
    model: &Model<B>,
    clock: &Clock,
    session: &mut Session<'_, B>,
    (from, first): (usize, &[u32]),
    steps: usize,
) -> anyhow::Result<Option<AheadReport>> {
    if !model.queues_passes() || !model.backend().can_sample(model.config().vocab_size) {
        return Ok(None);
    }
    let mut step_ms = |depth| {
        session.rewind(from);
        run(model, clock, session, first, steps, depth)
    };
    let (waiting_step_ms, waiting_lanes) = step_ms(1)?;
    let (ahead_step_ms, ahead_lanes) = step_ms(2)?;
    Ok(Some(AheadReport {
        waiting_step_ms,
        ahead_step_ms,
        ratio: ahead_step_ms / waiting_step_ms,
        waiting_lanes,
        ahead_lanes,
    }))
}

/// Mean time of a step with `depth` of them in flight, ms, and what the lanes did.
fn run<B: Backend>(
    model: &Model<B>,
    clock: &Clock,
    session: &mut Session<'_, B>,
    first: &[u32],
    steps: usize,
    depth: usize,
) -> anyhow::Result<(f64, Option<LaneReport>)> {
    let backend = &**model.backend();
    let picked: Vec<u32> = (0..first.len() as u32).collect();
    let mut next = first.to_vec();
    let mut in_flight: VecDeque<B::Tokens> = VecDeque::new();
    let mut started = clock.read();
    let all = WARMUP_STEPS + steps;
    for landing in 0..all {
        while in_flight.len() < depth.min(all - landing) {
            let rows = match in_flight.back() {
                None => Rows::Tokens(&next),
                Some(tokens) => Rows::Sampled {
                    tokens,
                    picked: &picked,
                },
            };
            let chosen = session.decode(rows)?;
            in_flight.push_back(chosen);
        }
        if let Some(tokens) = in_flight.pop_front() {
            next = landed(backend, &tokens)?;
        }
        if landing + 1 == WARMUP_STEPS {
            started = clock.read();
        }
    }
    let name = ["decode, waiting", "decode, ahead"][depth - 1];
    let (ms, lanes) = clock.since(&started, name);
    Ok((ms / steps as f64, lanes.device))
}

fn landed<B: Backend>(backend: &B, tokens: &B::Tokens) -> anyhow::Result<Vec<u32>> {
    let tokens = backend.landed(tokens)?.into_iter();
    let checked = tokens.map(|t| t.map_err(|fault| anyhow::anyhow!("no token: {fault:?}")));
    checked.collect()
}
