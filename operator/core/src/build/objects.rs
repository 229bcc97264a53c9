//! Objects around the Pods of a deployment: its Service, its PodDisruptionBudgets and its NetworkPolicies.

use std::sync::Arc;

use hearth_crds::{
    EndpointType, InferenceDeploymentStatus, InferencePlan, InferencePlanSpec, InferencePoolScaler,
    InferencePoolScalerSpec, PlanRole, ScaledPool,
};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube_core::{ApiResource, DynamicObject, Resource, ResourceExt};
use serde_json::{Value, json};

use super::{BuildContext, collector};
use crate::names::{
    GATEWAY_PORT, LABEL_DEPLOYMENT, LABEL_ROLE, METRICS_PORT, ROLE_INSPECT, SECOND_WORKER_PORT,
    SERVICE_PORT, WORKER_PORT, scaler_name,
};
use crate::observed::{PodRole, PodView};

/// Groups of other plans that still run beside a plan: they must go on until it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// Pods of their stages.
    pub stages: usize,
    /// Whether peers are among them.
    pub has_peers: bool,
}

impl Beside {
    /// Those of worker Pods that the target does not have.
    pub(crate) fn of<'a>(
        pods: impl Iterator<Item = &'a PodView>,
        plans: &[Arc<InferencePlan>],
    ) -> Self {
        let mut beside = Self::default();
        for pod in pods.filter(|pod| !pod.has_ended()) {
            let is_stage = pod.role == PodRole::Rank(PlanRole::Stage);
            beside.stages += usize::from(is_stage && !pod.is_deleting);
            let mut plans = plans.iter();
            let plan = plans.find(|plan| plan.spec.generation == pod.plan_generation);
            let ranks = plan.map_or(&[][..], |plan| &plan.spec.ranks);
            beside.has_peers |= ranks.iter().any(|rank| rank.peers.is_some());
        }
        beside
    }
}

/// Kinds and parts of the names of all objects but the Service that a deployment may have.
const POSSIBLE: [(&str, &str); 6] = [
    ("PodDisruptionBudget", "gateway"),
    ("PodDisruptionBudget", "prefill"),
    ("PodDisruptionBudget", "decode"),
    ("PodDisruptionBudget", "stage"),
    ("NetworkPolicy", "gateway"),
    ("NetworkPolicy", "workers"),
];

/// Kinds and names of objects that `wanted`, those of a deployment, lack.
pub fn unwanted(deployment: &str, wanted: &[DynamicObject]) -> Vec<(String, String)> {
    let is_wanted = |kind: &str, name: &str| {
        let mut wanted = wanted.iter();
        wanted.any(|object| {
            let types = object.types.as_ref();
            object.name_any() == name && types.is_some_and(|types| types.kind == kind)
        })
    };
    let possible = POSSIBLE.into_iter();
    possible
        .map(|(kind, part)| (kind.to_owned(), format!("{deployment}-{part}")))
        .filter(|(kind, name)| !is_wanted(kind, name))
        .collect()
}

/// Service, PodDisruptionBudgets of the roles that the plan has, and NetworkPolicies unless they are disabled.
pub fn objects(
    context: &BuildContext<'_>,
    plan: &InferencePlanSpec,
    beside: Beside,
) -> Vec<DynamicObject> {
    let is_suspended = context.deployment.spec.suspend;
    let status = context.deployment.status.as_ref();
    let is_at_zero = status.is_some_and(InferenceDeploymentStatus::is_at_zero);
    let mut objects = vec![service(context)];
    let roles = [
        PlanRole::Gateway,
        PlanRole::Prefill,
        PlanRole::Decode,
        PlanRole::Stage,
    ];
    for role in roles {
        let ranks = plan.ranks_of(role);
        let own = ranks.filter(|rank| rank.in_pod_of.is_none()).count();
        // Where one stage of a ring ends, none of its members serves any more.
        let others = if role == PlanRole::Stage {
            beside.stages
        } else {
            0
        };
        let pods = own + others;
        if pods > 0 {
            // A suspended deployment needs no Pods, and one without requests no workers.
            let needs_none = is_suspended || (is_at_zero && role != PlanRole::Gateway);
            let least = if needs_none { 0 } else { pods };
            objects.push(disruption_budget(context, role.as_str(), least));
        }
    }
    if context.settings.network_policies {
        objects.push(gateway_policy(context));
        let has_peers = plan.ranks.iter().any(|rank| rank.peers.is_some());
        objects.push(workers_policy(context, has_peers || beside.has_peers));
    }
    objects
}

/// The scaler of the prefill workers as it is created, with the initial number.
pub fn prefill_scaler(context: &BuildContext<'_>, replicas: u32) -> InferencePoolScaler {
    let name = scaler_name(&context.name());
    let mut scaler = InferencePoolScaler::new(
        &name,
        InferencePoolScalerSpec {
            deployment: context.name(),
            pool: ScaledPool::Prefill,
            replicas,
        },
    );
    scaler.metadata = context.metadata(&name, PlanRole::Prefill.as_str());
    scaler
}

/// Labels that select the Pods of one role, in the form that a scale subresource reports.
pub fn role_selector(deployment: &str, role: PlanRole) -> String {
    format!(
        "{LABEL_DEPLOYMENT}={deployment},{LABEL_ROLE}={}",
        role.as_str()
    )
}

