//! What the forms have in common: searching streamed text for marks, and giving out what was found.

use super::{AnswerPart, ToolParser};
use crate::stop::overlap;

/// The reader of one form, a machine of states over a [`Tape`].
pub(super) trait Form: Send {
    /// What has been read and given out.
    fn tape(&mut self) -> &mut Tape;
    /// One transition; false when more text is needed.
    fn step(&mut self, out: &mut Vec<AnswerPart>) -> bool;
    /// The answer ended with `held` not used up.
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
    /// What has come in.
    pub(super) scanner: Scanner,
    /// What is no call.
    pub(super) content: Content,
    calls: u32,
}

impl Tape {
    /// A call begins.
    pub(super) fn begin(&mut self, id: Option<String>, name: String, out: &mut Vec<AnswerPart>) {
        self.content.before_call();
        let index = self.calls;
        self.calls += 1;
        out.push(AnswerPart::Call { index, id, name });
    }

    /// More of the last call's arguments.
    pub(super) fn arguments(&self, text: String, out: &mut Vec<AnswerPart>) {
        if !text.is_empty() {
            let index = self.calls - 1;
            out.push(AnswerPart::Arguments { index, text });
        }
    }

    /// The last call is complete.
    pub(super) fn end(&self, out: &mut Vec<AnswerPart>) {
        let index = self.calls - 1;
        out.push(AnswerPart::CallEnd { index });
    }
}

/// Text that has come in and is not used up.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    held: String,
}

/// What a search found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The mark with this index in the list, and the text before it; both are used up.
    Mark(usize, String),
    /// No mark yet: text that is certainly none; the rest stays held.
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

    /// Drops white space at the front; gives the first character behind it.
    pub(super) fn skip_space(&mut self) -> Option<char> {
        let space = self.held.len() - self.held.trim_start().len();
        self.held.drain(..space);
        self.held.chars().next()
    }

    /// All that is held.
    pub(super) fn held(&self) -> &str {
        &self.held
    }

    /// Uses up `bytes` from the front.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.held.drain(..bytes);
    }

    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Content before calls: white space at its end belongs to the form of the calls, not to the answer, so it is
/// held until something else follows.
#[derive(Debug, Default)]
pub(super) struct Content {
    space: String,
}

impl Content {
    /// Takes text; gives what is certainly part of the answer.
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

    /// A call begins: the space before it is dropped.
    pub(super) fn before_call(&mut self) {
        self.space.clear();
    }

    /// The answer ended: its space at the end is its own, unless calls came before.
    pub(super) fn finish(&mut self, had_calls: bool, out: &mut Vec<AnswerPart>) {
        let space = std::mem::take(&mut self.space);
        if !space.is_empty() && !had_calls {
            out.push(AnswerPart::Content(space));
        }
    }
}
