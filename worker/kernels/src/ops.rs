//! The device boundary: every operation that the engine needs from a device, with one trait per group of operations.
//!
//! Tensors are matrices of f32 activations, row-major `[rows, cols]`, one row per token. Weights keep the
//! checkpoint's element type. A backend runs its operations in call order.
//!
//! A backend implements a group in the file that holds its operations. Code that is generic over the device bounds
//! [`Backend`] alone; code that names a device imports the groups that it calls, or `ops::*`.

use std::ops::Range;

use crate::{
    AttentionSpec, BlockId, ExpertCall, ExpertProducts, ExpertWeights, Heads, HostMatrix,
    KernelError, KvLayout, Latents, MlaHeads, RopeTable, RouterSpec, Routing, SampleFault,
    SampleSpec, Span, compose,
};

/// A device that runs the engine's operations: all groups.
///
/// Every operation is batch-invariant (see the crate's invariant). Shapes are checked: a mismatch is
/// [`KernelError::Shape`], never undefined behaviour.
pub trait Backend: ElementwiseOps + LinearOps + AttentionOps + ExpertOps + SampleOps {}

impl<B: ElementwiseOps + LinearOps + AttentionOps + ExpertOps + SampleOps> Backend for B {}

/// Memory of a device that has its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes in use: weights, KV, activations and working memory.
    pub used_bytes: u64,
    /// Largest number of bytes that were taken at once, with those that a device keeps for reuse.
    pub peak_bytes: u64,
    /// Bytes that may be used.
    pub budget_bytes: u64,
}

/// A device: its threads, its description, and the begin and end of a pass.
pub trait DeviceOps: Send + Sync + 'static {
    /// Called once by the thread that makes all later calls: a backend with threads
    /// of its own binds this one along with them.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the system refuses.
    fn bind_thread(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Binds the compute threads, each to its own CPU from the front of `cpus`; with fewer CPUs than threads, only as
    /// many threads compute. May be called at any time, from any thread, and again whenever the CPUs of the process
    /// change: some kernels forget thread bindings. Returns the number of threads that compute on CPUs; 0 for a GPU.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the system refuses a CPU.
    fn bind_compute_threads(&self, cpus: &[usize]) -> Result<usize, KernelError> {
        let _ = cpus;
        Ok(0)
    }

    /// UUID of the GPU that computes; `None` if CPUs do.
    fn gpu_uuid(&self) -> Option<String> {
        None
    }

    /// Description of the backend for logs and profiles, such as `cpu avx512 ×2`.
    fn describe(&self) -> String;
    /// Identifier that two backends must share for their bits to be equal: it covers kernels, not threads.
    fn numerics(&self) -> String;
    /// Read bandwidth of the device's memory while it is otherwise idle,
    /// from a buffer of `bytes` bytes, GB/s: the yardstick for decode.
    fn read_bandwidth_gbps(&self, bytes: usize) -> Result<f64, KernelError>;

    /// Products (multiplications with an addition) that an operation may take, so that a pass can be ended soon between two
    /// of them; `None` if operations are queued rather than computed when they are called.
    fn longest_operation_products(&self) -> Option<u64> {
        None
    }

    /// Whether operations are queued: a call returns before the device has computed, so that the host may prepare the next
    /// step meanwhile.
    fn queues_operations(&self) -> bool {
        false
    }

    /// Memory of the device; `None` if it computes in the host's.
    fn device_memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Begins a forward pass of `rows` rows.
    fn begin_pass(&self, rows: usize) -> Result<(), KernelError> {
        let _ = rows;
        Ok(())
    }

    /// Launches all work that the device has deferred, and waits for none of it: before the host computes, so that both
    /// compute at once.
    fn submit(&self) -> Result<(), KernelError> {
        Ok(())
    }

    /// Ends a forward pass: launches all work that the device has deferred.
    fn finish(&self) -> Result<(), KernelError> {
        Ok(())
    }
}

