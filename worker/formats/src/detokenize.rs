//! Converts tokens to text one at a time, with exactly the result of decoding the whole sequence at once.
//!
//! tokenizers' decoders work on whole sequences. The ones that language models use are recognised here and turned
//! into machines with a little state: the bytes of an incomplete character, a run of byte tokens, a
//! space that only the first token loses. Any other decoder is rejected when the tokenizer is opened.

use serde_json::Value;

use crate::FormatError;
use crate::tokenizer::Tokenizer;

/// Decoder of a vocabulary's tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Detokenizer {
    /// GPT-2's byte alphabet: each character of a token is a byte.
    ByteLevel,
    /// Steps applied to whole tokens.
    Pieces(Vec<Step>),
    /// No decoder: tokens are words.
    Words,
}

/// One step in a sequence of decoders.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    Replace {
        pattern: String,
        content: String,
    },
    Metaspace {
        replacement: char,
        first_loses_it: bool,
    },
    ByteFallback,
    /// Strips up to `count` leading `content` characters from the whole text.
    StripStart {
        content: char,
        count: usize,
    },
}

impl Detokenizer {
    /// Reads the `decoder` of a tokenizer.json.
    pub(crate) fn from_json(decoder: &Value) -> Result<Self, FormatError> {
        if decoder.is_null() {
            return Ok(Self::Words);
        }
        let parts = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"]
                .as_array()
                .map_or(&[][..], Vec::as_slice),
            _ => std::slice::from_ref(decoder),
        };
        if let [only] = parts
            && only["type"] == "ByteLevel"
        {
            return Ok(Self::ByteLevel);
        }
        let mut steps = Vec::new();
        let mut fused = false;
        for part in parts {
            match step(part, &steps, fused) {
                Some(Some(step)) => steps.push(step),
                Some(None) => fused = true,
                None => return Err(unsupported(part)),
            }
        }
        Ok(Self::Pieces(steps))
    }

    /// Returns the bytes of one token in the middle of a text.
    pub(crate) fn bytes_of(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => byte_level_bytes(token),
            Self::Words => token.as_bytes().to_vec(),
            Self::Pieces(steps) => {
                let mut text = token.to_owned();
                for step in steps {
                    match step {
                        Step::ByteFallback => {
                            if let Some(byte) = byte_token(&text) {
                                return vec![byte];
                            }
                        }
                        Step::Replace { .. } | Step::Metaspace { .. } => {
                            text = step.apply(&text, false)
                        }
                        Step::StripStart { .. } => {}
                    }
                }
                text.into_bytes()
            }
        }
    }
}

/// Parses the step that follows `before`; `Some(None)` for Fuse, which only means that later steps see the whole text;
/// `None` if the step is not supported.
fn step(part: &Value, before: &[Step], fused: bool) -> Option<Option<Step>> {
    // Bytes decoded to text would pass through the later steps, the whole run at once.
    let after_bytes = before.contains(&Step::ByteFallback);
    let text = |field: &str| part[field].as_str();
    let single = |field: &str| text(field).and_then(|s| s.parse::<char>().ok());
    let step = match (text("type")?, fused) {
        ("Fuse", _) => return Some(None),
        ("Replace", false) if !after_bytes => Step::Replace {
            pattern: part["pattern"]["String"]
                .as_str()
                .filter(|p| !p.is_empty())?
                .into(),
            content: text("content")?.into(),
        },
        ("Metaspace", false) if !after_bytes => Step::Metaspace {
            replacement: single("replacement")?,
            first_loses_it: text("prepend_scheme") != Some("never"),
        },
        ("ByteFallback", false) if !after_bytes => Step::ByteFallback,
        ("Strip", true)
            if part["stop"] == 0 && before.iter().all(|s| s.strip_content().is_none()) =>
        {
            Step::StripStart {
                content: single("content")?,
                count: usize::try_from(part["start"].as_u64()?).ok()?,
            }
        }
        _ => return None,
    };
    Some(Some(step))
}

fn unsupported(part: &Value) -> FormatError {
    FormatError::malformed(
        "tokenizer.json",
        format!("has a decoder with the step {part}, which is not supported here"),
        "supported: ByteLevel; Metaspace; sequences of Replace, ByteFallback, Fuse and a Strip at the start.",
    )
}

impl Step {
    /// Applies a per-token step to one token.
    fn apply(&self, token: &str, first: bool) -> String {
        match self {
            Self::Replace { pattern, content } => token.replace(pattern.as_str(), content),
            Self::Metaspace {
                replacement,
                first_loses_it,
            } => {
                let space = if first && *first_loses_it { "" } else { " " };
                token.replace(*replacement, space)
            }
            Self::ByteFallback | Self::StripStart { .. } => token.to_owned(),
        }
    }
}

