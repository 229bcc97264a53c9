//! Capabilities of this engine. A spec that asks for more gets an error for each field, and nothing is ignored.

use crate::deployment::{
    DualBatch, EndpointType, InferenceDeploymentSpec, KvType, PrefillMode, Strategy,
};
use crate::error::FieldError;
use crate::model::{ModelSource, Quantization};

/// Models that come with Hearth.
pub const BUILTIN_MODELS: [&str; 1] = ["hearth-demo"];

/// Where a deployment runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One machine without a cluster: `hearth up`.
    Machine,
    /// Nodes of a Kubernetes cluster: the operator.
    Cluster,
}

/// Every field of the spec that asks for a capability that this engine does not have at `target`.
///
/// Pure. An empty answer means that nothing in the spec would be ignored.
pub fn unsupported(spec: &InferenceDeploymentSpec, target: Target) -> Vec<FieldError> {
    let mut errors = Vec::new();
    model(spec, target, &mut errors);
    pools(spec, target, &mut errors);
    kv_cache(spec, &mut errors);
    surroundings(spec, target, &mut errors);
    errors
}

fn model(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    source(&spec.model.source, target, errors);
    if spec.model.quantization != Quantization::Native {
        errors.push(FieldError::new(
            "spec.model.quantization",
            format!("is {:?}", spec.model.quantization),
            "this engine runs weights as the checkpoint has them: write Native, and choose a checkpoint in FP8 for less memory",
        ));
    }
    if !spec.model.adapters.is_empty() {
        errors.push(FieldError::new(
            "spec.model.adapters",
            format!("has {} items", spec.model.adapters.len()),
            "this engine does not run LoRA adapters: remove them, or merge them into the checkpoint",
        ));
    }
    let ring = match spec.strategy {
        Strategy::Auto | Strategy::Hybrid => return,
        Strategy::PipedRing => "PipedRing",
        Strategy::Interleaved => "Interleaved",
    };
    errors.push(FieldError::new(
        "spec.strategy",
        format!("is {ring:?}"),
        "this engine has no rings of nodes: write Auto or Hybrid",
    ));
}

fn source(source: &ModelSource, target: Target, errors: &mut Vec<FieldError>) {
    const HERE: &str = "fetch the files yourself and name their directory by hostPath: {path: /models/NAME}, or offer them as an archive by http: {url, sha256}";
    if let Some(builtin) = &source.builtin
        && !BUILTIN_MODELS.contains(&builtin.name.as_str())
    {
        errors.push(FieldError::new(
            "spec.model.source.builtin.name",
            format!("is {:?}", builtin.name),
            format!(
                "the models that come with Hearth are: {}",
                BUILTIN_MODELS.join(", ")
            ),
        ));
    }
    if let Some(hub) = &source.hugging_face {
        errors.push(FieldError::new(
            "spec.model.source.huggingFace",
            format!("names {}", hub.repo),
            format!("this engine does not download from the hub: {HERE}"),
        ));
    }
    if let Some(claim) = &source.persistent_volume_claim
        && target == Target::Machine
    {
        errors.push(FieldError::new(
            "spec.model.source.persistentVolumeClaim",
            format!("names {}", claim.claim_name),
            format!("a volume claim exists only in a cluster: {HERE}"),
        ));
    }
}

fn pools(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    match spec.prefill.mode {
        PrefillMode::Auto | PrefillMode::Chunked => {}
        PrefillMode::StreamLoading | PrefillMode::DistributedStreamLoading => {
            errors.push(FieldError::new(
                "spec.prefill.mode",
                format!("is \"{:?}\"", spec.prefill.mode),
                "this engine keeps a worker's weights where they are used and does not stream them: write Auto or Chunked",
            ))
        }
    }
    if let Some(gpus @ 2..) = spec.prefill.gpus_per_worker
        && target == Target::Machine
    {
        errors.push(FieldError::new(
            "spec.prefill.gpusPerWorker",
            format!("is {gpus}"),
            "this engine runs each worker on one GPU: write 1, or 0 to run on CPUs",
        ));
    }
    if spec.decode.dual_batch == DualBatch::On {
        errors.push(FieldError::new(
            "spec.decode.dualBatch",
            "is \"On\"",
            "dual batch overlaps a GPU's attention with the CPU's experts and this engine runs each worker on one device: write Auto or \"Off\"",
        ));
    }
    for (pool, min, max) in [
        (
            "prefill",
            spec.prefill.min_replicas,
            spec.prefill.max_replicas,
        ),
        ("decode", spec.decode.min_replicas, spec.decode.max_replicas),
    ] {
        if let (Some(min), Some(max)) = (min, max) {
            errors.push(FieldError::new(
                format!("spec.{pool}.maxReplicas"),
                format!("is {max} with minReplicas {min}"),
                format!(
                    "this engine does not scale by itself: write spec.{pool}.replicas: {}{}",
                    min.max(1),
                    if pool == "decode" { AUTOSCALER } else { "" }
                ),
            ));
        }
    }
    for (field, duration) in [
        ("scaleToZeroAfter", spec.autoscaling.scale_to_zero_after),
        (
            "scaleDownStabilization",
            spec.autoscaling.scale_down_stabilization,
        ),
    ] {
        if let Some(duration) = duration {
            errors.push(FieldError::new(
                format!("spec.autoscaling.{field}"),
                format!("is \"{duration}\""),
                "this engine does not scale by itself: remove spec.autoscaling",
            ));
        }
    }
}

/// The autoscaler to use instead.
const AUTOSCALER: &str =
    "; in a cluster a HorizontalPodAutoscaler can change it (manifests/examples/hpa.yaml)";

fn kv_cache(spec: &InferenceDeploymentSpec, errors: &mut Vec<FieldError>) {
    let kv = &spec.decode.kv_cache;
    for (field, kv_type) in [("keyType", kv.key_type), ("valueType", kv.value_type)] {
        if matches!(kv_type, KvType::Int8 | KvType::FP8) {
            errors.push(FieldError::new(
                format!("spec.decode.kvCache.{field}"),
                format!("is \"{kv_type:?}\""),
                "this engine keeps keys and values in BF16 or F32: write one of these",
            ));
        }
    }
    if let Some(spill) = &kv.spill {
        errors.push(FieldError::new(
            "spec.decode.kvCache.spill",
            format!("names {}", spill.path),
            "this engine keeps the KV cache in memory: remove spill, and lower contextLength or maxBatch if memory is short",
        ));
    }
}

fn surroundings(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    if spec.endpoint.gateway.is_some() {
        errors.push(FieldError::new(
            "spec.endpoint.gateway",
            "is set",
            "this engine does not attach routes to a Gateway: remove it and use the endpoint directly",
        ));
    }
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
    if !spec.placement.tolerations.is_empty() {
        errors.push(FieldError::new(
            "spec.placement.tolerations",
            format!("has {} items", spec.placement.tolerations.len()),
            "taints exist only on the nodes of a cluster and there is one machine here: remove it",
        ));
    }
    if let Some(name) = &spec.placement.runtime_class_name {
        errors.push(FieldError::new(
            "spec.placement.runtimeClassName",
            format!("is \"{name}\""),
            "RuntimeClasses exist only in a cluster: remove it; workers on one machine see its GPUs directly",
        ));
    }
    if !spec.placement.node_selector.is_empty() {
        let labels: Vec<String> = spec
            .placement
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
