//! The planner's entry point: from its input to a plan.

mod auto_ring;
mod spare;
mod together;

use hearth_crds::{
    InferenceDeploymentSpec, InferencePlanSpec, ModelFacts, NodeProfileStatus, Pinning, PlanKvType,
    Strategy,
};

use crate::advice;
use crate::candidates::{Asked, check_devices};
use crate::checks::{check_strategy, checked_nodes, context_length, kv_types};
use crate::draft::Draft;
use crate::error::PlanError;
use crate::estimator::Estimator;
use crate::gpus::usable_count;
use crate::input::PlanInput;
use crate::memory::Demand;
use crate::node_ranks::{Device, Devices};
use crate::numerics::alike;
use crate::piped_ring::{self, RingPlanning};
use crate::place::{NoRoom, Objection, Refused, Wanted, place};

pub use spare::plan;

/// Prompt tokens per step of a prefill rank: enough for matrix products to be compute-bound.
const PREFILL_CHUNK_TOKENS: u32 = 512;

/// Checks what can be told of a spec alone, before its model is fetched and any node is measured; [`plan`] does so, too.
///
/// # Errors
/// [`PlanError::Unsupported`] for fields that contradict each other, or that this planner cannot plan.
pub fn check_spec(spec: &InferenceDeploymentSpec) -> Result<(), PlanError> {
    check_strategy(spec)?;
    piped_ring::check(spec)?;
    check_devices(spec)
}

/// Checks what can be told of a spec and its model, before any node is measured; [`plan`] does so, too.
///
/// # Errors
/// Those of [`check_spec`], and [`PlanError`] for what the model does not do.
pub fn check_model(spec: &InferenceDeploymentSpec, facts: &ModelFacts) -> Result<(), PlanError> {
    check_spec(spec)?;
    Asked::of(spec, facts)?;
    demand(spec, facts, &[]).map(|_| ())
}

/// What ranks on `nodes` need of memory, with the types of keys and values.
///
/// # Errors
/// [`PlanError`] for a context or a KV cache that the model cannot have.
fn demand<'a>(
    spec: &InferenceDeploymentSpec,
    facts: &'a ModelFacts,
    nodes: &[&NodeProfileStatus],
) -> Result<(Demand<'a>, PlanKvType, PlanKvType), PlanError> {
    let (key_type, value_type) = kv_types(spec, facts)?;
    let context_length = context_length(spec, facts)?;
    let mut gpus = nodes.iter().flat_map(|node| &node.gpus);
    let versions = nodes.iter().map(|node| node.reads_up_to());
    let demand = Demand {
        facts,
        kv_bytes_per_token: facts.kv_bytes_per_token(key_type.bytes(), value_type.bytes()),
        context_length,
        max_batch: spec.decode.max_batch,
        kv_memory_bytes: spec.decode.kv_cache.memory.map(|memory| memory.bytes()),
        chunk_tokens: PREFILL_CHUNK_TOKENS.min(context_length),
        exclusive: spec.placement.pinning == Pinning::Exclusive,
        virtual_gpus: gpus.any(|gpu| gpu.virtual_device.is_some()),
        reader_version: versions.min().unwrap_or(0),
    };
    advice::check_kv_budget(spec, &demand)?;
    Ok((demand, key_type, value_type))
}

/// The plan that counts on all memory that is available now.
///
/// # Errors
/// [`PlanError`].
fn plan_with(input: &PlanInput<'_>) -> Result<InferencePlanSpec, PlanError> {
    let spec = input.spec;
    check_spec(spec)?;
    let asked = Asked::of(spec, input.facts)?;
    let nodes = checked_nodes(input)?;
    let (demand, key_type, value_type) = demand(spec, input.facts, &nodes)?;
    let estimator = Estimator::new(&nodes, &demand, spec, (input.gpus, input.cpus));
    Planning {
        input,
        demand,
        estimator: &estimator,
        asked,
        key_type,
        value_type,
    }
    .chosen()
}

/// What all candidates have in common.
struct Planning<'a> {
    input: &'a PlanInput<'a>,
    demand: Demand<'a>,
    estimator: &'a Estimator<'a>,
    asked: Asked,
    key_type: PlanKvType,
    value_type: PlanKvType,
}

