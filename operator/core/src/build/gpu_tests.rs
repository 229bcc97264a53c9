//! Pods that hold GPUs: through the device plugin, or by claims.

use hearth_crds::InferenceDeployment;
use serde_json::json;

use super::tests::{pods_of, resources};
use crate::observed::Settings;
use crate::testing::samples::{deployment, plan, settings};

#[test]
fn gpus_are_asked_of_the_device_plugin() {
    let mut plan = plan();
    plan.ranks[1].gpus = 2;
    let pods = pods_of(&settings(), &deployment(), &plan);
    assert_eq!(pods[1].gpus, 2);
    assert_eq!(
        resources(&pods[1].pod)["limits"],
        json!({"nvidia.com/gpu": "2"})
    );
    assert_eq!(resources(&pods[2].pod)["limits"], json!(null));
}

#[test]
fn gpus_that_can_be_claimed_are_claimed_by_uuid() {
    let mut plan = plan();
    plan.ranks[1].gpus = 2;
    plan.ranks[1].claims_gpus = true;
    plan.ranks[1].gpu_uuids = vec!["GPU-1".to_owned()];
    let pods = pods_of(&settings(), &deployment(), &plan);
    let template = pods[1].claim_template.clone().expect("a template");
    assert_eq!(pods[1].claimed_gpus, ["GPU-1"]);
    let resources = resources(&pods[1].pod);
    assert_eq!(resources["limits"], json!(null));
    assert_eq!(resources["claims"], json!([{"name": "gpus"}]));
    let spec = serde_json::to_value(&pods[1].pod.spec).expect("JSON");
    let name = template.metadata.name.as_deref().expect("a name");
    assert_eq!(
        spec["resourceClaims"],
        json!([{"name": "gpus", "resourceClaimTemplateName": name}])
    );
    let requests = &template.data["spec"]["spec"]["devices"]["requests"];
    assert_eq!(
        requests[0]["exactly"]["selectors"][0]["cel"]["expression"],
        "device.attributes[\"gpu.nvidia.com\"].uuid == \"GPU-1\""
    );
    assert_eq!(requests[1]["exactly"]["count"], 1);
    let labels = &template.data["spec"]["metadata"]["labels"];
    assert_eq!(labels["hearth.dev/deployment"], "demo");
    assert!(pods[2].claim_template.is_none());
}

#[test]
fn pods_that_hold_gpus_have_the_runtime_class_of_the_spec_or_of_the_chart() {
    let class = |settings: &Settings, deployment: &InferenceDeployment| {
        let mut plan = plan();
        plan.ranks[1].gpus = 1;
        let pods = pods_of(settings, deployment, &plan);
        let specs = pods.iter().map(|pod| pod.pod.spec.clone().expect("spec"));
        specs
            .map(|spec| spec.runtime_class_name)
            .collect::<Vec<_>>()
    };
    let (mut settings, mut deployment) = (settings(), deployment());
    assert_eq!(class(&settings, &deployment)[1], None);
    settings.gpu_runtime_class = Some("nvidia".to_owned());
    let classes = class(&settings, &deployment);
    assert_eq!(
        (classes[0].as_deref(), classes[1].as_deref()),
        (None, Some("nvidia"))
    );
    deployment.spec.pod_template.runtime_class_name = Some("nvidia-cdi".to_owned());
    assert_eq!(
        class(&settings, &deployment)[1].as_deref(),
        Some("nvidia-cdi")
    );
}
