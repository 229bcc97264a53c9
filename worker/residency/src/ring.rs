//! A ring of slots: which module is in which slot, which one is loaded next, and which are evicted.
//!
//! Pure bookkeeping: what a slot and a loaded module are belongs to the caller.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use hearth_model::ModuleId;

/// A ring of slots for the modules of all layers, which are called experts here: most rings are for them. `S` is a slot,
/// which the ring owns but while it is loaded into; `T` a loaded expert, `M` a mark in the device's order.
pub(crate) struct Ring<S, T, M> {
    /// Experts of each layer, in the order of the pass. Each dense module is a layer of its own.
    layers: Vec<Vec<ModuleId>>,
    /// Slots that hold nothing, each with the mark after which it may be overwritten; the one that waited longest first.
    free: VecDeque<(S, Option<M>)>,
    slots: usize,
    /// Experts to load, in order.
    wanted: VecDeque<ModuleId>,
    /// First layer whose experts were not wanted yet; none follow if the pass does not load ahead.
    next_layer: usize,
    /// Numbers of those of each layer that are loaded ahead.
    ahead: Range<u32>,
    /// The expert that is being copied, and whether it is still wanted.
    loading: Option<(ModuleId, bool)>,
    loaded: HashMap<ModuleId, Loaded<S, T>>,
}

struct Loaded<S, T> {
    slot: S,
    expert: T,
    guards: usize,
}

impl<S, T, M> Ring<S, T, M> {
    /// Creates a ring without slots.
    pub(crate) fn new(layers: Vec<Vec<ModuleId>>) -> Self {
        Self {
            next_layer: layers.len(),
            ahead: 0..0,
            layers,
            free: VecDeque::new(),
            slots: 0,
            wanted: VecDeque::new(),
            loading: None,
            loaded: HashMap::new(),
        }
    }

    /// Adds slots that may be loaded into at once.
    pub(crate) fn lengthen(&mut self, slots: Vec<S>) {
        self.slots += slots.len();
        self.free.extend(slots.into_iter().map(|slot| (slot, None)));
    }

    /// Takes up to `count` free slots out of the ring.
    pub(crate) fn shorten(&mut self, count: usize) -> Vec<S> {
        let count = count.min(self.free.len());
        self.slots -= count;
        self.free.drain(..count).map(|(slot, _)| slot).collect()
    }

