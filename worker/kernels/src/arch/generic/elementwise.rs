//! Norm and gating.

use super::Simd;

/// See [`reference::rms_norm`](crate::reference::rms_norm). Squares are summed in four vectors in rotation,
/// `(s0 + s1) + (s2 + s3)`, then across lanes.
#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    let len = x.len();
    let mut sums = [simd.zero(); 4];
    for (turn, at) in (0..len).step_by(S::LANES).enumerate() {
        // SAFETY: `len - at` elements lie from `at` on.
        let v = unsafe { simd.load_partial(x.as_ptr().add(at), len - at) };
        sums[turn % 4] = simd.fma(v, v, sums[turn % 4]);
    }
    let total = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
    let mean = simd.reduce_add(total) / len as f32;
    let inverse = simd.splat(1.0 / (mean + eps).sqrt());
    for at in (0..len).step_by(S::LANES) {
        // SAFETY: all three slices have `len` elements.
        unsafe {
            let v = simd.load_partial(x.as_ptr().add(at), len - at);
            let w = simd.load_partial(weight.as_ptr().add(at), len - at);
            let y = simd.mul(simd.mul(v, inverse), w);
            simd.store_partial(out.as_mut_ptr().add(at), len - at, y);
        }
    }
}

/// See [`reference::silu_mul`](crate::reference::silu_mul).
#[inline(always)]
pub(crate) fn silu_mul<S: Simd>(simd: S, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len());
    let len = gate.len();
    for at in (0..len).step_by(S::LANES) {
        // SAFETY: all three slices have `len` elements.
        unsafe {
            let g = simd.load_partial(gate.as_ptr().add(at), len - at);
            let u = simd.load_partial(up.as_ptr().add(at), len - at);
            let negated = simd.sub(simd.zero(), g);
            let denominator = simd.add(simd.splat(1.0), simd.exp(negated));
            let y = simd.mul(simd.div(g, denominator), u);
            simd.store_partial(out.as_mut_ptr().add(at), len - at, y);
        }
    }
}
