//! Deployments of mixed sizes that come, change and go on unequal nodes, some of which are lost and come back.
//!
//! Each deployment is decided about by [`crate::decide::decide`] from what the ledger says that the others hold, as the operator
//! does, and its Pods come up and end in their time. After each step everything that is booked is summed up once more, from plans
//! and Pods alone ([`audit`]). Beside it, first fit places the same deployments ([`first_fit`]).

mod audit;
mod cluster;
mod events;
mod figures;
mod first_fit;
mod kubelets;
mod shapes;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hearth_crds::{InferenceDeployment, InferencePlanSpec, ModelFacts};
use hearth_planner::{CpuOffer, GpuOffer, PlanError, PlanInput};
use kube_core::ResourceExt;

use self::cluster::Cluster;
use self::events::Events;
pub use self::figures::{Figures, Utilisation, Watch};
use self::first_fit::FirstFit;
pub use self::shapes::Mix;
use crate::candidates::Candidates;
use crate::observed::{NodeView, Observed, Others, Sight};

/// Sizes of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Nodes.
    pub nodes: usize,
    /// Deployments that there are in the long run.
    pub deployments: usize,
    /// Which ones.
    pub mix: Mix,
    /// How many of those that wait for room are decided about after each step.
    pub retries: usize,
    /// Time that passes with each step.
    pub step: Duration,
    /// Whether the planner is timed alone, by one more call for each plan.
    pub times_planner: bool,
}

impl Setting {
    /// All nodes, by name.
    fn all_nodes(self) -> BTreeMap<String, Arc<NodeView>> {
        let nodes = (0..self.nodes).map(shapes::node);
        nodes
            .map(|node| (node.name.clone(), Arc::new(node)))
            .collect()
    }

    /// Requests of Pods that are no deployment's.
    fn others(self) -> Others {
        let nodes = 0..self.nodes;
        let requests = nodes.map(|number| (node_name(number), shapes::foreign_requests(number)));
        Others {
            sight: Sight::All,
            requests: requests.collect(),
        }
    }
}

/// A simulation.
pub struct Churn {
    setting: Setting,
    events: Events,
    cluster: Cluster,
    first_fit: Option<FirstFit>,
    steps: usize,
}

impl Churn {
    /// An empty cluster; the same seed gives the same course. With `with_first_fit`, first fit places the same deployments: it ends no
    /// workers for want of requests.
    pub fn new(seed: u64, setting: Setting, with_first_fit: bool, watch: Watch) -> Self {
        Self {
            setting,
            events: Events::new(seed, setting.deployments, setting.nodes, setting.mix),
            cluster: Cluster::new(setting, watch),
            first_fit: with_first_fit.then(|| FirstFit::new(setting)),
            steps: 0,
        }
    }

    /// One more thing happens.
    ///
    /// # Errors
    /// What is booked twice.
    pub fn step(&mut self) -> Result<(), String> {
        let event = self.events.next();
        self.steps += 1;
        let done = self.cluster.step(&event);
        done.map_err(|why| format!("step {}, after {event:?}: {why}", self.steps))?;
        if let Some(first_fit) = &mut self.first_fit {
            first_fit.step(&event);
        }
        // What is booked counts from when all deployments are there.
        if self.steps == self.setting.deployments {
            self.cluster.figures.utilisation = Utilisation::default();
            if let Some(first_fit) = &mut self.first_fit {
                first_fit.utilisation = Utilisation::default();
            }
        }
        Ok(())
    }

    /// What came of it so far.
    pub fn figures(&self) -> &Figures {
        &self.cluster.figures
    }

    /// What first fit books.
    pub fn first_fit(&self) -> Option<&Utilisation> {
        self.first_fit.as_ref().map(|it| &it.utilisation)
    }
}

fn name_of(number: usize) -> String {
    format!("d{number:05}")
}

fn node_name(number: usize) -> String {
    format!("node-{number:02}")
}

/// What each node can provide to the deployment that is observed.
fn candidates_of(observed: &Observed) -> Candidates {
    Candidates::of(observed, &observed.deployment.spec.placement)
}

/// The planner's answer for a deployment, on all nodes or on one.
fn planned_alone(
    deployment: &InferenceDeployment,
    facts: &ModelFacts,
    candidates: &Candidates,
    node: Option<&str>,
) -> Result<InferencePlanSpec, PlanError> {
    let free = candidates.free.iter();
    let offered = free.filter(|(name, _)| node.is_none_or(|node| node == *name));
    let profiles: Vec<_> = offered.map(|(_, profile)| profile.clone()).collect();
    hearth_planner::plan(&PlanInput {
        name: &deployment.name_any(),
        namespace: "default",
        generation: 1,
        spec: &deployment.spec,
        facts,
        model_path: "/models/m",
        profiles: &profiles,
        gpus: GpuOffer::Cluster {
            plugin: &candidates.gpus_free,
            claimable: &candidates.claimable,
        },
        cpus: CpuOffer::Requests(&candidates.cpu_rooms),
    })
}
