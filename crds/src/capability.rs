//! Capabilities of this engine. A spec that asks for more gets an error for each field; nothing is ignored.
//!
//! A CEL rule refuses what the engine cannot do anywhere, at the field, in the API server and in `hearth up` alike.
//! This module covers what is supported at one target but not at the other.

use std::collections::BTreeSet;

use crate::deployment::{
    AutoscalingSpec, EndpointType, InferenceDeploymentSpec, PlacementSpec, PrefillMode, Strategy,
};
use crate::error::{FieldError, counted};
use crate::model::{HttpSource, ModelSource};
use crate::pod_template::PodTemplateSpec;
use crate::quantity::DurationText;
use crate::scaling::ScalingMode;
use crate::url::{is_url, shown_url};

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
/// Pure. An empty result for a spec that passes the schema's rules means that nothing in it would be ignored, but for what a ring
/// lacks: the planner refuses that, at either target.
pub fn unsupported(spec: &InferenceDeploymentSpec, target: Target) -> Vec<FieldError> {
    let mut errors = Vec::new();
    source(&spec.model.source, target, &mut errors);
    pools(spec, target, &mut errors);
    autoscaling(spec, target, &mut errors);
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
    if let Some(http) = &source.http {
        files(http, errors);
    }
}

/// What no rule of the schema can say of a list of files within its bounds.
fn files(http: &HttpSource, errors: &mut Vec<FieldError>) {
    let mut paths = BTreeSet::new();
    let server = |url: &str| -> String { url.split('/').take(3).collect::<Vec<_>>().join("/") };
    let first = http.files.first().map(|file| server(&file.url));
    for (at, file) in http.files.iter().enumerate() {
        let field = |name: &str| format!("spec.model.source.http.files[{at}]{name}");
        if !file.has_plain_path() {
            errors.push(FieldError::new(
                field(".path"),
                format!(
                    "is by default \"{}\", the last part of the URL",
                    file.path()
                ),
                "write its path in the model's directory, such as config.json",
            ));
        } else if !paths.insert(file.path()) {
            errors.push(FieldError::new(
                field(".path"),
                format!("is \"{}\", as another one's is", file.path()),
                "write another path, or remove one of the two: a path is by default the last part of the URL",
            ));
        }
        if !is_url(&file.url) {
            errors.push(FieldError::new(
                field(".url"),
                format!("is {:?}", shown_url(&file.url)),
                "it cannot be read as a URL: write one such as https://nas.lan/qwen3/config.json, without spaces and control characters",
            ));
        }
        let server = server(&file.url);
        if http.secret_ref.is_some() && first.as_ref() != Some(&server) {
            errors.push(FieldError::new(
                field(".url"),
                format!("is of another server than the first one's: {}", shown_url(&server)),
                "files that a secretRef opens are all of one server, which alone gets the credentials: write a URL there, or remove secretRef",
            ));
        }
    }
}

fn pools(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    // What helps another strategy, a ring would refuse, too.
    if spec.strategy == Strategy::PipedRing {
        return;
    }
    if let Some(gpus @ 2..) = spec.prefill.gpus_per_worker
        && target == Target::Machine
        && spec.prefill.mode != PrefillMode::DistributedStreamLoading
    {
        errors.push(FieldError::new(
            "spec.prefill.gpusPerWorker",
            format!("is {gpus}"),
            "with this mode a worker computes on one GPU, and more would be idle: write 1, or 0 for CPUs alone; mode: DistributedStreamLoading has several GPUs read a prompt together",
        ));
    }
    for (pool, scaling) in [
        ("prefill", &spec.prefill.scaling),
        ("decode", &spec.decode.scaling),
    ] {
        let mode = scaling.as_ref().map(|scaling| scaling.mode);
        let refused = match mode {
            Some(ScalingMode::External) => ("External", "autoscalers exist only in a cluster"),
            Some(ScalingMode::Auto) => (
                "Auto",
                "on one machine there is no room that could be given back",
            ),
            Some(ScalingMode::Static) | None => continue,
        };
        if target == Target::Machine {
            let (mode, why) = refused;
            errors.push(FieldError::new(
                format!("spec.{pool}.scaling.mode"),
                format!("is \"{mode}\""),
                format!("{why}: remove scaling, and write the number in replicas"),
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
    of_deployments(spec, errors);
    pod_template(&spec.pod_template, errors);
    placement(&spec.placement, errors);
}

/// Rejects, on one machine, what is about changes of a deployment and about other deployments.
fn of_deployments(spec: &InferenceDeploymentSpec, errors: &mut Vec<FieldError>) {
    if let Some(deadline) = spec.rollout.progress_deadline {
        errors.push(FieldError::new(
            "spec.rollout.progressDeadline",
            format!("is {deadline}"),
            "plans are rolled out only in a cluster: remove it",
        ));
    }
    if spec.priority != 0 {
        errors.push(FieldError::new(
            "spec.priority",
            format!("is {}", spec.priority),
            "deployments share nodes only in a cluster: remove it",
        ));
    }
    if spec.suspend {
        errors.push(FieldError::new(
            "spec.suspend",
            "is true",
            "hearth up serves until it is ended: remove it",
        ));
    }
}

/// Rejects settings that count only where workers end for want of requests or for others. No rule of the schema: objects of earlier
/// versions may have some of them, and stay writable.
fn autoscaling(spec: &InferenceDeploymentSpec, target: Target, errors: &mut Vec<FieldError>) {
    const RESTS: &str = "it counts only where workers end for want of requests: write decode.scaling: {mode: Auto, minReplicas: 0}, or remove it";
    const STAYS: &str = "as it is, workers end for nobody: remove it, or write decode.scaling: {mode: Auto, minReplicas: 0} for workers that end for a higher priority";
    const EMPTIED: &str = "with decode.scaling.mode External the autoscaler alone ends workers and starts them: remove it, or write decode.scaling: {mode: Auto, minReplicas: 0}";
    let AutoscalingSpec {
        scale_to_zero_after,
        hold_timeout,
        keep,
        preload,
        scale_down_stabilization: _,
    } = &spec.autoscaling;
    let duration = |value: &Option<DurationText>| value.map(|value| format!("is \"{value}\""));
    let flag = |value: bool| value.then(|| "is true".to_owned());
    let set = [
        ("scaleToZeroAfter", duration(scale_to_zero_after), RESTS),
        ("holdTimeout", duration(hold_timeout), RESTS),
        ("keep", flag(*keep), STAYS),
        ("preload", flag(*preload), RESTS),
    ];
    let set = set.into_iter().filter_map(|(field, value, remedy)| {
        let remedy = match target {
            Target::Machine => "hearth up keeps its workers: remove it",
            Target::Cluster if spec.may_rest() => return None,
            Target::Cluster if spec.may_be_emptied() && field == "holdTimeout" => return None,
            Target::Cluster if spec.may_be_emptied() => EMPTIED,
            Target::Cluster => remedy,
        };
        let field = format!("spec.autoscaling.{field}");
        Some(FieldError::new(field, value?, remedy))
    });
    errors.extend(set);
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
