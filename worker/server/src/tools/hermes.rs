//! Calls as Hermes 2 and Qwen write them.

use super::AnswerPart;
use super::json_call::{Event, JsonCall};
use super::scan::{Form, Found, Tape};

pub(super) const BEGIN: &str = "<tool_call>";
pub(super) const END: &str = "</tool_call>";

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    Call(Box<JsonCall>),
    /// The text between the object and the end mark.
    Tail,
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
            State::Text => match self.tape.scanner.find(&[BEGIN]) {
                Found::Mark(_, before) => {
                    self.tape.content.push(&before, out);
                    self.state = State::Call(Box::default());
                    true
                }
                Found::Text(text) => {
                    self.tape.content.push(&text, out);
                    false
                }
            },
            State::Call(call) => self.step_call(call, out),
            State::Tail => match self.tape.scanner.find(&[END]) {
                Found::Mark(..) => true,
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
            State::Call(call) if !call.is_named() => {
                self.tape
                    .content
                    .push(&format!("{BEGIN}{}{held}", call.raw()), out);
            }
            State::Call(_) | State::Tail => {}
        }
    }
}

impl Parser {
    fn step_call(&mut self, mut call: Box<JsonCall>, out: &mut Vec<AnswerPart>) -> bool {
        let mut events = Vec::new();
        let used = call.push(self.tape.scanner.held(), &mut events);
        self.tape.scanner.consume(used);
        let was_named = call.is_named();
        for event in events {
            match event {
                Event::Name(name) => self.tape.begin(None, name, out),
                Event::Arguments(text) => self.tape.arguments(text, out),
                Event::Done => {
                    self.tape.end(out);
                    self.state = State::Tail;
                    return true;
                }
                // A call that broke off after its name stays as far as it was written.
                Event::NotACall if was_named => {
                    self.state = State::Tail;
                    return true;
                }
                Event::NotACall => {
                    self.tape
                        .content
                        .push(&format!("{BEGIN}{}", call.raw()), out);
                    return true;
                }
            }
        }
        self.state = State::Call(call);
        !self.tape.scanner.held().is_empty()
    }
}
