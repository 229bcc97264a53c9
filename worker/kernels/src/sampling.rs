//! Instructions for a device that chooses tokens: the choice from one row of logits, and the reasons it may fail.

/// Everything that the choice from one row of logits depends on, besides the logits. The default is greedy.
///
/// Order of the adjustments: biases, repetition penalty, frequency and presence penalties, mask, temperature, `top_k`,
/// `top_p` among the remaining tokens, `min_p`, draw. The engine's sampler defines each of them.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    /// Position of the draw in the distribution of the kept tokens, in ascending token order: in `[0, 1)`, in units of
    /// 2^-64.
    pub quantile: u64,
    /// Divides the logits; 0 chooses the largest, ties by lowest token.
    pub temperature: f32,
    /// Maximum number of tokens to keep; 0: all.
    pub top_k: u32,
    /// Cumulative probability at which keeping ends; 1: off.
    pub top_p: f32,
    /// Minimum share of the likeliest token's probability; 0: off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of all `used` tokens; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted once per occurrence of a token in the answer.
    pub frequency_penalty: f32,
    /// Subtracted once from each token that occurs in the answer.
    pub presence_penalty: f32,
    /// Tokens that the penalties affect, each once, with the number of
    /// occurrences in the answer; 0: in the prompt only.
    pub used: Vec<(u32, u32)>,
    /// Added to the logits of these tokens, each listed once.
    pub biases: Vec<(u32, f32)>,
    /// Bit `t % 32` of word `t / 32` is set if token `t` may follow; `None` if all may.
    pub allowed: Option<Vec<u32>>,
}

impl Default for SampleSpec {
    fn default() -> Self {
        Self {
            quantile: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            used: Vec::new(),
            biases: Vec::new(),
            allowed: None,
        }
    }
}

impl SampleSpec {
    /// Whether the token is simply that of the row's largest logit.
    pub fn is_largest_logit(&self) -> bool {
        self.temperature == 0.0
            && self.used.is_empty()
            && self.biases.is_empty()
            && self.allowed.is_none()
    }
}

/// Reason a row has no token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SampleFault {
    /// A logit is NaN or infinite.
    NotFinite {
        /// First such token.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// The mask leaves no token.
    NothingAllowed,
}
