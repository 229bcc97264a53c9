//! The backend's types: activations, weights, vectors, chosen experts.

use std::sync::{Arc, Mutex};

use hearth_kernels::{DType, HostMatrix, RouterSpec};

use super::Activations;
use super::slots::SlotMemory;
use super::weights::WeightLayout;
use crate::memory::Buffer;
use crate::queue::Argument;

/// f32 activations `[rows, cols]` on the device.
pub struct CudaTensor {
    pub(super) buffer: Buffer,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// The rows in the matrix kernels' form, once requested; dropped when the tensor changes.
    pub(super) terms: Mutex<Option<Arc<Terms>>>,
}

impl CudaTensor {
    pub(super) fn address(&self) -> u64 {
        self.buffer.address()
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
}

impl WeightBytes {
    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Own(buffer) => buffer.address(),
            Self::Slot { address, .. } => *address,
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
