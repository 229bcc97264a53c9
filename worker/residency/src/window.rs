//! Choice of the modules to request and to release, as a pure state machine.
//!
//! Modules run in a cycle: embedding, layers, head, and again for the next token. The policy follows prima.cpp
//! (section 3.1): while a module runs, the next ones are requested. prima.cpp's prefetch–release effect (appendix A.1:
//! the pages prefetched last displace those prefetched first, and everything is loaded twice) cannot happen: nothing
//! is requested ahead of its use if that would release something that is needed sooner.
//!
//! Over a cycle, the module that has just run is the one needed last, so it is released first; least recently used
//! would be the worst choice. Where all modules run for every token, some of them stay for good and the others pass
//! through the rest of the budget, each requested as soon as there is room ([`crate::kept`]). Routed experts are requested
//! once the router has chosen them; within a layer, the ones chosen least often are released first. Where nothing but
//! experts passes through the window, those chosen least often go first whatever their layer: each layer chooses as many, so
//! a layer's share of the window follows how unequal its choices are.

use std::cmp::Reverse;

use crate::kept::{ReadAhead, kept};

/// Uses of a module, on average, after which all counts are halved.
const AGEING_USES: usize = 16;

/// Index of a module in the order of execution.
pub(crate) type Index = usize;

/// Action of the policy on a module's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Request its pages.
    Prefetch(Index),
    /// Release its pages.
    Release(Index),
}

/// Usage pattern of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Runs for every token.
    Always,
    /// The output head: it runs for every token, too, and stays where there is a choice, since it may be as large as many
    /// layers.
    Head,
    /// Runs only when chosen by the router.
    Expert {
        /// Layer that the expert belongs to.
        layer: u32,
    },
    /// Module of which a token reads very little: neither requested nor counted, and released after each use (the
    /// embedding).
    Sparse,
}

impl Kind {
    fn is_always(self) -> bool {
        matches!(self, Self::Always | Self::Head)
    }
}

#[derive(Clone, Debug)]
struct Entry {
    kind: Kind,
    bytes: u64,
    resident: bool,
    /// Number of guards.
    held: usize,
    /// Whether it stays for good.
    kept: bool,
    /// Whether the router chose it and it has yet to run.
    announced: bool,
    uses: u64,
    /// Position from which its next use is computed: its own index, or that of its layer's first expert.
    place: Index,
}

/// State of all modules.
#[derive(Debug)]
pub(crate) struct Window {
    entries: Vec<Entry>,
    /// Modules that run for every token, in order.
    always: Vec<Index>,
    budget_bytes: u64,
    /// Number of the next modules to request; `None`: as many as have room, since some stay for good.
    lookahead: Option<usize>,
    resident_bytes: u64,
    held_bytes: u64,
    /// Experts that were chosen last.
    announced: Vec<Index>,
    /// Acquisitions since the counts of uses were halved.
    counted: usize,
    /// The module that ran last.
    current: Index,
    /// Layer whose router has chosen: its other experts are at least a whole cycle away.
    decided_layer: Option<u32>,
}

impl Window {
    /// Modules of a budget of bytes; `read_ahead` counts where all run for every token.
    pub(crate) fn new(
        modules: &[(Kind, u64)],
        budget_bytes: u64,
        lookahead: usize,
        read_ahead: ReadAhead,
    ) -> Self {
        let kept = kept(modules, budget_bytes, read_ahead);
        let lookahead = match (read_ahead, &kept) {
            (ReadAhead::Never, _) => Some(0),
            (ReadAhead::Least | ReadAhead::Bytes(_), Some(_)) => None,
            (ReadAhead::Least | ReadAhead::Bytes(_), None) => Some(lookahead),
        };
        let mut entries: Vec<Entry> = Vec::with_capacity(modules.len());
        for (index, &(kind, bytes)) in modules.iter().enumerate() {
            let place = match entries.last() {
                Some(before) if before.kind == kind && !kind.is_always() => before.place,
                _ => index,
            };
            entries.push(Entry {
                kind,
                bytes: if kind == Kind::Sparse { 0 } else { bytes },
                resident: false,
                held: 0,
                kept: kept.as_ref().is_some_and(|kept| kept[index]),
                announced: false,
                uses: 0,
                place,
            });
        }
        let is_always = |index: &Index| entries[*index].kind.is_always();
        Self {
            always: (0..entries.len()).filter(is_always).collect(),
            entries,
            budget_bytes,
            lookahead,
            resident_bytes: 0,
            held_bytes: 0,
            announced: Vec::new(),
            counted: 0,
            current: 0,
            decided_layer: None,
        }
    }

    /// Bytes of the modules that were requested and not released.
    pub(crate) fn resident_bytes(&self) -> u64 {
        self.resident_bytes
    }

