//! Translation of deprecated fields to current names: code that acts on a spec reads the translated one.
//!
//! A deprecated field stays in the schema, since stored objects have it and a field removed from the schema is pruned
//! silently; this is the only place that names it. Admission refuses a spec that sets both; if an object has both
//! anyway, the new field wins. Checks come before translation, so that they name the field that was written.

use crate::deployment::InferenceDeploymentSpec;
use crate::scaling::{ScalingMode, ScalingSpec};

impl InferenceDeploymentSpec {
    /// Returns the spec with no deprecated fields set.
    #[must_use]
    pub fn translated(mut self) -> Self {
        let runtime_class = self.placement.runtime_class_name.take();
        let template = &mut self.pod_template;
        template.runtime_class_name = template.runtime_class_name.take().or(runtime_class);
        let (prefill, decode) = (&mut self.prefill, &mut self.decode);
        translate_range(
            &mut prefill.scaling,
            prefill.min_replicas.take(),
            prefill.max_replicas.take(),
        );
        translate_range(
            &mut decode.scaling,
            decode.min_replicas.take(),
            decode.max_replicas.take(),
        );
        self
    }
}

/// Turns a pool's `minReplicas` and `maxReplicas` into scaling: they asked Hearth to scale it.
fn translate_range(
    scaling: &mut Option<ScalingSpec>,
    min_replicas: Option<u32>,
    max_replicas: Option<u32>,
) {
    if scaling.is_none() && (min_replicas.is_some() || max_replicas.is_some()) {
        *scaling = Some(ScalingSpec {
            mode: ScalingMode::Auto,
            min_replicas,
            max_replicas,
        });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(prefill: serde_json::Value, decode: serde_json::Value) -> InferenceDeploymentSpec {
        let source = json!({"builtin": {"name": "hearth-demo"}});
        let spec = json!({"model": {"source": source}, "prefill": prefill, "decode": decode});
        serde_json::from_value(spec).expect("a spec")
    }

    #[test]
    fn a_range_becomes_scaling_by_hearth() {
        let range = json!({"minReplicas": 1, "maxReplicas": 4});
        let auto = json!({"scaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": 4}});
        let old = spec(range.clone(), range);
        assert_eq!(old.translated(), spec(auto.clone(), auto));
    }

    #[test]
    fn todays_words_stay_as_they_are() {
        let scaling = json!({"mode": "External", "maxReplicas": 4});
        for decode in [
            json!({}),
            json!({"replicas": 3, "maxBatch": 8}),
            json!({"replicas": 3, "scaling": scaling}),
        ] {
            let now = spec(json!({"replicas": 2}), decode);
            assert_eq!(now.clone().translated(), now);
        }
    }

    #[test]
    fn the_new_field_counts_where_both_are_stored() {
        let both = json!({"minReplicas": 2, "maxReplicas": 2, "scaling": {"mode": "Static"}});
        let new = json!({"scaling": {"mode": "Static"}});
        assert_eq!(spec(json!({}), both).translated(), spec(json!({}), new));
    }

    fn of_yaml(yaml: &str) -> InferenceDeploymentSpec {
        let model = "model: {source: {builtin: {name: hearth-demo}}}\n";
        let spec: InferenceDeploymentSpec =
            serde_norway::from_str(&format!("{model}{yaml}")).expect("a spec");
        spec.translated()
    }

    #[test]
    fn a_runtime_class_is_the_templates() {
        let old = of_yaml("placement: {runtimeClassName: nvidia, numa: Compact}");
        let new = of_yaml("placement: {numa: Compact}\npodTemplate: {runtimeClassName: nvidia}");
        assert_eq!(old, new);
        assert_eq!(
            new.pod_template.runtime_class_name.as_deref(),
            Some("nvidia")
        );
        assert_eq!(new.placement.runtime_class_name, None);
        assert_eq!(new.clone().translated(), new);
    }

    #[test]
    fn the_new_field_counts() {
        let both = of_yaml("placement: {runtimeClassName: a}\npodTemplate: {runtimeClassName: b}");
        assert_eq!(both.pod_template.runtime_class_name.as_deref(), Some("b"));
        assert_eq!(both.placement.runtime_class_name, None);
    }
}
