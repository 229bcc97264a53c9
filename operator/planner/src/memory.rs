//! Division of a node's memory: one copy of the weights, and each rank's KV cache and scratch.

use hearth_crds::{
    DENSE_SLOTS, LEAST_RING_SLOTS, ModelFacts, NodeProfileStatus, PlanExpertParallel, PlanRole,
    ResidencyPolicy, STREAMED_DENSE_VERSION, STREAMED_TILE_ROWS, waiting_bytes,
};

use crate::expert_parallel::expert_parallel;
use crate::latents::Latents;
use crate::node_ranks::{Device, NodeRanks};
use crate::ring::RingLengths;

/// Tokens of one KV block.
pub(crate) const BLOCK_TOKENS: u32 = 16;
/// Prompts that a prefill rank has in progress: one being computed, one with its last layers being transferred.
pub(crate) const PREFILL_BATCH: u32 = 2;
/// Bytes of a process, including its code, runtime and tokenizer.
const PROCESS_BYTES: u64 = 64 << 20;
/// Measured bytes of the same process, for predictions, which count memory in use rather than memory to be granted.
pub(crate) const RUNNING_PROCESS_BYTES: u64 = 16 << 20;
/// Bytes of a process that computes on a GPU: the driver maps some hundred MiB, and weights pass through pinned buffers.
const GPU_PROCESS_BYTES: u64 = 512 << 20;
/// Pieces of a prompt's KV on a GPU until they have been copied to the host: some that leave, and one that is gathered.
const LEAVING_BYTES: u64 = 8 << 20;
/// Inverse of the share of the weights that padding adds on a GPU: rows and tensors are aligned to whole blocks.
pub(crate) const GPU_PADDING_SHARE: u64 = 64;
/// Activations of a token on a GPU, where matrix products read the residual stream as three bf16 terms in addition.
const GPU_ACTIVATION_WIDTHS: u64 = 2 * ACTIVATION_WIDTHS;
/// Activations of a token, as multiples of the residual stream in float32: queries, keys, the widest FFN, up to four sums
/// of experts, two buffers.
const ACTIVATION_WIDTHS: u64 = 24;
/// What a token of a streamed prompt keeps throughout a layer, as multiples of the residual stream in float32: the stream
/// twice, its norm, the shared experts' output, the total and three partial sums of experts, two more that overlap.
const FLIGHT_WIDTHS: u64 = 10;
/// Inverse of the share of an expert that padding adds in a slot.
const SLOT_PADDING_SHARE: u64 = 64;
/// Parts of a dense module, with scales and vectors, each of which is aligned for itself.
const DENSE_PARTS: u64 = 16;
/// Norms and biases of a layer, as multiples of the residual stream: two norms, and those of queries, keys and values.
const VECTOR_WIDTHS: u64 = 5;
/// Bytes to which each of the six parts of an expert in a slot is aligned.
const SLOT_ALIGNMENT_BYTES: u64 = 256;
/// Minimum of a node's memory that is left to other programs, in bytes: one with no more holds nothing.
pub const LEAST_RESERVE_BYTES: u64 = 128 << 20;

/// Memory demand of a deployment, wherever its ranks run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    pub facts: &'a ModelFacts,
    pub kv_bytes_per_token: u64,
    pub context_length: u32,
    pub max_batch: u32,
    /// `spec.decode.kvCache.memory` in bytes.
    pub kv_memory_bytes: Option<u64>,
    /// Maximum tokens in one step of a rank.
    pub chunk_tokens: u32,
    /// Whether workers have their own CPUs, and so their own memory limits.
    pub exclusive: bool,
    /// Whether virtual devices stand for the GPUs: they have no driver, and CPUs compute for them.
    pub virtual_gpus: bool,
    /// Highest `minVersion` of plans that the workers of all nodes read.
    pub reader_version: u32,
}

/// Memory of one node, divided among its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeBudget {
    pub policy: ResidencyPolicy,
    /// Bytes of weights that may be in memory at a time; per worker if weights are prefetched and workers exclusive.
    pub weight_budget_bytes: u64,
    /// Bytes of routed experts that each decode rank whose CPUs compute them has in memory at a time; `None`: all.
    pub expert_budget_bytes: Option<u64>,
    pub decode_kv_bytes: u64,
    pub prefill_kv_bytes: u64,
    /// KV of a decode rank if memory were unlimited.
    pub decode_kv_wanted_bytes: u64,
    /// Bytes that the ranks of the node may use in total.
    pub free_bytes: u64,
    /// Bytes of files that stay in memory alongside full KV caches: reserves and the budget of mapped weights do not
    /// limit the page cache, and processes use less than they are granted.
    pub page_cache_bytes: u64,
}

