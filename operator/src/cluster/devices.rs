//! GPUs that can be claimed by UUID, if the cluster has dynamic resource allocation.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use hearth_controller_core::key::Key;
use serde::Deserialize;

/// A device as named by slices and claims.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(default)]
pub(crate) struct Device {
    pub(crate) driver: String,
    pub(crate) pool: String,
    pub(crate) device: String,
}

/// GPUs that a slice offers on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) node: String,
    /// UUIDs by device.
    pub(crate) gpus: BTreeMap<Device, String>,
}

/// GPUs that a claim holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claimed {
    /// The deployment that owns the claim; `None` if it belongs to someone else.
    pub(crate) deployment: Option<Key>,
    pub(crate) devices: Vec<Device>,
}

/// GPUs of a node that can be claimed by UUID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claimable {
    /// Those that a driver offers.
    pub(crate) offered: u32,
    /// Those of them that nobody has claimed.
    pub(crate) unclaimed: u32,
}

/// All GPUs that drivers offer, and all GPUs that are claimed.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    /// Offered GPUs by slice.
    offered: HashMap<Key, Offered>,
    /// Claimed GPUs by claim.
    claimed: HashMap<Key, Claimed>,
}

impl Devices {
    /// Stores a slice; `None` if it no longer offers a GPU. Returns whether that is a change.
    pub(crate) fn offer(&mut self, slice: Key, offered: Option<Offered>) -> bool {
        put(&mut self.offered, slice, offered)
    }

    /// Stores a claim; `None` if it no longer holds a GPU. Returns whether that is a change.
    pub(crate) fn claim(&mut self, claim: Key, claimed: Option<Claimed>) -> bool {
        put(&mut self.claimed, claim, claimed)
    }

    /// Slices that offer GPUs.
    pub(crate) fn slices(&self) -> Vec<Key> {
        self.offered.keys().cloned().collect()
    }

    /// Claims that hold GPUs.
    pub(crate) fn claims(&self) -> Vec<Key> {
        self.claimed.keys().cloned().collect()
    }

    /// GPUs of each node that can be claimed.
    pub(crate) fn claimable(&self) -> BTreeMap<String, Claimable> {
        let taken = self.claimed.values().flat_map(|claimed| &claimed.devices);
        let taken: BTreeSet<&Device> = taken.collect();
        let mut nodes: BTreeMap<String, Claimable> = BTreeMap::new();
        for offered in self.offered.values() {
            let node = nodes.entry(offered.node.clone()).or_default();
            for device in offered.gpus.keys() {
                node.offered += 1;
                node.unclaimed += u32::from(!taken.contains(device));
            }
        }
        nodes
    }

    /// UUIDs that no claim except those of `own` holds, by node; a node whose GPUs are all claimed is included with
    /// none.
    pub(crate) fn free_for(&self, own: &Key) -> BTreeMap<String, BTreeSet<String>> {
        let others = self.claimed.values();
        let taken: BTreeSet<&Device> = others
            .filter(|claimed| claimed.deployment.as_ref() != Some(own))
            .flat_map(|claimed| &claimed.devices)
            .collect();
        let mut free: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for offered in self.offered.values() {
            let gpus = offered.gpus.iter();
            let left = gpus.filter(|(device, _)| !taken.contains(device));
            free.entry(offered.node.clone())
                .or_default()
                .extend(left.map(|(_, uuid)| uuid.clone()));
        }
        free
    }
}

fn put<T: PartialEq>(table: &mut HashMap<Key, T>, key: Key, value: Option<T>) -> bool {
    match value {
        Some(value) if table.get(&key) == Some(&value) => false,
        Some(value) => {
            table.insert(key, value);
            true
        }
        None => table.remove(&key).is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(number: u32) -> Device {
        Device {
            driver: "gpu.nvidia.com".to_owned(),
            pool: "office".to_owned(),
            device: format!("gpu-{number}"),
        }
    }

    #[test]
    fn what_others_claim_is_not_free() {
        let mut devices = Devices::default();
        let offered = Offered {
            node: "office".to_owned(),
            gpus: (0..3).map(|n| (device(n), format!("GPU-{n}"))).collect(),
        };
        let slice = Key::new("", "office");
        assert!(devices.offer(slice.clone(), Some(offered.clone())));
        assert!(!devices.offer(slice.clone(), Some(offered)));
        let claim = |deployment: Option<&Key>, number| {
            Some(Claimed {
                deployment: deployment.cloned(),
                devices: vec![device(number)],
            })
        };
        let demo = Key::new("team", "demo");
        devices.claim(Key::new("team", "a"), claim(Some(&demo), 0));
        devices.claim(Key::new("other", "b"), claim(None, 1));
        let free = |own: &Key| {
            let mut free = devices.free_for(own);
            free.remove("office")
                .unwrap()
                .into_iter()
                .collect::<Vec<_>>()
        };
        assert_eq!(free(&demo), ["GPU-0", "GPU-2"]);
        assert_eq!(free(&Key::new("team", "another")), ["GPU-2"]);
        let office = devices.claimable()["office"];
        assert_eq!((office.offered, office.unclaimed), (3, 1));
        assert!(devices.claim(Key::new("other", "b"), None));
        assert_eq!(devices.free_for(&demo)["office"].len(), 3);
        assert!(devices.offer(slice, None));
        assert!(devices.free_for(&demo).is_empty());
    }
}
