//! Kubernetes objects reduced to the fields that the operator reads, during parsing: a cache of thousands of Pods
//! stays small, and no Secret's data is kept.

mod devices;
mod node;
mod object;
mod own;
mod plan_slice;
mod pod;
mod requests;

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::ObjectMeta;
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::{Deserialize, Deserializer};

pub(crate) use devices::{LeanClaim, LeanSlice};
pub(crate) use node::LeanNode;
pub(crate) use object::{Budget, Facts, LeanObject, ObjectKind, Policy, SecretKind, ServiceKind};
pub(crate) use own::{LeanDeployment, LeanPlan, LeanProfile, LeanScaler};
pub(crate) use pod::{AgentPod, LeanPod};
pub(crate) use requests::AnyPod;

use hearth_controller_core::names::DEVICE_GROUP;

/// Metadata without unused fields, mainly managed fields and finalizers.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct SlimMeta {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    generation: Option<i64>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

/// Deserializes metadata without unused fields.
fn slim<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let slim = SlimMeta::deserialize(deserializer)?;
    Ok(ObjectMeta {
        name: slim.name,
        namespace: slim.namespace,
        uid: slim.uid,
        resource_version: slim.resource_version,
        generation: slim.generation,
        creation_timestamp: slim.creation_timestamp,
        deletion_timestamp: slim.deletion_timestamp,
        labels: slim.labels,
        annotations: slim.annotations,
        owner_references: slim.owner_references,
        ..ObjectMeta::default()
    })
}

/// The resource version as a number; 0 if it is not a number.
pub(crate) fn version(meta: &ObjectMeta) -> u64 {
    let version = meta.resource_version.as_deref().unwrap_or_default();
    version.parse().unwrap_or_default()
}

/// The uid of the controller that owns an object; empty if there is none.
pub(crate) fn owner(meta: &ObjectMeta) -> &str {
    meta.owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true))
        .map_or("", |owner| owner.uid.as_str())
}

/// Implements `kube::Resource` for a lean type.
macro_rules! resource {
    ($type:ty, $scope:ty, $group:expr, $version:expr, $kind:expr, $plural:expr) => {
        impl kube::Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind(_: &()) -> std::borrow::Cow<'_, str> {
                $kind.into()
            }
            fn group(_: &()) -> std::borrow::Cow<'_, str> {
                $group.into()
            }
            fn version(_: &()) -> std::borrow::Cow<'_, str> {
                $version.into()
            }
            fn plural(_: &()) -> std::borrow::Cow<'_, str> {
                $plural.into()
            }
            fn meta(&self) -> &kube::api::ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut kube::api::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(LeanPod, NamespaceResourceScope, "", "v1", "Pod", "pods");
resource!(AgentPod, NamespaceResourceScope, "", "v1", "Pod", "pods");
resource!(AnyPod, NamespaceResourceScope, "", "v1", "Pod", "pods");
resource!(
    LeanClaim,
    NamespaceResourceScope,
    DEVICE_GROUP,
    "v1",
    "ResourceClaim",
    "resourceclaims"
);
resource!(
    LeanSlice,
    ClusterResourceScope,
    DEVICE_GROUP,
    "v1",
    "ResourceSlice",
    "resourceslices"
);
resource!(LeanNode, ClusterResourceScope, "", "v1", "Node", "nodes");
resource!(
    LeanDeployment,
    NamespaceResourceScope,
    hearth_crds::GROUP,
    hearth_crds::VERSION,
    "InferenceDeployment",
    "inferencedeployments"
);
resource!(
    LeanPlan,
    NamespaceResourceScope,
    hearth_crds::GROUP,
    hearth_crds::VERSION,
    "InferencePlan",
    "inferenceplans"
);
resource!(
    LeanScaler,
    NamespaceResourceScope,
    hearth_crds::GROUP,
    hearth_crds::VERSION,
    "InferencePoolScaler",
    "inferencepoolscalers"
);
resource!(
    LeanProfile,
    ClusterResourceScope,
    hearth_crds::GROUP,
    hearth_crds::VERSION,
    "NodeProfile",
    "nodeprofiles"
);

impl<K: ObjectKind> kube::Resource for LeanObject<K> {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        K::KIND.into()
    }
    fn group(_: &()) -> Cow<'_, str> {
        K::GROUP.into()
    }
    fn version(_: &()) -> Cow<'_, str> {
        "v1".into()
    }
    fn plural(_: &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