/// Memory that ranks need on a node, and the memory that is free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub node: String,
    pub needs_bytes: u64,
    pub free_bytes: u64,
    pub weights_bytes: u64,
    pub kv_bytes: u64,
    pub scratch_bytes: u64,
}

/// Memory that a rank needs on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuNeed {
    /// Weights that stay there.
    pub weights_bytes: u64,
    /// Slots of dense modules; 0 where these stay.
    pub dense_slots_bytes: u64,
    /// The smallest ring of slots; 0 where no experts are streamed.
    pub ring_least_bytes: u64,
    pub kv_least_bytes: u64,
    pub kv_best_bytes: u64,
    /// Activations, logits, and the process's driver context.
    pub working_bytes: u64,
}

impl GpuNeed {
    pub(crate) fn least_bytes(self) -> u64 {
        self.weights_bytes
            .saturating_add(self.dense_slots_bytes)
            .saturating_add(self.ring_least_bytes)
            .saturating_add(self.kv_least_bytes)
            .saturating_add(self.working_bytes)
    }
}

impl Demand<'_> {
    /// Bytes of KV of `tokens` tokens, in whole blocks.
    pub(crate) fn kv_bytes(&self, tokens: u32) -> u64 {
        let blocks = u64::from(tokens.div_ceil(BLOCK_TOKENS));
        (blocks * u64::from(BLOCK_TOKENS)).saturating_mul(self.kv_bytes_per_token)
    }

    /// Bytes of a decode or prefill process in addition to weights and KV.
    pub(crate) fn worker_scratch_bytes(&self) -> u64 {
        PROCESS_BYTES + self.step_bytes(ACTIVATION_WIDTHS)
    }

    /// Bytes of the node's memory for a decode or prefill process that computes on a GPU.
    pub(crate) fn gpu_worker_scratch_bytes(&self) -> u64 {
        match self.virtual_gpus {
            true => self.worker_scratch_bytes(),
            false => GPU_PROCESS_BYTES + self.logits_bytes(),
        }
    }

    /// Bytes of a prefill process for KV that receivers have not taken yet, over a slow link all of the longest prompt's.
    /// Counted where a Pod has a memory limit; elsewhere mapped weights give way to it for a while.
    pub(crate) fn unread_bytes(&self, role: PlanRole) -> u64 {
        match role == PlanRole::Prefill && self.exclusive {
            true => self.kv_bytes(self.context_length),
            false => 0,
        }
    }

    /// Returns the memory that a rank needs on its GPU.
    pub(crate) fn on_gpu(&self, role: PlanRole, device: Device) -> GpuNeed {
        let weights = match (device.has_host_experts(), device.streams_dense()) {
            (true, true) => {
                let stay = self.facts.dense_bytes();
                let stay = stay.saturating_sub(self.facts.streamed_dense_bytes());
                stay.saturating_add(self.vector_bytes())
            }
            (true, false) => self.facts.dense_bytes(),
            (false, _) => self.facts.bytes.total(),
        };
        let dense_slots_bytes = match device.streams_dense() {
            true => u64::from(DENSE_SLOTS) * self.dense_slot_bytes(),
            false => 0,
        };
        let ring_least_bytes = match device {
            Device::StreamingGpu(_) => self.slot_bytes() * u64::from(LEAST_RING_SLOTS),
            Device::Cpus | Device::Gpu | Device::GpuAndCpus => 0,
        };
        let (kv_least_bytes, kv_best_bytes) = match role {
            PlanRole::Gateway => (0, 0),
            // A follower's cache has all positions of what its head reads.
            PlanRole::Prefill | PlanRole::Stage => self.prefill_kv(),
            PlanRole::Decode => self.decode_kv(),
        };
        GpuNeed {
            weights_bytes: padded_on_gpu(weights),
            dense_slots_bytes,
            ring_least_bytes,
            kv_least_bytes,
            kv_best_bytes,
            working_bytes: match device {
                Device::StreamingGpu(_) => self.flight_bytes(self.context_length),
                Device::Cpus | Device::Gpu | Device::GpuAndCpus => {
                    self.gpu_context_bytes() + self.step_bytes(self.gpu_activation_widths())
                }
            },
        }
    }

    /// Bytes of a slot of the experts' ring or cache: one expert, padded.
    pub(crate) fn slot_bytes(&self) -> u64 {
        let expert = self.facts.expert_bytes();
        let expert = expert.max(self.facts.largest_expert_bytes);
        expert + expert / SLOT_PADDING_SHARE + 6 * SLOT_ALIGNMENT_BYTES
    }

    /// Bytes of a slot of dense modules: the largest of one layer, padded.
    pub(crate) fn dense_slot_bytes(&self) -> u64 {
        let (bytes, layers) = (self.facts.bytes, u64::from(self.facts.layers.max(1)));
        let with_experts = u64::from(self.facts.routed_layers());
        let of_each = |bytes: u64, layers: u64| bytes.div_ceil(layers.max(1));
        let largest = of_each(bytes.attention, layers)
            .max(of_each(
                bytes.dense_ffn,
                layers.saturating_sub(with_experts),
            ))
            .max(of_each(bytes.shared_expert, with_experts))
            .max(self.facts.largest_dense_module_bytes);
        largest + largest / SLOT_PADDING_SHARE + DENSE_PARTS * SLOT_ALIGNMENT_BYTES
    }

    /// Bytes of the norms and biases of modules that pass through slots, which stay on the device in float32.
    fn vector_bytes(&self) -> u64 {
        let layer =
            VECTOR_WIDTHS * u64::from(self.facts.hidden) * 4 + DENSE_PARTS * SLOT_ALIGNMENT_BYTES;
        layer * u64::from(self.facts.layers)
    }

    /// Routed experts of all layers.
    pub(crate) fn all_experts(&self) -> u64 {
        u64::from(self.facts.experts) * u64::from(self.facts.routed_layers())
    }

    /// Working room on a GPU for a streamed prompt of `tokens`, which passes through each layer as a whole, its attention
    /// in tiles of rows. Where these are an eighth of a long prompt, they take no more than its experts, which run before and after.
    /// One of peers needs no more: through attention it keeps an n-th of the rows, with their queries, and beside its experts
    /// all rows once more and their sums, which it would have alone, but no queries.
    pub(crate) fn flight_bytes(&self, tokens: u32) -> u64 {
        let facts = self.facts;
        let (hidden, inner) = (u64::from(facts.hidden), u64::from(facts.expert_hidden));
        let inner = if inner == 0 { hidden } else { inner };
        let kept = FLIGHT_WIDTHS * hidden + 3 * inner + u64::from(facts.experts);
        let tile = u64::from(STREAMED_TILE_ROWS.min(tokens)) + u64::from(PREFILL_BATCH);
        let tile_bytes = tile * hidden * 4 * self.gpu_activation_widths();
        let (kept, tile_bytes) = match Latents::of(facts, self.kv_bytes_per_token) {
            None => (kept, tile_bytes),
            // Either form has room. What was read before is expanded too, as much of it as there may be.
            Some(latents) => {
                let positions = u64::from(PREFILL_BATCH) * u64::from(self.context_length);
                let [heads, activations] = latents.scratch_bytes(positions);
                let activations = activations * (self.gpu_activation_widths() / ACTIVATION_WIDTHS);
                let expanded = heads.saturating_add(activations);
                (kept.max(latents.kept_by_row()), tile_bytes.max(expanded))
            }
        };
        (u64::from(tokens) * kept * 4)
            .saturating_add(tile_bytes)
            .saturating_add(self.leaving_bytes())
            .saturating_add(self.logits_bytes())
            .saturating_add(self.gpu_context_bytes())
    }

    /// Experts of a layer that a rank streams: those of its share if it is one of `peers`, or all.
    pub(crate) fn experts_of_share(&self, peers: u32) -> u32 {
        self.facts.experts.div_ceil(peers.max(1))
    }

    /// Bytes of the node's memory for what one of peers exchanges with the others: as much of the longest prompt as may wait
    /// at a member.
    pub(crate) fn exchange_bytes(&self, peers: u32) -> u64 {
        let copies = match expert_parallel(self.facts, peers) {
            PlanExpertParallel::SmallEp => 1,
            PlanExpertParallel::Ep => u64::from(self.facts.experts_per_token),
        };
        let kv_layer_bytes = self
            .kv_bytes_per_token
            .div_ceil(u64::from(self.facts.layers.max(1)));
        let (rows, hidden) = (u64::from(self.context_length), u64::from(self.facts.hidden));
        waiting_bytes(rows, hidden, kv_layer_bytes, copies)
    }

    /// Bytes that the ring of a rank that streams and its working room share: as many slots as a layer has experts for it
    /// beside each prompt that gains from them, and the smallest ring beside the longest prompt. `gains_until`: tokens of the
    /// longest prompt that gains.
    pub(crate) fn ring_room_bytes(&self, experts: u32, gains_until: u32) -> u64 {
        let of = |slots: u32, tokens: u32| {
            let ring_bytes = self.slot_bytes().saturating_mul(u64::from(slots));
            ring_bytes.saturating_add(self.flight_bytes(tokens))
        };
        let gains_until = gains_until.min(self.context_length);
        of(experts, gains_until).max(of(LEAST_RING_SLOTS, self.context_length))
    }

    /// Lengths of a ring for so many experts of a layer, which shares `room_bytes` with the working room.
    pub(crate) fn ring_lengths(
        &self,
        experts: u32,
        room_bytes: u64,
        gains_until: u32,
    ) -> RingLengths {
        let longest = |slots: u32| {
            let ring_bytes = self.slot_bytes().saturating_mul(u64::from(slots));
            let left_bytes = room_bytes.saturating_sub(ring_bytes);
            let (mut fits, mut exceeds) = (0, self.context_length.saturating_add(1));
            while exceeds - fits > 1 {
                let middle = fits + (exceeds - fits) / 2;
                match self.flight_bytes(middle) <= left_bytes {
                    true => fits = middle,
                    false => exceeds = middle,
                }
            }
            fits
        };
        let slots = (experts, LEAST_RING_SLOTS);
        RingLengths::new(slots, self.context_length, gains_until, longest)
    }

    /// KV that is gathered on a GPU while it leaves for the host; a virtual one has it at once.
    fn leaving_bytes(&self) -> u64 {
        match self.virtual_gpus {
            true => 0,
            false => LEAVING_BYTES,
        }
    }

    fn gpu_context_bytes(&self) -> u64 {
        match self.virtual_gpus {
            true => 0,
            false => hearth_crds::GPU_CONTEXT_BYTES,
        }
    }

    fn gpu_activation_widths(&self) -> u64 {
        match self.virtual_gpus {
            true => ACTIVATION_WIDTHS,
            false => GPU_ACTIVATION_WIDTHS,
        }
    }

    /// Bytes of activations and logits in the largest step.
    fn step_bytes(&self, activation_widths: u64) -> u64 {
        let tokens = u64::from(self.chunk_tokens) + u64::from(self.max_batch);
        let activations = tokens * u64::from(self.facts.hidden) * 4 * activation_widths;
        activations + self.logits_bytes()
    }

    fn logits_bytes(&self) -> u64 {
        u64::from(self.max_batch) * u64::from(self.facts.vocab) * 4 * 2
    }

    /// Bytes of the gateway.
    pub(crate) fn gateway_scratch_bytes(&self) -> u64 {
        PROCESS_BYTES * 2
    }

    fn scratch_bytes(&self, ranks: NodeRanks) -> u64 {
        let (on_cpus, on_gpus) = (
            ranks.prefill_on_cpus() + ranks.decode_on_cpus(),
            ranks.on_gpus(),
        );
        self.gateway_scratch_bytes() * u64::from(ranks.gateways)
            + self.worker_scratch_bytes() * u64::from(on_cpus)
            + self.gpu_worker_scratch_bytes() * u64::from(on_gpus)
            + self.unread_bytes(PlanRole::Prefill) * u64::from(ranks.prefill)
            + match ranks.in_group() {
                0 => 0,
                members => self.exchange_bytes(ranks.peers) * u64::from(members),
            }
    }

    /// KV of one decode rank: minimum and optimum.
    fn decode_kv(&self) -> (u64, u64) {
        match self.kv_memory_bytes {
            Some(bytes) => (bytes, bytes),
            None => {
                let one = self.kv_bytes(self.context_length);
                (one, one.saturating_mul(u64::from(self.max_batch)))
            }
        }
    }

    /// KV of one prefill rank: minimum and optimum.
    fn prefill_kv(&self) -> (u64, u64) {
        let one = self.kv_bytes(self.context_length);
        (one, one.saturating_mul(u64::from(PREFILL_BATCH)))
    }

    /// Bytes of `node` that its ranks leave to the page cache if each has this much KV.
    fn page_cache_bytes(
        &self,
        node: &NodeProfileStatus,
        ranks: NodeRanks,
        decode_kv_bytes: u64,
        prefill_kv_bytes: u64,
    ) -> u64 {
        let decode = u64::from(ranks.decode_on_cpus());
        let prefill = u64::from(ranks.prefill_on_cpus());
        // One process more than there are workers even without a gateway, for other processes that run on the node.
        let gateways = u64::from(ranks.gateways.max(1));
        node.memory
            .available_bytes
            .saturating_sub(decode_kv_bytes.saturating_mul(decode))
            .saturating_sub(prefill_kv_bytes.saturating_mul(prefill))
            .saturating_sub((decode + prefill) * self.step_bytes(ACTIVATION_WIDTHS))
            .saturating_sub((decode + prefill + gateways) * RUNNING_PROCESS_BYTES)
    }

    /// Windows over the weights of a node whose memory cannot hold all of them, with the least bytes of each: those of
    /// ranks on CPUs, one each if they have their own memory limits, and those over the experts of decode ranks with
    /// attention on a GPU, which hold at least what a token chooses of a layer. A GPU that streams asks for all experts in
    /// every pass: then there are none, but one of everything.
    fn windows(&self, ranks: NodeRanks) -> [Windows; 2] {
        let workers = u64::from(ranks.decode_on_cpus() + ranks.prefill_on_cpus());
        let own = match self.reader_version >= STREAMED_DENSE_VERSION {
            true => u64::from(ranks.with_expert_budget()),
            false => 0,
        };
        let facts = self.facts;
        if own == 0 && ranks.has_host_experts() {
            let of_all = Windows {
                count: 1,
                least_bytes: self.host_weights(ranks),
            };
            return [of_all, Windows::default()];
        }
        let of_cpus = Windows {
            count: match self.exclusive {
                true => workers,
                false => workers.min(1),
            },
            least_bytes: facts.least_resident_bytes(),
        };
        let of_experts = Windows {
            count: own,
            least_bytes: u64::from(facts.experts_per_token) * facts.expert_bytes(),
        };
        [of_cpus, of_experts]
    }

    /// Bytes of weights in the memory of a node with these ranks.
    fn host_weights(&self, ranks: NodeRanks) -> u64 {
        let (total, routed) = (self.facts.bytes.total(), self.facts.bytes.routed_experts);
        let on_cpus = ranks.decode_on_cpus() + ranks.prefill_on_cpus();
        match (on_cpus, ranks.has_host_experts()) {
            (0, false) => 0,
            (0, true) => {
                // Shares of different peers are different experts.
                let (copies, routed) = match ranks.has_shares_alone() {
                    true => (u64::from(ranks.followers), self.share_bytes(ranks.peers)),
                    false => (1, routed),
                };
                let dense = match ranks.has_host_dense() {
                    true => self.facts.streamed_dense_bytes(),
                    false => 0,
                };
                routed.saturating_add(dense).saturating_mul(copies)
            }
            (_, _) => total,
        }
    }

    /// Bytes of the routed experts of one of peers, at most.
    fn share_bytes(&self, peers: u32) -> u64 {
        let of_one = self.facts.bytes.routed_experts / u64::from(self.facts.experts.max(1));
        (of_one + 1).saturating_mul(u64::from(self.experts_of_share(peers)))
    }

    /// Divides the memory of `node` among its ranks; excludes weights and KV of ranks on GPUs.
    ///
    /// Resident weights take precedence over a large KV cache: a missing weight is read again for every token, a
    /// missing block makes one request wait. Workers with their own memory limits each have a window over prefetched
    /// weights; others share one.
    pub(crate) fn fit(
        &self,
        node: &NodeProfileStatus,
        ranks: NodeRanks,
    ) -> Result<NodeBudget, Shortage> {
        let free = free_bytes(node);
        let decode = u64::from(ranks.decode_on_cpus());
        let prefill = u64::from(ranks.prefill_on_cpus());
        let weights = self.host_weights(ranks);
        let scratch = self.scratch_bytes(ranks);
        let (decode_least, decode_best) = self.decode_kv();
        let (prefill_least, prefill_best) = self.prefill_kv();
        let sum = |weights: u64, decode_kv: u64, prefill_kv: u64| {
            weights
                .saturating_add(scratch)
                .saturating_add(decode_kv.saturating_mul(decode))
                .saturating_add(prefill_kv.saturating_mul(prefill))
        };
        let budget = |policy, weight_budget_bytes, decode_kv_bytes, prefill_kv_bytes| NodeBudget {
            policy,
            weight_budget_bytes,
            expert_budget_bytes: None,
            decode_kv_bytes,
            prefill_kv_bytes,
            decode_kv_wanted_bytes: decode_best,
            free_bytes: free,
            page_cache_bytes: self.page_cache_bytes(node, ranks, decode_kv_bytes, prefill_kv_bytes),
        };
        if sum(weights, decode_best, prefill_best) <= free {
            return Ok(budget(
                ResidencyPolicy::Resident,
                weights,
                decode_best,
                prefill_best,
            ));
        }
        let least = sum(weights, decode_least, prefill_least);
        if least <= free {
            let block = self.kv_bytes(BLOCK_TOKENS).max(1);
            let spare = (free - least).checked_div(decode).unwrap_or(0);
            let decode_kv = decode_least
                .saturating_add(spare / block * block)
                .min(decode_best);
            return Ok(budget(
                ResidencyPolicy::Resident,
                weights,
                decode_kv,
                prefill_least,
            ));
        }
        let windows = self.windows(ranks);
        let floors = windows.iter().map(Windows::bytes).sum();
        let least = sum(floors, decode_least, prefill_least);
        if least <= free {
            let budget = budget(
                ResidencyPolicy::MmapPrefetch,
                weights,
                decode_least,
                prefill_least,
            );
            let routed = self.facts.bytes.routed_experts;
            return Ok(budget.divided(windows, free - least, routed));
        }
        Err(Shortage {
            node: node.node.clone(),
            needs_bytes: least,
            free_bytes: free,
            weights_bytes: floors,
            kv_bytes: least.saturating_sub(floors).saturating_sub(scratch),
            scratch_bytes: scratch,
        })
    }
}

