//! The vector operations that the algorithms need.

/// Vectors of f32 in one instruction set. A value proves that the CPU has it, which is why the arithmetic
/// is safe to call; loads and stores are not, because they take pointers.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A vector of `LANES` f32.
    type F: Copy;
    /// Elements per vector.
    const LANES: usize;

    fn splat(self, value: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// The greater of the two; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// The lesser of the two; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n` in -126..=128.
    fn scale_by_power(self, a: Self::F, n: Self::F) -> Self::F;
    /// `value` where `a >= limit` or `a` is NaN, else zero.
    fn zero_below(self, a: Self::F, limit: Self::F, value: Self::F) -> Self::F;
    /// Sum of the lanes by halves: lane i with i + LANES/2, then i + LANES/4, and so on.
    fn reduce_add(self, a: Self::F) -> f32;
    /// Greatest lane, by halves.
    fn reduce_max(self, a: Self::F) -> f32;

    #[inline(always)]
    fn zero(self) -> Self::F {
        self.splat(0.0)
    }

    /// # Safety
    /// `LANES` elements lie at `p`, of any alignment.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// The first `n` lanes (all, if `n` is larger); the others are zero.
    ///
    /// # Safety
    /// `min(n, LANES)` elements lie at `p`.
    unsafe fn load_partial(self, p: *const f32, n: usize) -> Self::F;
    /// # Safety
    /// `LANES` elements may be written at `p`.
    unsafe fn store(self, p: *mut f32, a: Self::F);
    /// # Safety
    /// `min(n, LANES)` elements may be written at `p`.
    unsafe fn store_partial(self, p: *mut f32, n: usize, a: Self::F);

    /// `LANES` bfloat16, exact.
    ///
    /// # Safety
    /// `2 * LANES` bytes lie at `p`.
    unsafe fn load_bf16(self, p: *const u8) -> Self::F;
    /// `LANES` binary16, exact, subnormals included.
    ///
    /// # Safety
    /// `2 * LANES` bytes lie at `p`.
    unsafe fn load_f16(self, p: *const u8) -> Self::F;
    /// `LANES` E4M3 codes, exact on all 256.
    ///
    /// # Safety
    /// `LANES` bytes lie at `p`.
    unsafe fn load_e4m3(self, p: *const u8) -> Self::F;

    /// Fetches the line at `p` into the cache; any address is allowed.
    fn prefetch(self, p: *const u8);

    /// `e^a` to about 1 ulp; 0 below -87.3, infinite above 88.8.
    ///
    /// Cody–Waite reduction to `|r| <= ln2 / 2` and the polynomial of Cephes' `expf`, the same in every lane
    /// and in every vector, full or partial.
    #[inline(always)]
    fn exp(self, a: Self::F) -> Self::F {
        let lowest = self.splat(-87.3);
        let x = self.max(lowest, self.min(self.splat(88.8), a));
        let n = self.round(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts: the first has few enough bits for n * LN2_HIGH to be exact.
        let r = self.fma(n, self.splat(-0.693_359_4), x);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.987_569_1e-4);
        for coefficient in [
            1.398_199_9e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            1.666_666_5e-1,
            5e-1,
        ] {
            p = self.fma(p, r, self.splat(coefficient));
        }
        let p = self.fma(p, self.mul(r, r), r);
        let p = self.add(p, self.splat(1.0));
        self.zero_below(a, lowest, self.scale_by_power(p, n))
    }
}
