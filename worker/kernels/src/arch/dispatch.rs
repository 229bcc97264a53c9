//! Glue shared by the vector instruction sets: from the kernels' interface into functions that are
//! compiled with the target features.

/// Implements [`Kernels`](super::Kernels) for an instruction set with the generic algorithms.
///
/// `$isa` is its [`Simd`](super::generic::Simd), whose values prove the target features `$features`; the module
/// `$linear` has the products (`packing`, `pack`, `linear`), which decode weights in their own way.
macro_rules! impl_kernels {
    ($isa:ident, $which:expr, $features:literal, $linear:ident, $names:expr) => {
        impl $crate::arch::Kernels for $isa {
            fn isa(&self) -> $crate::arch::Isa {
                $which
            }

            fn names(&self) -> &'static [&'static str] {
                $names
            }

            fn packing(&self, dtype: $crate::DType) -> $crate::arch::Packing {
                $linear::packing(dtype)
            }

            fn pack(&self, packing: $crate::arch::Packing, x: &[f32], out: &mut [f32]) {
                $linear::pack(*self, packing, x, out);
            }

            fn linear(
                &self,
                w: &$crate::HostMatrix,
                rows: std::ops::Range<usize>,
                x: &$crate::arch::PackedRows<'_>,
                scratch: &mut $crate::cpu::memory::KernelScratch,
                out: &mut [f32],
            ) {
                $linear::linear(*self, w, rows, x, scratch, out);
            }

            fn multiply(&self, steps: usize) -> usize {
                #[target_feature(enable = $features)]
                unsafe fn run(simd: $isa, steps: usize) -> usize {
                    $crate::arch::generic::multiply(simd, steps)
                }
                // SAFETY: the value proves the target features.
                unsafe { run(*self, steps) }
            }

            fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
                #[target_feature(enable = $features)]
                unsafe fn run(simd: $isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
                    $crate::arch::generic::rms_norm(simd, x, weight, eps, out);
                }
                // SAFETY: the value proves the target features.
                unsafe { run(*self, x, weight, eps, out) }
            }

            fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
                #[target_feature(enable = $features)]
                unsafe fn run(simd: $isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
                    $crate::arch::generic::silu_mul(simd, gate, up, out);
                }
                // SAFETY: the value proves the target features.
                unsafe { run(*self, gate, up, out) }
            }

            fn attention(
                &self,
                task: &$crate::arch::AttentionTask<'_>,
                scratch: &mut $crate::cpu::memory::KernelScratch,
                out: &mut [f32],
            ) {
                #[target_feature(enable = $features)]
                unsafe fn run(
                    simd: $isa,
                    task: &$crate::arch::AttentionTask<'_>,
                    scratch: &mut $crate::cpu::memory::KernelScratch,
                    out: &mut [f32],
                ) {
                    $crate::arch::generic::attention(simd, task, scratch, out);
                }
                // SAFETY: the value proves the target features.
                unsafe { run(*self, task, scratch, out) }
            }

            fn mla_absorb(
                &self,
                task: &$crate::arch::AbsorbTask<'_>,
                scratch: &mut $crate::cpu::memory::KernelScratch,
                out: &mut [f32],
            ) {
                use $crate::arch::generic;
                #[target_feature(enable = $features)]
                unsafe fn run<D: generic::DecodeInOrder<$isa>>(
                    simd: $isa,
                    task: &$crate::arch::AbsorbTask<'_>,
                    scratch: &mut $crate::cpu::memory::KernelScratch,
                    out: &mut [f32],
                ) {
                    // SAFETY: the caller's promise.
                    unsafe { generic::mla_absorb::<_, D>(simd, task, scratch, out) }
                }
                let run = match task.kv_b.dtype() {
                    $crate::DType::F32 => run::<generic::F32Weights>,
                    $crate::DType::F16 => run::<generic::F16Weights>,
                    $crate::DType::Bf16 => run::<generic::Bf16Weights>,
                    $crate::DType::F8E4m3 => run::<generic::E4m3Weights>,
                };
                // SAFETY: the value proves the target features; the decoder is that of the element type.
                unsafe { run(*self, task, scratch, out) }
            }

            fn read(&self, data: &[f32], prefetch_bytes: usize) -> f32 {
                #[target_feature(enable = $features)]
                unsafe fn run(simd: $isa, data: &[f32], prefetch_bytes: usize) -> f32 {
                    $crate::arch::generic::read(simd, data, prefetch_bytes)
                }
                // SAFETY: the value proves the target features.
                unsafe { run(*self, data, prefetch_bytes) }
            }
        }
    };
}

pub(crate) use impl_kernels;
