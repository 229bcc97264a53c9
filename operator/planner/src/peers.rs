//! Ranks that read a prompt together, each with its share of the rows and of each layer's experts (hybrid MoE paper, section
//! 3.2): what each exchanges, and how long it takes.

use hearth_crds::{ModelFacts, PlanExpertParallel, PlanKvGather, PlanMlaForm};

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

impl Hop {
    /// The same where so many processes of a node send at once.
    pub(crate) fn shared_by(self, senders: usize) -> Self {
        Self {
            gbps: self.gbps / senders.max(1) as f64,
            ..self
        }
    }
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
    /// Its way for keys and values.
    kv: KvWay,
}

/// The way of a peer's keys and values to the others, and of those of others that it passes on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct KvWay {
    /// Seconds to send them, of a GB that each of the peers has.
    gb_s: f64,
    /// Milliseconds until they are with the farthest besides their bytes.
    latency_ms: f64,
}

/// Another peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OtherPeer {
    /// Its node, as the planner counts them.
    pub node: usize,
    /// The way to it.
    pub hop: Hop,
}

impl Peer {
    /// One of `ranks` peers, with its ways to the others; keys and values go from each to each.
    pub(crate) fn new(ranks: u32, others: impl Iterator<Item = Hop>) -> Self {
        let (gb_s, latency_ms) = others.fold((0.0, 0.0_f64), |(gb_s, latency_ms), hop| {
            (gb_s + 1.0 / hop.gbps, latency_ms.max(hop.latency_ms))
        });
        Self {
            ranks: ranks.max(1),
            gb_to_each_s: gb_s,
            latency_ms,
            kv: KvWay { gb_s, latency_ms },
        }
    }

    /// One of peers on these nodes, itself on `node`. Passed on, its keys and values go to the peers of its own node and to one
    /// on each other node; and it hands on, to the peers of its node, those of its part of all peers elsewhere.
    pub(crate) fn among(node: usize, others: &[OtherPeer], gather: PlanKvGather) -> Self {
        let peer = Self::new(
            others.len() as u32 + 1,
            others.iter().map(|other| other.hop),
        );
        if gather.is_direct() {
            return peer;
        }
        let (here, elsewhere): (Vec<OtherPeer>, Vec<OtherPeer>) =
            others.iter().partition(|other| other.node == node);
        let mut gates = elsewhere.clone();
        gates.sort_by_key(|gate| gate.node);
        gates.dedup_by_key(|gate| gate.node);
        let gb_s = |to: &[OtherPeer]| to.iter().map(|other| 1.0 / other.hop.gbps).sum::<f64>();
        let latency_ms = |to: &[OtherPeer]| {
            let latencies = to.iter().map(|other| other.hop.latency_ms);
            latencies.fold(0.0, f64::max)
        };
        let passed_on = elsewhere.len().div_ceil(here.len() + 1) as f64;
        Self {
            kv: KvWay {
                gb_s: gb_s(&gates) + gb_s(&here) * (1.0 + passed_on),
                latency_ms: latency_ms(&elsewhere) + latency_ms(&here),
            },
            ..peer
        }
    }

    /// Milliseconds to send so many bytes to each of the others, while as many come.
    fn exchange_ms(self, bytes: f64) -> f64 {
        bytes / 1e9 * self.gb_to_each_s * 1e3
    }

    /// Milliseconds until so many bytes of keys and values of each peer are with all.
    fn gather_ms(self, bytes: f64) -> f64 {
        bytes / 1e9 * self.kv.gb_s * 1e3 + self.kv.latency_ms
    }
}

