//! Ranks that read a prompt together, each with its share of the rows and of each layer's experts (hybrid MoE paper, section
//! 3.2): what each exchanges, and how long it takes.

use hearth_crds::{ModelFacts, PlanExpertParallel, PlanMlaForm};

use crate::expert_parallel::expert_parallel;
use crate::predict::{ExpertsAt, Predictor, Step};
use crate::stream_loading::{StreamedPrompt, StreamedTime};

/// The way from one process to another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hop {
    pub gbps: f64,
    /// Milliseconds that a message takes besides its bytes.
    pub latency_ms: f64,
}

/// One of several peers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Peer {
    /// Number of peers.
    ranks: u32,
    /// Seconds to send a GB to each of the others, one after the other.
    gb_to_each_s: f64,
    /// Milliseconds that a message takes to the farthest of the others besides its bytes.
    latency_ms: f64,
}

impl Peer {
    /// One of `ranks` peers, with its ways to the others.
    pub(crate) fn new(ranks: u32, others: impl Iterator<Item = Hop>) -> Self {
        let alone = Self {
            ranks: ranks.max(1),
            gb_to_each_s: 0.0,
            latency_ms: 0.0,
        };
        others.fold(alone, |peer, hop| Self {
            gb_to_each_s: peer.gb_to_each_s + 1.0 / hop.gbps,
            latency_ms: peer.latency_ms.max(hop.latency_ms),
            ..peer
        })
    }

    /// Milliseconds to send so many bytes to each of the others, while as many come.
    fn exchange_ms(self, bytes: f64) -> f64 {
        bytes / 1e9 * self.gb_to_each_s * 1e3
    }
}

impl Predictor<'_> {
    /// Duration of a prompt of `tokens` for one of several peers, which has its share of the rows and of each layer's experts;
    /// `None` if it streams none. No peer computes while they exchange; copies of experts go on.
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
        // Rows of a message come from the device, and those that come go there.
        let message_ms = peer.latency_ms + self.rates.exchange_ms;
        let kv_bytes = self.kv_bytes_per_token as f64 / layers * own_rows(tokens, peer);
        let prompt = StreamedPrompt {
            experts: all.experts.div_ceil(peer.ranks),
            dense_ms: self.beside_experts_ms(self.own_step(whole, peer)) / layers,
            kv_exchange_ms: peer.exchange_ms(kv_bytes) + message_ms,
            rows_exchange_ms: peer.exchange_ms(rows_bytes(facts, tokens, peer)) + 2.0 * message_ms,
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that cannot read its data has failed
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_sends_is_that_of_the_formulas() {
        let measured: serde_json::Value =
            serde_json::from_str(include_str!("../tests/measured.json")).unwrap();
        let mut models = measured["facts"].as_object().unwrap().values();
        let mut facts: ModelFacts = serde_json::from_value(models.next().unwrap().clone()).unwrap();
        (facts.hidden, facts.experts_per_token) = (1000, 4);
        let bytes = |ranks: u32| {
            let hop = Hop {
                gbps: 1.0,
                latency_ms: 0.0,
            };
            let others = std::iter::repeat_n(hop, ranks as usize - 1);
            rows_bytes(&facts, 800, Peer::new(ranks, others))
        };
        // 2 · 4 N D / S to each, and from more ranks than experts of a token on 2 · 4 N A D / S².
        assert_eq!(bytes(2), 8.0 * 800.0 * 1000.0 / 2.0);
        assert_eq!(bytes(4), 8.0 * 800.0 * 1000.0 / 4.0);
        assert_eq!(bytes(8), 8.0 * 800.0 * 4.0 * 1000.0 / 64.0);
    }

    #[test]
    fn a_peer_sends_to_each_of_the_others_and_waits_for_the_farthest() {
        let hop = |gbps, latency_ms| Hop { gbps, latency_ms };
        let peer = Peer::new(3, [hop(1.0, 0.1), hop(0.25, 2.0)].into_iter());
        assert!((peer.exchange_ms(1e6) - 5.0).abs() < 1e-9, "{peer:?}");
        assert_eq!(peer.latency_ms, 2.0);
    }
}
