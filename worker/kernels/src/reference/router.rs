//! Choice of experts.

use std::cmp::Ordering;

use crate::{RouterScore, RouterSpec};

/// Chooses the experts of one token from its logits `[experts]`: `(expert, weight)` in ascending order of
/// expert. Ties go to the lower index; a NaN is chosen last.
///
/// Sigmoid with groups is DeepSeek-V3's published gate: scores are sigmoids; the choice is made on
/// `score + bias`; a group's score is the sum of its two best; only experts of the best `top_groups` groups
/// are eligible; weights are the chosen unbiased scores, divided by their sum (plus 1e-20) when `normalize`,
/// times `scaling`. Softmax over all experts is Qwen3-MoE's.
pub fn route_token(logits: &[f32], bias: Option<&[f32]>, spec: &RouterSpec) -> Vec<(u32, f32)> {
    let scores = match spec.score {
        RouterScore::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        RouterScore::Softmax => softmax(logits),
    };
    let biased: Vec<f32> = match bias {
        Some(bias) => scores.iter().zip(bias).map(|(s, b)| s + b).collect(),
        None => scores.clone(),
    };
    let group_size = logits.len() / spec.groups;
    let group_scores: Vec<f32> = biased
        .chunks(group_size)
        .map(|group| {
            best(group, 2)
                .into_iter()
                .map(|e| group[e])
                .fold(0.0, |sum, score| sum + score)
        })
        .collect();
    let eligible: Vec<usize> = best(&group_scores, spec.top_groups)
        .into_iter()
        .flat_map(|g| g * group_size..(g + 1) * group_size)
        .collect();
    let candidates: Vec<f32> = eligible.iter().map(|&e| biased[e]).collect();
    let chosen: Vec<usize> = best(&candidates, spec.top_k)
        .into_iter()
        .map(|i| eligible[i])
        .collect();

    let mut divisor = 1.0;
    if spec.normalize {
        divisor = chosen.iter().fold(0.0, |sum, &e| sum + scores[e]) + 1e-20;
    }
    chosen
        .into_iter()
        .map(|e| (e as u32, scores[e] / divisor * spec.scaling))
        .collect()
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exps: Vec<f32> = logits.iter().map(|x| (x - max).exp()).collect();
    let total = exps.iter().fold(0.0, |sum, x| sum + x);
    exps.into_iter().map(|x| x / total).collect()
}

/// Indices of the `count` greatest values, in ascending order.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| descending(values[a], values[b]).then(a.cmp(&b)));
    order.truncate(count);
    order.sort_unstable();
    order
}

fn descending(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a)
        .unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}
