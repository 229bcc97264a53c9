//! Dynamic resource allocation (`resource.k8s.io/v1`): existing GPUs, and those of them that are claimed.

use std::collections::BTreeMap;

use hearth_controller_core::key::Key;
use hearth_controller_core::names::{GPU_DRIVER, LABEL_DEPLOYMENT};
use kube::api::ObjectMeta;
use serde::Deserialize;

use super::slim;
use crate::cluster::devices::{Claimed, Device, Offered};

/// A ResourceSlice: devices of one driver, and in the case of GPUs of one node.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LeanSlice {
    #[serde(deserialize_with = "slim")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    spec: SliceSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SliceSpec {
    driver: String,
    node_name: String,
    pool: Pool,
    devices: Vec<SliceDevice>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Pool {
    name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct SliceDevice {
    name: String,
    attributes: BTreeMap<String, Attribute>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Attribute {
    string: Option<String>,
}

/// A ResourceClaim with the devices allocated to it by the scheduler.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LeanClaim {
    #[serde(deserialize_with = "slim")]
    pub(crate) metadata: ObjectMeta,
    #[serde(default)]
    status: ClaimStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ClaimStatus {
    allocation: Allocation,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Allocated,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Allocated {
    results: Vec<Device>,
}

impl LeanSlice {
    /// The whole GPUs that it offers; `None` for another driver.
    pub(crate) fn offered(&self) -> Option<Offered> {
        let spec = &self.spec;
        if spec.driver != GPU_DRIVER || spec.node_name.is_empty() {
            return None;
        }
        let gpus = spec.devices.iter().filter_map(|device| {
            let text = |name: &str| device.attributes.get(name)?.string.clone();
            // A GPU partition has its own UUID, and another type.
            let is_whole = text("type").is_none_or(|type_| type_ == "gpu");
            let uuid = text("uuid").filter(|_| is_whole)?;
            let device = Device {
                driver: spec.driver.clone(),
                pool: spec.pool.name.clone(),
                device: device.name.clone(),
            };
            Some((device, uuid))
        });
        Some(Offered {
            node: spec.node_name.clone(),
            gpus: gpus.collect(),
        })
    }
}

impl LeanClaim {
    /// The GPUs that it holds, and the deployment that it is for; `None` without a GPU.
    pub(crate) fn claimed(&self) -> Option<Claimed> {
        let results = self.status.allocation.devices.results.iter();
        let devices: Vec<Device> = results
            .filter(|device| device.driver == GPU_DRIVER)
            .cloned()
            .collect();
        let labels = self.metadata.labels.as_ref();
        let deployment = labels.and_then(|labels| labels.get(LABEL_DEPLOYMENT));
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        (!devices.is_empty()).then(|| Claimed {
            deployment: deployment.map(|name| Key::new(namespace, name)),
            devices,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn slices_and_claims_are_read() {
        let slice: LeanSlice = serde_json::from_value(json!({
            "metadata": {"name": "office-gpu.nvidia.com"},
            "spec": {"driver": "gpu.nvidia.com", "nodeName": "office", "pool": {"name": "office", "generation": 1},
                "devices": [
                    {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}, "uuid": {"string": "GPU-1"},
                        "cudaComputeCapability": {"version": "8.9.0"}, "index": {"int": 0}}},
                    {"name": "mig-0", "attributes": {"type": {"string": "mig"}, "uuid": {"string": "MIG-1"}}},
                ]},
        }))
        .unwrap();
        let offered = slice.offered().unwrap();
        let device = Device {
            driver: "gpu.nvidia.com".to_owned(),
            pool: "office".to_owned(),
            device: "gpu-0".to_owned(),
        };
        assert_eq!(offered.node, "office");
        assert_eq!(offered.gpus, [(device.clone(), "GPU-1".to_owned())].into());
        let claim: LeanClaim = serde_json::from_value(json!({
            "metadata": {"name": "c", "namespace": "team", "labels": {"hearth.dev/deployment": "demo"}},
            "status": {"allocation": {"devices": {"results": [
                {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "office", "device": "gpu-0"},
                {"request": "nic", "driver": "nic.example.com", "pool": "office", "device": "eth1"},
            ]}}},
        }))
        .unwrap();
        let claimed = claim.claimed().unwrap();
        assert_eq!(claimed.devices, [device]);
        assert_eq!(claimed.deployment, Some(Key::new("team", "demo")));
        let empty: LeanClaim =
            serde_json::from_value(json!({"metadata": {"name": "c", "namespace": "team"}}))
                .unwrap();
        assert!(empty.claimed().is_none());
    }
}
