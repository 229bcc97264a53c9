//! `tokenizer.json`: converts text to token ids and back.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use tokenizers::tokenizer::{Model as _, OffsetType, PreTokenizer as _};

use crate::FormatError;
use crate::ModelConfig;
use crate::detokenize::{Detokenizer, StreamDecoder};
use crate::error::without_bom;
use crate::file::{MAX_TOKENIZER_BYTES, read_file};
use crate::token_bound::TokenBound;

const TOKENIZER_FILE: &str = "tokenizer.json";
const DOWNLOAD_AGAIN: &str = "download the file again, from where the weights came from.";

/// A tokenizer; clones share its data.
#[derive(Clone)]
pub struct Tokenizer {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    tokenizer: tokenizers::Tokenizer,
    detokenizer: Detokenizer,
    vocab_size: usize,
    bound: TokenBound,
}

/// Result of encoding a text that may be too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// All token ids.
    Whole(Vec<u32>),
    /// Encoding was stopped early.
    Stopped {
        /// Number of tokens at that point.
        tokens: usize,
    },
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`.
    ///
    /// # Errors
    /// [`FormatError::Missing`] (no such file), [`FormatError::Io`], [`FormatError::TooLarge`], and the errors of
    /// [`Tokenizer::from_bytes`].
    pub fn open(dir: &Path) -> Result<Self, FormatError> {
        let path = dir.join(TOKENIZER_FILE);
        let remedy = "make the file readable for this user.";
        match read_file(&path, MAX_TOKENIZER_BYTES, remedy) {
            Ok(json) => Self::from_bytes(&json),
            Err(error) if error.is_not_found() => Err(no_tokenizer(dir)),
            Err(error) => Err(error),
        }
    }

    /// Parses the content of a tokenizer.json. Truncation and padding settings are meant for training and switched
    /// off.
    ///
    /// # Errors
    /// [`FormatError::Malformed`]: not a tokenizer.json, an empty vocabulary, or an unsupported decoder.
    pub fn from_bytes(json: &[u8]) -> Result<Self, FormatError> {
        let bad = |problem: String| FormatError::malformed(TOKENIZER_FILE, problem, DOWNLOAD_AGAIN);
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(without_bom(json))
            .map_err(|e| bad(format!("is not a valid tokenizer: {e}")))?;
        tokenizer
            .with_padding(None)
            .with_truncation(None)
            .map_err(|e| {
                bad(format!(
                    "asks for truncation that cannot be switched off: {e}"
                ))
            })?;
        let decoder = serde_json::to_value(tokenizer.get_decoder())
            .map_err(|e| bad(format!("has an unreadable decoder: {e}")))?;
        let detokenizer = Detokenizer::from_json(&decoder)?;
        let vocab = tokenizer.get_vocab(true);
        let Some(highest) = vocab.values().copied().max() else {
            return Err(bad("has no tokens".into()));
        };
        let added = tokenizer.get_added_tokens_decoder();
        let token_bytes = vocab.into_iter().map(|(token, id)| match added.get(&id) {
            Some(added) => added.content.clone().into_bytes(),
            None => detokenizer.bytes_of(&token),
        });
        let strips = added.values().any(|token| token.lstrip || token.rstrip);
        let bound = match detokenizer {
            Detokenizer::Words => TokenBound::none(),
            _ => TokenBound::new(without_bom(json), token_bytes, strips),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                tokenizer,
                detokenizer,
                vocab_size: highest as usize + 1,
                bound,
            }),
        })
    }

    /// Encodes a text as token ids. `add_special` adds what the tokenizer puts around a text, such as a begin token;
    /// leave it off after a chat template, which writes them itself. Special tokens spelled out in the text are
    /// recognised.
    ///
    /// # Errors
    /// [`FormatError::Tokenize`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, FormatError> {
        let encoding = self.inner.tokenizer.encode_fast(text, add_special);
        let encoding = encoding.map_err(|e| FormatError::Tokenize {
            reason: e.to_string(),
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Same as [`Tokenizer::encode`], but stops once `go_on`, called repeatedly with the number of tokens so far, is
    /// false.
    ///
    /// # Errors
    /// [`FormatError::Tokenize`].
    pub fn encode_while(
        &self,
        text: &str,
        add_special: bool,
        go_on: &dyn Fn(usize) -> bool,
    ) -> Result<Encoded, FormatError> {
        // The steps of `encode_fast`.
        let tokenizer = &self.inner.tokenizer;
        let (tokens, is_stopped) = (Cell::new(0), Cell::new(false));
        let encode = || {
            let mut pieces = tokenizer
                .get_added_vocabulary()
                .extract_and_normalize(tokenizer.get_normalizer(), text);
            if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|piece| {
                if !go_on(tokens.get()) {
                    is_stopped.set(true);
                    return Err("stopped".into());
                }
                let of_piece = tokenizer.get_model().tokenize(piece.get())?;
                tokens.set(tokens.get() + of_piece.len());
                Ok(of_piece)
            })?;
            let encoding = pieces.into_encoding(None, 0, OffsetType::None)?;
            tokenizer.post_process(encoding, None, add_special)
        };
        match encode() {
            Ok(encoding) => Ok(Encoded::Whole(encoding.get_ids().to_vec())),
            Err(_) if is_stopped.get() => Ok(Encoded::Stopped {
                tokens: tokens.get(),
            }),
            Err(error) => Err(FormatError::Tokenize {
                reason: error.to_string(),
            }),
        }
    }

    /// Returns a lower bound on the number of tokens in any encoding of the text, found quickly from its bytes alone;
    /// 0 if this tokenizer permits no bound.
    pub fn least_tokens(&self, text: &str) -> usize {
        self.inner.bound.least_tokens(text.as_bytes())
    }

    /// Decodes token ids; invalid UTF-8 becomes U+FFFD, and ids without a token are skipped.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut decoder = StreamDecoder::new(self.clone(), skip_special);
        let mut text: String = ids.iter().filter_map(|id| decoder.push(*id)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// Returns an incremental version of [`Tokenizer::decode`] that omits special tokens.
    pub fn decoder(&self) -> StreamDecoder {
        StreamDecoder::new(self.clone(), true)
    }

    /// Returns an incremental version of [`Tokenizer::decode`] that keeps special tokens, for answers in which they
    /// mark tool calls.
    pub fn decoder_with_special(&self) -> StreamDecoder {
        StreamDecoder::new(self.clone(), false)
    }

    /// One more than the highest token id.
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// Returns a token as spelled in the vocabulary (`Ġhello`); added tokens are spelled as themselves.
    pub fn token_text(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)
    }

    /// Returns the bytes that a token stands for within a text; special tokens as spelled.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.token_text(id)?;
        if self
            .inner
            .tokenizer
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .contains_key(&id)
        {
            return Some(token.into_bytes());
        }
        Some(self.inner.detokenizer.bytes_of(&token))
    }

    /// Returns the id of a token by its spelling in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// Whether a token is special: part of the format, never text.
    pub fn is_special(&self, id: u32) -> bool {
        self.token_text(id)
            .is_some_and(|token| self.is_special_text(&token))
    }

    /// Rejects a tokenizer with ids for which the model has no rows. Fewer ids are fine: vocabularies are padded.
    ///
    /// # Errors
    /// [`FormatError::VocabularyMismatch`].
    pub fn check_vocab(&self, config: &ModelConfig) -> Result<(), FormatError> {
        if self.vocab_size() <= config.vocab_size {
            return Ok(());
        }
        Err(FormatError::VocabularyMismatch {
            tokenizer: self.vocab_size(),
            model: config.vocab_size,
        })
    }

    pub(crate) fn is_special_text(&self, token: &str) -> bool {
        self.inner
            .tokenizer
            .get_added_vocabulary()
            .is_special_token(token)
    }

    pub(crate) fn detokenizer(&self) -> &Detokenizer {
        &self.inner.detokenizer
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}

fn no_tokenizer(dir: &Path) -> FormatError {
    let other = ["tokenizer.model", "tiktoken.model"]
        .into_iter()
        .find(|name| dir.join(name).exists());
    FormatError::Missing {
        what: TOKENIZER_FILE.into(),
        needed_by: match other {
            Some(other) => format!("{} holds {other}, an older format", dir.display()),
            None => format!("{} does not hold it", dir.display()),
        },
        remedy: match other {
            Some(_) => {
                "convert it: transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
                    .into()
            }
            None => "download it from where the weights came from.".into(),
        },
    }
}
