//! Helpers for the kernel tests: reproducible numbers, weights of every type, this machine's backends.

#![allow(dead_code)] // each test file uses only a part

use std::io::Write;

use bytes::Bytes;
use hearth_kernels::convert::{f32_to_bf16, f32_to_f16};
use hearth_kernels::ops::*;
use hearth_kernels::{
    BlockScales, CpuBackend, CpuOptions, CpuTensor, DType, HostMatrix, Isa, quantize_fp8_block,
};

/// A small generator (SplitMix64), so that every run tests the same numbers.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Approximately normal, mean 0 and variance 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4)
            .map(|_| (self.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5)
            .sum();
        sum * 1.732
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

pub(crate) const DTYPES: [DType; 4] = [DType::F32, DType::F16, DType::Bf16, DType::F8E4m3];

/// A matrix of the given type whose bytes start at an odd address.
pub(crate) fn matrix(values: &[f32], rows: usize, cols: usize, dtype: DType) -> HostMatrix {
    let (bytes, scales) = match dtype {
        DType::F32 => (values.iter().flat_map(|v| v.to_le_bytes()).collect(), None),
        DType::F16 => (
            values
                .iter()
                .flat_map(|v| f32_to_f16(*v).to_le_bytes())
                .collect(),
            None,
        ),
        DType::Bf16 => (
            values
                .iter()
                .flat_map(|v| f32_to_bf16(*v).to_le_bytes())
                .collect(),
            None,
        ),
        DType::F8E4m3 => {
            let (codes, scales) = quantize_fp8_block(values, rows, cols);
            (codes, Some(block_scales(scales, cols)))
        }
    };
    HostMatrix::new(misaligned(bytes), dtype, rows, cols, scales).unwrap()
}

pub(crate) fn block_scales(values: Vec<f32>, cols: usize) -> BlockScales {
    BlockScales {
        values: values.into(),
        blocks_per_row: cols.div_ceil(128),
    }
}

/// The same bytes at an odd address, as tensors lie in a checkpoint.
pub(crate) fn misaligned(bytes: Vec<u8>) -> Bytes {
    let mut shifted = Vec::with_capacity(bytes.len() + 2);
    let pad = if (shifted.as_ptr() as usize).is_multiple_of(2) {
        1
    } else {
        2
    };
    shifted.resize(pad, 0xff);
    shifted.extend_from_slice(&bytes);
    Bytes::from(shifted).slice(pad..)
}

pub(crate) fn random_matrix(rng: &mut Rng, rows: usize, cols: usize, dtype: DType) -> HostMatrix {
    let values = rng.normals(rows * cols);
    matrix(&values, rows, cols, dtype)
}

/// Runs `test` with a backend for each instruction set of this machine, and prints those it lacks.
pub(crate) fn on_every_isa(threads: usize, test: impl Fn(&CpuBackend)) {
    for isa in Isa::ALL {
        if isa.is_available() {
            test(&backend(isa, threads));
        } else {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: this CPU has no {isa}; its kernels were not tested"
            );
        }
    }
}

pub(crate) fn backend(isa: Isa, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions {
        isa: Some(isa),
        threads,
        ..CpuOptions::default()
    })
    .unwrap()
}

pub(crate) fn upload(backend: &CpuBackend, rows: usize, values: &[f32]) -> CpuTensor {
    let cols = values.len().checked_div(rows).unwrap_or(0);
    backend.upload(rows, cols, values).unwrap()
}

/// Whether both have the same bits (NaN equals NaN).
pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

#[track_caller]
pub(crate) fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!(
            a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
            "{what}: element {i} is {a:e}, not {b:e}"
        );
    }
}

/// Asserts `|got - want| <= bound` element by element, and NaN where NaN is expected.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f32], bound: impl Fn(usize) -> f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        if b.is_nan() || a.is_nan() {
            assert!(
                a.is_nan() && b.is_nan(),
                "{what}: element {i} is {a}, not {b}"
            );
            continue;
        }
        let bound = bound(i);
        assert!(
            a == b || (a - b).abs() <= bound,
            "{what}: element {i} is {a}, not {b} (bound {bound})"
        );
    }
}
