//! Root-mean-square norm.

/// `y = x / sqrt(mean(x²) + eps) * weight` over one group of `weight.len()` elements.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let mut squares = 0f64;
    for &v in x {
        squares += f64::from(v) * f64::from(v);
    }
    let mean = squares / x.len() as f64;
    let inverse = 1.0 / (mean + f64::from(eps)).sqrt();
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
        *y = (f64::from(x) * inverse) as f32 * w;
    }
}
