//! Llama 3's calls: the answer is the JSON object itself, with or without `<|python_tag|>` in front.

use super::json_call::{Event, JsonCall};
use super::scan::{Content, Found, Scanner};
use super::{Piece, ToolParser};

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

#[derive(Debug)]
enum State {
    /// Nothing but space has come since the start, the tag or the last call's `;`.
    Start,
    Call(Box<JsonCall>),
    /// Behind a call.
    Between,
    Text,
}

/// Parser of the form. An object is a call when its name is a tool's; any other is an answer in JSON.
#[derive(Debug)]
pub(super) struct Parser {
    names: Vec<String>,
    state: State,
    scanner: Scanner,
    content: Content,
    /// Space or a tag in front of what may be a call.
    lead: String,
    calls: u32,
    /// The name of the call being read is a tool's.
    is_known: bool,
}

impl Parser {
    pub(super) fn new(names: Vec<String>) -> Self {
        Self {
            names,
            state: State::Start,
            scanner: Scanner::default(),
            content: Content::default(),
            lead: String::new(),
            calls: 0,
            is_known: false,
        }
    }
}

impl ToolParser for Parser {
    fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.scanner.feed(text);
        while self.step(out) {}
    }

    fn finish(&mut self, out: &mut Vec<Piece>) {
        let held = self.scanner.take();
        let lead = std::mem::take(&mut self.lead);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start | State::Text => self.content.push(&(lead + &held), out),
            State::Call(call) if !self.is_known => {
                self.content.push(&(lead + call.raw() + &held), out);
            }
            State::Call(_) => {}
            State::Between => self.content.push(&held, out),
        }
        self.content.finish(self.calls > 0, out);
    }
}

impl Parser {
    /// One transition; false when more text is needed.
    fn step(&mut self, out: &mut Vec<Piece>) -> bool {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Start => self.step_start(out),
            State::Call(call) => self.step_call(call, out),
            State::Between => {
                let next = self.scanner.skip_space();
                match next {
                    None => {
                        self.state = State::Between;
                        false
                    }
                    Some(';') => {
                        self.scanner.consume(1);
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
            State::Text => match self.scanner.find(&[PYTHON_TAG]) {
                Found::Mark(_, before) => {
                    self.content.push(&before, out);
                    self.lead.push_str(PYTHON_TAG);
                    self.state = State::Start;
                    true
                }
                Found::Text(text) => {
                    self.content.push(&text, out);
                    false
                }
            },
        }
    }

    fn step_start(&mut self, out: &mut Vec<Piece>) -> bool {
        let held = self.scanner.held();
        let space = held.len() - held.trim_start().len();
        let rest = &held[space..];
        if rest.is_empty() || (PYTHON_TAG.starts_with(rest) && rest != PYTHON_TAG) {
            self.state = State::Start;
            return false;
        }
        if rest.starts_with('{') {
            self.lead.push_str(&held[..space]);
            self.scanner.consume(space);
            self.is_known = false;
            self.state = State::Call(Box::default());
        } else if rest.starts_with(PYTHON_TAG) {
            let length = space + PYTHON_TAG.len();
            self.lead.push_str(&held[..length]);
            self.scanner.consume(length);
            self.state = State::Start;
        } else {
            // No call: what stood in front of it is part of the answer too.
            let lead = std::mem::take(&mut self.lead);
            self.content.push(&lead, out);
            self.state = State::Text;
        }
        true
    }

    fn step_call(&mut self, mut call: Box<JsonCall>, out: &mut Vec<Piece>) -> bool {
        let mut events = Vec::new();
        let used = call.push(self.scanner.held(), &mut events);
        self.scanner.consume(used);
        for event in events {
            match event {
                Event::Name(name) if self.names.contains(&name) => {
                    self.is_known = true;
                    self.lead.clear();
                    self.content.before_call();
                    out.push(Piece::Call {
                        index: self.calls,
                        id: None,
                        name,
                    });
                    self.calls += 1;
                }
                Event::Arguments(text) if self.is_known => out.push(Piece::Arguments {
                    index: self.calls - 1,
                    text,
                }),
                Event::Done if self.is_known => {
                    out.push(Piece::CallEnd {
                        index: self.calls - 1,
                    });
                    self.state = State::Between;
                    return true;
                }
                Event::NotACall if self.is_known => {
                    self.state = State::Between;
                    return true;
                }
                Event::Name(_) | Event::NotACall => {
                    let lead = std::mem::take(&mut self.lead);
                    self.content.push(&(lead + call.raw()), out);
                    return true;
                }
                Event::Arguments(_) | Event::Done => {}
            }
        }
        self.state = State::Call(call);
        !self.scanner.held().is_empty()
    }
}
