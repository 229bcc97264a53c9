//! Choice of experts.

use hearth_kernels::ops::RouterOps;
use hearth_kernels::{KernelError, RouterScore, RouterSpec, Routing, checks};

use super::{CudaBackend, CudaChosen, CudaTensor, CudaVector, Kernel};
use crate::compile::Variant;
use crate::queue::Args;

/// Limits of route.cu.
const MOST_EXPERTS: usize = 512;
const MOST_CHOICES: usize = 32;
const MOST_GROUPS: usize = 32;

impl RouterOps for CudaBackend {
    type Chosen = CudaChosen;

    fn route(
        &self,
        logits: &CudaTensor,
        bias: Option<&CudaVector>,
        spec: RouterSpec,
    ) -> Result<CudaChosen, KernelError> {
        let (tokens, experts) = logits.shape();
        checks::route(experts, bias.map(|b| b.len), &spec)?;
        let fits =
            experts <= MOST_EXPERTS && spec.top_k <= MOST_CHOICES && spec.groups <= MOST_GROUPS;
        checks::ensure(fits, "route", || {
            format!(
                "{} of {experts} experts in {} groups: the GPU's router takes {MOST_CHOICES} of {MOST_EXPERTS} in {MOST_GROUPS}",
                spec.top_k, spec.groups
            )
        })?;
        let slots = tokens * spec.top_k;
        let chosen = CudaChosen {
            experts: self.buffer(slots * 4, "choices of experts")?,
            weights: self.buffer(slots * 4, "weights of experts")?,
            tokens,
            spec,
        };
        let args = Args::new()
            .with(logits.address())
            .with(bias.map_or(0, |b| b.data.address()))
            .with(chosen.experts.address())
            .with(chosen.weights.address())
            .with(tokens as i32)
            .with(experts as i32)
            .with(spec.top_k as i32)
            .with(spec.groups as i32)
            .with(spec.top_groups as i32)
            .with(i32::from(spec.score == RouterScore::Sigmoid))
            .with(i32::from(spec.normalize))
            .with(spec.scaling);
        let variant = Variant::plain("route");
        let kernel = Kernel::new(&variant, "route").threads(128);
        self.launch(kernel, [tokens.div_ceil(4), 1, 1], args)?;
        Ok(chosen)
    }

    fn routing(&self, chosen: CudaChosen) -> Result<Routing, KernelError> {
        let slots = chosen.tokens * chosen.spec.top_k;
        let words = |bytes: &[u8]| -> Vec<[u8; 4]> { bytes.as_chunks().0.to_vec() };
        let experts = self
            .queue
            .download(chosen.experts.address(), slots * 4, words)?;
        let weights = self
            .queue
            .download(chosen.weights.address(), slots * 4, words)?;
        Ok(Routing {
            top_k: chosen.spec.top_k,
            experts: experts.into_iter().map(u32::from_ne_bytes).collect(),
            weights: weights.into_iter().map(f32::from_ne_bytes).collect(),
        })
    }
}
