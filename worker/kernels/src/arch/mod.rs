//! Instruction sets: those that the CPU has, and the kernels for each.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::cpu::memory::KernelScratch;
use crate::{BlockId, DType, HostMatrix, KernelError, KvLayout, MlaHeads, SCALE_BLOCK};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod dispatch;
#[cfg(target_arch = "x86_64")]
mod generic;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod tuning;

/// An instruction set that has its own kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// The reference kernels.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VBMI (Ice Lake, Zen 4 and later); products in f32.
    Avx512,
}

impl Isa {
    /// All instruction sets.
    pub const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// Returns the fastest that this CPU has.
    ///
    /// Products take f32 activations on each of them. `vdpbf16ps` would need activations rounded to bfloat16,
    /// which moves the logits of small models by up to 0.034 of their standard deviation, and on Intel it does
    /// two fifths of an FMA's work (measured on Emerald Rapids: 88 against 225 GFLOP/s).
    pub fn detect() -> Self {
        let order = [Self::Avx512, Self::Avx2];
        order
            .into_iter()
            .find(|isa| isa.is_available())
            .unwrap_or(Self::Scalar)
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        self.kernels().is_some()
    }

    /// Names of those that this CPU has, comma-separated, best first.
    pub fn available_names() -> String {
        let names: Vec<&str> = Self::ALL
            .into_iter()
            .rev()
            .filter(|isa| isa.is_available())
            .map(Self::name)
            .collect();
        names.join(", ")
    }

    /// `scalar`, `avx2` or `avx512`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Its kernels, or [`KernelError::IsaUnavailable`] if this CPU cannot run them.
    pub(crate) fn kernels_or_error(self) -> Result<Box<dyn Kernels>, KernelError> {
        self.kernels().ok_or_else(|| KernelError::IsaUnavailable {
            asked: self.name().to_owned(),
            available: Self::available_names(),
        })
    }

    /// Its kernels, if this CPU can run them.
    pub(crate) fn kernels(self) -> Option<Box<dyn Kernels>> {
        match self {
            Self::Scalar => Some(Box::new(scalar::Scalar)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::new().map(|isa| Box::new(isa) as Box<dyn Kernels>),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::Avx512::new().map(|isa| Box::new(isa) as Box<dyn Kernels>),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => None,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Self, KernelError> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| KernelError::IsaUnavailable {
                asked: name.to_owned(),
                available: Self::available_names(),
            })
    }
}

/// Layout of the f32 activations that a kernel takes. Every row is padded with zeros to [`packed_len`], so that
/// kernels have no tail on that side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Elements in order.
    InOrder,
    /// Even elements of each 32, then the odd ones: the order in which shifts and masks leave bfloat16.
    Pairs,
    /// `Pairs` times 2^64: for weights that are decoded far too small.
    RaisedPairs,
    /// Each 64 elements as FP8 weights come out of `vpunpcklbw` and `vpunpckhbw`, then as `Pairs`.
    Unpacked,
}

impl Packing {
    /// Number of layouts.
    pub(crate) const COUNT: usize = 4;

    /// Index below [`COUNT`](Self::COUNT).
    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// Elements of a packed row of `cols` elements.
pub(crate) const fn packed_len(cols: usize) -> usize {
    cols.next_multiple_of(SCALE_BLOCK)
}

/// Packed activations: the operand of a linear kernel.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows<'a> {
    /// Rows of `packed_len(cols)` elements, aligned to a cache line.
    pub(crate) values: &'a [f32],
    pub(crate) packing: Packing,
    /// Elements of a row before padding.
    pub(crate) cols: usize,
    pub(crate) rows: RowSet<'a>,
}

/// Selection of a matrix's rows.
#[derive(Clone, Copy)]
pub(crate) enum RowSet<'a> {
    /// Rows `first..first + count`.
    Range { first: usize, count: usize },
    /// The rows listed, in that order.
    List(&'a [u32]),
}

impl PackedRows<'_> {
    pub(crate) fn len(&self) -> usize {
        match self.rows {
            RowSet::Range { count, .. } => count,
            RowSet::List(rows) => rows.len(),
        }
    }

    /// The `i`th selected row.
    pub(crate) fn row(&self, i: usize) -> &[f32] {
        let row = match self.rows {
            RowSet::Range { first, .. } => first + i,
            RowSet::List(rows) => rows[i] as usize,
        };
        let len = packed_len(self.cols);
        &self.values[row * len..(row + 1) * len]
    }
}

/// One layer of a KV cache, read only.
#[derive(Clone, Copy)]
pub(crate) struct KvLayer<'a> {
    pub(crate) layout: KvLayout,
    /// All blocks of the layer.
    pub(crate) bytes: &'a [u8],
    /// Blocks of the sequence.
    pub(crate) blocks: &'a [BlockId],
}

