//! Ranks that read a prompt together, each with its share of the rows and of each layer's experts (hybrid MoE paper, section
//! 3.2): what each exchanges, and how long it takes.

use hearth_crds::{ModelFacts, PlanExpertParallel, PlanMlaForm};

use crate::expert_parallel::expert_parallel;
use crate::predict::{ExpertsAt, Predictor, Step};
use crate::stream_loading::{StreamedPrompt, StreamedTime};

/// One of several peers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Peer {
    /// Number of peers.
    ranks: u32,
    /// Seconds to send a GB to each of the others, one after the other.
    gb_to_each_s: f64,
}

impl Peer {
    /// One of `ranks` peers, which reaches the others at `others_gbps`.
    pub(crate) fn new(ranks: u32, others_gbps: impl Iterator<Item = f64>) -> Self {
        Self {
            ranks: ranks.max(1),
            gb_to_each_s: others_gbps.map(|gbps| 1.0 / gbps).sum(),
        }
    }

    /// Milliseconds to send so many bytes to each of the others, while as many come.
    fn exchange_ms(self, bytes: f64) -> f64 {
        bytes / 1e9 * self.gb_to_each_s * 1e3
    }
}

impl Predictor<'_> {
    /// Duration of a prompt of `tokens` for one of several peers, which has its share of the rows and of each layer's experts;
    /// `None` if it streams none. What peers exchange is not hidden behind anything.
    pub(crate) fn together(&self, tokens: u32, peer: Peer) -> Option<StreamedTime> {
        let ExpertsAt::Ring {
            slots,
            dense,
            copy_gbps,
        } = self.experts_at
        else {
            return None;
        };
        let facts = self.facts;
        let whole = Step::of_prompt(tokens);
        let all = self.streamed_prompt(whole, slots.at(tokens), dense, copy_gbps);
        let layers = f64::from(facts.layers.max(1));
        let kv_bytes = self.kv_bytes_per_token as f64 / layers * own_rows(tokens, peer);
        let prompt = StreamedPrompt {
            experts: all.experts.div_ceil(peer.ranks),
            dense_ms: self.beside_experts_ms(self.own_step(whole, peer)) / layers,
            kv_exchange_ms: peer.exchange_ms(kv_bytes),
            rows_exchange_ms: peer.exchange_ms(rows_bytes(facts, tokens, peer)),
            ..all
        };
        Some(prompt.simulate())
    }

    /// What a peer computes beside experts: its rows, which see about as many keys as those of any other.
    fn own_step(&self, whole: Step, peer: Peer) -> Step {
        let tokens = whole.tokens.div_ceil(peer.ranks);
        Step {
            tokens,
            // Keys and values of the others come from the cache; latents that are expanded are all expanded by each.
            cache_positions: match self.mla_form {
                PlanMlaForm::Absorbed => 0.0,
                PlanMlaForm::Expanded => f64::from(whole.tokens - tokens),
            },
            attended_positions: whole.attended_positions / f64::from(peer.ranks),
            ..whole
        }
    }
}

/// Rows of a prompt that a peer has.
fn own_rows(tokens: u32, peer: Peer) -> f64 {
    f64::from(tokens) / f64::from(peer.ranks)
}

/// Bytes that a peer sends to each of the others in a layer for its experts, there and back: `2 · 4 N D / S` by SmallEP,
/// `2 · 4 N A D / S²` by EP.
fn rows_bytes(facts: &ModelFacts, tokens: u32, peer: Peer) -> f64 {
    let row_bytes = 4.0 * f64::from(facts.hidden);
    let copies = match expert_parallel(facts, peer.ranks) {
        PlanExpertParallel::SmallEp => 1.0,
        PlanExpertParallel::Ep => f64::from(facts.experts_per_token) / f64::from(peer.ranks),
    };
    2.0 * row_bytes * own_rows(tokens, peer) * copies
}
