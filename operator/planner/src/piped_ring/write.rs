//! A chosen ring, written down as a plan.

use hearth_crds::{
    InferencePlanSpec, PlanPrediction, PlanRank, PlanRing, PlanRole, PlanStrategy, PlanWindow,
    RankPrediction, ResidencyPolicy,
};

use super::members::Member;
use super::problem::kv_layer_bytes;
use super::{Chosen, Passes, RingPlanning, why};
use crate::draft::{Draft, RankHost, Written};
use crate::gpus::GpuSlot;
use crate::halda::{Problem, Simulator, Window};
use crate::memory::{BLOCK_TOKENS, GpuNeed, NodeBudget, free_bytes, padded_on_gpu};
use crate::node_ranks::{Device, NodeRanks};
use crate::place::Placement;
use crate::predict::rounded;

/// What a member keeps in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    /// Bytes of its weights.
    pub(super) weight_bytes: u64,
    /// Bytes of them that are in memory at a time.
    pub(super) budget_bytes: u64,
    /// Bytes of these that weights pass through as they are read ahead.
    pub(super) read_ahead_bytes: Option<u64>,
    /// Bytes of the KV of its layers.
    pub(super) kv_bytes: u64,
}

impl Chosen<'_> {
    /// Number of members.
    pub(super) fn size(&self) -> usize {
        self.choice.order.len()
    }

    /// Windows of the member at a place, in the order of the layers.
    pub(super) fn windows(&self, place: usize) -> impl Iterator<Item = &Window> {
        let device = self.choice.order[place];
        let windows = self.choice.windows.iter();
        windows.filter(move |window| window.device == device)
    }

    /// Number of layers of the member at a place.
    pub(super) fn layers(&self, place: usize) -> u64 {
        self.windows(place)
            .map(|window| window.layers.len() as u64)
            .sum()
    }

    /// The member at a place.
    pub(super) fn member(&self, place: usize) -> &Member<'_> {
        &self.members.all[self.choice.order[place]]
    }

    /// The members, in the order of their places.
    pub(super) fn ring(&self) -> impl Iterator<Item = &Member<'_>> {
        (0..self.size()).map(|place| self.member(place))
    }
}

