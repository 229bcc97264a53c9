//! Duration of steps whose routed experts are not all on the device: a ring of slots, or CPUs (hybrid MoE paper, sections
//! 3.1 and 3.3).

use hearth_crds::{CACHED_STEP_ROWS, PlanMlaForm, STREAMED_TILE_ROWS, STREAMED_TILES};

use crate::latents::Latents;
use crate::node_ranks::DenseModules;
use crate::operations::Operations;
use crate::predict::{ExpertsAt, Predictor, Rates, Step};
use crate::stream_loading::{StreamedPrompt, StreamedTime};

/// Operations of a layer that splits its choices between a cache and the CPUs: rows for experts, products in their places,
/// and their sum.
const SPLIT_OPERATIONS: f64 = 6.0;

/// Milliseconds of a step by what computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HybridStep {
    /// Attention, dense layers, routers and head, on the device.
    pub device_ms: f64,
    /// The head's part of it, and what else is before the first layer and behind the last.
    pub ends_ms: f64,
    /// Shared experts and those in the device's cache, computed while the CPUs compute the others.
    pub beside_ms: f64,
    /// Routed experts on the CPUs, with the reads of those that are not in memory.
    pub host_ms: f64,
    /// The reads, most of them while others are computed.
    pub disk_ms: f64,
    /// Activations to the CPUs and sums back.
    pub exchange_ms: f64,
}

impl HybridStep {
    /// Duration of the step in milliseconds.
    pub(crate) fn total_ms(self) -> f64 {
        self.device_ms + self.exchange_ms + self.host_ms.max(self.beside_ms)
    }
}

/// Where the experts of a hybrid step are.
#[derive(Clone, Copy)]
struct OnHost {
    rates: Rates,
    copy_gbps: f64,
    cached_share: f64,
    kept_share: f64,
}