/// Weights, vectors and activations in a device's memory.
pub trait MemoryOps: DeviceOps {
    /// f32 activations `[rows, cols]`.
    type Tensor: Send + 'static;
    /// A weight matrix `[out, in]`, ready for use; cheap to clone.
    type Weight: Clone + Send + Sync + 'static;
    /// A vector of f32 parameters (norm weights, biases); cheap to clone.
    type Vector: Clone + Send + Sync + 'static;
    /// A copy of bytes to the host that was queued; dropping it waits for nothing.
    type HostCopy: Send + 'static;
    /// Activations whose rows come from the host, piece by piece.
    type Incoming: Send + 'static;

    /// Prepares a weight; on the CPU this borrows the mapped bytes.
    fn weight(&self, matrix: &HostMatrix) -> Result<Self::Weight, KernelError>;
    /// The rows `first..first + rows` of a weight as a weight, over the same memory.
    fn weight_rows(
        &self,
        w: &Self::Weight,
        first: usize,
        rows: usize,
    ) -> Result<Self::Weight, KernelError>;
    /// Prepares a vector.
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, KernelError>;
    /// Copies activations to the device.
    fn upload(&self, rows: usize, cols: usize, values: &[f32])
    -> Result<Self::Tensor, KernelError>;
    /// Copies activations to the host, row-major.
    fn download(&self, x: &Self::Tensor) -> Result<Vec<f32>, KernelError>;
    /// Queues a copy of some rows of `x` to the host, behind everything that was queued so far, and waits for none of it: the
    /// device computes meanwhile, and later operations may change `x`. Bytes are those of the elements, row-major, f32,
    /// little-endian. Copies arrive in the order in which they were begun.
    fn rows_read_begin(
        &self,
        x: &Self::Tensor,
        rows: Range<usize>,
    ) -> Result<Self::HostCopy, KernelError>;
    /// Whether the bytes are on the host. This, the wait and the end may be called from any thread.
    fn host_copy_is_done(&self, copy: &Self::HostCopy) -> Result<bool, KernelError>;
    /// Waits until the bytes are on the host.
    fn host_copy_wait(&self, copy: &Self::HostCopy) -> Result<(), KernelError>;
    /// Returns the bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`] if nothing has waited for them, nor seen them arrive.
    fn host_copy_end(&self, copy: Self::HostCopy) -> Result<Vec<u8>, KernelError>;
    /// Takes memory for activations `[rows, cols]` that come from the host: what is computed from now on does not wait for them.
    fn rows_write_begin(&self, rows: usize, cols: usize) -> Result<Self::Incoming, KernelError>;
    /// Queues the copy of some of them, of whole rows from row `first` on; `values` may change once this has returned. The
    /// device computes meanwhile, and copies of weights take turns with it.
    fn rows_write(
        &self,
        incoming: &mut Self::Incoming,
        first: usize,
        values: &[f32],
    ) -> Result<(), KernelError>;
    /// Returns the activations, for operations that then wait for what was copied. Rows that did not come hold anything.
    fn rows_write_end(&self, incoming: Self::Incoming) -> Result<Self::Tensor, KernelError>;
    /// Shape `[rows, cols]` of a tensor.
    fn shape(&self, x: &Self::Tensor) -> (usize, usize);
    /// Returns a zero tensor.
    fn zeros(&self, rows: usize, cols: usize) -> Result<Self::Tensor, KernelError>;
}

/// Loading of weights into a device's memory while it computes.
///
/// A device has two orders of operations, each a lane: what it computes, which one thread queues, and copies, which another
/// one may queue. A mark is a point in one of them.
pub trait LoadOps: MemoryOps {
    /// A point in the order of a lane: everything that was queued there before.
    type Mark: Clone + Send + Sync + 'static;
    /// Memory that weights are loaded into, again and again.
    type Slot: Send + Sync + 'static;

