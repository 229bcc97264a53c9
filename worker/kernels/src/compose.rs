//! Operations of several steps, composed of single ones: their specification, and what a device does that gains nothing from
//! running them at once.

use crate::ops::{AttentionOps, LinearOps};
use crate::{BlockId, Heads, KernelError, Latents, MlaHeads, RopeTable, Span, checks};

/// [`AttentionOps::cache_heads`].
///
/// # Errors
/// [`KernelError::Shape`] unless all heads are of `head_dim`; errors of the single operations.
pub fn cache_heads<B: AttentionOps + ?Sized>(
    backend: &B,
    kv: &mut B::Kv,
    layer: usize,
    spans: &[Span],
    heads: Heads<'_, B::Tensor, B::Vector>,
) -> Result<B::Tensor, KernelError> {
    let Heads {
        q,
        k,
        v,
        norms,
        eps,
        head_dim,
        positions,
        rope,
    } = heads;
    checks::cache_heads(&backend.kv_layout(kv), backend.shape(&q), head_dim)?;
    let turned = |x: B::Tensor, norm: Option<&B::Vector>| -> Result<B::Tensor, KernelError> {
        let mut x = match norm {
            Some(norm) => backend.rms_norm(&x, norm, eps)?,
            None => x,
        };
        let heads = backend.shape(&x).1 / head_dim;
        backend.rope(&mut x, (heads, 0), positions, rope)?;
        Ok(x)
    };
    let q = turned(q, norms.map(|norms| norms.0))?;
    let k = turned(k, norms.map(|norms| norms.1))?;
    backend.kv_append(kv, layer, &k, Some(&v), spans)?;
    Ok(q)
}

/// [`AttentionOps::cache_latents`].
///
/// # Errors
/// Errors of the single operations.
pub fn cache_latents<B: AttentionOps + ?Sized>(
    backend: &B,
    kv: &mut B::Kv,
    layer: usize,
    spans: &[Span],
    latents: Latents<'_, B::Tensor, B::Vector>,
) -> Result<Option<B::Tensor>, KernelError> {
    let Latents {
        kv_a,
        kv_norm,
        q_a,
        rank,
        eps,
        positions,
        rope,
    } = latents;
    let rotated = backend.shape(&kv_a).1.saturating_sub(rank);
    // latent [rows, rank]; k_rope [rows, rope]; key [rows, rank + rope]
    let latent = backend.columns(&kv_a, 1, 0, rank)?;
    let latent = backend.rms_norm(&latent, kv_norm, eps)?;
    let mut k_rope = backend.columns(&kv_a, 1, rank, rotated)?;
    backend.rope(&mut k_rope, (1, 0), positions, rope)?;
    let key = backend.interleave(&latent, &k_rope, 1)?;
    backend.kv_append(kv, layer, &key, None, spans)?;
    q_a.map(|(q_a, norm)| backend.rms_norm(&q_a, norm, eps))
        .transpose()
}

/// [`AttentionOps::latent_queries`].
///
/// # Errors
/// Errors of the single operations.
pub fn latent_queries<B: AttentionOps + LinearOps + ?Sized>(
    backend: &B,
    q: &B::Tensor,
    kv_b: &B::Weight,
    dims: MlaHeads,
    positions: &[u32],
    rope: &RopeTable,
) -> Result<B::Tensor, KernelError> {
    let MlaHeads { heads, nope, .. } = dims;
    let rotated = (backend.shape(q).1 / heads.max(1)).saturating_sub(nope);
    // q_nope [rows, heads * nope], q_rope [rows, heads * rope], q_latent [rows, heads * rank]
    let q_nope = backend.columns(q, heads, 0, nope)?;
    let mut q_rope = backend.columns(q, heads, nope, rotated)?;
    backend.rope(&mut q_rope, (heads, 0), positions, rope)?;
    let q_latent = backend.mla_absorb(&q_nope, kv_b, dims)?;
    backend.interleave(&q_latent, &q_rope, heads)
}

/// Expands cached latents to what heads store with grouped queries: keys `[W_UK c_KV, k_R]` and values `W_UV c_KV`
/// (DeepSeek-V3, arXiv:2412.19437, equations 2, 4 and 5), rounded like all that is cached.
///
/// `latents`: a cache, the layer, and the blocks of a sequence; `kv_b` `[heads * (nope + v), rank]`; `to`: the positions,
/// with their blocks in layer 0 of `expanded`, which has a key and a value for each of these heads.
///
/// # Errors
/// Errors of the single operations.
pub fn expand_latents<B: AttentionOps + ?Sized>(
    backend: &B,
    (kv, layer, blocks): (&B::Kv, usize, &[BlockId]),
    kv_b: &B::Weight,
    dims: MlaHeads,
    expanded: &mut B::Kv,
    to: &Span,
) -> Result<(), KernelError> {
    // latents [tokens, rank + rope]
    let latents = backend.kv_rows(kv, layer, blocks, to.start, to.rows)?;
    // product [tokens, heads * (nope + v)]
    let product = backend.linear(&backend.columns(&latents, 1, 0, dims.rank)?, kv_b, None)?;
    backend.kv_append_expanded(expanded, (product, latents), dims, to)
}

/// [`AttentionOps::kv_append_expanded`].
///
/// # Errors
/// Errors of the single operations.
pub fn kv_append_expanded<B: AttentionOps + ?Sized>(
    backend: &B,
    kv: &mut B::Kv,
    (product, latents): (B::Tensor, B::Tensor),
    dims: MlaHeads,
    to: &Span,
) -> Result<(), KernelError> {
    let MlaHeads {
        heads,
        nope,
        v,
        rank,
    } = dims;
    let rotated = backend.shape(&latents).1.saturating_sub(rank);
    // k_rope [tokens, heads * rope]: the same for all heads
    let mut k_rope = backend.columns(&latents, 1, rank, rotated)?;
    drop(latents);
    while backend.shape(&k_rope).1 < heads * rotated {
        k_rope = backend.interleave(&k_rope, &k_rope, 1)?;
    }
    let k_rope = backend.columns(&k_rope, 1, 0, heads * rotated)?;
    let k_nope = backend.columns(&product, heads, 0, nope)?;
    let values = backend.columns(&product, heads, nope, v)?;
    drop(product);
    let keys = backend.interleave(&k_nope, &k_rope, heads)?;
    backend.kv_append(kv, 0, &keys, Some(&values), std::slice::from_ref(to))
}
