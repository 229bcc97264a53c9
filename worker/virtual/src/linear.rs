//! Products of activations with weights.

use hearth_kernels::ops::LinearOps;
use hearth_kernels::{KernelError, MlaHeads, checks};

use crate::work::{MOST_WEIGHTS, Work};
use crate::{VirtualBackend, VirtualTensor, VirtualVector, VirtualWeight};

impl LinearOps for VirtualBackend {
    fn linear(
        &self,
        x: &VirtualTensor,
        w: &VirtualWeight,
        bias: Option<&VirtualVector>,
    ) -> Result<VirtualTensor, KernelError> {
        let bias = bias.map(|bias| &bias.values);
        checks::linear(x.shape, w.shape(), bias.map(|bias| bias.len()))?;
        let shape = (x.shape.0, w.rows);
        let touched = x.elements() + shape.0 * shape.1;
        let work = Work::new("linear", touched).product(x.shape.0, w);
        let product = self.output(&work, shape, |cpu| {
            cpu.linear(x.values()?, &w.matrix()?, bias)
        })?;
        Ok(VirtualTensor {
            product_of: w.id(),
            ..product
        })
    }

    fn linears(
        &self,
        x: &VirtualTensor,
        products: &[(&VirtualWeight, Option<&VirtualVector>)],
    ) -> Result<Vec<VirtualTensor>, KernelError> {
        if products.len() > MOST_WEIGHTS {
            let product = |(w, bias): &(&VirtualWeight, _)| self.linear(x, w, *bias);
            return products.iter().map(product).collect();
        }
        let mut work = Work::new("linears", x.elements());
        let mut held = Vec::with_capacity(products.len());
        for (w, bias) in products {
            checks::linear(x.shape, w.shape(), bias.map(|bias| bias.values.len()))?;
            let bytes = x.shape.0.saturating_mul(w.rows).saturating_mul(4);
            work = work.bytes(bytes).product(x.shape.0, w);
            held.push(self.memory.take(bytes, "activations")?);
        }
        let computed = self.run(&work, |cpu| {
            let product = |(w, bias): &(&VirtualWeight, Option<&VirtualVector>)| {
                cpu.linear(x.values()?, &w.matrix()?, bias.map(|bias| &bias.values))
            };
            products.iter().map(product).collect::<Result<Vec<_>, _>>()
        })?;
        let mut computed = computed.into_iter().flatten();
        let result = |((w, _), held): (&(&VirtualWeight, _), _)| VirtualTensor {
            shape: (x.shape.0, w.rows),
            values: computed.next(),
            product_of: w.id(),
            _held: held,
        };
        Ok(products.iter().zip(held).map(result).collect())
    }

    fn mla_absorb(
        &self,
        q_nope: &VirtualTensor,
        kv_b: &VirtualWeight,
        heads: MlaHeads,
    ) -> Result<VirtualTensor, KernelError> {
        checks::mla("mla_absorb", q_nope.shape, heads.nope, kv_b.shape(), heads)?;
        let shape = (q_nope.shape.0, heads.heads * heads.rank);
        let work = mla("mla_absorb", q_nope, kv_b, heads.nope, heads);
        self.output(&work, shape, |cpu| {
            cpu.mla_absorb(q_nope.values()?, &kv_b.matrix()?, heads)
        })
    }

    fn mla_expand(
        &self,
        latent: &VirtualTensor,
        kv_b: &VirtualWeight,
        heads: MlaHeads,
    ) -> Result<VirtualTensor, KernelError> {
        checks::mla("mla_expand", latent.shape, heads.rank, kv_b.shape(), heads)?;
        let shape = (latent.shape.0, heads.heads * heads.v);
        let work = mla("mla_expand", latent, kv_b, heads.v, heads);
        self.output(&work, shape, |cpu| {
            cpu.mla_expand(latent.values()?, &kv_b.matrix()?, heads)
        })
    }
}

/// Products with `width` of the rows of each head of `kv_b`.
fn mla<'a>(
    name: &'static str,
    x: &VirtualTensor,
    kv_b: &'a VirtualWeight,
    width: usize,
    heads: MlaHeads,
) -> Work<'a> {
    let rows = x.shape.0;
    let touched = rows * heads.heads * (heads.rank + width);
    let flops = 2.0 * rows as f64 * (heads.heads * heads.rank * width) as f64;
    Work::new(name, touched)
        .rows_of(kv_b, heads.heads * width)
        .flops(flops)
}
