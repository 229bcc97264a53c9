//! Messages that have come to a rank and were not taken yet.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{GroupError, Message, Op, Tag};

/// Most messages that may wait, whatever their size: far more than any pass has.
const MOST_MESSAGES: usize = 1 << 16;

/// Messages to one rank in the order in which they came; any thread may put one.
pub struct Mailbox {
    state: Mutex<State>,
    has_changed: Condvar,
    /// Most bytes of messages that may wait.
    most_bytes: usize,
}

#[derive(Default)]
struct State {
    messages: VecDeque<Message>,
    bytes: usize,
    /// Why there is nothing more to wait for.
    over: Option<GroupError>,
    /// Messages of passes before this one are dropped.
    first_pass: u64,
}

impl Mailbox {
    /// An empty mailbox for at most `most_bytes` of messages.
    pub fn new(most_bytes: usize) -> Self {
        Self {
            state: Mutex::default(),
            has_changed: Condvar::new(),
            most_bytes,
        }
    }

    /// Puts a message for a rank that is not the head. Where it is for a stage's layers, the head has given up the passes before,
    /// and what of them waits is dropped; peers drop it when they begin a pass. Returns the same as [`Mailbox::put`].
    pub fn put_for_stage(&self, message: Message) -> bool {
        if message.tag.op == Op::Stream {
            self.forget(message.tag.pass);
        }
        self.put(message)
    }

    /// Puts a message. Returns false, and drops it, if more would wait than may.
    pub fn put(&self, message: Message) -> bool {
        let mut state = self.lock();
        if message.tag.pass < state.first_pass {
            return true;
        }
        let bytes = state.bytes.saturating_add(message.bytes.len());
        if bytes > self.most_bytes || state.messages.len() >= MOST_MESSAGES {
            return false;
        }
        state.bytes = bytes;
        state.messages.push_back(message);
        drop(state);
        self.has_changed.notify_all();
        true
    }

    /// Ends all waits, now and later, with this error; the first one counts.
    pub fn end(&self, error: GroupError) {
        self.lock().over.get_or_insert(error);
        self.has_changed.notify_all();
    }

    /// Why all waits end.
    pub fn ended(&self) -> Option<GroupError> {
        self.lock().over.clone()
    }

    /// Drops messages of passes before this one, now and later.
    pub fn forget(&self, before_pass: u64) {
        let mut state = self.lock();
        state.first_pass = state.first_pass.max(before_pass);
        let first_pass = state.first_pass;
        state.retain(|message| message.tag.pass >= first_pass);
    }

    /// Waits up to `patience` for the message of this tag; `None` if it has not come.
    ///
    /// # Errors
    /// The error of [`Mailbox::end`]; [`GroupError::Fault`] if any member reports that it failed in the same pass, with its
    /// name by `name`.
    pub fn take(
        &self,
        from: usize,
        tag: Tag,
        patience: Duration,
        name: impl Fn(usize) -> String,
    ) -> Result<Option<Vec<u8>>, GroupError> {
        let is_fault = |m: &Message| m.tag.op == Op::Fault && m.tag.pass == tag.pass;
        let is_it = |m: &Message| (m.from == from && m.tag == tag) || is_fault(m);
        match self.wait(patience, is_it)? {
            Some(message) if is_fault(&message) => Err(GroupError::Fault {
                member: name(message.from),
                why: String::from_utf8_lossy(&message.bytes).into_owned(),
            }),
            message => Ok(message.map(|message| message.bytes)),
        }
    }

    /// Waits up to `patience` for the message of this kind that came first; `None` if there is none.
    ///
    /// # Errors
    /// The error of [`Mailbox::end`].
    pub fn next(&self, op: Op, patience: Duration) -> Result<Option<Message>, GroupError> {
        self.wait(patience, |message| message.tag.op == op)
    }

