//! Choice of experts, one token at a time; every instruction set runs the reference.

use std::sync::Arc;

use crate::ops::RouterOps;
use crate::{KernelError, RouterSpec, Routing, checks, reference};

use super::CpuBackend;
use super::memory::{CpuTensor, SharedMatrix};

/// Minimum number of logits that makes a piece worth a thread.
const MIN_PIECE_LOGITS: usize = 1 << 12;

impl RouterOps for CpuBackend {
    type Chosen = Routing;

    fn route(
        &self,
        logits: &CpuTensor,
        bias: Option<&Arc<[f32]>>,
        spec: RouterSpec,
    ) -> Result<Routing, KernelError> {
        let bias = bias.map(|b| &**b);
        let (tokens, experts) = (logits.rows(), logits.cols());
        checks::route(experts, bias.map(<[f32]>::len), &spec)?;
        let top_k = spec.top_k;
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

    fn routing(&self, chosen: Routing) -> Result<Routing, KernelError> {
        Ok(chosen)
    }
}
