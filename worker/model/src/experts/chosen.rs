//! The experts that the tokens of a layer chose, and how a device runs them.

use std::ops::Range;

use hearth_kernels::{Backend, ExpertCall, Routing};

use super::{Check, RoutedLayer};
use crate::{ModelError, ModuleId, Residency};

/// Experts of one layer that were chosen by at least one token, in ascending order.
pub(super) struct ChosenExperts {
    layer: RoutedLayer,
    ids: Vec<ModuleId>,
    chosen: Vec<ChosenExpert>,
}

/// An expert chosen by at least one token.
#[derive(Clone, Debug, PartialEq)]
struct ChosenExpert {
    expert: u32,
    rows: Vec<u32>,
    weights: Vec<f32>,
    /// Index in the routing of each of those choices.
    choices: Vec<u32>,
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

    /// Index of the layer.
    pub(super) fn layer(&self) -> u32 {
        self.layer.layer
    }

    /// Number of experts of the layer.
    pub(super) fn experts(&self) -> usize {
        self.layer.experts
    }

    pub(super) fn ids(&self) -> &[ModuleId] {
        &self.ids
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Number of choices: rows of all of these experts.
    pub(super) fn choices(&self) -> usize {
        self.chosen.iter().map(|chosen| chosen.rows.len()).sum()
    }

    /// Takes those experts out for whose index `is_taken` holds.
    pub(super) fn take(&mut self, is_taken: impl Fn(usize) -> bool) -> Self {
        let (ids, chosen) = (
            std::mem::take(&mut self.ids),
            std::mem::take(&mut self.chosen),
        );
        let mut taken = Self {
            layer: self.layer,
            ids: Vec::new(),
            chosen: Vec::new(),
        };
        for (index, (id, chosen)) in ids.into_iter().zip(chosen).enumerate() {
            let part = if is_taken(index) {
                &mut taken
            } else {
                &mut *self
            };
            part.ids.push(id);
            part.chosen.push(chosen);
        }
        taken
    }

    /// Those experts alone for whose number `is_wanted` holds.
    pub(super) fn only(mut self, is_wanted: impl Fn(usize) -> bool) -> Self {
        self.chosen.retain(|c| is_wanted(c.expert as usize));
        let id = |c: &ChosenExpert| ModuleId::Expert(self.layer.layer, c.expert);
        self.ids = self.chosen.iter().map(id).collect();
        self
    }

    /// Gives each choice a row of its own, so that a sum over these experts is their weighted outputs `[choices, hidden]`,
    /// not yet added. Returns the row of the input that each of them reads.
    pub(super) fn products(&self) -> (Self, Vec<u32>) {
        let mut inputs = Vec::new();
        let apart = |chosen: &ChosenExpert| {
            let first = inputs.len() as u32;
            inputs.extend(&chosen.rows);
            ChosenExpert {
                rows: (first..inputs.len() as u32).collect(),
                ..chosen.clone()
            }
        };
        let chosen = self.chosen.iter().map(apart).collect();
        let products = Self {
            layer: self.layer,
            ids: self.ids.clone(),
            chosen,
        };
        (products, inputs)
    }

    /// Enters, for each choice of these experts, the row of its product; theirs begin at row `first`.
    pub(super) fn place_products(&self, first: usize, rows: &mut [u32]) {
        let choices = self.chosen.iter().flat_map(|chosen| &chosen.choices);
        for (row, choice) in (first as u32..).zip(choices) {
            if let Some(place) = rows.get_mut(*choice as usize) {
                *place = row;
            }
        }
    }

    /// Runs them for `x` `[rows, hidden]`, as many at a time as the policy can hold, and returns the sum of their weighted
    /// outputs `[rows, hidden]`. `check` is called between groups, and its error ends the run.
    pub(super) fn run<B: Backend>(
        &self,
        backend: &B,
        residency: &dyn Residency<B>,
        x: &B::Tensor,
        check: Check<'_>,
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
            choices: Vec::new(),
        })
        .collect();
    for (i, (expert, weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
        let chosen = &mut all[*expert as usize];
        chosen.rows.push((i / routing.top_k) as u32);
        chosen.weights.push(*weight);
        chosen.choices.push(i as u32);
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
        let chosen = |expert, rows: &[u32], weights: &[f32], choices: &[u32]| ChosenExpert {
            expert,
            rows: rows.into(),
            weights: weights.into(),
            choices: choices.into(),
        };
        let want = vec![
            chosen(0, &[1], &[0.3], &[2]),
            chosen(1, &[0, 2], &[0.1, 0.5], &[0, 4]),
            chosen(3, &[0, 1, 2], &[0.2, 0.4, 0.6], &[1, 3, 5]),
        ];
        assert_eq!(by_expert(&routing, 5), want);
    }
}
