//! Plans of piped rings (prima.cpp, section 3.1): for a model that no node holds, or where the spec asks for one.
//!
//! Every node's CPUs may get windows of layers. Each node in turn is tried as the head, which also has embedding, output head
//! and the first layers; Halda chooses windows and rounds, and leaves out the nodes that would make a token slower.

mod layers;
mod problem;
mod why;
mod write;

use hearth_crds::{
    DualBatch, FieldError, InferenceDeploymentSpec, InferencePlanSpec, PlanKvType, PrefillMode,
    RING_VERSION, Strategy,
};

use crate::error::PlanError;
use crate::estimator::Estimator;
use crate::halda::{self, Choice, Limits};
use crate::input::PlanInput;
use crate::memory::Demand;

use problem::Members;

/// What a ring is planned from.
#[derive(Clone, Copy)]
pub(crate) struct RingPlanning<'a> {
    pub input: &'a PlanInput<'a>,
    pub demand: &'a Demand<'a>,
    pub estimator: &'a Estimator<'a>,
    pub key_type: PlanKvType,
    pub value_type: PlanKvType,
}

/// A ring that was chosen.
struct Chosen<'a> {
    members: Members<'a>,
    choice: Choice,
}

/// Checks that a spec asks for nothing that a ring does not have.
///
/// # Errors
/// [`PlanError::Unsupported`] with all fields that do.
pub(crate) fn check(spec: &InferenceDeploymentSpec) -> Result<(), PlanError> {
    if spec.strategy != Strategy::PipedRing {
        return Ok(());
    }
    let mut errors = Vec::new();
    let mut refuse = |is_wrong: bool, field: &str, is: String, remedy: &str| {
        if is_wrong {
            errors.push(FieldError::new(field, is, remedy));
        }
    };
    let mode = spec.prefill.mode;
    refuse(
        mode == PrefillMode::StreamLoading,
        "spec.prefill.mode",
        format!("is \"{mode:?}\""),
        "a ring reads prompts itself: write Auto or Chunked",
    );
    refuse(
        spec.prefill.gpus_per_worker.is_some_and(|gpus| gpus > 0),
        "spec.prefill.gpusPerWorker",
        format!("is {}", spec.prefill.gpus_per_worker.unwrap_or(0)),
        "a ring reads prompts itself, on its CPUs: remove gpusPerWorker",
    );
    let replicas = spec.decode.planned_replicas();
    refuse(
        replicas > 1,
        "spec.decode.replicas",
        format!("is {replicas}"),
        "a ring is one decode worker with the stages behind it: write 1",
    );
    refuse(
        spec.decode.dual_batch == DualBatch::On,
        "spec.decode.dualBatch",
        "is \"On\"".to_owned(),
        "a ring has no half batches: write Auto or \"Off\"",
    );
    match errors.is_empty() {
        true => Ok(()),
        false => Err(PlanError::Unsupported(errors)),
    }
}

impl RingPlanning<'_> {
    /// The ring with the least predicted time per output token; its plan says in `why` what became of `instead`, the
    /// alternative on single nodes.
    ///
    /// # Errors
    /// [`PlanError`] if no node can be a member, or no ring fits.
    pub(crate) fn plan(&self, instead: &str) -> Result<InferencePlanSpec, PlanError> {
        let chosen = self.choose()?;
        Ok(self.write(&chosen, instead))
    }

    fn choose(&self) -> Result<Chosen<'_>, PlanError> {
        let members = Members::of(self)?;
        let count = members.nodes.len();
        // All heads together cost as much as one choice.
        let all = Limits::default();
        let limits = Limits {
            programs: all.programs.div_ceil(count),
            nodes: all.nodes.div_ceil(count as u64),
            simulations: all.simulations.div_ceil(count),
        };
        let mut best: Option<Chosen<'_>> = None;
        let mut refused = None;
        for head in 0..count {
            let members = members.led_by(head);
            match halda::choose(&members.problem(self), limits) {
                Ok(choice) => {
                    let is_better = |best: &Chosen<'_>| choice.tpot_ms < best.choice.tpot_ms;
                    if best.as_ref().is_none_or(is_better) {
                        best = Some(Chosen { members, choice });
                    }
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match (best, refused) {
            (Some(best), _) => Ok(best),
            (None, Some(error)) => Err(PlanError::NoRing(error)),
            (None, None) => Err(PlanError::NoNodes(self.input.name.to_owned())),
        }
    }
}

/// What is said of nodes whose workers are of an earlier version.
fn too_old(nodes: &[&str]) -> String {
    format!(
        "{}: the workers' image there reads no plans of rings (version {RING_VERSION}): renew it",
        nodes.join(", ")
    )
}
