//! Calls as Hermes 2 and Qwen write them.

use super::json_call::{Event, JsonCall};
use super::scan::{Content, Found, Scanner};
use super::{Piece, ToolParser};

pub(super) const BEGIN: &str = "<tool_call>";
pub(super) const END: &str = "</tool_call>";

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    Call(Box<JsonCall>),
    /// Between the object and the end mark.
    Tail,
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
            State::Call(call) if !call.is_named() => {
                self.content
                    .push(&format!("{BEGIN}{}{held}", call.raw()), out);
            }
            State::Call(_) | State::Tail => {}
        }
        self.content.finish(self.calls > 0, out);
    }
}

impl Parser {
    /// One transition; false when more text is needed.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        match std::mem::take(&mut self.state) {
            State::Text => match self.scanner.find(&[BEGIN]) {
                Found::Mark(_, before) => {
                    self.content.push(&before, out);
                    self.state = State::Call(Box::default());
                    true
                }
                Found::Text(text) => {
                    self.content.push(&text, out);
                    false
                }
            },
            State::Call(call) => self.step_call(call, out),
            State::Tail => match self.scanner.find(&[END]) {
                Found::Mark(..) => true,
                Found::Text(_) => {
                    self.state = State::Tail;
                    false
                }
            },
        }
    }

    fn step_call(&mut self, mut call: Box<JsonCall>, out: &mut Vec<Piece>) -> bool {
        let mut events = Vec::new();
        let used = call.push(self.scanner.held(), &mut events);
        self.scanner.consume(used);
        let was_named = call.is_named();
        for event in events {
            match event {
                Event::Name(name) => {
                    self.content.before_call();
                    out.push(Piece::Call {
                        index: self.calls,
                        id: None,
                        name,
                    });
                    self.calls += 1;
                }
                Event::Arguments(text) => out.push(Piece::Arguments {
                    index: self.calls - 1,
                    text,
                }),
                Event::Done => {
                    out.push(Piece::CallEnd {
                        index: self.calls - 1,
                    });
                    self.state = State::Tail;
                    return true;
                }
                // A call that broke off behind its name stays as far as it came.
                Event::NotACall if was_named => {
                    self.state = State::Tail;
                    return true;
                }
                Event::NotACall => {
                    self.content.push(&format!("{BEGIN}{}", call.raw()), out);
                    return true;
                }
            }
        }
        self.state = State::Call(call);
        !self.scanner.held().is_empty()
    }
}
