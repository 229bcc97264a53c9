//! Temperature, `top_k`, `top_p`, `min_p`, and the draw.

use std::cmp::Ordering;

use super::SamplingParams;

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
    // In f64: the difference of two large logits, or a small temperature, would overflow f32.
    let temperature = f64::from(params.temperature);
    let mut kept: Vec<Candidate> = adjusted
        .iter()
        .enumerate()
        .map(|(id, l)| Candidate {
            id: id as u32,
            weight: (((f64::from(*l) - f64::from(max)) / temperature) as f32).exp(),
        })
        .filter(|c| c.weight > 0.0)
        .collect();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < kept.len() {
        kept.select_nth_unstable_by(top_k - 1, by_rank);
        kept.truncate(top_k);
    }
    if params.top_p < 1.0 {
        kept = nucleus(kept, f64::from(params.top_p));
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

/// The shortest run of likeliest tokens whose share reaches `top_p`; never empty.
fn nucleus(mut kept: Vec<Candidate>, top_p: f64) -> Vec<Candidate> {
    let total: f64 = kept.iter().map(|c| f64::from(c.weight)).sum();
    // Tokens below this share hold less than `1 - top_p` together, so the run ends before them: most of a
    // large vocabulary need not be sorted.
    let floor = (1.0 - top_p) * total / kept.len() as f64;
    kept.retain(|c| f64::from(c.weight) >= floor);
    kept.sort_unstable_by(by_rank);
    let mut sum = 0.0;
    let reached = kept.iter().position(|c| {
        sum += f64::from(c.weight);
        sum >= top_p * total
    });
    kept.truncate(reached.map_or(kept.len(), |last| last + 1).max(1));
    kept
}

/// The candidate at the quantile `u` in `[0, 1)` of their distribution; `None` for an empty list.
pub(super) fn draw(kept: &[Candidate], u: f64) -> Option<u32> {
    let total: f64 = kept.iter().map(|c| f64::from(c.weight)).sum();
    let mut sum = 0.0;
    kept.iter()
        .find(|c| {
            sum += f64::from(c.weight);
            sum > u * total
        })
        .or(kept.last())
        .map(|c| c.id)
}
