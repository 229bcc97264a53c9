//! Checks whether this operator serves the deployment, and whether its spec asks for something that can be done.
//!
//! The rules of admission are checked at each reconcile: an object may have been created while an older CRD was
//! installed, the API server accepts existing values as long as they do not change, and an older operator may have
//! found it valid.

use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{
    FieldError, InferenceDeployment, InferencePlan, ParseError, Target, validate_deployment,
};
use jiff::Timestamp;

use crate::age::age;
use crate::build::deployment_of_plan;
use crate::host_paths;
use crate::observed::{Observed, Settings};
use crate::plan_record::records_spec;

/// Time for which a deployment that this operator does not serve is left to another operator.
const LEFT_TO_OTHERS: Duration = Duration::from_secs(20);
/// Longest time without progress for a new plan if the spec does not say.
const PROGRESS_DEADLINE: Duration = Duration::from_secs(600);

/// Whether this operator serves deployments of `namespace`.
pub fn serves(settings: &Settings, namespace: &str) -> bool {
    is_among(&settings.namespaces, namespace)
}

/// Whether `namespace` is served; an empty list serves all.
pub fn is_among(namespaces: &[String], namespace: &str) -> bool {
    namespaces.is_empty() || namespaces.iter().any(|name| name == namespace)
}

/// Whether a deployment is left alone because its namespace is not served: `Some`, with the delay until it is looked at
/// again. Several operators may share a cluster, each with its own namespaces.
pub fn left_to_others(
    settings: &Settings,
    deployment: &InferenceDeployment,
    now: Timestamp,
) -> Option<Option<Duration>> {
    let metadata = &deployment.metadata;
    if serves(settings, metadata.namespace.as_deref().unwrap_or_default()) {
        return None;
    }
    // The operator that reconciled it serves it, or has already reported that none does.
    let status = deployment.status.as_ref();
    if status.is_some_and(|status| status.observed_generation.is_some()) {
        return Some(None);
    }
    let age = age(metadata.creation_timestamp.as_ref()?.0, now);
    (age < LEFT_TO_OTHERS).then(|| Some(LEFT_TO_OTHERS - age))
}

/// Checks the deployment.
///
/// # Errors
/// Every field that is wrong, with what to write instead.
pub fn validate(observed: &Observed) -> Result<(), Vec<FieldError>> {
    let deployment = &observed.deployment;
    let namespace = deployment.metadata.namespace.as_deref().unwrap_or_default();
    if !serves(&observed.settings, namespace) {
        return Err(vec![not_served(&observed.settings, namespace)]);
    }
    check_rules(deployment)?;
    check_claims(observed)?;
    check_host_paths(observed)
}

/// Longest time without progress for a new plan until all its workers are ready.
pub fn progress_deadline(deployment: &InferenceDeployment) -> Duration {
    let asked = deployment.spec.rollout.progress_deadline;
    asked.map_or(PROGRESS_DEADLINE, |text| text.get())
}

/// Checks the device claims: a cluster without dynamic resource allocation would silently drop them from the Pods.
fn check_claims(observed: &Observed) -> Result<(), Vec<FieldError>> {
    let claims = &observed.deployment.spec.pod_template.resource_claims;
    if claims.is_empty() || observed.has_device_claims {
        return Ok(());
    }
    Err(vec![FieldError::new(
        "spec.podTemplate.resourceClaims",
        format!("has {} items", claims.len()),
        "this cluster does not serve resource.k8s.io/v1, or the chart's gpu.claims is false: remove it",
    )])
}

/// Runs at each reconcile, since what is allowed depends on the operator's settings. A model that was accepted before
/// stays.
fn check_host_paths(observed: &Observed) -> Result<(), Vec<FieldError>> {
    let (settings, deployment) = (&observed.settings, &observed.deployment);
    let check = |deployment: &InferenceDeployment| {
        host_paths::check(
            &deployment.spec,
            &settings.host_paths,
            &settings.model_cache,
        )
    };
    let Err(error) = check(deployment) else {
        return Ok(());
    };
    let model = |deployment: &InferenceDeployment| {
        let model = &deployment.spec.model;
        (model.source.clone(), model.adapters.clone())
    };
    let asked = model(deployment);
    let is_known = |plan: &Arc<InferencePlan>| {
        records_spec(plan) && model(&deployment_of_plan(deployment, plan)) == asked
    };
    match observed.plans.iter().any(is_known) {
        true => Ok(()),
        false => Err(vec![error]),
    }
}

fn not_served(settings: &Settings, namespace: &str) -> FieldError {
    let served = settings.namespaces.join(",");
    FieldError::new(
        "metadata.namespace",
        format!("is {namespace:?}, and this operator serves {served}"),
        format!(
            "add it: helm upgrade hearth charts/hearth -n {} --reuse-values --set 'namespaces={{{served},{namespace}}}'",
            settings.operator_namespace
        ),
    )
}

