//! KV that receivers of exports have not taken yet, which is in ordinary memory: over a slow link all of a prompt's.
//!
//! A pass never waits for a receiver. Instead an export begins only when what is owed to all receivers, with it, is within
//! the KV of the longest prompt, or nothing is owed. Plans of Pods with memory limits count so much.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    mpsc::Sender,
};

use bytes::Bytes;

use crate::step::Command;

/// Bytes that are owed to all receivers of an engine.
#[derive(Clone)]
pub(crate) struct Unread(Arc<State>);

struct State {
    bytes: AtomicUsize,
    most_bytes: usize,
    /// Whether the engine wants to know when bytes were taken.
    is_awaited: AtomicBool,
    commands: Sender<Command>,
}

impl Unread {
    /// At most `most_bytes` at a time, unless one prompt has more.
    pub(crate) fn new(most_bytes: usize, commands: Sender<Command>) -> Self {
        Self(Arc::new(State {
            bytes: AtomicUsize::new(0),
            most_bytes,
            is_awaited: AtomicBool::new(false),
            commands,
        }))
    }

    /// Takes room for an export of so many bytes; `None` if others must be taken by their receivers first, which
    /// [`Command::Unread`] will tell.
    pub(crate) fn reserve(&self, bytes: usize) -> Option<Owed> {
        if !self.has_room(bytes) {
            self.0.is_awaited.store(true, SeqCst);
            // What was taken meanwhile has told nobody.
            if !self.has_room(bytes) {
                return None;
            }
        }
        self.0.bytes.fetch_add(bytes, SeqCst);
        Some(Owed {
            unread: self.clone(),
            bytes,
        })
    }

    fn has_room(&self, bytes: usize) -> bool {
        let owed = self.0.bytes.load(SeqCst);
        owed == 0 || owed.saturating_add(bytes) <= self.0.most_bytes
    }
}

/// Bytes of one export that are still to be sent, or that a receiver has not taken yet. Dropped, they are owed no more.
pub(crate) struct Owed {
    unread: Unread,
    bytes: usize,
}

impl Owed {
    /// Makes bytes for a receiver, which are owed until it drops them.
    pub(crate) fn hand_over(&mut self, data: Vec<u8>) -> Bytes {
        let bytes = data.len().min(self.bytes);
        self.bytes -= bytes;
        let owed = Self {
            unread: self.unread.clone(),
            bytes,
        };
        Bytes::from_owner(Sent { data, _owed: owed })
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        let State {
            bytes,
            is_awaited,
            commands,
            ..
        } = &*self.unread.0;
        if self.bytes > 0 {
            bytes.fetch_sub(self.bytes, SeqCst);
            if is_awaited.swap(false, SeqCst) {
                // The engine may be gone.
                let _ = commands.send(Command::Unread);
            }
        }
    }
}

/// Bytes with what is owed for them.
struct Sent {
    data: Vec<u8>,
    _owed: Owed,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn an_export_has_room_beside_what_is_owed_and_alone_whatever_it_takes() {
        let (commands, told) = channel();
        let unread = Unread::new(10, commands);
        let mut large = unread.reserve(12).expect("alone");
        assert!(unread.reserve(1).is_none());
        let part = large.hand_over(vec![7; 8]);
        drop(large);
        assert!(matches!(told.try_recv(), Ok(Command::Unread)));
        assert!(unread.reserve(3).is_none(), "8 bytes are unread");
        let beside = unread.reserve(2).expect("room for 2");
        assert_eq!(part[..], [7; 8]);
        let half = part.slice(4..);
        drop(part);
        assert!(told.try_recv().is_err(), "a part of it is still held");
        drop(half);
        assert!(matches!(told.try_recv(), Ok(Command::Unread)));
        drop(beside);
        assert!(told.try_recv().is_err(), "nobody waits");
    }
}
