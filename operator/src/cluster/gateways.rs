//! Gateways that can be asked.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use hearth_controller_core::key::Key;
use hearth_controller_core::observed::PodView;
use hearth_controller_core::routes::is_planned_gateway;
use hearth_crds::{InferencePlan, PlanRole};

use crate::cluster::cache::State;

impl State {
    /// Ready gateways of some deployments: their deployment, and their Pod's uid and address. Plans are unpacked to tell whether they
    /// are the operator's own, but for those of which that is known.
    pub(crate) fn gateways_of(
        &self,
        of: impl Fn(&Key) -> bool,
        is_known: impl Fn(&Key, &str) -> bool,
    ) -> Vec<(Key, String, String)> {
        let nodes: HashSet<&IpAddr> = self.nodes.values().flat_map(|it| &it.addresses).collect();
        let ready = self.pods.all().filter(|(_, row)| {
            let pod = &row.value;
            pod.role.is_gateway() && pod.is_ready && !pod.is_deleting
        });
        let mut plans: HashMap<&Arc<str>, Vec<Arc<InferencePlan>>> = HashMap::new();
        ready
            .filter_map(|(pod, row)| {
                let key = self.keys.get(&row.owner).filter(|key| of(key))?.clone();
                // Anyone can name a deployment of another namespace on a Pod, and a Pod on the host network answers
                // with whatever the node serves there; no gateway of ours does either.
                let is_node = nodes.contains(&row.value.ip.parse::<IpAddr>().ok()?);
                let is_elsewhere = key.namespace != pod.namespace || is_node;
                let mut is_planned = || {
                    let plans = plans.entry(&row.owner);
                    let plans = plans.or_insert_with(|| self.plans_of(&row.owner));
                    is_planned_gateway(&row.value, &key.name, plans)
                };
                let is_ours = !is_elsewhere && (is_known(&key, &row.value.uid) || is_planned());
                is_ours.then(|| (key, row.value.uid.clone(), row.value.ip.clone()))
            })
            .collect()
    }

    /// Ready gateways of deployments that have a worker which was ready, still runs, and is no longer ready, a Pod with a second
    /// rank, or a stage.
    pub(crate) fn gateways_in_doubt(&self) -> Vec<(Key, String, String)> {
        let rows = self.pods.all();
        let is_doubtful = |pod: &PodView| {
            pod.has_lost_readiness || pod.second.is_some() || pod.has_role(PlanRole::Stage)
        };
        let rows = rows.filter(|(_, row)| is_doubtful(&row.value) && !row.value.is_deleting);
        let doubtful: HashSet<&Key> = rows
            .filter_map(|(_, row)| self.keys.get(&row.owner))
            .collect();
        if doubtful.is_empty() {
            return Vec::new();
        }
        self.gateways_of(|key| doubtful.contains(key), |_, _| false)
    }
}
