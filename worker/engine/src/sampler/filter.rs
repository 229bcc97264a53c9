//! Temperature, `top_k`, `top_p`, `min_p`, and the draw.

use std::cmp::Ordering;

use super::SamplingParams;
use super::weight::{mass, point, share, weight};

/// A token that can still be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    /// The token.
    pub(super) id: u32,
    /// Its probability relative to the likeliest token's, at the request's temperature: `0 < weight <= 1`.
    pub(super) weight: f32,
}

/// The tokens that pass the filters, in ascending order.
///
/// `top_p` is measured among the tokens that `top_k` kept, as in Hugging Face. Equal weights rank by lower id.
/// `adjusted` `[vocab]` may hold negative infinities; `max` is its largest value.
pub(super) fn candidates(params: &SamplingParams, adjusted: &[f32], max: f32) -> Vec<Candidate> {
    let mut kept: Vec<Candidate> = adjusted
        .iter()
        .enumerate()
        .map(|(id, l)| Candidate {
            id: id as u32,
            weight: weight(*l, max, params.temperature),
        })
        .filter(|c| c.weight > 0.0)
        .collect();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, by_rank);
        kept.truncate(top_k);
    }
    if params.top_p < 1.0 {
        kept = nucleus(kept, params.top_p);
    }
    if params.min_p > 0.0 {
        kept.retain(|c| c.weight >= params.min_p);
    }
    kept.sort_unstable_by_key(|c| c.id);
    kept
}

/// Orders by descending weight; ties by lower id.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// The shortest run of likeliest tokens whose share of the mass reaches `top_p`; never empty.
fn nucleus(mut kept: Vec<Candidate>, top_p: f32) -> Vec<Candidate> {
    let total = total_mass(&kept);
    let wanted = share(total, top_p);
    // Tokens below this mass hold less than the rest together, so the run ends before them: most of a large vocabulary
    // need not be sorted.
    let floor = (total - wanted) / kept.len().max(1) as u64;
    kept.retain(|c| mass(c.weight) >= floor);
    kept.sort_unstable_by(by_rank);
    let mut sum = 0_u64;
    let reached = kept.iter().position(|c| {
        sum = sum.saturating_add(mass(c.weight));
        sum >= wanted
    });
    kept.truncate(reached.map_or(kept.len(), |last| last + 1).max(1));
    kept
}

/// The candidate at the quantile, in units of 2^-64, of their distribution; `None` if none has a mass.
pub(super) fn draw(kept: &[Candidate], quantile: u64) -> Option<u32> {
    let point = point(total_mass(kept), quantile);
    let mut sum = 0_u64;
    let drawn = kept.iter().find(|c| {
        sum = sum.saturating_add(mass(c.weight));
        sum > point
    });
    drawn.map(|c| c.id)
}

fn total_mass(kept: &[Candidate]) -> u64 {
    let masses = kept.iter().map(|c| mass(c.weight));
    masses.fold(0, u64::saturating_add)
}
