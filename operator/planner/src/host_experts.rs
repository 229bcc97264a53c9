//! Choices of a decode rank whose routed experts are computed by CPUs: a cache of experts on its GPU, and two half batches
//! that take turns (hybrid MoE paper, section 3.3.1).

use hearth_crds::DualBatch;

use crate::predict::{ExpertsAt, Predictor, Step};

/// Share of a step that a choice must save: less than that is within the error of a prediction.
const LEAST_GAIN: f64 = 0.02;

/// Room and wishes that the choices are made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostExperts {
    /// Experts that a cache in the GPU's memory left could hold.
    pub room_slots: u32,
    /// Routed experts of all layers.
    pub all_experts: u64,
    /// `spec.decode.dualBatch`.
    pub dual_batch: DualBatch,
    /// The largest batch.
    pub max_batch: u32,
    /// Context length in tokens at which steps are predicted.
    pub context_tokens: u32,
}

/// What was chosen, and the predictions that it was chosen by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HostChoice {
    /// Experts that are kept on the GPU; 0 if a cache does not pay.
    pub cache_slots: u32,
    pub dual_batch: bool,
    /// Milliseconds of a step of one stream without a cache of experts.
    pub uncached_ms: f64,
    /// The same with the largest cache there is room for.
    pub cached_ms: f64,
    /// Milliseconds of a step of the largest batch as one.
    pub whole_ms: f64,
    /// The same in two halves; infinite for a batch of one.
    pub halves_ms: f64,
}

impl HostExperts {
    /// Chooses for a rank; `plain` predicts it with neither.
    pub(crate) fn choose(&self, plain: &Predictor<'_>) -> HostChoice {
        let cached_share = f64::from(self.room_slots) / self.all_experts.max(1) as f64;
        let cached = with(plain, cached_share.min(1.0), false);
        let context = self.context_tokens;
        let uncached_ms = plain.decode_ms(1, context);
        let cached_ms = cached.decode_ms(1, context);
        let pays = cached_ms <= uncached_ms * (1.0 - LEAST_GAIN);
        let chosen = if pays { &cached } else { plain };
        let whole = chosen.hybrid(Step::of_streams(self.max_batch, context));
        let whole_ms = whole.total_ms();
        let halves_ms = match self.max_batch {
            0 | 1 => f64::INFINITY,
            batch => chosen.halves_ms(batch, context),
        };
        HostChoice {
            cache_slots: if pays { self.room_slots } else { 0 },
            dual_batch: match self.dual_batch {
                DualBatch::On => true,
                DualBatch::Off => false,
                DualBatch::Auto => halves_ms <= whole_ms * (1.0 - LEAST_GAIN),
            },
            uncached_ms,
            cached_ms,
            whole_ms,
            halves_ms,
        }
    }

    /// The rank as chosen.
    pub(crate) fn chosen<'a>(&self, plain: &Predictor<'a>) -> Predictor<'a> {
        let choice = self.choose(plain);
        let share = f64::from(choice.cache_slots) / self.all_experts.max(1) as f64;
        with(plain, share, choice.dual_batch)
    }
}

fn with<'a>(plain: &Predictor<'a>, cached_share: f64, dual_batch: bool) -> Predictor<'a> {
    let experts_at = match plain.experts_at {
        ExpertsAt::Host {
            rates,
            copy_gbps,
            kept_share,
            ..
        } => ExpertsAt::Host {
            rates,
            copy_gbps,
            cached_share,
            kept_share,
            dual_batch,
        },
        elsewhere => elsewhere,
    };
    Predictor {
        experts_at,
        ..*plain
    }
}
