//! Operations of a pass on a device, each of which takes some time besides its bytes and products.

use hearth_crds::{KvShape, ModelFacts, PlanMlaForm};

/// Attention over keys and values: norm, projections, heads into the cache, scores, output.
const HEADS_OPERATIONS: f64 = 5.0;
/// Latent attention, absorbed: norm, compressed projections, latents into the cache, projection and absorption of the queries,
/// scores, expansion, output.
const LATENT_OPERATIONS: f64 = 8.0;
/// Latent attention, expanded, but for the expansion and what attends to it: norm, compressed projections, latents into the
/// cache, output.
const EXPANDED_OPERATIONS: f64 = 4.0;
/// A dense block: norm, projections, their product, output.
const DENSE_OPERATIONS: f64 = 4.0;
/// The way to a choice of experts: norm, logits, choice.
const ROUTER_OPERATIONS: f64 = 3.0;
/// Shared experts: those of a dense block without its norm, and the addition to the routed ones.
const SHARED_OPERATIONS: f64 = 4.0;
/// Experts on the device beside one operation each: the choice for the host, and their sum.
const LOCAL_OPERATIONS: f64 = 2.0;
/// Embedding, the last rows, norm, head, and the logits for the host.
const ENDS_OPERATIONS: f64 = 6.0;

/// Operations of all layers, but for routed experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operations {
    attention: f64,
    feed_forward: f64,
    expert_layers: f64,
    ends: f64,
}

impl Operations {
    pub(crate) fn of(facts: &ModelFacts, form: PlanMlaForm) -> Self {
        let layers = f64::from(facts.layers);
        let expert_layers = f64::from(facts.routed_layers());
        let shared = match facts.bytes.shared_expert {
            0 => 0.0,
            _ => SHARED_OPERATIONS,
        };
        Self {
            attention: layers
                * match (facts.kv, form) {
                    (KvShape::Heads { .. }, _) => HEADS_OPERATIONS,
                    (KvShape::Latent { .. }, PlanMlaForm::Absorbed) => LATENT_OPERATIONS,
                    (KvShape::Latent { .. }, PlanMlaForm::Expanded) => EXPANDED_OPERATIONS,
                },
            feed_forward: (layers - expert_layers) * DENSE_OPERATIONS
                + expert_layers * (ROUTER_OPERATIONS + shared),
            expert_layers,
            // Facts of single layers, as members of a ring have them, are of no model with ends.
            ends: match facts.bytes.embedding + facts.bytes.head {
                0 => 0.0,
                _ => ENDS_OPERATIONS,
            },
        }
    }

    /// Bytes of activations that a token's operations read and write in all layers, but for routed experts, as a modelled
    /// device counts them: norms, residual sums and products by the width of the residual stream, projections and attention
    /// by that of heads, shared experts by their inner width. Several tiles of rows are copied, one is not. `expanded`:
    /// elements of latent attention's expanded form.
    pub(crate) fn activation_bytes(facts: &ModelFacts, tiles: f64, expanded: Option<f64>) -> f64 {
        let heads = f64::from(facts.heads);
        let attention = match facts.kv {
            KvShape::Heads {
                kv_heads,
                key_dim,
                value_dim,
            } => {
                let kv = f64::from(kv_heads) * f64::from(key_dim + value_dim);
                6.0 * heads * f64::from(key_dim) + 2.5 * kv
            }
            KvShape::Latent {
                rank,
                rope_dim,
                nope_dim,
                value_dim,
            } => {
                let widths = [rank + rope_dim, rank, nope_dim + rope_dim, value_dim];
                expanded.unwrap_or(2.0 * heads * widths.map(f64::from).iter().sum::<f64>())
            }
        };
        let (hidden, of_tiles, shared) = match facts.bytes.shared_expert {
            0 => (12.0, 8.0, 0.0),
            _ => (17.0, 12.0, 6.0),
        };
        let hidden = match tiles > 1.0 {
            true => hidden + of_tiles,
            false => hidden,
        };
        let of_layer = hidden * f64::from(facts.hidden)
            + shared * f64::from(facts.expert_hidden)
            + 2.0 * f64::from(facts.experts)
            + attention;
        4.0 * of_layer * f64::from(facts.layers)
    }

    /// Bytes of activations that a routed expert reads and writes for one of the rows that chose it.
    pub(crate) fn bytes_of_choice(facts: &ModelFacts) -> f64 {
        4.0 * (3.0 * f64::from(facts.hidden) + 2.0 * f64::from(facts.expert_hidden))
    }

    /// All of a pass whose attention runs in `tiles` of rows.
    pub(crate) fn total(self, tiles: f64) -> f64 {
        self.attention * tiles + self.feed_forward + self.ends
    }

    /// Those of `experts` routed experts in each of their layers, where the device has them.
    pub(crate) fn local_experts(self, experts: f64) -> f64 {
        self.expert_layers * (experts + LOCAL_OPERATIONS)
    }
}
