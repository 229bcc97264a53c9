//! Choice of experts, a token a time; the reference is what runs on every instruction set.

use crate::{KernelError, RouterSpec, Routing, reference};

use super::memory::{CpuTensor, SharedMatrix};
use super::{CpuBackend, ensure};

/// Logits below which a piece is not worth a thread's attention.
const MIN_PIECE_LOGITS: usize = 1 << 12;

impl CpuBackend {
    pub(super) fn choose_experts(
        &self,
        logits: &CpuTensor,
        bias: Option<&[f32]>,
        spec: RouterSpec,
    ) -> Result<Routing, KernelError> {
        let (tokens, experts) = (logits.rows(), logits.cols());
        let RouterSpec {
            top_k,
            groups,
            top_groups,
            ..
        } = spec;
        let fits = groups > 0
            && experts > 0
            && experts.is_multiple_of(groups)
            && (1..=groups).contains(&top_groups)
            && (1..=top_groups * (experts / groups)).contains(&top_k);
        ensure(fits, "route", || {
            format!("{top_k} of {experts} experts in the best {top_groups} of {groups} groups")
        })?;
        if let Some(bias) = bias {
            ensure(bias.len() == experts, "route", || {
                format!("{} biases for {experts} experts", bias.len())
            })?;
        }
        let mut chosen = vec![(0, 0.0); tokens * top_k];
        let shared = SharedMatrix::new(&mut chosen, top_k);
        let split = self.split(tokens, experts, MIN_PIECE_LOGITS);
        self.pool.run(split.pieces(), |piece| {
            for token in split.range(piece.index) {
                // SAFETY: pieces have disjoint ranges of tokens.
                let out = unsafe { shared.part(token, 0..top_k) };
                out.copy_from_slice(&reference::route_token(logits.row(token), bias, &spec));
            }
        });
        Ok(Routing {
            top_k,
            experts: chosen.iter().map(|&(expert, _)| expert).collect(),
            weights: chosen.iter().map(|&(_, weight)| weight).collect(),
        })
    }
}
