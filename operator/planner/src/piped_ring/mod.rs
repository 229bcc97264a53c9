//! Plans of piped rings (prima.cpp, section 3.1): for a model that no node holds, or where the spec asks for one.
//!
//! Every node's CPUs may get windows of layers. Each node in turn is tried as the head, which also has embedding, output head
//! and the first layers; Halda chooses windows and rounds, and leaves out the nodes that would make a token slower.

mod layers;
mod problem;
mod why;
mod write;

use hearth_crds::{
    DualBatch, ExpertCache, FieldError, InferenceDeploymentSpec, InferencePlanSpec, PlanKvType,
    RING_VERSION, Strategy,
};

use crate::draft::DEFAULT_STALL_MS;
use crate::error::PlanError;
use crate::estimator::Estimator;
use crate::halda::{self, Choice, Limits, Problem, RingError};
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
    /// Tokens of a prompt that pass the ring at a time.
    chunk_tokens: u32,
}

/// Tokens of a chunk of a prompt, best first.
const CHUNKS: [u32; 5] = [256, 128, 64, 32, 16];
/// Tokens' time for which a chunk may hold up streams where they are slow: shorter chunks would read the weights too often.
const STALL_TOKENS: f64 = 16.0;

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
        mode.streams(),
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
    refuse(
        spec.prefill.replicas.is_some_and(|replicas| replicas > 0),
        "spec.prefill.replicas",
        format!("is {}", spec.prefill.replicas.unwrap_or(0)),
        "a ring reads prompts itself: remove it, or write 0",
    );
    refuse(
        spec.prefill.scaling.is_some(),
        "spec.prefill.scaling",
        "is set".to_owned(),
        "a ring reads prompts itself: remove it",
    );
    refuse(
        spec.prefill.chunked_below_tokens.is_some(),
        "spec.prefill.chunkedBelowTokens",
        "has no effect".to_owned(),
        "a ring reads every prompt in chunks: remove it",
    );
    refuse(
        spec.decode.expert_cache == Some(ExpertCache::On),
        "spec.decode.expertCache",
        "is \"On\"".to_owned(),
        "a ring computes on CPUs: write Auto or \"Off\"",
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
            match self.split(&members, CHUNKS[0], limits) {
                Ok(choice) => {
                    let is_better = |best: &Chosen<'_>| choice.tpot_ms < best.choice.tpot_ms;
                    if best.as_ref().is_none_or(is_better) {
                        best = Some(Chosen {
                            members,
                            choice,
                            chunk_tokens: CHUNKS[0],
                        });
                    }
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match (best, refused) {
            (Some(best), _) => Ok(self.with_chunks(best, limits)),
            (None, Some(error)) => Err(PlanError::NoRing(error)),
            (None, None) => Err(PlanError::NoNodes(self.input.name.to_owned())),
        }
    }

    /// The best split among members, none of which reads weights through a window that two layers do not fit into.
    fn split(
        &self,
        members: &Members<'_>,
        chunk_tokens: u32,
        limits: Limits,
    ) -> Result<Choice, RingError> {
        let mut problem = members.problem(self, chunk_tokens);
        loop {
            let choice = halda::choose(&problem, limits)?;
            let mut devices = choice.order.iter().copied();
            let cramped = devices.find(|device| {
                !problem.devices[*device].is_disk_slow
                    && !self.has_window(&problem, &choice, *device)
            });
            match cramped {
                None => return Ok(choice),
                // All of its layers must have room.
                Some(device) => problem.devices[device].is_disk_slow = true,
            }
        }
    }

    /// Whether a device has room for all weights of its layers, or for two of the largest layers at a time.
    fn has_window(&self, problem: &Problem, choice: &Choice, device: usize) -> bool {
        let share = &choice.shares[device];
        let room = problem.room_bytes(device).saturating_sub(share.kv_bytes);
        share.overflow_bytes == 0 || room >= 2 * self.demand.facts.largest_layer_bytes
    }

    /// The ring with the longest chunks of prompts that streams bear.
    fn with_chunks<'a>(&self, chosen: Chosen<'a>, limits: Limits) -> Chosen<'a> {
        let asked = self.input.spec.objectives.time_per_output_token;
        let asked_ms = asked.map_or(DEFAULT_STALL_MS, |time| time.as_millis_f64());
        let prompt_tokens = self.estimator.prompt_tokens();
        let mut chosen = chosen;
        for chunk_tokens in CHUNKS {
            let chunk_tokens = chunk_tokens.min(self.demand.context_length);
            // The first ones were what all heads were compared with.
            if chunk_tokens != chosen.chunk_tokens
                && let Ok(choice) = self.split(&chosen.members, chunk_tokens, limits)
            {
                chosen = Chosen {
                    choice,
                    chunk_tokens,
                    ..chosen
                };
            }
            let chunks = f64::from(prompt_tokens.div_ceil(chunk_tokens.max(1)));
            let stall_ms = chosen.choice.ttft_ms / chunks;
            if stall_ms <= asked_ms.max(STALL_TOKENS * chosen.choice.tpot_ms) {
                break;
            }
        }
        chosen
    }
}

/// What is said of nodes whose workers are of an earlier version.
fn too_old(nodes: &[&str]) -> String {
    format!(
        "{}: the workers' image there reads no plans of rings (version {RING_VERSION}): renew it",
        nodes.join(", ")
    )
}
