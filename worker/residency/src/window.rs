//! Choice of the modules to request and to release, as a pure state machine.
//!
//! Modules run in a cycle: embedding, layers, head, and again for the next token. The policy follows prima.cpp
//! (section 3.1): while a module runs, the next ones are requested. prima.cpp's prefetch–release effect (appendix A.1:
//! the pages prefetched last displace those prefetched first, and everything is loaded twice) cannot happen: nothing
//! is requested ahead of its use if that would release something that is needed sooner.
//!
//! Over a cycle, the module that has just run is the one needed last, so it is released first; least recently used
//! would be the worst choice. Routed experts are requested once the router has chosen them; within a layer, the ones
//! chosen least often are released first. Where nothing but experts passes through the window, those chosen least often
//! go first whatever their layer: each layer chooses as many, so a layer's share of the window follows how unequal its
//! choices are.

use std::cmp::Reverse;

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
    /// Runs only when chosen by the router.
    Expert {
        /// Layer that the expert belongs to.
        layer: u32,
    },
    /// Module of which a token reads very little: neither requested nor counted, and released after each use (the
    /// embedding).
    Sparse,
}

#[derive(Clone, Debug)]
struct Entry {
    kind: Kind,
    bytes: u64,
    resident: bool,
    /// Number of guards.
    held: usize,
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
    lookahead: usize,
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
    pub(crate) fn new(modules: &[(Kind, u64)], budget_bytes: u64, lookahead: usize) -> Self {
        let mut entries: Vec<Entry> = Vec::with_capacity(modules.len());
        for (index, &(kind, bytes)) in modules.iter().enumerate() {
            let place = match entries.last() {
                Some(before) if before.kind == kind && kind != Kind::Always => before.place,
                _ => index,
            };
            entries.push(Entry {
                kind,
                bytes: if kind == Kind::Sparse { 0 } else { bytes },
                resident: false,
                held: 0,
                announced: false,
                uses: 0,
                place,
            });
        }
        let is_always = |index: &Index| entries[*index].kind == Kind::Always;
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
        if entry.kind == Kind::Always {
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
        let count = self.lookahead.min(self.always.len());
        for step in 0..count {
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
            entry.resident && entry.held == 0 && entry.bytes > 0
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use Action::{Prefetch, Release};

    /// Embedding, six layers of 10 bytes, head.
    fn dense(budget_bytes: u64, lookahead: usize) -> Window {
        let mut modules = vec![(Kind::Sparse, 1000)];
        modules.extend([(Kind::Always, 10); 6]);
        modules.push((Kind::Always, 10));
        Window::new(&modules, budget_bytes, lookahead)
    }

    fn run(window: &mut Window, index: Index) -> Vec<Action> {
        let mut actions = window.acquire(index);
        actions.extend(window.release(index));
        actions
    }

    #[test]
    fn what_comes_next_is_asked_for_once() {
        let mut window = dense(1000, 2);
        assert_eq!(
            run(&mut window, 0),
            vec![Release(0)],
            "little of the embedding is read"
        );
        assert_eq!(
            run(&mut window, 1),
            vec![Prefetch(1), Prefetch(2), Prefetch(3)]
        );
        assert_eq!(run(&mut window, 2), vec![Prefetch(4)]);
        for index in 3..=7 {
            run(&mut window, index);
        }
        // The window extends into the next token.
        assert_eq!(window.resident_bytes(), 70);
        assert!((1..=7).all(|index| run(&mut window, index).is_empty()));
    }

    #[test]
    fn what_is_needed_last_goes_first_and_nothing_is_displaced_that_comes_sooner() {
        let mut window = dense(30, 2);
        assert_eq!(
            run(&mut window, 1),
            vec![Prefetch(1), Prefetch(2), Prefetch(3)]
        );
        // Module 1 has just run, so it is needed last.
        assert_eq!(run(&mut window, 2), vec![Release(1), Prefetch(4)]);
        assert_eq!(run(&mut window, 3), vec![Release(2), Prefetch(5)]);
        // A window wider than the budget stops at modules that it would displace (prima.cpp, appendix A.1).
        let mut wide = dense(30, 6);
        assert_eq!(
            run(&mut wide, 1),
            vec![Prefetch(1), Prefetch(2), Prefetch(3)]
        );
        assert_eq!(run(&mut wide, 2), vec![Release(1), Prefetch(4)]);
    }

    #[test]
    fn each_module_is_asked_for_once_a_cycle() {
        for (budget, lookahead) in [(20, 1), (30, 2), (40, 6), (60, 3)] {
            let mut window = dense(budget, lookahead);
            let cycle = |window: &mut Window| -> usize {
                let actions = (0..8)
                    .flat_map(|index| run(window, index))
                    .collect::<Vec<_>>();
                actions.iter().filter(|a| matches!(a, Prefetch(_))).count()
            };
            cycle(&mut window);
            let asked = cycle(&mut window);
            assert!(
                asked <= 7,
                "budget {budget}, lookahead {lookahead}: {asked} prefetches of 7 modules"
            );
        }
    }

    #[test]
    fn a_held_module_stays_whatever_the_budget() {
        let mut window = dense(10, 3);
        assert_eq!(window.acquire(1), vec![Prefetch(1)]);
        assert_eq!(
            window.acquire(2),
            vec![Prefetch(2)],
            "over budget, and nothing to give back"
        );
        assert_eq!(window.resident_bytes(), 20);
        assert_eq!(window.release(1), vec![Release(1)]);
        assert_eq!(window.release(2), vec![]);
    }

    /// One layer: attention, router, four experts of 10 bytes; head.
    fn sparse(budget_bytes: u64) -> Window {
        let expert = (Kind::Expert { layer: 0 }, 10);
        let modules = [
            (Kind::Sparse, 0),
            (Kind::Always, 10),
            (Kind::Always, 10),
            expert,
            expert,
            expert,
            expert,
            (Kind::Always, 10),
        ];
        Window::new(&modules, budget_bytes, 2)
    }

    #[test]
    fn chosen_experts_come_and_the_least_chosen_go() {
        let mut window = sparse(50);
        run(&mut window, 1);
        run(&mut window, 2);
        assert_eq!(window.resident_bytes(), 30);
        assert_eq!(window.announce(&[3, 5]), vec![Prefetch(3), Prefetch(5)]);
        assert_eq!(window.group(&[3, 5]), 2);
        run(&mut window, 3);
        run(&mut window, 5);
        // The next token chooses 3 again, then 6: 5 was chosen less often, so it is released.
        assert_eq!(window.announce(&[3]), vec![]);
        run(&mut window, 3);
        assert_eq!(window.announce(&[6]), vec![Release(5), Prefetch(6)]);
    }

    #[test]
    fn experts_that_were_chosen_and_did_not_run_give_way() {
        let mut window = sparse(30);
        assert_eq!(window.announce(&[3, 4, 5]).len(), 3);
        run(&mut window, 3);
        // The step ended there. What it had chosen besides must not keep the next one from its experts.
        assert_eq!(window.announce(&[3, 6]), vec![Release(5), Prefetch(6)]);
        window.forget(6);
        assert_eq!(window.resident_bytes(), 20);
        assert_eq!(window.announce(&[6]), vec![Prefetch(6)], "asked for again");
    }

    /// Share of the choices of some steps that were in memory, by layer. Choices follow Zipf's law, by another order of the
    /// experts in each layer.
    fn hits_by_layer(window: &mut Window, (layers, experts): (usize, usize)) -> Vec<f64> {
        const CHOSEN: usize = 4;
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize
        };
        let weights: Vec<usize> = (1..=experts).map(|rank| 1_000_000 / rank).collect();
        let all: usize = weights.iter().sum();
        let mut hits = vec![0.0; layers];
        for step in 0..400 {
            for (layer, hits) in hits.iter_mut().enumerate() {
                let mut chosen: Vec<Index> = Vec::new();
                while chosen.len() < CHOSEN {
                    let mut left = random() % all;
                    let rank = weights.iter().position(|weight| {
                        let is_it = left < *weight;
                        left = left.saturating_sub(*weight);
                        is_it
                    });
                    let expert = (rank.unwrap() * 5 + layer * 7) % experts;
                    let index = layer * experts + expert;
                    if !chosen.contains(&index) {
                        chosen.push(index);
                    }
                }
                chosen.sort_unstable();
                let there = chosen
                    .iter()
                    .filter(|i| window.entries[**i].resident)
                    .count();
                if step >= 100 {
                    *hits += there as f64 / CHOSEN as f64 / 300.0;
                }
                window.announce(&chosen);
                for index in chosen {
                    run(window, index);
                }
            }
        }
        hits
    }

    #[test]
    fn experts_that_are_chosen_most_stay_in_every_layer_also_after_a_prompt() {
        let (layers, experts) = (12, 32);
        let kinds =
            (0..layers as u32).flat_map(|layer| vec![(Kind::Expert { layer }, 10); experts]);
        let kinds: Vec<(Kind, u64)> = kinds.collect();
        let mut window = Window::new(&kinds, (layers * experts * 10 / 2) as u64, 0);
        // A prompt chooses all of them.
        for layer in 0..layers {
            let chosen: Vec<Index> = (layer * experts..(layer + 1) * experts).collect();
            window.announce(&chosen);
            for index in chosen {
                run(&mut window, index);
            }
        }
        let hits = hits_by_layer(&mut window, (layers, experts));
        let least = hits.iter().copied().fold(1.0, f64::min);
        let mean = hits.iter().sum::<f64>() / layers as f64;
        assert!(least > 0.9 * mean && mean > 0.7, "{hits:?}");
    }

    #[test]
    fn experts_are_held_in_groups_that_fit() {
        let mut window = sparse(35);
        run(&mut window, 1);
        run(&mut window, 2);
        window.announce(&[3, 4, 5, 6]);
        assert_eq!(window.group(&[3, 4, 5, 6]), 3);
        window.acquire(2);
        assert_eq!(window.group(&[3, 4, 5, 6]), 2);
        let mut tiny = sparse(5);
        assert_eq!(
            tiny.group(&[3, 4]),
            1,
            "one is always held, whatever the budget"
        );
        tiny.acquire(3);
        assert_eq!(tiny.group(&[4]), 1);
    }

    proptest! {
        #[test]
        fn the_budget_holds_unless_guards_exceed_it(
            budget in 1u64..120,
            lookahead in 0usize..10,
            steps in prop::collection::vec((0usize..8, any::<bool>()), 1..60),
        ) {
            let mut window = sparse(budget);
            window.lookahead = lookahead;
            let mut resident = [false; 8];
            let mut held = [0usize; 8];
            for (index, acquire) in steps {
                let actions = if acquire {
                    held[index] += 1;
                    window.acquire(index)
                } else if held[index] > 0 {
                    held[index] -= 1;
                    window.release(index)
                } else {
                    window.announce(&[3 + index % 4])
                };
                for action in actions {
                    match action {
                        Prefetch(i) => {
                            prop_assert!(!resident[i], "asked for twice");
                            resident[i] = true;
                        }
                        Release(0) => prop_assert!(held[0] == 0, "given back while held"),
                        Release(i) => {
                            prop_assert!(resident[i] && held[i] == 0, "given back while held");
                            resident[i] = false;
                        }
                    }
                }
                let is_counted = |i: &usize| *i != 0;
                let bytes = |set: &dyn Fn(usize) -> bool| 10 * (0..8).filter(is_counted).filter(|i| set(*i)).count() as u64;
                let used = bytes(&|i| resident[i]);
                prop_assert_eq!(used, window.resident_bytes());
                prop_assert!(used <= budget.max(bytes(&|i| held[i] > 0)), "{} bytes", used);
                prop_assert!((1..8).all(|i| held[i] == 0 || resident[i]), "a held module is not there");
            }
        }
    }
}
