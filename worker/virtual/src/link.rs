//! The link to a modelled device, on which copies of weights and of rows take turns, as those of two streams do on a GPU's
//! engine for copies from the host.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// When a copy or an operation ends, real ns; a copy that has not begun may be put off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Due(Arc<AtomicU64>);

impl Due {
    pub(crate) fn at(ns: u64) -> Self {
        Self(Arc::new(AtomicU64::new(ns)))
    }

    pub(crate) fn ns(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self, ns: u64) {
        self.0.store(ns, Ordering::Release);
    }
}

/// What is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cargo {
    /// Weights, with the serial of their copy.
    Weights(u64),
    /// Rows, ahead of weights with a serial above this one: nothing that is queued waits for those.
    Rows { ahead_of: u64 },
}

/// Copies that have not ended, in their order.
#[derive(Debug, Default)]
pub(crate) struct Link {
    turns: VecDeque<Turn>,
}

#[derive(Debug)]
struct Turn {
    cargo: Cargo,
    ready_ns: u64,
    took_ns: u64,
    begin_ns: u64,
    due: Due,
}

impl Turn {
    fn is_of_rows(&self) -> bool {
        matches!(self.cargo, Cargo::Rows { .. })
    }
}

impl Link {
    /// Gives a copy that can begin at `ready_ns` its turn; returns when it begins, and ends. Weights come after all that was
    /// queued before. Rows come after what has begun by then, and other rows; of weights that are ready, one copy goes between
    /// two of rows.
    pub(crate) fn take_turn(
        &mut self,
        now_ns: u64,
        cargo: Cargo,
        (ready_ns, took_ns): (u64, u64),
    ) -> (u64, Due) {
        while self.turns.front().is_some_and(|t| t.due.ns() <= now_ns) {
            self.turns.pop_front();
        }
        let place = match cargo {
            Cargo::Weights(_) => self.turns.len(),
            Cargo::Rows { ahead_of } => self.place_of_rows(ready_ns, ahead_of),
        };
        let turn = Turn {
            cargo,
            ready_ns,
            took_ns,
            begin_ns: 0,
            due: Due::default(),
        };
        self.turns.insert(place, turn);
        self.put_in_time(place);
        let turn = &self.turns[place];
        (turn.begin_ns, turn.due.clone())
    }

    fn place_of_rows(&self, ready_ns: u64, ahead_of: u64) -> usize {
        let stays = |turn: &Turn| match turn.cargo {
            Cargo::Rows { .. } => true,
            Cargo::Weights(serial) => turn.begin_ns < ready_ns || serial <= ahead_of,
        };
        let Some(last) = self.turns.iter().rposition(stays) else {
            return 0;
        };
        let before = &self.turns[last];
        let goes_between = |next: &Turn| before.is_of_rows() && next.ready_ns <= before.due.ns();
        last + 1 + usize::from(self.turns.get(last + 1).is_some_and(goes_between))
    }

    /// Gives the turns from `first` on their times, one after the other.
    fn put_in_time(&mut self, first: usize) {
        let before = first.checked_sub(1).and_then(|last| self.turns.get(last));
        let mut free_ns = before.map_or(0, |turn| turn.due.ns());
        for turn in self.turns.iter_mut().skip(first) {
            turn.begin_ns = turn.ready_ns.max(free_ns);
            free_ns = turn.begin_ns + turn.took_ns;
            turn.due.set(free_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: Cargo = Cargo::Rows { ahead_of: 0 };

    #[test]
    fn rows_begin_behind_the_copy_on_its_way_and_put_off_those_that_wait() {
        let mut link = Link::default();
        let weights = [1, 2, 3].map(|serial| {
            let (_, due) = link.take_turn(0, Cargo::Weights(serial), (0, 10));
            due
        });
        let (begin_ns, rows) = link.take_turn(5, ROWS, (5, 4));
        assert_eq!((begin_ns, rows.ns()), (10, 14));
        assert_eq!(weights.map(|due| due.ns()), [10, 24, 34]);
    }

    #[test]
    fn one_copy_of_weights_that_is_ready_goes_between_two_of_rows() {
        let mut link = Link::default();
        let [ready, late] = [(1, 0), (2, 100)].map(|(serial, ready_ns)| {
            let (_, due) = link.take_turn(0, Cargo::Weights(serial), (ready_ns, 10));
            due
        });
        let rows = [0, 0, 0].map(|_| {
            let (begin_ns, _) = link.take_turn(0, ROWS, (0, 4));
            begin_ns
        });
        assert_eq!(rows, [0, 14, 18]);
        assert_eq!([ready.ns(), late.ns()], [14, 110]);
    }

    #[test]
    fn copies_that_computation_waits_for_are_not_put_off() {
        let mut link = Link::default();
        let weights = [1, 2].map(|serial| {
            let (_, due) = link.take_turn(0, Cargo::Weights(serial), (0, 10));
            due
        });
        let (begin_ns, _) = link.take_turn(0, Cargo::Rows { ahead_of: 1 }, (0, 4));
        assert_eq!(begin_ns, 10);
        assert_eq!(weights.map(|due| due.ns()), [10, 24]);
        // Once they have ended, nothing is before it.
        let (begin_ns, _) = link.take_turn(50, ROWS, (60, 1));
        assert_eq!(begin_ns, 60);
    }
}
