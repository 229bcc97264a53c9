//! Numbers that are drawn: the same seed gives the same ones.

/// Steele, Lea and Flood's SplitMix64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub(super) struct SplitMix(pub(super) u64);

impl SplitMix {
    /// A number above 0 and up to 1.
    pub(super) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((mixed >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// A whole number below `count`, which is at least 1.
    pub(super) fn below(&mut self, count: usize) -> usize {
        // The number that is drawn may be 1.
        ((self.unit() * count as f64) as usize).min(count - 1)
    }

    /// Whether something happens that does so in `percent` of a hundred cases.
    pub(super) fn happens(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}
