//! `spec.podTemplate`: the few things that a deployment's author may add to the Pods that Hearth creates.
//!
//! It is deliberately not a Kubernetes type: anything missing here cannot be requested, so Pods comply with Pod
//! Security `restricted` and with what the plan accounts for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

#[cfg(feature = "kube")]
use crate::rules;

/// Additions to the Pods that Hearth creates for the deployment. A change is a new plan, whose Pods replace the old
/// ones and which is rolled back if they do not become ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodTemplateSpec {
    /// Labels of every Pod of the deployment. Prefixes of Hearth and Kubernetes (hearth.dev, kubernetes.io, k8s.io), of network
    /// plugins and of sidecar injectors are refused.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(extend("maxProperties" = 16, "additionalProperties" = {"type": "string", "maxLength": 63}))
    )]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new(rules::QUALIFIED_KEYS).message(rules::LABEL_KEYS_SAYS),
            validation = Rule::new(rules::KEYS_OF_OTHERS).message(rules::KEYS_OF_OTHERS_SAYS),
            validation = Rule::new(rules::KEYS_OF_NETWORKS).message(rules::KEYS_OF_NETWORKS_SAYS),
            validation = Rule::new(rules::KEYS_OF_INJECTORS).message(rules::KEYS_OF_INJECTORS_SAYS),
            validation = Rule::new("self.all(k, self[k].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$'))")
                .message("write label values of letters, digits, '-', '_' and '.', at most 63 of them"),
        )
    )]
    pub labels: BTreeMap<String, String>,
    /// Annotations of every Pod of the deployment, each with a prefix such as prometheus.io/. Prefixes of Hearth, Kubernetes,
    /// container runtimes, network plugins and sidecar injectors are refused: they could give a Pod resources or
    /// rights that its plan does not count.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(
        feature = "kube",
        schemars(extend("maxProperties" = 32, "additionalProperties" = {"type": "string", "maxLength": 4096}))
    )]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new(rules::PREFIXED_KEYS).message(rules::PREFIXED_KEYS_SAYS),
            validation = Rule::new(rules::KEYS_OF_OTHERS).message(rules::KEYS_OF_OTHERS_SAYS),
            validation = Rule::new(rules::KEYS_OF_NETWORKS).message(rules::KEYS_OF_NETWORKS_SAYS),
            validation = Rule::new(rules::KEYS_OF_INJECTORS).message(rules::KEYS_OF_INJECTORS_SAYS),
            validation = Rule::new(rules::KEYS_OF_RUNTIMES).message(rules::KEYS_OF_RUNTIMES_SAYS),
        )
    )]
    pub annotations: BTreeMap<String, String>,
    /// Environment variables of every Pod of the deployment, such as RUST_LOG.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 32)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["name".into()])))]
    pub env: Vec<EnvVariable>,
    /// Certificate authorities in ConfigMaps or Secrets, mounted read-only in every Pod of the deployment and passed to
    /// TLS libraries in SSL_CERT_DIR: for a collector of traces with https, the only server outside the deployment that these
    /// processes call. Calls inside it use an authority of their own. Models behind URLs are fetched by the agents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 8)))]
    pub ca_bundles: Vec<CaBundle>,
    /// RuntimeClass of workers that hold GPUs, such as nvidia. By default that of the operator's chart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new(rules::OBJECT_NAME).message("write the name of a RuntimeClass, such as nvidia: lower-case letters, digits, '-' and '.'"))
    )]
    pub runtime_class_name: Option<String>,
    /// PriorityClass of every Pod of the deployment. Plans never rely on preempting other Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new(rules::OBJECT_NAME).message("write the name of a PriorityClass: lower-case letters, digits, '-' and '.'"),
            validation = Rule::new("!self.startsWith('system-')").message("classes that begin with system- are the cluster's own: write another PriorityClass"),
        )
    )]
    pub priority_class_name: Option<String>,
    /// Device claims of every worker in addition to its GPUs, such as network adapters; the gateway has none. GPUs are
    /// requested by gpusPerWorker: the plan does not know of GPUs claimed here. Requires a cluster that serves
    /// resource.k8s.io/v1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "kube", schemars(length(max = 8)))]
    #[cfg_attr(feature = "kube", x_kube(merge_strategy = ListMerge::Map(vec!["name".into()])))]
    pub resource_claims: Vec<ResourceClaimRef>,
}

/// An environment variable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvVariable {
    /// The variable's name. Names used by Hearth, the dynamic loader, TLS libraries and GPU drivers are refused.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 128)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(
            validation = Rule::new("self.matches('^[A-Za-z_][A-Za-z0-9_]*$')").message("write a name of letters, digits and '_' that does not begin with a digit, such as RUST_LOG"),
            validation = Rule::new(rules::OPEN_VARIABLE).message(rules::OPEN_VARIABLE_SAYS),
        )
    )]
    pub name: String,
    /// Its value. $(NAME) refers to a variable before it in the list, as in a Pod.
    #[serde(default)]
    #[cfg_attr(feature = "kube", schemars(length(max = 4096)))]
    pub value: String,
}

/// Certificate authorities in PEM, from a ConfigMap or a Secret in the deployment's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(validation = Rule::new("has(self.configMap) != has(self.secret)").message("write exactly one of configMap, secret"))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CaBundle {
    /// The ConfigMap's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub config_map: Option<String>,
    /// The Secret's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub secret: Option<String>,
    /// The key that holds the certificates, such as ca.crt.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 253)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[-._a-zA-Z0-9]+$') && self != '.' && !self.startsWith('..')").message("write a key of the object, such as ca.crt: letters, digits, '-', '_' and '.'"))
    )]
    pub key: String,
}

/// A claim of devices (dynamic resource allocation).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    x_kube(validation = Rule::new("has(self.resourceClaimName) != has(self.resourceClaimTemplateName)").message("write exactly one of resourceClaimName, resourceClaimTemplateName"))
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResourceClaimRef {
    /// The claim's name within the Pod.
    #[cfg_attr(feature = "kube", schemars(length(min = 1, max = 63)))]
    #[cfg_attr(
        feature = "kube",
        x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && self != 'gpus'").message("write a name of lower-case letters, digits and '-', and not gpus, which Hearth's own claim is called"))
    )]
    pub name: String,
    /// A ResourceClaim that all workers share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub resource_claim_name: Option<String>,
    /// A ResourceClaimTemplate from which each worker gets its own claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "kube", schemars(length(max = 253)))]
    #[cfg_attr(feature = "kube", x_kube(validation = Rule::new(rules::OBJECT_NAME).message(rules::OBJECT_NAME_SAYS)))]
    pub resource_claim_template_name: Option<String>,
}

impl PodTemplateSpec {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
