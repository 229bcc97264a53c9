//! Experts on the device that runs the rest of the model: from a bank, if all of a layer stay there; else as many of the
//! chosen ones at a time as the policy can hold.

use std::sync::Arc;

use hearth_kernels::{Backend, ExpertCall, Routing};

use super::{Experts, PendingExperts, RoutedLayer};
use crate::{ModelError, ModuleId, Residency};

/// Experts on the model's own device.
pub(crate) struct LocalExperts<B: Backend> {
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
}

impl<B: Backend> LocalExperts<B> {
    pub(crate) fn new(backend: Arc<B>, residency: Arc<dyn Residency<B>>) -> Self {
        Self { backend, residency }
    }
}

impl<B: Backend> Experts<B> for LocalExperts<B> {
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
    ) -> Result<Box<dyn PendingExperts<B>>, ModelError> {
        let choices = self.backend.shape(x).0 * layer.top_k;
        if let Some(bank) = self.residency.expert_bank(layer.layer, choices) {
            let out = self.backend.banked_experts(x, &chosen, &bank)?;
            return Ok(Box::new(Banked::<B>(out)));
        }
        let chosen = by_expert(&self.backend.routing(chosen)?, layer.experts);
        let id = |chosen: &ChosenExpert| ModuleId::Expert(layer.layer, chosen.expert);
        let ids: Vec<ModuleId> = chosen.iter().map(id).collect();
        self.residency.announce(&ids);
        Ok(Box::new(Announced {
            backend: Arc::clone(&self.backend),
            residency: Arc::clone(&self.residency),
            experts: layer.experts,
            ids,
            chosen,
        }))
    }
}

/// Output of a bank.
struct Banked<B: Backend>(B::Tensor);

impl<B: Backend> PendingExperts<B> for Banked<B> {
    fn finish(
        self: Box<Self>,
        _x: &B::Tensor,
        _check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        Ok(self.0)
    }
}

/// Experts that the policy is loading.
struct Announced<B: Backend> {
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
    experts: usize,
    ids: Vec<ModuleId>,
    chosen: Vec<ChosenExpert>,
}

impl<B: Backend> PendingExperts<B> for Announced<B> {
    fn finish(
        self: Box<Self>,
        x: &B::Tensor,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let (rows, hidden) = self.backend.shape(x);
        let mut sum = self.backend.expert_sum(rows, hidden, self.experts)?;
        let mut rest = &self.ids[..];
        while !rest.is_empty() {
            check()?;
            let count = self.residency.group(rest).clamp(1, rest.len());
            let first = self.ids.len() - rest.len();
            rest = &rest[count..];
            self.run(&mut sum, x, first..first + count, rest.is_empty())?;
        }
        Ok(self.backend.expert_total(sum)?)
    }
}

impl<B: Backend> Announced<B> {
    /// Runs some of the chosen experts while holding all of their guards.
    fn run(
        &self,
        sum: &mut B::ExpertSum,
        x: &B::Tensor,
        group: std::ops::Range<usize>,
        is_last: bool,
    ) -> Result<(), ModelError> {
        let guards = self.ids[group.clone()]
            .iter()
            .map(|id| self.residency.acquire(*id))
            .collect::<Result<Vec<_>, _>>()?;
        let calls = guards
            .iter()
            .zip(&self.chosen[group])
            .map(|(weights, chosen)| {
                Ok(ExpertCall {
                    expert: chosen.expert,
                    gate: weights.matrix("gate")?,
                    up: weights.matrix("up")?,
                    down: weights.matrix("down")?,
                    rows: &chosen.rows,
                    weights: &chosen.weights,
                })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        Ok(self.backend.experts(sum, x, &calls, is_last)?)
    }
}

/// An expert chosen by at least one token.
#[derive(Debug, PartialEq)]
struct ChosenExpert {
    expert: u32,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

/// Inverts the routing, from experts by token to tokens by expert; experts and rows are in ascending order.
fn by_expert(routing: &Routing, experts: usize) -> Vec<ChosenExpert> {
    let mut all: Vec<ChosenExpert> = (0..experts as u32)
        .map(|expert| ChosenExpert {
            expert,
            rows: Vec::new(),
            weights: Vec::new(),
        })
        .collect();
    for (i, (expert, weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
        let chosen = &mut all[*expert as usize];
        chosen.rows.push((i / routing.top_k) as u32);
        chosen.weights.push(*weight);
    }
    all.retain(|chosen| !chosen.rows.is_empty());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_and_rows_ascend_and_weights_follow() {
        let routing = Routing {
            top_k: 2,
            experts: vec![1, 3, 0, 3, 1, 3],
            weights: vec![0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        };
        let chosen = |expert, rows: &[u32], weights: &[f32]| ChosenExpert {
            expert,
            rows: rows.into(),
            weights: weights.into(),
        };
        let want = vec![
            chosen(0, &[1], &[0.3]),
            chosen(1, &[0, 2], &[0.1, 0.5]),
            chosen(3, &[0, 1, 2], &[0.2, 0.4, 0.6]),
        ];
        assert_eq!(by_expert(&routing, 5), want);
    }
}
