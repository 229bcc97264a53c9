//! Facts of single layers, so that the predictor of whole models predicts each of them.

use hearth_crds::{ModelFacts, ModuleBytes};

/// A model's layers and ends, each as the facts of a model of its own.
#[derive(Clone, Debug)]
pub(super) struct LayerFacts {
    /// A layer without routed experts, if there is one.
    dense: ModelFacts,
    /// A layer with them.
    expert: ModelFacts,
    /// Embedding and output head.
    pub(super) ends: ModelFacts,
    /// Number of layers without routed experts: those come first.
    dense_layers: u32,
}

impl LayerFacts {
    pub(super) fn of(facts: &ModelFacts) -> Self {
        let expert_layers = facts.routed_layers().min(facts.layers);
        let dense_layers = facts.layers - expert_layers;
        let each = |bytes: u64, layers: u32| bytes.div_ceil(u64::from(layers.max(1)));
        let bytes = &facts.bytes;
        let attention = ModuleBytes {
            attention: each(bytes.attention, facts.layers),
            ..ModuleBytes::default()
        };
        let dense = ModuleBytes {
            dense_ffn: each(bytes.dense_ffn, dense_layers),
            ..attention
        };
        let expert = ModuleBytes {
            shared_expert: each(bytes.shared_expert, expert_layers),
            router: each(bytes.router, expert_layers),
            routed_experts: each(bytes.routed_experts, expert_layers),
            ..attention
        };
        let ends = ModuleBytes {
            embedding: bytes.embedding,
            head: bytes.head,
            ..ModuleBytes::default()
        };
        let dense_facts = ModelFacts {
            experts: 0,
            experts_per_token: 0,
            ..part(facts, dense, (1, 0))
        };
        let ends_facts = ModelFacts {
            experts: 0,
            experts_per_token: 0,
            ..part(facts, ends, (0, 0))
        };
        Self {
            dense: dense_facts,
            expert: part(facts, expert, (1, 1)),
            ends: ends_facts,
            dense_layers,
        }
    }

    /// Facts of a layer.
    pub(super) fn layer(&self, layer: u32) -> &ModelFacts {
        match layer < self.dense_layers {
            true => &self.dense,
            false => &self.expert,
        }
    }
}

/// The facts of a part of a model: its arithmetic is the share of what a token reads.
fn part(facts: &ModelFacts, bytes: ModuleBytes, (layers, expert_layers): (u32, u32)) -> ModelFacts {
    let read = |bytes: &ModuleBytes| {
        let routed = bytes.routed_experts as f64 * f64::from(facts.experts_per_token)
            / f64::from(facts.experts.max(1));
        (bytes.total() - bytes.embedding - bytes.routed_experts) as f64 + routed
    };
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let active = share(read(&bytes), read(&facts.bytes)) * facts.active_parameter_count as f64;
    let stored = share(bytes.total() as f64, facts.bytes.total() as f64);
    ModelFacts {
        parameter_count: (stored * facts.parameter_count as f64) as u64,
        active_parameter_count: active as u64,
        layers,
        expert_layers,
        largest_layer_bytes: bytes.total().min(facts.largest_layer_bytes),
        bytes,
        ..facts.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_crds::KvShape;

    #[test]
    fn parts_are_the_whole() {
        let facts = ModelFacts {
            architecture: "deepseek_v3".into(),
            dtype: "FP8".into(),
            parameter_count: 1_000_000,
            active_parameter_count: 400_000,
            layers: 6,
            hidden: 64,
            vocab: 100,
            max_context: 128,
            experts: 8,
            experts_per_token: 2,
            expert_layers: 4,
            expert_hidden: 32,
            heads: 4,
            kv: KvShape::Heads {
                kv_heads: 2,
                key_dim: 16,
                value_dim: 16,
            },
            bytes: ModuleBytes {
                embedding: 6400,
                attention: 60_000,
                dense_ffn: 20_000,
                shared_expert: 8000,
                router: 4000,
                routed_experts: 80_000,
                head: 6400,
            },
            largest_layer_bytes: 40_000,
            largest_dense_module_bytes: 0,
            largest_expert_bytes: 0,
        };
        let parts = LayerFacts::of(&facts);
        let all = || (0..6).map(|layer| parts.layer(layer)).chain([&parts.ends]);
        assert_eq!(
            all().map(|part| part.bytes.total()).sum::<u64>(),
            facts.bytes.total()
        );
        let active: u64 = all().map(|part| part.active_parameter_count).sum();
        assert!(active.abs_diff(400_000) < 8, "{active}");
        let read: f64 = all().map(|part| part.step_bytes(1)).sum();
        assert!((read - facts.step_bytes(1)).abs() < 1.0, "{read}");
        assert_eq!((parts.layer(1).experts, parts.layer(2).experts), (0, 8));
    }
}
