//! Experts on several ranks, each with a share of every layer's, by SmallEP (OSDI '26, section 3.2): all ranks get all
//! rows with their choice, sum the weighted outputs of their own experts, and exchange these sums.
//!
//! A pair of ranks exchanges `4 N D / S` bytes of rows and of sums in each direction, where `S` ranks have `N` rows of `D`
//! numbers together, however many experts a token chooses.

use std::sync::Arc;

use hearth_kernels::expert_sum::LEAVES;
use hearth_kernels::{Backend, Routing};

use super::choices::{choices, choices_to_bytes, each_choice, is_of};
use super::chosen::ChosenExperts;
use super::{Check, Experts, PendingExperts, RoutedLayer};
use crate::peers::{Exchanged, GroupPass};
use crate::wire::{to_bytes, values};
use crate::{ModelError, Residency};

/// Experts of a group of ranks, of which this one has a share.
pub(crate) struct SmallEp<B: Backend> {
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
    ranks: usize,
}

impl<B: Backend> SmallEp<B> {
    pub(crate) fn new(backend: Arc<B>, residency: Arc<dyn Residency<B>>, ranks: usize) -> Self {
        Self {
            backend,
            residency,
            ranks,
        }
    }
}

impl<B: Backend> Experts<B> for SmallEp<B> {
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
        group: Option<&Arc<GroupPass>>,
    ) -> Result<PendingExperts<B>, ModelError> {
        let group = Arc::clone(group.ok_or(ModelError::Alone)?);
        let (routing, rows) = self.backend.routing_and_rows(chosen, x)?;
        let at = layer.layer as usize;
        let own = choices_to_bytes(each_choice(&routing));
        group.send_all(at, Exchanged::Choices, &own)?;
        group.send_all(at, Exchanged::Tokens, &to_bytes(&rows))?;
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        Ok(PendingExperts::new(move |x, check| {
            let own = Own {
                routing,
                rows,
                hidden: backend.shape(x).1,
            };
            let step = Step {
                backend: &*backend,
                residency: &*residency,
                group: &group,
                layer,
            };
            let total = step.run(own, check)?;
            total.ok_or(ModelError::Alone)
        }))
    }

    fn numerics(&self, of_device: &str) -> Option<String> {
        // Whole leaves of the tree are added in the order of the tree.
        let are_leaves = LEAVES.is_multiple_of(self.ranks);
        (!are_leaves).then(|| format!("{of_device} in {} sums", self.ranks))
    }

    fn assist(
        &self,
        layer: RoutedLayer,
        hidden: usize,
        group: &Arc<GroupPass>,
        check: Check<'_>,
    ) -> Result<(), ModelError> {
        let at = layer.layer as usize;
        group.send_all(at, Exchanged::Choices, &[])?;
        group.send_all(at, Exchanged::Tokens, &[])?;
        let own = Own {
            routing: Routing {
                top_k: layer.top_k,
                experts: Vec::new(),
                weights: Vec::new(),
            },
            rows: Vec::new(),
            hidden,
        };
        let step = Step {
            backend: &*self.backend,
            residency: &*self.residency,
            group,
            layer,
        };
        step.run(own, check).map(|_| ())
    }
}

/// This rank's rows and their choice.
struct Own {
    routing: Routing,
    /// `[rows, hidden]`, normalised.
    rows: Vec<f32>,
    hidden: usize,
}

/// A layer's experts in a pass.
struct Step<'a, B: Backend> {
    backend: &'a B,
    residency: &'a dyn Residency<B>,
    group: &'a GroupPass,
    layer: RoutedLayer,
}

