//! Claims of GPUs by UUID: dynamic resource allocation.

use hearth_crds::PlanRank;
use k8s_openapi::api::core::v1::{
    Container, PodResourceClaim, PodSpec, ResourceClaim as ContainerClaim,
};
use kube_core::{DynamicObject, TypeMeta};
use serde_json::json;

use super::{BuildContext, short_digest};
use crate::names::{DEVICE_GROUP, GPU_DRIVER};

/// Name of the claim within its Pod.
const CLAIM: &str = "gpus";

/// UUIDs that a rank claims.
pub(super) fn claimed(rank: &PlanRank) -> &[String] {
    if rank.claims_gpus {
        &rank.gpu_uuids
    } else {
        &[]
    }
}

/// Gives the Pod of a rank with GPUs its runtime class, and makes it claim them where GPUs are allocated by claims.
/// Returns the template of its claim.
pub(super) fn hold_gpus(
    context: &BuildContext<'_>,
    rank: &PlanRank,
    spec: &mut PodSpec,
) -> Option<DynamicObject> {
    if rank.gpus > 0 {
        let asked = &context.deployment.spec.pod_template.runtime_class_name;
        let default = &context.settings.gpu_runtime_class;
        spec.runtime_class_name = asked.clone().or_else(|| default.clone());
    }
    claim(context, rank, spec)
}

/// The cluster creates the claim with the Pod and deletes it afterwards. Templates never change, since their names are
/// digests of what they request; they are deleted with their deployment.
fn claim(context: &BuildContext<'_>, rank: &PlanRank, spec: &mut PodSpec) -> Option<DynamicObject> {
    if claimed(rank).is_empty() {
        return None;
    }
    let requests = requests(rank);
    let digest = short_digest(requests.to_string());
    let name = format!("{}-gpus-{digest}", context.name());
    spec.resource_claims = Some(vec![PodResourceClaim {
        name: CLAIM.to_owned(),
        resource_claim_template_name: Some(name.clone()),
        ..PodResourceClaim::default()
    }]);
    let claim = |container: &mut Container| {
        let resources = container.resources.get_or_insert_default();
        resources.claims = Some(vec![ContainerClaim {
            name: CLAIM.to_owned(),
            ..ContainerClaim::default()
        }]);
    };
    spec.containers.iter_mut().for_each(claim);
    let metadata = context.metadata(&name, rank.role.as_str());
    let labels = metadata.labels.clone();
    Some(DynamicObject {
        types: Some(TypeMeta {
            api_version: format!("{DEVICE_GROUP}/v1"),
            kind: "ResourceClaimTemplate".to_owned(),
        }),
        metadata,
        data: json!({"spec": {
            // The ledger uses these labels to find the claim's owner.
            "metadata": {"labels": labels},
            "spec": {"devices": {"requests": requests}},
        }}),
    })
}

/// Requests the GPU that the rank computes on by its UUID, and any further GPUs that it holds by count.
fn requests(rank: &PlanRank) -> serde_json::Value {
    let by_uuid = rank.gpu_uuids.iter().enumerate().map(|(n, uuid)| {
        let expression = format!("device.attributes[\"{GPU_DRIVER}\"].uuid == \"{uuid}\"");
        json!({"name": format!("gpu-{n}"), "exactly": {
            "deviceClassName": GPU_DRIVER,
            "selectors": [{"cel": {"expression": expression}}],
        }})
    });
    let mut requests: Vec<serde_json::Value> = by_uuid.collect();
    let others = u64::from(rank.gpus).saturating_sub(rank.gpu_uuids.len() as u64);
    if others > 0 {
        requests.push(json!({"name": "others", "exactly": {
            "deviceClassName": GPU_DRIVER, "allocationMode": "ExactCount", "count": others,
        }}));
    }
    json!(requests)
}
