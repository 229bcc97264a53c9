//! The planner's entry point: from its input to a plan.

use hearth_crds::{InferenceDeploymentSpec, InferencePlanSpec, Pinning, Strategy};

use crate::advice;
use crate::checks::{check_strategy, checked_nodes, context_length, kv_types};
use crate::draft::Draft;
use crate::error::PlanError;
use crate::estimator::Estimator;
use crate::gpus::has_usable;
use crate::input::PlanInput;
use crate::memory::Demand;
use crate::node_ranks::OnGpu;
use crate::numerics::alike;
use crate::place::{Placement, Refused, Wanted, place};

/// Prompt tokens per step of a prefill rank: enough for matrix products to be compute-bound.
const PREFILL_CHUNK_TOKENS: u32 = 512;

/// Computes the plan.
///
/// Pure and deterministic; the order of `profiles` does not matter. `endpoint` of each rank is `None`: the executor
/// fills it in before publishing the plan.
///
/// # Errors
/// [`PlanError`] with the numbers that do not fit and a change that has been tried and does.
pub fn plan(input: &PlanInput<'_>) -> Result<InferencePlanSpec, PlanError> {
    let spec = input.spec;
    check_strategy(spec)?;
    let nodes = checked_nodes(input)?;
    let (key_type, value_type) = kv_types(spec, input.facts)?;
    let context_length = context_length(spec, input.facts)?;
    let demand = Demand {
        facts: input.facts,
        kv_bytes_per_token: input
            .facts
            .kv_bytes_per_token(key_type.bytes(), value_type.bytes()),
        context_length,
        max_batch: spec.decode.max_batch,
        kv_memory_bytes: spec.decode.kv_cache.memory.map(|memory| memory.bytes()),
        chunk_tokens: PREFILL_CHUNK_TOKENS.min(context_length),
        exclusive: spec.placement.pinning == Pinning::Exclusive,
    };
    advice::check_kv_budget(spec, &demand)?;
    let estimator = Estimator::new(&nodes, &demand, spec, (input.gpus, input.cpus));
    let (placement, refused) = placed(&estimator, &demand, spec)?;
    let draft = Draft {
        input,
        nodes: &nodes,
        demand,
        placement,
        refused,
        estimator: &estimator,
        key_type,
        value_type,
    };
    Ok(draft.to_plan())
}

/// The placement on the best devices with room, and the better devices that have none.
fn placed(
    estimator: &Estimator<'_>,
    demand: &Demand<'_>,
    spec: &InferenceDeploymentSpec,
) -> Result<(Placement, Vec<Refused>), PlanError> {
    let mut wanted = Wanted {
        gateways: spec.gateway.replicas,
        prefill: spec.prefill.planned_replicas(),
        decode: spec.decode.planned_replicas(),
        on_gpu: OnGpu::NONE,
    };
    let mut refused = Vec::new();
    for on_gpu in device_candidates(estimator, spec, wanted) {
        wanted.on_gpu = on_gpu;
        match place(estimator.nodes(), demand, wanted, estimator) {
            Ok(free) => {
                let placement = alike(estimator, demand, wanted, &free).unwrap_or(free);
                return Ok((placement, refused));
            }
            Err(no_room) => refused.push(Refused { on_gpu, no_room }),
        }
    }
    let Some(Refused { no_room, .. }) = refused.pop() else {
        return Err(PlanError::NoNodes(spec.served_name()));
    };
    Err(advice::refusal(estimator, demand, wanted, spec, no_room))
}

/// Devices that ranks may compute on, best first: a GPU helps prefill the most, as it is compute-bound.
///
/// All ranks of a role compute on the same kind of device, so a stream that moves between decode workers continues
/// with the same bits.
fn device_candidates(
    estimator: &Estimator<'_>,
    spec: &InferenceDeploymentSpec,
    wanted: Wanted,
) -> Vec<OnGpu> {
    let asked = spec.prefill.gpus_per_worker;
    let has_usable = estimator
        .nodes()
        .iter()
        .any(|node| has_usable(node, estimator.gpus()));
    let is_auto = spec.strategy == Strategy::Auto;
    let is_asked = asked.is_some_and(|gpus| gpus > 0) && wanted.prefill > 0;
    let may_use = match asked {
        Some(0) => false,
        Some(_) => is_asked || (is_auto && has_usable),
        None => is_auto && has_usable,
    };
    if !may_use {
        return vec![OnGpu::NONE];
    }
    let prefill = wanted.prefill > 0;
    let mut candidates = Vec::new();
    if is_auto {
        candidates.push(OnGpu {
            prefill,
            decode: true,
        });
    }
    if prefill {
        candidates.push(OnGpu {
            prefill,
            decode: false,
        });
    }
    if !is_asked {
        candidates.push(OnGpu::NONE);
    }
    candidates
}
