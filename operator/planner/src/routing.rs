//! Routing policy of the gateway: which prompts decode ranks read themselves (hybrid MoE paper, section 3.3.2).

use hearth_crds::{PlanRank, PlanRole, PlanRouting};

use crate::draft::{Draft, ranks_of};

/// Prompt tokens below which, on CPUs, the KV transfer from prefill to decode costs more than it saves.
const CHUNKED_BELOW_TOKENS: u32 = 32;
/// Minimum bound of the gateway's queue, in requests.
const LEAST_QUEUE: u32 = 256;
/// Longest time that a request may wait in the queue.
const QUEUE_TIMEOUT_MS: u64 = 120_000;

impl Draft<'_> {
    pub(crate) fn routing(&self, ranks: &[PlanRank]) -> PlanRouting {
        let has_prefill = ranks_of(ranks, PlanRole::Prefill).next().is_some();
        let asked = self.input.spec.prefill.chunked_below_tokens;
        PlanRouting {
            chunked_below_tokens: match (has_prefill, asked) {
                (false, _) => PlanRouting::ALWAYS_CHUNKED,
                (true, Some(tokens)) => tokens,
                (true, None) => self.chunked_below_tokens(ranks),
            },
            together_after_quiet_ms: self.together_after_quiet_ms(),
            max_queue: self.least_queue(),
            queue_timeout_ms: QUEUE_TIMEOUT_MS,
            hold_timeout_ms: self
                .input
                .spec
                .hold_timeout()
                .map(|hold| u64::try_from(hold.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    /// What may wait for one worker. With more of them gateways let more wait: if the plan had a bound by their number, another
    /// number would replace the gateways.
    fn least_queue(&self) -> u32 {
        let by_slots = self
            .demand
            .max_batch
            .saturating_mul(PlanRouting::QUEUED_PER_SLOT);
        by_slots.max(LEAST_QUEUE)
    }

    /// Whether prefill ranks stream their experts.
    pub(crate) fn streams_prompts(&self) -> bool {
        let mut placed = self.placement.ranks.iter();
        placed.any(|ranks| ranks.prefill > 0 && ranks.devices.prefill.is_streaming())
    }

    fn chunked_below_tokens(&self, ranks: &[PlanRank]) -> u32 {
        let of = |role| ranks_of(ranks, role);
        let on_gpu = |role| of(role).any(PlanRank::is_on_gpu);
        if self.streams_prompts() {
            let prefill = &self.input.spec.prefill;
            let is_asked =
                prefill.mode.streams() || prefill.gpus_per_worker.is_some_and(|gpus| gpus > 0);
            return match self.crossover_tokens(ranks) {
                Some(tokens) => tokens,
                // Slower at every length, and still to be done.
                None if is_asked => CHUNKED_BELOW_TOKENS.min(self.demand.context_length),
                None => PlanRouting::ALWAYS_CHUNKED,
            };
        }
        if on_gpu(PlanRole::Prefill) && on_gpu(PlanRole::Decode) {
            // Takes one step, which streams hardly notice.
            let chunk = of(PlanRole::Decode).map(|rank| rank.chunk_tokens).min();
            return chunk.unwrap_or(CHUNKED_BELOW_TOKENS);
        }
        CHUNKED_BELOW_TOKENS
    }

    /// Milliseconds to the first token of a prompt of `tokens` through the slowest prefill rank; `None` without one.
    pub(crate) fn slowest_prefill_ms(&self, ranks: &[PlanRank], tokens: u32) -> Option<f64> {
        ranks_of(ranks, PlanRole::Prefill)
            .filter_map(|rank| self.prefill_ttft_ms(rank, tokens))
            .reduce(f64::max)
    }

    /// The shortest prompt, in tokens, whose first token comes sooner through the slowest prefill rank than through the
    /// fastest decode rank that reads it in chunks; `None` if that is so for no prompt within the context.
    pub(crate) fn crossover_tokens(&self, ranks: &[PlanRank]) -> Option<u32> {
        let is_sooner = |tokens: u32| {
            let streamed = self.slowest_prefill_ms(ranks, tokens);
            let chunked = ranks_of(ranks, PlanRole::Decode)
                .filter_map(|rank| self.chunked_ttft_ms(rank, tokens))
                .reduce(f64::min);
            matches!((streamed, chunked), (Some(streamed), Some(chunked)) if streamed < chunked)
        };
        let context = self.demand.context_length;
        let powers = (0..31).map(|n| 1_u32 << n);
        let mut lengths = powers.take_while(|n| *n < context).chain([context]);
        let mut above = lengths.find(|tokens| is_sooner(*tokens))?;
        let mut below = above / 2;
        // Sixteen tokens more or less make no difference.
        while above - below > 16 {
            let middle = below + (above - below) / 2;
            match is_sooner(middle) {
                true => above = middle,
                false => below = middle,
            }
        }
        Some(above)
    }
}