    /// Number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.slots
    }

    /// Whether an expert is being copied.
    pub(crate) fn is_loading(&self) -> bool {
        self.loading.is_some()
    }

    /// Begins a pass; `ahead`: the numbers of the experts of each layer that are loaded before its router has spoken, `None` if
    /// none are. Dense modules have no numbers: all of them are.
    pub(crate) fn begin(&mut self, ahead: Option<Range<u32>>) {
        self.wanted.clear();
        self.evict(|_| true);
        self.next_layer = match ahead {
            Some(_) => 0,
            None => self.layers.len(),
        };
        self.ahead = ahead.unwrap_or(0..0);
    }

    /// Wants these experts of a layer of the model, in order, before all others, and none else of that layer.
    pub(crate) fn announce(&mut self, layer: u32, chosen: &[ModuleId]) {
        let index = match chosen.first() {
            Some(id) => self.layer_of(*id),
            None => self.layers.iter().position(|of_layer| {
                let first = of_layer.first();
                first.and_then(|id| id.layer()) == Some(layer)
            }),
        };
        let Some(layer) = index else {
            return;
        };
        if self.next_layer <= layer {
            self.next_layer = layer + 1;
        }
        let kept: HashSet<ModuleId> = chosen.iter().copied().collect();
        let of_layer: HashSet<ModuleId> = self.layers[layer].iter().copied().collect();
        self.wanted.retain(|id| !of_layer.contains(id));
        self.evict(|id| of_layer.contains(&id) && !kept.contains(&id));
        for id in chosen.iter().rev() {
            if !self.is_loaded_or_loading(*id) {
                self.wanted.push_front(*id);
            }
        }
    }

    /// The next expert to load, if there is a slot for it.
    pub(crate) fn upcoming(&mut self) -> Option<ModuleId> {
        if self.wanted.is_empty()
            && let Some(layer) = self.layers.get(self.next_layer)
        {
            let is_ahead = |id: &&ModuleId| match id {
                ModuleId::Expert(_, expert) => self.ahead.contains(expert),
                _ => true,
            };
            self.wanted.extend(layer.iter().filter(is_ahead));
            self.next_layer += 1;
        }
        let loaded = &self.loaded;
        self.wanted.retain(|id| !loaded.contains_key(id));
        if self.free.is_empty() {
            return None;
        }
        self.wanted.front().copied()
    }

    /// Takes the next expert to load, and a slot for it with the mark to wait for.
    pub(crate) fn next(&mut self) -> Option<(ModuleId, S, Option<M>)> {
        let id = self.upcoming()?;
        self.wanted.pop_front();
        let (slot, mark) = self.free.pop_front()?;
        self.loading = Some((id, true));
        Some((id, slot, mark))
    }

    /// Enters the expert that was copied into a slot.
    pub(crate) fn loaded(&mut self, slot: S, expert: T) {
        match self.loading.take() {
            Some((id, true)) => {
                let loaded = Loaded {
                    slot,
                    expert,
                    guards: 0,
                };
                self.loaded.insert(id, loaded);
            }
            // Nothing reads it, and copies run in order.
            _ => self.free.push_back((slot, None)),
        }
    }

    /// Gives a slot back into which an expert could not be copied, with the mark to wait for as before. Returns whether the
    /// expert was still wanted.
    pub(crate) fn failed(&mut self, slot: S, mark: Option<M>) -> bool {
        self.free.push_back((slot, mark));
        self.loading.take().is_some_and(|(_, is_wanted)| is_wanted)
    }

    /// Holds an expert if it is loaded. One that nobody announced is wanted next, and room is made for it.
    pub(crate) fn hold(&mut self, id: ModuleId) -> Option<&T> {
        if !self.loaded.contains_key(&id) {
            if !self.is_loaded_or_loading(id) && !self.wanted.contains(&id) {
                self.wanted.clear();
                self.next_layer = self.layers.len();
                self.wanted.push_front(id);
            }
            if self.free.is_empty() && self.loading.is_none() {
                // Whoever waits for this one does not release the others.
                self.evict(|_| true);
            }
            return None;
        }
        let loaded = self.loaded.get_mut(&id)?;
        loaded.guards += 1;
        Some(&loaded.expert)
    }

    /// Ends one hold of an expert; the last one frees its slot behind `mark`. Returns the slot if it did.
    pub(crate) fn release(&mut self, id: ModuleId, mark: Option<M>) -> Option<&S> {
        let loaded = self.loaded.get_mut(&id)?;
        loaded.guards = loaded.guards.saturating_sub(1);
        if loaded.guards > 0 {
            return None;
        }
        let loaded = self.loaded.remove(&id)?;
        self.free.push_back((loaded.slot, mark));
        self.free.back().map(|(slot, _)| slot)
    }

    /// Number of these experts, counted from the first, that are loaded.
    pub(crate) fn ready(&self, ids: &[ModuleId]) -> usize {
        ids.iter()
            .take_while(|id| self.loaded.contains_key(*id))
            .count()
    }

    fn layer_of(&self, id: ModuleId) -> Option<usize> {
        self.layers.iter().position(|layer| layer.contains(&id))
    }

    /// Whether an expert is loaded or being copied to stay.
    fn is_loaded_or_loading(&mut self, id: ModuleId) -> bool {
        if let Some((loading, is_wanted)) = &mut self.loading
            && *loading == id
        {
            *is_wanted = true;
            return true;
        }
        self.loaded.contains_key(&id)
    }

    /// Frees the slots of experts that nobody holds, and gives up the one that is being copied.
    fn evict(&mut self, is_unwanted: impl Fn(ModuleId) -> bool) {
        if let Some((id, is_wanted)) = &mut self.loading
            && is_unwanted(*id)
        {
            *is_wanted = false;
        }
        let evicted = self
            .loaded
            .extract_if(|id, loaded| loaded.guards == 0 && is_unwanted(*id));
        // Nothing read them, and copies run in order.
        self.free
            .extend(evicted.map(|(_, loaded)| (loaded.slot, None)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(layer: u32, expert: u32) -> ModuleId {
        ModuleId::Expert(layer, expert)
    }

    const ALL: Option<Range<u32>> = Some(0..4);

    /// Two layers of four experts.
    fn ring(slots: usize) -> Ring<usize, u32, u32> {
        let layer = |layer| (0..4).map(|expert| id(layer, expert)).collect();
        let mut ring = Ring::new(vec![layer(1), layer(2)]);
        ring.lengthen((0..slots).collect());
        ring
    }

    /// Loads until the ring has no slot or nothing to load; returns what was loaded.
    fn fill(ring: &mut Ring<usize, u32, u32>) -> Vec<ModuleId> {
        let mut loaded = Vec::new();
        while let Some((id, slot, _)) = ring.next() {
            ring.loaded(slot, 0);
            loaded.push(id);
        }
        loaded
    }

    #[test]
    fn a_pass_that_loads_ahead_takes_all_experts_in_order_while_slots_are_free() {
        let mut ring = ring(3);
        ring.begin(ALL);
        assert_eq!(fill(&mut ring), [id(1, 0), id(1, 1), id(1, 2)]);
        assert!(ring.hold(id(1, 0)).is_some());
        assert_eq!(fill(&mut ring), []);
        ring.release(id(1, 0), Some(7));
        let (next, _, mark) = ring.next().expect("a slot");
        assert_eq!((next, mark), (id(1, 3), Some(7)));
    }

    #[test]
    fn unchosen_experts_are_evict_and_never_loaded_once_the_router_has_spoken() {
        let mut ring = ring(2);
        ring.begin(ALL);
        assert_eq!(fill(&mut ring), [id(1, 0), id(1, 1)]);
        ring.announce(1, &[id(1, 1), id(1, 3)]);
        // Expert 0 made room, 2 is skipped, and the next layer waits for a slot.
        assert_eq!(fill(&mut ring), [id(1, 3)]);
        assert_eq!(ring.ready(&[id(1, 1), id(1, 3)]), 2);
        for expert in [1, 3] {
            assert!(ring.hold(id(1, expert)).is_some());
            ring.release(id(1, expert), None);
        }
        assert_eq!(fill(&mut ring), [id(2, 0), id(2, 1)]);
    }

    #[test]
    fn a_share_of_the_experts_is_loaded_ahead_and_a_layer_that_chose_none_is_passed_over() {
        let mut ring = ring(2);
        ring.begin(Some(2..4));
        assert_eq!(fill(&mut ring), [id(1, 2), id(1, 3)]);
        ring.announce(1, &[]);
        assert_eq!(fill(&mut ring), [id(2, 2), id(2, 3)]);
    }

    #[test]
    fn a_copy_under_way_is_given_up_where_it_was_not_chosen() {
        let mut ring = ring(2);
        ring.begin(ALL);
        let (first, slot, _) = ring.next().expect("a slot");
        assert_eq!(first, id(1, 0));
        ring.announce(1, &[id(1, 2)]);
        ring.loaded(slot, 0);
        assert_eq!(ring.ready(&[first]), 0);
        assert_eq!(fill(&mut ring), [id(1, 2), id(2, 0)]);
    }

    #[test]
    fn a_pass_of_few_rows_loads_what_was_chosen_alone() {
        let mut ring = ring(3);
        ring.begin(None);
        assert_eq!(fill(&mut ring), []);
        ring.announce(2, &[id(2, 1), id(2, 3)]);
        assert_eq!(fill(&mut ring), [id(2, 1), id(2, 3)]);
    }

    #[test]
    fn an_expert_that_nobody_announced_finds_room() {
        let mut ring = ring(2);
        ring.begin(ALL);
        fill(&mut ring);
        assert!(ring.hold(id(2, 3)).is_none());
        assert_eq!(fill(&mut ring), [id(2, 3)]);
        assert!(ring.hold(id(2, 3)).is_some());
    }

    #[test]
    fn a_new_pass_begins_with_empty_slots_but_for_held_ones() {
        let mut ring = ring(2);
        ring.begin(ALL);
        fill(&mut ring);
        assert!(ring.hold(id(1, 1)).is_some());
        ring.begin(ALL);
        assert_eq!(fill(&mut ring), [id(1, 0)]);
    }

    #[test]
    fn a_held_expert_is_not_loaded_a_second_time() {
        let mut ring = ring(3);
        ring.begin(ALL);
        fill(&mut ring);
        assert!(ring.hold(id(1, 1)).is_some());
        ring.begin(ALL);
        assert_eq!(fill(&mut ring), [id(1, 0), id(1, 2)]);
        assert!(ring.hold(id(1, 1)).is_some());
        assert_eq!(ring.release(id(1, 1), None), None);
        assert!(ring.release(id(1, 1), None).is_some());
        assert_eq!(fill(&mut ring), [id(1, 3)]);
    }

    #[test]
    fn an_announced_expert_finds_room_among_those_that_nobody_holds() {
        let mut ring = ring(2);
        ring.begin(None);
        ring.announce(1, &[id(1, 0), id(1, 1)]);
        fill(&mut ring);
        ring.announce(2, &[id(2, 2)]);
        assert_eq!(fill(&mut ring), []);
        assert!(ring.hold(id(2, 2)).is_none());
        assert_eq!(fill(&mut ring), [id(2, 2)]);
    }

    #[test]
    fn slots_that_nothing_is_in_leave_the_ring_and_come_back() {
        let mut ring = ring(4);
        ring.begin(ALL);
        fill(&mut ring);
        assert!(ring.hold(id(1, 2)).is_some());
        assert_eq!(ring.shorten(4), [0; 0], "none is free");
        ring.begin(ALL);
        // The one that is held stays.
        let mut taken = ring.shorten(4);
        taken.sort_unstable();
        assert_eq!((taken, ring.slots()), (vec![0, 1, 3], 1));
        ring.release(id(1, 2), Some(7));
        ring.lengthen(vec![8]);
        assert_eq!(ring.slots(), 2);
        ring.begin(ALL);
        assert_eq!(fill(&mut ring), [id(1, 0), id(1, 1)]);
        let (_, slot, _) = {
            ring.begin(ALL);
            ring.next().expect("a slot")
        };
        assert!(ring.is_loading() && [2, 8].contains(&slot));
    }

    #[test]
    fn a_slot_whose_copy_failed_comes_back_behind_the_same_mark() {
        let mut ring = ring(1);
        ring.begin(ALL);
        fill(&mut ring);
        assert!(ring.hold(id(1, 0)).is_some());
        ring.release(id(1, 0), Some(7));
        let (failed, slot, mark) = ring.next().expect("a slot");
        assert!(ring.failed(slot, mark));
        assert!(ring.hold(failed).is_none());
        let (again, _, mark) = ring.next().expect("a slot");
        assert_eq!((again, mark), (failed, Some(7)));
    }
}
