//! The planner's one entry: from a request to a plan.

use std::collections::BTreeMap;

use hearth_crds::{
    DEVICE_CPU, DeploymentRef, InferenceDeploymentSpec, InferencePlanSpec, NodeProfileSpec,
    Pinning, PlanKv, PlanKvType, PlanModel, PlanPrediction, PlanRank, PlanResidency, PlanRole,
    PlanRouting, PlanStrategy, RankPrediction, ResidencyPolicy, Venue, unsupported,
};

use crate::advice;
use crate::checks::{checked_nodes, context_length, kv_types};
use crate::cpus::{CpuSet, Crew, CrewCpus, divide, widen_memory};
use crate::error::PlanError;
use crate::memory::{BLOCK_TOKENS, Demand, NodeBudget, PREFILL_BATCH};
use crate::place::{Cost, GpuShortage, Placement, Wanted, place};
use crate::predict::{LOOPBACK_GBPS, Predictor, Rates, rounded};
use crate::reasons;
use hearth_crds::ModelFacts;

/// Prompt tokens of one step of a prefill rank: enough for matrix products to be bound by arithmetic.
const PREFILL_CHUNK_TOKENS: u32 = 512;
/// A chunk on a decode rank may hold up its streams this long when the spec names no time per output token.
const DEFAULT_STALL_MS: f64 = 100.0;
/// Below this many prompt tokens a hand-over from prefill to decode costs more than it brings on CPUs.
const CHUNKED_BELOW_TOKENS_CPU: u32 = 32;
/// GB/s between two nodes that have not measured their link: a little under gigabit Ethernet.
const UNMEASURED_LINK_GBPS: f64 = 0.1;
/// The prompt's length that TTFT is predicted at: a quarter of the context, at most this.
const PREDICTED_PROMPT_TOKENS: u32 = 512;
/// The context that TPOT is predicted at: half of the context, at most this.
const PREDICTED_CONTEXT_TOKENS: u32 = 1024;
/// Requests that may wait, at least.
const LEAST_QUEUE: u32 = 256;
/// How long a request may wait for a place.
const QUEUE_TIMEOUT_MS: u64 = 120_000;

/// All that a plan follows from.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// The deployment's name.
    pub name: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// The plan's generation: one more than that of the plan in force, 1 for the first.
    pub generation: u64,
    /// What is asked for.
    pub spec: &'a InferenceDeploymentSpec,
    /// The model.
    pub facts: &'a ModelFacts,
    /// The directory of the model on each node.
    pub model_path: &'a str,
    /// Measured nodes, in any order.
    pub profiles: &'a [NodeProfileSpec],
    /// GPUs that the cluster's device plugin can still give, by node; a node that is not named has none.
    pub gpus_free: &'a BTreeMap<String, u32>,
}

/// Makes the plan.
///
/// Pure and deterministic; the order of `profiles` does not matter. `endpoint` of each rank is left open: who executes
/// the plan fills it before publishing.
///
/// # Errors
/// [`PlanError`] with the numbers that refuse the request and a change that was tried and fits.
pub fn plan(request: &PlanRequest<'_>) -> Result<InferencePlanSpec, PlanError> {
    let spec = request.spec;
    let lacking = unsupported(spec, Venue::Cluster);
    if !lacking.is_empty() {
        return Err(PlanError::Unsupported(lacking));
    }
    let nodes = checked_nodes(request)?;
    let (key_type, value_type) = kv_types(spec, request.facts)?;
    let context_length = context_length(spec, request.facts)?;
    let demand = Demand {
        facts: request.facts,
        kv_bytes_per_token: request
            .facts
            .kv_bytes_per_token(key_type.bytes(), value_type.bytes()),
        context_length,
        max_batch: spec.decode.max_batch,
        kv_memory_bytes: spec.decode.kv_cache.memory.map(|memory| memory.bytes()),
        chunk_tokens: PREFILL_CHUNK_TOKENS.min(context_length),
    };
    advice::check_kv_budget(spec, &demand)?;
    let wanted = Wanted {
        prefill: spec.prefill.planned_replicas(),
        decode: spec.decode.planned_replicas(),
    };
    let chooser = Chooser::new(&nodes, &demand, spec, request.gpus_free);
    let placement = place(&nodes, &demand, wanted, &chooser)
        .map_err(|no_room| advice::refusal(&chooser, &demand, wanted, spec, no_room))?;
    let draft = Draft {
        request,
        nodes: &nodes,
        demand,
        placement,
        chooser: &chooser,
        key_type,
        value_type,
    };
    Ok(draft.write())
}

