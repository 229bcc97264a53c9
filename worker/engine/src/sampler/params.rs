//! Sampling parameters and their ranges.

/// Maximum number of alternatives that a request may ask for with each token.
pub const MAX_TOP_LOGPROBS: u32 = 20;

/// Sampling parameters. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 chooses the likeliest token, ties by lowest id.
    pub temperature: f32,
    /// Keeps the likeliest tokens until their total probability reaches this; 1: off. At least one stays.
    pub top_p: f32,
    /// Keeps this many of the likeliest tokens; 0: off.
    pub top_k: u32,
    /// Keeps tokens with at least this share of the likeliest one's probability; 0: off.
    pub min_p: f32,
    /// Subtracted from a token's logit once per occurrence in the answer.
    pub frequency_penalty: f32,
    /// Subtracted once from the logit of each token that occurs in the answer.
    pub presence_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer; 1: off.
    pub repetition_penalty: f32,
    /// Key for the random numbers.
    pub seed: u64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Checks every parameter against its range, and biased tokens against `vocab`.
    ///
    /// # Errors
    /// [`SamplingError::Parameter`] naming the first parameter that is out of range.
    pub fn check(&self, vocab: usize) -> Result<(), SamplingError> {
        let Self {
            temperature,
            top_p,
            top_k: _,
            min_p,
            frequency_penalty,
            presence_penalty,
            repetition_penalty,
            seed: _,
            logit_bias,
        } = self;
        let ranges = [
            (
                "temperature",
                *temperature,
                *temperature >= 0.0,
                "0 or more",
            ),
            ("top_p", *top_p, (0.0..=1.0).contains(top_p), "from 0 to 1"),
            ("min_p", *min_p, (0.0..=1.0).contains(min_p), "from 0 to 1"),
            ("frequency_penalty", *frequency_penalty, true, "a number"),
            ("presence_penalty", *presence_penalty, true, "a number"),
            (
                "repetition_penalty",
                *repetition_penalty,
                *repetition_penalty > 0.0,
                "more than 0",
            ),
        ];
        for (field, value, in_range, expected) in ranges {
            if !value.is_finite() || !in_range {
                return Err(SamplingError::Parameter {
                    field: field.to_owned(),
                    value: value.to_string(),
                    expected: expected.to_owned(),
                });
            }
        }
        for (token, bias) in logit_bias {
            if *token as usize >= vocab {
                return Err(SamplingError::Parameter {
                    field: "logit_bias".to_owned(),
                    value: format!("for token {token}"),
                    expected: format!("for tokens below {vocab}"),
                });
            }
            if !bias.is_finite() {
                return Err(SamplingError::Parameter {
                    field: format!("logit_bias[{token}]"),
                    value: bias.to_string(),
                    expected: "a number".to_owned(),
                });
            }
        }
        Ok(())
    }
}

/// Reason no token could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// A parameter out of range.
    #[error("{field} is {value}, and must be {expected}")]
    Parameter {
        /// Its name.
        field: String,
        /// Its value.
        value: String,
        /// The range.
        expected: String,
    },
    /// The model computed a NaN or infinite logit.
    #[error(
        "the logit of token {token} is {value} at answer token {index}: the weights or the KV are damaged"
    )]
    NotFinite {
        /// First such token.
        token: usize,
        /// `NaN`, `inf` or `-inf`.
        value: String,
        /// Index of the answer's token.
        index: usize,
    },
    /// The mask leaves no token.
    #[error("the grammar allows no token at answer token {index}")]
    NothingAllowed {
        /// Index of the answer's token.
        index: usize,
    },
}

impl SamplingError {
    /// Whether the request is at fault.
    pub fn is_request_fault(&self) -> bool {
        match self {
            Self::Parameter { .. } | Self::NothingAllowed { .. } => true,
            Self::NotFinite { .. } => false,
        }
    }
}
