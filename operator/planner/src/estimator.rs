//! Predicted costs of placing a rank.

use hearth_crds::{
    ExpertCache, GpuProfile, InferenceDeploymentSpec, NodeProfileStatus, Pinning, PlanActivations,
    PlanMlaForm, ScalingSpec,
};

use crate::cpus::{Binding, CpuLack, CpuOffer, CpuRoom, CpuSet, NodeCpus, divide};
use crate::gpus::{GpuLack, GpuOffer, GpuRules, GpuSlot, GpuSlots, activations_on, assign_slots};
use crate::host_experts::{HostChoice, HostExperts};
use crate::latents::Latents;
use crate::link::{LinkRates, measured_link};
use crate::memory::{Demand, NodeBudget};
use crate::node_ranks::Device;
use crate::node_ranks::NodeRanks;
use crate::peers::{Hop, Peer};
use crate::place::Cost;
use crate::predict::{ExpertsAt, LOOPBACK_GBPS, Predictor, Rates, Step};

/// The way between two nodes that have not measured their link: a little under gigabit Ethernet.
pub(crate) const UNMEASURED_HOP: Hop = Hop {
    gbps: 0.1,
    latency_ms: 0.2,
};
/// Milliseconds of a message between two processes of one node besides its bytes; an assumption.
const LOOPBACK_MS: f64 = 0.1;
/// Prompt length in tokens at which TTFT is predicted: a quarter of the context, capped at this.
const PREDICTED_PROMPT_TOKENS: u32 = 512;
/// Context length in tokens at which TPOT is predicted: half of the context, capped at this.
const PREDICTED_CONTEXT_TOKENS: u32 = 1024;

/// Share of the absorbed form's time below which the expanded one is chosen.
const MLA_GAIN: f64 = 0.95;

/// Form of latent attention of a rank, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MlaChoice {
    pub form: PlanMlaForm,
    /// Milliseconds of the longest prompt beside its routed experts, absorbed.
    pub absorbed_ms: f64,
    /// The same expanded.
    pub expanded_ms: f64,
}

/// Predicts what placing a rank costs.
#[derive(Clone, Copy)]
pub(crate) struct Estimator<'a> {
    nodes: &'a [&'a NodeProfileStatus],
    demand: &'a Demand<'a>,
    spec: &'a InferenceDeploymentSpec,
    gpus: GpuOffer<'a>,
    cpus: CpuOffer<'a>,
}

