//! Limits on `multipleOf`. The library visits all remainders of a divisor, which takes a gigabyte for a million of
//! them, and counts them in 32 bits, which wrap silently.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{DEFINITIONS, Part, place};

/// Maximum number of decimals.
const MAX_DECIMALS: u32 = 8;
/// Largest divisor without its decimal point: ten times it, plus nine in place of the first decimal, is below 2³².
const MAX_UNITS: u64 = 300_000_000;
/// Maximum number of remainders of one divisor.
const MAX_REMAINDERS: u64 = 10_000;
/// Maximum number of remainders of all divisors of a schema.
const MAX_REMAINDERS_OF_ALL: u64 = 20_000;
/// Members whose schemas describe the same value as the schema that has them.
const TOGETHER: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// A divisor as a whole number of units of 10 to the power of minus `decimals`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Divisor {
    units: u64,
    decimals: u32,
}

impl Divisor {
    /// Number of remainders that are visited: for a power of ten, no more than it has digits.
    fn remainders(self) -> u64 {
        match self.is_power_of_ten() {
            true => u64::from(self.units.ilog10()) + 1,
            false => self.units,
        }
    }

    fn is_power_of_ten(self) -> bool {
        self.units == 10_u64.pow(self.units.max(1).ilog10())
    }

    fn can_be_followed(self) -> bool {
        self.units <= MAX_UNITS && self.remainders() <= MAX_REMAINDERS
    }
}

/// Describes the problem with a `multipleOf`, or with several that hold together.
pub(super) fn excess(parts: &[Part<'_>]) -> Option<String> {
    let mut divisors = Vec::with_capacity(parts.len());
    for part in parts {
        match divisor(part) {
            Ok(divisor) => divisors.push(divisor),
            Err(problem) => return Some(problem),
        }
    }
    let mut distinct: BTreeSet<Divisor> = divisors.iter().flatten().copied().collect();
    if distinct.is_empty() {
        return None;
    }
    let mut walk = Walk {
        parts,
        divisors: &divisors,
        seen_from: vec![usize::MAX; parts.len()],
        alternatives: BTreeMap::new(),
    };
    for root in 0..parts.len() {
        match walk.common(root) {
            Ok(common) => distinct.extend(common),
            Err(problem) => return Some(problem),
        }
    }
    let remainders = distinct.iter().map(|divisor| divisor.remainders());
    let states = walk.alternatives.values().copied();
    (remainders.chain(states).sum::<u64>() > MAX_REMAINDERS_OF_ALL).then(|| {
        format!(
            "the different values of its 'multipleOf', and the least common multiples of those that hold together, are more than {MAX_REMAINDERS_OF_ALL} together, not counting decimal points, and as much can be followed: leave some out"
        )
    })
}

/// Search for the divisors that the library may combine into one.
struct Walk<'w, 's> {
    parts: &'w [Part<'s>],
    divisors: &'w [Option<Divisor>],
    /// Last root from which each part was seen.
    seen_from: Vec<usize>,
    /// Divisors of standalone alternatives whose common multiple is not decisive, each with its number of states.
    alternatives: BTreeMap<Vec<Divisor>, u64>,
}

impl Walk<'_, '_> {
    /// Returns the least common multiple of what holds together at a part: of the divisors at the same place and,
    /// where several schemas are merged there, of all within them, since their items and properties are merged as
    /// well. Alternatives of a standalone choice are not merged but become one regular expression, whose states are
    /// the combinations of their remainders: at most the multiple, and at most the product of their numbers.
    ///
    /// # Errors
    /// A description of the problem if it is too large.
    fn common(&mut self, root: usize) -> Result<Option<Divisor>, String> {
        let parts = self.parts;
        let is_merged = merges(&parts[root]);
        let mut found = Vec::new();
        let mut is_repeated = false;
        let mut next = vec![root];
        while let Some(index) = next.pop() {
            if std::mem::replace(&mut self.seen_from[index], root) == root {
                is_repeated = true;
                continue;
            }
            if let Some(divisor) = self.divisors[index] {
                is_repeated |= !found.is_empty();
                found.push(divisor);
            }
            next.extend(parts[index].target);
            let children = parts[index].children.iter();
            let within = children.filter(|child| match is_merged {
                true => !DEFINITIONS.contains(&child.word),
                false => TOGETHER.contains(&child.word),
            });
            next.extend(within.map(|child| child.index));
        }
        let Some((first, others)) = found.split_first() else {
            return Ok(None);
        };
        let common = others
            .iter()
            .try_fold(*first, |common, divisor| multiple(common, *divisor));
        // A power of ten that other divisors produce, as 8 and 125 do, has all its remainders.
        let is_made = |common: Divisor| {
            common.is_power_of_ten() && !found.iter().all(|divisor| divisor.is_power_of_ten())
        };
        if !is_merged && common.is_none_or(is_made) {
            let most = common.map_or(u64::MAX, |common| common.units);
            found.sort_unstable();
            found.dedup();
            let states = combinations(&found).min(most);
            if states > MAX_REMAINDERS {
                return Err(self.beyond(root));
            }
            self.alternatives.insert(found, states);
            return Ok(None);
        }
        let common = common.ok_or_else(|| self.beyond(root))?;
        // The library multiplies in any order, and multiplies multiples with each other.
        let is_too_large = |common: Divisor| common.units > MAX_REMAINDERS;
        if is_merged && is_repeated && is_too_large(common) {
            return Err(self.beyond(root));
        }
        Ok(Some(common))
    }

