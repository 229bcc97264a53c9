//! DeepSeek-V3's calls, with the type and fenced JSON (V3, R1) or with the name alone and bare JSON (V3.1).

use super::scan::{Content, Found, Scanner};
use super::{Piece, ToolParser};

pub(super) const SECTION_BEGIN: &str = "<｜tool▁calls▁begin｜>";
pub(super) const SECTION_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL_END: &str = "<｜tool▁call▁end｜>";
pub(super) const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const FENCE_BEGIN: &str = "\n```json\n";
pub(super) const FENCE_END: &str = "\n```";

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    /// Between calls.
    Section,
    /// The type, or the name.
    Header(String),
    /// Behind the separator; holds the header.
    Behind(String),
    /// The name before the fence.
    Name(String),
    Bare,
    Fenced,
    /// Between fence and end mark.
    Tail,
}

/// Parser of both forms.
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
            State::Section | State::Tail => {}
            State::Header(header) => self.unfinished(&format!("{header}{held}"), out),
            State::Behind(header) => self.unfinished(&format!("{header}{SEPARATOR}{held}"), out),
            State::Name(name) => self.unfinished(&format!("{name}{held}"), out),
            State::Bare | State::Fenced => self.arguments(held, out),
        }
        self.content.finish(self.calls > 0, out);
    }
}

impl Parser {
    /// One transition; false when more text is needed.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        match std::mem::take(&mut self.state) {
            State::Text => match self.scanner.find(&[SECTION_BEGIN, CALL_BEGIN]) {
                Found::Mark(mark, before) => {
                    self.content.push(&before, out);
                    self.content.before_call();
                    self.state = if mark == 0 {
                        State::Section
                    } else {
                        State::Header(String::new())
                    };
                    true
                }
                Found::Text(text) => {
                    self.content.push(&text, out);
                    false
                }
            },
            State::Section => match self.scanner.find(&[CALL_BEGIN, SECTION_END]) {
                Found::Mark(mark, _) => {
                    self.state = if mark == 0 {
                        State::Header(String::new())
                    } else {
                        State::Text
                    };
                    true
                }
                Found::Text(_) => {
                    self.state = State::Section;
                    false
                }
            },
            State::Header(mut header) => match self.scanner.find(&[SEPARATOR]) {
                Found::Mark(_, rest) => {
                    header.push_str(&rest);
                    self.state = State::Behind(header);
                    true
                }
                Found::Text(rest) => {
                    header.push_str(&rest);
                    self.state = State::Header(header);
                    false
                }
            },
            State::Behind(header) => self.choose_form(header, out),
            State::Name(mut name) => match self.scanner.find(&[FENCE_BEGIN]) {
                Found::Mark(_, rest) => {
                    name.push_str(&rest);
                    self.begin(name.trim(), out);
                    self.state = State::Fenced;
                    true
                }
                Found::Text(rest) => {
                    name.push_str(&rest);
                    self.state = State::Name(name);
                    false
                }
            },
            State::Bare => self.step_arguments(CALL_END, State::Bare, State::Section, out),
            State::Fenced => self.step_arguments(FENCE_END, State::Fenced, State::Tail, out),
            State::Tail => match self.scanner.find(&[CALL_END]) {
                Found::Mark(..) => {
                    self.state = State::Section;
                    true
                }
                Found::Text(_) => {
                    self.state = State::Tail;
                    false
                }
            },
        }
    }

    /// JSON right behind the separator is the form where the header is the name.
    fn choose_form(&mut self, header: String, out: &mut Vec<Piece>) -> bool {
        match self.scanner.held().chars().next() {
            None => {
                self.state = State::Behind(header);
                false
            }
            Some('{') => {
                self.begin(header.trim(), out);
                self.state = State::Bare;
                true
            }
            Some(_) => {
                self.state = State::Name(String::new());
                true
            }
        }
    }

    fn step_arguments(
        &mut self,
        end: &str,
        stay: State,
        next: State,
        out: &mut Vec<Piece>,
    ) -> bool {
        match self.scanner.find(&[end]) {
            Found::Mark(_, text) => {
                self.arguments(text, out);
                out.push(Piece::CallEnd {
                    index: self.calls - 1,
                });
                self.state = next;
                true
            }
            Found::Text(text) => {
                self.arguments(text, out);
                self.state = stay;
                false
            }
        }
    }

    fn begin(&mut self, name: &str, out: &mut Vec<Piece>) {
        out.push(Piece::Call {
            index: self.calls,
            id: None,
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

    /// A call whose name never came: what the model wrote is shown.
    fn unfinished(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.content.push(&format!("{CALL_BEGIN}{text}"), out);
    }
}
