//! A GPU that is lost while it serves: the deployment is planned again without it, and what was planned onto it starts
//! elsewhere at the same addresses, so that the gateway goes on with its streams.

use std::collections::BTreeSet;

use anyhow::{anyhow, bail};
use hearth_crds::{PlanRank, PlanRole};

use super::{Deployment, UpArgs};
use crate::environment::Environment;
use crate::up::prepare;
use crate::up::process::{ProcessEventKind, Wanted};

/// A worker whose process found its device lost when it started.
pub(super) struct LostDevice {
    pub(super) rank: String,
    /// The worker's message.
    pub(super) why: String,
}

impl Deployment {
    /// Plans without the device of that worker, and replaces the workers for which the plan has changed.
    ///
    /// # Errors
    /// The planner's, if the deployment has no other place on this machine.
    pub(super) async fn plan_without(
        &mut self,
        args: &UpArgs,
        environment: &Environment,
        lost: &LostDevice,
    ) -> anyhow::Result<()> {
        let mut ranks = self.prepared.plan.ranks.iter();
        let rank = ranks.find(|rank| rank.name == lost.rank);
        let Some(uuid) = rank.and_then(|rank| rank.device().gpu_uuid()) else {
            bail!("{} does not start: {}", lost.rank, lost.why);
        };
        let uuid = uuid.to_owned();
        let first_line = lost.why.lines().next().unwrap_or_default();
        let told = format!("GPU {uuid} is lost: {first_line}");
        self.spinner.finish();
        self.prepared
            .steps
            .warn(&format!("{told}; planning without it"));
        self.prepared.lost_gpus.insert(uuid, first_line.to_owned());
        let mut plan = prepare::plan_again(&mut self.prepared)
            .map_err(|error| anyhow!("{told}\n  {error}"))?;
        let before = self.prepared.plan.ranks.clone();
        for rank in &mut plan.ranks {
            let Some(same) = before.iter().find(|old| old.name == rank.name) else {
                bail!(
                    "{told}\n  the new plan has a worker more, {}: start again",
                    rank.name
                );
            };
            rank.endpoint.clone_from(&same.endpoint);
        }
        if let Some(old) = before
            .iter()
            .find(|old| plan.ranks.iter().all(|rank| rank.name != old.name))
        {
            bail!("{told}\n  the new plan has no {}: start again", old.name);
        }
        // The gateway goes on with what it was started with.
        plan.routing.clone_from(&self.prepared.plan.routing);
        let is_changed = |rank: &&PlanRank| {
            rank.role != PlanRole::Gateway && !before.iter().any(|old| is_same_work(old, rank))
        };
        let changed = plan.ranks.iter().filter(is_changed);
        let changed: BTreeSet<String> = changed.map(|rank| rank.name.clone()).collect();
        self.prepared.directory.write_plan(&plan)?;
        self.running.plan_generation = plan.generation;
        self.prepared.plan = plan;
        self.end(changed.clone()).await?;
        for name in &changed {
            self.failed_starts.remove(name);
            self.reasons.remove(name);
            self.keep(args, environment, name)?;
        }
        self.publish();
        self.prepared.steps.done(&format!(
            "plan {}: {}",
            self.prepared.plan.generation,
            crate::terminal::table::headline(&self.prepared.plan)
        ));
        Ok(())
    }

    /// Ends processes at once: their streams go on in the next ones.
    async fn end(&mut self, mut ranks: BTreeSet<String>) -> anyhow::Result<()> {
        let all: Vec<String> = ranks.iter().cloned().collect();
        self.want(&all, Wanted::Killed);
        while !ranks.is_empty() {
            let Some(event) = self.events.recv().await else {
                bail!("all processes ended")
            };
            if matches!(event.kind, ProcessEventKind::Stopped) {
                ranks.remove(&event.rank);
            }
            self.take(event)?;
        }
        // What the old processes said about the device is known.
        self.lost = None;
        Ok(())
    }
}

/// Whether a process that runs the one rank may go on as the other.
fn is_same_work(old: &PlanRank, new: &PlanRank) -> bool {
    let but_for_prediction = |rank: &PlanRank| PlanRank {
        predicted: None,
        ..rank.clone()
    };
    but_for_prediction(old) == but_for_prediction(new)
}