impl KvLayer<'_> {
    fn token(&self, position: usize) -> &[u8] {
        let layout = &self.layout;
        let block = self.blocks[position / layout.block_tokens].0 as usize;
        let slot = position % layout.block_tokens;
        let size = layout.token_layer_bytes();
        let start = block * layout.block_layer_bytes() + slot * size;
        &self.bytes[start..start + size]
    }

    /// The stored key of one head.
    pub(crate) fn key(&self, position: usize, kv_head: usize) -> &[u8] {
        let size = self.layout.k_dim * self.layout.dtype.size_bytes();
        &self.token(position)[kv_head * size..(kv_head + 1) * size]
    }

    /// The stored value of one head: separate, or the key's prefix.
    pub(crate) fn value(&self, position: usize, kv_head: usize) -> &[u8] {
        let KvLayout {
            kv_heads,
            k_dim,
            v_dim,
            value_in_key,
            dtype,
            ..
        } = self.layout;
        let size = v_dim * dtype.size_bytes();
        if value_in_key {
            return &self.key(position, kv_head)[..size];
        }
        let start = kv_heads * k_dim * dtype.size_bytes() + kv_head * size;
        &self.token(position)[start..start + size]
    }
}

/// Attention of consecutive rows of one sequence, over heads that share one kv head.
#[derive(Clone, Copy)]
pub(crate) struct AttentionTask<'a> {
    pub(crate) kv: KvLayer<'a>,
    pub(crate) kv_head: usize,
    /// Queries `[.., q_cols]`.
    pub(crate) q: &'a [f32],
    pub(crate) q_cols: usize,
    /// Rows of `q`, the first one at absolute position `first_position`.
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
    pub(crate) first_position: usize,
    /// Query heads `first_head..first_head + heads`.
    pub(crate) first_head: usize,
    pub(crate) heads: usize,
    pub(crate) scale: f32,
}

impl AttentionTask<'_> {
    /// The query of one row and head, both counted within the task.
    pub(crate) fn query(&self, row: usize, head: usize) -> &[f32] {
        let k_dim = self.kv.layout.k_dim;
        let start = (self.first_row + row) * self.q_cols + (self.first_head + head) * k_dim;
        &self.q[start..start + k_dim]
    }
}

/// Latent attention's absorption for one head.
#[derive(Clone, Copy)]
pub(crate) struct AbsorbTask<'a> {
    pub(crate) kv_b: &'a HostMatrix,
    pub(crate) dims: MlaHeads,
    pub(crate) head: usize,
    /// `[tokens, heads * nope]`.
    pub(crate) q_nope: &'a [f32],
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
}

/// The kernels of one instruction set. A value proves that the CPU can run them.
///
/// Each output element has one accumulation order, which depends only on the length of the sum and the
/// instruction set: not on the number of rows in a call, nor on the element's place in its piece.
/// Callers are responsible for shapes; a kernel may panic on wrong ones but stays within its slices.
pub(crate) trait Kernels: Send + Sync {
    fn isa(&self) -> Isa;
    /// Names of the kernels, `{arch}-{dtypes}-{variant}`.
    fn names(&self) -> &'static [&'static str];
    /// The layout of activations for a weight's element type.
    fn packing(&self, dtype: DType) -> Packing;
    /// Packs one row; `out` has `packed_len(x.len())` elements.
    fn pack(&self, packing: Packing, x: &[f32], out: &mut [f32]);
    /// Multiplies weight rows `rows` by all rows of `x` → out `[rows.len(), x.len()]`.
    fn linear(
        &self,
        w: &HostMatrix,
        rows: Range<usize>,
        x: &PackedRows<'_>,
        scratch: &mut KernelScratch,
        out: &mut [f32],
    );
    /// See [`reference::rms_norm`](crate::reference::rms_norm).
    fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
    /// See [`reference::silu_mul`](crate::reference::silu_mul).
    fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]);
    /// Computes out `[rows, heads, v_dim]`.
    fn attention(&self, task: &AttentionTask<'_>, scratch: &mut KernelScratch, out: &mut [f32]);
    /// Computes out `[rows, rank]`.
    fn mla_absorb(&self, task: &AbsorbTask<'_>, scratch: &mut KernelScratch, out: &mut [f32]);
    /// Reads all of `data` as fast as possible, and returns its sum.
    fn read(&self, data: &[f32], prefetch_bytes: usize) -> f32;
    /// Multiplies in registers, and returns the number of multiply-adds.
    fn multiply(&self, steps: usize) -> usize;
}
