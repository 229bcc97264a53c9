//! Grammars that an answer must follow, by llguidance over the model's own tokens.
//!
//! A grammar is compiled on the caller's thread, so that a large schema does not hold up the step loop; the
//! loop requests one mask per token. Only the token trie is kept between requests.

use std::{panic::AssertUnwindSafe, sync::Arc};

use hearth_formats::Tokenizer;
use llguidance::{
    Matcher, ParserFactory, TokenParser, api::TopLevelGrammar, earley::SlicedBiasComputer,
    panic_utils,
};
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::Grammar;

/// Reason a grammar cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar does not compile.
    #[error("{kind} is not usable: {reason}")]
    Invalid {
        /// `json_schema` or `lark`.
        kind: &'static str,
        /// The compiler's message.
        reason: String,
    },
    /// The engine was started without a tokenizer.
    #[error(
        "this worker has no tokenizer, so it cannot follow a grammar: serve a model with tokenizer.json"
    )]
    NoTokenizer,
    /// No token trie can be built from the tokenizer.
    #[error("the tokenizer cannot drive grammars: {reason}")]
    Tokenizer {
        /// The reason.
        reason: String,
    },
    /// Replayed tokens contradict the grammar.
    #[error("answer token {index} ({token}) does not follow the grammar: {reason}")]
    Rejected {
        /// Index among the answer's tokens.
        index: usize,
        /// The token.
        token: u32,
        /// The parser's message.
        reason: String,
    },
    /// The parser gave up: the grammar is too ambiguous to follow at a reasonable cost.
    #[error("the grammar cannot be followed behind answer token {index}: {reason}")]
    Exhausted {
        /// Index among the answer's tokens.
        index: usize,
        /// The parser's message.
        reason: String,
    },
}

impl GrammarError {
    /// Whether the request is at fault.
    pub fn is_request_fault(&self) -> bool {
        !matches!(self, Self::Tokenizer { .. })
    }
}

/// The model's tokens as bytes, ready for matching; shared by all requests.
pub struct GrammarTokenizer {
    factory: ParserFactory,
}

impl GrammarTokenizer {
    /// Builds from a tokenizer, for a model with `vocab` logits whose answers end with one of `eos`.
    ///
    /// Logits beyond the tokenizer's vocabulary are padding and are never allowed.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`] if there is no end-of-sequence token or the trie cannot be built.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, eos: &[u32]) -> Result<Self, GrammarError> {
        let tokens = (0..vocab as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id).unwrap_or_default();
                if tokenizer.is_special(id) {
                    special(&bytes)
                } else {
                    bytes
                }
            })
            .collect();
        Self::from_tokens(tokens, eos)
    }

    /// Builds the trie from the bytes of each token; an empty token is never allowed, and one that begins with byte
    /// 0xFF ([`TokTrie::SPECIAL_TOKEN_MARKER`]) is never text.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`] if `eos` is empty or out of range.
    pub fn from_tokens(mut tokens: Vec<Vec<u8>>, eos: &[u32]) -> Result<Self, GrammarError> {
        let vocab = tokens.len();
        if eos.is_empty() || eos.iter().any(|id| *id as usize >= vocab) {
            return Err(GrammarError::Tokenizer {
                reason: format!(
                    "end-of-sequence tokens are {eos:?}, and one at least must be below {vocab}: set eos_token_id in config.json"
                ),
            });
        }
        for id in eos {
            let token = &mut tokens[*id as usize];
            if token.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                *token = special(token);
            }
        }
        let env = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let info = TokRxInfo::new(vocab as u32, eos[0]);
            let trie = TokTrie::from(&info, &tokens).with_eos_tokens(eos);
            let env: TokEnv = Arc::new(Tokens { trie });
            let mut factory = ParserFactory::new(
                &env,
                InferenceCapabilities::default(),
                &SlicedBiasComputer::general_slices(),
            )?;
            factory.quiet();
            factory.limits_mut().verbose_errors = false;
            Ok(factory)
        }));
        Ok(Self {
            factory: env.map_err(|e| GrammarError::Tokenizer {
                reason: first_line(&e.to_string()),
            })?,
        })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// [`GrammarError::Invalid`] with the compiler's reason.
    pub fn compile(&self, grammar: &Grammar) -> Result<GrammarState, GrammarError> {
        let (kind, top) = match grammar {
            Grammar::JsonObject => (
                "json_object",
                json_schema(serde_json::json!({ "type": "object" })),
            ),
            Grammar::JsonSchema(text) => ("json_schema", parse_schema(text)?),
            Grammar::Lark(text) => ("lark", TopLevelGrammar::from_lark(text.clone())),
        };
        let parser: Result<TokenParser, _> =
            panic_utils::catch_unwind(AssertUnwindSafe(|| self.factory.create_parser(top)));
        let mut matcher = Matcher::new(parser);
        // The first mask shows whether any token can follow at all.
        let reason = match matcher.get_error() {
            Some(reason) => Some(reason),
            None => matcher.compute_mask_or_eos().err().map(|e| e.to_string()),
        };
        match reason {
            Some(reason) => Err(GrammarError::Invalid {
                kind,
                reason: first_line(&reason),
            }),
            None => Ok(GrammarState {
                matcher,
                accepted: 0,
            }),
        }
    }
}

