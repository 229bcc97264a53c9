//! Tool calls in an answer: each model writes them in its own form, and all are parsed into the same parts.
//!
//! | form | how a call is written |
//! | --- | --- |
//! | [`ToolFormat::DeepseekV3`] | `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME⏎```json⏎{…}⏎```<｜tool▁call▁end｜><｜tool▁calls▁end｜>` |
//! | [`ToolFormat::DeepseekV31`] | the same marks, `NAME<｜tool▁sep｜>{…}` between them |
//! | [`ToolFormat::KimiK2`] | `<\|tool_calls_section_begin\|><\|tool_call_begin\|>functions.NAME:0<\|tool_call_argument_begin\|>{…}<\|tool_call_end\|><\|tool_calls_section_end\|>` |
//! | [`ToolFormat::Hermes`] (Qwen) | `<tool_call>⏎{"name": NAME, "arguments": {…}}⏎</tool_call>` |
//! | [`ToolFormat::Llama3`] | `{"name": NAME, "parameters": {…}}`, also after `<\|python_tag\|>`, several separated by `;` |
//!
//! Parsers take text as it streams in, hold back only what may be the beginning of a mark, and lose nothing:
//! what turns out not to be a call is returned as content.

mod deepseek;
mod grammar;
mod hermes;
mod json_call;
mod kimi;
mod llama;
mod scan;

pub use grammar::{GrammarInput, MarkToken, tool_grammar};

use hearth_formats::Architecture;

/// The form in which a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// DeepSeek-V3 and R1: the type, then the name and fenced JSON.
    DeepseekV3,
    /// DeepSeek-V3.1 and later: the name, then bare JSON.
    DeepseekV31,
    /// Kimi K2.
    KimiK2,
    /// Qwen 2.5 and 3, and others trained like Hermes 2.
    Hermes,
    /// Llama 3.1 and later.
    Llama3,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text of the answer itself.
    Content(String),
    /// A call begins.
    Call {
        /// Index of the call in the answer, from 0.
        index: u32,
        /// The id that the model wrote, if its form has one.
        id: Option<String>,
        /// The function's name.
        name: String,
    },
    /// The next part of a call's arguments.
    Arguments {
        /// Index of the call.
        index: u32,
        /// JSON text.
        text: String,
    },
    /// A call is complete.
    CallEnd {
        /// Index of the call.
        index: u32,
    },
}

/// Parser of streamed text into parts.
pub trait ToolParser: Send {
    /// Takes the next text; appends the parts that are now certain.
    fn push(&mut self, text: &str, out: &mut Vec<AnswerPart>);
    /// Ends the answer; appends what was held back.
    fn finish(&mut self, out: &mut Vec<AnswerPart>);
}

impl ToolFormat {
    /// Detects the form that a chat template was written for, else the architecture's.
    pub fn detect(template: Option<&str>, architecture: Architecture, model_type: &str) -> Self {
        let has = |mark: &str| template.is_some_and(|text| text.contains(mark));
        if has(kimi::SECTION_BEGIN) {
            return Self::KimiK2;
        }
        if has(deepseek::SECTION_BEGIN) {
            return if has("```json") {
                Self::DeepseekV3
            } else {
                Self::DeepseekV31
            };
        }
        if has(hermes::BEGIN) {
            return Self::Hermes;
        }
        if has(llama::PYTHON_TAG) {
            return Self::Llama3;
        }
        match architecture {
            _ if model_type == "kimi_k2" => Self::KimiK2,
            Architecture::DeepseekV3 if template.is_none_or(|text| !has_word(text, "tools")) => {
                Self::Hermes
            }
            Architecture::DeepseekV3 => Self::DeepseekV3,
            Architecture::Llama => Self::Llama3,
            _ => Self::Hermes,
        }
    }

    /// Creates a parser for an answer to a request with tools of these names.
    pub fn parser(self, names: Vec<String>) -> Box<dyn ToolParser> {
        match self {
            Self::DeepseekV3 | Self::DeepseekV31 => Box::new(deepseek::Parser::default()),
            Self::KimiK2 => Box::new(kimi::Parser::default()),
            Self::Hermes => Box::new(hermes::Parser::default()),
            Self::Llama3 => Box::new(llama::Parser::new(names)),
        }
    }

    /// Whether the templates of this form expect a call's arguments as an object, not as JSON text.
    pub fn arguments_as_object(self) -> bool {
        match self {
            Self::DeepseekV3 | Self::DeepseekV31 | Self::KimiK2 => false,
            Self::Hermes | Self::Llama3 => true,
        }
    }
}

/// Whether `word` occurs in a template as a whole identifier.
pub(crate) fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part)
    })
}

#[cfg(test)]
mod tests;