/// Decodes tokens as they arrive. The concatenated texts of all [`StreamDecoder::push`] and
/// [`StreamDecoder::finish`] calls equal [`Tokenizer::decode`] of all tokens; no text ends within a character.
///
/// If a vocabulary falls back to byte tokens (Llama 2), a run of them is held until it ends: an invalid byte
/// changes the text of the whole run.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Whether a token that is part of the text was pushed.
    started: bool,
    /// Bytes that are not text yet: an incomplete character, or a run of byte tokens.
    held: Vec<u8>,
    /// Number of characters that `StripStart` may still remove.
    strip_left: usize,
}

impl StreamDecoder {
    pub(crate) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let strip_left = match tokenizer.detokenizer() {
            Detokenizer::Pieces(steps) => steps.iter().map(Step::strip_count).sum(),
            _ => 0,
        };
        Self {
            tokenizer,
            skip_special,
            started: false,
            held: Vec::new(),
            strip_left,
        }
    }

    /// Takes one token; returns the text that is now final, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let token = self.tokenizer.token_text(id)?;
        if self.skip_special && self.tokenizer.is_special_text(&token) {
            return None;
        }
        let tokenizer = self.tokenizer.clone();
        let first = !std::mem::replace(&mut self.started, true);
        let text = match tokenizer.detokenizer() {
            Detokenizer::ByteLevel => {
                self.held.extend(byte_level_bytes(&token));
                take_characters(&mut self.held)
            }
            Detokenizer::Words if first => token,
            Detokenizer::Words => format!(" {token}"),
            Detokenizer::Pieces(steps) => self.push_piece(steps, token, first),
        };
        Some(text).filter(|text| !text.is_empty())
    }

    /// Returns the rest once no more tokens follow: U+FFFD for a character that was never completed.
    pub fn finish(mut self) -> String {
        match self.tokenizer.detokenizer() {
            Detokenizer::ByteLevel => String::from_utf8_lossy(&self.held).into_owned(),
            Detokenizer::Words => String::new(),
            Detokenizer::Pieces(steps) => {
                let steps = steps.clone();
                let run = self.take_run();
                self.strip(&steps, run)
            }
        }
    }

    fn push_piece(&mut self, steps: &[Step], token: String, first: bool) -> String {
        let mut text = token;
        for step in steps {
            match step {
                Step::ByteFallback => match byte_token(&text) {
                    Some(byte) => {
                        self.held.push(byte);
                        return String::new();
                    }
                    None => text = self.take_run() + &text,
                },
                _ => text = step.apply(&text, first),
            }
        }
        self.strip(steps, text)
    }

    /// Takes the held run of byte tokens as text: decoded if valid as a whole, else U+FFFD for each byte.
    fn take_run(&mut self) -> String {
        let run = std::mem::take(&mut self.held);
        let bytes = run.len();
        String::from_utf8(run).unwrap_or_else(|_| "\u{FFFD}".repeat(bytes))
    }

    fn strip(&mut self, steps: &[Step], text: String) -> String {
        let Some(content) = steps.iter().find_map(Step::strip_content) else {
            return text;
        };
        let mut rest = text.as_str();
        while self.strip_left > 0 && !rest.is_empty() {
            match rest.strip_prefix(content) {
                Some(shorter) => {
                    rest = shorter;
                    self.strip_left -= 1;
                }
                None => self.strip_left = 0,
            }
        }
        rest.to_owned()
    }
}

impl Step {
    fn strip_count(&self) -> usize {
        match self {
            Self::StripStart { count, .. } => *count,
            _ => 0,
        }
    }

    fn strip_content(&self) -> Option<char> {
        match self {
            Self::StripStart { content, .. } => Some(*content),
            _ => None,
        }
    }
}

/// Parses a byte token: `<0x0A>` → 10.
fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2)
        .then(|| u8::from_str_radix(hex, 16).ok())
        .flatten()
}

/// Returns the bytes of a token in a byte-level vocabulary; a token with other characters (an added one) is literal
/// text.
fn byte_level_bytes(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// Maps GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 in order.
fn byte_of(c: char) -> Option<u8> {
    match c {
        '!'..='~' | '\u{A1}'..='\u{AC}' | '\u{AE}'..='\u{FF}' => u8::try_from(u32::from(c)).ok(),
        '\u{100}'..='\u{120}' => u8::try_from(u32::from(c) - 0x100).ok(),
        '\u{121}'..='\u{142}' => u8::try_from(u32::from(c) - 0x121 + 0x7F).ok(),
        '\u{143}' => Some(0xAD),
        _ => None,
    }
}

/// Takes all complete characters off the front, with invalid bytes as U+FFFD; leaves the start of an incomplete one.
fn take_characters(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in held.utf8_chunks() {
        let unfinished = taken + chunk.valid().len() + chunk.invalid().len() == held.len()
            && std::str::from_utf8(chunk.invalid()).is_err_and(|e| e.error_len().is_none());
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        if unfinished {
            break;
        }
        if !chunk.invalid().is_empty() {
            text.push('\u{FFFD}');
        }
        taken += chunk.invalid().len();
    }
    held.drain(..taken);
    text
}
