//! The sum of experts' outputs that were computed apart.

use crate::expert_sum::{LEAVES, leaf_of};
use crate::{ExpertProducts, KernelError, checks};

use super::CpuBackend;
use super::memory::CpuTensor;

impl CpuBackend {
    /// Adds products in the order of [`expert_sum`](crate::expert_sum).
    pub(super) fn sum_of_products(
        &self,
        products: &CpuTensor,
        of: ExpertProducts<'_>,
    ) -> Result<CpuTensor, KernelError> {
        let tokens = checks::product_sum(products.rows(), &of)?;
        let (top_k, hidden) = (of.routing.top_k, products.cols());
        let mut out = self.tensor(tokens, hidden);
        self.for_each_row(&mut out, |token, out| {
            let choices = token * top_k..(token + 1) * top_k;
            let mut leaves = vec![0.0; LEAVES * hidden];
            for (expert, row) in of.routing.experts[choices.clone()]
                .iter()
                .zip(&of.rows[choices])
            {
                let leaf = leaf_of(*expert as usize, of.experts);
                let leaf = &mut leaves[leaf * hidden..][..hidden];
                for (sum, product) in leaf.iter_mut().zip(products.row(*row as usize)) {
                    *sum += product;
                }
            }
            let leaf = |index: usize, column: usize| leaves[index * hidden + column];
            for (column, out) in out.iter_mut().enumerate() {
                let pair = |first: usize| leaf(first, column) + leaf(first + 1, column);
                *out = (pair(0) + pair(2)) + (pair(4) + pair(6));
            }
        });
        Ok(out)
    }
}
