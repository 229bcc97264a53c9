//! Weights of a mapped file arrive unchanged: short ones through the staging
//! ring, long ones from the file's own pages.

use std::io::Write;

use bytes::Bytes;
use hearth_kernels::convert::bf16_to_f32;
use hearth_kernels::ops::*;
use hearth_kernels::{DType, HostMatrix};

use crate::device::gpu;

/// Length of a header that makes tensors begin at odd addresses, as they do in checkpoints.
const HEADER_BYTES: usize = 1003;
/// Number of columns that is not a multiple of the device's padding.
const COLS: usize = 1200;

#[test]
fn mapped_weights_arrive_whole() {
    let rows = [3, 900, 5, 40_000, 1100, 7];
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[0xff; HEADER_BYTES]).unwrap();
    let element = |matrix: usize, i: usize| ((i * 31 + matrix * 1009) % 16_000) as u16 | 0x3000;
    for (matrix, rows) in rows.iter().enumerate() {
        let codes = (0..rows * COLS).flat_map(|i| element(matrix, i).to_le_bytes());
        file.write_all(&codes.collect::<Vec<u8>>()).unwrap();
    }
    // SAFETY: the file has no name, so nothing changes it.
    let mapped = Bytes::from_owner(unsafe { memmap2::Mmap::map(&file) }.unwrap());
    let gpu = gpu();
    let mut from = HEADER_BYTES;
    for (matrix, &rows) in rows.iter().enumerate() {
        let bytes = rows * COLS * 2;
        let data = mapped.slice(from..from + bytes);
        from += bytes;
        let host = HostMatrix::new(data, DType::Bf16, rows, COLS, None).unwrap();
        let weight = gpu.weight(&host).unwrap();
        let wanted = [0, rows as u32 / 2, rows as u32 - 1];
        let got = gpu.download(&gpu.embed(&weight, &wanted).unwrap()).unwrap();
        for (row, got) in wanted.iter().zip(got.chunks(COLS)) {
            let want = (0..COLS).map(|c| bf16_to_f32(element(matrix, *row as usize * COLS + c)));
            assert!(got.iter().copied().eq(want), "matrix {matrix}, row {row}");
        }
    }
}
