//! The backend's types: activations, weights, vectors, chosen experts.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::{DType, HostMatrix, RouterSpec};

use super::Activations;
use super::slots::SlotMemory;
use super::weights::WeightLayout;
use crate::memory::Buffer;
use crate::queue::Argument;

/// f32 activations `[rows, cols]` on the device.
///
/// What a product leaves in segments, or what is still to be added, is summed by the kernel that reads it, if that can:
/// a step then needs no kernel for the sum.
pub struct CudaTensor {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) values: Mutex<Values>,
    /// The rows in the matrix kernels' forms that were requested; dropped when the tensor changes.
    pub(super) terms: Mutex<Vec<Arc<Terms>>>,
}

/// Where a tensor's values are: in one part, or the sum of two.
pub(super) struct Values {
    pub(super) first: Part,
    pub(super) second: Option<Part>,
}

impl Values {
    /// Both parts as kernels take them, of tensors of so many elements.
    pub(super) fn arguments(&self, elements: usize) -> [RowsArg; 2] {
        let second = self.second.as_ref();
        [
            self.first.argument(elements),
            second.map_or(RowsArg::NONE, |part| part.argument(elements)),
        ]
    }
}

/// Values, or the segments of a product whose sum they are.
pub(super) struct Part {
    pub(super) buffer: Buffer,
    /// Number of segments `[rows, cols]`; 0: the buffer holds the values.
    pub(super) segments: usize,
    /// Added to the sum of the segments.
    pub(super) bias: Option<Arc<Buffer>>,
}

impl Part {
    /// `struct Rows` of common.cuh.
    pub(super) fn argument(&self, elements: usize) -> RowsArg {
        RowsArg {
            values: self.buffer.address(),
            bias: self.bias.as_ref().map_or(0, |bias| bias.address()),
            stride: elements as i64,
            segments: self.segments as i32,
            reserved: 0,
        }
    }
}

impl CudaTensor {
    pub(super) fn new(rows: usize, cols: usize, first: Part) -> Self {
        let second = None;
        Self {
            rows,
            cols,
            values: Mutex::new(Values { first, second }),
            terms: Mutex::new(Vec::new()),
        }
    }

    /// Address of the values of a tensor that is being written.
    pub(super) fn output(&self) -> u64 {
        self.values().first.buffer.address()
    }

    /// The tensor with its rows in the matrix kernels' form.
    pub(super) fn with_terms(self, terms: Terms) -> Self {
        Self {
            terms: Mutex::new(vec![Arc::new(terms)]),
            ..self
        }
    }

    pub(super) fn values(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Both parts of the values as kernels take them.
    pub(super) fn parts(&self) -> [RowsArg; 2] {
        self.values().arguments(self.elements())
    }

    pub(super) fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    pub(super) fn elements(&self) -> usize {
        self.rows * self.cols
    }
}

/// Activations in the matrix kernels' form (`split.cu`).
pub(super) struct Terms {
    pub(super) values: Buffer,
    /// Scales of FP8 activations, one per row and 128 columns.
    pub(super) scales: Option<Buffer>,
    pub(super) activations: Activations,
    /// Rows that were split.
    pub(super) rows: usize,
    /// Columns including padding, a multiple of 128.
    pub(super) padded: usize,
}

impl Terms {
    /// Whether kernels that take activations of this precision can read them: the first of three terms is the rounded one.
    pub(super) fn serve(&self, asked: Activations) -> bool {
        self.activations == asked
            || (self.activations, asked) == (Activations::F32, Activations::Bf16)
    }

    pub(super) fn scales_address(&self) -> u64 {
        self.scales.as_ref().map_or(0, Buffer::address)
    }
}

/// A weight matrix `[rows, cols]` on the device; clones share it.
#[derive(Clone)]
pub struct CudaWeight(pub(super) Arc<WeightData>);

/// Bytes of a weight on the device.
pub(super) enum WeightBytes {
    /// A buffer of its own.
    Own(Buffer),
    /// A part of a slot.
    Slot {
        address: u64,
        _memory: Arc<SlotMemory>,
    },
    /// Rows of another weight.
    Rows { address: u64, _of: Arc<WeightData> },
}

impl WeightBytes {
    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Own(buffer) => buffer.address(),
            Self::Slot { address, .. } | Self::Rows { address, .. } => *address,
        }
    }
}

pub(super) struct WeightData {
    pub(super) data: WeightBytes,
    pub(super) scales: Option<WeightBytes>,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements from one row to the next, a multiple of 128; those past `cols` are zero.
    pub(super) ld: usize,
    /// Index of row 0 in the matrix that the scales belong to.
    pub(super) first_row: usize,
    /// Number of scales per row of blocks.
    pub(super) scale_cols: usize,
}

impl WeightData {
    /// Describes a matrix whose bytes are, or are being copied, on the device.
    pub(super) fn new(matrix: &HostMatrix, data: WeightBytes, scales: Option<WeightBytes>) -> Self {
        Self {
            data,
            scales,
            dtype: matrix.dtype(),
            rows: matrix.rows(),
            cols: matrix.cols(),
            ld: WeightLayout::of(matrix).ld,
            first_row: matrix.first_row(),
            scale_cols: matrix.scales().map_or(0, |s| s.blocks_per_row),
        }
    }

