//! Choice of experts, and their feed-forward blocks.

use std::convert::Infallible;

use hearth_kernels::expert_sum::{ExpertOrder, PARTIAL_SUMS};
use hearth_kernels::ops::{ExpertOps, RouterOps};
use hearth_kernels::{
    CpuExpertSum, ExpertCall, ExpertProducts, ExpertWeights, HostMatrix, KernelError, RouterSpec,
    Routing, checks,
};

use crate::device::Computer;
use crate::memory::Held;
use crate::tensor::{WeightId, no_values};
use crate::work::Work;
use crate::{VirtualBackend, VirtualTensor, VirtualVector, VirtualWeight};

/// Sum of the outputs of a layer's experts.
pub struct VirtualExpertSum {
    /// `None` in modelled mode.
    sum: Option<CpuExpertSum>,
    order: ExpertOrder,
    shape: (usize, usize),
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
        let (tokens, experts) = logits.shape;
        checks::route(experts, bias.map(|bias| bias.len()), &spec)?;
        let work = Work::new("route", logits.elements());
        let chosen = self.run(&work, |cpu| cpu.route(logits.values()?, bias, spec))?;
        match (chosen, &self.computer) {
            (Some(chosen), _) => Ok(chosen),
            (None, Computer::Modelled(modelled)) => {
                let layer = logits.product_of.map_or(0, |WeightId(id)| id);
                let shape = (tokens, experts);
                Ok(self.routings.choose(modelled, layer, shape, spec.top_k))
            }
            (None, Computer::Exact { .. }) => Err(no_values()),
        }
    }

    /// Waits until the router has chosen.
    fn routing(&self, chosen: Routing) -> Result<Routing, KernelError> {
        let work = Work::new("routing", 0).over_link(chosen.experts.len() * 8);
        self.run(&work, |_| Ok(()))?;
        self.lanes.wait_for_compute();
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
        let sum = match &self.computer {
            Computer::Exact { cpu, .. } => Some(cpu.expert_sum(tokens, hidden, experts)?),
            Computer::Modelled(_) => None,
        };
        Ok(VirtualExpertSum {
            sum,
            order: ExpertOrder::new(experts),
            shape: (tokens, hidden),
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
        for call in calls {
            let matrices = [call.gate, call.up, call.down].map(VirtualWeight::shape);
            checks::expert(sum.shape, x.shape, matrices)?;
            checks::expert_rows(call.rows, call.weights.len(), x.shape.0)?;
        }
        sum.order.take(calls, is_last)?;
        // One expert after the other, so that what they need at most does not depend on how many come at once.
        for (index, call) in calls.iter().enumerate() {
            let is_last = is_last && index + 1 == calls.len();
            self.expert(sum, x, call, is_last)?;
        }
        if is_last && calls.is_empty() {
            let work = Work::new("experts", 2 * x.elements());
            let inner = &mut sum.sum;
            self.run(&work, |cpu| {
                let sum = inner.as_mut().ok_or_else(no_values)?;
                cpu.experts(sum, x.values()?, &[], true)
            })?;
        }
        Ok(())
    }

    fn expert_total(&self, sum: VirtualExpertSum) -> Result<VirtualTensor, KernelError> {
        checks::ensure(sum.order.is_complete(), "experts", || {
            "the total of a sum without its last calls".to_owned()
        })?;
        let inner = sum.sum;
        let work = Work::new("expert_total", 2 * sum.shape.0 * sum.shape.1);
        let values = self.run(&work, |cpu| cpu.expert_total(inner.ok_or_else(no_values)?))?;
        Ok(VirtualTensor {
            shape: sum.shape,
            values,
            product_of: None,
            _held: sum.total,
        })
    }

    fn product_sum(
        &self,
        products: &VirtualTensor,
        of: ExpertProducts<'_>,
    ) -> Result<VirtualTensor, KernelError> {
        let shape = (
            checks::product_sum(products.shape.0, &of)?,
            products.shape.1,
        );
        let work = Work::new("product_sum", products.elements() + shape.0 * shape.1);
        self.output(&work, shape, |cpu| cpu.product_sum(products.values()?, of))
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

impl VirtualBackend {
    /// Adds the output of one expert: an operation.
    fn expert(
        &self,
        sum: &mut VirtualExpertSum,
        x: &VirtualTensor,
        call: &ExpertCall<'_, VirtualWeight>,
        is_last: bool,
    ) -> Result<(), KernelError> {
        let rows = call.rows.len();
        let inner_bytes = rows * call.gate.rows * 4;
        let _inner = self.memory.take(inner_bytes, "experts' activations")?;
        // The input is read, and the sum is read and written.
        let work = Work::new("expert", 3 * rows * sum.shape.1)
            .bytes(2 * inner_bytes)
            .indexed(call.expert)
            .product(rows, call.gate)
            .product(rows, call.up)
            .product(rows, call.down);
        let inner = &mut sum.sum;
        self.run(&work, |cpu| {
            let [gate, up, down] = &[call.gate.matrix()?, call.up.matrix()?, call.down.matrix()?];
            let on_host: ExpertCall<'_, HostMatrix> = ExpertCall {
                expert: call.expert,
                gate,
                up,
                down,
                rows: call.rows,
                weights: call.weights,
            };
            let sum = inner.as_mut().ok_or_else(no_values)?;
            cpu.experts(sum, x.values()?, &[on_host], is_last)
        })?;
        Ok(())
    }
}
