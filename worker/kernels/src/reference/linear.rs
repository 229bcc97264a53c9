//! Linear layers.

use crate::HostMatrix;

use super::dequant_row;

/// `Σ_k x[k] * w[k]`.
pub fn linear_row(x: &[f32], w: &[f32]) -> f32 {
    let mut sum = 0f64;
    for (a, b) in x.iter().zip(w) {
        sum += f64::from(*a) * f64::from(*b);
    }
    sum as f32
}

/// `y = x Wᵀ + bias`: x `[tokens, cols]`, W `[rows, cols]` → y `[tokens, rows]`.
pub fn linear(x: &[f32], tokens: usize, w: &HostMatrix, bias: Option<&[f32]>) -> Vec<f32> {
    let (rows, cols) = (w.rows(), w.cols());
    let mut y = vec![0.0; tokens * rows];
    let mut weight = vec![0.0; cols];
    for r in 0..rows {
        dequant_row(w, r, &mut weight);
        for t in 0..tokens {
            let product = linear_row(&x[t * cols..(t + 1) * cols], &weight);
            y[t * rows + r] = product + bias.map_or(0.0, |b| b[r]);
        }
    }
    y
}