    /// Takes `count` slots of `bytes` bytes each out of the device's memory, and waits until nothing uses it any more.
    fn slots(&self, bytes: usize, count: usize) -> Result<Vec<Self::Slot>, KernelError>;
    /// Gives slots back to the device's memory, for what is computed from now on: that waits for copies into them. Weights
    /// that were loaded into them must not be used any more.
    fn give_back(&self, slots: Vec<Self::Slot>) -> Result<(), KernelError>;
    /// Bytes of a slot that a matrix takes, with its scales.
    fn slot_bytes(&self, matrix: &HostMatrix) -> usize;
    /// Lets copies into a slot that are queued from now on wait for `free`. Weights that were loaded into it before must
    /// not be used by operations that are queued after that mark.
    fn reuse(&self, slot: &Self::Slot, free: Option<&Self::Mark>) -> Result<(), KernelError>;
    /// Says that nothing that is queued from now on reads the weights in a slot. A device that checks its users refuses later
    /// reads; one that does not has nothing to do before [`LoadOps::reuse`].
    fn vacate(&self, _slot: &Self::Slot) {}
    /// Does what the first copy of a matrix does beside copying, ahead of it and from any thread; returns whether there is
    /// anything of that kind on this device, which registers pages or searches weights.
    fn prepare(&self, _matrix: &HostMatrix) -> Result<bool, KernelError> {
        Ok(false)
    }
    /// Queues the copy of a matrix to the byte `at` of a slot.
    fn load(
        &self,
        matrix: &HostMatrix,
        slot: &Self::Slot,
        at: usize,
    ) -> Result<Self::Weight, KernelError>;
    /// Marks the copies that were queued so far.
    fn copied(&self) -> Result<Self::Mark, KernelError>;
    /// Marks the computation that was queued so far.
    fn computed(&self) -> Result<Self::Mark, KernelError>;
    /// Lets computation that is queued from now on wait for a mark.
    fn after(&self, mark: &Self::Mark) -> Result<(), KernelError>;
    /// Lets the calling thread wait until a mark is reached.
    fn wait(&self, mark: &Self::Mark) -> Result<(), KernelError>;
    /// Time from one mark to a later one of the same lane, ns, by the device's clock; `None` if it is not reached yet.
    fn ns_between(&self, from: &Self::Mark, to: &Self::Mark) -> Option<u64>;
}

/// Operations whose cost is dominated by touching their operands.
pub trait ElementwiseOps: MemoryOps {
    /// Looks up rows of `table` `[vocab, hidden]` for `tokens` → `[tokens, hidden]`.
    fn embed(&self, table: &Self::Weight, tokens: &[u32]) -> Result<Self::Tensor, KernelError>;
    /// Root-mean-square norm over consecutive groups of `weight.len()` columns (one group: the usual norm;
    /// several: Qwen3's per-head norm). `y = x / sqrt(mean(x²) + eps) * weight`.
    fn rms_norm(
        &self,
        x: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
    ) -> Result<Self::Tensor, KernelError>;
    /// Computes `residual += delta`, then the norm of the sum.
    fn add_rms_norm(
        &self,
        residual: &mut Self::Tensor,
        delta: &Self::Tensor,
        weight: &Self::Vector,
        eps: f32,
    ) -> Result<Self::Tensor, KernelError>;
    /// Returns `x + delta`; a device may leave the sum to what reads it.
    fn sum(&self, mut x: Self::Tensor, delta: Self::Tensor) -> Result<Self::Tensor, KernelError> {
        self.add_assign(&mut x, &delta)?;
        Ok(x)
    }
    /// Computes `x += delta`.
    fn add_assign(&self, x: &mut Self::Tensor, delta: &Self::Tensor) -> Result<(), KernelError>;
    /// Computes `silu(gate) * up`, element by element, in the memory of `gate` where a device can.
    fn silu_mul(&self, gate: Self::Tensor, up: &Self::Tensor) -> Result<Self::Tensor, KernelError>;
    /// Joins columns `first..first + cols` of each of `groups` equal column groups of `x`:
    /// `[rows, groups * w]` → `[rows, groups * cols]` (splits q into its parts, kv_a into latent and rope).
    fn columns(
        &self,
        x: &Self::Tensor,
        groups: usize,
        first: usize,
        cols: usize,
    ) -> Result<Self::Tensor, KernelError>;
    /// Joins, for each of `groups`, the groups of `a` and `b` (inverse of two `columns`).
    fn interleave(
        &self,
        a: &Self::Tensor,
        b: &Self::Tensor,
        groups: usize,
    ) -> Result<Self::Tensor, KernelError>;
    /// Picks rows of `x` in the given order (the last row of each sequence before the head).
    fn rows(&self, x: &Self::Tensor, rows: &[u32]) -> Result<Self::Tensor, KernelError>;
    /// Copies `tile` into `x`, its first element to this row and column.
    fn put_tile(
        &self,
        x: &mut Self::Tensor,
        at: (usize, usize),
        tile: &Self::Tensor,
    ) -> Result<(), KernelError>;
    /// Rotates, in place, `2 * inv_freq.len()` columns of each head. `heads`: their number, and the first of those columns;
    /// `positions`: one absolute position per row.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        heads: (usize, usize),
        positions: &[u32],
        table: &RopeTable,
    ) -> Result<(), KernelError>;
}