    fn wait(
        &self,
        patience: Duration,
        is_it: impl Fn(&Message) -> bool,
    ) -> Result<Option<Message>, GroupError> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        loop {
            // What came before the end is still good.
            if let Some(at) = state.messages.iter().position(&is_it) {
                let message = state.messages.remove(at);
                state.bytes -= message.as_ref().map_or(0, |message| message.bytes.len());
                return Ok(message);
            }
            if let Some(error) = &state.over {
                return Err(error.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = self
                .has_changed
                .wait_timeout(state, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Messages and their sum are changed together, without a call that may panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn retain(&mut self, is_kept: impl Fn(&Message) -> bool) {
        self.messages.retain(is_kept);
        self.bytes = self
            .messages
            .iter()
            .map(|message| message.bytes.len())
            .sum();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const NOW: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(60);

    fn tag(pass: u64, layer: u32) -> Tag {
        Tag {
            pass,
            flight: 0,
            layer,
            op: Op::Stream,
        }
    }

    fn message(from: usize, tag: Tag, bytes: &[u8]) -> Message {
        let bytes = bytes.to_vec();
        Message { from, tag, bytes }
    }

    fn name(rank: usize) -> String {
        format!("rank {rank}")
    }

    #[test]
    fn messages_are_found_by_sender_and_tag_and_else_come_in_order() {
        let mailbox = Mailbox::new(100);
        for (from, layer) in [(1, 4), (2, 4), (1, 8)] {
            assert!(mailbox.put(message(from, tag(0, layer), &[from as u8, layer as u8])));
        }
        assert_eq!(mailbox.take(2, tag(0, 4), NOW, name), Ok(Some(vec![2, 4])));
        assert_eq!(mailbox.take(2, tag(0, 4), NOW, name), Ok(None));
        assert_eq!(
            mailbox.next(Op::Stream, NOW).unwrap().unwrap().tag,
            tag(0, 4)
        );
        assert_eq!(
            mailbox.next(Op::Stream, NOW).unwrap().unwrap().tag,
            tag(0, 8)
        );
        assert_eq!(mailbox.next(Op::Stream, NOW), Ok(None));
    }

    #[test]
    fn a_sender_of_too_much_is_told_from_one_of_much() {
        let mailbox = Mailbox::new(4);
        assert!(mailbox.put(message(1, tag(0, 1), &[0; 4])));
        assert!(!mailbox.put(message(1, tag(0, 2), &[0])));
        assert!(mailbox.take(1, tag(0, 1), NOW, name).unwrap().is_some());
        assert!(mailbox.put(message(1, tag(0, 2), &[0; 4])));
        mailbox.forget(1);
        assert!(
            mailbox.put(message(1, tag(0, 3), &[0; 4])),
            "of a pass that is over"
        );
        assert_eq!(mailbox.next(Op::Stream, NOW), Ok(None));
        assert!(mailbox.put(message(1, tag(1, 3), &[0; 4])));
    }

    #[test]
    fn a_stage_takes_nothing_of_a_pass_that_was_given_up() {
        let mailbox = Mailbox::new(100);
        for pass in [3, 3, 4] {
            assert!(mailbox.put_for_stage(message(1, tag(pass, 1), &[pass as u8])));
        }
        assert!(mailbox.put_for_stage(message(2, tag(3, 2), &[3])));
        assert_eq!(
            mailbox.next(Op::Stream, NOW).unwrap().unwrap().tag,
            tag(4, 1)
        );
        assert_eq!(mailbox.next(Op::Stream, NOW), Ok(None));
    }

    #[test]
    fn a_fault_ends_the_wait_for_its_own_pass_alone() {
        let mailbox = Mailbox::new(100);
        let fault = |pass| Tag {
            op: Op::Fault,
            ..tag(pass, 0)
        };
        mailbox.put(message(2, fault(3), b"no room"));
        assert_eq!(mailbox.take(1, tag(4, 1), NOW, name), Ok(None));
        let error = mailbox.take(1, tag(3, 1), NOW, name).unwrap_err();
        assert_eq!(error.to_string(), "rank 2: no room");
    }

    #[test]
    fn a_loss_ends_waits_but_not_before_what_has_come_is_taken() {
        let mailbox = Arc::new(Mailbox::new(100));
        let waiting = Arc::clone(&mailbox);
        let waits = std::thread::spawn(move || waiting.take(1, tag(0, 9), LONG, name));
        mailbox.put(message(1, tag(0, 1), &[7]));
        let lost = GroupError::Lost {
            member: "rank 1".into(),
            why: "it hung up".into(),
        };
        mailbox.end(lost.clone());
        mailbox.end(GroupError::Left);
        assert_eq!(waits.join().unwrap(), Err(lost.clone()));
        assert_eq!(mailbox.take(1, tag(0, 1), LONG, name), Ok(Some(vec![7])));
        assert_eq!(mailbox.next(Op::Stream, LONG), Err(lost));
    }
}
