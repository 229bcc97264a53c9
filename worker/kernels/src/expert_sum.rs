//! Order in which the outputs of a layer's routed experts are added: a fixed tree, so that a token's sum has the same bits
//! on one device, split over calls, and split over ranks.
//!
//! Leaf `i` of [`LEAVES`] holds the experts `⌊i·E/8⌋` to `⌊(i+1)·E/8⌋ − 1` of `E`. Its sum starts from zero and takes
//! `weight · output` of a token's experts in ascending order, each product rounded before it is added (no FMA). Leaves are
//! then added pairwise: `((0+1)+(2+3)) + ((4+5)+(6+7))`. A leaf without experts of a token is zero; no partial sum is ever
//! `-0`, so leaving such a leaf out gives the same bits as adding it.
//!
//! A sum that is taken in order needs at most [`PARTIAL_SUMS`] matrices at once: while leaf `i` is taken, one for each bit
//! of `i` that is set, and its own.

use crate::{ExpertCall, KernelError, checks};

/// Leaves of the tree.
pub const LEAVES: usize = 8;

/// Largest number of partial sums that wait at once, the open leaf's included.
pub const PARTIAL_SUMS: usize = LEAVES.ilog2() as usize + 1;

/// Leaf of one of `experts` experts.
pub const fn leaf_of(expert: usize, experts: usize) -> usize {
    (LEAVES * (expert + 1) - 1) / experts
}

/// Progress of a sum: which experts may still be added.
#[derive(Clone, Debug)]
pub struct ExpertOrder {
    experts: usize,
    /// Index after the last expert that was added.
    next: usize,
    is_complete: bool,
}

impl ExpertOrder {
    /// Creates the order of a layer with `experts` experts, of which none was added.
    pub fn new(experts: usize) -> Self {
        Self {
            experts,
            next: 0,
            is_complete: false,
        }
    }

    /// Number of experts of the layer.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Whether the last call was added, so that the sum is the total.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Takes the next calls; `is_last`: no more will come.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the experts do not ascend, within these calls and since earlier ones, or if the layer
    /// has no such expert.
    pub fn take<W>(
        &mut self,
        calls: &[ExpertCall<'_, W>],
        is_last: bool,
    ) -> Result<(), KernelError> {
        checks::ensure(!self.is_complete, "experts", || {
            "calls after the last of a sum".to_owned()
        })?;
        let mut next = self.next;
        for call in calls {
            let expert = call.expert as usize;
            checks::ensure((next..self.experts).contains(&expert), "experts", || {
                format!(
                    "expert {expert} of {} where {next} or a later one is next",
                    self.experts
                )
            })?;
            next = expert + 1;
        }
        self.next = next;
        self.is_complete = is_last;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_hold_the_experts_between_their_borders() {
        for experts in (1..20).chain([60, 64, 128, 160, 256, 257, 384]) {
            for leaf in 0..LEAVES {
                let border = |leaf: usize| leaf * experts / LEAVES;
                for expert in border(leaf)..border(leaf + 1) {
                    assert_eq!(leaf_of(expert, experts), leaf, "{expert} of {experts}");
                }
            }
            assert_eq!(leaf_of(experts - 1, experts), LEAVES - 1);
        }
    }

    #[test]
    fn experts_ascend_over_all_calls_of_a_sum() {
        let call = |expert| ExpertCall {
            expert,
            gate: &(),
            up: &(),
            down: &(),
            rows: &[],
            weights: &[],
        };
        let mut order = ExpertOrder::new(6);
        assert!(order.take(&[call(0), call(2)], false).is_ok() && !order.is_complete());
        for bad in [&[call(2)][..], &[call(4), call(3)], &[call(6)]] {
            assert!(order.take(bad, false).is_err());
        }
        assert!(order.take(&[call(3)], true).is_ok() && order.is_complete());
        assert!(order.take(&[call(4)], true).is_err());
    }
}