    fn beyond(&self, root: usize) -> String {
        format!(
            "{}its 'multipleOf' and those of its choices, references and, where several schemas are merged, of all within them have a least common multiple beyond {MAX_REMAINDERS}, and up to it can be followed: leave some out",
            place(&self.parts[root].path)
        )
    }
}

/// Whether the library merges several schemas at a part: its own members, those of each schema in its `allOf`, of the
/// target of its reference, and of one alternative of each choice; or properties by name and by pattern.
fn merges(part: &Part<'_>) -> bool {
    let has = |word: &str| part.children_of(word).next().is_some();
    let is_own = |word: &str| !TOGETHER.contains(&word) && !DEFINITIONS.contains(&word);
    let has_own = !part.schema["multipleOf"].is_null()
        || part.children.iter().any(|child| is_own(child.word));
    let merged = part.children_of("allOf").count()
        + [has_own, has("anyOf"), has("oneOf"), part.target.is_some()]
            .into_iter()
            .filter(|is_there| *is_there)
            .count();
    merged > 1 || has("properties") && has("patternProperties")
}

/// Number of combinations of remainders.
fn combinations(divisors: &[Divisor]) -> u64 {
    let remainders = divisors.iter().map(|divisor| divisor.remainders());
    remainders.fold(1, u64::saturating_mul)
}

/// Returns the divisor of a part, if it has one.
///
/// # Errors
/// A description of the problem with it.
fn divisor(part: &Part<'_>) -> Result<Option<Divisor>, String> {
    let value = &part.schema["multipleOf"];
    if value.is_null() {
        return Ok(None);
    }
    let at = place(&part.path);
    let number = value.as_f64().filter(|number| *number > 0.0);
    let Some(number) = number else {
        return Err(format!(
            "{at}'multipleOf' is {}: it must be a number greater than 0",
            shown(value)
        ));
    };
    // As in the library, decimals are shifted away until none is left.
    let (mut units, mut decimals) = (number, 0);
    while units.fract() != 0.0 && decimals <= MAX_DECIMALS {
        units *= 10.0;
        decimals += 1;
    }
    let divisor = Divisor {
        units: units as u64,
        decimals,
    };
    let written = value.to_string();
    let digits = written.replace('.', "").parse::<u64>();
    if decimals > MAX_DECIMALS && digits.is_ok_and(|digits| digits <= MAX_REMAINDERS) {
        return Err(format!(
            "{at}'multipleOf' is {}, which is not exact in binary arithmetic and cannot be followed: leave it out, or ask for an integer in smaller units",
            shown(value)
        ));
    }
    if decimals > MAX_DECIMALS || !divisor.can_be_followed() {
        return Err(format!(
            "{at}'multipleOf' is {}, and up to {MAX_REMAINDERS} can be followed, not counting the decimal point, or a power of ten, with {MAX_DECIMALS} decimals at most: leave it out",
            shown(value)
        ));
    }
    Ok(Some(divisor))
}

/// Returns the least common multiple; `None` if the library, which multiplies first, would overflow.
fn multiple(left: Divisor, right: Divisor) -> Option<Divisor> {
    let decimals = left.decimals.max(right.decimals);
    let scaled = |divisor: Divisor| divisor.units * 10_u64.pow(decimals - divisor.decimals);
    let (left, right) = (scaled(left), scaled(right));
    let product = left.checked_mul(right)?;
    let common = Divisor {
        units: product / greatest_common_divisor(left, right),
        decimals,
    };
    (product <= MAX_UNITS && common.can_be_followed()).then_some(common)
}

fn greatest_common_divisor(left: u64, right: u64) -> u64 {
    match right {
        0 => left,
        right => greatest_common_divisor(right, left % right),
    }
}

fn shown(value: &Value) -> String {
    crate::wire::clip(&value.to_string(), 60)
}