/// Costs of placing a rank, by prediction.
#[derive(Clone, Copy)]
pub(crate) struct Chooser<'a> {
    nodes: &'a [&'a NodeProfileSpec],
    demand: &'a Demand<'a>,
    spec: &'a InferenceDeploymentSpec,
    gpus_free: &'a BTreeMap<String, u32>,
}

impl<'a> Chooser<'a> {
    pub(crate) fn new(
        nodes: &'a [&'a NodeProfileSpec],
        demand: &'a Demand<'a>,
        spec: &'a InferenceDeploymentSpec,
        gpus_free: &'a BTreeMap<String, u32>,
    ) -> Self {
        Self {
            nodes,
            demand,
            spec,
            gpus_free,
        }
    }

    fn cpus(&self, node: usize, crew: Crew) -> Option<CrewCpus> {
        divide(
            self.nodes[node],
            crew,
            self.spec.placement.pinning,
            self.spec.placement.numa,
        )
    }

    fn predictor(&self, node: usize, set: &CpuSet, budget: &NodeBudget) -> Predictor<'a> {
        let total = self.demand.facts.bytes.total().max(1);
        Predictor {
            facts: self.demand.facts,
            rates: Rates::of(self.nodes[node], set),
            kv_bytes_per_token: self.demand.kv_bytes_per_token,
            resident_share: budget.weight_budget_bytes as f64 / total as f64,
        }
    }

    fn is_exclusive(&self) -> bool {
        self.spec.placement.pinning == Pinning::Exclusive
    }

    /// GB/s of KV from a prefill rank on `node` to the nearest decode rank.
    fn link_gbps(&self, node: usize, crews: &[Crew]) -> f64 {
        let to = |peer: usize| {
            if peer == node {
                return LOOPBACK_GBPS;
            }
            let link = self.nodes[node]
                .links
                .iter()
                .find(|link| link.peer == self.nodes[peer].node);
            link.map(|link| link.gbps)
                .filter(|gbps| *gbps > 0.0)
                .unwrap_or(UNMEASURED_LINK_GBPS)
        };
        (0..crews.len())
            .filter(|n| crews[*n].decode > 0)
            .map(to)
            .fold(0.0, f64::max)
            .max(f64::MIN_POSITIVE)
    }

    pub(crate) fn nodes(&self) -> &'a [&'a NodeProfileSpec] {
        self.nodes
    }

    /// The same nodes and spec under other demands on memory.
    pub(crate) fn with_demand<'b>(&self, demand: &'b Demand<'b>) -> Chooser<'b>
    where
        'a: 'b,
    {
        Chooser { demand, ..*self }
    }

    /// The same nodes and model under another spec.
    pub(crate) fn with_spec<'b>(&self, spec: &'b InferenceDeploymentSpec) -> Chooser<'b>
    where
        'a: 'b,
    {
        Chooser { spec, ..*self }
    }

    pub(crate) fn prompt_tokens(&self) -> u32 {
        (self.demand.context_length / 4).clamp(1, PREDICTED_PROMPT_TOKENS)
    }

    pub(crate) fn stream_tokens(&self) -> u32 {
        (self.demand.context_length / 2).clamp(1, PREDICTED_CONTEXT_TOKENS)
    }
}

