//! The cluster at one moment, for commands: each list read once, into the same tables that watches keep for the operator.

use std::fmt::Debug;
use std::sync::Arc;

use hearth_controller_core::key::Key;
use hearth_controller_core::ledger::holdings::{Share, shares};
use hearth_controller_core::names::LABEL_DEPLOYMENT;
use hearth_controller_core::observed::Holding;
use hearth_crds::{InferencePlan, PlanRank};
use kube::api::{Api, ListParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use crate::cluster::cache::State;
use crate::cluster::failure::Failure;
use crate::cluster::lean::{
    AnyPod, LeanClaim, LeanDeployment, LeanNode, LeanPlan, LeanPod, LeanProfile, LeanSlice,
};
use crate::cluster::watches::{Cached, PAGE};

/// What was read.
#[derive(Default)]
pub(crate) struct Snapshot {
    /// The tables.
    pub(crate) state: State,
    /// What may not be read and can be done without, in the API server's words.
    pub(crate) unseen: Vec<String>,
}

impl Snapshot {
    /// Reads nodes, deployments, and everything that holds resources of nodes.
    ///
    /// # Errors
    /// The API server's error.
    pub(crate) async fn take(client: &Client) -> Result<Self, Failure> {
        let every = ListParams::default();
        let mut snapshot = Self::default();
        snapshot.read::<LeanNode>(client, &every).await?;
        snapshot.read::<LeanProfile>(client, &every).await?;
        // First of what has an owner: an object of a deployment that is not known counts as somebody else's.
        snapshot.read::<LeanDeployment>(client, &every).await?;
        snapshot.read::<LeanPlan>(client, &every).await?;
        let ours = ListParams::default().labels(LABEL_DEPLOYMENT);
        snapshot.read::<LeanPod>(client, &ours).await?;
        let all = ListParams::default().fields(AnyPod::FIELDS);
        snapshot.read::<AnyPod>(client, &all).await?;
        snapshot.read::<LeanSlice>(client, &every).await?;
        snapshot.read::<LeanClaim>(client, &every).await?;
        Ok(snapshot)
    }

    async fn read<K: Cached>(
        &mut self,
        client: &Client,
        which: &ListParams,
    ) -> Result<(), Failure> {
        match list(&Api::<K>::all(client.clone()), which).await {
            Ok(objects) => {
                for object in objects {
                    object.put(&mut self.state);
                }
                K::listed(&mut self.state);
                Ok(())
            }
            Err(Failure::Forbidden(why)) if !K::IS_NEEDED => {
                K::refused(&mut self.state);
                self.unseen.push(why);
                Ok(())
            }
            // A cluster without dynamic resource allocation.
            Err(Failure::NotFound(_)) if !K::IS_NEEDED => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

/// Reads a list page by page.
///
/// # Errors
/// The API server's error.
pub(crate) async fn list<K>(api: &Api<K>, which: &ListParams) -> Result<Vec<K>, Failure>
where
    K: Resource + Clone + Debug + DeserializeOwned,
{
    let mut which = which.clone().limit(PAGE);
    let mut objects = Vec::new();
    loop {
        let page = api.list(&which).await.map_err(Failure::from)?;
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => which = which.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// What one worker of a deployment holds of a node, or what its plan holds for workers that are not there yet.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Holder {
    /// The deployment.
    pub(crate) deployment: Key,
    /// The node.
    pub(crate) node: String,
    /// The worker's Pod; `None`: it is yet to come.
    pub(crate) pod: Option<String>,
    /// Ranks of the plan that run in the Pod.
    pub(crate) ranks: Vec<PlanRank>,
    /// What is held.
    pub(crate) holding: Holding,
}

impl State {
    /// Who holds what, by deployment. What a deployment holds of a node is the sum of its holders there.
    pub(crate) fn holders(&self) -> Vec<Holder> {
        let mut deployments: Vec<_> = self.keys.iter().collect();
        deployments.sort_by_key(|(_, key)| *key);
        let each = deployments.into_iter();
        each.flat_map(|(uid, key)| self.holders_of(uid, key))
            .collect()
    }

    fn holders_of(&self, uid: &str, key: &Key) -> Vec<Holder> {
        let plans = self.plans_of(uid);
        let shares = shares(self.pods_of(uid).map(|row| &*row.value), &plans);
        let mut holders = Vec::new();
        for (node, held) in self.holdings.of(uid) {
            let mut rest = held.clone();
            let mut claimed = Vec::new();
            for share in shares.iter().filter(|share| share.node == node) {
                take(&mut rest, &share.holding);
                claimed.extend(share.holding.claimed_gpus.iter().cloned());
                holders.push(Holder {
                    deployment: key.clone(),
                    node: node.to_owned(),
                    pod: Some(share.pod.clone()),
                    ranks: ranks_of(share, &plans),
                    holding: share.holding.clone(),
                });
            }
            rest.claimed_gpus.retain(|uuid| !claimed.contains(uuid));
            if rest != Holding::default() {
                holders.push(Holder {
                    deployment: key.clone(),
                    node: node.to_owned(),
                    pod: None,
                    ranks: Vec::new(),
                    holding: rest,
                });
            }
        }
        holders
    }
}

fn take(rest: &mut Holding, share: &Holding) {
    rest.cpu_millis = rest.cpu_millis.saturating_sub(share.cpu_millis);
    rest.memory_bytes = rest.memory_bytes.saturating_sub(share.memory_bytes);
    rest.gpus = rest.gpus.saturating_sub(share.gpus);
    rest.virtual_bytes = rest.virtual_bytes.saturating_sub(share.virtual_bytes);
    rest.exclusive_cpus
        .retain(|cpu| !share.exclusive_cpus.contains(cpu));
}

fn ranks_of(share: &Share, plans: &[Arc<InferencePlan>]) -> Vec<PlanRank> {
    let mut plans = plans.iter().map(|plan| &plan.spec);
    let plan = plans.find(|plan| plan.generation == share.plan_generation);
    let ranks = plan.into_iter().flat_map(|plan| &plan.ranks);
    let is_there = |rank: &&PlanRank| {
        rank.name == share.rank || rank.in_pod_of.as_deref() == Some(&*share.rank)
    };
    ranks.filter(is_there).cloned().collect()
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::observed::PodView;
    use hearth_controller_core::testing::{GIB, deployment, node, samples};
    use hearth_crds::{NodeProfileStatus, NodeStore};

    use super::*;
    use crate::cluster::cache::Touched;
    use crate::cluster::packed::Packed;
    use crate::cluster::table::Identity;

    fn identity(name: &str, uid: &str, owner: &str) -> Identity {
        Identity {
            key: Key::new("default", name),
            uid: uid.into(),
            owner: owner.into(),
            version: 1,
        }
    }

    #[test]
    fn holders_add_up_to_what_the_ledger_says() {
        let mut state = State::default();
        let read = Packed::new(&deployment("")).map_err(|_| unreachable!());
        state.put_deployment(identity("demo", "0b1c", ""), read);
        let spec = samples::plan();
        let decode = spec.ranks.iter().find(|rank| rank.name == "decode-0");
        let node = decode.unwrap().node.clone();
        let generation = spec.generation;
        let mut plan = InferencePlan::new("demo-1", spec);
        plan.metadata.namespace = Some("default".to_owned());
        state.put_plan(identity("demo-1", "p1", "0b1c"), Ok(&plan));
        let pod = PodView {
            name: "demo-decode-0-x".to_owned(),
            uid: "x".to_owned(),
            rank: "decode-0".to_owned(),
            plan_generation: generation,
            node: node.clone(),
            phase: "Running".to_owned(),
            cpu_millis: 1,
            // More than its plan asks for.
            memory_bytes: GIB,
            ..PodView::default()
        };
        state.put_pod(identity("demo-decode-0-x", "x", "0b1c"), pod);
        let holders = state.holders();
        let (there, to_come): (Vec<&Holder>, Vec<&Holder>) =
            holders.iter().partition(|holder| holder.pod.is_some());
        assert_eq!(there.len(), 1);
        assert_eq!(there[0].holding.memory_bytes, GIB);
        assert_eq!(there[0].ranks[0].name, "decode-0");
        assert!(!to_come.is_empty(), "the gateway has no Pod yet");
        let held = state.held_by_others("");
        for (node, total) in held {
            let on_it = holders.iter().filter(|holder| holder.node == node);
            let bytes: u64 = on_it.map(|holder| holder.holding.memory_bytes).sum();
            assert_eq!(bytes, total.memory_bytes, "{node}");
        }
    }

    #[test]
    fn what_a_node_stores_concerns_no_deployment() {
        let mut state = State::default();
        state.put_node("uid", node("office", 4, GIB));
        let with_models = |models: u32, total_bytes: u64| {
            let mut profile = NodeProfileStatus {
                store: Some(NodeStore { models, bytes: 7 }),
                ..NodeProfileStatus::default()
            };
            profile.memory.total_bytes = total_bytes;
            profile
        };
        let mut put = |profile: NodeProfileStatus| state.put_profile("office", Some(profile));
        assert!(put(with_models(1, GIB)).waiting);
        assert_eq!(put(with_models(2, GIB)), Touched::default());
        assert!(put(with_models(2, 2 * GIB)).waiting);
        let store = |profile: &NodeProfileStatus| profile.store.map(|store| store.models);
        assert_eq!(state.profile("office").and_then(store), Some(2));
        let planned = state.nodes["office"].profile.as_ref().expect("a profile");
        assert_eq!(store(planned), None);
    }
}
