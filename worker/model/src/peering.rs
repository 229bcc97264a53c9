//! A model's peers, and which of its passes they compute with it.
//!
//! Followers compute nothing but shares of passes. A head may have what it needs to compute a pass alone: it does so where it
//! is asked to, where the group is not complete, and where its peers lack keys and values that the pass needs.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::expert_sum::LEAVES;
use hearth_kernels::{Backend, BlockId, Span};

use crate::experts::{Ep, Experts, SmallEp};
use crate::{ModelError, Peers, Residency};

/// How experts that are on several ranks run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertParallel {
    /// All rows go to all ranks, and come back summed: SmallEP (OSDI '26, section 3.2).
    #[default]
    SmallEp,
    /// Each row goes to the ranks of the experts that it chose.
    Ep,
}

impl ExpertParallel {
    /// Whether so many ranks give the bits of one: not where they add experts' outputs in another order.
    pub fn keeps_bits(self, ranks: usize) -> bool {
        match self {
            Self::SmallEp => LEAVES.is_multiple_of(ranks.max(1)),
            Self::Ep => true,
        }
    }
}

/// How a rank computes with its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// How experts run.
    pub experts: ExpertParallel,
    /// Number of ranks.
    pub ranks: usize,
    /// Whether the rank is a head whose policy has all modules, so that it can compute passes alone. Not where the ranks do
    /// not give the bits of one.
    pub is_self_sufficient: bool,
}

impl Sharing {
    /// Every pass with the others.
    pub const fn new(experts: ExpertParallel, ranks: usize) -> Self {
        Self {
            experts,
            ranks,
            is_self_sufficient: false,
        }
    }
}

/// The ranks that compute passes together with this one.
pub(crate) struct Peering<B: Backend> {
    pub(crate) peers: Arc<dyn Peers>,
    pub(crate) experts: Box<dyn Experts<B>>,
    /// Blocks of the cache that all peers have too; `None` for a rank that computes every pass with them.
    shared: Option<Mutex<HashSet<BlockId>>>,
}

impl<B: Backend> Peering<B> {
    pub(crate) fn new(
        peers: Arc<dyn Peers>,
        sharing: Sharing,
        (backend, residency): (Arc<B>, Arc<dyn Residency<B>>),
    ) -> Self {
        let Sharing {
            experts,
            ranks,
            is_self_sufficient,
        } = sharing;
        let computes_alone = is_self_sufficient && experts.keeps_bits(ranks);
        Self {
            peers,
            experts: match experts {
                ExpertParallel::SmallEp => Box::new(SmallEp::new(backend, residency, ranks)),
                ExpertParallel::Ep => Box::new(Ep::new(backend, residency)),
            },
            shared: computes_alone.then(Mutex::default),
        }
    }

    /// Whether it can compute passes without the others.
    pub(crate) fn computes_alone(&self) -> bool {
        self.shared.is_some()
    }

    /// Whether a pass over `spans`, in a cache with blocks of `block_tokens`, is computed by all. One that is not makes its blocks
    /// this rank's own.
    pub(crate) fn is_together(&self, alone: bool, spans: &[Span], block_tokens: usize) -> bool {
        let Some(mut shared) = self.shared() else {
            return true;
        };
        let is_there = |span: &Span| {
            let before = span.start.div_ceil(block_tokens.max(1));
            span.blocks
                .iter()
                .take(before)
                .all(|block| shared.contains(block))
        };
        let is_together = !alone && self.peers.lost().is_none() && spans.iter().all(is_there);
        if !is_together {
            for block in written(spans, block_tokens) {
                shared.remove(block);
            }
        }
        is_together
    }

    /// Notes what became of a pass that all compute.
    pub(crate) fn computed<T>(
        &self,
        outcome: &Result<T, ModelError>,
        spans: &[Span],
        block_tokens: usize,
    ) {
        let Some(mut shared) = self.shared() else {
            return;
        };
        match outcome {
            Ok(_) => shared.extend(written(spans, block_tokens)),
            // Of one that was not computed to its end, they have some positions and not others.
            Err(_) => {
                for block in written(spans, block_tokens) {
                    shared.remove(block);
                }
            }
        }
    }

    /// Notes that the group was formed anew: of what was computed before, the others may have nothing.
    pub(crate) fn formed(&self) {
        if let Some(mut shared) = self.shared() {
            shared.clear();
        }
    }

    fn shared(&self) -> Option<MutexGuard<'_, HashSet<BlockId>>> {
        let shared = self.shared.as_ref()?;
        // Each change is complete before anything can panic.
        Some(shared.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Blocks that the rows of `spans` are written to.
fn written(spans: &[Span], block_tokens: usize) -> impl Iterator<Item = &BlockId> {
    spans.iter().flat_map(move |span| {
        let block_tokens = block_tokens.max(1);
        let first = span.start / block_tokens;
        let end = (span.start + span.rows).div_ceil(block_tokens);
        span.blocks
            .iter()
            .take(end)
            .skip(first.min(span.blocks.len()))
    })
}
