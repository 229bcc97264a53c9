//! What makes a Pod what it is, as a digest.

use hearth_crds::{InferencePlanSpec, ObjectivesSpec, PlanPrediction, PlanRank, PlanRole};
use k8s_openapi::api::core::v1::Pod;
use sha2::{Digest, Sha256};

use crate::controller::names::{
    METRICS_PORT, NOTE_PLAN, NOTE_PLAN_GENERATION, certificates_secret, old_certificates_secret,
};

/// The plan as one rank is told it: with this rank alone, and without the reasons.
pub(super) fn slice(
    plan: &InferencePlanSpec,
    rank: &PlanRank,
    endpoint: &str,
) -> InferencePlanSpec {
    let mut rank = rank.clone();
    rank.endpoint = Some(endpoint.to_owned());
    InferencePlanSpec {
        ranks: vec![rank],
        mixed_numerics: Vec::new(),
        why: Vec::new(),
        not_chosen: Vec::new(),
        ..plan.clone()
    }
}

/// Where a gateway shows its metrics.
pub(super) const METRICS_FLAG: &str = "--metrics";

/// Digest of the Pod without its name, and of the slice without what may change while the rank goes on as it is: the
/// plan's generation, predictions and objectives, and for workers how the gateway routes.
pub(super) fn rank_digest(pod: &Pod, slice: &InferencePlanSpec, deployment: &str) -> String {
    let mut pod = as_before(pod, deployment);
    pod.metadata.name = None;
    if let Some(notes) = &mut pod.metadata.annotations {
        notes.remove(NOTE_PLAN);
        notes.remove(NOTE_PLAN_GENERATION);
    }
    let pod = serde_json::to_string(&pod).unwrap_or_default();
    let slice = serde_json::to_string(&timeless(slice)).unwrap_or_default();
    short_digest(format!("{pod}\n{slice}"))
}

/// The Pod as earlier versions made it, but for what makes it do other work: a new operator restarts no Pod because its
/// Secret has another name, or because its metrics moved. It gets both when it is made anew for another reason.
fn as_before(pod: &Pod, deployment: &str) -> Pod {
    let mut pod = pod.clone();
    let Some(spec) = &mut pod.spec else {
        return pod;
    };
    let now = certificates_secret(deployment);
    let volumes = spec.volumes.iter_mut().flatten();
    for secret in volumes.filter_map(|volume| volume.secret.as_mut()) {
        if secret.secret_name.as_ref() == Some(&now) {
            secret.secret_name = Some(old_certificates_secret(deployment));
        }
    }
    for container in &mut spec.containers {
        if let Some(arguments) = &mut container.args
            && let Some(at) = arguments.iter().position(|word| word == METRICS_FLAG)
        {
            arguments.drain(at..(at + 2).min(arguments.len()));
        }
        if let Some(ports) = &mut container.ports {
            ports.retain(|port| port.container_port != i32::from(METRICS_PORT));
        }
    }
    pod
}

fn timeless(slice: &InferencePlanSpec) -> InferencePlanSpec {
    let mut slice = slice.clone();
    slice.generation = 0;
    slice.objectives = ObjectivesSpec::default();
    slice.predicted = PlanPrediction {
        ttft_ms: 0.0,
        ttft_prompt_tokens: 0,
        tpot_ms: 0.0,
        tokens_per_second: 0.0,
    };
    for rank in &mut slice.ranks {
        rank.predicted = None;
        if rank.role != PlanRole::Gateway {
            slice.routing.chunked_below_tokens = 0;
            slice.routing.max_queue = 0;
            slice.routing.queue_timeout_ms = 0;
        }
    }
    slice
}

/// The first 8 hexadecimal digits of the SHA-256.
pub(crate) fn short_digest(content: impl AsRef<[u8]>) -> String {
    let digest = Sha256::digest(content);
    digest
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
