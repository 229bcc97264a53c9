//! How much modules were used of late, and which of those that may give way was used least.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};

use hearth_model::ModuleId;

/// Uses of modules, of which each counts half after a half-life.
///
/// All of them cool alike, so the order of two modules changes only when one of them is used. What is kept is therefore the
/// logarithm of a module's uses less their cooling since the beginning, and the coldest is found without a look at the others.
pub(crate) struct Heat {
    warmth: HashMap<ModuleId, Warmth>,
    /// Modules that may give way, by warmth; ids break ties, so that a choice depends on no map's order.
    idle: BTreeSet<(Warmth, ModuleId)>,
    /// Time that has passed, in half-lives.
    now: f64,
    /// Half-lives from one look at a layer to the next.
    step: f64,
}

/// A measure of uses that orders modules; of those never used the least.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Warmth(f64);

impl Warmth {
    const NONE: Self = Self(f64::NEG_INFINITY);
}

impl Ord for Warmth {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Warmth {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Warmth {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Warmth {}

impl Heat {
    /// Uses that count half after `half_life` calls of [`Heat::used`].
    pub(crate) fn new(half_life: f64) -> Self {
        Self {
            warmth: HashMap::new(),
            idle: BTreeSet::new(),
            now: 0.0,
            step: 1.0 / half_life,
        }
    }

    /// Notes one use of each of these modules.
    pub(crate) fn used(&mut self, ids: &[ModuleId]) {
        self.now += self.step;
        for &id in ids {
            let before = self.of(id);
            let uses = (before.0 - self.now).exp2() + 1.0;
            let after = Warmth(uses.log2() + self.now);
            self.warmth.insert(id, after);
            if self.idle.remove(&(before, id)) {
                self.idle.insert((after, id));
            }
        }
    }

    /// Warmth of a module.
    pub(crate) fn of(&self, id: ModuleId) -> Warmth {
        self.warmth.get(&id).copied().unwrap_or(Warmth::NONE)
    }

    /// Lets a module give way, or no longer.
    pub(crate) fn set_idle(&mut self, id: ModuleId, is_idle: bool) {
        let entry = (self.of(id), id);
        match is_idle {
            true => self.idle.insert(entry),
            false => self.idle.remove(&entry),
        };
    }

    /// The coldest module that may give way.
    pub(crate) fn coldest(&self) -> Option<(ModuleId, Warmth)> {
        self.idle.first().map(|(warmth, id)| (*id, *warmth))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HALF_LIFE: f64 = 8.0;

    /// The same by its definition: every use with its age.
    #[derive(Default)]
    struct Plain {
        uses: HashMap<u32, Vec<u32>>,
        idle: BTreeSet<u32>,
        now: u32,
    }

    impl Plain {
        fn heat(&self, expert: u32) -> f64 {
            let uses = self.uses.get(&expert).into_iter().flatten();
            uses.map(|&at| (-f64::from(self.now - at) / HALF_LIFE).exp2())
                .sum()
        }
    }

    fn id(expert: u32) -> ModuleId {
        ModuleId::Expert(0, expert)
    }

    proptest! {
        #[test]
        fn the_coldest_is_the_one_whose_uses_weigh_least(
            moves in prop::collection::vec((0..3_u8, prop::collection::btree_set(0..12_u32, 1..5)), 1..200),
        ) {
            let (mut heat, mut plain) = (Heat::new(HALF_LIFE), Plain::default());
            for (kind, experts) in moves {
                match kind {
                    0 => {
                        plain.now += 1;
                        experts.iter().for_each(|e| plain.uses.entry(*e).or_default().push(plain.now));
                        heat.used(&experts.iter().map(|e| id(*e)).collect::<Vec<_>>());
                    }
                    _ => for expert in experts {
                        heat.set_idle(id(expert), kind == 1);
                        match kind {
                            1 => plain.idle.insert(expert),
                            _ => plain.idle.remove(&expert),
                        };
                    },
                }
                let least = plain.idle.iter().map(|e| plain.heat(*e)).min_by(f64::total_cmp);
                let got = heat.coldest();
                prop_assert_eq!(got.is_some(), least.is_some());
                if let (Some((ModuleId::Expert(_, expert), _)), Some(least)) = (got, least) {
                    prop_assert!(plain.idle.contains(&expert));
                    // Equal but for rounding.
                    let of_got = plain.heat(expert);
                    prop_assert!(of_got <= least * (1.0 + 1e-9), "{of_got} and {least}");
                }
            }
        }
    }

    #[test]
    fn modules_that_were_never_used_go_first_by_id() {
        let mut heat = Heat::new(HALF_LIFE);
        for expert in [3, 2, 1] {
            heat.set_idle(id(expert), true);
        }
        heat.used(&[id(1)]);
        assert_eq!(heat.coldest().map(|(id, _)| id), Some(id(2)));
        heat.used(&[id(2), id(3)]);
        assert_eq!(heat.coldest().map(|(id, _)| id), Some(id(1)));
        assert!(heat.of(id(1)) < heat.of(id(2)) && heat.of(id(9)) < heat.of(id(1)));
    }
}
