//! Common parts of the forms: searching streamed text for marks, and emitting what was found.

use super::{AnswerPart, ToolParser};
use crate::stop::overlap;

/// The reader of one form, a state machine over a [`Tape`].
pub(super) trait Form: Send {
    /// Returns the text that has been read and the calls that were emitted.
    fn tape(&mut self) -> &mut Tape;
    /// Makes one transition; false if more text is needed.
    fn step(&mut self, out: &mut Vec<AnswerPart>) -> bool;
    /// Ends the answer, with `held` not consumed.
    fn rest(&mut self, held: String, out: &mut Vec<AnswerPart>);
}

impl<F: Form> ToolParser for F {
    fn push(&mut self, text: &str, out: &mut Vec<AnswerPart>) {
        self.tape().scanner.feed(text);
        while self.step(out) {}
    }

    fn finish(&mut self, out: &mut Vec<AnswerPart>) {
        let held = self.tape().scanner.take();
        self.rest(held, out);
        let tape = self.tape();
        tape.content.finish(tape.calls > 0, out);
    }
}

/// The text of an answer as it is read, and the calls that were found in it.
#[derive(Debug, Default)]
pub(super) struct Tape {
    /// Incoming text.
    pub(super) scanner: Scanner,
    /// Text that is not a call.
    pub(super) content: Content,
    calls: u32,
}

impl Tape {
    /// Begins a call.
    pub(super) fn begin(&mut self, id: Option<String>, name: String, out: &mut Vec<AnswerPart>) {
        self.content.before_call();
        let index = self.calls;
        self.calls += 1;
        out.push(AnswerPart::Call { index, id, name });
    }

    /// Emits more of the last call's arguments.
    pub(super) fn arguments(&self, text: String, out: &mut Vec<AnswerPart>) {
        if !text.is_empty() {
            let index = self.calls - 1;
            out.push(AnswerPart::Arguments { index, text });
        }
    }

    /// Completes the last call.
    pub(super) fn end(&self, out: &mut Vec<AnswerPart>) {
        let index = self.calls - 1;
        out.push(AnswerPart::CallEnd { index });
    }
}

/// Text that has arrived and is not consumed.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    held: String,
}

/// Result of a search.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The mark with this index in the list, and the text before it; both are consumed.
    Mark(usize, String),
    /// No mark yet: text that is certainly not part of one; the rest stays held.
    Text(String),
}

impl Scanner {
    pub(super) fn feed(&mut self, text: &str) {
        self.held.push_str(text);
    }

    /// Searches for the first of `marks`.
    pub(super) fn find(&mut self, marks: &[&str]) -> Found {
        let first = marks
            .iter()
            .enumerate()
            .filter_map(|(i, mark)| self.held.find(mark).map(|at| (at, i)))
            .min();
        if let Some((at, i)) = first {
            let rest = self.held.split_off(at + marks[i].len());
            let mut before = std::mem::replace(&mut self.held, rest);
            before.truncate(at);
            return Found::Mark(i, before);
        }
        let keep = marks
            .iter()
            .map(|mark| overlap(&self.held, mark))
            .max()
            .unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        Found::Text(std::mem::replace(&mut self.held, kept))
    }

    /// Drops white space at the front; returns the first character after it.
    pub(super) fn skip_space(&mut self) -> Option<char> {
        let space = self.held.len() - self.held.trim_start().len();
        self.held.drain(..space);
        self.held.chars().next()
    }

    /// All held text.
    pub(super) fn held(&self) -> &str {
        &self.held
    }

    /// Consumes `bytes` from the front.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.held.drain(..bytes);
    }

    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Content before calls: trailing white space belongs to the form of the calls, not to the answer, so it is
/// held until something else follows.
#[derive(Debug, Default)]
pub(super) struct Content {
    space: String,
}

impl Content {
    /// Takes text; emits what is certainly part of the answer.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<AnswerPart>) {
        let solid = text.trim_end();
        if solid.is_empty() {
            self.space.push_str(text);
            return;
        }
        let mut whole = std::mem::take(&mut self.space);
        whole.push_str(solid);
        self.space.push_str(&text[solid.len()..]);
        out.push(AnswerPart::Content(whole));
    }

    /// Drops the white space before a call.
    pub(super) fn before_call(&mut self) {
        self.space.clear();
    }

    /// Ends the answer: trailing white space is part of it, unless calls came before.
    pub(super) fn finish(&mut self, had_calls: bool, out: &mut Vec<AnswerPart>) {
        let space = std::mem::take(&mut self.space);
        if !space.is_empty() && !had_calls {
            out.push(AnswerPart::Content(space));
        }
    }
}
