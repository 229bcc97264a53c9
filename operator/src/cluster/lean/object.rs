//! Services, Secrets, budgets and policies: metadata and a digest of the rest.

use std::fmt::Debug;
use std::marker::PhantomData;

use kube::api::ObjectMeta;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::slim;
use crate::cluster::digest::{self, Digest};

/// One of the kinds that accompany a deployment's Pods.
pub(crate) trait ObjectKind: Clone + Debug + Send + Sync + 'static {
    const KIND: &'static str;
    const GROUP: &'static str;
    const PLURAL: &'static str;
}

/// Marker for Services.
#[derive(Clone, Debug)]
pub(crate) struct ServiceKind;
/// Marker for Secrets.
#[derive(Clone, Debug)]
pub(crate) struct SecretKind;
/// Marker for PodDisruptionBudgets.
#[derive(Clone, Debug)]
pub(crate) struct Budget;
/// Marker for NetworkPolicies.
#[derive(Clone, Debug)]
pub(crate) struct Policy;

impl ObjectKind for ServiceKind {
    const KIND: &'static str = "Service";
    const GROUP: &'static str = "";
    const PLURAL: &'static str = "services";
}
impl ObjectKind for SecretKind {
    const KIND: &'static str = "Secret";
    const GROUP: &'static str = "";
    const PLURAL: &'static str = "secrets";
}
impl ObjectKind for Budget {
    const KIND: &'static str = "PodDisruptionBudget";
    const GROUP: &'static str = "policy";
    const PLURAL: &'static str = "poddisruptionbudgets";
}
impl ObjectKind for Policy {
    const KIND: &'static str = "NetworkPolicy";
    const GROUP: &'static str = "networking.k8s.io";
    const PLURAL: &'static str = "networkpolicies";
}

/// Metadata, a digest of the rest, and a Service's external address.
#[derive(Clone, Debug)]
pub(crate) struct LeanObject<K> {
    pub(crate) metadata: ObjectMeta,
    pub(crate) facts: Facts,
    kind: PhantomData<K>,
}

/// Facts kept about an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Digest of everything but the status: see [`digest::of_live`].
    pub(crate) digest: Digest,
    /// Address of the load balancer, or the node port; `None` for other kinds.
    pub(crate) external: Option<String>,
}

impl Facts {
    /// The facts of an object as returned by the API server.
    pub(crate) fn of(object: &Value) -> Self {
        Self {
            digest: digest::of_live(object),
            external: external(object),
        }
    }
}

impl<'de, K> Deserialize<'de> for LeanObject<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Value::deserialize(deserializer)?;
        let metadata = object.get("metadata").unwrap_or(&Value::Null);
        Ok(Self {
            metadata: slim(metadata).map_err(serde::de::Error::custom)?,
            facts: Facts::of(&object),
            kind: PhantomData,
        })
    }
}

/// The address of the load balancer, or the node port of a Service of type NodePort.
fn external(service: &Value) -> Option<String> {
    let spec = service.get("spec")?;
    match spec.get("type")?.as_str()? {
        "LoadBalancer" => {
            let first = service.pointer("/status/loadBalancer/ingress/0")?;
            let address = first.get("hostname").or_else(|| first.get("ip"))?;
            address.as_str().map(ToOwned::to_owned)
        }
        "NodePort" => {
            let port = spec.pointer("/ports/0/nodePort")?.as_u64()?;
            Some(port.to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_service_tells_where_it_is_reached() {
        let service = |spec: Value, status: Value| {
            let value = json!({"metadata": {"name": "demo"}, "spec": spec, "status": status});
            let lean: LeanObject<ServiceKind> = serde_json::from_value(value).unwrap();
            lean.facts.external
        };
        let ports = json!([{"port": 80, "nodePort": 30080}]);
        assert_eq!(
            service(json!({"type": "ClusterIP", "ports": ports}), json!({})),
            None
        );
        assert_eq!(
            service(json!({"type": "NodePort", "ports": ports}), json!({})),
            Some("30080".to_owned())
        );
        let status = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}});
        let spec = json!({"type": "LoadBalancer", "ports": ports});
        assert_eq!(service(spec.clone(), json!({})), None);
        assert_eq!(service(spec, status), Some("192.0.2.7".to_owned()));
    }
}
