//! The all-gather of a layer's keys and values, beside attention (OSDI '26, section 3.2).
//!
//! A rank has a piece in the first half of each sequence and one in the second. The keys and values of either travel for
//! themselves, and rows wait only for what they see: those of the first piece for the first pieces of the ranks before, while the
//! others are on their way. Each row's sum is over the same keys in the same order as on one rank, so it has the same bits.
//!
//! A piece comes from its rank, or is passed on by one of the same site ([`crate::Sites`]). A rank first takes what comes from
//! elsewhere, which waits for nobody, and then what is passed on to it. It passes on what its first piece sees at once, and all
//! else before its second piece attends: the latest that another one at its site may wait for it. No ranks wait for each other:
//! for its first piece a rank waits only for ranks before it to come so far.

use hearth_kernels::Backend;

use crate::ModelError;
use crate::experts::Check;
use crate::peers::{Exchanged, GroupPass, store};
use crate::shares::Half;

const HALVES: [(Half, Exchanged); 2] = [
    (Half::First, Exchanged::Kv),
    (Half::Second, Exchanged::KvBehind),
];

impl GroupPass {
    /// Begins to copy the keys and values of this rank's rows in a layer to the host; they must be in the cache.
    pub(crate) fn kv_leaves<B: Backend>(
        &self,
        backend: &B,
        (kv, cache_layer): (&B::Kv, usize),
    ) -> Result<LeavingKv<B>, ModelError> {
        let mut leaving = LeavingKv([Vec::new(), Vec::new()]);
        if self.ranks() == 1 {
            return Ok(leaving);
        }
        for ((half, _), copies) in HALVES.into_iter().zip(&mut leaving.0) {
            for span in self.own().pieces(half) {
                let (blocks, start, rows) = (&span.blocks, span.start, span.rows);
                copies.push(backend.kv_read_begin(kv, cache_layer, blocks, start, rows)?);
            }
        }
        Ok(leaving)
    }

    /// Sends them to all others.
    pub(crate) fn send_kv<B: Backend>(
        &self,
        backend: &B,
        leaving: LeavingKv<B>,
        layer: usize,
    ) -> Result<(), ModelError> {
        for ((_, what), copies) in HALVES.into_iter().zip(leaving.0) {
            if copies.is_empty() {
                continue;
            }
            let mut bytes = Vec::new();
            for copy in copies {
                backend.host_copy_wait(&copy)?;
                bytes.extend(backend.host_copy_end(copy)?);
            }
            for to in self.receivers(self.rank()) {
                self.send((layer, what), to, bytes.clone())?;
            }
        }
        Ok(())
    }

    /// Ranks to which this one hands keys and values of the rank `of`.
    fn receivers(&self, of: usize) -> impl Iterator<Item = usize> {
        let others = self.others().filter(move |to| *to != of);
        others.filter(move |to| self.sites().sender(of, *to) == self.rank())
    }

    /// Whether this rank hands keys and values of the rank `of` to others.
    fn passes_on(&self, of: usize) -> bool {
        self.sites().passes_on(self.rank(), of, self.ranks())
    }

    /// What the others send of a layer.
    pub(crate) fn arrivals(&self, layer: usize) -> Arrivals<'_> {
        let of_half = |half| {
            let others = self.others();
            others
                .filter(|rank| self.shares()[*rank].rows_in(half) > 0)
                .collect()
        };
        Arrivals {
            group: self,
            layer,
            awaited: HALVES.map(|(half, _)| of_half(half)),
        }
    }
}

/// Keys and values of this rank's rows in a layer on their way to the host, by half.
pub(crate) struct LeavingKv<B: Backend>([Vec<B::HostCopy>; 2]);

/// Keys and values of other ranks' rows in a layer, which come while this rank computes.
pub(crate) struct Arrivals<'a> {
    group: &'a GroupPass,
    layer: usize,
    /// Ranks whose pieces have not been stored, by half.
    awaited: [Vec<usize>; 2],
}

impl Arrivals<'_> {
    /// Waits for all that this rank's rows in a half see, and stores it.
    pub(crate) fn before<B: Backend>(
        &mut self,
        half: Half,
        backend: &B,
        cached: (&mut B::Kv, usize),
        check: Check<'_>,
    ) -> Result<(), ModelError> {
        let (group, own) = (self.group, (half, self.group.rank()));
        self.take(backend, cached, check, |of, rank| {
            lies_before((of, rank), own) || (half == Half::Second && group.passes_on(rank))
        })
    }

    /// Waits for all the rest, and stores it.
    pub(crate) fn all<B: Backend>(
        mut self,
        backend: &B,
        cached: (&mut B::Kv, usize),
        check: Check<'_>,
    ) -> Result<(), ModelError> {
        self.take(backend, cached, check, |_, _| true)
    }

    fn take<B: Backend>(
        &mut self,
        backend: &B,
        (kv, cache_layer): (&mut B::Kv, usize),
        check: Check<'_>,
        is_wanted: impl Fn(Half, usize) -> bool,
    ) -> Result<(), ModelError> {
        let token_bytes = backend.kv_layout(kv).token_layer_bytes();
        let (group, own) = (self.group, self.group.rank());
        for is_passed_on in [false, true] {
            for ((half, what), awaited) in HALVES.into_iter().zip(&mut self.awaited) {
                let is_next = |of: &usize| {
                    is_wanted(half, *of) && (group.sites().sender(*of, own) != *of) == is_passed_on
                };
                let (next, later): (Vec<usize>, Vec<usize>) =
                    awaited.iter().partition(|of| is_next(of));
                *awaited = later;
                for of in next {
                    let share = &group.shares()[of];
                    let want = share.rows_in(half) * token_bytes;
                    let (at, ways) = ((self.layer, what), (of, group.sites().sender(of, own)));
                    let bytes = group.receive_of(at, ways, Some(want), check)?;
                    for to in group.receivers(of) {
                        group.pass_on(at, (of, to), bytes.clone())?;
                    }
                    store(backend, (&mut *kv, cache_layer), share.pieces(half), &bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// Whether a rank's piece of a half lies before another one's ([`crate::shares::zig_zag`]): the first halves are cut in the
/// order of the ranks, the second ones in the reverse order.
fn lies_before((half, rank): (Half, usize), (of_half, of_rank): (Half, usize)) -> bool {
    match (half, of_half) {
        (Half::First, Half::First) => rank < of_rank,
        (Half::First, Half::Second) => true,
        (Half::Second, Half::First) => false,
        (Half::Second, Half::Second) => rank > of_rank,
    }
}

#[cfg(test)]
mod tests {
    use hearth_kernels::Span;

    use super::*;
    use crate::shares::{Share, zig_zag};

    #[test]
    fn rows_wait_for_the_pieces_that_they_see_and_no_others() {
        let start = |share: &Share, half| share.pieces(half).next().map(|span| span.start);
        for ranks in 1..9 {
            let whole = Span {
                first_row: 0,
                rows: 160,
                start: 7,
                blocks: Vec::new(),
            };
            let shares = zig_zag(&[whole], ranks);
            let halves = HALVES.map(|(half, _)| half);
            let pieces = |rank| halves.map(|half| (half, rank));
            let pieces: Vec<(Half, usize)> = (0..ranks).flat_map(pieces).collect();
            for one in &pieces {
                for other in &pieces {
                    let [begin, of] = [one, other].map(|(half, rank)| start(&shares[*rank], *half));
                    assert_eq!(lies_before(*one, *other), begin < of, "{one:?} {other:?}");
                }
            }
        }
    }
}