fn check_rules(deployment: &InferenceDeployment) -> Result<(), Vec<FieldError>> {
    let name = deployment.metadata.name.as_deref().unwrap_or_default();
    let mut bare = InferenceDeployment::new(name, deployment.spec.clone());
    bare.metadata.namespace = deployment.metadata.namespace.clone();
    match validate_deployment(&bare, Target::Cluster) {
        Ok(()) => Ok(()),
        Err(ParseError::Fields(fields)) => Err(fields),
        Err(other) => Err(vec![FieldError::new(
            "spec",
            "cannot be checked",
            other.to_string(),
        )]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{deployment, observed};

    fn check(yaml: &str) -> Result<(), String> {
        let observed = observed(deployment(yaml));
        validate(&observed).map_err(|errors| {
            let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
            lines.join("\n")
        })
    }

    #[test]
    fn the_demo_is_valid() {
        assert_eq!(check(""), Ok(()));
    }

    #[test]
    fn what_admission_would_refuse_is_refused_here_too() {
        let mut deployment = deployment("decode: {maxBatch: 8}\n");
        deployment.spec.decode.max_batch = 0;
        let errors = validate(&observed(deployment)).unwrap_err();
        assert_eq!(errors[0].field, "spec.decode.maxBatch");
    }

    #[test]
    fn a_long_name_is_refused() {
        let mut deployment = deployment("");
        deployment.metadata.name = Some("a".repeat(41));
        let errors = validate(&observed(deployment)).unwrap_err();
        assert_eq!(errors[0].field, "metadata.name");
    }

    #[test]
    fn what_an_older_operator_found_valid_is_checked_all_the_same() {
        let mut deployment = deployment("");
        deployment.spec.strategy = hearth_crds::Strategy::Interleaved;
        deployment.metadata.generation = Some(7);
        let mut status = hearth_crds::InferenceDeploymentStatus::default();
        status.conditions.push(hearth_crds::Condition {
            type_: crate::conditions::PLANNED.to_owned(),
            status: "True".to_owned(),
            observed_generation: Some(7),
            last_transition_time: "2026-01-01T00:00:00Z".to_owned(),
            reason: "Planned".to_owned(),
            message: String::new(),
        });
        deployment.status = Some(status);
        let errors = validate(&observed(deployment)).unwrap_err();
        assert_eq!(errors[0].field, "spec.strategy");
    }

    #[test]
    fn a_directory_of_nodes_is_one_that_the_operator_allows_or_was_taken_before() {
        let host = |path: &str| format!("model: {{source: {{hostPath: {{path: {path}}}}}}}\n");
        assert_eq!(check(&host("/models/m")), Ok(()));
        let refusal = check(&host("/etc/kubernetes")).unwrap_err();
        for words in [
            "spec.model.source.hostPath.path",
            "/etc/kubernetes",
            "below /models",
        ] {
            assert!(refusal.contains(words), "{refusal}");
        }

        // A spec that was valid under wider settings, and has no plan.
        let mut before = deployment(&host("/srv/m"));
        assert!(validate(&observed(before.clone())).is_err());
        // A deployment whose model is being served continues, and may change in everything but the path.
        let mut plan = InferencePlan::new("demo-1", crate::testing::samples::plan());
        plan.spec.inputs = Some(hearth_crds::PlanInputs {
            deployment_spec: serde_json::to_value(&before.spec).unwrap(),
            ..hearth_crds::PlanInputs::default()
        });
        before.spec.decode.max_batch = 2;
        let mut served = observed(before);
        served.plans.push(plan.clone().into());
        assert!(validate(&served).is_ok());
        let mut elsewhere = observed(deployment(&host("/srv/other")));
        elsewhere.plans.push(plan.into());
        assert!(validate(&elsewhere).is_err());
    }

    #[test]
    fn a_namespace_that_is_not_served_is_told_how_to_be() {
        let mut observed = observed(deployment(""));
        let mut settings = (*observed.settings).clone();
        settings.namespaces = vec!["default".to_owned(), "chat".to_owned()];
        observed.settings = settings.into();
        assert!(validate(&observed).is_ok());
        let mut elsewhere = (*observed.deployment).clone();
        elsewhere.metadata.namespace = Some("lab".to_owned());
        observed.deployment = elsewhere.into();
        let errors = validate(&observed).unwrap_err();
        assert!(
            errors[0]
                .remedy
                .contains("--set 'namespaces={default,chat,lab}'"),
            "{}",
            errors[0].remedy
        );
    }
}
