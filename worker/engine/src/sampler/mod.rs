//! Choice of a token: a function of (seed, index, logits, the request's own tokens) and nothing else.
//!
//! Order of the adjustments: `logit_bias`, repetition penalty, frequency and presence penalties, grammar
//! mask, temperature, `top_k`, `top_p`, `min_p`, draw. Log-probabilities are those of the raw logits.
//!
//! A device that chooses by itself gets the same input as a [`SampleSpec`](hearth_kernels::SampleSpec), and chooses the
//! same token from the same bits: `weight` has the arithmetic that it repeats.
//!
//! **Invariant**: nothing here has state, reads a clock or depends on the batch, so a stream that moves to
//! another worker continues with the tokens it would have had.

mod filter;
mod history;
mod params;
mod philox;
mod weight;

pub use history::History;
pub use params::{MAX_TOP_LOGPROBS, SamplingError, SamplingParams};
pub use philox::{philox4x32_10, uniform};

use crate::TopLogprob;

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability under the raw logits, if requested.
    pub logprob: Option<f32>,
    /// The likeliest tokens under the raw logits; ties by lower id.
    pub top: Vec<TopLogprob>,
}

/// Chooses the answer's token at `index` (counted from 0, including replayed tokens).
///
/// `logits` `[vocab]`; `allowed`: bit `t % 32` of word `t / 32` is set if token `t` may follow, `None` if
/// all may; `logprobs`: number of alternatives to report.
///
/// # Errors
/// [`SamplingError::NotFinite`] for a NaN or infinite logit, [`SamplingError::NothingAllowed`] if the mask
/// leaves no token.
pub fn sample(
    params: &SamplingParams,
    index: usize,
    logits: &[f32],
    history: &History,
    allowed: Option<&[u32]>,
    logprobs: Option<u32>,
) -> Result<Sampled, SamplingError> {
    if let Some(token) = logits.iter().position(|l| !l.is_finite()) {
        return Err(SamplingError::NotFinite {
            token,
            value: logits[token].to_string(),
            index,
        });
    }
    let quantile = uniform(params.seed, index as u64);
    let id = choose(params, quantile, logits, history, allowed)
        .ok_or(SamplingError::NothingAllowed { index })?;
    Ok(match logprobs {
        None => Sampled {
            id,
            logprob: None,
            top: Vec::new(),
        },
        Some(n) => with_logprobs(id, logits, n as usize),
    })
}

/// Chooses from finite logits, with the draw at `quantile` in units of 2^-64; `None` if the mask leaves no token.
pub(crate) fn choose(
    params: &SamplingParams,
    quantile: u64,
    logits: &[f32],
    history: &History,
    allowed: Option<&[u32]>,
) -> Option<u32> {
    let adjusted = adjust(params, logits, history, allowed);
    let best = argmax(&adjusted).filter(|&id| adjusted[id as usize] > f32::NEG_INFINITY)?;
    if params.temperature == 0.0 {
        return Some(best);
    }
    let kept = filter::candidates(params, &adjusted, adjusted[best as usize]);
    Some(filter::draw(&kept, quantile).unwrap_or(best))
}

/// Applies bias, penalties and mask; a token that must not follow becomes negative infinity.
fn adjust(
    params: &SamplingParams,
    logits: &[f32],
    history: &History,
    allowed: Option<&[u32]>,
) -> Vec<f32> {
    let mut z = logits.to_vec();
    for &(token, bias) in &params.logit_bias {
        if let Some(l) = z.get_mut(token as usize) {
            *l = finite(*l + bias);
        }
    }
    history.penalise(params, &mut z);
    if let Some(words) = allowed {
        for (token, l) in z.iter_mut().enumerate() {
            let word = words.get(token / 32).copied().unwrap_or(0);
            if word >> (token % 32) & 1 == 0 {
                *l = f32::NEG_INFINITY;
            }
        }
    }
    z
}

/// Keeps an adjusted logit finite, however large bias and penalty are.
fn finite(l: f32) -> f32 {
    l.clamp(f32::MIN, f32::MAX)
}

/// Index of the largest value; ties by lowest index.
fn argmax(values: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    (!values.is_empty()).then_some(best as u32)
}

/// Log-softmax of the raw logits at `id` and at the `n` most likely tokens.
fn with_logprobs(id: u32, logits: &[f32], n: usize) -> Sampled {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from((l - max).exp())).sum();
    let logprob = |l: f32| (f64::from(l) - f64::from(max) - sum.ln()) as f32;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_rank = |a: &u32, b: &u32| {
        logits[*b as usize]
            .total_cmp(&logits[*a as usize])
            .then(a.cmp(b))
    };
    let n = n.min(order.len());
    if n > 0 && n < order.len() {
        order.select_nth_unstable_by(n - 1, by_rank);
    }
    order.truncate(n);
    order.sort_unstable_by(by_rank);
    Sampled {
        id,
        logprob: Some(logprob(logits[id as usize])),
        top: order
            .into_iter()
            .map(|id| TopLogprob {
                id,
                logprob: logprob(logits[id as usize]),
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests;