impl Cost for Chooser<'_> {
    fn has_cores(&self, node: usize, crew: Crew) -> bool {
        self.cpus(node, crew).is_some()
    }

    fn gpus_short(&self, node: usize, crew: Crew) -> Option<GpuShortage> {
        let needs = crew.prefill * self.spec.prefill.gpus_per_worker.unwrap_or(0);
        let name = &self.nodes[node].node;
        let free = self.gpus_free.get(name).copied().unwrap_or(0);
        (needs > free).then(|| GpuShortage {
            node: name.clone(),
            needs,
            free,
        })
    }

    fn decode_ms(&self, node: usize, crew: Crew) -> f64 {
        let (Some(cpus), Ok(budget)) = (
            self.cpus(node, crew),
            self.demand.fit(self.nodes[node], crew),
        ) else {
            return f64::INFINITY;
        };
        let Some(set) = cpus.decode.last() else {
            return f64::INFINITY;
        };
        let mut predictor = self.predictor(node, set, &budget);
        if !self.is_exclusive() {
            predictor.rates = predictor.rates.shared_by(crew.decode);
        }
        predictor.decode_ms(1, self.stream_tokens())
    }

    /// A decode rank on the same CPUs halves what a prefill rank gets while streams run.
    fn prefill_ms(&self, node: usize, crew: Crew, crews: &[Crew]) -> f64 {
        let (Some(cpus), Ok(budget)) = (
            self.cpus(node, crew),
            self.demand.fit(self.nodes[node], crew),
        ) else {
            return f64::INFINITY;
        };
        let Some(set) = cpus.prefill.last() else {
            return f64::INFINITY;
        };
        let mut predictor = self.predictor(node, set, &budget);
        if !self.is_exclusive() {
            predictor.rates = predictor
                .rates
                .shared_by(crew.prefill + u32::from(crew.decode > 0));
        }
        let tokens = self.prompt_tokens();
        predictor.prefill_ms(tokens, self.demand.chunk_tokens)
            + predictor.hand_over_ms(tokens, self.link_gbps(node, crews))
    }
}

/// All choices made; what is left is to write them down.
pub(crate) struct Draft<'a> {
    pub request: &'a PlanRequest<'a>,
    pub nodes: &'a [&'a NodeProfileSpec],
    pub demand: Demand<'a>,
    pub placement: Placement,
    pub chooser: &'a Chooser<'a>,
    pub key_type: PlanKvType,
    pub value_type: PlanKvType,
}