impl RingPlanning<'_> {
    pub(super) fn write(&self, chosen: &Chosen<'_>, instead: &str) -> InferencePlanSpec {
        let kept = self.kept(chosen);
        let draft = self.draft(chosen, &kept);
        let mut ranks = draft.gateways();
        let placed = kept.iter().copied().enumerate();
        ranks.extend(placed.filter_map(|placed| self.rank(chosen, placed, &draft)));
        let predicted = self.predict(chosen, &mut ranks);
        let routing = draft.routing(&ranks);
        let (why, not_chosen) =
            why::write(self, (chosen, &kept), (&draft, &ranks), &predicted, instead);
        draft.written(Written {
            strategy: PlanStrategy::PipedRing,
            ranks,
            routing,
            predicted,
            mixed_numerics: Vec::new(),
            why,
            not_chosen,
        })
    }

    /// What each member keeps, by place. Room that all of them have beside weights and least KV is for more KV: the blocks of
    /// a ring are the same at each member.
    pub(super) fn kept(&self, chosen: &Chosen<'_>) -> Vec<Kept> {
        let problem = chosen.members.problem(self, chosen.passes);
        let kv_layer = kv_layer_bytes(self);
        let facts = self.demand.facts;
        let mut kept: Vec<Kept> = (0..chosen.size())
            .map(|place| {
                let device = chosen.choice.order[place];
                let share = &chosen.choice.shares[device];
                let (head_bytes, embedding_bytes) = match place {
                    0 => (problem.head.stored_bytes, problem.head.embedding_bytes),
                    _ => (0, 0),
                };
                let kv_bytes = chosen.layers(place) * kv_layer;
                // The embedding takes no memory where weights are mapped.
                let mapped_bytes = share.stored_bytes + head_bytes;
                let weight_bytes = mapped_bytes + embedding_bytes;
                let rates = &problem.devices[device];
                let fits = rates.buffer_bytes + weight_bytes + kv_bytes <= rates.memory_bytes;
                let budget_bytes = match fits {
                    true => weight_bytes,
                    false => mapped_bytes
                        .saturating_sub(share.overflow_bytes)
                        .max(2 * facts.largest_layer_bytes + head_bytes)
                        .min(problem.room_bytes(device).saturating_sub(kv_bytes) + head_bytes)
                        .min(mapped_bytes),
                };
                Kept {
                    weight_bytes,
                    budget_bytes,
                    read_ahead_bytes: Some(share.read_ahead_bytes).filter(|bytes| *bytes > 0),
                    kv_bytes,
                }
            })
            .collect();
        let more_bytes = self.more_kv_layer_bytes(chosen, &kept, &problem);
        for (place, kept) in kept.iter_mut().enumerate() {
            kept.kv_bytes += chosen.layers(place) * more_bytes;
        }
        kept
    }

    /// Bytes that each layer's KV may have beside the least, up to that of a full batch of whole contexts.
    fn more_kv_layer_bytes(&self, chosen: &Chosen<'_>, kept: &[Kept], problem: &Problem) -> u64 {
        let demand = self.demand;
        if demand.kv_memory_bytes.is_some() {
            return 0;
        }
        let layers = u64::from(demand.facts.layers.max(1));
        let block_bytes = (demand.kv_bytes(BLOCK_TOKENS) / layers).max(1);
        let spare_blocks = kept.iter().enumerate().map(|(place, kept)| {
            let device = chosen.choice.order[place];
            let overflow_bytes = chosen.choice.shares[device].overflow_bytes;
            let device = &problem.devices[device];
            let taken = device.buffer_bytes + kept.budget_bytes + kept.kv_bytes;
            let spare = match overflow_bytes {
                0 => device.memory_bytes.saturating_sub(taken),
                _ => 0,
            };
            spare / (chosen.layers(place).max(1) * block_bytes)
        });
        let most = kv_layer_bytes(self) * u64::from(demand.max_batch.saturating_sub(1));
        (spare_blocks.min().unwrap_or(0) * block_bytes).min(most)
    }

    /// The members on their nodes, and the gateways on these in turn.
    fn draft(&self, chosen: &Chosen<'_>, kept: &[Kept]) -> Draft<'_> {
        let nodes = self.estimator.nodes();
        let mut placed = vec![NodeRanks::default(); nodes.len()];
        let mut budgets = vec![None; nodes.len()];
        let mut in_turn: Vec<usize> = Vec::new();
        for (member, kept) in chosen.ring().zip(kept) {
            let n = member.n;
            if !in_turn.contains(&n) {
                in_turn.push(n);
            }
            let here = |on_gpu: bool| {
                let on_node = chosen.ring().filter(move |member| member.n == n);
                on_node
                    .filter(|member| member.gpu.is_some() == on_gpu)
                    .count()
            };
            placed[n] = self.node_ranks(u32::from(here(false) > 0), here(true), 0);
            // What is on a GPU takes none of the node's memory.
            match member.gpu {
                None => budgets[n] = Some(self.budget(n, *kept)),
                Some(_) => {
                    budgets[n].get_or_insert(self.budget(n, Kept::default()));
                }
            }
        }
        let gateways = self.input.spec.gateway.replicas.max(1) as usize;
        let in_turn = in_turn.iter().copied().cycle();
        let gateways: Vec<usize> = in_turn.take(gateways).collect();
        for n in &gateways {
            placed[*n].gateways += 1;
        }
        Draft {
            input: self.input,
            nodes,
            demand: *self.demand,
            placement: Placement {
                ranks: placed,
                gateways,
                budgets,
            },
            refused: Vec::new(),
            estimator: self.estimator,
            key_type: self.key_type,
            value_type: self.value_type,
        }
    }

    /// The memory of a node whose CPUs keep so much.
    fn budget(&self, n: usize, kept: Kept) -> NodeBudget {
        NodeBudget {
            policy: match kept.budget_bytes < kept.weight_bytes {
                true => ResidencyPolicy::MmapPrefetch,
                false => ResidencyPolicy::Resident,
            },
            weight_budget_bytes: kept.budget_bytes,
            expert_budget_bytes: None,
            decode_kv_bytes: kept.kv_bytes,
            prefill_kv_bytes: 0,
            decode_kv_wanted_bytes: kept.kv_bytes,
            free_bytes: free_bytes(self.estimator.nodes()[n]),
            page_cache_bytes: 0,
        }
    }

    /// The rank at a place: a decode rank's devices and memory, as the head or a stage of the ring.
    fn rank(
        &self,
        chosen: &Chosen<'_>,
        (place, kept): (usize, Kept),
        draft: &Draft<'_>,
    ) -> Option<PlanRank> {
        let member = chosen.member(place);
        let n = member.n;
        let cpus = self.estimator.cpus(n, draft.placement.ranks[n]).ok()?;
        let before = chosen.ring().take(place);
        let gpus_before = before.filter(|other| other.n == n && other.gpu.is_some());
        let set = match member.gpu {
            None => cpus.decode.first(),
            Some(_) => cpus.prefill.get(gpus_before.count()),
        };
        let slot = self.slot(member, kept);
        let host = RankHost {
            n,
            budget: draft.placement.budgets[n].as_ref()?,
            slot: slot.as_ref(),
        };
        let (role, index) = match place.checked_sub(1) {
            None => (PlanRole::Decode, 0),
            Some(index) => (PlanRole::Stage, index as u32),
        };
        let mut rank = draft.rank(&host, PlanRole::Decode, index, set?.clone());
        (rank.name, rank.role) = (name(role, index), role);
        if let Some(residency) = &mut rank.residency {
            residency.weight_bytes = kept.weight_bytes;
            residency.budget_bytes = kept.budget_bytes;
            residency.read_ahead_bytes = kept.read_ahead_bytes;
        }
        match place {
            0 => {
                let Passes {
                    chunk_tokens,
                    idle_chunk_tokens,
                    ..
                } = chosen.passes;
                rank.chunk_tokens = chunk_tokens;
                rank.idle_chunk_tokens =
                    (idle_chunk_tokens > chunk_tokens).then_some(idle_chunk_tokens);
            }
            _ => (rank.chunk_tokens, rank.max_batch) = (0, 0),
        }
        rank.predicted = None;
        let window = |window: &Window| PlanWindow {
            first_layer: window.layers.start as u32,
            layers: window.layers.len() as u32,
        };
        rank.ring = (chosen.size() > 1).then(|| PlanRing {
            head: name(PlanRole::Decode, 0),
            place: place as u32,
            windows: chosen.windows(place).map(window).collect(),
            flight_tokens: chosen.passes.flight_tokens,
        });
        Some(rank)
    }

    /// A member's share of its GPU: weights and KV of its layers, and working room.
    fn slot<'m>(&self, member: &Member<'m>, kept: Kept) -> Option<GpuSlot<'m>> {
        let room = member.gpu?;
        let need = GpuNeed {
            weights_bytes: padded_on_gpu(kept.weight_bytes),
            dense_slots_bytes: 0,
            ring_least_bytes: 0,
            kv_least_bytes: kept.kv_bytes,
            kv_best_bytes: kept.kv_bytes,
            working_bytes: self.gpu_working_bytes(),
        };
        Some(GpuSlot {
            gpu: room.gpu,
            device: Device::Gpu,
            usable_bytes: room.usable_bytes,
            kv_bytes: kept.kv_bytes,
            memory_bytes: need.least_bytes(),
            ring: None,
            ring_room_bytes: 0,
            cache_room_slots: 0,
            sharing: 1,
            need,
        })
    }

    fn predict(&self, chosen: &Chosen<'_>, ranks: &mut [PlanRank]) -> PlanPrediction {
        let (batch, choice) = (self.demand.max_batch, &chosen.choice);
        let of_batch = chosen.members.problem_of(self, chosen.passes, batch);
        let step_ms = Simulator::new(&of_batch).tpot_ms(&choice.windows);
        let step_ms = step_ms.unwrap_or(choice.tpot_ms * f64::from(batch));
        let tokens_per_second = rounded(f64::from(batch) / step_ms * 1e3);
        let tpot_ms = rounded(choice.tpot_ms);
        for head in ranks.iter_mut().filter(|r| r.role == PlanRole::Decode) {
            head.predicted = Some(RankPrediction {
                ttft_ms: None,
                prompt_tokens: None,
                tpot_ms: Some(tpot_ms),
                tokens_per_second,
            });
        }
        PlanPrediction {
            ttft_ms: rounded(choice.ttft_ms),
            ttft_prompt_tokens: self.estimator.prompt_tokens(),
            tpot_ms,
            tokens_per_second,
        }
    }
}

/// Name of a rank.
fn name(role: PlanRole, index: u32) -> String {
    format!("{}-{index}", role.as_str())
}
