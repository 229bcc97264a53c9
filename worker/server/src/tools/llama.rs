//! Llama 3's calls: the answer is the JSON object itself, with or without `<|python_tag|>` in front.

use super::AnswerPart;
use super::json_call::{Event, JsonCall};
use super::scan::{Form, Found, Tape};

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

#[derive(Debug)]
enum State {
    /// Only white space has come since the start, the tag or the last call's `;`.
    Start,
    Call(Box<JsonCall>),
    /// The text after a call.
    Between,
    Text,
}

/// Parser of the form. An object is a call if its name is a tool's; any other is an answer in JSON.
#[derive(Debug)]
pub(super) struct Parser {
    names: Vec<String>,
    state: State,
    tape: Tape,
    /// White space or a tag in front of a possible call.
    lead: String,
    /// Whether the name of the call being read is a tool's.
    is_known: bool,
}

impl Parser {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self {
            names,
            state: State::Start,
            tape: Tape::default(),
            lead: String::new(),
            is_known: false,
        }
    }
}

impl Form for Parser {
    fn tape(&mut self) -> &mut Tape {
        &mut self.tape
    }

    fn step(&mut self, out: &mut Vec<AnswerPart>) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start => self.step_start(out),
            State::Call(call) => self.step_call(call, out),
            State::Between => {
                let next = self.tape.scanner.skip_space();
                match next {
                    None => {
                        self.state = State::Between;
                        false
                    }
                    Some(';') => {
                        self.tape.scanner.consume(1);
                        self.state = State::Start;
                        true
                    }
                    Some('{') => {
                        self.state = State::Start;
                        true
                    }
                    Some(_) => true,
                }
            }
            State::Text => match self.tape.scanner.find(&[PYTHON_TAG]) {
                Found::Mark(_, before) => {
                    self.tape.content.push(&before, out);
                    self.lead.push_str(PYTHON_TAG);
                    self.state = State::Start;
                    true
                }
                Found::Text(text) => {
                    self.tape.content.push(&text, out);
                    false
                }
            },
        }
    }

    fn rest(&mut self, held: String, out: &mut Vec<AnswerPart>) {
        let lead = std::mem::take(&mut self.lead);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start | State::Text => self.tape.content.push(&(lead + &held), out),
            State::Call(call) if !self.is_known => {
                self.tape.content.push(&(lead + call.raw() + &held), out);
            }
            State::Call(_) => {}
            State::Between => self.tape.content.push(&held, out),
        }
    }
}

impl Parser {
    fn step_start(&mut self, out: &mut Vec<AnswerPart>) -> bool {
        let held = self.tape.scanner.held();
        let space = held.len() - held.trim_start().len();
        let rest = &held[space..];
        if rest.is_empty() || (PYTHON_TAG.starts_with(rest) && rest != PYTHON_TAG) {
            self.state = State::Start;
            return false;
        }
        if rest.starts_with('{') {
            self.lead.push_str(&held[..space]);
            self.tape.scanner.consume(space);
            self.is_known = false;
            self.state = State::Call(Box::default());
        } else if rest.starts_with(PYTHON_TAG) {
            let length = space + PYTHON_TAG.len();
            self.lead.push_str(&held[..length]);
            self.tape.scanner.consume(length);
            self.state = State::Start;
        } else {
            // Not a call: what preceded it is part of the answer too.
            let lead = std::mem::take(&mut self.lead);
            self.tape.content.push(&lead, out);
            self.state = State::Text;
        }
        true
    }

    fn step_call(&mut self, mut call: Box<JsonCall>, out: &mut Vec<AnswerPart>) -> bool {
        let mut events = Vec::new();
        let used = call.push(self.tape.scanner.held(), &mut events);
        self.tape.scanner.consume(used);
        for event in events {
            match event {
                Event::Name(name) if self.names.contains(&name) => {
                    self.is_known = true;
                    self.lead.clear();
                    self.tape.begin(None, name, out);
                }
                Event::Arguments(text) if self.is_known => self.tape.arguments(text, out),
                Event::Done if self.is_known => {
                    self.tape.end(out);
                    self.state = State::Between;
                    return true;
                }
                Event::NotACall if self.is_known => {
                    self.state = State::Between;
                    return true;
                }
                Event::Name(_) | Event::NotACall => {
                    let lead = std::mem::take(&mut self.lead);
                    self.tape.content.push(&(lead + call.raw()), out);
                    return true;
                }
                Event::Arguments(_) | Event::Done => {}
            }
        }
        self.state = State::Call(call);
        !self.tape.scanner.held().is_empty()
    }
}
