//! A placement, written down as a plan.

use hearth_crds::{
    DENSE_SLOTS, DeploymentRef, InferencePlanSpec, PEERS_VERSION, Pinning, PlanActivations,
    PlanDeviceMemory, PlanKv, PlanModel, PlanPrediction, PlanRank, PlanResidency, PlanRole,
    PlanRouting, PlanStrategy, RING_VERSION, RankDevice, RankPrediction, ResidencyPolicy,
    STREAMED_DENSE_VERSION,
};

use crate::cpus::{CpuSet, GATEWAY_UNDER_EXCLUSIVE, keep_beside, widen_memory};
use crate::draft::{DEFAULT_STALL_MS, Draft, RankHost, Written, ranks_of};
use crate::gpus::{GpuSlot, NodeOffer};
use crate::host_experts::HostChoice;
use crate::memory::{BLOCK_TOKENS, PREFILL_BATCH};
use crate::node_ranks::Device;
use crate::numerics::mixed_pools;
use crate::peer_ranks;
use crate::predict::{Predictor, rounded};
use crate::reasons;

/// Version of plans that streams experts, has CPUs compute them, or has a virtual device.
const EXPERTS_VERSION: u32 = 2;

/// Bytes of a rank's KV cache; 0 for the gateway.
fn kv_bytes(role: PlanRole, host: &RankHost<'_>) -> u64 {
    match (role, host.slot) {
        (PlanRole::Gateway, _) | (PlanRole::Stage, None) => 0,
        (PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage, Some(slot)) => slot.kv_bytes,
        (PlanRole::Prefill, None) => host.budget.prefill_kv_bytes,
        (PlanRole::Decode, None) => host.budget.decode_kv_bytes,
    }
}

