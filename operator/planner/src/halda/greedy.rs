//! Splits without the solver: layers go one by one to the slot where they cost least, then move between slots while that
//! helps.
//!
//! It starts each integer program, stands in where the solver fails or its limit is reached, and is all that rings get
//! which are only compared.

use std::cmp::Reverse;
use std::ops::RangeInclusive;

use super::round::{Cost, Round};
use crate::ring_problem::Problem;

/// Most passes over all pairs of slots.
const MAX_PASSES: usize = 64;
/// Slots of which two moves at once are tried in any case.
const FEW_SLOTS: usize = 8;
/// The same of a split that breaks limits of memory.
const MANY_SLOTS: usize = 12;

/// How long moves are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moves {
    /// One at a time: for splits that are only compared.
    Single,
    /// Then two at once where slots are few, or not too many and limits of memory are broken.
    Double,
}

/// Sizes of the slots and their cost. The cost may break limits of memory: then nothing that fits was found.
pub(super) fn split(round: &Round, moves: Moves) -> (Vec<usize>, Cost) {
    let ring = round.ring;
    let mut sizes = vec![0; ring.slots.len()];
    // Each device of the ring has a layer at least, on its GPU if one has room there.
    for place in 0..ring.len() {
        let slots = ring.first_slot(place)..=ring.cpu_slots[place];
        add_cheapest(round, &mut sizes, slots);
    }
    for _ in ring.len()..round.width {
        let slots = 0..=sizes.len() - 1;
        add_cheapest(round, &mut sizes, slots);
    }
    improve(round, sizes, moves)
}

/// Devices and sizes of their slots in one round, each with as many layers as it has room for, the largest rooms first behind the
/// head: where all layers are alike, there is one if any ring fits.
pub(super) fn by_room(problem: &Problem) -> Option<(Vec<usize>, Vec<usize>)> {
    let mut others: Vec<usize> = (1..problem.devices.len()).collect();
    others.sort_by_key(|&device| Reverse(problem.end_by_room(device, 0).1));
    let (mut order, mut sizes, mut first) = (Vec::new(), Vec::new(), 0);
    for device in std::iter::once(0).chain(others) {
        let (on_gpu, end) = problem.end_by_room(device, first);
        if end == first {
            continue;
        }
        order.push(device);
        if problem.devices[device].gpu.is_some() {
            sizes.push(on_gpu - first);
        }
        sizes.push(end - on_gpu);
        first = end;
    }
    (order.first() == Some(&0) && first == problem.layers.len()).then_some((order, sizes))
}

/// Adds a layer to the slot of `slots` where it costs least; the first of equal ones.
fn add_cheapest(round: &Round, sizes: &mut [usize], slots: RangeInclusive<usize>) {
    let mut best: Option<(usize, Cost)> = None;
    for slot in slots {
        sizes[slot] += 1;
        let cost = round.cost(sizes);
        sizes[slot] -= 1;
        if best.is_none_or(|best| cost.is_below(best.1)) {
            best = Some((slot, cost));
        }
    }
    if let Some((slot, _)) = best {
        sizes[slot] += 1;
    }
}

/// Moves layers between two slots as long as the cost falls, ever fewer at a time.
pub(super) fn improve(round: &Round, mut sizes: Vec<usize>, moves: Moves) -> (Vec<usize>, Cost) {
    let mut cost = round.cost(&sizes);
    let mut count = (round.width / 4).max(1);
    for _ in 0..MAX_PASSES {
        let before = cost;
        for (from, to) in pairs(sizes.len()) {
            if !shift(round, &mut sizes, from, to, count) {
                continue;
            }
            if let Some(next) = round.cost_below(&sizes, cost) {
                cost = next;
            } else {
                sizes[from] += count;
                sizes[to] -= count;
            }
        }
        if count == 1 && !cost.is_below(before) {
            let moved = match moves {
                Moves::Single => None,
                Moves::Double => move_twice(round, &sizes, cost),
            };
            match moved {
                Some(moved) => (sizes, cost) = moved,
                None => break,
            }
        }
        count = (count / 2).max(1);
    }
    (sizes, cost)
}

/// The first two moves of one layer each that together lower the cost.
fn move_twice(round: &Round, sizes: &[usize], cost: Cost) -> Option<(Vec<usize>, Cost)> {
    let most_slots = match cost.fits() {
        true => FEW_SLOTS,
        false => MANY_SLOTS,
    };
    if sizes.len() > most_slots {
        return None;
    }
    let slots = sizes.len();
    let mut sizes = sizes.to_vec();
    let mut done = vec![false; slots * slots];
    for once in pairs(slots) {
        if !shift(round, &mut sizes, once.0, once.1, 1) {
            continue;
        }
        for twice in pairs(slots) {
            // After one that was the first, both the other way round are the same.
            if done[twice.0 * slots + twice.1] {
                continue;
            }
            if shift(round, &mut sizes, twice.0, twice.1, 1) {
                if let Some(next) = round.cost_below(&sizes, cost) {
                    return Some((sizes, next));
                }
                sizes[twice.0] += 1;
                sizes[twice.1] -= 1;
            }
        }
        sizes[once.0] += 1;
        sizes[once.1] -= 1;
        done[once.0 * slots + once.1] = true;
    }
    None
}

/// All ordered pairs of two of `count`.
pub(super) fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let all = (0..count).flat_map(move |from| (0..count).map(move |to| (from, to)));
    all.filter(|(from, to)| from != to)
}

/// Moves `count` layers, unless a slot has not as many or a device would be left without any. Whether it did.
fn shift(round: &Round, sizes: &mut [usize], from: usize, to: usize, count: usize) -> bool {
    if sizes[from] < count {
        return false;
    }
    sizes[from] -= count;
    sizes[to] += count;
    let place = round.ring.slots[from].place;
    if sizes[from] > 0 || round.ring.has_layer(sizes, place) {
        return true;
    }
    sizes[from] += count;
    sizes[to] -= count;
    false
}
