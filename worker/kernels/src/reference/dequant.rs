//! Weights as f32.

use crate::convert::{bf16_to_f32, e4m3_to_f32, f16_to_f32};
use crate::{DType, HostMatrix, SCALE_BLOCK};

/// Writes row `row` of `matrix` to `out` `[cols]`. An FP8 element is `code * scale`, rounded once to f32; the
/// scale's block follows from the row's position in the matrix that the scales belong to.
pub fn dequant_row(matrix: &HostMatrix, row: usize, out: &mut [f32]) {
    let row_bytes = matrix.row_bytes();
    let bytes = &matrix.data()[row * row_bytes..(row + 1) * row_bytes];
    for (c, value) in out[..matrix.cols()].iter_mut().enumerate() {
        *value = match matrix.dtype() {
            DType::F32 => f32::from_le_bytes(bytes.as_chunks().0[c]),
            DType::F16 => f16_to_f32(u16::from_le_bytes(bytes.as_chunks().0[c])),
            DType::Bf16 => bf16_to_f32(u16::from_le_bytes(bytes.as_chunks().0[c])),
            DType::F8E4m3 => e4m3_to_f32(bytes[c]) * scale(matrix, row, c),
        };
    }
}

/// Returns the whole matrix `[rows, cols]` as f32.
pub fn dequant(matrix: &HostMatrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows() * matrix.cols()];
    for row in 0..matrix.rows() {
        dequant_row(matrix, row, &mut out[row * matrix.cols()..]);
    }
    out
}

fn scale(matrix: &HostMatrix, row: usize, col: usize) -> f32 {
    matrix.scales().map_or(1.0, |s| {
        s.values[(matrix.first_row() + row) / SCALE_BLOCK * s.blocks_per_row + col / SCALE_BLOCK]
    })
}
