//! A model's peers, and which of its passes they compute with it.
//!
//! Followers compute nothing but shares of passes. A head may have what it needs to compute a pass alone: it does so where it
//! is asked to, and where the group is not complete. Keys and values that it has and its peers lack are handed on before a pass
//! that needs them; if that is too much, it computes the pass alone, too.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_kernels::expert_sum::LEAVES;
use hearth_kernels::{Backend, BlockId, KvLayout, Span};

use crate::experts::{Ep, Experts, SmallEp};
use crate::{ModelError, Peers, Residency, Sites};

/// Most bytes of keys and values that a head hands on before a pass, over all layers: those of a system prompt, and far less than
/// the messages that may wait at a member. A pass that needs more is the head's alone.
const MOST_BEFORE_BYTES: usize = 32 << 20;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// How experts run.
    pub experts: ExpertParallel,
    /// Number of ranks.
    pub ranks: usize,
    /// Whether the rank is a head whose policy has all modules, so that it can compute passes alone. Not where the ranks do
    /// not give the bits of one.
    pub is_self_sufficient: bool,
    /// Of the head: how keys and values come to all ranks.
    pub sites: Sites,
}

impl Sharing {
    /// Every pass with the others, keys and values from each to each.
    pub fn new(experts: ExpertParallel, ranks: usize) -> Self {
        Self {
            experts,
            ranks,
            is_self_sufficient: false,
            sites: Sites::default(),
        }
    }
}

/// The ranks that compute passes together with this one.
pub(crate) struct Peering<B: Backend> {
    pub(crate) peers: Arc<dyn Peers>,
    pub(crate) experts: Box<dyn Experts<B>>,
    /// How keys and values come to all ranks, in passes that this one begins.
    pub(crate) sites: Sites,
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
            sites,
        } = sharing;
        let computes_alone = is_self_sufficient && experts.keeps_bits(ranks);
        Self {
            peers,
            experts: match experts {
                ExpertParallel::SmallEp => Box::new(SmallEp::new(backend, residency, ranks)),
                ExpertParallel::Ep => Box::new(Ep::new(backend, residency)),
            },
            sites,
            shared: computes_alone.then(Mutex::default),
        }
    }

    /// Whether it can compute passes without the others.
    pub(crate) fn computes_alone(&self) -> bool {
        self.shared.is_some()
    }

    /// Whether a pass over `spans`, in a cache of this layout, is computed by all, and what of the cache they are handed before:
    /// `None` if it is this rank's alone, as are its blocks from then on.
    pub(crate) fn together(
        &self,
        alone: bool,
        spans: &[Span],
        layout: &KvLayout,
    ) -> Option<Vec<Span>> {
        let Some(mut shared) = self.shared() else {
            return Some(Vec::new());
        };
        let missing: Vec<Span> = spans
            .iter()
            .filter_map(|span| missing(span, &shared, layout.block_tokens))
            .collect();
        let tokens: usize = missing.iter().map(|span| span.rows).sum();
        let bytes = tokens * layout.token_layer_bytes() * layout.layers;
        if !alone && self.peers.lost().is_none() && bytes <= MOST_BEFORE_BYTES {
            return Some(missing);
        }
        for block in written(spans, layout.block_tokens) {
            shared.remove(block);
        }
        None
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
            Ok(_) => {
                for span in spans {
                    let end = (span.start + span.rows).div_ceil(block_tokens.max(1));
                    shared.extend(span.blocks.iter().take(end));
                }
            }
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

/// The positions before a span's rows from the first block on that is not shared; `None` if all are.
fn missing(span: &Span, shared: &HashSet<BlockId>, block_tokens: usize) -> Option<Span> {
    let block_tokens = block_tokens.max(1);
    let before = span.start.div_ceil(block_tokens);
    let mut blocks = span.blocks.iter().take(before);
    let start = blocks.position(|block| !shared.contains(block))? * block_tokens;
    Some(Span {
        first_row: 0,
        rows: span.start - start,
        start,
        blocks: span.blocks.clone(),
    })
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