impl Predictor<'_> {
    /// Duration of a prompt of `tokens` for one of several peers, which has its share of the rows and of each layer's experts;
    /// `None` if it streams none. As if no peer computed while they exchange, though rows attend
    /// while keys that they do not see are on their way; copies of experts go on.
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
        let message_ms = peer.latency_ms + self.rates.exchange_ms;
        let crossing_ms = |bytes: f64| bytes / 1e9 / copy_gbps * 1e3;
        let kv_bytes = self.kv_bytes_per_token as f64 / layers * own_rows(tokens, peer);
        let rows_bytes = rows_bytes(facts, tokens, peer);
        let prompt = StreamedPrompt {
            experts: all.experts.div_ceil(peer.ranks),
            dense_ms: self.beside_experts_ms(self.own_step(whole, peer)) / layers,
            kv_exchange_ms: peer.gather_ms(kv_bytes)
                + crossing_ms(kv_bytes * f64::from(peer.ranks))
                + self.rates.exchange_ms,
            rows_exchange_ms: peer.exchange_ms(rows_bytes)
                + crossing_ms(crossing_bytes(facts, tokens, peer))
                + 2.0 * message_ms,
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

/// Bytes that cross a peer's link to its device in a layer for its experts, in both directions. Its rows come from the device once,
/// whoever gets them. By SmallEP the others' rows go there, partial sums for them come back, and of those for its own rows, which the
/// host adds up in a tree, one for each level goes there; by EP the rows that are sent to it go there, and what it and others made of
/// such rows comes and goes.
fn crossing_bytes(facts: &ModelFacts, tokens: u32, peer: Peer) -> f64 {
    let ranks = f64::from(peer.ranks);
    let others = ranks - 1.0;
    let times = match expert_parallel(facts, peer.ranks) {
        PlanExpertParallel::SmallEp => 2.0 * others + ranks.log2(),
        PlanExpertParallel::Ep => 3.0 * f64::from(facts.experts_per_token) * others / ranks,
    };
    4.0 * f64::from(facts.hidden) * own_rows(tokens, peer) * (1.0 + times)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that cannot read its data has failed
mod tests {
    use super::*;

    /// Facts of a model with rows of 4 KB.
    fn facts(experts_per_token: u32) -> ModelFacts {
        let measured: serde_json::Value =
            serde_json::from_str(include_str!("../tests/measured.json")).unwrap();
        let mut models = measured["facts"].as_object().unwrap().values();
        let mut facts: ModelFacts = serde_json::from_value(models.next().unwrap().clone()).unwrap();
        (facts.hidden, facts.experts_per_token) = (1000, experts_per_token);
        facts
    }

    fn one_of(ranks: u32) -> Peer {
        let hop = Hop {
            gbps: 1.0,
            latency_ms: 0.0,
        };
        Peer::new(ranks, std::iter::repeat_n(hop, ranks as usize - 1))
    }

    #[test]
    fn what_a_peer_sends_is_that_of_the_formulas() {
        let facts = facts(4);
        let bytes = |ranks: u32| rows_bytes(&facts, 800, one_of(ranks));
        // 2 · 4 N D / S to each, and 2 · 4 N A D / S² from more ranks than experts of a token, or as many as SmallEP is not for.
        assert_eq!(bytes(2), 8.0 * 800.0 * 1000.0 / 2.0);
        assert_eq!(bytes(4), 8.0 * 800.0 * 1000.0 / 4.0);
        assert_eq!(bytes(8), 8.0 * 800.0 * 4.0 * 1000.0 / 64.0);
        let of_three = 8.0 * 800.0 * 4.0 * 1000.0 / 9.0;
        assert!((bytes(3) / of_three - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_matrix_of_all_rows_crosses_the_link_about_twice_by_small_ep() {
        let facts = facts(8);
        let matrix = 4.0 * 800.0 * 1000.0;
        let matrices = |ranks: u32| crossing_bytes(&facts, 800, one_of(ranks)) / matrix;
        assert_eq!([2, 4, 8].map(matrices), [2.0, 2.25, 2.25]);
        // With three ranks EP sends the rows of eight experts, two thirds of them to others.
        assert!((matrices(3) - (1.0 / 3.0 + 3.0 * 8.0 * 2.0 / 9.0)).abs() < 1e-9);
    }

    #[test]
    fn a_peer_sends_to_each_of_the_others_and_waits_for_the_farthest() {
        let hop = |gbps, latency_ms| Hop { gbps, latency_ms };
        let peer = Peer::new(3, [hop(1.0, 0.1), hop(0.25, 2.0)].into_iter());
        assert!((peer.exchange_ms(1e6) - 5.0).abs() < 1e-9, "{peer:?}");
        assert_eq!(peer.latency_ms, 2.0);
    }

    #[test]
    fn passed_on_keys_and_values_cross_to_a_node_once() {
        let hop = |gbps, latency_ms| Hop { gbps, latency_ms };
        // Two nodes of four: the way between them is 1 GB/s, of which each of four that send at once has a quarter.
        let other = |node| OtherPeer {
            node,
            hop: match node {
                0 => hop(100.0, 0.025),
                _ => hop(1.0, 0.2).shared_by(4),
            },
        };
        let others = [0, 0, 0, 1, 1, 1, 1].map(other);
        let gather_ms = |gather| Peer::among(0, &others, gather).gather_ms(1e6);
        let direct = 4.0 * 4.0 + 3.0 * 0.01 + 0.2;
        assert!((gather_ms(PlanKvGather::Direct) - direct).abs() < 1e-9);
        // Its own to three beside it and to one elsewhere, and one of the others' to three.
        let passed_on = 4.0 + 2.0 * 3.0 * 0.01 + 0.2 + 0.025;
        assert!((gather_ms(PlanKvGather::PassedOn) - passed_on).abs() < 1e-9);
        // Rows go from each to each in either case.
        let ways = [PlanKvGather::Direct, PlanKvGather::PassedOn];
        let [direct, passed_on] = ways.map(|gather| Peer::among(0, &others, gather));
        assert_eq!(direct.exchange_ms(1e6), passed_on.exchange_ms(1e6));
        // Where each node has one, nothing is passed on.
        let alone = [1, 2].map(other);
        let [direct, passed_on] = ways.map(|gather| Peer::among(0, &alone, gather).kv.gb_s);
        assert_eq!(direct, passed_on);
    }
}
