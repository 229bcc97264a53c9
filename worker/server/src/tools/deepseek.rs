//! DeepSeek-V3's calls, with the type and fenced JSON (V3, R1) or with the name alone and bare JSON (V3.1).

use super::AnswerPart;
use super::scan::{Form, Found, Tape};

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
    /// The text between calls.
    Section,
    /// The type, or the name.
    Header(String),
    /// The text after the separator; holds the header.
    Behind(String),
    /// The name before the fence.
    Name(String),
    Bare,
    Fenced,
    /// The text between fence and end mark.
    Tail,
}

/// Parser of both forms.
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
            State::Text => match self.tape.scanner.find(&[SECTION_BEGIN, CALL_BEGIN]) {
                Found::Mark(mark, before) => {
                    self.tape.content.push(&before, out);
                    self.tape.content.before_call();
                    self.state = if mark == 0 {
                        State::Section
                    } else {
                        State::Header(String::new())
                    };
                    true
                }
                Found::Text(text) => {
                    self.tape.content.push(&text, out);
                    false
                }
            },
            State::Section => match self.tape.scanner.find(&[CALL_BEGIN, SECTION_END]) {
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
            State::Header(mut header) => match self.tape.scanner.find(&[SEPARATOR]) {
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
            State::Name(mut name) => match self.tape.scanner.find(&[FENCE_BEGIN]) {
                Found::Mark(_, rest) => {
                    name.push_str(&rest);
                    self.tape.begin(None, name.trim().to_owned(), out);
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
            State::Tail => match self.tape.scanner.find(&[CALL_END]) {
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

    fn rest(&mut self, held: String, out: &mut Vec<AnswerPart>) {
        match std::mem::take(&mut self.state) {
            State::Text => self.tape.content.push(&held, out),
            State::Section | State::Tail => {}
            State::Header(header) => self.unfinished(&format!("{header}{held}"), out),
            State::Behind(header) => self.unfinished(&format!("{header}{SEPARATOR}{held}"), out),
            State::Name(name) => self.unfinished(&format!("{name}{held}"), out),
            State::Bare | State::Fenced => self.tape.arguments(held, out),
        }
    }
}

impl Parser {
    /// Chooses the form: JSON right after the separator means that the header is the name.
    fn choose_form(&mut self, header: String, out: &mut Vec<AnswerPart>) -> bool {
        match self.tape.scanner.held().chars().next() {
            None => {
                self.state = State::Behind(header);
                false
            }
            Some('{') => {
                self.tape.begin(None, header.trim().to_owned(), out);
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
        out: &mut Vec<AnswerPart>,
    ) -> bool {
        match self.tape.scanner.find(&[end]) {
            Found::Mark(_, text) => {
                self.tape.arguments(text, out);
                self.tape.end(out);
                self.state = next;
                true
            }
            Found::Text(text) => {
                self.tape.arguments(text, out);
                self.state = stay;
                false
            }
        }
    }

    /// Emits a call whose name never came as the text that the model wrote.
    fn unfinished(&mut self, text: &str, out: &mut Vec<AnswerPart>) {
        self.tape.content.push(&format!("{CALL_BEGIN}{text}"), out);
    }
}