impl<'a> Estimator<'a> {
    pub(crate) fn new(
        nodes: &'a [&'a NodeProfileStatus],
        demand: &'a Demand<'a>,
        spec: &'a InferenceDeploymentSpec,
        (gpus, cpus): (GpuOffer<'a>, CpuOffer<'a>),
    ) -> Self {
        Self {
            nodes,
            demand,
            spec,
            gpus,
            cpus,
        }
    }

    pub(crate) fn cpus(&self, node: usize, ranks: NodeRanks) -> Result<NodeCpus, CpuLack> {
        let binding = Binding {
            pinning: self.spec.placement.pinning,
            numa: self.spec.placement.numa,
        };
        divide(self.nodes[node], ranks, binding, self.cpus)
    }

    /// GPU slots of a node's ranks.
    pub(crate) fn slots(&self, node: usize, ranks: NodeRanks) -> Result<GpuSlots<'a>, GpuLack> {
        let asked = match ranks.peers {
            0 => self.spec.prefill.gpus_per_worker.unwrap_or(0),
            // It is the number of peers.
            _ => 0,
        };
        assign_slots(
            self.nodes[node],
            ranks,
            self.demand,
            self.gpus,
            GpuRules {
                per_prefill: asked.max(u32::from(ranks.devices.prefill.is_gpu())),
                may_share: self.may_share_pods(asked),
                gains_until: &|gpu| self.turning_point_tokens(gpu),
            },
        )
    }

    /// Whether a prefill and a decode rank may be in one Pod: not where one holds several GPUs, where the kubelet gives a
    /// container CPUs of its own, which both would use, or where the number of prefill ranks changes by itself.
    fn may_share_pods(&self, gpus_per_worker: u32) -> bool {
        let scaling = self.spec.prefill.scaling.as_ref();
        gpus_per_worker <= 1
            && !scaling.is_some_and(ScalingSpec::is_dynamic)
            && !self.is_exclusive()
    }

    /// Tokens of the longest prompt that a GPU streams faster through a ring of more than two slots.
    pub(crate) fn turning_point_tokens(&self, gpu: &GpuProfile) -> u32 {
        let context = self.demand.context_length;
        LinkRates::of(gpu).map_or(context, |link| {
            let activations = activations_on(gpu, self.spec.model.activations);
            self.on_gpu(gpu, activations, ExpertsAt::Device)
                .turning_point_tokens(link.alone_gbps, context)
        })
    }

    /// The predictor of a rank that has a whole GPU.
    fn on_gpu(
        &self,
        gpu: &GpuProfile,
        activations: PlanActivations,
        experts_at: ExpertsAt,
    ) -> Predictor<'a> {
        Predictor {
            facts: self.demand.facts,
            rates: Rates::of_gpu(gpu, activations, self.demand.facts),
            kv_bytes_per_token: self.demand.kv_bytes_per_token,
            kept_bytes: u64::MAX,
            mapped_bytes: u64::MAX,
            experts_at,
            mla_form: PlanMlaForm::Absorbed,
        }
    }

    /// The predictor of a rank with these CPUs; `slot` is `None` for a rank on CPUs.
    pub(crate) fn predictor(
        &self,
        node: usize,
        set: &CpuSet,
        slot: Option<&GpuSlot<'_>>,
        budget: &NodeBudget,
    ) -> Predictor<'a> {
        let plain = self.plain_predictor(node, set, slot, budget);
        match slot.and_then(|slot| self.host_experts(slot, budget)) {
            Some(host_experts) => host_experts.chosen(&plain),
            None => plain,
        }
    }

    /// What a rank does with experts that its CPUs compute; `None` where they do not.
    pub(crate) fn host_choice(
        &self,
        node: usize,
        set: &CpuSet,
        slot: &GpuSlot<'_>,
        budget: &NodeBudget,
    ) -> Option<HostChoice> {
        let plain = self.plain_predictor(node, set, Some(slot), budget);
        Some(self.host_experts(slot, budget)?.choose(&plain))
    }

    fn expert_cache(&self) -> ExpertCache {
        self.spec.decode.expert_cache.unwrap_or_default()
    }

    fn host_experts(&self, slot: &GpuSlot<'_>, budget: &NodeBudget) -> Option<HostExperts> {
        match slot.device {
            Device::Cpus | Device::Gpu | Device::StreamingGpu(_) => None,
            Device::GpuAndCpus => Some(HostExperts {
                room_slots: match (self.expert_cache(), &slot.gpu.virtual_device) {
                    // Copies to the GPU would need all experts in memory.
                    _ if budget.expert_budget_bytes.is_some() => 0,
                    (ExpertCache::On, _) | (ExpertCache::Auto, Some(_)) => slot.cache_room_slots,
                    // Which of two arithmetics computes an expert would depend on time.
                    (ExpertCache::Auto, None) | (ExpertCache::Off, _) => 0,
                },
                all_experts: self.demand.all_experts(),
                dual_batch: self.spec.decode.dual_batch,
                max_batch: self.demand.max_batch,
                context_tokens: self.stream_tokens(),
            }),
        }
    }

    /// The predictor of a rank without a cache of experts and half batches.
    fn plain_predictor(
        &self,
        node: usize,
        set: &CpuSet,
        slot: Option<&GpuSlot<'_>>,
        budget: &NodeBudget,
    ) -> Predictor<'a> {
        match slot {
            Some(slot) => {
                let activations = slot.activations(self.spec.model.activations);
                let mla_form = self.mla_form(Some(slot));
                Predictor {
                    mla_form,
                    ..self.on_gpu(
                        slot.gpu,
                        activations,
                        self.experts_at(node, set, slot, budget),
                    )
                }
            }
            None => Predictor {
                facts: self.demand.facts,
                rates: Rates::of(self.nodes[node], set, self.demand.facts),
                kv_bytes_per_token: self.demand.kv_bytes_per_token,
                kept_bytes: self.kept_bytes(node, budget),
                mapped_bytes: budget.weight_budget_bytes,
                experts_at: ExpertsAt::Device,
                mla_form: PlanMlaForm::Absorbed,
            },
        }
    }

    /// Form of latent attention of a rank; `slot` is `None` on CPUs.
    pub(crate) fn mla_form(&self, slot: Option<&GpuSlot<'_>>) -> PlanMlaForm {
        let choice = slot.and_then(|slot| self.mla_choice(slot));
        choice.map_or_else(PlanMlaForm::default, |choice| choice.form)
    }

    /// Form of latent attention of a rank that streams experts: the one that takes less time for the longest prompt, whose
    /// attention weighs most and whose room the plan has; `None` where only the absorbed one is possible.
    pub(crate) fn mla_choice(&self, slot: &GpuSlot<'_>) -> Option<MlaChoice> {
        let streams = slot.device.is_streaming();
        let facts = self.demand.facts;
        Latents::of(facts, self.demand.kv_bytes_per_token).filter(|_| streams)?;
        let activations = slot.activations(self.spec.model.activations);
        let prompt = Step::of_prompt(self.demand.context_length);
        let ms = |mla_form| {
            let plain = self.on_gpu(slot.gpu, activations, ExpertsAt::Device);
            Predictor { mla_form, ..plain }.beside_experts_ms(prompt)
        };
        let [absorbed_ms, expanded_ms] = [PlanMlaForm::Absorbed, PlanMlaForm::Expanded].map(ms);
        // Predictions that are as near as this say nothing, and ranks of a pool had better have one form.
        let form = match expanded_ms < absorbed_ms * MLA_GAIN {
            true => PlanMlaForm::Expanded,
            false => PlanMlaForm::Absorbed,
        };
        Some(MlaChoice {
            form,
            absorbed_ms,
            expanded_ms,
        })
    }

    /// Where a rank on a GPU has its experts computed.
    fn experts_at(
        &self,
        node: usize,
        set: &CpuSet,
        slot: &GpuSlot<'_>,
        budget: &NodeBudget,
    ) -> ExpertsAt {
        let routed_bytes = self.demand.facts.bytes.routed_experts.max(1);
        let kept_share = |bytes: u64| (bytes as f64 / routed_bytes as f64).min(1.0);
        let copy_gbps = LinkRates::of(slot.gpu).map_or(f64::MIN_POSITIVE, |link| link.alone_gbps);
        match slot.device {
            Device::Cpus | Device::Gpu => ExpertsAt::Device,
            Device::StreamingGpu(dense) => {
                slot.ring
                    .map_or(ExpertsAt::Device, |slots| ExpertsAt::Ring {
                        slots,
                        dense,
                        copy_gbps,
                    })
            }
            Device::GpuAndCpus => ExpertsAt::Host {
                rates: Rates::of_experts(self.nodes[node], set, self.demand.facts),
                copy_gbps,
                cached_share: 0.0,
                kept_share: budget.expert_budget_bytes.map_or(1.0, kept_share),
                dual_batch: false,
            },
        }
    }

    /// Bytes of the weights that a step does not have to read from disk.
    fn kept_bytes(&self, node: usize, budget: &NodeBudget) -> u64 {
        match self.gpus {
            // A worker's released pages stay in the page cache as long as the machine has memory, and pages that
            // others brought in are not charged to it.
            GpuOffer::Machine => {
                let disks = self.nodes[node].disks.iter();
                let cached = disks.filter_map(|disk| disk.cached_bytes).max();
                budget
                    .weight_budget_bytes
                    .max(budget.page_cache_bytes)
                    .max(cached.unwrap_or(0))
            }
            // A Pod is limited to what the plan grants.
            GpuOffer::Cluster { .. } => budget.weight_budget_bytes,
        }
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.spec.placement.pinning == Pinning::Exclusive
    }

    /// The way from a process of one node to one of another, or of the same.
    pub(crate) fn hop(&self, from: usize, to: usize) -> Hop {
        if from == to {
            return Hop {
                gbps: LOOPBACK_GBPS,
                latency_ms: LOOPBACK_MS,
            };
        }
        let link = measured_link(self.nodes[from], self.nodes[to]);
        link.map_or(UNMEASURED_HOP, |link| Hop {
            gbps: link.gbps,
            latency_ms: link.rtt_us / 2e3,
        })
    }

    /// GB/s of KV transfer from a prefill rank on `node` to the nearest decode rank.
    pub(crate) fn link_gbps(&self, node: usize, placed: &[NodeRanks]) -> f64 {
        (0..placed.len())
            .filter(|n| placed[*n].decode > 0)
            .map(|peer| self.hop(node, peer).gbps)
            .fold(0.0, f64::max)
            .max(f64::MIN_POSITIVE)
    }

    /// What ranks get of a node; `None` if it has no room for all of them.
    fn parts(&self, node: usize, ranks: NodeRanks) -> Option<(NodeCpus, GpuSlots<'a>, NodeBudget)> {
        let budget = self.demand.fit(self.nodes[node], ranks).ok()?;
        Some((
            self.cpus(node, ranks).ok()?,
            self.slots(node, ranks).ok()?,
            budget,
        ))
    }

    pub(crate) fn gpus(&self) -> GpuOffer<'a> {
        self.gpus
    }

    /// CPU that may be requested on a node; `None` if requests are not counted.
    pub(crate) fn cpu_room(&self, node: usize) -> Option<CpuRoom> {
        self.cpus.room(self.nodes[node])
    }

    pub(crate) fn nodes(&self) -> &'a [&'a NodeProfileStatus] {
        self.nodes
    }

    /// The same nodes and spec with another memory demand.
    pub(crate) fn with_demand<'b>(&self, demand: &'b Demand<'b>) -> Estimator<'b>
    where
        'a: 'b,
    {
        Estimator { demand, ..*self }
    }

    /// The same spec and demand with other nodes.
    pub(crate) fn with_nodes<'b>(&self, nodes: &'b [&'b NodeProfileStatus]) -> Estimator<'b>
    where
        'a: 'b,
    {
        Estimator { nodes, ..*self }
    }

    /// The same nodes and model with another spec.
    pub(crate) fn with_spec<'b>(&self, spec: &'b InferenceDeploymentSpec) -> Estimator<'b>
    where
        'a: 'b,
    {
        Estimator { spec, ..*self }
    }

    pub(crate) fn prompt_tokens(&self) -> u32 {
        (self.demand.context_length / 4).clamp(1, PREDICTED_PROMPT_TOKENS)
    }

    pub(crate) fn stream_tokens(&self) -> u32 {
        (self.demand.context_length / 2).clamp(1, PREDICTED_CONTEXT_TOKENS)
    }
}

