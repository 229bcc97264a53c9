//! Differences between x86 CPUs that have the same instructions.

use std::arch::x86_64::__cpuid;

/// Tuning for a CPU. It affects only the speed of a kernel, never its results: CPUs of all makers give the same bits
/// on one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    /// Distance at which weights are prefetched ahead of the reads, over all streams of reads
    /// together; 0: none, as the hardware does better.
    pub(super) prefetch_bytes: usize,
    /// The same, beside activations that do not stay in the first-level cache.
    pub(super) far_prefetch_bytes: usize,
    /// Whether a product with a subnormal number takes no longer than any other;
    /// elsewhere it takes a hundred cycles or more.
    pub(super) fast_subnormals: bool,
}

impl Tuning {
    /// Returns the tuning for the CPU that this runs on.
    pub(super) fn detect() -> Self {
        let maker = __cpuid(0);
        let mut name = [0; 12];
        for (part, word) in name
            .chunks_exact_mut(4)
            .zip([maker.ebx, maker.edx, maker.ecx])
        {
            part.copy_from_slice(&word.to_le_bytes());
        }
        Self::of(&name, __cpuid(1).eax)
    }

    /// Returns the tuning for a CPU by its maker and signature.
    fn of(maker: &[u8; 12], signature: u32) -> Self {
        let base = signature >> 8 & 0xf;
        let family = base
            + if base == 0xf {
                signature >> 20 & 0xff
            } else {
                0
            };
        let amd = maker == b"AuthenticAMD";
        // Measured on Zen 4: the hardware prefetcher keeps up with a few contiguous streams, and prefetch
        // instructions cost a tenth to a fifth of the speed.
        let (prefetch_bytes, far_prefetch_bytes) = match family {
            0x17 | 0x19 if amd => (0, 4096),
            _ => (8192, 8192),
        };
        Self {
            prefetch_bytes,
            far_prefetch_bytes,
            fast_subnormals: amd && family >= 0x17,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    use crate::arch::avx2::Avx2;
    use crate::arch::avx512::Avx512;
    use crate::arch::{Isa, Kernels, PackedRows, RowSet, packed_len};
    use crate::convert::e4m3_to_f32;
    use crate::cpu::memory::KernelScratch;
    use crate::{BlockScales, DType, HostMatrix, SCALE_BLOCK, reference};

    #[test]
    fn a_cpu_is_known_by_maker_and_family() {
        let zen4 = Tuning::of(b"AuthenticAMD", 0x00a1_0f11);
        assert_eq!((zen4.prefetch_bytes, zen4.fast_subnormals), (0, true));
        let zen5 = Tuning::of(b"AuthenticAMD", 0x00b0_0f21);
        assert_eq!((zen5.prefetch_bytes, zen5.fast_subnormals), (8192, true));
        let bulldozer = Tuning::of(b"AuthenticAMD", 0x0060_0f12);
        let emerald_rapids = Tuning::of(b"GenuineIntel", 0x000c_06f2);
        for other in [bulldozer, emerald_rapids] {
            assert_eq!((other.prefetch_bytes, other.fast_subnormals), (8192, false));
        }
    }

    /// Bypasses the test harness, which shows only the output of failed tests.
    fn skipped(why: &str) {
        let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
    }

    /// This machine's kernels, each in the tunings for CPUs of several makers.
    fn kernels_of_every_tuning() -> Vec<Box<dyn Kernels>> {
        let mut kernels: Vec<Box<dyn Kernels>> = Vec::new();
        for (prefetch_bytes, fast_subnormals) in
            [(0, false), (0, true), (8192, false), (8192, true)]
        {
            let tuning = Tuning {
                prefetch_bytes,
                far_prefetch_bytes: prefetch_bytes,
                fast_subnormals,
            };
            match Avx2::new() {
                Some(isa) => kernels.push(Box::new(isa.tuned(tuning))),
                None => skipped("this CPU has no AVX2"),
            }
            match Avx512::new() {
                Some(isa) => kernels.push(Box::new(isa.tuned(tuning))),
                None => skipped("this CPU has no AVX-512 with VBMI"),
            }
        }
        kernels
    }

    /// Multiplies x `[tokens, cols]` by `w` → `[w.rows(), tokens]`.
    fn products(kernels: &dyn Kernels, w: &HostMatrix, x: &[f32]) -> Vec<f32> {
        let (cols, tokens) = (w.cols(), x.len() / w.cols());
        let packing = kernels.packing(w.dtype());
        let mut values = vec![f32::NAN; tokens * packed_len(cols)];
        let packed = values.chunks_mut(packed_len(cols));
        for (x, out) in x.chunks(cols).zip(packed) {
            kernels.pack(packing, x, out);
        }
        let x = PackedRows {
            values: &values,
            packing,
            cols,
            rows: RowSet::Range {
                first: 0,
                count: tokens,
            },
        };
        let mut out = vec![0.0; w.rows() * tokens];
        kernels.linear(w, 0..w.rows(), &x, &mut KernelScratch::default(), &mut out);
        out
    }

    fn fp8(codes: Vec<u8>, rows: usize, cols: usize, scale: impl Fn(usize) -> f32) -> HostMatrix {
        let blocks_per_row = cols.div_ceil(SCALE_BLOCK);
        let blocks = blocks_per_row * rows.div_ceil(SCALE_BLOCK);
        let scales = BlockScales {
            values: (0..blocks).map(scale).collect(),
            blocks_per_row,
        };
        HostMatrix::new(codes.into(), DType::F8E4m3, rows, cols, Some(scales)).unwrap()
    }

    #[test]
    fn every_code_is_exact_in_every_place_of_a_unit_with_every_tuning() {
        let cols = SCALE_BLOCK + 70;
        let codes = (0..256 * cols).map(|i| (i / cols) as u8).collect();
        let w = fp8(codes, 256, cols, |_| 1.0);
        for kernels in kernels_of_every_tuning() {
            for place in 0..cols {
                let mut x = vec![0.0; cols];
                x[place] = 1.0;
                let y = products(&*kernels, &w, &x);
                for (code, got) in (0..=255u8).zip(y) {
                    let want = e4m3_to_f32(code);
                    let equal = got == want || got.is_nan() && want.is_nan();
                    assert!(equal, "{} {code:#x} at {place}: {got}", kernels.isa());
                }
            }
        }
    }

    /// FP8 weights with every code but NaN, including subnormals, and activations of 11 tokens.
    fn operands(rows: usize, cols: usize) -> (HostMatrix, Vec<f32>) {
        let codes = (0..rows * cols).map(|i| (i * i / 7 + i) as u8);
        let codes = codes
            .map(|c| if c & 0x7f == 0x7f { 1 } else { c })
            .collect();
        let w = fp8(codes, rows, cols, |b| 0.01 + b as f32 / 300.0);
        let x = (0..11 * cols)
            .map(|i| (i as f32 * 0.37).sin() * if i % 5 == 0 { 1e-6 } else { 3.0 })
            .collect();
        (w, x)
    }

    #[test]
    fn products_of_every_tuning_agree_with_the_reference() {
        for (rows, cols) in [(9, 1000), (5, 31), (133, 3300)] {
            let (w, x) = operands(rows, cols);
            let relative = 2f32.powi(-22) + cols as f32 * 2f32.powi(-26);
            let mut weight = vec![0.0; cols];
            for kernels in kernels_of_every_tuning() {
                let y = products(&*kernels, &w, &x);
                for row in 0..rows {
                    reference::dequant_row(&w, row, &mut weight);
                    for (t, x) in x.chunks(cols).enumerate() {
                        let want = reference::linear_row(x, &weight);
                        // Rounding of products and sums is relative to `Σ |x[k] w[k]|`.
                        let size: f32 = x.iter().zip(&weight).map(|(x, w)| (x * w).abs()).sum();
                        let error = (y[row * 11 + t] - want).abs();
                        let bound = relative * size + 1e-30;
                        assert!(error <= bound, "{} row {row}: {error}", kernels.isa());
                    }
                }
            }
        }
    }

    #[test]
    fn products_are_the_same_bits_with_every_tuning_and_in_every_batch() {
        let bits = |y: Vec<f32>| y.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        for (rows, cols) in [(9, 1000), (5, 31), (133, 3300)] {
            let (w, x) = operands(rows, cols);
            for isa in Isa::ALL {
                let tuned = kernels_of_every_tuning();
                let tuned: Vec<_> = tuned.iter().filter(|k| k.isa() == isa).collect();
                let Some(first) = tuned.first() else { continue };
                let each = x.chunks(cols).map(|x| bits(products(&***first, &w, x)));
                let alone: Vec<Vec<u32>> = each.collect();
                for kernels in &tuned {
                    for tokens in [1, 2, 3, 5, 8, 11] {
                        let y = bits(products(&***kernels, &w, &x[..tokens * cols]));
                        for (i, y) in y.into_iter().enumerate() {
                            assert_eq!(y, alone[i % tokens][i / tokens], "{isa}, {tokens} tokens");
                        }
                    }
                }
            }
        }
    }
}