/// Bytes that weights take on a GPU.
pub(crate) fn padded_on_gpu(weight_bytes: u64) -> u64 {
    weight_bytes.saturating_add(weight_bytes / GPU_PADDING_SHARE)
}

/// Windows of one size over weights that are not all in memory.
#[derive(Clone, Copy, Debug, Default)]
struct Windows {
    count: u64,
    least_bytes: u64,
}

impl Windows {
    /// Bytes of all of them at their least.
    fn bytes(&self) -> u64 {
        self.least_bytes.saturating_mul(self.count)
    }

    /// Bytes of each, up to `most_bytes`, if `spare_bytes` are divided among them, and what is left.
    fn widened(&self, spare_bytes: u64, most_bytes: u64) -> (u64, u64) {
        let share = spare_bytes.checked_div(self.count).unwrap_or(0);
        let more = share.min(most_bytes.saturating_sub(self.least_bytes));
        let bytes = match self.count {
            0 => 0,
            _ => self.least_bytes.saturating_add(more).min(most_bytes),
        };
        (bytes, spare_bytes - more * self.count)
    }
}

impl NodeBudget {
    /// The same with its weights in windows, of which `spare_bytes` are divided beside the least of each. What a prompt
    /// reads in a cycle gains less from memory than the experts that tokens choose most.
    fn divided(self, windows: [Windows; 2], spare_bytes: u64, routed_bytes: u64) -> Self {
        let [on_cpus, experts] = windows;
        let (expert_budget, spare_bytes) = experts.widened(spare_bytes, routed_bytes);
        let (weight_budget_bytes, _) = on_cpus.widened(spare_bytes, self.weight_budget_bytes);
        let own_bytes = expert_budget.saturating_mul(experts.count);
        Self {
            weight_budget_bytes,
            expert_budget_bytes: (experts.count > 0).then_some(expert_budget),
            page_cache_bytes: self.page_cache_bytes.saturating_sub(own_bytes),
            ..self
        }
    }
}

/// Bytes that must be available on a node for `needs_bytes` to be free for ranks: the inverse of [`free_bytes`].
pub(crate) fn available_for(needs_bytes: u64) -> u64 {
    // 20/19 of the need still leaves a twentieth free.
    let with_share = needs_bytes
        .saturating_add(needs_bytes / 19)
        .saturating_add(2);
    with_share.max(needs_bytes.saturating_add(LEAST_RESERVE_BYTES))
}

/// Bytes of a node that ranks may use: available memory minus a twentieth, at least 128 MiB, for other programs.
pub(crate) fn free_bytes(node: &NodeProfileStatus) -> u64 {
    let available = node.memory.available_bytes;
    available.saturating_sub(LEAST_RESERVE_BYTES.max(available / 20))
}
