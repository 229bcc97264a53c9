//! The experts that the tokens of a layer chose, and how a device runs them.

use std::ops::Range;

use hearth_kernels::{Backend, ExpertCall, Routing};

use super::RoutedLayer;
use crate::{ModelError, ModuleId, Residency};

/// Experts of one layer that were chosen by at least one token, in ascending order.
pub(super) struct ChosenExperts {
    layer: RoutedLayer,
    ids: Vec<ModuleId>,
    chosen: Vec<ChosenExpert>,
}

/// An expert chosen by at least one token.
#[derive(Debug, PartialEq)]
struct ChosenExpert {
    expert: u32,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl ChosenExperts {
    pub(super) fn new(layer: RoutedLayer, routing: &Routing) -> Self {
        let chosen = by_expert(routing, layer.experts);
        let id = |chosen: &ChosenExpert| ModuleId::Expert(layer.layer, chosen.expert);
        Self {
            layer,
            ids: chosen.iter().map(id).collect(),
            chosen,
        }
    }

    pub(super) fn ids(&self) -> &[ModuleId] {
        &self.ids
    }

    /// Runs them for `x` `[rows, hidden]`, as many at a time as the policy can hold, and returns the sum of their weighted
    /// outputs `[rows, hidden]`. `check` is called between groups, and its error ends the run.
    pub(super) fn run<B: Backend>(
        &self,
        backend: &B,
        residency: &dyn Residency<B>,
        x: &B::Tensor,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let (rows, hidden) = backend.shape(x);
        let mut sum = backend.expert_sum(rows, hidden, self.layer.experts)?;
        let mut rest = &self.ids[..];
        while !rest.is_empty() {
            check()?;
            let count = residency.group(rest).clamp(1, rest.len());
            let first = self.ids.len() - rest.len();
            rest = &rest[count..];
            let group = first..first + count;
            self.run_group(backend, residency, (&mut sum, x), group, rest.is_empty())?;
        }
        Ok(backend.expert_total(sum)?)
    }

    /// Runs some of them while holding all of their guards.
    fn run_group<B: Backend>(
        &self,
        backend: &B,
        residency: &dyn Residency<B>,
        (sum, x): (&mut B::ExpertSum, &B::Tensor),
        group: Range<usize>,
        is_last: bool,
    ) -> Result<(), ModelError> {
        let guards = self.ids[group.clone()]
            .iter()
            .map(|id| residency.acquire(*id))
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
        Ok(backend.experts(sum, x, &calls, is_last)?)
    }
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
