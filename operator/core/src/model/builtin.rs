//! Facts of the built-in models. They are known without a node: the weights are part of the worker's image.

use hearth_crds::ModelFacts;

/// `hearth-worker facts --json` of each built-in model; a test compares them with the models themselves.
const FACTS: [(&str, &str); 1] = [(
    "hearth-demo",
    include_str!("../../../../models/hearth-demo/facts.json"),
)];

/// The facts of a built-in model; `None` for a name that this version does not have.
pub(crate) fn facts(name: &str) -> Option<ModelFacts> {
    let (_, json) = FACTS.iter().find(|(known, _)| *known == name)?;
    serde_json::from_str(json).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_crds::BUILTIN_MODELS;

    #[test]
    fn every_builtin_model_has_facts() {
        for name in BUILTIN_MODELS {
            assert!(facts(name).is_some(), "{name}");
        }
        assert_eq!(facts("nosuch"), None);
    }
}