impl Cost for Estimator<'_> {
    fn cpu_lack(&self, node: usize, ranks: NodeRanks) -> Option<CpuLack> {
        self.cpus(node, ranks).err()
    }

    fn gpu_lack(&self, node: usize, ranks: NodeRanks) -> Option<GpuLack> {
        self.slots(node, ranks).err()
    }

    fn decode_ms(&self, node: usize, ranks: NodeRanks) -> f64 {
        let Some((cpus, slots, budget)) = self.parts(node, ranks) else {
            return f64::INFINITY;
        };
        let Some(set) = cpus.decode.last() else {
            return f64::INFINITY;
        };
        let slot = slots.decode.last();
        let mut predictor = self.predictor(node, set, slot, &budget);
        if let Some(slot) = slot {
            predictor = predictor.shared_by(slot.sharing);
        } else if !self.is_exclusive() {
            predictor = predictor.shared_by(ranks.decode_on_cpus());
        }
        predictor.decode_ms(1, self.stream_tokens())
    }

    /// A decode rank on the same CPUs or the same GPU halves what a prefill rank gets while streams run.
    fn prefill_ms(&self, node: usize, ranks: NodeRanks, placed: &[NodeRanks]) -> f64 {
        let Some((cpus, slots, budget)) = self.parts(node, ranks) else {
            return f64::INFINITY;
        };
        let Some(set) = cpus.prefill.last() else {
            return f64::INFINITY;
        };
        let slot = slots.prefill.last();
        let mut predictor = self.predictor(node, set, slot, &budget);
        if let Some(slot) = slot {
            let is_shared = slots.decode.iter().any(|other| other.gpu == slot.gpu);
            predictor = predictor.shared_by(slot.sharing + u32::from(is_shared));
            if let (ExpertsAt::Ring { copy_gbps, .. }, Some(link)) =
                (&mut predictor.experts_at, LinkRates::of(slot.gpu))
            {
                *copy_gbps = link.beside_decode_gbps / f64::from(slot.sharing.max(1));
            }
        } else if !self.is_exclusive() {
            predictor = predictor
                .shared_by(ranks.prefill_on_cpus() + u32::from(ranks.decode_on_cpus() > 0));
        }
        let tokens = self.prompt_tokens();
        predictor.prefill_ms(tokens, self.demand.chunk_tokens)
            + predictor.hand_over_ms(tokens, self.link_gbps(node, placed))
    }

    /// As if no other peers came: a link that is slow for one is slow for all.
    fn follower_ms(&self, node: usize, ranks: NodeRanks, placed: &[NodeRanks]) -> f64 {
        let Some((cpus, slots, budget)) = self.parts(node, ranks) else {
            return f64::INFINITY;
        };
        let (Some(set), Some(slot)) = (cpus.stages.last(), slots.stages.last()) else {
            return f64::INFINITY;
        };
        let others = (0..placed.len()).flat_map(|n| {
            let peers = placed[n].in_group() as usize;
            std::iter::repeat_n(self.hop(node, n), peers)
        });
        let peer = Peer::new(ranks.peers, others);
        let predictor = self.predictor(node, set, Some(slot), &budget);
        let is_shared = slots.decode.iter().any(|other| other.gpu == slot.gpu);
        predictor
            .shared_by(1 + u32::from(is_shared))
            .together(self.demand.context_length, peer)
            .map_or(f64::INFINITY, |time| time.total_ms)
    }
}