/// Position of an answer in its grammar.
pub struct GrammarState {
    matcher: Matcher,
    accepted: usize,
}

impl GrammarState {
    /// Mask of the tokens that may follow: bit `t % 32` of word `t / 32`.
    /// Includes `stop_tokens` where the grammar may end.
    ///
    /// # Errors
    /// [`GrammarError::Exhausted`] if the parser reaches its limits.
    pub fn mask(&mut self, stop_tokens: &[u32]) -> Result<Vec<u32>, GrammarError> {
        let index = self.accepted;
        let exhausted = |reason: String| GrammarError::Exhausted {
            index,
            reason: first_line(&reason),
        };
        let mask = self.matcher.compute_mask_or_eos();
        let mut words = mask
            .map_err(|e| exhausted(e.to_string()))?
            .as_slice()
            .to_vec();
        let accepting = self.matcher.is_accepting();
        if accepting.map_err(|e| exhausted(e.to_string()))? {
            for token in stop_tokens {
                if let Some(word) = words.get_mut(*token as usize / 32) {
                    *word |= 1 << (token % 32);
                }
            }
        }
        Ok(words)
    }

    /// Accepts the next token of the answer; returns true if the grammar ends here and no token may follow.
    ///
    /// # Errors
    /// [`GrammarError::Rejected`] if the token does not follow.
    pub fn accept(&mut self, token: u32) -> Result<bool, GrammarError> {
        self.matcher
            .consume_token(token)
            .map_err(|e| GrammarError::Rejected {
                index: self.accepted,
                token,
                reason: first_line(&e.to_string()),
            })?;
        self.accepted += 1;
        Ok(self.matcher.is_stopped())
    }

    /// Accepts tokens that an earlier worker delivered; returns true if the grammar ended with them.
    ///
    /// # Errors
    /// [`GrammarError::Rejected`] naming the first token that does not follow.
    pub fn replay(&mut self, generated: &[u32]) -> Result<bool, GrammarError> {
        let mut ended = false;
        for token in generated {
            ended = self.accept(*token)?;
        }
        Ok(ended)
    }
}

/// Parses a schema.
fn parse_schema(text: &str) -> Result<TopLevelGrammar, GrammarError> {
    let invalid = |reason: String| GrammarError::Invalid {
        kind: "json_schema",
        reason,
    };
    let schema: serde_json::Value =
        serde_json::from_str(text).map_err(|e| invalid(format!("invalid JSON: {e}")))?;
    match schema {
        serde_json::Value::Object(_) => Ok(json_schema(schema)),
        serde_json::Value::Bool(true) => Ok(json_schema(serde_json::json!({}))),
        serde_json::Value::Bool(false) => Ok(TopLevelGrammar::from_json_schema(schema)),
        _ => Err(invalid("a schema is a JSON object".to_owned())),
    }
}

/// Requests JSON on one line with a space after each comma and colon, as models were trained with: where white space
/// is unrestricted, a model may fill its answer with it.
fn json_schema(mut schema: serde_json::Value) -> TopLevelGrammar {
    if let Some(object) = schema.as_object_mut() {
        let options = serde_json::json!({
            "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "
        });
        object.insert("x-guidance".to_owned(), options);
    }
    TopLevelGrammar::from_json_schema(schema)
}

fn special(bytes: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
}

/// The library's messages carry grammars and backtraces after their first line.
fn first_line(message: &str) -> String {
    let line = message.lines().map(str::trim).find(|l| !l.is_empty());
    line.unwrap_or("no reason given").to_owned()
}

/// The token trie. Its tokenizer is greedy and not the model's, so tokens are never forced, only masked.
struct Tokens {
    trie: TokTrie,
}

impl TokenizerEnv for Tokens {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
