//! Choice of the modules that stay in memory where all run for every token and not all of them have room.
//!
//! Modules run in a cycle, so that whatever is released after its use is read again a cycle later. If any of them might be
//! released, those that are missing would follow one another: the disk would be idle while the others run, and then
//! computation would wait for each of these. So the same modules stay for good, and those that pass through memory are
//! spread evenly over the cycle: the disk reads the next ones while the ones between them are computed, and, in a ring of
//! stages, while other members compute.

use crate::window::Kind;

/// Modules of the largest size that the passing ones have room for, at least: one runs while the next is read.
const LEAST_PASSING: u64 = 2;

/// Room to read ahead that is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadAhead {
    /// Nothing is read before its turn: to measure what reading ahead gains.
    Never,
    /// Two modules of the largest size.
    #[default]
    Least,
    /// So many bytes, and at least those of two modules of the largest size.
    Bytes(u64),
}

/// Which modules stay; `None` if all fit, if experts are among them, which are needed by chance, or if the budget is too
/// small to keep any. What does not stay passes through the room to read ahead.
pub(crate) fn kept(
    modules: &[(Kind, u64)],
    budget_bytes: u64,
    read_ahead: ReadAhead,
) -> Option<Vec<bool>> {
    let is_expert = |(kind, _): &(Kind, u64)| matches!(kind, Kind::Expert { .. });
    if modules.iter().any(is_expert) {
        return None;
    }
    let of = |wanted: Kind| {
        let modules = modules.iter().filter(move |(kind, _)| *kind == wanted);
        modules.map(|(_, bytes)| *bytes)
    };
    let all_bytes: u64 = of(Kind::Always).sum();
    let largest_bytes = of(Kind::Always).max()?;
    let least_bytes = match read_ahead {
        ReadAhead::Never => largest_bytes,
        ReadAhead::Least | ReadAhead::Bytes(_) => LEAST_PASSING * largest_bytes,
    };
    let passing_bytes = match read_ahead {
        ReadAhead::Never | ReadAhead::Least => least_bytes,
        ReadAhead::Bytes(bytes) => bytes.max(least_bytes),
    };
    let room_bytes = budget_bytes.checked_sub(of(Kind::Head).sum())?;
    if all_bytes <= room_bytes {
        return None;
    }
    if room_bytes < least_bytes {
        return None;
    }
    let staying_bytes = room_bytes.saturating_sub(passing_bytes);
    Some(spread(modules, staying_bytes, all_bytes))
}

/// Spreads the bytes that stay over the modules, in their order.
fn spread(modules: &[(Kind, u64)], staying_bytes: u64, all_bytes: u64) -> Vec<bool> {
    let share = staying_bytes as f64 / all_bytes as f64;
    let mut credit = 0.0;
    let mut left_bytes = staying_bytes;
    let mut kept: Vec<bool> = Vec::with_capacity(modules.len());
    for &(kind, bytes) in modules {
        if kind == Kind::Always {
            credit += share * bytes as f64;
        }
        let stays = match kind {
            Kind::Always => credit >= bytes as f64 && bytes <= left_bytes,
            Kind::Head => true,
            Kind::Sparse | Kind::Expert { .. } => false,
        };
        if stays && kind == Kind::Always {
            credit -= bytes as f64;
            left_bytes -= bytes;
        }
        kept.push(stays);
    }
    // What is left is less than a large module, and may have room for small ones.
    for (kept, &(kind, bytes)) in kept.iter_mut().zip(modules) {
        if kind == Kind::Always && !*kept && bytes <= left_bytes {
            *kept = true;
            left_bytes -= bytes;
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Embedding, `layers` of 10 and 30 bytes, and a head of 50.
    fn dense(layers: usize) -> Vec<(Kind, u64)> {
        let mut modules = vec![(Kind::Sparse, 0)];
        for _ in 0..layers {
            modules.extend([(Kind::Always, 10), (Kind::Always, 30)]);
        }
        modules.push((Kind::Head, 50));
        modules
    }

    fn bytes(modules: &[(Kind, u64)], kept: &[bool], wanted: bool) -> u64 {
        let both = modules.iter().zip(kept);
        let these = both.filter(|(_, kept)| **kept == wanted);
        these.map(|((_, bytes), _)| bytes).sum()
    }

    #[test]
    fn what_stays_is_spread_evenly_and_fits() {
        let modules = dense(16);
        for budget in (110..690).step_by(7) {
            for passing in [0, 60, 150, 400] {
                let kept = kept(&modules, budget, ReadAhead::Bytes(passing)).unwrap();
                let stays = bytes(&modules, &kept, true);
                let room = passing.clamp(60, budget - 50);
                assert!(stays + room <= budget, "{budget} {passing}: {stays} stay");
                assert!(
                    stays + room + 30 > budget,
                    "{budget} {passing}: {stays} stay"
                );
                assert!(kept[33], "the head stays");
                // Of any four layers in a row no more passes than their share and two modules.
                let share = (640 - (stays - 50)) as f64 / 640.0;
                for first in 0..12 {
                    let layers = 1 + 2 * first..1 + 2 * (first + 4);
                    let passes = bytes(&modules[layers.clone()], &kept[layers], false);
                    assert!(
                        passes as f64 <= share * 160.0 + 60.0,
                        "{budget} {passing}: {passes} of {first}.."
                    );
                }
            }
        }
    }

    #[test]
    fn nothing_is_chosen_where_all_fit_or_none_can() {
        let modules = dense(4);
        assert_eq!(kept(&modules, 210, ReadAhead::Least), None, "all fit");
        assert!(kept(&modules, 209, ReadAhead::Least).is_some());
        assert_eq!(
            kept(&modules, 109, ReadAhead::Least),
            None,
            "two modules and the head do not"
        );
        let mut experts = modules;
        experts.push((Kind::Expert { layer: 0 }, 10));
        assert_eq!(kept(&experts, 150, ReadAhead::Least), None);
    }

    #[test]
    fn without_room_for_more_all_pass() {
        let modules = dense(4);
        let kept = kept(&modules, 110, ReadAhead::Least).unwrap();
        assert_eq!(bytes(&modules, &kept, true), 50);
    }
}
