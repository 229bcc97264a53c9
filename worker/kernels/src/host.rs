//! Weights in host memory: a checkpoint's own bytes, never copied or repacked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

use crate::KernelError;

/// Rows and columns covered by one FP8 scale (DeepSeek-V3's `weight_block_size`).
pub const SCALE_BLOCK: usize = 128;

/// Element type of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 E4M3FN with one scale per 128×128 block.
    F8E4m3,
}

impl DType {
    /// Bytes per element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 => 1,
        }
    }

    /// The name used in logs and errors, as safetensors spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::F8E4m3 => "F8_E4M3",
        }
    }
}

/// The `weight_scale_inv` of an FP8 matrix: `w[r][c] = fp8[r][c] * values[r / 128][c / 128]`.
///
/// The last block of a row or column may be partial: DeepSeek's own `kv_a_proj_with_mqa` has 576 rows.
#[derive(Clone, Debug)]
pub struct BlockScales {
    /// `[ceil(rows / 128), ceil(cols / 128)]`, row-major.
    pub values: Arc<[f32]>,
    /// Scale blocks per row: `ceil(cols / 128)`.
    pub blocks_per_row: usize,
}

/// A row-major matrix `[rows, cols]` over shared host bytes (a slice of a mapped file, or owned memory).
///
/// A row slice of a matrix is a matrix again, over the same bytes ([`HostMatrix::row_slice`]).
#[derive(Clone, Debug)]
pub struct HostMatrix {
    data: Bytes,
    dtype: DType,
    rows: usize,
    cols: usize,
    first_row: usize,
    scales: Option<BlockScales>,
    free_of_nan: Marks,
}

impl HostMatrix {
    /// Wraps `rows * cols` elements.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the byte length, or the scales of an FP8 matrix, do not fit the shape.
    pub fn new(
        data: Bytes,
        dtype: DType,
        rows: usize,
        cols: usize,
        scales: Option<BlockScales>,
    ) -> Result<Self, KernelError> {
        let expected = rows
            .checked_mul(cols)
            .and_then(|n| n.checked_mul(dtype.size_bytes()));
        if expected != Some(data.len()) {
            return Err(KernelError::Shape {
                op: "weight",
                detail: format!(
                    "{} bytes given for {} [{rows}, {cols}]",
                    data.len(),
                    dtype.name()
                ),
            });
        }
        let scales_fit = match (&scales, dtype) {
            (Some(s), DType::F8E4m3) => {
                s.blocks_per_row == cols.div_ceil(SCALE_BLOCK)
                    && s.values.len() == rows.div_ceil(SCALE_BLOCK) * s.blocks_per_row
            }
            (None, DType::F8E4m3) | (Some(_), _) => false,
            (None, _) => true,
        };
        if !scales_fit {
            return Err(KernelError::Shape {
                op: "weight",
                detail: format!(
                    "scales do not fit {} [{rows}, {cols}] (one for each {SCALE_BLOCK}×{SCALE_BLOCK} block of FP8, none otherwise)",
                    dtype.name()
                ),
            });
        }
        Ok(Self {
            data,
            dtype,
            rows,
            cols,
            first_row: 0,
            scales,
            free_of_nan: Marks::new(if dtype == DType::F8E4m3 { rows } else { 0 }),
        })
    }

    /// The rows `first..first + rows` as a matrix over the same bytes; scale blocks keep their positions.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the range is outside the matrix.
    pub fn row_slice(&self, first: usize, rows: usize) -> Result<Self, KernelError> {
        if first.checked_add(rows).is_none_or(|end| end > self.rows) {
            return Err(KernelError::Shape {
                op: "row_slice",
                detail: format!("rows {first}+{rows} of {}", self.rows),
            });
        }
        let row_bytes = self.cols * self.dtype.size_bytes();
        Ok(Self {
            data: self
                .data
                .slice(first * row_bytes..(first + rows) * row_bytes),
            rows,
            first_row: self.first_row + first,
            ..self.clone()
        })
    }

    /// The raw bytes, row-major, of any alignment.
    pub fn data(&self) -> &Bytes {
        &self.data
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of rows (outputs of a linear layer).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs of a linear layer).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Index of this matrix's row 0 in the matrix that the scales belong to.
    pub fn first_row(&self) -> usize {
        self.first_row
    }

    /// The block scales of an FP8 matrix.
    pub fn scales(&self) -> Option<&BlockScales> {
        self.scales.as_ref()
    }

    /// Size of the elements in bytes, without scales.
    pub fn size_bytes(&self) -> usize {
        self.data.len()
    }

    /// Whether a row is known to hold no NaN. Only FP8 matrices keep track of this.
    pub(crate) fn is_free_of_nan(&self, row: usize) -> bool {
        self.free_of_nan.get(self.first_row + row)
    }

    /// Records that a row was searched and holds no NaN, so that it need not be searched again.
    pub(crate) fn remember_free_of_nan(&self, row: usize) {
        self.free_of_nan.set(self.first_row + row);
    }
}

/// One bit per row, set from any thread, shared by all slices of a matrix.
#[derive(Clone, Debug)]
struct Marks(Arc<[AtomicU64]>);

impl Marks {
    fn new(rows: usize) -> Self {
        Self((0..rows.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn get(&self, row: usize) -> bool {
        self.0[row / 64].load(Ordering::Relaxed) >> (row % 64) & 1 == 1
    }

    fn set(&self, row: usize) {
        self.0[row / 64].fetch_or(1 << (row % 64), Ordering::Relaxed);
    }
}
