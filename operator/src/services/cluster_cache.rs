//! The caches as seen by the services that call agents and gateways.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hearth_controller_core::build::model_key;
use hearth_controller_core::key::Key;
use hearth_controller_core::observed::{AgentEndpoint, NodeView};
use hearth_controller_core::plan_record::model_key_of;
use hearth_crds::NodeProfileStatus;
use ipnet::IpNet;

use crate::cluster::cache::Cache;
use crate::cluster::queue::Queue;
use crate::services::agents::AgentDirectory;
use crate::services::measure::Gateways;
use crate::telemetry::Telemetry;

/// The caches, the queue and the telemetry.
#[derive(Clone, Debug)]
pub(crate) struct ClusterCache {
    pub(crate) cache: Arc<Cache>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) telemetry: Arc<Telemetry>,
}

impl ClusterCache {
    fn wake_soon(&self, deployment: &Key) {
        self.queue
            .add(deployment.clone(), Duration::from_millis(100));
    }
}

impl AgentDirectory for ClusterCache {
    fn agents(&self) -> Vec<AgentEndpoint> {
        self.cache.lock().agents()
    }

    fn node_uid(&self, node: &str) -> Option<String> {
        self.cache.lock().node_uid(node).map(ToOwned::to_owned)
    }

    fn is_profile_in_spec(&self, node: &str) -> bool {
        self.cache.lock().profiles_in_spec.contains(node)
    }

    fn profile(&self, node: &str) -> Option<NodeProfileStatus> {
        self.cache.lock().profile(node).cloned()
    }

    fn held_bytes(&self, node: &str) -> u64 {
        let state = self.cache.lock();
        let pods = state.pods.all().map(|(_, row)| &row.value);
        pods.filter(|pod| pod.node == node && !matches!(&*pod.phase, "Succeeded" | "Failed"))
            .fold(0, |sum, pod| sum.saturating_add(pod.memory_bytes))
    }

    fn models_in_use(&self) -> Option<BTreeSet<String>> {
        if !self.telemetry.is_synced.load(Ordering::Relaxed) {
            return None;
        }
        let mut keys = BTreeSet::new();
        let state = self.cache.lock();
        for (_, row) in state.deployments.all() {
            match &*row.value {
                Ok(packed) if packed.may_be_fetched() => {
                    let deployment = packed.get().ok()?;
                    keys.extend(model_key(&deployment, &deployment.spec.model.source));
                }
                Ok(_) => {}
                Err(unreadable) => keys.extend(unreadable.model_key.clone()),
            }
        }
        for (_, row) in state.plans.all() {
            match &*row.value {
                Ok(packed) if packed.may_be_fetched() => {
                    keys.extend(model_key_of(&packed.get().ok()?));
                }
                Ok(_) => {}
                Err(unreadable) => keys.extend(unreadable.model_key.clone()),
            }
        }
        Some(keys)
    }

    fn node_ranges(&self) -> Vec<IpNet> {
        let state = self.cache.lock();
        let of_node = |node: &Arc<NodeView>| {
            // A malformed range is dropped: an agent that cannot parse it would refuse all fetches.
            let pods = node.pod_cidrs.iter().filter_map(|text| text.parse().ok());
            let own = node.addresses.iter().copied().map(IpNet::from);
            own.chain(pods).collect::<Vec<IpNet>>()
        };
        state.nodes.values().flat_map(of_node).collect()
    }

    fn note_outside(&self, agents: usize) {
        self.telemetry.outside(agents);
    }

    fn wake(&self, deployment: &Key) {
        self.wake_soon(deployment);
    }
}

impl Gateways for ClusterCache {
    fn gateways(&self) -> Vec<(Key, String, String)> {
        self.cache.lock().gateways_of(|_| true, |_, _| false)
    }

    fn gateways_of(&self, known: &BTreeMap<Key, BTreeSet<String>>) -> Vec<(Key, String, String)> {
        let is_known = |key: &Key, uid: &str| known.get(key).is_some_and(|uids| uids.contains(uid));
        let state = self.cache.lock();
        state.gateways_of(|key| known.contains_key(key), is_known)
    }

    fn in_doubt(&self) -> Vec<(Key, String, String)> {
        self.cache.lock().gateways_in_doubt()
    }

    fn wake(&self, deployment: &Key) {
        self.wake_soon(deployment);
    }
}
