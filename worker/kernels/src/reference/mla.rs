//! Latent attention's per-head up-projections.

use crate::{HostMatrix, MlaHeads};

use super::{dequant_row, linear, linear_row};

/// `q_latent[h] = q_nope[h] · W_UK[h]`: `[tokens, heads * nope]` → `[tokens, heads * rank]`, where `W_UK[h]`
/// `[nope, rank]` are the first `nope` of the `nope + v` rows of head `h` in `kv_b`.
pub fn mla_absorb(q_nope: &[f32], tokens: usize, kv_b: &HostMatrix, dims: MlaHeads) -> Vec<f32> {
    let MlaHeads {
        heads,
        nope,
        v,
        rank,
    } = dims;
    let mut out = vec![0.0; tokens * heads * rank];
    let mut weight = vec![0.0; rank];
    for h in 0..heads {
        let mut sums = vec![0f64; tokens * rank];
        for i in 0..nope {
            dequant_row(kv_b, h * (nope + v) + i, &mut weight);
            for t in 0..tokens {
                let q = f64::from(q_nope[(t * heads + h) * nope + i]);
                for (c, w) in weight.iter().enumerate() {
                    sums[t * rank + c] += q * f64::from(*w);
                }
            }
        }
        for t in 0..tokens {
            for c in 0..rank {
                out[(t * heads + h) * rank + c] = sums[t * rank + c] as f32;
            }
        }
    }
    out
}

/// `o[h] = W_UV[h] · latent[h]`: `[tokens, heads * rank]` → `[tokens, heads * v]`, where `W_UV[h]` `[v, rank]`
/// are the last `v` of the `nope + v` rows of head `h` in `kv_b`.
pub fn mla_expand(latent: &[f32], tokens: usize, kv_b: &HostMatrix, dims: MlaHeads) -> Vec<f32> {
    let MlaHeads {
        heads,
        nope,
        v,
        rank,
    } = dims;
    let mut out = vec![0.0; tokens * heads * v];
    let mut weight = vec![0.0; rank];
    for h in 0..heads {
        for i in 0..v {
            dequant_row(kv_b, h * (nope + v) + nope + i, &mut weight);
            for t in 0..tokens {
                let x = &latent[(t * heads + h) * rank..][..rank];
                out[(t * heads + h) * v + i] = linear_row(x, &weight);
            }
        }
    }
    out
}

/// Keys `[tokens, heads * (nope + rope)]` and values `[tokens, heads * v]` of latents `[tokens, rank + rope]`: for each head
/// `[W_UK[h] · c_KV, k_R]` and `W_UV[h] · c_KV`.
pub fn expand_latents(
    latents: &[f32],
    tokens: usize,
    kv_b: &HostMatrix,
    dims: MlaHeads,
) -> (Vec<f32>, Vec<f32>) {
    let MlaHeads {
        heads,
        nope,
        v,
        rank,
    } = dims;
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for latent in latents.chunks(latents.len() / tokens) {
        let (c_kv, k_rope) = latent.split_at(rank);
        for head in linear(c_kv, 1, kv_b, None).chunks(nope + v).take(heads) {
            let (k_nope, value) = head.split_at(nope);
            keys.extend_from_slice(k_nope);
            keys.extend_from_slice(k_rope);
            values.extend_from_slice(value);
        }
    }
    (keys, values)
}
