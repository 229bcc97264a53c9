//! Names that the operator gives: labels, annotations, objects, ports, and paths inside Pods.

/// Field manager of every server-side apply.
pub const FIELD_MANAGER: &str = "hearth";

/// Label: the application, always [`APP`].
pub const LABEL_APP: &str = "app.kubernetes.io/name";
/// Value of [`LABEL_APP`].
pub const APP: &str = "hearth";
/// Label: the program that made the object, always [`MANAGER`].
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`LABEL_MANAGED_BY`].
pub const MANAGER: &str = "hearth";
/// Label: the role of a Pod among those of its deployment.
pub const LABEL_COMPONENT: &str = "app.kubernetes.io/component";
/// Label: name of the InferenceDeployment.
pub const LABEL_DEPLOYMENT: &str = "hearth.dev/deployment";
/// Label: gateway, prefill, decode or inspect.
pub const LABEL_ROLE: &str = "hearth.dev/role";
/// Role and component of Pods that read a model's facts.
pub const ROLE_INSPECT: &str = "inspect";
/// Label: the rank's name in the plan, such as `decode-0`.
pub const LABEL_RANK: &str = "hearth.dev/rank";

/// Annotation: the plan with this rank alone, as JSON; shown to the container as a file.
pub const ANNOTATION_PLAN: &str = "hearth.dev/plan";
/// Annotation: generation of the plan that the Pod was made for.
pub const ANNOTATION_PLAN_GENERATION: &str = "hearth.dev/plan-generation";
/// Annotation: digest of everything that defines the Pod.
pub const ANNOTATION_RANK_HASH: &str = "hearth.dev/rank-hash";
/// Annotation: digest of the Pod as written by the operator that created it.
pub const ANNOTATION_FORM: &str = "hearth.dev/form";
/// Annotation of gateways: the workers that requests may go to, as JSON; shown to the container as a file.
pub const ANNOTATION_ROUTES: &str = "hearth.dev/routes";
/// Annotation: when the routes were last changed.
pub const ANNOTATION_ROUTED: &str = "hearth.dev/routed";
/// Annotation: serial of the newest certificate; a change makes the kubelet renew the Secret's files at once.
pub const ANNOTATION_CERTIFICATE: &str = "hearth.dev/certificate";
/// Annotation of inspect Pods: digest of the model source.
pub const ANNOTATION_SOURCE: &str = "hearth.dev/model-source";

// Annotations of plans of earlier versions: read, never written. See `plan_record`.

/// Annotation of plans: digest of the plan's inputs.
pub const ANNOTATION_INPUTS: &str = "hearth.dev/inputs";
/// Annotation of plans: [`OUTCOME_SERVING`] once all its ranks were ready, [`OUTCOME_FAILED`] if it was given up.
pub const ANNOTATION_OUTCOME: &str = "hearth.dev/outcome";
/// See [`ANNOTATION_OUTCOME`].
pub const OUTCOME_SERVING: &str = "Serving";
/// See [`ANNOTATION_OUTCOME`].
pub const OUTCOME_FAILED: &str = "Failed";
/// Annotation of plans: the reason why it was given up.
pub const ANNOTATION_OUTCOME_MESSAGE: &str = "hearth.dev/outcome-message";
/// Annotation of plans: the model's facts as JSON, so that they need not be read again.
pub const ANNOTATION_MODEL: &str = "hearth.dev/model";
/// Annotation of plans: nodes that have the model, comma-separated; empty: every node.
pub const ANNOTATION_MODEL_NODES: &str = "hearth.dev/model-nodes";
/// Annotation of plans: the nodes that are left out because they refused workers of earlier plans, with who refused
/// and the message, as JSON.
pub const ANNOTATION_REFUSALS: &str = "hearth.dev/refusals";
/// Annotation of plans: the reason why it does not hold back other deployments from its worker image although it does
/// not serve; never the image's fault. Empty: none.
pub const ANNOTATION_TURN: &str = "hearth.dev/passes-turn";
/// Annotation of plans: its Pods that ended as a whole and were created again, as JSON by name.
pub const ANNOTATION_ENDS: &str = "hearth.dev/ends";
/// Annotation of plans: name of a fetched model in the nodes' stores; absent for other sources.
pub const ANNOTATION_MODEL_KEY: &str = "hearth.dev/model-key";
/// Annotation of plans: the spec that the plan was made for, as JSON, without the secrets of its URLs. The plan's Pods
/// are built from it, so that an older plan comes back with its own model.
pub const ANNOTATION_SPEC: &str = "hearth.dev/spec";

