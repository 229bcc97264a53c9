//! Lower bound on the number of tokens in a text, from its bytes alone.
//!
//! A token of L bytes contributes 1/L per byte. Let w(b) be the smallest such 1/L over all tokens that contain byte b.
//! The bytes of any token then weigh at most 1 together, so a text has at least as many tokens as its bytes weigh.
//! This detects a text much too long for a model's context without tokenising it, which takes a second per megabyte.

use serde::Deserialize;
use serde_json::Value;

/// Normalisation to composed characters can turn three bytes into one.
const NFC_SHRINKS: f64 = 3.0;
/// Compensates for inexact sums of floats.
const ROUNDING: f64 = 0.999;

/// The weight of each byte, in tokens.
#[derive(Clone, Debug)]
pub(crate) struct TokenBound([f64; 256]);

/// Parts of tokenizer.json that decide whether tokens spell out a text byte by byte.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: ModelPart,
}

#[derive(Deserialize)]
struct ModelPart {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
}

impl TokenBound {
    /// A bound that says nothing.
    pub(crate) fn none() -> Self {
        Self([0.0; 256])
    }

    /// Computes the bound for the tokenizer.json `json` from the bytes that its tokens stand for. `strips`: whether
    /// one of its added tokens absorbs adjacent white space.
    pub(crate) fn new(
        json: &[u8],
        token_bytes: impl Iterator<Item = Vec<u8>>,
        strips: bool,
    ) -> Self {
        let parts = serde_json::from_slice::<Parts>(json).ok();
        let Some(shrinks) = parts.and_then(|parts| parts.shrinks()) else {
            return Self::none();
        };
        let mut longest = [0usize; 256];
        for bytes in token_bytes {
            for byte in &bytes {
                let longest = &mut longest[usize::from(*byte)];
                *longest = (*longest).max(bytes.len());
            }
        }
        if longest.contains(&0) {
            // A byte without a token of its own may be merged with its neighbours into one.
            return Self::none();
        }
        let mut weights = longest.map(|longest| 1.0 / (longest as f64 * shrinks));
        if strips {
            for byte in white_space_bytes() {
                weights[usize::from(byte)] = 0.0;
            }
        }
        Self(weights)
    }

    /// Smallest possible number of tokens in a text.
    pub(crate) fn least_tokens(&self, text: &[u8]) -> usize {
        let mut counts = [0u64; 256];
        for byte in text {
            counts[usize::from(*byte)] += 1;
        }
        let weight: f64 = counts
            .iter()
            .zip(&self.0)
            .map(|(count, weight)| *count as f64 * weight)
            .sum();
        (weight * ROUNDING).ceil() as usize
    }
}

impl Parts {
    /// Factor by which a text may lose bytes before tokens spell it out; `None` if bytes may be dropped without a
    /// token.
    fn shrinks(&self) -> Option<f64> {
        let steps = |value: &Value, list: &str| -> Vec<Value> {
            match value["type"].as_str() {
                None => Vec::new(),
                Some("Sequence") => value[list].as_array().cloned().unwrap_or_default(),
                Some(_) => vec![value.clone()],
            }
        };
        let normalizers = steps(&self.normalizer, "normalizers");
        let pre_tokenizers = steps(&self.pre_tokenizer, "pretokenizers");
        let is = |step: &Value, kind: &str| step["type"] == kind;
        let is_bpe = self.model.kind.as_deref().is_none_or(|kind| kind == "BPE");
        let spells_bytes = self.model.byte_fallback
            || normalizers
                .iter()
                .chain(&pre_tokenizers)
                .any(|step| is(step, "ByteLevel"));
        let keeps = |step: &Value| match step["type"].as_str() {
            Some("ByteLevel" | "Digits" | "Metaspace") => true,
            Some("Split") => step["behavior"] != "Removed",
            _ => false,
        };
        if !is_bpe || !spells_bytes || !pre_tokenizers.iter().all(keeps) {
            return None;
        }
        let mut shrinks = 1.0;
        for step in &normalizers {
            let is_space = step["pattern"]["String"] == " " && step["content"] == "▁";
            match step["type"].as_str() {
                Some("ByteLevel" | "Prepend") => {}
                Some("Replace") if is_space => {}
                Some("NFC") => shrinks *= NFC_SHRINKS,
                _ => return None,
            }
        }
        Some(shrinks)
    }
}

/// All bytes that occur in the UTF-8 encoding of white space.
fn white_space_bytes() -> impl Iterator<Item = u8> {
    let spaces = ('\0'..='\u{3000}').filter(|c| c.is_whitespace());
    spaces.flat_map(|c| {
        let mut bytes = [0; 4];
        c.encode_utf8(&mut bytes).bytes().collect::<Vec<u8>>()
    })
}
