//! Checks before placement: usable profiles, a context that the model supports, a KV cache that it can use.

use hearth_crds::{
    FieldError, InferenceDeploymentSpec, KV_TYPES_SAYS, KvShape, KvType, ModelFacts,
    NOT_INTERLEAVED_SAYS, NodeProfileStatus, PlanKvType, Strategy,
};

use crate::error::PlanError;
use crate::input::PlanInput;

/// Context of a spec that sets none: what the model supports, at most this many tokens.
const DEFAULT_CONTEXT_TOKENS: u32 = 8192;

/// Nodes by name, each with a usable profile.
pub(crate) fn checked_nodes<'a>(
    input: &PlanInput<'a>,
) -> Result<Vec<&'a NodeProfileStatus>, PlanError> {
    let mut nodes: Vec<&NodeProfileStatus> = input.profiles.iter().collect();
    nodes.sort_by(|a, b| a.node.cmp(&b.node));
    if nodes.is_empty() {
        return Err(PlanError::NoNodes(input.name.to_owned()));
    }
    for node in &nodes {
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        let memory = &node.memory;
        let compute = &node.compute;
        let problem = if node.cpus.is_empty() {
            "has no CPUs".to_owned()
        } else if !is_rate(memory.read_one_thread_gbps) || !is_rate(memory.read_all_threads_gbps) {
            format!("reads {} GB/s of memory", memory.read_all_threads_gbps)
        } else if !is_rate(
            compute
                .f32_one_thread_gflops
                .max(compute.bf16_one_thread_gflops),
        ) {
            format!("computes {} GFLOP/s", compute.f32_one_thread_gflops)
        } else {
            continue;
        };
        return Err(PlanError::BadProfile {
            node: node.node.clone(),
            problem,
        });
    }
    Ok(nodes)
}

/// The context in tokens: the spec's, or by default what the model supports up to [`DEFAULT_CONTEXT_TOKENS`].
pub(crate) fn context_length(
    spec: &InferenceDeploymentSpec,
    facts: &ModelFacts,
) -> Result<u32, PlanError> {
    let max = facts.max_context.max(1);
    match spec.model.context_length {
        None => Ok(max.min(DEFAULT_CONTEXT_TOKENS)),
        Some(asked) if asked <= max => Ok(asked),
        Some(asked) => Err(PlanError::ContextTooLong {
            asked,
            max,
            architecture: facts.architecture.clone(),
        }),
    }
}

/// Rejects a strategy that this planner cannot plan.
pub(crate) fn check_strategy(spec: &InferenceDeploymentSpec) -> Result<(), PlanError> {
    match spec.strategy {
        Strategy::Auto | Strategy::Hybrid | Strategy::PipedRing => Ok(()),
        Strategy::Interleaved => Err(PlanError::Unsupported(vec![FieldError::new(
            "spec.strategy",
            format!("is \"{:?}\"", spec.strategy),
            NOT_INTERLEAVED_SAYS,
        )])),
    }
}

/// Number formats of keys and values; they must match for a latent cache, where both are the same bytes.
pub(crate) fn kv_types(
    spec: &InferenceDeploymentSpec,
    facts: &ModelFacts,
) -> Result<(PlanKvType, PlanKvType), PlanError> {
    let plan_type = |kv_type, field: &str| match kv_type {
        KvType::F32 => Ok(PlanKvType::F32),
        KvType::BF16 => Ok(PlanKvType::BF16),
        KvType::Int8 | KvType::FP8 => Err(PlanError::Unsupported(vec![FieldError::new(
            format!("spec.decode.kvCache.{field}"),
            format!("is \"{kv_type:?}\""),
            KV_TYPES_SAYS,
        )])),
    };
    let (key, value) = (
        plan_type(spec.decode.kv_cache.key_type, "keyType")?,
        plan_type(spec.decode.kv_cache.value_type, "valueType")?,
    );
    if matches!(facts.kv, KvShape::Latent { .. }) && key != value {
        return Err(PlanError::Unsupported(vec![FieldError::new(
            "spec.decode.kvCache.valueType",
            format!("is \"{value:?}\" and keyType is \"{key:?}\""),
            format!(
                "{} keeps one latent for keys and values: write the same type for both",
                facts.architecture
            ),
        )]));
    }
    Ok((key, value))
}
