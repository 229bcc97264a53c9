//! Kimi K2's calls.

use super::scan::{Content, Found, Scanner};
use super::{Piece, ToolParser};

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
    scanner: Scanner,
    content: Content,
    calls: u32,
}

impl ToolParser for Parser {
    fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.scanner.feed(text);
        while self.step(out) {}
    }

    fn finish(&mut self, out: &mut Vec<Piece>) {
        let held = self.scanner.take();
        match std::mem::take(&mut self.state) {
            State::Text => self.content.push(&held, out),
            State::Section => {}
            State::Header(header) => self
                .content
                .push(&format!("{CALL_BEGIN}{header}{held}"), out),
            State::Arguments => self.arguments(held, out),
        }
        self.content.finish(self.calls > 0, out);
    }
}

impl Parser {
    /// One transition; false when more text is needed.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        match std::mem::take(&mut self.state) {
            State::Text => match self.scanner.find(&[SECTION_BEGIN]) {
                Found::Mark(_, before) => {
                    self.content.push(&before, out);
                    self.content.before_call();
                    self.state = State::Section;
                    true
                }
                Found::Text(text) => {
                    self.content.push(&text, out);
                    false
                }
            },
            State::Section => match self.scanner.find(&[CALL_BEGIN, SECTION_END]) {
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
            State::Header(mut header) => match self.scanner.find(&[ARGUMENTS_BEGIN]) {
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
            State::Arguments => match self.scanner.find(&[CALL_END]) {
                Found::Mark(_, text) => {
                    self.arguments(text.trim_end().to_owned(), out);
                    out.push(Piece::CallEnd {
                        index: self.calls - 1,
                    });
                    self.state = State::Section;
                    true
                }
                Found::Text(text) => {
                    self.arguments(text, out);
                    self.state = State::Arguments;
                    false
                }
            },
        }
    }

    /// The id is what the model wrote, since its template shows it with the result.
    fn begin(&mut self, id: &str, out: &mut Vec<Piece>) {
        let name = id.strip_prefix("functions.").unwrap_or(id);
        let name = match name.rsplit_once(':') {
            Some((name, digits)) if digits.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => name,
        };
        out.push(Piece::Call {
            index: self.calls,
            id: Some(id.to_owned()),
            name: name.to_owned(),
        });
        self.calls += 1;
    }

    fn arguments(&self, text: String, out: &mut Vec<Piece>) {
        if !text.is_empty() {
            out.push(Piece::Arguments {
                index: self.calls - 1,
                text,
            });
        }
    }
}