/// Products of activations with weights.
pub trait LinearOps: MemoryOps {
    /// Computes `y = x Wᵀ + bias`: `[rows, in]` × `[out, in]` → `[rows, out]`. Sums stay f32, and so do activations
    /// unless the backend was opened with rounded ones.
    fn linear(
        &self,
        x: &Self::Tensor,
        w: &Self::Weight,
        bias: Option<&Self::Vector>,
    ) -> Result<Self::Tensor, KernelError>;
    /// Computes a router's logits `y = x Wᵀ`: `[rows, in]` × `[experts, in]` → `[rows, experts]`. Activations are never
    /// rounded: near ties decide which expert runs.
    fn router_linear(
        &self,
        x: &Self::Tensor,
        w: &Self::Weight,
    ) -> Result<Self::Tensor, KernelError> {
        self.linear(x, w, None)
    }

    /// Several products of the same `x`, each with its weight and bias as in [`LinearOps::linear`] and with the same bits:
    /// one launch where a device can. Results are in the order of `products`.
    fn linears(
        &self,
        x: &Self::Tensor,
        products: &[(&Self::Weight, Option<&Self::Vector>)],
    ) -> Result<Vec<Self::Tensor>, KernelError> {
        let product = |(w, bias): &(&Self::Weight, Option<&Self::Vector>)| self.linear(x, w, *bias);
        products.iter().map(product).collect()
    }
    /// Latent attention, absorbed queries: `q_latent[h] = q_nope[h] · W_UK[h]`,
    /// `[rows, heads * nope]` → `[rows, heads * rank]`; `W_UK[h]` are head `h`'s first `nope` rows of `kv_b`.
    fn mla_absorb(
        &self,
        q_nope: &Self::Tensor,
        kv_b: &Self::Weight,
        heads: MlaHeads,
    ) -> Result<Self::Tensor, KernelError>;
    /// Latent attention, outputs: `o[h] = W_UV[h] · latent[h]`, `[rows, heads * rank]` → `[rows, heads * v]`.
    fn mla_expand(
        &self,
        latent: &Self::Tensor,
        kv_b: &Self::Weight,
        heads: MlaHeads,
    ) -> Result<Self::Tensor, KernelError>;
}

/// The paged KV cache.
pub trait KvOps: MemoryOps {
    /// Paged keys and values of all layers.
    type Kv: Send + 'static;

