//! Errors in a model's files, worded so that a user can act on them.

use std::io;
use std::path::PathBuf;

use crate::config::Architecture;

/// A model's files cannot be used. The first line of the message says what is wrong and where, the indented one what
/// to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A file or directory cannot be read or written.
    #[error("{}: {source}\n  {remedy}", path.display())]
    Io {
        /// Path that was opened.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
        /// The remedy, as shown to the user.
        remedy: String,
    },
    /// A file ends before the data that its header describes.
    #[error(
        "{file} is shorter than its header says ({} of {} bytes)\n  the download was cut off. Delete the file and run again, or check the disk.",
        thousands(*have_bytes),
        thousands(*want_bytes)
    )]
    Truncated {
        /// File name.
        file: String,
        /// Its actual length.
        have_bytes: u64,
        /// Length implied by the header.
        want_bytes: u64,
    },
    /// A file that is read whole is longer than any published file of its kind.
    #[error(
        "{file} has {} bytes, and at most {} are read\n  take the file from the published checkpoint.",
        thousands(*bytes),
        thousands(*max_bytes)
    )]
    TooLarge {
        /// File name.
        file: String,
        /// Its length, as far as it was read.
        bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// A file's content does not conform to its format.
    #[error("{file} {problem}\n  {remedy}")]
    Malformed {
        /// File name.
        file: String,
        /// The problem, with the value, as the rest of a sentence: `is not valid JSON: …`.
        problem: String,
        /// The remedy, as shown to the user.
        remedy: String,
    },
    /// A file or tensor that something else refers to is missing.
    #[error("{what} is missing: {needed_by}\n  {remedy}")]
    Missing {
        /// Name of the file or tensor.
        what: String,
        /// The file or component that needs it.
        needed_by: String,
        /// The remedy, as shown to the user.
        remedy: String,
    },
    /// A tensor has a type or shape other than the model needs.
    #[error("tensor {name} in {file} {problem}\n  {remedy}")]
    Tensor {
        /// Tensor name.
        name: String,
        /// File name.
        file: String,
        /// The problem, with both values.
        problem: String,
        /// The remedy, as shown to the user.
        remedy: String,
    },
    /// A field of config.json is missing, of the wrong type, out of range, or requests something unsupported.
    #[error("config.json: {field} {problem}\n  {remedy}")]
    Config {
        /// Field name, with dots for nesting.
        field: String,
        /// The problem, with the value.
        problem: String,
        /// The remedy, as shown to the user.
        remedy: String,
    },
    /// The tokenizer has ids for which the model has no rows.
    #[error(
        "tokenizer.json needs a vocabulary of {tokenizer}, but config.json has vocab_size {model}\n  tokenizer and weights belong to different models; take both from the same checkpoint."
    )]
    VocabularyMismatch {
        /// One more than the tokenizer's highest id.
        tokenizer: usize,
        /// `vocab_size` of the model.
        model: usize,
    },
    /// A text cannot be tokenised.
    #[error(
        "the text cannot be tokenised: {reason}\n  its vocabulary lacks a token for some character of it."
    )]
    Tokenize {
        /// The tokenizer's error message.
        reason: String,
    },
    /// The chat template cannot be compiled or run.
    #[error(
        "the model's chat template {problem}\n  download chat_template.jinja or tokenizer_config.json again, or write a template there."
    )]
    Template {
        /// The problem, with its location.
        problem: String,
    },
    /// The chat template rejects the messages through `raise_exception`: the request is at fault.
    #[error("the model's chat template refuses these messages: {message}")]
    TemplateRefused {
        /// The template's message.
        message: String,
    },
    /// `model_type` is not one that Hearth runs.
    #[error(
        "config.json: model_type {found:?} is not supported\n  supported: {}",
        Architecture::names()
    )]
    UnsupportedArchitecture {
        /// The value of `model_type`.
        found: String,
    },
}

impl FormatError {
    /// Whether the error is that a file does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    pub(crate) fn malformed(
        file: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Malformed {
            file: file.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    pub(crate) fn io(
        path: impl Into<PathBuf>,
        source: io::Error,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Io {
            path: path.into(),
            source,
            remedy: remedy.into(),
        }
    }
}

/// Strips the byte order mark that some editors prepend; no JSON reader accepts it.
pub(crate) fn without_bom(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(text)
}

/// Groups digits: `4982131216` → `4,982,131,216`.
pub(crate) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::thousands;

    #[test]
    fn digits_are_grouped_from_the_right() {
        let cases = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (4_982_131_216, "4,982,131,216"),
        ];
        for (n, text) in cases {
            assert_eq!(thousands(n), text);
        }
    }
}
