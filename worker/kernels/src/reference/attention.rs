//! Attention of one query.

/// Softmax attention of one query over `n` keys: q `[k_dim]`, keys `[n, k_dim]`, values `[n, v_dim]` with
/// `v_stride` elements from one value to the next → out `[v_dim]`. `scale` multiplies the scores.
pub fn attention_head(
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    v_stride: usize,
    scale: f32,
    out: &mut [f32],
) {
    let n = keys.len() / q.len();
    let scores: Vec<f64> = (0..n)
        .map(|j| {
            let key = &keys[j * q.len()..(j + 1) * q.len()];
            let dot: f64 = q
                .iter()
                .zip(key)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum();
            dot * f64::from(scale)
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    for (c, out) in out.iter_mut().enumerate() {
        let sum: f64 = weights
            .iter()
            .enumerate()
            .map(|(j, w)| w * f64::from(values[j * v_stride + c]))
            .sum();
        *out = (sum / total) as f32;
    }
}
