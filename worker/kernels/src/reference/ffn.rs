//! SwiGLU feed-forward blocks.

use crate::HostMatrix;

use super::linear;

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    let x = f64::from(x);
    (x / (1.0 + (-x).exp())) as f32
}

/// `silu(gate) * up`, element by element.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
        *out = silu(gate) * up;
    }
}

/// `down(silu(gate x) * (up x))` of x `[tokens, hidden]` → `[tokens, hidden]`.
pub fn expert(
    x: &[f32],
    tokens: usize,
    gate: &HostMatrix,
    up: &HostMatrix,
    down: &HostMatrix,
) -> Vec<f32> {
    let gated = linear(x, tokens, gate, None);
    let raised = linear(x, tokens, up, None);
    let mut inner = vec![0.0; gated.len()];
    silu_mul(&gated, &raised, &mut inner);
    linear(&inner, tokens, down, None)
}
