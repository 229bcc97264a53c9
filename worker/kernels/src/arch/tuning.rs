//! What differs between x86 CPUs that have the same instructions.

use std::arch::x86_64::__cpuid;

/// What suits a CPU. It decides how fast a kernel is, never what it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    /// How far ahead of the reads weights are fetched, over all streams of reads together; 0: not at all, for
    /// the hardware does it better.
    pub(super) prefetch_bytes: usize,
    /// The same beside activations that do not stay in the first-level cache.
    pub(super) far_prefetch_bytes: usize,
    /// Whether a product with a subnormal number takes no longer than another; elsewhere it takes a hundred
    /// cycles and more.
    pub(super) fast_subnormals: bool,
}

impl Tuning {
    /// What suits the CPU that this runs on.
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

    /// What suits a CPU by its maker and signature.
    fn of(maker: &[u8; 12], signature: u32) -> Self {
        let base = signature >> 8 & 0xf;
        let family = base
            + if base == 0xf {
                signature >> 20 & 0xff
            } else {
                0
            };
        let amd = maker == b"AuthenticAMD";
        // Measured on Zen 4: its own fetching keeps up with a few contiguous streams, and instructions that
        // fetch cost a tenth to a fifth of the speed.
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
}