    /// Records that a guard was handed out.
    pub(crate) fn acquire(&mut self, index: Index) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.entries[index].held == 0 {
            self.held_bytes += self.entries[index].bytes;
        }
        let entry = &mut self.entries[index];
        entry.held += 1;
        entry.uses += 1;
        self.counted += 1;
        self.age();
        let entry = &self.entries[index];
        if entry.kind == Kind::Sparse {
            self.current = index;
            return actions;
        }
        if entry.kind.is_always() {
            self.current = index;
        }
        if !entry.resident {
            self.make_room(self.entries[index].bytes, 0, &mut actions);
            self.bring(index, &mut actions);
        }
        self.look_ahead(&mut actions);
        actions
    }

    /// Halves the counts of uses now and then: what was chosen long ago says less.
    fn age(&mut self) {
        if self.counted >= AGEING_USES * self.entries.len() {
            self.counted /= 2;
            for entry in &mut self.entries {
                entry.uses /= 2;
            }
        }
    }

    /// Records that a guard was dropped.
    pub(crate) fn release(&mut self, index: Index) -> Vec<Action> {
        let entry = &mut self.entries[index];
        entry.held -= 1;
        if entry.held == 0 {
            entry.announced = false;
            self.held_bytes -= entry.bytes;
        }
        let mut actions = Vec::new();
        if entry.kind == Kind::Sparse && entry.held == 0 {
            actions.push(Action::Release(index));
        }
        self.make_room(0, 0, &mut actions);
        if self.lookahead.is_none() {
            // Its room is free, perhaps until other members of a ring have computed.
            self.look_ahead(&mut actions);
        }
        actions
    }

    /// Records that a module could not be loaded: it is not in memory.
    pub(crate) fn forget(&mut self, index: Index) {
        let entry = &mut self.entries[index];
        entry.announced = false;
        if std::mem::take(&mut entry.resident) {
            self.resident_bytes -= entry.bytes;
        }
    }

    /// Bytes of the modules that have guards.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Whether there are guards of a module.
    pub(crate) fn is_held(&self, index: Index) -> bool {
        self.entries[index].held > 0
    }

    /// Records that a router has chosen these experts. Those of an earlier choice that have not run since then will not.
    pub(crate) fn announce(&mut self, chosen: &[Index]) -> Vec<Action> {
        let mut actions = Vec::new();
        for index in std::mem::take(&mut self.announced) {
            let entry = &mut self.entries[index];
            entry.announced &= entry.held > 0;
        }
        self.announced.extend(chosen);
        for &index in chosen {
            let entry = &mut self.entries[index];
            entry.announced = true;
            if let Kind::Expert { layer } = entry.kind {
                self.decided_layer = Some(layer);
            }
        }
        for &index in chosen {
            if self.entries[index].resident {
                continue;
            }
            if !self.make_room(self.entries[index].bytes, 1, &mut actions) {
                break;
            }
            self.bring(index, &mut actions);
        }
        actions
    }

    /// Number of these modules, counted from the first, that fit the budget at once; at least 1.
    pub(crate) fn group(&self, upcoming: &[Index]) -> usize {
        let mut free = self.budget_bytes.saturating_sub(self.held_bytes);
        let fits = |index: &&Index| {
            let left = free.checked_sub(self.entries[**index].bytes);
            free = left.unwrap_or(0);
            left.is_some()
        };
        upcoming.iter().take_while(fits).count().max(1)
    }

    /// Requests the next modules that run for every token, unless they would displace something that is needed sooner.
    fn look_ahead(&mut self, actions: &mut Vec<Action>) {
        let after = self.always.partition_point(|&index| index <= self.current);
        let count = self.always.len();
        for step in 0..self.lookahead.unwrap_or(count).min(count) {
            let next = self.always[(after + step) % self.always.len()];
            if self.entries[next].resident {
                continue;
            }
            if !self.make_room(self.entries[next].bytes, self.distance(next), actions) {
                return;
            }
            self.bring(next, actions);
        }
    }

    fn bring(&mut self, index: Index, actions: &mut Vec<Action>) {
        self.entries[index].resident = true;
        self.resident_bytes += self.entries[index].bytes;
        actions.push(Action::Prefetch(index));
    }

    /// Releases modules that are needed later than `distance` until `bytes` more fit. If they cannot be made to fit,
    /// a module that is needed at once (distance 0) exceeds the budget; for any other, nothing is released.
    fn make_room(&mut self, bytes: u64, distance: usize, actions: &mut Vec<Action>) -> bool {
        let mut left = self.resident_bytes;
        let mut victims = Vec::new();
        while left + bytes > self.budget_bytes {
            let Some(victim) = self.needed_last(distance, &victims) else {
                break;
            };
            left -= self.entries[victim].bytes;
            victims.push(victim);
        }
        let fits = left + bytes <= self.budget_bytes;
        if !fits && distance > 0 {
            return false;
        }
        for &victim in &victims {
            self.entries[victim].resident = false;
            actions.push(Action::Release(victim));
        }
        self.resident_bytes = left;
        fits
    }

    /// Finds the module needed last among those that are resident, not held, needed later than `distance`, and not in
    /// `taken`.
    fn needed_last(&self, distance: usize, taken: &[Index]) -> Option<Index> {
        let free = |&i: &Index| {
            let entry = &self.entries[i];
            entry.resident && entry.held == 0 && entry.bytes > 0 && !entry.kept
        };
        (0..self.entries.len())
            .filter(free)
            .filter(|i| self.distance(*i) > distance && !taken.contains(i))
            .max_by_key(|&i| (self.distance(i), Reverse(self.entries[i].uses), i))
    }

    /// Steps until a module's next use: 1 for a chosen expert, more than a cycle for experts that the router did not
    /// choose. Among experts alone all others are equally far: how often they are chosen decides.
    fn distance(&self, index: Index) -> usize {
        let entry = &self.entries[index];
        if entry.announced {
            return 1;
        }
        if self.always.is_empty() {
            return 2;
        }
        let cycle = self.entries.len();
        let ahead = (entry.place + cycle - self.current - 1) % cycle + 1;
        match entry.kind {
            Kind::Expert { layer } if self.decided_layer == Some(layer) => ahead + cycle,
            _ => ahead,
        }
    }
}

#[cfg(test)]
mod tests;
