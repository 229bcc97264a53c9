//! The request's own tokens, as used by the penalties.

use std::collections::{HashMap, HashSet};

use super::{SamplingParams, finite};

/// Tokens of prompt and answer. Updated by [`History::push`], and equal to a history built from the same
/// tokens at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    prompt: HashSet<u32>,
    answer: HashMap<u32, u32>,
}

impl History {
    /// Builds the history of a prompt and the answer's tokens so far.
    pub fn new(prompt: &[u32], answer: &[u32]) -> Self {
        let mut history = Self {
            prompt: prompt.iter().copied().collect(),
            answer: HashMap::new(),
        };
        for token in answer {
            history.push(*token);
        }
        history
    }

    /// Adds an answer token.
    pub fn push(&mut self, token: u32) {
        *self.answer.entry(token).or_default() += 1;
    }

    /// The tokens that these penalties affect, each once, with its number of occurrences in the answer.
    pub(crate) fn used(&self, params: &SamplingParams) -> Vec<(u32, u32)> {
        let (repetition, frequency, presence) = (
            params.repetition_penalty != 1.0,
            params.frequency_penalty != 0.0,
            params.presence_penalty != 0.0,
        );
        let mut used = Vec::new();
        if repetition || frequency || presence {
            used.extend(self.answer.iter().map(|(token, count)| (*token, *count)));
        }
        if repetition {
            let in_prompt_only = self.prompt.iter().filter(|t| !self.answer.contains_key(t));
            used.extend(in_prompt_only.map(|token| (*token, 0)));
        }
        used
    }

    /// Applies the three penalties to `logits` `[vocab]`: repetition as Hugging Face defines it (prompt and
    /// answer), then frequency and presence as OpenAI defines them (answer).
    pub(super) fn penalise(&self, params: &SamplingParams, logits: &mut [f32]) {
        let repetition = params.repetition_penalty;
        if repetition != 1.0 {
            let in_answer = self.answer.keys().filter(|t| !self.prompt.contains(t));
            for token in self.prompt.iter().chain(in_answer) {
                if let Some(l) = logits.get_mut(*token as usize) {
                    let factor = if *l > 0.0 {
                        1.0 / repetition
                    } else {
                        repetition
                    };
                    *l = finite(*l * factor);
                }
            }
        }
        let (frequency, presence) = (params.frequency_penalty, params.presence_penalty);
        if frequency != 0.0 || presence != 0.0 {
            for (token, count) in &self.answer {
                if let Some(l) = logits.get_mut(*token as usize) {
                    *l = finite(*l - frequency * *count as f32 - presence);
                }
            }
        }
    }
}
