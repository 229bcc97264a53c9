//! What both ways of running experts on several ranks need: how choices and rows travel, and the experts of a rank.

use hearth_kernels::Routing;

use crate::peers::GroupPass;
use crate::{ModelError, shares};

/// Bytes of a choice: the expert, then its weight.
const CHOICE_BYTES: usize = 8;

/// Choices as bytes.
pub(super) fn choices_to_bytes(choices: impl Iterator<Item = (u32, f32)>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(CHOICE_BYTES * choices.size_hint().0);
    for (expert, weight) in choices {
        bytes.extend(expert.to_le_bytes());
        bytes.extend(weight.to_le_bytes());
    }
    bytes
}

/// Experts and weights that `from` sent, of a layer with `experts` experts, all of which `is_right`.
///
/// # Errors
/// [`ModelError::Group`] if they are none: the sender does not do as it should.
pub(super) fn choices(
    group: &GroupPass,
    from: usize,
    bytes: &[u8],
    is_right: impl Fn(usize) -> bool,
) -> Result<(Vec<u32>, Vec<f32>), ModelError> {
    let (choices, rest) = bytes.as_chunks::<CHOICE_BYTES>();
    let mut read = (Vec::new(), Vec::new());
    for [a, b, c, d, weight @ ..] in choices {
        let expert = u32::from_le_bytes([*a, *b, *c, *d]);
        if !is_right(expert as usize) {
            return Err(group.accuse(from, format!("it sent a choice of expert {expert}")));
        }
        read.0.push(expert);
        read.1.push(f32::from_le_bytes(*weight));
    }
    match rest.is_empty() {
        true => Ok(read),
        false => Err(group.accuse(from, format!("it sent {} bytes of choices", bytes.len()))),
    }
}

/// A router's choice by choice: expert and weight.
pub(super) fn each_choice(routing: &Routing) -> impl Iterator<Item = (u32, f32)> {
    let weights = routing.weights.iter().copied();
    routing.experts.iter().copied().zip(weights)
}

/// Whether an expert is one of a rank's.
pub(super) fn is_of(group: &GroupPass, rank: usize, experts: usize) -> impl Fn(usize) -> bool {
    let own = shares::experts_of(rank, group.ranks(), experts);
    move |expert| own.contains(&expert)
}
