//! Choice of tokens by a modelled device, whose logits are all the same. In exact mode the host chooses, as for the CPU.

use hearth_kernels::ops::SampleOps;
use hearth_kernels::{KernelError, SampleFault, SampleSpec, checks};

use crate::device::{Computer, fault};
use crate::lanes::{Lane, VirtualMark};
use crate::work::Work;
use crate::{VirtualBackend, VirtualTensor, VirtualWeight};

/// Bytes of a row's token and its fault.
const RESULT_BYTES: usize = 8;

/// Tokens that a modelled device chooses.
pub struct VirtualTokens {
    chosen: Vec<Result<u32, SampleFault>>,
    /// When they are on the host.
    there: VirtualMark,
}

impl SampleOps for VirtualBackend {
    type Tokens = VirtualTokens;

    fn can_sample(&self, _vocab: usize) -> bool {
        matches!(self.computer, Computer::Modelled(_))
    }

    fn sample(
        &self,
        logits: &VirtualTensor,
        rows: &[SampleSpec],
    ) -> Result<VirtualTokens, KernelError> {
        let (_, vocab) = logits.shape;
        checks::sample(logits.shape, rows.len())?;
        let work = Work::new("sample", rows.len().saturating_mul(vocab))
            .over_link(rows.len().saturating_mul(RESULT_BYTES));
        self.run(&work, |_| {
            Err::<(), _>(fault("tokens are chosen on the host"))
        })?;
        Ok(VirtualTokens {
            chosen: rows.iter().map(|spec| among_equals(spec, vocab)).collect(),
            there: self.lanes.mark(Lane::Compute),
        })
    }

    fn landed(&self, tokens: &VirtualTokens) -> Result<Vec<Result<u32, SampleFault>>, KernelError> {
        self.lanes.wait_for_result(&tokens.there);
        Ok(tokens.chosen.clone())
    }

    fn embed_chosen(
        &self,
        table: &VirtualWeight,
        tokens: &VirtualTokens,
        picked: &[u32],
    ) -> Result<VirtualTensor, KernelError> {
        checks::rows(picked, tokens.chosen.len())?;
        let shape = (picked.len(), table.cols);
        let work = Work::new("embed", shape.0 * shape.1).rows_of(table, picked.len());
        self.output(&work, shape, |_| {
            Err(fault("tokens are chosen on the host"))
        })
    }
}

/// The token of a row of equal logits: the first that may follow, or, where it is drawn, the one at the quantile of them.
fn among_equals(spec: &SampleSpec, vocab: usize) -> Result<u32, SampleFault> {
    let at = |count: usize| match spec.temperature {
        0.0 => 0,
        _ => ((u128::from(spec.quantile) * count as u128) >> 64) as usize,
    };
    let Some(words) = &spec.allowed else {
        return Ok(at(vocab) as u32);
    };
    let may_follow = |token: &u32| {
        let word = words.get(*token as usize / 32).copied().unwrap_or(0);
        word >> (token % 32) & 1 == 1
    };
    let all = || (0..vocab as u32).filter(may_follow);
    let token = all().nth(at(all().count()));
    token.ok_or(SampleFault::NothingAllowed)
}