    /// Allocates `blocks` blocks of KV.
    fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<Self::Kv, KernelError>;
    /// Returns the layout of a cache.
    fn kv_layout(&self, kv: &Self::Kv) -> KvLayout;
    /// Stores the keys `[rows, kv_heads * k_dim]` and values `[rows, kv_heads * v_dim]` (`None` if the value
    /// is in the key) of the spans' rows at their positions.
    fn kv_append(
        &self,
        kv: &mut Self::Kv,
        layer: usize,
        keys: &Self::Tensor,
        values: Option<&Self::Tensor>,
        spans: &[Span],
    ) -> Result<(), KernelError>;
    /// Copies out the stored bytes of `tokens` tokens in one layer, starting at a sequence's `first_token`
    /// (`token_layer_bytes` each, in order).
    fn kv_read(
        &self,
        kv: &Self::Kv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Vec<u8>, KernelError> {
        let copy = self.kv_read_begin(kv, layer, blocks, first_token, tokens)?;
        self.host_copy_wait(&copy)?;
        self.host_copy_end(copy)
    }
    /// Queues what [`KvOps::kv_read`] does, behind everything that was queued so far, and waits for none of it; operations
    /// that are queued later may write there. Copies arrive in the order in which they were begun.
    fn kv_read_begin(
        &self,
        kv: &Self::Kv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Self::HostCopy, KernelError>;
    /// Returns what is stored of `tokens` tokens in one layer, starting at a sequence's `first_token`, as activations
    /// `[tokens, token_elements]`: keys, then values unless they are in the keys.
    fn kv_rows(
        &self,
        kv: &Self::Kv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Self::Tensor, KernelError>;
    /// Writes the bytes that another worker's [`KvOps::kv_read`] returned.
    fn kv_write(
        &self,
        kv: &mut Self::Kv,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), KernelError>;
}

/// Attention over the paged KV cache.
pub trait AttentionOps: KvOps + ElementwiseOps + LinearOps {
    /// Normalises the heads of queries and keys where the architecture does so, rotates them, and stores keys and values at
    /// the spans' positions → the queries `[rows, heads * head_dim]`.
    fn cache_heads(
        &self,
        kv: &mut Self::Kv,
        layer: usize,
        spans: &[Span],
        heads: Heads<'_, Self::Tensor, Self::Vector>,
    ) -> Result<Self::Tensor, KernelError> {
        compose::cache_heads(self, kv, layer, spans, heads)
    }
    /// Normalises both latents, rotates the key's part, and stores the key `[norm(c_KV), rope(k_R)]` at the spans'
    /// positions → the queries' latent `[rows, q_rank]`, if there is one (DeepSeek-V3, arXiv:2412.19437, equations 1, 3, 4).
    fn cache_latents(
        &self,
        kv: &mut Self::Kv,
        layer: usize,
        spans: &[Span],
        latents: Latents<'_, Self::Tensor, Self::Vector>,
    ) -> Result<Option<Self::Tensor>, KernelError> {
        compose::cache_latents(self, kv, layer, spans, latents)
    }
    /// Stores the keys and values of expanded latents in layer 0, at the positions of `to`: of `heads * (nope + v)` columns of
    /// `product`, a head's first `nope` are its key's, before the columns from `rank` on of `latents` `[rows, rank + rope]`,
    /// which all heads share, and the others are its value.
    fn kv_append_expanded(
        &self,
        kv: &mut Self::Kv,
        (product, latents): (Self::Tensor, Self::Tensor),
        heads: MlaHeads,
        to: &Span,
    ) -> Result<(), KernelError> {
        compose::kv_append_expanded(self, kv, (product, latents), heads, to)
    }
    /// Absorbs and rotates queries `[rows, heads * (nope + rope)]` → for each head `[W_UKᵀ q_C, rope(q_R)]`,
    /// `[rows, heads * (rank + rope)]` (equations 6 to 9).
    fn latent_queries(
        &self,
        q: &Self::Tensor,
        kv_b: &Self::Weight,
        heads: MlaHeads,
        positions: &[u32],
        rope: &RopeTable,
    ) -> Result<Self::Tensor, KernelError> {
        compose::latent_queries(self, q, kv_b, heads, positions, rope)
    }
    /// Causal attention of each row over positions `0..=its own`: q `[rows, heads * k_dim]` →
    /// `[rows, heads * v_dim]`. Key blocks follow absolute positions, never chunk boundaries.
    fn attention(
        &self,
        q: &Self::Tensor,
        kv: &Self::Kv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<Self::Tensor, KernelError>;
    /// Same as [`AttentionOps::attention`], into the spans' rows of `out` `[rows, heads * v_dim]`; its other rows stay.
    fn attention_rows(
        &self,
        out: &mut Self::Tensor,
        q: &Self::Tensor,
        kv: &Self::Kv,
        layer: usize,
        spans: &[Span],
        spec: AttentionSpec,
    ) -> Result<(), KernelError>;
}

/// Choice of experts.
pub trait RouterOps: MemoryOps {
    /// Chosen experts, in the device's memory.
    type Chosen: Send + 'static;

    /// Chooses experts from router logits `[tokens, experts]`; `bias` affects the choice, not the weight.
    fn route(
        &self,
        logits: &Self::Tensor,
        bias: Option<&Self::Vector>,
        spec: RouterSpec,
    ) -> Result<Self::Chosen, KernelError>;
    /// Copies the choice to the host, for policies that load the chosen experts.
    fn routing(&self, chosen: Self::Chosen) -> Result<Routing, KernelError>;
    /// Copies the choice and activations `[tokens, hidden]`, row-major, to the host, for experts that run elsewhere; a
    /// device that can does it in one round trip.
    fn routing_and_rows(
        &self,
        chosen: Self::Chosen,
        x: &Self::Tensor,
    ) -> Result<(Routing, Vec<f32>), KernelError> {
        let rows = self.download(x)?;
        Ok((self.routing(chosen)?, rows))
    }
}

/// Feed-forward blocks of routed experts.
pub trait ExpertOps: RouterOps {
    /// All routed experts of a layer, from which the device picks without asking the host.
    type ExpertBank: Send + Sync + 'static;

    /// Sum of the outputs of a layer's experts, in the order of [`expert_sum`](crate::expert_sum).
    type ExpertSum: Send + 'static;

    /// Begins a sum `[tokens, hidden]` over the outputs of a layer's `experts` experts.
    fn expert_sum(
        &self,
        tokens: usize,
        hidden: usize,
        experts: usize,
    ) -> Result<Self::ExpertSum, KernelError>;
    /// Adds each call's weighted expert output for `x` `[tokens, hidden]`. Experts ascend, also from one invocation to the
    /// next; splitting calls over several invocations gives the same bits. `is_last`: no calls follow.
    fn experts(
        &self,
        sum: &mut Self::ExpertSum,
        x: &Self::Tensor,
        calls: &[ExpertCall<'_, Self::Weight>],
        is_last: bool,
    ) -> Result<(), KernelError>;
    /// Returns the total `[tokens, hidden]` after the last call.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if no invocation was the last.
    fn expert_total(&self, sum: Self::ExpertSum) -> Result<Self::Tensor, KernelError>;
    /// Adds experts' weighted outputs `products` `[n, hidden]` that several devices computed, each product by itself →
    /// `[tokens, hidden]`: the same bits as one [`ExpertOps::experts`] over all of them.
    fn product_sum(
        &self,
        products: &Self::Tensor,
        of: ExpertProducts<'_>,
    ) -> Result<Self::Tensor, KernelError>;
    /// All routed experts of a layer, by index, for [`ExpertOps::banked_experts`]; `None` if the device leaves the
    /// choice to the host, as the CPU does.
    fn expert_bank(
        &self,
        experts: &[ExpertWeights<'_, Self::Weight>],
    ) -> Result<Option<Self::ExpertBank>, KernelError>;
    /// Runs the experts that each token of `x` `[tokens, hidden]` chose → `[tokens, hidden]`: the same bits as
    /// [`ExpertOps::experts`].
    fn banked_experts(
        &self,
        x: &Self::Tensor,
        chosen: &Self::Chosen,
        bank: &Self::ExpertBank,
    ) -> Result<Self::Tensor, KernelError>;
}

/// Choice of tokens on the device.
pub trait SampleOps: MemoryOps {
    /// Tokens that are chosen, in the device's memory and on their way to the host.
    type Tokens: Send + 'static;

    /// Whether [`SampleOps::sample`] can choose among `vocab` tokens; if not,
    /// as on the CPU, the host chooses from downloaded logits.
    fn can_sample(&self, _vocab: usize) -> bool {
        false
    }

    /// Begins to choose a token from each of the first `rows.len()` rows of logits `[rows, vocab]`, so that only tokens
    /// are copied to the host, and launches what leads to them.
    ///
    /// # Errors
    /// [`KernelError::Device`] if [`SampleOps::can_sample`] returns false.
    fn sample(
        &self,
        _logits: &Self::Tensor,
        _rows: &[SampleSpec],
    ) -> Result<Self::Tokens, KernelError> {
        Err(KernelError::Device {
            device: self.describe(),
            detail: "tokens are chosen on the host".to_owned(),
        })
    }

    /// Waits until chosen tokens have landed on the host; what was queued after them goes on.
    fn landed(&self, tokens: &Self::Tokens) -> Result<Vec<Result<u32, SampleFault>>, KernelError>;

    /// Same as [`ElementwiseOps::embed`] of the tokens at the indices `picked` of those that were chosen, which need not have
    /// landed. A row without a token has the embedding of an arbitrary one.
    fn embed_chosen(
        &self,
        table: &Self::Weight,
        tokens: &Self::Tokens,
        picked: &[u32],
    ) -> Result<Self::Tensor, KernelError>;
}
