//! Kimi K2's calls.

use super::AnswerPart;
use super::scan::{Form, Found, Tape};

pub(super) const SECTION_BEGIN: &str = "<|tool_calls_section_begin|>";
pub(super) const SECTION_END: &str = "<|tool_calls_section_end|>";
pub(super) const CALL_BEGIN: &str = "<|tool_call_begin|>";
pub(super) const CALL_END: &str = "<|tool_call_end|>";
pub(super) const ARGUMENTS_BEGIN: &str = "<|tool_call_argument_begin|>";

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    Section,
    /// `functions.NAME:INDEX`.
    Header(String),
    Arguments,
}

/// Parser of the form.
#[derive(Debug, Default)]
pub(super) struct Parser {
    state: State,
    tape: Tape,
}

impl Form for Parser {
    fn tape(&mut self) -> &mut Tape {
        &mut self.tape
    }

    fn step(&mut self, out: &mut Vec<AnswerPart>) -> bool {
        match std::mem::take(&mut self.state) {
            State::Text => match self.tape.scanner.find(&[SECTION_BEGIN]) {
                Found::Mark(_, before) => {
                    self.tape.content.push(&before, out);
                    self.tape.content.before_call();
                    self.state = State::Section;
                    true
                }
                Found::Text(text) => {
                    self.tape.content.push(&text, out);
                    false
                }
            },
            State::Section => match self.tape.scanner.find(&[CALL_BEGIN, SECTION_END]) {
                Found::Mark(0, _) => {
                    self.state = State::Header(String::new());
                    true
                }
                Found::Mark(..) => true,
                Found::Text(_) => {
                    self.state = State::Section;
                    false
                }
            },
            State::Header(mut header) => match self.tape.scanner.find(&[ARGUMENTS_BEGIN]) {
                Found::Mark(_, rest) => {
                    header.push_str(&rest);
                    self.begin(header.trim(), out);
                    self.state = State::Arguments;
                    true
                }
                Found::Text(rest) => {
                    header.push_str(&rest);
                    self.state = State::Header(header);
                    false
                }
            },
            State::Arguments => match self.tape.scanner.find(&[CALL_END]) {
                Found::Mark(_, text) => {
                    self.tape.arguments(text.trim_end().to_owned(), out);
                    self.tape.end(out);
                    self.state = State::Section;
                    true
                }
                Found::Text(text) => {
                    self.tape.arguments(text, out);
                    self.state = State::Arguments;
                    false
                }
            },
        }
    }

    fn rest(&mut self, held: String, out: &mut Vec<AnswerPart>) {
        match std::mem::take(&mut self.state) {
            State::Text => self.tape.content.push(&held, out),
            State::Section => {}
            State::Header(header) => self
                .tape
                .content
                .push(&format!("{CALL_BEGIN}{header}{held}"), out),
            State::Arguments => self.tape.arguments(held, out),
        }
    }
}

impl Parser {
    /// Begins a call, whose id is what the model wrote, since its template shows it with the result.
    fn begin(&mut self, id: &str, out: &mut Vec<AnswerPart>) {
        let name = id.strip_prefix("functions.").unwrap_or(id);
        let name = match name.rsplit_once(':') {
            Some((name, digits)) if digits.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => name,
        };
        self.tape.begin(Some(id.to_owned()), name.to_owned(), out);
    }
}