impl Predictor<'_> {
    /// Duration of one pass over a ring of `slots`.
    pub(crate) fn streamed(
        &self,
        step: Step,
        slots: u32,
        dense: DenseModules,
        copy_gbps: f64,
    ) -> StreamedTime {
        self.streamed_prompt(step, slots, dense, copy_gbps)
            .simulate()
    }

    /// The same pass, as its two lanes see it.
    pub(crate) fn streamed_prompt(
        &self,
        step: Step,
        slots: u32,
        dense: DenseModules,
        copy_gbps: f64,
    ) -> StreamedPrompt {
        let facts = self.facts;
        let experts = facts.expected_distinct_experts(step.tokens).round();
        let layers = f64::from(facts.layers.max(1));
        let chosen = f64::from(step.tokens) * f64::from(facts.experts_per_token);
        StreamedPrompt {
            dense_layers: facts.layers.saturating_sub(facts.routed_layers()),
            expert_layers: facts.routed_layers(),
            experts: experts as u32,
            slots,
            copy_ms: self.expert_copy_ms(copy_gbps),
            dense_copy_ms: match dense {
                DenseModules::Stay => 0.0,
                DenseModules::Stream => {
                    facts.streamed_dense_bytes() as f64 / layers / 1e9 / copy_gbps * 1e3
                }
            },
            expert_ms: self.expert_ms(step.tokens),
            dense_ms: self.beside_experts_ms(step) / layers,
            is_ahead: chosen >= f64::from(facts.experts),
            kv_exchange_ms: 0.0,
            rows_exchange_ms: 0.0,
        }
    }

    /// Milliseconds of everything in a streamed pass but its routed experts.
    pub(crate) fn beside_experts_ms(&self, step: Step) -> f64 {
        let facts = self.facts;
        let tile_rows = STREAMED_TILE_ROWS.max(step.tokens.div_ceil(STREAMED_TILES));
        let tiles = f64::from(step.tokens.div_ceil(tile_rows));
        let operations = Operations::of(facts, self.mla_form);
        let expansion = self.expanded().map_or(0.0, |latents| {
            latents.operations(step.tokens) * f64::from(facts.layers)
        });
        let count = operations.total(tiles) + operations.local_experts(0.0) + expansion;
        self.dense_ms(step, tiles) + self.rates.overhead_ms(facts, count)
    }

    /// Dimensions of latent attention that is expanded; `None` if it is absorbed.
    fn expanded(&self) -> Option<Latents> {
        match self.mla_form {
            PlanMlaForm::Absorbed => None,
            PlanMlaForm::Expanded => Latents::of(self.facts, self.kv_bytes_per_token),
        }
    }

    /// Milliseconds that one routed expert computes in a step of `tokens`.
    fn expert_ms(&self, tokens: u32) -> f64 {
        let facts = self.facts;
        let experts = facts.expected_distinct_experts(tokens).round().max(1.0);
        let chosen = f64::from(tokens) * f64::from(facts.experts_per_token);
        let rows = chosen / experts;
        let bytes = facts.expert_bytes() as f64 + rows * Operations::bytes_of_choice(facts);
        self.rates.ms(bytes, rows * facts.expert_flops()) + self.rates.operation_ms
    }

    fn expert_copy_ms(&self, copy_gbps: f64) -> f64 {
        self.facts.expert_bytes() as f64 / 1e9 / copy_gbps * 1e3
    }

    /// Tokens of the longest prompt, at most `context`, whose experts compute for less time than their copies take. Behind
    /// this turning point a ring of 2 slots hides all copies, as one expert computes while the next is copied (hybrid MoE
    /// paper, section 3.1).
    pub(crate) fn turning_point_tokens(&self, copy_gbps: f64, context: u32) -> u32 {
        let copy_ms = self.expert_copy_ms(copy_gbps);
        let (mut below, mut beyond) = (0, context.saturating_add(1));
        while beyond - below > 1 {
            let middle = below + (beyond - below) / 2;
            match self.expert_ms(middle) < copy_ms {
                true => below = middle,
                false => beyond = middle,
            }
        }
        below
    }

    /// Milliseconds of everything in a step of so many tiles of rows but routed experts and what operations add.
    fn dense_ms(&self, step: Step, tiles: f64) -> f64 {
        let facts = self.facts;
        let no_logits = f64::from(step.tokens.saturating_sub(step.logit_rows));
        let flops = facts.dense_flops() * f64::from(step.tokens) - facts.head_flops() * no_logits;
        let products_ms = self.rates.ms(facts.step_bytes(0), flops.max(0.0));
        let expanded = self.expanded();
        // Positions of the pass itself are expanded by as many operations as their queries and outputs are absorbed by.
        let expansion_flops = match expanded {
            Some(_) => facts.expansion_flops_per_position() * step.cache_positions,
            None => 0.0,
        };
        let attention_flops =
            facts.attention_flops_per_position(self.mla_form) * step.attended_positions;
        let attention_ms = self.rates.ms(
            step.cache_positions * self.kv_bytes_per_token as f64,
            attention_flops + expansion_flops,
        );
        let of_layer = expanded.map(Latents::activations);
        let activation_bytes =
            Operations::activation_bytes(facts, tiles, of_layer) * f64::from(step.tokens);
        products_ms + attention_ms + self.rates.ms(activation_bytes, 0.0)
    }

    /// Parts of a step whose routed experts are computed by CPUs. On a rank without such, the CPUs' part is 0.
    pub(crate) fn hybrid(&self, step: Step) -> HybridStep {
        let ExpertsAt::Host {
            rates,
            copy_gbps,
            cached_share,
            kept_share,
            dual_batch: _,
        } = self.experts_at
        else {
            return HybridStep {
                device_ms: self.step_ms(step),
                ends_ms: 0.0,
                beside_ms: 0.0,
                host_ms: 0.0,
                disk_ms: 0.0,
                exchange_ms: 0.0,
            };
        };
        // Workers use their cache in steps of few rows alone.
        let cached_share = match step.tokens <= CACHED_STEP_ROWS {
            true => cached_share,
            false => 0.0,
        };
        self.beside_host(
            step,
            OnHost {
                rates,
                copy_gbps,
                cached_share,
                kept_share,
            },
        )
    }

    fn beside_host(&self, step: Step, on_host: OnHost) -> HybridStep {
        let (facts, rates) = (self.facts, self.rates);
        let tokens = f64::from(step.tokens);
        let layers = f64::from(facts.routed_layers());
        let shared_bytes = facts.bytes.shared_expert as f64;
        let shared_ms = rates.ms(shared_bytes, facts.flops_of(shared_bytes) * tokens);
        let head_bytes = facts.bytes.head as f64;
        let head_flops = facts.head_flops() * f64::from(step.logit_rows);
        let split = match on_host.cached_share > 0.0 {
            true => SPLIT_OPERATIONS * layers,
            false => 0.0,
        };
        let operations = Operations::of(facts, self.mla_form).total(1.0) + split;
        let exchanged = tokens * f64::from(facts.hidden) * 4.0 * 2.0 * layers;
        let (host_ms, cached_ms) = self.experts_ms(step, on_host);
        HybridStep {
            device_ms: (self.dense_ms(step, 1.0) - shared_ms).max(0.0)
                + rates.overhead_ms(facts, operations),
            ends_ms: rates.ms(head_bytes, head_flops),
            beside_ms: shared_ms + cached_ms,
            host_ms,
            disk_ms: self.disk_layer_ms(step, on_host) * layers,
            exchange_ms: exchanged / 1e9 / on_host.copy_gbps * 1e3 + rates.exchange_ms * layers,
        }
    }

    /// Milliseconds of routed experts in all layers: on the CPUs, and on the device that caches some of them. Of a layer's
    /// misses as many are copied to the device as end it soonest, as workers do.
    fn experts_ms(&self, step: Step, on_host: OnHost) -> (f64, f64) {
        let (facts, host) = (self.facts, on_host.rates);
        let layers = f64::from(facts.routed_layers());
        let distinct = facts.expected_distinct_experts(step.tokens);
        let chosen = f64::from(step.tokens) * f64::from(facts.experts_per_token);
        let stored_bytes = facts.expert_bytes() as f64;
        let rows = chosen / distinct.max(1.0);
        let bytes = stored_bytes + rows * Operations::bytes_of_choice(facts);
        let flops = rows * facts.expert_flops();
        let on_host_ms = host.ms(bytes, flops) + host.operation_ms;
        let on_device_ms = self.rates.ms(bytes, flops) + self.rates.operation_ms;
        let copy_ms = stored_bytes / 1e9 / on_host.copy_gbps * 1e3;
        let soonest = |cached_share: f64| {
            let missed = distinct * (1.0 - cached_share);
            let misses_ms = |copies: f64| {
                let link_ms = copies * copy_ms + copies.min(1.0) * on_device_ms;
                link_ms.max((missed - copies) * on_host_ms)
            };
            let most = match on_host.cached_share > 0.0 {
                true => missed as u32,
                false => 0,
            };
            let all = (0..=most).map(|copies| (misses_ms(f64::from(copies)), copies));
            all.fold((f64::INFINITY, 0), |a, b| if b.0 < a.0 { b } else { a })
        };
        let (mut missed_ms, copies) = soonest(on_host.cached_share);
        let mut cached_share = on_host.cached_share;
        // Copies take the slots of experts that were used least, which are those of the layers that come next.
        if f64::from(copies) > cached_share * f64::from(facts.experts) {
            cached_share = 0.0;
            (missed_ms, _) = soonest(cached_share);
        }
        let cached_ms = distinct * cached_share * on_device_ms;
        let disk_ms = self.disk_layer_ms(step, on_host);
        if disk_ms > 0.0 {
            // The one that is read last is computed when all others are.
            missed_ms = missed_ms.max(disk_ms + on_host_ms);
        }
        (
            (missed_ms + host.overhead_of_layer_ms()) * layers,
            cached_ms * layers,
        )
    }

    /// Milliseconds that a layer's experts are read from the disk, as if tokens chose all equally often: those that they
    /// choose most stay in memory, so it may take less.
    fn disk_layer_ms(&self, step: Step, on_host: OnHost) -> f64 {
        let absent = self.facts.expected_distinct_experts(step.tokens) * (1.0 - on_host.kept_share);
        let bytes = absent * self.facts.expert_bytes() as f64;
        on_host.rates.disk_ms(bytes.max(0.0))
    }

    /// Milliseconds of a decode step in two half batches: while one is on the device, the other is on the CPUs (hybrid
    /// MoE paper, section 3.3.1). In each layer with experts the busier of the two is never idle, unless a half has to wait
    /// for its own experts; in layers without, before the first one with experts and behind the last there is nothing to
    /// overlap.
    pub(crate) fn halves_ms(&self, batch: u32, context: u32) -> f64 {
        let halves = [batch.div_ceil(2), batch / 2];
        let halves = halves.map(|half| self.hybrid(Step::of_streams(half, context)));
        let layers = f64::from(self.facts.routed_layers().max(1));
        let overlapped = layers / f64::from(self.facts.layers.max(1));
        let layers_ms = |half: HybridStep| half.device_ms - half.ends_ms;
        let on_device = |half: HybridStep| layers_ms(half) * overlapped + half.exchange_ms;
        let of_both = |ms: &dyn Fn(HybridStep) -> f64| halves.into_iter().map(ms).sum::<f64>();
        let devices_ms = of_both(&|half| on_device(half) + half.beside_ms);
        let hosts_ms = of_both(&|half| half.host_ms);
        let chain = |half: HybridStep| on_device(half) + half.host_ms.max(half.beside_ms);
        let chains = halves.into_iter().map(chain);
        let busier_ms = chains.fold(devices_ms.max(hosts_ms), f64::max);
        let [first, second] = halves;
        let fill_ms = match devices_ms < hosts_ms {
            true => on_device(first) / layers,
            false => second.host_ms / layers,
        };
        let alone_ms = of_both(&|half| layers_ms(half) * (1.0 - overlapped));
        let ends = self.hybrid(Step::of_streams(batch, context)).ends_ms;
        busier_ms + fill_ms + alone_ms + ends
    }
}