/// Port of the OpenAI endpoint in gateway Pods.
pub const GATEWAY_PORT: u16 = 8080;
/// Port of the endpoint's Service.
pub const SERVICE_PORT: u16 = 80;
/// Port of gateways' metrics: not part of the Service, so that clients of the endpoint cannot reach it.
pub const METRICS_PORT: u16 = 9402;
/// Port of workers' and agents' gRPC service, with mutual TLS.
pub const WORKER_PORT: u16 = 9400;
/// Port of the gRPC service of a Pod's second rank.
pub const SECOND_WORKER_PORT: u16 = 9403;
/// Port on which an agent awaits that of another node, to measure a link or to give it a model, with mutual TLS. The chart's NetworkPolicy names it.
pub const LINK_PORT: u16 = 9404;
/// Port of workers' and agents' plain gRPC health service, for the kubelet.
pub const HEALTH_PORT: u16 = 9401;

/// Path of the worker's program in its image.
pub const WORKER_PROGRAM: &str = "/usr/bin/hearth-worker";
/// Directory of the Secret with API keys.
pub const KEYS_DIRECTORY: &str = "/etc/hearth/keys";
/// Directory of the certificate authorities of `spec.podTemplate.caBundles`.
pub const AUTHORITIES_DIRECTORY: &str = "/etc/hearth/authorities";
/// Directory of the models in the worker image.
pub const BUILTIN_DIRECTORY: &str = "/usr/share/hearth/models";
/// Mount path of a node's directory or a claim.
pub const SOURCE_DIRECTORY: &str = "/models/source";

/// Formats `host:port`, with brackets around an IPv6 address.
pub fn host_port(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

/// API group of dynamic resource allocation.
pub const DEVICE_GROUP: &str = "resource.k8s.io";
/// NVIDIA's driver of dynamic resource allocation, and the DeviceClass of its GPUs.
pub const GPU_DRIVER: &str = "gpu.nvidia.com";

/// The agents' ServiceAccount, as the chart names it.
pub const AGENT_ACCOUNT: &str = "hearth-agent";
/// Audience of the token with which an agent proves whose Pod it is: nothing else accepts it.
pub const TOKEN_AUDIENCE: &str = "hearth-operator";

/// DNS name in the certificate that all agents start with.
pub const AGENT_TLS_NAME: &str = "agent.hearth";

/// DNS name in the certificate of one node's agent; no deployment's name has as many parts.
pub fn agent_tls_name(node: &str) -> String {
    format!("{node}.node.{AGENT_TLS_NAME}")
}

/// DNS name in the certificate of one node's agent towards agents of other nodes; nothing else accepts it.
pub fn link_tls_name(node: &str) -> String {
    format!("{node}.link.{AGENT_TLS_NAME}")
}

/// DNS name in the operator's own certificate.
pub const OPERATOR_TLS_NAME: &str = "operator.hearth";

/// Name of a deployment's Secret with certificates.
pub fn certificates_secret(deployment: &str) -> String {
    format!("{deployment}-hearth-certificates")
}

/// The Secret's name in earlier versions, which Ingresses often use as well. Pods created then still mount it.
pub fn old_certificates_secret(deployment: &str) -> String {
    format!("{deployment}-tls")
}

/// Name of the scaler of a deployment's prefill workers.
pub fn scaler_name(deployment: &str) -> String {
    format!("{deployment}-prefill")
}

/// Name of the deployment whose scaler has that name, if it can be one.
pub fn deployment_of_scaler(scaler: &str) -> Option<&str> {
    scaler.strip_suffix("-prefill")
}

/// Name of a plan.
pub fn plan_name(deployment: &str, generation: u64) -> String {
    format!("{deployment}-{generation}")
}

#[cfg(test)]
mod tests {
    use super::host_port;

    #[test]
    fn an_address_of_either_ip_version_takes_a_port() {
        assert_eq!(host_port("10.0.0.1", 8080), "10.0.0.1:8080");
        assert_eq!(host_port("fd00::1", 8080), "[fd00::1]:8080");
    }
}