    /// Describes some rows of a weight.
    pub(super) fn part(of: &Arc<Self>, first: usize, rows: usize) -> Self {
        let at = |address| WeightBytes::Rows {
            address,
            _of: Arc::clone(of),
        };
        let skipped_bytes = first * of.dtype.row_bytes(of.ld);
        Self {
            data: at(of.data.address() + skipped_bytes as u64),
            scales: of.scales.as_ref().map(|scales| at(scales.address())),
            dtype: of.dtype,
            rows,
            cols: of.cols,
            ld: of.ld,
            first_row: of.first_row + first,
            scale_cols: of.scale_cols,
        }
    }

    pub(super) fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// `struct Weight` of common.cuh.
    pub(super) fn argument(&self) -> WeightArg {
        WeightArg {
            data: self.data.address(),
            scales: self.scales.as_ref().map_or(0, WeightBytes::address),
            ld: self.ld as i32,
            first_row: self.first_row as i32,
            scale_cols: self.scale_cols as i32,
            reserved: 0,
        }
    }
}

/// f32 parameters on the device; clones share them.
#[derive(Clone)]
pub struct CudaVector {
    pub(super) data: Arc<Buffer>,
    pub(super) len: usize,
}

/// Experts of each token, on the device where the router left them.
pub struct CudaChosen {
    /// `[tokens, top_k]` u32, ascending for each token.
    pub(super) experts: Buffer,
    /// `[tokens, top_k]` f32.
    pub(super) weights: Buffer,
    pub(super) tokens: usize,
    pub(super) spec: RouterSpec,
    /// The choices of few tokens sorted by expert, for a bank of as many experts as the router has.
    pub(super) sorted: Option<SortedSlots>,
}

/// Slots (a token and one of its choices) sorted by expert on the device.
pub(super) struct SortedSlots {
    /// The tiles, then what else [`SlotAddresses`](super::host_order::SlotAddresses) names.
    pub(super) buffer: Buffer,
    /// Number of experts.
    pub(super) experts: usize,
    pub(super) tile_rows: usize,
}

impl CudaChosen {
    /// Number of choices of all tokens.
    pub(super) fn choices(&self) -> usize {
        self.tokens * self.spec.top_k
    }
}

/// `struct Weight` of common.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct WeightArg {
    data: u64,
    scales: u64,
    ld: i32,
    first_row: i32,
    scale_cols: i32,
    reserved: i32,
}

// SAFETY: repr(C), and its fields leave no padding: 2 × 8 + 4 × 4 bytes.
unsafe impl Argument for WeightArg {}

/// `struct Rows` of common.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RowsArg {
    values: u64,
    bias: u64,
    stride: i64,
    segments: i32,
    reserved: i32,
}

impl RowsArg {
    /// No rows.
    pub(super) const NONE: Self = Self {
        values: 0,
        bias: 0,
        stride: 0,
        segments: 0,
        reserved: 0,
    };
}

// SAFETY: repr(C), and its fields leave no padding: 3 × 8 + 2 × 4 bytes.
unsafe impl Argument for RowsArg {}

/// Most products of one launch (`MOST_JOINT` of common.cuh).
pub(super) const MOST_JOINT: usize = 3;

/// `struct Joint` of common.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct JointArg {
    pub(super) weights: [WeightArg; MOST_JOINT],
    pub(super) outputs: [u64; MOST_JOINT],
    pub(super) biases: [u64; MOST_JOINT],
    pub(super) cols: [i32; MOST_JOINT],
    pub(super) count: i32,
}

// SAFETY: repr(C), and its fields leave no padding: 3 × 32 + 6 × 8 + 4 × 4 bytes.
unsafe impl Argument for JointArg {}

/// `struct Expert` of common.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct ExpertArg {
    pub(super) gate: WeightArg,
    pub(super) up: WeightArg,
    pub(super) down: WeightArg,
}

// SAFETY: repr(C) of parts without padding.
unsafe impl Argument for ExpertArg {}

/// `struct Tile` of common.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct TileArg {
    pub(super) expert: i32,
    pub(super) first: i32,
    pub(super) count: i32,
    pub(super) reserved: i32,
}

// SAFETY: repr(C) of four i32.
unsafe impl Argument for TileArg {}

/// `struct AttentionTile` of common.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct AttentionTileArg {
    pub(super) first_row: i32,
    pub(super) tokens: i32,
    pub(super) start: i32,
    pub(super) table: i32,
}

// SAFETY: repr(C) of four i32.
unsafe impl Argument for AttentionTileArg {}

/// Value of the kernels' `WEIGHT_TYPE`.
pub(super) fn weight_type(dtype: DType) -> i64 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Bf16 => 2,
        DType::F8E4m3 => 3,
    }
}
