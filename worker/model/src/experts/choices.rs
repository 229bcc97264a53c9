//! What both ways of running experts on several ranks need: how choices and rows travel, and the experts of a rank.

use std::collections::VecDeque;
use std::ops::Range;

use hearth_kernels::{Backend, Routing};

use super::Check;
use crate::peers::{Exchanged, GroupPass};
use crate::wire::values;
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

/// Rows of a message from which on it is two.
const TWO_FROM_ROWS: usize = 8;

/// The messages in which a rank's rows travel, one after the other: while the second half leaves one device, the first is on its
/// way to the other. One that is empty where there are no rows.
pub(super) fn messages(rows: Range<usize>) -> Vec<Range<usize>> {
    let middle = rows.start + rows.len() / 2;
    match rows.len() < TWO_FROM_ROWS {
        true => vec![rows],
        false => vec![rows.start..middle, middle..rows.end],
    }
}

/// What a rank sends in an exchange.
pub(super) struct Outgoing<'a> {
    /// Rows for another rank.
    pub(super) rows: &'a dyn Fn(usize) -> Range<usize>,
    /// Sends it one message of them.
    pub(super) send: &'a mut dyn FnMut(usize, Range<usize>) -> Result<(), ModelError>,
}

/// Sends and receives all messages of an exchange in turns: each rank sends its n-th successor a message when that one waits for it,
/// so that rows come while others leave, and nobody waits for one who waits. `of`: rows of another rank that come from it.
pub(super) fn exchange(
    group: &GroupPass,
    outgoing: Outgoing<'_>,
    of: impl Fn(usize) -> Range<usize>,
    mut receive: impl FnMut(usize, Range<usize>) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let others: Vec<usize> = group.others().collect();
    for message in 0..2 {
        let nth = |rows: Range<usize>| messages(rows).into_iter().nth(message);
        for (to, from) in others.iter().zip(others.iter().rev()) {
            if let Some(rows) = nth((outgoing.rows)(*to)) {
                (outgoing.send)(*to, rows)?;
            }
            if let Some(rows) = nth(of(*from)) {
                receive(*from, rows)?;
            }
        }
    }
    Ok(())
}

/// Memory on the device for rows of all ranks, `[rows, hidden]`, of which `rows` and `hidden` are told here; `None` if there
/// are none. Taken before what is computed while the others' rows travel, it waits for none of that.
pub(super) fn room<B: Backend>(
    backend: &B,
    (rows, hidden): (usize, usize),
) -> Result<Option<B::Incoming>, ModelError> {
    Ok(match rows {
        0 => None,
        _ => Some(backend.rows_write_begin(rows, hidden)?),
    })
}

/// Fills the room with rows of all ranks → `[rows, hidden]`: `own`, if this rank has any, and those that the others send in
/// exchange `at`, while this one sends what is `outgoing`. `firsts`: index of each rank's first row, and behind them the number
/// of rows.
pub(super) fn collected<B: Backend>(
    backend: &B,
    (group, at): (&GroupPass, (usize, Exchanged)),
    (firsts, hidden): (&[usize], usize),
    (mut room, own): (Option<B::Incoming>, Option<&B::Tensor>),
    outgoing: Outgoing<'_>,
    check: Check<'_>,
) -> Result<Option<B::Tensor>, ModelError> {
    let of = |rank: usize| firsts[rank]..firsts[rank + 1];
    exchange(group, outgoing, of, |from, rows| {
        let bytes = group.receive(at, from, Some(4 * hidden * rows.len()), check)?;
        if let Some(room) = room.as_mut().filter(|_| !rows.is_empty()) {
            let values: Vec<f32> = values(&bytes).collect();
            backend.rows_write(room, rows.start, &values)?;
        }
        Ok(())
    })?;
    let Some(room) = room else {
        return Ok(None);
    };
    let mut all = backend.rows_write_end(room)?;
    if let Some(own) = own {
        backend.put_tile(&mut all, (firsts[group.rank()], 0), own)?;
    }
    Ok(Some(all))
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

/// Begins to copy the rows of `all` `[rows, hidden]` of each other rank to the host, in the order in which their messages are
/// sent. `firsts`: index of each rank's first row, and behind them the number of rows.
pub(super) fn leaving<B: Backend>(
    backend: &B,
    group: &GroupPass,
    firsts: &[usize],
    all: &B::Tensor,
) -> Result<VecDeque<B::HostCopy>, ModelError> {
    let mut copies = VecDeque::new();
    for message in 0..2 {
        for to in group.others() {
            let rows = messages(firsts[to]..firsts[to + 1])
                .into_iter()
                .nth(message);
            if let Some(rows) = rows {
                copies.push_back(backend.rows_read_begin(all, rows)?);
            }
        }
    }
    Ok(copies)
}

/// Waits for bytes on their way to the host.
pub(super) fn landed<B: Backend>(backend: &B, copy: B::HostCopy) -> Result<Vec<u8>, ModelError> {
    backend.host_copy_wait(&copy)?;
    Ok(backend.host_copy_end(copy)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_all_rows_in_order_and_one_if_they_are_few() {
        for count in 0..40 {
            let rows = 3..3 + count;
            let messages = messages(rows.clone());
            let together: Vec<usize> = messages.iter().cloned().flatten().collect();
            assert!(together.into_iter().eq(rows), "{messages:?}");
            let want = 1 + usize::from(count >= TWO_FROM_ROWS);
            assert_eq!(messages.len(), want, "{messages:?}");
        }
    }
}