impl Planning<'_> {
    /// The plan that the spec's strategy asks for. With Auto that is a ring where no node holds the model, and where one would
    /// have to read it from its disk for each token and a ring is faster.
    fn chosen(&self) -> Result<InferencePlanSpec, PlanError> {
        let strategy = self.input.spec.strategy;
        if strategy == Strategy::PipedRing {
            return self.ring().plan("as spec.strategy says");
        }
        match self.best() {
            Err(refused) if strategy == Strategy::Auto => self.ring_instead(refused),
            Ok(alone) if strategy == Strategy::Auto => Ok(self.or_ring(alone)),
            decided => decided,
        }
    }

    fn ring(&self) -> RingPlanning<'_> {
        RingPlanning {
            input: self.input,
            demand: &self.demand,
            estimator: self.estimator,
            key_type: self.key_type,
            value_type: self.value_type,
        }
    }

    fn has_usable_gpus(&self) -> bool {
        let offer = self.estimator.gpus();
        let mut nodes = self.estimator.nodes().iter();
        nodes.any(|node| usable_count(node, offer) > 0)
    }

    /// The plan on the best devices with room. Experts that stay in the node's memory while the rest is on a GPU are
    /// chosen where they were asked for, or where the plan is predicted to be faster than that of the CPUs alone.
    fn best(&self) -> Result<InferencePlanSpec, PlanError> {
        let (spec, demand, estimator) = (self.input.spec, &self.demand, self.estimator);
        let has_gpus = self.has_usable_gpus();
        let candidates = self.asked.candidates(has_gpus, self.demand.reader_version);
        let mut last = self.wanted(Devices::CPUS, 0);
        let mut refused = Vec::new();
        for peers in self.numbers_of_peers()? {
            for devices in candidates.iter().copied() {
                last = self.wanted(devices, peers);
                let why = match self.draft(last, refused.clone()) {
                    Err(no_room) => Objection::NoRoom(no_room),
                    Ok(draft) => {
                        let plan = draft.to_plan();
                        match self.slower(last, &plan, &candidates) {
                            Some(why) => Objection::Slower(why),
                            None => return Ok(self.with_peers(last, draft, plan)),
                        }
                    }
                };
                refused.push(Refused {
                    devices,
                    peers,
                    why,
                });
            }
        }
        let no_room = refused
            .into_iter()
            .rev()
            .find_map(|refused| match refused.why {
                Objection::NoRoom(no_room) => Some(no_room),
                Objection::Slower(_) => None,
            });
        let Some(no_room) = no_room else {
            return Err(PlanError::NoNodes(spec.served_name()));
        };
        let asked_by = self.asked.asked_by();
        Err(advice::refusal(
            estimator, demand, last, spec, asked_by, no_room,
        ))
    }

    fn wanted(&self, devices: Devices, peers: u32) -> Wanted {
        let spec = self.input.spec;
        Wanted {
            gateways: spec.gateway.replicas,
            prefill: spec.prefill.planned_replicas(),
            decode: spec.decode.planned_replicas(),
            peers,
            devices,
        }
    }

    fn draft(&self, wanted: Wanted, refused: Vec<Refused>) -> Result<Draft<'_>, NoRoom> {
        let (demand, estimator) = (&self.demand, self.estimator);
        let free = place(estimator.nodes(), demand, wanted, estimator)?;
        let placement = alike(estimator, demand, wanted, &free).unwrap_or(free);
        Ok(Draft {
            input: self.input,
            nodes: estimator.nodes(),
            demand: *demand,
            placement,
            refused,
            estimator,
            key_type: self.key_type,
            value_type: self.value_type,
        })
    }

    /// Why a plan whose experts stay in the node's memory is not faster than one that may be chosen instead; `None` if it
    /// is, or if nothing else may be chosen.
    fn slower(
        &self,
        wanted: Wanted,
        plan: &InferencePlanSpec,
        candidates: &[Devices],
    ) -> Option<String> {
        let devices = wanted.devices;
        if devices.prefill.is_streaming()
            && candidates.contains(&Devices::CPUS)
            && let Some(why) = self.streams_in_vain(wanted, plan)
        {
            return Some(why);
        }
        let on_cpus = Devices {
            decode: Device::Cpus,
            ..devices
        };
        if devices.decode != Device::GpuAndCpus || !candidates.contains(&on_cpus) {
            return None;
        }
        let on_cpus = Wanted {
            devices: on_cpus,
            ..wanted
        };
        let on_cpus = self.draft(on_cpus, Vec::new()).ok()?.to_plan();
        let tpot_ms = on_cpus.predicted.tpot_ms;
        (plan.predicted.tpot_ms >= tpot_ms).then(|| {
            format!(
                "TPOT {:.1} ms, and {tpot_ms:.1} ms on the CPUs alone",
                plan.predicted.tpot_ms
            )
        })
    }

    /// Why no prompt is worth streaming, whatever the spec says about which ones are: each would get its first token as
    /// soon from a decode rank of the plan, or from the prefill ranks on CPUs that there would be instead.
    fn streams_in_vain(&self, wanted: Wanted, plan: &InferencePlanSpec) -> Option<String> {
        let context = plan.model.context_length;
        let draft = self.draft(wanted, Vec::new()).ok()?;
        let Some(least) = draft.crossover_tokens(&plan.ranks) else {
            return Some(format!(
                "no prompt of up to {context} tokens would get its first token sooner than from a decode rank that reads it in chunks"
            ));
        };
        let on_cpus = Wanted {
            devices: Devices {
                prefill: Device::Cpus,
                ..wanted.devices
            },
            ..wanted
        };
        let instead = self.draft(on_cpus, Vec::new()).ok()?;
        let ranks = instead.to_plan().ranks;
        let is_sooner = |tokens: u32| {
            let streamed = draft.slowest_prefill_ms(&plan.ranks, tokens);
            let on_cpus = instead.slowest_prefill_ms(&ranks, tokens);
            matches!((streamed, on_cpus), (Some(streamed), Some(on_cpus)) if streamed < on_cpus)
        };
        let doubled = (0..31).map(|n| least.saturating_mul(1 << n));
        let mut lengths = doubled
            .take_while(|tokens| *tokens < context)
            .chain([context]);
        (!lengths.any(is_sooner)).then(|| {
            format!("no prompt of up to {context} tokens would get its first token sooner than from a prefill rank on the CPUs")
        })
    }
}
