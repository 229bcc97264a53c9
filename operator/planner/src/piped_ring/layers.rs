//! Facts of single layers, so that the predictor of whole models predicts each of them.

use hearth_crds::{ModelFacts, ModuleBytes};

/// A model's layers and ends, each as the facts of a model of its own.
#[derive(Clone, Debug)]
pub(super) struct LayerFacts {
    /// Layers that differ, once each.
    kinds: Vec<ModelFacts>,
    /// The kind of each layer.
    of_layers: Vec<usize>,
    /// Embedding and output head.
    pub(super) ends: ModelFacts,
}

impl LayerFacts {
    pub(super) fn of(facts: &ModelFacts) -> Self {
        let ends = ModuleBytes {
            embedding: facts.bytes.embedding,
            head: facts.bytes.head,
            ..ModuleBytes::default()
        };
        let mut kinds: Vec<ModelFacts> = Vec::new();
        let of_layer = |layer| {
            let bytes = facts.layer_bytes(layer);
            let kind = kinds.iter().position(|kind| kind.bytes == bytes);
            kind.unwrap_or_else(|| {
                kinds.push(part(facts, bytes, 1));
                kinds.len() - 1
            })
        };
        let of_layers = (0..facts.layers).map(of_layer).collect();
        Self {
            kinds,
            of_layers,
            ends: part(facts, ends, 0),
        }
    }

    /// Facts of a layer.
    pub(super) fn layer(&self, layer: u32) -> &ModelFacts {
        &self.kinds[self.of_layers[layer as usize]]
    }
}

/// The facts of a part of a model: its arithmetic is the share of what a token reads.
fn part(facts: &ModelFacts, bytes: ModuleBytes, layers: u32) -> ModelFacts {
    let read = |bytes: &ModuleBytes| {
        let routed = bytes.routed_experts as f64 * f64::from(facts.experts_per_token)
            / f64::from(facts.experts.max(1));
        (bytes.total() - bytes.embedding - bytes.routed_experts) as f64 + routed
    };
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let active = share(read(&bytes), read(&facts.bytes)) * facts.active_parameter_count as f64;
    let stored = share(bytes.total() as f64, facts.bytes.total() as f64);
    let (experts, experts_per_token, expert_layers) = match bytes.routed_experts {
        0 => (0, 0, 0),
        _ => (facts.experts, facts.experts_per_token, layers),
    };
    ModelFacts {
        parameter_count: (stored * facts.parameter_count as f64) as u64,
        active_parameter_count: active as u64,
        layers,
        experts,
        experts_per_token,
        expert_layers,
        layer_kinds: None,
        largest_layer_bytes: bytes.total().min(facts.largest_layer_bytes),
        bytes,
        ..facts.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_crds::{KvShape, LayerKinds};

    fn facts() -> ModelFacts {
        ModelFacts {
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
            layer_kinds: None,
        }
    }

    fn check_sums(facts: &ModelFacts) -> LayerFacts {
        let parts = LayerFacts::of(facts);
        let all = || (0..6).map(|layer| parts.layer(layer)).chain([&parts.ends]);
        assert_eq!(
            all().map(|part| part.bytes.total()).sum::<u64>(),
            facts.bytes.total()
        );
        let active: u64 = all().map(|part| part.active_parameter_count).sum();
        assert!(active.abs_diff(400_000) < 8, "{active}");
        let read: f64 = all().map(|part| part.step_bytes(1)).sum();
        assert!((read - facts.step_bytes(1)).abs() < 1.0, "{read}");
        parts
    }

    fn experts(parts: &LayerFacts) -> Vec<u32> {
        (0..6).map(|layer| parts.layer(layer).experts).collect()
    }

    #[test]
    fn parts_are_the_whole() {
        assert_eq!(experts(&check_sums(&facts())), [0, 0, 8, 8, 8, 8]);
    }

    /// The layers of [`facts`], with experts where `order` has a 1.
    fn in_order(order: [u32; 6]) -> Vec<ModuleBytes> {
        let attention = ModuleBytes {
            attention: 10_000,
            ..ModuleBytes::default()
        };
        let layer = |has_experts| match has_experts {
            0 => ModuleBytes {
                dense_ffn: 10_000,
                ..attention
            },
            _ => ModuleBytes {
                shared_expert: 2000,
                router: 1000,
                routed_experts: 20_000,
                ..attention
            },
        };
        order.map(layer).to_vec()
    }

    #[test]
    fn layers_are_as_the_facts_tell_in_any_order() {
        let told = |layers: &[ModuleBytes]| facts().with_layers(layers);
        // The usual order follows from the sums, as before it was told.
        assert_eq!(told(&in_order([0, 0, 1, 1, 1, 1])), facts());
        let mut layers = in_order([0, 1, 1, 0, 1, 1]);
        let other = told(&layers);
        assert_eq!(experts(&check_sums(&other)), [0, 8, 8, 0, 8, 8]);
        // A layer whose weights are stored in a wider type has their bytes.
        layers[4].attention += 5000;
        layers[5].attention -= 5000;
        let parts = check_sums(&told(&layers));
        for (layer, bytes) in layers.iter().enumerate() {
            assert_eq!(parts.layer(layer as u32).bytes, *bytes);
        }
        let text = serde_json::to_string(&other).unwrap();
        assert!(text.contains(r#""order":"011011""#), "{text}");
        assert_eq!(serde_json::from_str::<ModelFacts>(&text).unwrap(), other);
        let before = serde_json::to_string(&facts()).unwrap();
        assert!(!before.contains("layerKinds"), "{before}");
        assert_eq!(
            serde_json::from_str::<ModelFacts>(&before).unwrap(),
            facts()
        );
        // Those of versions before are of the same model, and other kinds are of another one.
        assert!(other.are_of_the_model_of(&facts()) && facts().are_of_the_model_of(&other));
        assert!(!other.are_of_the_model_of(&told(&layers)));
    }

    #[test]
    fn of_too_many_kinds_the_order_is_told_with_average_bytes() {
        let twelve = || ModelFacts {
            layers: 12,
            expert_layers: 6,
            ..facts()
        };
        let mut layers = [in_order([1, 0, 1, 0, 1, 0]), in_order([1, 0, 1, 0, 1, 0])].concat();
        for (layer, bytes) in layers.iter_mut().enumerate() {
            bytes.attention += layer as u64;
        }
        let parts = LayerFacts::of(&twelve().with_layers(&layers));
        let (odd, even) = (parts.layer(11), parts.layer(0));
        assert_eq!((odd.experts, even.experts), (0, 8));
        assert_eq!(odd.bytes.attention, 60_000 / 12);
        // As many layers as no ring has, whose order a report would not hold.
        let many = vec![layers[0]; LayerKinds::MAX_LAYERS + 1];
        assert_eq!(twelve().with_layers(&many).layer_kinds, None);
    }
}
