//! What both ways of running experts on several ranks need: how choices and rows travel, and the experts of a rank.

use std::ops::Range;

use hearth_kernels::{Backend, Routing};

use super::Check;
use crate::peers::{Exchanged, GroupPass};
use crate::wire::{to_bytes, values};
use crate::{ExpertShare, ModelError};

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
    let own = ExpertShare::of(rank, group.ranks()).experts(experts);
    move |expert| own.contains(&expert)
}

/// Rows of all ranks on the device, `[rows, hidden]`: `own`, if this rank has any, and those that the others send in exchange
/// `at`. `firsts`: index of each rank's first row, and behind them the number of rows. `None` if there are none.
pub(super) fn collected<B: Backend>(
    backend: &B,
    group: &GroupPass,
    at: (usize, Exchanged),
    (firsts, hidden): (&[usize], usize),
    own: Option<&B::Tensor>,
    check: Check<'_>,
) -> Result<Option<B::Tensor>, ModelError> {
    let rows = firsts.last().copied().unwrap_or(0);
    let mut all = match rows {
        0 => None,
        _ => Some(backend.zeros(rows, hidden)?),
    };
    if let (Some(all), Some(own)) = (&mut all, own) {
        backend.put_tile(all, (firsts[group.rank()], 0), own)?;
    }
    for from in group.others() {
        let sent = firsts[from + 1] - firsts[from];
        let bytes = group.receive(at, from, Some(4 * hidden * sent), check)?;
        if let Some(all) = all.as_mut().filter(|_| sent > 0) {
            let values: Vec<f32> = values(&bytes).collect();
            let tile = backend.upload(sent, hidden, &values)?;
            backend.put_tile(all, (firsts[from], 0), &tile)?;
        }
    }
    Ok(all)
}

/// Some consecutive rows of `all` `[rows, hidden]`, on the device.
pub(super) fn rows_of<B: Backend>(
    backend: &B,
    all: &B::Tensor,
    rows: Range<usize>,
) -> Result<B::Tensor, ModelError> {
    let picked: Vec<u32> = rows.map(|row| row as u32).collect();
    Ok(backend.rows(all, &picked)?)
}

/// The same as bytes for another rank; none where there are none.
pub(super) fn bytes_of<B: Backend>(
    backend: &B,
    all: &B::Tensor,
    rows: Range<usize>,
) -> Result<Vec<u8>, ModelError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let rows = rows_of(backend, all, rows)?;
    Ok(to_bytes(&backend.download(&rows)?))
}
