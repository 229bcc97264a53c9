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
    /// Layout of stored rows of this type: the one place that knows it.
    pub const fn format(self) -> StorageFormat {
        match self {
            Self::F32 => StorageFormat::plain(4),
            Self::F16 | Self::Bf16 => StorageFormat::plain(2),
            Self::F8E4m3 => StorageFormat {
                scales_apart: true,
                ..StorageFormat::plain(1)
            },
        }
    }

    /// Bytes of a stored row of `cols` elements, without scales that are apart; `usize::MAX` on overflow.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self.format().checked_row_bytes(cols) {
            Some(bytes) => bytes,
            None => usize::MAX,
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

/// Layout of a stored row: blocks of equal size, one after the other, the last one filled up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageFormat {
    /// Elements of one block; 1 if elements are stored one by one.
    pub block_elements: usize,
    /// Bytes of one block, including scales that lie in the block itself.
    pub block_bytes: usize,
    /// Whether a matrix has scales outside its rows ([`BlockScales`]).
    pub scales_apart: bool,
}

impl StorageFormat {
    /// Elements of `bytes` bytes, one by one and without scales.
    const fn plain(bytes: usize) -> Self {
        Self {
            block_elements: 1,
            block_bytes: bytes,
            scales_apart: false,
        }
    }

    /// Bytes of a row of `cols` elements, without scales that are apart; `None` on overflow.
    pub const fn checked_row_bytes(self, cols: usize) -> Option<usize> {
        cols.div_ceil(self.block_elements)
            .checked_mul(self.block_bytes)
    }
}

