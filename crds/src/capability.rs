//! Capabilities of this engine. A spec that asks for more gets an error for each field; nothing is ignored.
//!
//! A CEL rule refuses what the engine cannot do anywhere, at the field, in the API server and in `hearth up` alike.
//! This module covers what is supported at one target but not at the other.

use crate::deployment::{EndpointType, InferenceDeploymentSpec, PlacementSpec, PrefillMode};
use crate::error::{FieldError, counted};
use crate::model::ModelSource;
use crate::pod_template::PodTemplateSpec;
use crate::scaling::ScalingMode;

/// Models that come with Hearth.
pub const BUILTIN_MODELS: [&str; 1] = ["hearth-demo"];

/// Remedy for the strategy that this engine does not have.
pub const NOT_INTERLEAVED_SAYS: &str =
    "this engine has no interleaved pipeline: write Auto, Hybrid or PipedRing";

/// Remedy for a KV cache number format that the engine lacks.
pub const KV_TYPES_SAYS: &str =
    "this engine keeps keys and values in BF16 or F32: write one of these";

/// Environment in which a deployment runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One machine without a cluster: `hearth up`.
    Machine,
    /// Nodes of a Kubernetes cluster: the operator.
    Cluster,
}

/// Returns an error for every field of the spec that asks for a capability that this engine has, but not at `target`.
///
/// Pure. An empty result for a spec that passes the schema's rules means that nothing in it would be ignored.
pub fn unsupported(spec: &InferenceDeploymentSpec, target: Target) -> Vec<FieldError> {
    let mut errors = Vec::new();
    source(&spec.model.source, target, &mut errors);
    pools(spec, target, &mut errors);
    surroundings(spec, target, &mut errors);
    errors
}

fn source(source: &ModelSource, target: Target, errors: &mut Vec<FieldError>) {
    if let Some(claim) = &source.persistent_volume_claim
        && target == Target::Machine
    {
        errors.push(FieldError::new(
            "spec.model.source.persistentVolumeClaim",
            format!("names {}", claim.claim_name),
            "a volume claim exists only in a cluster: fetch the files yourself and name their directory by hostPath: {path: /models/NAME}, or offer them as an archive by http: {url, sha256}",
        ));
    }
}

fn pools(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    if let Some(gpus @ 2..) = spec.prefill.gpus_per_worker
        && target == Target::Machine
        && spec.prefill.mode != PrefillMode::DistributedStreamLoading
    {
        errors.push(FieldError::new(
            "spec.prefill.gpusPerWorker",
            format!("is {gpus}"),
            "this engine runs each worker on one GPU: write 1, 0 to run on CPUs, or mode: DistributedStreamLoading for several workers that read prompts together",
        ));
    }
    for (pool, scaling) in [
        ("prefill", &spec.prefill.scaling),
        ("decode", &spec.decode.scaling),
    ] {
        let mode = scaling.as_ref().map(|scaling| scaling.mode);
        if mode == Some(ScalingMode::External) && target == Target::Machine {
            errors.push(FieldError::new(
                format!("spec.{pool}.scaling.mode"),
                "is \"External\"",
                "autoscalers exist only in a cluster: remove scaling, and write the number in replicas",
            ));
        }
    }
}