impl Draft<'_> {
    /// Writes the plan.
    pub(crate) fn to_plan(&self) -> InferencePlanSpec {
        let mut ranks = self.ranks();
        let routing = self.routing(&ranks);
        self.predict_streamed(&mut ranks, routing.chunked_below_tokens);
        let predicted = self.prediction(&ranks, &routing);
        let mixed_numerics = mixed_pools(self.nodes, &ranks);
        let (mut why, not_chosen) = reasons::write(self, &ranks, &routing, &predicted);
        why.extend(mixed_numerics.iter().cloned());
        self.written(Written {
            strategy: PlanStrategy::Hybrid,
            ranks,
            routing,
            predicted,
            mixed_numerics,
            why,
            not_chosen,
        })
    }

    /// The plan with these parts.
    pub(crate) fn written(&self, parts: Written) -> InferencePlanSpec {
        let input = self.input;
        let facts = input.facts;
        let Written {
            strategy,
            ranks,
            routing,
            predicted,
            mixed_numerics,
            why,
            not_chosen,
        } = parts;
        InferencePlanSpec {
            generation: input.generation,
            min_version: min_version(&ranks),
            worker_image: None,
            deployment: DeploymentRef {
                name: input.name.to_owned(),
                namespace: input.namespace.to_owned(),
            },
            strategy,
            model: PlanModel {
                served_name: input.spec.served_name(),
                path: input.model_path.to_owned(),
                source: input.spec.model.source.describe(),
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
            objectives: input.spec.objectives.clone(),
            mixed_numerics,
            inputs: None,
            why,
            not_chosen,
        }
    }

    /// Ranks by role, then by index.
    pub(crate) fn ranks(&self) -> Vec<PlanRank> {
        let roles = PlanRole::ALL.into_iter();
        let mut ranks: Vec<PlanRank> = roles.flat_map(|role| self.ranks_of_role(role)).collect();
        self.share_pods(&mut ranks);
        peer_ranks::form(self, &mut ranks);
        ranks
    }

    /// Puts prefill ranks, and followers of peers, into the Pods of the decode ranks on the same GPU, where a GPU is given to
    /// one container alone.
    fn share_pods(&self, ranks: &mut [PlanRank]) {
        let is_given = |rank: &PlanRank| {
            let node = self.node_of(rank).map(|(_, node)| node);
            let offer = node.map(|node| self.estimator.gpus().at(node));
            rank.gpus > 0 && offer.is_some_and(|offer| offer.count().is_some())
        };
        let decode: Vec<PlanRank> = ranks_of(ranks, PlanRole::Decode).cloned().collect();
        let may_be_second = [PlanRole::Prefill, PlanRole::Stage];
        for rank in ranks.iter_mut().filter(|r| may_be_second.contains(&r.role)) {
            let mut there = decode.iter().filter(|_| is_given(rank));
            let host = there.find(|host| host.node == rank.node && host.device() == rank.device());
            if let Some(host) = host {
                rank.in_pod_of = Some(host.name.clone());
                rank.gpus = 0;
            }
        }
    }

    /// Ranks of one role, node by node, numbered across the nodes.
    fn ranks_of_role(&self, role: PlanRole) -> Vec<PlanRank> {
        if role == PlanRole::Gateway {
            return self.gateways();
        }
        let mut ranks = Vec::new();
        for (n, node_ranks) in self.placement.ranks.iter().enumerate() {
            let (Some(budget), Ok(cpus), Ok(slots)) = (
                &self.placement.budgets[n],
                self.estimator.cpus(n, *node_ranks),
                self.estimator.slots(n, *node_ranks),
            ) else {
                continue;
            };
            for (i, set) in cpus.of(role).iter().enumerate() {
                let slot = slots.of(role).get(i);
                let host = RankHost { n, budget, slot };
                let index = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
                ranks.push(self.rank(&host, role, index, set.clone()));
            }
        }
        ranks
    }

    /// The gateways in placement order: with more or fewer of them the others keep their names.
    pub(crate) fn gateways(&self) -> Vec<PlanRank> {
        let ranks = self.placement.gateways.iter().enumerate();
        ranks
            .filter_map(|(index, &n)| {
                let budget = self.placement.budgets[n].as_ref()?;
                let cpus = self.estimator.cpus(n, self.placement.ranks[n]).ok()?;
                let host = RankHost {
                    n,
                    budget,
                    slot: None,
                };
                let set = cpus.of(PlanRole::Gateway).first()?.clone();
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                Some(self.rank(&host, PlanRole::Gateway, index, set))
            })
            .collect()
    }

    /// One rank, as its role, its host and its CPUs make it.
    pub(crate) fn rank(
        &self,
        host: &RankHost<'_>,
        role: PlanRole,
        index: u32,
        mut set: CpuSet,
    ) -> PlanRank {
        let RankHost { n, budget, slot } = *host;
        let demand = &self.demand;
        let is_worker = role.is_worker();
        let on_gpu_alone = slot.filter(|slot| !slot.device.uses_cpus());
        if let Some(numa_node) = on_gpu_alone.and_then(|slot| slot.gpu.numa_node) {
            keep_beside(&mut set, self.nodes[n], numa_node);
        }
        let kv_bytes = kv_bytes(role, host);
        let scratch_bytes = self.scratch_bytes(role, slot);
        let chunk_tokens = self.chunk_tokens(role, host, &set);
        let predicted = self.rank_prediction(host, role, &set);
        let choice = slot.and_then(|slot| self.estimator.host_choice(n, &set, slot, budget));
        let residency = self.residency(host, choice);
        if is_worker {
            let needs = match slot {
                Some(_) => scratch_bytes
                    .saturating_add(residency.host_budget_bytes.unwrap_or(residency.host_bytes)),
                None => residency
                    .budget_bytes
                    .saturating_add(kv_bytes)
                    .saturating_add(scratch_bytes),
            };
            widen_memory(&mut set, self.nodes[n], needs);
        }
        let cache_bytes = u64::from(residency.cache_slots.unwrap_or(0)) * demand.slot_bytes();
        let device = slot.map_or(RankDevice::Cpus, |slot| RankDevice::Gpu(&slot.gpu.uuid));
        PlanRank {
            name: format!("{}-{index}", role.as_str()),
            role,
            index,
            node: self.nodes[n].node.clone(),
            cpus: set.cpus,
            numa_nodes: set.numa_nodes,
            threads: set.threads,
            pinning: self.pinning(role),
            device_name: device.name().to_owned(),
            gpus: self.held_gpus(role, slot),
            in_pod_of: None,
            claims_gpus: slot.is_some() && self.claims_gpus(n),
            gpu_uuids: device.gpu_uuid().map(str::to_owned).into_iter().collect(),
            gpu_memory_bytes: slot.map_or(0, |slot| slot.memory_bytes + cache_bytes),
            device_memory: slot.map(|slot| device_memory(slot, cache_bytes)),
            virtual_device: slot.and_then(|slot| slot.gpu.virtual_device.clone()),
            activations: slot.map_or(PlanActivations::F32, |slot| {
                slot.activations(self.input.spec.model.activations)
            }),
            mla_form: self.estimator.mla_form(slot),
            ring: None,
            peers: None,
            residency: is_worker.then_some(residency),
            kv: is_worker.then_some(PlanKv {
                memory_bytes: kv_bytes,
                key_type: self.key_type,
                value_type: self.value_type,
                block_tokens: BLOCK_TOKENS,
            }),
            max_batch: match role {
                PlanRole::Gateway | PlanRole::Stage => 0,
                PlanRole::Prefill => PREFILL_BATCH,
                PlanRole::Decode => demand.max_batch,
            },
            dual_batch: choice.is_some_and(|choice| choice.dual_batch),
            chunk_tokens,
            idle_chunk_tokens: None,
            scratch_bytes,
            endpoint: None,
            predicted,
        }
    }

    /// Where a worker's weights are.
    fn residency(&self, host: &RankHost<'_>, choice: Option<HostChoice>) -> PlanResidency {
        let facts = self.demand.facts;
        let weight_bytes = facts.bytes.total();
        let resident = PlanResidency {
            policy: ResidencyPolicy::Resident,
            weight_bytes,
            budget_bytes: weight_bytes,
            read_ahead_bytes: None,
            host_bytes: 0,
            host_budget_bytes: None,
            ring_slots: None,
            ring_lengths: Vec::new(),
            streams_dense: false,
            cache_slots: None,
        };
        let Some(slot) = host.slot else {
            return PlanResidency {
                policy: host.budget.policy,
                budget_bytes: host.budget.weight_budget_bytes,
                ..resident
            };
        };
        let cache_slots = choice.map_or(0, |choice| choice.cache_slots);
        let ring_slots = slot.ring.map(|ring| ring.most());
        let on_device = u64::from(ring_slots.unwrap_or(cache_slots)) * facts.expert_bytes();
        let streamed_dense = match slot.device.streams_dense() {
            true => facts.streamed_dense_bytes(),
            false => 0,
        };
        let dense_slots = match slot.device.streams_dense() {
            true => u64::from(DENSE_SLOTS) * self.demand.dense_slot_bytes(),
            false => 0,
        };
        let beside_host = PlanResidency {
            budget_bytes: facts
                .dense_bytes()
                .saturating_sub(streamed_dense)
                .saturating_add(dense_slots)
                .saturating_add(on_device),
            host_bytes: facts.bytes.routed_experts.saturating_add(streamed_dense),
            ..resident.clone()
        };
        match slot.device {
            Device::Cpus | Device::Gpu => resident,
            Device::StreamingGpu(_) => PlanResidency {
                policy: ResidencyPolicy::StreamLoading,
                streams_dense: slot.device.streams_dense(),
                ring_slots,
                ring_lengths: slot
                    .ring
                    .map_or_else(Vec::new, |ring| match ring.lengths() {
                        [_] => Vec::new(),
                        lengths => lengths.to_vec(),
                    }),
                ..beside_host
            },
            Device::GpuAndCpus => PlanResidency {
                policy: ResidencyPolicy::HostExperts,
                host_budget_bytes: host.budget.expert_budget_bytes,
                cache_slots: (cache_slots > 0).then_some(cache_slots),
                ..beside_host
            },
        }
    }

    fn pinning(&self, role: PlanRole) -> Pinning {
        match (role, self.input.spec.placement.pinning) {
            (PlanRole::Gateway, Pinning::Exclusive) => GATEWAY_UNDER_EXCLUSIVE,
            (PlanRole::Gateway | PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage, asked) => {
                asked
            }
        }
    }

    /// Bytes of the node's memory for a rank beside weights and KV.
    fn scratch_bytes(&self, role: PlanRole, slot: Option<&GpuSlot<'_>>) -> u64 {
        let demand = &self.demand;
        let process_bytes = match (role, slot) {
            (PlanRole::Gateway, _) => demand.gateway_scratch_bytes(),
            (PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage, Some(_)) => {
                demand.gpu_worker_scratch_bytes()
            }
            (PlanRole::Prefill | PlanRole::Decode | PlanRole::Stage, None) => {
                demand.worker_scratch_bytes()
            }
        };
        let is_peer = self.peers() > 0 && matches!(role, PlanRole::Prefill | PlanRole::Stage);
        let exchange_bytes = match is_peer {
            true => demand.exchange_bytes(self.peers()),
            false => 0,
        };
        process_bytes + demand.unread_bytes(role) + exchange_bytes
    }

    /// GPUs that a rank holds: the one that it computes on, or as many as the spec grants a prefill worker.
    fn held_gpus(&self, role: PlanRole, slot: Option<&GpuSlot<'_>>) -> u32 {
        if slot.map_or(self.demand.virtual_gpus, |slot| slot.gpu.is_shared()) {
            return 0;
        }
        let own = u32::from(slot.is_some());
        match role {
            PlanRole::Gateway | PlanRole::Decode | PlanRole::Stage => own,
            PlanRole::Prefill if self.peers() > 0 => own,
            PlanRole::Prefill => {
                let asked = self.input.spec.prefill.gpus_per_worker.unwrap_or(0);
                asked.max(own)
            }
        }
    }

    /// Whether the GPUs of a node are obtained through resource claims.
    fn claims_gpus(&self, n: usize) -> bool {
        let offer = self.estimator.gpus().at(self.nodes[n]);
        matches!(offer, NodeOffer::Claims(_))
    }

    fn chunk_tokens(&self, role: PlanRole, host: &RankHost<'_>, set: &CpuSet) -> u32 {
        let device = host.slot.map(|slot| slot.device);
        match role {
            PlanRole::Gateway | PlanRole::Stage => 0,
            // A prompt is one pass, so that no expert crosses the link twice.
            PlanRole::Prefill if device.is_some_and(Device::is_streaming) => {
                self.demand.context_length
            }
            PlanRole::Prefill => self.demand.chunk_tokens,
            PlanRole::Decode => self.decode_chunk_tokens(host, set),
        }
    }

    /// The largest chunk (a power of two from 16 to 256) whose step does not stall running streams longer than
    /// allowed.
    fn decode_chunk_tokens(&self, host: &RankHost<'_>, set: &CpuSet) -> u32 {
        let predictor = self
            .estimator
            .predictor(host.n, set, host.slot, host.budget);
        let allowed_ms = self
            .input
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

    /// Predicted performance of a rank; `None` for the gateway.
    fn rank_prediction(
        &self,
        host: &RankHost<'_>,
        role: PlanRole,
        set: &CpuSet,
    ) -> Option<RankPrediction> {
        let RankHost { n, budget, slot } = *host;
        let predictor = self.estimator.predictor(n, set, slot, budget);
        match role {
            PlanRole::Gateway | PlanRole::Stage => None,
            PlanRole::Prefill => Some(self.prefill_prediction(n, &predictor)),
            PlanRole::Decode => Some(self.decode_prediction(n, slot, predictor)),
        }
    }

    fn prefill_prediction(&self, n: usize, predictor: &Predictor<'_>) -> RankPrediction {
        let prompt = self.estimator.prompt_tokens();
        let prefill_ms = predictor.prefill_ms(prompt, self.demand.chunk_tokens);
        let link = self.estimator.link_gbps(n, &self.placement.ranks);
        let ttft_ms = prefill_ms + predictor.hand_over_ms(prompt, link);
        RankPrediction {
            ttft_ms: Some(rounded(ttft_ms)),
            prompt_tokens: Some(prompt),
            tpot_ms: None,
            tokens_per_second: rounded(f64::from(prompt) / prefill_ms * 1e3),
        }
    }

    fn decode_prediction(
        &self,
        n: usize,
        slot: Option<&GpuSlot<'_>>,
        predictor: Predictor<'_>,
    ) -> RankPrediction {
        let context = self.estimator.stream_tokens();
        let sharing = match slot {
            Some(slot) => slot.sharing,
            None if self.estimator.is_exclusive() => 1,
            None => self.placement.ranks[n].decode,
        };
        let full = predictor.shared_by(sharing);
        let batch = self.demand.max_batch;
        RankPrediction {
            ttft_ms: None,
            prompt_tokens: None,
            tpot_ms: Some(rounded(predictor.decode_ms(1, context))),
            tokens_per_second: rounded(f64::from(batch) / full.decode_ms(batch, context) * 1e3),
        }
    }

    /// Predicts streamed prompts of the shortest length that prefill ranks read.
    fn predict_streamed(&self, ranks: &mut [PlanRank], chunked_below_tokens: u32) {
        if !self.streams_prompts() {
            return;
        }
        let context = self.demand.context_length;
        let tokens = self.estimator.prompt_tokens().max(chunked_below_tokens);
        let tokens = tokens.clamp(1, context);
        for rank in ranks.iter_mut().filter(|r| r.role == PlanRole::Prefill) {
            let Some(ttft_ms) = self.prefill_ttft_ms(rank, tokens) else {
                continue;
            };
            rank.predicted = Some(RankPrediction {
                ttft_ms: Some(rounded(ttft_ms)),
                prompt_tokens: Some(tokens),
                tpot_ms: None,
                tokens_per_second: rounded(f64::from(tokens) / ttft_ms * 1e3),
            });
        }
    }

    /// The service's prediction: the slowest prefill rank and the slowest decode rank, since any may serve a request.
    fn prediction(&self, ranks: &[PlanRank], routing: &PlanRouting) -> PlanPrediction {
        let of = |role: PlanRole| ranks_of(ranks, role).filter_map(|rank| rank.predicted.as_ref());
        let tpot_ms = of(PlanRole::Decode)
            .filter_map(|p| p.tpot_ms)
            .fold(0.0, f64::max);
        let prompt = self.estimator.prompt_tokens();
        let is_chunked = self.streams_prompts() && prompt < routing.chunked_below_tokens;
        let ttft_ms = of(PlanRole::Prefill)
            .filter_map(|p| p.ttft_ms)
            .reduce(f64::max)
            .filter(|_| !is_chunked)
            .or_else(|| {
                ranks_of(ranks, PlanRole::Decode)
                    .filter_map(|rank| self.chunked_ttft_ms(rank, prompt))
                    .reduce(f64::max)
            });
        PlanPrediction {
            ttft_ms: rounded(ttft_ms.unwrap_or(0.0)),
            ttft_prompt_tokens: self.estimator.prompt_tokens(),
            tpot_ms,
            tokens_per_second: rounded(of(PlanRole::Decode).map(|p| p.tokens_per_second).sum()),
        }
    }
}

/// What a rank's share of a GPU is for.
fn device_memory(slot: &GpuSlot<'_>, cache_bytes: u64) -> PlanDeviceMemory {
    let need = slot.need;
    let kept_bytes = need.weights_bytes + need.dense_slots_bytes + need.ring_least_bytes;
    PlanDeviceMemory {
        weights_bytes: need.weights_bytes,
        dense_slots_bytes: need.dense_slots_bytes,
        ring_bytes: need.ring_least_bytes,
        cache_bytes,
        kv_bytes: slot.kv_bytes,
        working_bytes: slot.memory_bytes.saturating_sub(kept_bytes + slot.kv_bytes),
    }
}

/// The version of plans that readers of these ranks must know.
fn min_version(ranks: &[PlanRank]) -> u32 {
    let of_rank = |rank: &PlanRank| {
        let residency = rank.residency.as_ref();
        let has_host_experts = match residency.map(|residency| residency.policy) {
            Some(ResidencyPolicy::StreamLoading | ResidencyPolicy::HostExperts) => true,
            Some(ResidencyPolicy::Resident | ResidencyPolicy::MmapPrefetch) | None => false,
        };
        if rank.peers.is_some() {
            return PEERS_VERSION;
        }
        if rank.ring.is_some() {
            return RING_VERSION;
        }
        let streams_dense = residency.is_some_and(|residency| residency.streams_dense);
        if streams_dense || rank.has_expert_budget() {
            return STREAMED_DENSE_VERSION;
        }
        match has_host_experts || rank.dual_batch || rank.virtual_device.is_some() {
            true => EXPERTS_VERSION,
            false => 0,
        }
    };
    ranks.iter().map(of_rank).max().unwrap_or(0)
}
