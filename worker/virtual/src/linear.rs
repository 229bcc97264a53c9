//! Products of activations with weights.

use hearth_kernels::ops::{LinearOps, MemoryOps};
use hearth_kernels::{KernelError, MlaHeads};

use crate::{VirtualBackend, VirtualTensor, VirtualVector, VirtualWeight};

impl LinearOps for VirtualBackend {
    fn linear(
        &self,
        x: &VirtualTensor,
        w: &VirtualWeight,
        bias: Option<&VirtualVector>,
    ) -> Result<VirtualTensor, KernelError> {
        let shape = (self.shape(x).0, w.matrix.rows());
        let bias = bias.map(|bias| &bias.values);
        let y = self.output(shape, |cpu| cpu.linear(&x.values, w.matrix()?, bias))?;
        w.matrix()?;
        Ok(y)
    }

    fn mla_absorb(
        &self,
        q_nope: &VirtualTensor,
        kv_b: &VirtualWeight,
        heads: MlaHeads,
    ) -> Result<VirtualTensor, KernelError> {
        let shape = (self.shape(q_nope).0, heads.heads * heads.rank);
        self.output(shape, |cpu| {
            cpu.mla_absorb(&q_nope.values, kv_b.matrix()?, heads)
        })
    }

    fn mla_expand(
        &self,
        latent: &VirtualTensor,
        kv_b: &VirtualWeight,
        heads: MlaHeads,
    ) -> Result<VirtualTensor, KernelError> {
        let shape = (self.shape(latent).0, heads.heads * heads.v);
        self.output(shape, |cpu| {
            cpu.mla_expand(&latent.values, kv_b.matrix()?, heads)
        })
    }
}