impl Draft<'_> {
    fn write(self) -> InferencePlanSpec {
        let mut ranks = self.ranks();
        ranks.sort_by_key(|rank| (rank.role, rank.index));
        let request = self.request;
        let facts = request.facts;
        let routing = self.routing(&ranks);
        let predicted = self.prediction(&ranks);
        let (why, not_chosen) = reasons::write(&self, &ranks, &routing, &predicted);
        InferencePlanSpec {
            generation: request.generation,
            deployment: DeploymentRef {
                name: request.name.to_owned(),
                namespace: request.namespace.to_owned(),
            },
            strategy: PlanStrategy::Hybrid,
            model: PlanModel {
                served_name: request.spec.served_name(),
                path: request.model_path.to_owned(),
                source: request.spec.model.source.describe(),
                architecture: facts.architecture.clone(),
                parameter_count: facts.parameter_count,
                weight_bytes: facts.bytes.total(),
                context_length: self.demand.context_length,
                layers: facts.layers,
                kv_bytes_per_token: self.demand.kv_bytes_per_token,
                dtype: facts.dtype.clone(),
            },
            ranks,
            routing,
            predicted,
            objectives: request.spec.objectives.clone(),
            why,
            not_chosen,
        }
    }

    /// Ranks node by node; indices of a role count on over the nodes.
    fn ranks(&self) -> Vec<PlanRank> {
        let mut ranks = Vec::new();
        let mut counts = [0_u32; 3];
        for (n, crew) in self.placement.crews.iter().enumerate() {
            let (Some(budget), Some(cpus)) =
                (&self.placement.budgets[n], self.chooser.cpus(n, *crew))
            else {
                continue;
            };
            for (role, sets) in [
                (
                    PlanRole::Gateway,
                    cpus.gateway.into_iter().collect::<Vec<_>>(),
                ),
                (PlanRole::Prefill, cpus.prefill),
                (PlanRole::Decode, cpus.decode),
            ] {
                for set in sets {
                    let index = counts[role as usize];
                    counts[role as usize] += 1;
                    ranks.push(self.rank(n, role, index, set, budget));
                }
            }
        }
        ranks
    }

    fn rank(
        &self,
        n: usize,
        role: PlanRole,
        index: u32,
        mut set: CpuSet,
        budget: &NodeBudget,
    ) -> PlanRank {
        let demand = &self.demand;
        let weight_bytes = demand.facts.bytes.total();
        let kv_bytes = match role {
            PlanRole::Gateway => 0,
            PlanRole::Prefill => budget.prefill_kv_bytes,
            PlanRole::Decode => budget.decode_kv_bytes,
        };
        let is_worker = role != PlanRole::Gateway;
        let scratch_bytes = if is_worker {
            demand.worker_scratch_bytes()
        } else {
            demand.gateway_scratch_bytes()
        };
        let chunk_tokens = match role {
            PlanRole::Gateway => 0,
            PlanRole::Prefill => demand.chunk_tokens,
            PlanRole::Decode => self.decode_chunk_tokens(n, &set, budget),
        };
        let predicted = is_worker.then(|| self.rank_prediction(n, role, &set, budget));
        if is_worker {
            let needs = budget
                .weight_budget_bytes
                .saturating_add(kv_bytes)
                .saturating_add(scratch_bytes);
            widen_memory(&mut set, self.nodes[n], needs);
        }
        PlanRank {
            name: format!("{}-{index}", role.as_str()),
            role,
            index,
            node: self.nodes[n].node.clone(),
            cpus: set.cpus,
            numa_nodes: set.numa_nodes,
            threads: set.threads,
            pinning: self.request.spec.placement.pinning,
            device: DEVICE_CPU.to_owned(),
            gpus: if role == PlanRole::Prefill {
                self.request.spec.prefill.gpus_per_worker.unwrap_or(0)
            } else {
                0
            },
            gpu_uuids: Vec::new(),
            gpu_memory_bytes: 0,
            residency: is_worker.then_some(PlanResidency {
                policy: budget.policy,
                weight_bytes,
                budget_bytes: budget.weight_budget_bytes,
            }),
            kv: is_worker.then_some(PlanKv {
                memory_bytes: kv_bytes,
                key_type: self.key_type,
                value_type: self.value_type,
                block_tokens: BLOCK_TOKENS,
            }),
            max_batch: match role {
                PlanRole::Gateway => 0,
                PlanRole::Prefill => PREFILL_BATCH,
                PlanRole::Decode => demand.max_batch,
            },
            chunk_tokens,
            scratch_bytes,
            endpoint: None,
            predicted,
        }
    }

    /// The largest chunk (a power of two from 16 to 256) whose step holds running streams up no longer than allowed.
    fn decode_chunk_tokens(&self, n: usize, set: &CpuSet, budget: &NodeBudget) -> u32 {
        let predictor = self.chooser.predictor(n, set, budget);
        let allowed_ms = self
            .request
            .spec
            .objectives
            .time_per_output_token
            .map_or(DEFAULT_STALL_MS, |d| d.as_millis_f64());
        let fits = |chunk: &u32| predictor.prefill_ms(*chunk, *chunk) <= allowed_ms;
        [256, 128, 64, 32]
            .into_iter()
            .find(fits)
            .unwrap_or(16)
            .min(self.demand.context_length)
    }

    fn rank_prediction(
        &self,
        n: usize,
        role: PlanRole,
        set: &CpuSet,
        budget: &NodeBudget,
    ) -> RankPrediction {
        let predictor = self.chooser.predictor(n, set, budget);
        let (prompt, context) = (self.chooser.prompt_tokens(), self.chooser.stream_tokens());
        if role == PlanRole::Prefill {
            let prefill_ms = predictor.prefill_ms(prompt, self.demand.chunk_tokens);
            let link = self.chooser.link_gbps(n, &self.placement.crews);
            let ttft_ms = prefill_ms + predictor.hand_over_ms(prompt, link);
            return RankPrediction {
                ttft_ms: Some(rounded(ttft_ms)),
                prompt_tokens: Some(prompt),
                tpot_ms: None,
                tokens_per_second: rounded(f64::from(prompt) / prefill_ms * 1e3),
            };
        }
        let sharing = if self.chooser.is_exclusive() {
            1
        } else {
            self.placement.crews[n].decode
        };
        let full = Predictor {
            rates: predictor.rates.shared_by(sharing),
            ..predictor
        };
        let batch = self.demand.max_batch;
        RankPrediction {
            ttft_ms: None,
            prompt_tokens: None,
            tpot_ms: Some(rounded(predictor.decode_ms(1, context))),
            tokens_per_second: rounded(f64::from(batch) / full.decode_ms(batch, context) * 1e3),
        }
    }

    /// Milliseconds to the first token of a prompt that a decode rank reads by itself, in its own chunks.
    pub(crate) fn chunked_ttft_ms(&self, decode: &PlanRank) -> Option<f64> {
        let n = self
            .nodes
            .iter()
            .position(|node| node.node == decode.node)?;
        let budget = self.placement.budgets[n].as_ref()?;
        let set = CpuSet {
            cpus: decode.cpus.clone(),
            numa_nodes: decode.numa_nodes.clone(),
            threads: decode.threads,
        };
        let predictor = self.chooser.predictor(n, &set, budget);
        Some(predictor.prefill_ms(self.chooser.prompt_tokens(), decode.chunk_tokens))
    }

    fn routing(&self, ranks: &[PlanRank]) -> PlanRouting {
        let has_prefill = ranks.iter().any(|rank| rank.role == PlanRole::Prefill);
        let streams: u32 = ranks
            .iter()
            .filter(|r| r.role == PlanRole::Decode)
            .map(|r| r.max_batch)
            .sum();
        PlanRouting {
            chunked_below_tokens: if has_prefill {
                CHUNKED_BELOW_TOKENS_CPU
            } else {
                PlanRouting::ALWAYS_CHUNKED
            },
            max_queue: streams.saturating_mul(32).max(LEAST_QUEUE),
            queue_timeout_ms: QUEUE_TIMEOUT_MS,
        }
    }

    /// The service's prediction: the best prefill rank and the slowest decode rank, since any may serve a request.
    fn prediction(&self, ranks: &[PlanRank]) -> PlanPrediction {
        let of = |role: PlanRole| {
            ranks
                .iter()
                .filter(move |r| r.role == role)
                .filter_map(|r| r.predicted.as_ref())
        };
        let tpot_ms = of(PlanRole::Decode)
            .filter_map(|p| p.tpot_ms)
            .fold(0.0, f64::max);
        let ttft_ms = of(PlanRole::Prefill)
            .filter_map(|p| p.ttft_ms)
            .reduce(f64::max)
            .or_else(|| {
                ranks
                    .iter()
                    .filter(|r| r.role == PlanRole::Decode)
                    .filter_map(|r| self.chunked_ttft_ms(r))
                    .reduce(f64::max)
            });
        PlanPrediction {
            ttft_ms: rounded(ttft_ms.unwrap_or(0.0)),
            ttft_prompt_tokens: self.chooser.prompt_tokens(),
            tpot_ms,
            tokens_per_second: rounded(of(PlanRole::Decode).map(|p| p.tokens_per_second).sum()),
        }
    }

    /// Whether any node keeps only a part of the weights in memory.
    pub(crate) fn is_prefetching(&self) -> bool {
        self.placement
            .budgets
            .iter()
            .flatten()
            .any(|budget| budget.policy == ResidencyPolicy::MmapPrefetch)
    }
}