/// Scales of an FP8 matrix, one for each 128×128 block: `w[r][c] = fp8[r][c] * values[r / 128][c / 128]`.
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
        let expected = rows.checked_mul(dtype.row_bytes(cols));
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
        let scales_fit = match (&scales, dtype.format().scales_apart) {
            (Some(s), true) => {
                s.blocks_per_row == cols.div_ceil(SCALE_BLOCK)
                    && s.values.len() == rows.div_ceil(SCALE_BLOCK) * s.blocks_per_row
            }
            (None, true) | (Some(_), false) => false,
            (None, false) => true,
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

    /// The same matrix over other bytes with the same contents: a copy of those that it has.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if their length is another.
    pub fn with_data(&self, data: Bytes) -> Result<Self, KernelError> {
        if data.len() != self.data.len() {
            return Err(KernelError::Shape {
                op: "weight",
                detail: format!("{} bytes given for {}", data.len(), self.data.len()),
            });
        }
        Ok(Self {
            data,
            ..self.clone()
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
        let row_bytes = self.row_bytes();
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

    /// Copies the elements to memory of their own.
    ///
    /// # Errors
    /// [`KernelError::OutOfMemory`].
    pub fn copied(&self) -> Result<Self, KernelError> {
        let mut data = Vec::new();
        data.try_reserve_exact(self.data.len())
            .map_err(|_| KernelError::OutOfMemory {
                device: "cpu".into(),
                what: "a copy of weights".into(),
                needed_bytes: self.data.len() as u64,
            })?;
        data.extend_from_slice(&self.data);
        Ok(Self {
            data: data.into(),
            ..self.clone()
        })
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

    /// Bytes of one row, from its first byte to that of the next.
    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.cols)
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

    /// Whether an FP8 matrix holds a code of NaN; false for other types, whose NaN needs no care. Every row is searched once
    /// in the life of the matrix, its clones and slices.
    pub fn has_nan(&self) -> bool {
        if self.dtype != DType::F8E4m3 || self.cols == 0 {
            return false;
        }
        for (row, codes) in self.data.chunks_exact(self.cols).enumerate() {
            if self.is_free_of_nan(row) {
                continue;
            }
            // Without a branch, so that it takes no longer than reading.
            if codes
                .iter()
                .fold(false, |found, code| found | (code & 0x7f == 0x7f))
            {
                return true;
            }
            self.remember_free_of_nan(row);
        }
        false
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

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [DType; 4] = [DType::F32, DType::F16, DType::Bf16, DType::F8E4m3];

    #[test]
    fn a_row_of_single_elements_takes_their_bytes() {
        for (dtype, element_bytes) in ALL.into_iter().zip([4, 2, 2, 1]) {
            for cols in [0, 1, 2, 127, 128, 129, 7168] {
                assert_eq!(dtype.row_bytes(cols), cols * element_bytes, "{dtype:?}");
            }
            assert_eq!(dtype.format().scales_apart, dtype == DType::F8E4m3);
        }
    }

    #[test]
    fn a_block_that_a_row_begins_is_stored_whole() {
        // 32 elements of 4 bits and one f16 scale.
        let blocks = StorageFormat {
            block_elements: 32,
            block_bytes: 18,
            scales_apart: false,
        };
        for (cols, bytes) in [(0, 0), (1, 18), (31, 18), (32, 18), (33, 36), (64, 36)] {
            assert_eq!(blocks.checked_row_bytes(cols), Some(bytes), "{cols}");
        }
        let most = usize::MAX.div_ceil(32) * 18;
        assert_eq!(blocks.checked_row_bytes(usize::MAX), Some(most));
    }

    #[test]
    fn a_row_that_overflows_saturates_and_fits_no_bytes() {
        assert_eq!(DType::F32.format().checked_row_bytes(usize::MAX / 2), None);
        assert_eq!(DType::F32.row_bytes(usize::MAX / 2), usize::MAX);
        assert_eq!(DType::F32.row_bytes(usize::MAX / 4), usize::MAX - 3);
        assert_eq!(DType::F8E4m3.row_bytes(usize::MAX), usize::MAX);
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for rows in [1, 2, usize::MAX] {
                let data = Bytes::from_static(&[0; 8]);
                assert!(HostMatrix::new(data, dtype, rows, usize::MAX, None).is_err());
            }
        }
    }

    #[test]
    fn a_matrix_is_cut_by_its_rows() {
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let (rows, cols) = (3, 5);
            let data: Vec<u8> = (0..rows * dtype.row_bytes(cols)).map(|b| b as u8).collect();
            let matrix = HostMatrix::new(data.clone().into(), dtype, rows, cols, None).unwrap();
            assert_eq!(matrix.row_bytes() * rows, matrix.size_bytes());
            let last = matrix.row_slice(2, 1).unwrap();
            assert_eq!(last.data()[..], data[2 * matrix.row_bytes()..]);
            let short = data[1..].to_vec();
            assert!(HostMatrix::new(short.into(), dtype, rows, cols, None).is_err());
        }
    }

    #[test]
    fn codes_of_nan_are_found_in_every_row_and_slice() {
        let (rows, cols) = (130, 5);
        let with = |at: usize, code: u8| {
            let scales = BlockScales {
                values: vec![1.0; 2].into(),
                blocks_per_row: 1,
            };
            let mut data = vec![0x7e; rows * cols];
            data[at] = code;
            HostMatrix::new(data.into(), DType::F8E4m3, rows, cols, Some(scales)).unwrap()
        };
        for at in [0, 4, 64 * cols, rows * cols - 1] {
            for (code, is_nan) in [(0x7f, true), (0xff, true), (0xfe, false), (0, false)] {
                let matrix = with(at, code);
                assert_eq!(matrix.row_slice(at / cols, 1).unwrap().has_nan(), is_nan);
                // A second time, now that some rows are known.
                assert_eq!([matrix.has_nan(), matrix.has_nan()], [is_nan; 2], "{at}");
            }
        }
        let data = vec![0xff; 12].into();
        assert!(
            !HostMatrix::new(data, DType::Bf16, 2, 3, None)
                .unwrap()
                .has_nan()
        );
    }

    #[test]
    fn scales_that_are_apart_are_given_and_no_others() {
        for dtype in ALL {
            let scales = BlockScales {
                values: vec![1.0; 2 * 3].into(),
                blocks_per_row: 3,
            };
            let with = |scales| {
                let data = vec![0; 130 * dtype.row_bytes(300)];
                HostMatrix::new(data.into(), dtype, 130, 300, scales).is_ok()
            };
            assert_eq!(with(Some(scales)), dtype.format().scales_apart);
            assert_eq!(with(None), !dtype.format().scales_apart);
        }
    }
}