impl<B: Backend> Step<'_, B> {
    /// Returns the total for this rank's rows, `[rows, hidden]`; `None` if it has none.
    fn run(&self, own: Own, check: Check<'_>) -> Result<Option<B::Tensor>, ModelError> {
        let hidden = own.hidden;
        let partial = self.partial(own, check)?;
        self.send_sums(&partial)?;
        self.total(&partial, hidden, check)
    }

    /// Sum `[all rows, hidden]` of the weighted outputs of this rank's experts for the rows of all ranks, by rank.
    fn partial(&self, own: Own, check: Check<'_>) -> Result<B::Tensor, ModelError> {
        let Own {
            routing,
            rows,
            hidden,
        } = own;
        let Self { group, layer, .. } = self;
        let (at, rank) = (layer.layer as usize, group.rank());
        let ranks = 0..group.ranks();
        let top_k = layer.top_k;
        let mut all = Routing {
            top_k,
            experts: Vec::with_capacity(group.rows() * top_k),
            weights: Vec::with_capacity(group.rows() * top_k),
        };
        for from in ranks.clone() {
            if from == rank {
                all.experts.extend(&routing.experts);
                all.weights.extend(&routing.weights);
                continue;
            }
            let want = 8 * top_k * group.shares()[from].rows.len();
            let bytes = group.receive((at, Exchanged::Choices), from, Some(want), check)?;
            let (experts, weights) = choices(group, from, &bytes, |expert| expert < layer.experts)?;
            all.experts.extend(experts);
            all.weights.extend(weights);
        }
        let chosen = ChosenExperts::new(*layer, &all).only(is_of(group, rank, layer.experts));
        // The policy loads them while the rows travel.
        self.residency.announce(chosen.ids());
        let mut x = Vec::with_capacity(group.rows() * hidden);
        for from in ranks {
            if from == rank {
                x.extend(&rows);
                continue;
            }
            let want = 4 * hidden * group.shares()[from].rows.len();
            let bytes = group.receive((at, Exchanged::Tokens), from, Some(want), check)?;
            x.extend(values(&bytes));
        }
        drop(rows);
        if chosen.is_empty() {
            return Ok(self.backend.zeros(group.rows(), hidden)?);
        }
        let x = self.backend.upload(group.rows(), hidden, &x)?;
        chosen.run(self.backend, self.residency, &x, check)
    }

    /// Sends each other rank the sums of its rows.
    fn send_sums(&self, partial: &B::Tensor) -> Result<(), ModelError> {
        let group = self.group;
        if group.ranks() == 1 {
            return Ok(());
        }
        let hidden = self.backend.shape(partial).1;
        let sums = self.backend.download(partial)?;
        let firsts = self.firsts();
        group.send_each(self.layer.layer as usize, Exchanged::Sums, |to| {
            let rows = hidden * firsts[to]..hidden * firsts[to + 1];
            to_bytes(&sums[rows])
        })
    }

    /// Adds the sums of all ranks for this rank's rows, pairwise as the leaves of one rank's sum are.
    fn total(
        &self,
        partial: &B::Tensor,
        hidden: usize,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Self { backend, group, .. } = self;
        let rows = group.own().rows.len();
        let mut sums = Vec::with_capacity(group.ranks());
        for from in 0..group.ranks() {
            if from == group.rank() {
                let first = self.firsts()[from];
                let own: Vec<u32> = (first..first + rows).map(|row| row as u32).collect();
                sums.push(match (rows, group.ranks()) {
                    (0, _) => None,
                    _ => Some(backend.rows(partial, &own)?),
                });
                continue;
            }
            let at = (self.layer.layer as usize, Exchanged::Sums);
            let bytes = group.receive(at, from, Some(4 * hidden * rows), check)?;
            let values: Vec<f32> = values(&bytes).collect();
            let upload = (rows > 0).then(|| backend.upload(rows, hidden, &values));
            sums.push(upload.transpose()?);
        }
        let sums: Option<Vec<B::Tensor>> = sums.into_iter().collect();
        sums.map(|sums| self.pairwise(sums)).transpose()
    }

    fn pairwise(&self, mut sums: Vec<B::Tensor>) -> Result<B::Tensor, ModelError> {
        while sums.len() > 1 {
            let mut rest = sums.into_iter();
            sums = Vec::new();
            while let Some(left) = rest.next() {
                sums.push(match rest.next() {
                    None => left,
                    Some(right) => self.backend.sum(left, right)?,
                });
            }
        }
        sums.pop().ok_or(ModelError::Alone)
    }

    /// Index of each rank's first row, and behind them the number of rows.
    fn firsts(&self) -> Vec<usize> {
        let mut firsts = vec![0];
        for share in self.group.shares() {
            let last = firsts.last().copied().unwrap_or(0);
            firsts.push(last + share.rows.len());
        }
        firsts
    }
}
