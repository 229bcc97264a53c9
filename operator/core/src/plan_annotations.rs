//! What became of a plan, as its annotations tell.

use hearth_crds::InferencePlan;

use crate::names::{
    ANNOTATION_OUTCOME, ANNOTATION_OUTCOME_MESSAGE, OUTCOME_FAILED, OUTCOME_SERVING,
};

/// Whether all ranks of the plan were ready once.
pub(crate) fn has_served(plan: &InferencePlan) -> bool {
    annotation(plan, ANNOTATION_OUTCOME) == OUTCOME_SERVING
}

/// Whether the plan was given up.
pub(crate) fn has_failed(plan: &InferencePlan) -> bool {
    annotation(plan, ANNOTATION_OUTCOME) == OUTCOME_FAILED
}

/// Why a plan was given up.
pub(crate) fn failure(plan: &InferencePlan) -> &str {
    annotation(plan, ANNOTATION_OUTCOME_MESSAGE)
}

/// An annotation; empty where it is not there.
pub(crate) fn annotation<'a>(plan: &'a InferencePlan, key: &str) -> &'a str {
    let annotations = plan.metadata.annotations.as_ref();
    annotations
        .and_then(|annotations| annotations.get(key))
        .map_or("", String::as_str)
}
