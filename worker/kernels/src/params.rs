//! Parameters of operations, common to all devices.

use crate::BlockId;

/// Pairing of a head's elements for rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Element `i` with `i + dim/2` (Llama, Qwen).
    Half,
    /// Element `2i` with `2i + 1` (DeepSeek); the result stays interleaved, and since queries and keys are
    /// permuted alike, their products equal those of the published layout.
    Interleaved,
}

/// Rotary angles: `angle(p, i) = p * inv_freq[i]`, cosine and sine scaled by `magnitude` (YaRN's mscale).
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// `[rotary_dim / 2]` inverse frequencies, radians per position.
    pub inv_freq: Vec<f32>,
    /// Factor for cosine and sine.
    pub magnitude: f32,
    /// Pairing.
    pub layout: RopeLayout,
}

/// Rows of a batch that belong to one sequence: `rows` consecutive tokens starting at absolute position
/// `start`, whose KV (and that of all earlier positions) lies in `blocks`, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub first_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Absolute position of the first row.
    pub start: usize,
    /// Blocks of the sequence from position 0; cover `start + rows` tokens.
    pub blocks: Vec<BlockId>,
}

/// Attention parameters that are not in the cache's layout.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSpec {
    /// Query heads; a multiple of the layout's `kv_heads`, and head `h` reads kv head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor for the scores before softmax.
    pub scale: f32,
}

/// Dimensions of latent attention's per-head up-projection `kv_b_proj` `[heads * (nope + v), rank]`:
/// for each head, `nope` rows of keys, then `v` rows of values.
#[derive(Clone, Copy, Debug)]
pub struct MlaHeads {
    /// Number of heads.
    pub heads: usize,
    /// Elements of the non-positional part of a query or key.
    pub nope: usize,
    /// Elements of a value.
    pub v: usize,
    /// `kv_lora_rank`.
    pub rank: usize,
}

/// Projections of a layer's rows on their way to the cache and to attention, with grouped queries.
pub struct Heads<'a, T, V> {
    /// `[rows, heads * head_dim]`, as projected.
    pub q: T,
    /// `[rows, kv_heads * head_dim]`, as projected.
    pub k: T,
    /// `[rows, kv_heads * head_dim]`.
    pub v: T,
    /// Norms of each head of queries and of keys, if the architecture has them (Qwen3).
    pub norms: Option<(&'a V, &'a V)>,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Elements of a head.
    pub head_dim: usize,
    /// `[rows]` absolute positions.
    pub positions: &'a [u32],
    /// Rotation of queries and keys.
    pub rope: &'a RopeTable,
}

/// Compressed projections of a layer's rows, with latent attention.
pub struct Latents<'a, T, V> {
    /// `[rows, rank + rope]`: the latent of keys and values, then the key's rotated part.
    pub kv_a: T,
    /// Norm of the latent.
    pub kv_norm: &'a V,
    /// `[rows, q_rank]`, and its norm, if queries are compressed too.
    pub q_a: Option<(T, &'a V)>,
    /// `kv_lora_rank`.
    pub rank: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// `[rows]` absolute positions.
    pub positions: &'a [u32],
    /// Rotation of the key's part.
    pub rope: &'a RopeTable,
}

/// Function from router logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts (Qwen3-MoE).
    Softmax,
    /// Sigmoid of each (DeepSeek-V3).
    Sigmoid,
}

/// Choice of experts for each token.
#[derive(Clone, Copy, Debug)]
pub struct RouterSpec {
    /// Score function.
    pub score: RouterScore,
    /// Experts per token.
    pub top_k: usize,
    /// Groups of experts (1: no grouping); a group's score is the sum of its two best biased scores.
    pub groups: usize,
    /// Groups that stay eligible.
    pub top_groups: usize,
    /// Whether to divide the chosen scores by their sum.
    pub normalize: bool,
    /// Factor for the weights, applied last.
    pub scaling: f32,
}

/// Experts chosen for each token. Both vectors are `[tokens, top_k]`; a token's experts are in
/// ascending order of index.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Experts per token.
    pub top_k: usize,
    /// Expert indices.
    pub experts: Vec<u32>,
    /// Weights of their outputs.
    pub weights: Vec<f32>,
}

/// One routed expert and the tokens that chose it: a SwiGLU feed-forward block
/// `down(silu(gate x) * (up x))`, added into the sum with a weight for each token.
pub struct ExpertCall<'a, W> {
    /// Index among the layer's experts; it decides where in the sum the output is added
    /// ([`expert_sum`](crate::expert_sum)).
    pub expert: u32,
    /// `[intermediate, hidden]`.
    pub gate: &'a W,
    /// `[intermediate, hidden]`.
    pub up: &'a W,
    /// `[hidden, intermediate]`.
    pub down: &'a W,
    /// Rows of the input, ascending.
    pub rows: &'a [u32],
    /// Weight of each of those rows.
    pub weights: &'a [f32],
}

/// Where the weighted outputs of experts are that were computed apart, each with only one term of its token's sum.
#[derive(Clone, Copy, Debug)]
pub struct ExpertProducts<'a> {
    /// Number of experts of the layer.
    pub experts: usize,
    /// The router's choice.
    pub routing: &'a Routing,
    /// `[tokens, top_k]`: for each choice the row of its product.
    pub rows: &'a [u32],
}

/// The three matrices of a routed expert, as in [`ExpertCall`].
pub struct ExpertWeights<'a, W> {
    /// `[intermediate, hidden]`.
    pub gate: &'a W,
    /// `[intermediate, hidden]`.
    pub up: &'a W,
    /// `[hidden, intermediate]`.
    pub down: &'a W,
}
