//! What `multipleOf` may be: the library counts remainders in 32 bits, and neither tells nor bears it when they are too few.

use serde_json::Value;

use super::{Part, place};

/// Most decimals.
const MAX_DECIMALS: u32 = 8;
/// Largest divisor without its decimal point: ten times it, and nine in the place of the first decimal, are below 2³².
const MAX_DIVISOR: u64 = 300_000_000;
/// Members that hold together with a schema, or may.
const TOGETHER: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// A divisor as a whole number of units of 10 to the power of minus `decimals`.
#[derive(Clone, Copy)]
struct Divisor {
    units: u64,
    decimals: u32,
}

/// What is wrong with a `multipleOf`, or with those that hold together.
pub(super) fn excess(parts: &[Part<'_>]) -> Option<String> {
    let mut divisors = Vec::with_capacity(parts.len());
    for part in parts {
        match divisor(part) {
            Ok(divisor) => divisors.push(divisor),
            Err(problem) => return Some(problem),
        }
    }
    if divisors.iter().flatten().count() < 2 {
        return None;
    }
    let mut seen_from = vec![usize::MAX; parts.len()];
    for (root, part) in parts.iter().enumerate() {
        let mut common: Option<Divisor> = None;
        let mut next = vec![root];
        while let Some(index) = next.pop() {
            if std::mem::replace(&mut seen_from[index], root) == root {
                continue;
            }
            if let Some(divisor) = divisors[index] {
                common = match common.map_or(Some(divisor), |common| multiple(common, divisor)) {
                    Some(multiple) => Some(multiple),
                    None => {
                        return Some(format!(
                            "{}its 'multipleOf' and those of its choices and references, multiplied, are beyond {MAX_DIVISOR}, which is as far as can be followed: leave some out",
                            place(&part.path)
                        ));
                    }
                };
            }
            next.extend(parts[index].target);
            let within = TOGETHER.iter();
            next.extend(
                within.flat_map(|word| parts[index].children_of(word).map(|child| child.index)),
            );
        }
    }
    None
}

/// The divisor of a part, if it has one.
///
/// # Errors
/// What is wrong with it.
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
    // As the library does it: decimals are shifted away until none is left.
    let (mut units, mut decimals) = (number, 0);
    while units.fract() != 0.0 && decimals <= MAX_DECIMALS {
        units *= 10.0;
        decimals += 1;
    }
    if decimals > MAX_DECIMALS || units > MAX_DIVISOR as f64 {
        return Err(format!(
            "{at}'multipleOf' is {}, and up to {MAX_DIVISOR} can be followed, not counting the decimal point, with {MAX_DECIMALS} decimals at most: leave it out",
            shown(value)
        ));
    }
    Ok(Some(Divisor {
        units: units as u64,
        decimals,
    }))
}

/// The least common multiple; `None` where the library, which multiplies first, would go beyond its numbers.
fn multiple(left: Divisor, right: Divisor) -> Option<Divisor> {
    let decimals = left.decimals.max(right.decimals);
    let scaled = |divisor: Divisor| divisor.units * 10_u64.pow(decimals - divisor.decimals);
    let (left, right) = (scaled(left), scaled(right));
    let product = left.checked_mul(right)?;
    (product <= MAX_DIVISOR).then(|| Divisor {
        units: product / greatest_common_divisor(left, right),
        decimals,
    })
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