fn surroundings(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    if target == Target::Cluster {
        return;
    }
    let type_ = match spec.endpoint.type_ {
        EndpointType::ClusterIP => None,
        EndpointType::NodePort => Some("NodePort"),
        EndpointType::LoadBalancer => Some("LoadBalancer"),
    };
    if let Some(type_) = type_ {
        errors.push(FieldError::new(
            "spec.endpoint.type",
            format!("is \"{type_}\""),
            "Services exist only in a cluster: remove it; the address on one machine is chosen by flags of hearth up",
        ));
    }
    if let Some(secret) = &spec.endpoint.api_keys_secret_ref {
        errors.push(FieldError::new(
            "spec.endpoint.apiKeysSecretRef",
            format!("names {}", secret.name),
            "Secrets exist only in a cluster: remove it; API keys on one machine are given by flags of hearth up",
        ));
    }
    for (field, flag, duration) in [
        ("keepAlive", "--keep-alive", spec.endpoint.keep_alive),
        ("clientStall", "--client-stall", spec.endpoint.client_stall),
    ] {
        if let Some(duration) = duration {
            errors.push(FieldError::new(
                format!("spec.endpoint.{field}"),
                format!("is {duration}"),
                format!("the endpoint on one machine is set by flags of hearth up: remove it and use {flag} SECONDS"),
            ));
        }
    }
    if !spec.endpoint.annotations.is_empty() {
        errors.push(FieldError::new(
            "spec.endpoint.annotations",
            format!("has {}", counted(spec.endpoint.annotations.len(), "key")),
            "Services exist only in a cluster: remove it",
        ));
    }
    if spec.gateway.replicas > 1 {
        errors.push(FieldError::new(
            "spec.gateway.replicas",
            format!("is {}", spec.gateway.replicas),
            "one machine has one gateway: write 1, or remove it",
        ));
    }
    if let Some(deadline) = spec.rollout.progress_deadline {
        errors.push(FieldError::new(
            "spec.rollout.progressDeadline",
            format!("is {deadline}"),
            "plans are rolled out only in a cluster: remove it",
        ));
    }
    if spec.suspend {
        errors.push(FieldError::new(
            "spec.suspend",
            "is true",
            "hearth up serves until it is ended: remove it",
        ));
    }
    pod_template(&spec.pod_template, errors);
    placement(&spec.placement, errors);
}

/// Rejects placement fields: placement applies only in a cluster.
fn placement(placement: &PlacementSpec, errors: &mut Vec<FieldError>) {
    if !placement.tolerations.is_empty() {
        errors.push(FieldError::new(
            "spec.placement.tolerations",
            format!("has {}", counted(placement.tolerations.len(), "item")),
            "taints exist only on the nodes of a cluster and there is one machine here: remove it",
        ));
    }
    if let Some(name) = &placement.runtime_class_name {
        errors.push(FieldError::new(
            "spec.placement.runtimeClassName",
            format!("is \"{name}\""),
            "RuntimeClasses exist only in a cluster: remove it; workers on one machine see its GPUs directly",
        ));
    }
    if !placement.node_selector.is_empty() {
        let labels: Vec<String> = placement
            .node_selector
            .iter()
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        errors.push(FieldError::new(
            "spec.placement.nodeSelector",
            format!("is {}", labels.join(",")),
            "a selector chooses among the nodes of a cluster and there is one machine here: remove it",
        ));
    }
}

/// Rejects Pod template fields: one machine runs processes, not Pods.
fn pod_template(template: &PodTemplateSpec, errors: &mut Vec<FieldError>) {
    let PodTemplateSpec {
        labels,
        annotations,
        env,
        ca_bundles,
        runtime_class_name,
        priority_class_name,
        resource_claims,
    } = template;
    const NO_PODS: &str = "Pods exist only in a cluster: remove it";
    let counts = [
        ("labels", "key", labels.len(), NO_PODS),
        ("annotations", "key", annotations.len(), NO_PODS),
        (
            "env",
            "item",
            env.len(),
            "processes on one machine have the environment of hearth up: remove it, and set the variables there",
        ),
        (
            "caBundles",
            "item",
            ca_bundles.len(),
            "ConfigMaps and Secrets exist only in a cluster: remove it, and name the file in SSL_CERT_FILE",
        ),
        (
            "resourceClaims",
            "item",
            resource_claims.len(),
            "claims of devices exist only in a cluster: remove it; workers on one machine see its devices directly",
        ),
    ];
    for (field, item, count, remedy) in counts {
        if count > 0 {
            errors.push(FieldError::new(
                format!("spec.podTemplate.{field}"),
                format!("has {}", counted(count, item)),
                remedy,
            ));
        }
    }
    let names = [
        (
            "runtimeClassName",
            runtime_class_name,
            "RuntimeClasses exist only in a cluster: remove it; workers on one machine see its GPUs directly",
        ),
        (
            "priorityClassName",
            priority_class_name,
            "PriorityClasses exist only in a cluster: remove it",
        ),
    ];
    for (field, name, remedy) in names {
        if let Some(name) = name {
            errors.push(FieldError::new(
                format!("spec.podTemplate.{field}"),
                format!("is \"{name}\""),
                remedy,
            ));
        }
    }
}
