//! Choice of experts, and their feed-forward blocks.

use std::convert::Infallible;

use hearth_kernels::expert_sum::PARTIAL_SUMS;
use hearth_kernels::ops::{ExpertOps, MemoryOps, RouterOps};
use hearth_kernels::{
    CpuExpertSum, ExpertCall, ExpertProducts, ExpertWeights, HostMatrix, KernelError, RouterSpec,
    Routing, checks,
};

use crate::memory::Held;
use crate::{VirtualBackend, VirtualTensor, VirtualVector, VirtualWeight};

/// Sum of the outputs of a layer's experts.
pub struct VirtualExpertSum {
    sum: CpuExpertSum,
    /// Memory of the total.
    total: Held,
    /// Memory of the other partial sums, once there may be some.
    partial: Option<Held>,
    matrix_bytes: usize,
    is_begun: bool,
}

impl RouterOps for VirtualBackend {
    type Chosen = Routing;

    fn route(
        &self,
        logits: &VirtualTensor,
        bias: Option<&VirtualVector>,
        spec: RouterSpec,
    ) -> Result<Routing, KernelError> {
        let bias = bias.map(|bias| &bias.values);
        self.cpu.route(&logits.values, bias, spec)
    }

    fn routing(&self, chosen: Routing) -> Result<Routing, KernelError> {
        Ok(chosen)
    }
}

impl ExpertOps for VirtualBackend {
    type ExpertBank = Infallible;
    type ExpertSum = VirtualExpertSum;

    fn expert_sum(
        &self,
        tokens: usize,
        hidden: usize,
        experts: usize,
    ) -> Result<VirtualExpertSum, KernelError> {
        let matrix_bytes = tokens.saturating_mul(hidden).saturating_mul(4);
        Ok(VirtualExpertSum {
            sum: self.cpu.expert_sum(tokens, hidden, experts)?,
            total: self.memory.take(matrix_bytes, "activations")?,
            partial: None,
            matrix_bytes,
            is_begun: false,
        })
    }

    fn experts(
        &self,
        sum: &mut VirtualExpertSum,
        x: &VirtualTensor,
        calls: &[ExpertCall<'_, VirtualWeight>],
        is_last: bool,
    ) -> Result<(), KernelError> {
        let is_one = !sum.is_begun && calls.len() <= 1 && is_last;
        sum.is_begun = true;
        if sum.partial.is_none() && !is_one {
            let bytes = (PARTIAL_SUMS - 1).saturating_mul(sum.matrix_bytes);
            sum.partial = Some(self.memory.take(bytes, "partial sums of experts")?);
        }
        // One expert after the other, so that what they need at most does not depend on how many come at once.
        for (index, call) in calls.iter().enumerate() {
            let on_host = on_host(call)?;
            let inner_bytes = call.rows.len() * on_host.gate.rows() * 4;
            let _inner = self.memory.take(inner_bytes, "experts' activations")?;
            let is_last = is_last && index + 1 == calls.len();
            self.cpu
                .experts(&mut sum.sum, &x.values, &[on_host], is_last)?;
            // The slot was not given away meanwhile.
            call.down.matrix()?;
        }
        match is_last && calls.is_empty() {
            true => self.cpu.experts(&mut sum.sum, &x.values, &[], true),
            false => Ok(()),
        }
    }

    fn expert_total(&self, sum: VirtualExpertSum) -> Result<VirtualTensor, KernelError> {
        Ok(VirtualTensor {
            values: self.cpu.expert_total(sum.sum)?,
            _held: sum.total,
        })
    }

    fn product_sum(
        &self,
        products: &VirtualTensor,
        of: ExpertProducts<'_>,
    ) -> Result<VirtualTensor, KernelError> {
        let tokens = checks::product_sum(self.shape(products).0, &of)?;
        self.output((tokens, self.shape(products).1), |cpu| {
            cpu.product_sum(&products.values, of)
        })
    }

    /// Returns `None`: the host chooses, and runs what it chose.
    fn expert_bank(
        &self,
        _experts: &[ExpertWeights<'_, VirtualWeight>],
    ) -> Result<Option<Infallible>, KernelError> {
        Ok(None)
    }

    fn banked_experts(
        &self,
        _x: &VirtualTensor,
        _chosen: &Routing,
        bank: &Infallible,
    ) -> Result<VirtualTensor, KernelError> {
        match *bank {}
    }
}

fn on_host<'a>(
    call: &ExpertCall<'a, VirtualWeight>,
) -> Result<ExpertCall<'a, HostMatrix>, KernelError> {
    Ok(ExpertCall {
        expert: call.expert,
        gate: call.gate.matrix()?,
        up: call.up.matrix()?,
        down: call.down.matrix()?,
        rows: call.rows,
        weights: call.weights,
    })
}