fn service(context: &BuildContext<'_>) -> DynamicObject {
    let endpoint_type = match context.deployment.spec.endpoint.type_ {
        EndpointType::ClusterIP => "ClusterIP",
        EndpointType::NodePort => "NodePort",
        EndpointType::LoadBalancer => "LoadBalancer",
    };
    let spec = json!({
        "type": endpoint_type,
        // One address for each IP version of the cluster.
        "ipFamilyPolicy": "PreferDualStack",
        "selector": context.role_labels(PlanRole::Gateway.as_str()),
        "ports": [{
            "name": "http",
            "port": SERVICE_PORT,
            "targetPort": GATEWAY_PORT,
            "protocol": "TCP",
            "appProtocol": "http",
        }],
    });
    let mut service = object::<Service>(context, &context.name(), PlanRole::Gateway.as_str(), spec);
    let annotations = &context.deployment.spec.endpoint.annotations;
    if !annotations.is_empty() {
        service.metadata.annotations = Some(annotations.clone());
    }
    service
}

/// An eviction waits until as many others are ready: the operator sees the cordon and moves the rank first.
///
/// This is a number of Pods rather than `maxUnavailable`, for which the cluster would query the deployment's scale
/// subresource, which counts decode workers only. Pods that are not ready may always be evicted.
fn disruption_budget(context: &BuildContext<'_>, role: &str, least: usize) -> DynamicObject {
    let spec = json!({
        "minAvailable": least,
        "selector": {"matchLabels": context.role_labels(role)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    let name = format!("{}-{role}", context.name());
    object::<PodDisruptionBudget>(context, &name, role, spec)
}

/// Anyone who can reach the Service may send requests, and Pods of the cluster may read metrics; the gateway itself
/// talks to the workers of its deployment and, where there is one, to the collector of traces, and to nothing else.
fn gateway_policy(context: &BuildContext<'_>) -> DynamicObject {
    let mut spec = json!({
        "podSelector": {"matchLabels": context.role_labels(PlanRole::Gateway.as_str())},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"ports": [tcp(GATEWAY_PORT)]},
            {"from": [{"namespaceSelector": {}}], "ports": [tcp(METRICS_PORT)]},
        ],
        "egress": [{
            "to": [{"podSelector": of_roles(context, &[PlanRole::Prefill.as_str(), PlanRole::Decode.as_str()])}],
            "ports": [tcp(WORKER_PORT), tcp(SECOND_WORKER_PORT)],
        }],
    });
    add_collector(context, &mut spec);
    let name = format!("{}-gateway", context.name());
    object::<NetworkPolicy>(context, &name, PlanRole::Gateway.as_str(), spec)
}

/// Workers are called by the gateway and by decode workers, and call prefill workers, which may be the second of a decode
/// worker's Pod. Decode workers and stages of rings call each other, and so do prefill workers and the stages that read prompts
/// with them, which may be the second of a decode worker's Pod too. They are given addresses, so they need no DNS. The kubelet's probes come from the node itself, which is always allowed.
fn workers_policy(context: &BuildContext<'_>, has_peers: bool) -> DynamicObject {
    let (gateway, prefill) = (PlanRole::Gateway.as_str(), PlanRole::Prefill.as_str());
    let (decode, stage) = (PlanRole::Decode.as_str(), PlanRole::Stage.as_str());
    let mut callers = vec![gateway, decode, stage];
    callers.extend(has_peers.then_some(prefill));
    let mut spec = json!({
        "podSelector": of_roles(context, &[prefill, decode, stage, ROLE_INSPECT]),
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{
            "from": [{"podSelector": of_roles(context, &callers)}],
            "ports": [tcp(WORKER_PORT), tcp(SECOND_WORKER_PORT)],
        }],
        "egress": [
            {
                "to": [{"podSelector": of_roles(context, &[prefill, stage])}],
                "ports": [tcp(WORKER_PORT)],
            },
            {
                "to": [{"podSelector": of_roles(context, &[decode])}],
                "ports": [tcp(WORKER_PORT), tcp(SECOND_WORKER_PORT)],
            },
        ],
    });
    add_collector(context, &mut spec);
    let name = format!("{}-workers", context.name());
    object::<NetworkPolicy>(context, &name, "workers", spec)
}

/// Lets Pods reach the collector of traces, if there is one.
fn add_collector(context: &BuildContext<'_>, policy: &mut Value) {
    let rules = context.settings.tracing.as_ref().map(collector::egress);
    if let (Some(rules), Some(egress)) = (rules, policy["egress"].as_array_mut()) {
        egress.extend(rules);
    }
}

fn of_roles(context: &BuildContext<'_>, roles: &[&str]) -> Value {
    json!({
        "matchLabels": {LABEL_DEPLOYMENT: context.name()},
        "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": roles}],
    })
}

fn tcp(port: u16) -> Value {
    json!({"protocol": "TCP", "port": port})
}

fn object<K: Resource<DynamicType = ()>>(
    context: &BuildContext<'_>,
    name: &str,
    component: &str,
    spec: Value,
) -> DynamicObject {
    let mut object = DynamicObject::new(name, &ApiResource::erase::<K>(&()));
    object.metadata = context.metadata(name, component);
    object.data = json!({"spec": spec});
    object
}
