//! Choice of tokens on the device, where their logits are.

use hearth_kernels::ops::SampleOps;
use hearth_kernels::{KernelError, SampleFault, SampleSpec, checks};

use super::{CudaBackend, CudaTensor, CudaWeight, Kernel};
use crate::compile::Variant;
use crate::memory::Buffer;
use crate::queue::{Args, Argument, Landing};

/// Maximum tokens whose weights a histogram's halves can sum (select.cuh).
const MOST_TOKENS: usize = 1 << 20;
/// Bytes of a row's token, its fault, and the logit at fault.
const RESULT_BYTES: usize = 12;
/// Value of `fault` for a row whose mask leaves no token.
const NOTHING_ALLOWED: i32 = -1;

impl SampleOps for CudaBackend {
    type Tokens = CudaTokens;

    fn can_sample(&self, vocab: usize) -> bool {
        (1..=MOST_TOKENS).contains(&vocab)
    }

    fn sample(&self, logits: &CudaTensor, specs: &[SampleSpec]) -> Result<CudaTokens, KernelError> {
        let (count, vocab) = (specs.len(), logits.cols);
        checks::sample(logits.shape(), count)?;
        checks::ensure(self.can_sample(vocab), "sample", || {
            format!("1 to {MOST_TOKENS} logits of a row, and there are {vocab}")
        })?;
        // Tokens, then faults, then the logits that are not finite, so that one copy brings all to the host.
        let results = self.buffer(count * RESULT_BYTES, "chosen tokens")?;
        let weights = if specs.iter().all(SampleSpec::is_largest_logit) {
            None
        } else {
            Some(self.buffer(count * vocab * 4, "weights of tokens")?)
        };
        let lists = Lists::new(specs);
        let args = Args::new()
            .with(results.address())
            .with(results.address() + (count * 4) as u64)
            .with(self.values(logits)?)
            .with(weights.as_ref().map_or(0, |w| w.address()))
            .with(vocab as i32)
            .with(self.host(&lists.rows)?)
            .with(self.host(&lists.used)?)
            .with(self.host(&lists.biases)?)
            .with(self.host(&lists.masks)?);
        let variant = Variant::plain("sample");
        let kernel = Kernel::new(&variant, "sample");
        self.launch(kernel, [count, 1, 1], args)?;
        let landing = self
            .queue
            .land(results.address(), count * RESULT_BYTES, &self.marks)?;
        Ok(CudaTokens {
            results,
            count,
            landing,
        })
    }

    fn landed(&self, tokens: &CudaTokens) -> Result<Vec<Result<u32, SampleFault>>, KernelError> {
        let (words, _) = tokens.landing.bytes()?.as_chunks::<4>();
        let word = |at: usize| words.get(at).copied().unwrap_or_default();
        let outcome = |row| match i32::from_ne_bytes(word(tokens.count + row)) {
            0 => Ok(u32::from_ne_bytes(word(row))),
            NOTHING_ALLOWED => Err(SampleFault::NothingAllowed),
            fault => Err(SampleFault::NotFinite {
                token: fault as u32 - 1,
                value: f32::from_ne_bytes(word(2 * tokens.count + row)),
            }),
        };
        Ok((0..tokens.count).map(outcome).collect())
    }

    fn embed_chosen(
        &self,
        table: &CudaWeight,
        tokens: &CudaTokens,
        picked: &[u32],
    ) -> Result<CudaTensor, KernelError> {
        checks::rows(picked, tokens.count)?;
        let at = self.host(picked)?;
        self.embed_at(&table.0, tokens.results.address(), at, picked.len())
    }
}

/// Tokens that the GPU chooses.
pub struct CudaTokens {
    /// `[3, count]`: tokens, faults, logits that are not finite.
    results: Buffer,
    count: usize,
    /// The same, on the host.
    landing: Landing,
}

/// The kernel's input for all rows.
#[derive(Default)]
struct Lists {
    rows: Vec<SampleRowArg>,
    used: Vec<UsedTokenArg>,
    biases: Vec<TokenBiasArg>,
    masks: Vec<u32>,
}

impl Lists {
    fn new(specs: &[SampleSpec]) -> Self {
        let mut lists = Self::default();
        for spec in specs {
            lists.rows.push(SampleRowArg {
                quantile: spec.quantile,
                temperature: spec.temperature,
                top_p: spec.top_p,
                min_p: spec.min_p,
                top_k: spec.top_k,
                repetition_penalty: spec.repetition_penalty,
                frequency_penalty: spec.frequency_penalty,
                presence_penalty: spec.presence_penalty,
                first_used: lists.used.len() as i32,
                used_count: spec.used.len() as i32,
                first_bias: lists.biases.len() as i32,
                bias_count: spec.biases.len() as i32,
                first_mask_word: lists.masks.len() as i32,
                mask_words: spec.allowed.as_ref().map_or(-1, |words| words.len() as i32),
                reserved: 0,
            });
            let used = spec.used.iter();
            lists
                .used
                .extend(used.map(|&(token, answer_count)| UsedTokenArg {
                    token,
                    answer_count,
                }));
            let biases = spec.biases.iter();
            lists
                .biases
                .extend(biases.map(|&(token, bias)| TokenBiasArg { token, bias }));
            lists.masks.extend(spec.allowed.iter().flatten());
        }
        lists
    }
}

/// `struct SampleRow` of sample.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct SampleRowArg {
    quantile: u64,
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
    repetition_penalty: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    first_used: i32,
    used_count: i32,
    first_bias: i32,
    bias_count: i32,
    first_mask_word: i32,
    /// -1: no mask.
    mask_words: i32,
    reserved: i32,
}

// SAFETY: repr(C), and its fields leave no padding: 8 + 14 × 4 bytes.
unsafe impl Argument for SampleRowArg {}

/// `struct UsedToken` of sample.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct UsedTokenArg {
    token: u32,
    answer_count: u32,
}

// SAFETY: repr(C) of two u32.
unsafe impl Argument for UsedTokenArg {}

/// `struct TokenBias` of sample.cuh.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct TokenBiasArg {
    token: u32,
    bias: f32,
}

// SAFETY: repr(C) of a u32 and an f32.
unsafe impl Argument for TokenBiasArg {}
