//! How a device is told to choose tokens: the choice of one row of logits, and why there may be none.

/// All that the choice from one row of logits depends on, beside the logits. The default is greedy.
///
/// Order of the adjustments: biases, repetition penalty, frequency and presence penalties, mask, temperature, `top_k`, `top_p` among what
/// is left, `min_p`, draw. The engine's sampler says what each of them means.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    /// Where in the distribution of the kept tokens, by ascending token, the draw falls: in `[0, 1)`.
    pub quantile: f64,
    /// Divides the logits; 0 chooses the largest, of equals the lowest token.
    pub temperature: f32,
    /// Most tokens that are kept; 0: all.
    pub top_k: u32,
    /// Share of probability at which keeping ends; 1: off.
    pub top_p: f32,
    /// Least share of the likeliest token's probability; 0: off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of all `used` tokens; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted for each time that a token stands in the answer.
    pub frequency_penalty: f32,
    /// Subtracted once from each token that stands in the answer.
    pub presence_penalty: f32,
    /// Tokens that the penalties concern, each once, with the times that they stand in the answer; 0: in the prompt only.
    pub used: Vec<(u32, u32)>,
    /// Added to the logits of tokens, each once.
    pub biases: Vec<(u32, f32)>,
    /// Bit `t % 32` of word `t / 32` is set where token `t` may follow; `None` where all may.
    pub allowed: Option<Vec<u32>>,
}

impl Default for SampleSpec {
    fn default() -> Self {
        Self {
            quantile: 0.0,
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
    /// Whether the row's largest logit, as it is, gives the token.
    pub fn is_largest_logit(&self) -> bool {
        self.temperature == 0.0
            && self.used.is_empty()
            && self.biases.is_empty()
            && self.allowed.is_none()
    }
}

/// Why a row has no token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SampleFault {
    /// A logit is NaN or infinite.
    NotFinite {
        /// First such token.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// The mask leaves nothing.
    NothingAllowed,
}
