//! Experts on several ranks, each with a share of every layer's, by SmallEP (OSDI '26, section 3.2): all ranks get all
//! rows with their choice, sum the weighted outputs of their own experts, and exchange these sums.
//!
//! A pair of ranks exchanges `4 N D / S` bytes of rows and of sums in each direction, where `S` ranks have `N` rows of `D`
//! numbers together, however many experts a token chooses.

use std::sync::Arc;

use hearth_kernels::expert_sum::LEAVES;
use hearth_kernels::{Backend, Routing};

use super::choices::{bytes_of, choices, choices_to_bytes, collected, each_choice, is_of, rows_of};
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
        drop(rows);
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        Ok(PendingExperts::new(move |x, check| {
            let step = Step {
                backend: &*backend,
                residency: &*residency,
                group: &group,
                layer,
                hidden: backend.shape(x).1,
            };
            let total = step.run(&routing, Some(x), check)?;
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
        let none = Routing {
            top_k: layer.top_k,
            experts: Vec::new(),
            weights: Vec::new(),
        };
        let step = Step {
            backend: &*self.backend,
            residency: &*self.residency,
            group,
            layer,
            hidden,
        };
        step.run(&none, None, check).map(|_| ())
    }
}

/// Sum of some ranks' experts for this rank's rows, `[rows, hidden]`.
enum Sum<B: Backend> {
    OnDevice(B::Tensor),
    OnHost(Vec<f32>),
}

/// A layer's experts in a pass.
struct Step<'a, B: Backend> {
    backend: &'a B,
    residency: &'a dyn Residency<B>,
    group: &'a GroupPass,
    layer: RoutedLayer,
    hidden: usize,
}

impl<B: Backend> Step<'_, B> {
    /// Returns the total for this rank's rows `own` `[rows, hidden]`, which chose as `routing` says; `None` if it has none.
    fn run(
        &self,
        routing: &Routing,
        own: Option<&B::Tensor>,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let partial = self.partial(routing, own, check)?;
        self.send_sums(&partial)?;
        self.total(&partial, check)
    }

    /// Sum `[all rows, hidden]` of the weighted outputs of this rank's experts for the rows of all ranks, by rank.
    fn partial(
        &self,
        routing: &Routing,
        own: Option<&B::Tensor>,
        check: Check<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let Self { group, layer, .. } = self;
        let all = self.all_choices(routing, check)?;
        let is_mine = is_of(group, group.rank(), layer.experts);
        let chosen = ChosenExperts::new(*layer, &all).only(is_mine);
        // The policy loads them while the rows travel.
        self.residency.announce(layer.layer, chosen.ids());
        let at = (layer.layer as usize, Exchanged::Tokens);
        let rows = (&self.firsts()[..], self.hidden);
        let x = collected(self.backend, group, at, rows, own, check)?;
        match x.filter(|_| !chosen.is_empty()) {
            Some(x) => chosen.run(self.backend, self.residency, &x, check),
            None => Ok(self.backend.zeros(group.rows(), self.hidden)?),
        }
    }

    /// What the rows of all ranks chose, by rank.
    fn all_choices(&self, own: &Routing, check: Check<'_>) -> Result<Routing, ModelError> {
        let Self { group, layer, .. } = self;
        let top_k = layer.top_k;
        let mut all = Routing {
            top_k,
            experts: Vec::with_capacity(group.rows() * top_k),
            weights: Vec::with_capacity(group.rows() * top_k),
        };
        for from in 0..group.ranks() {
            if from == group.rank() {
                all.experts.extend(&own.experts);
                all.weights.extend(&own.weights);
                continue;
            }
            let at = (layer.layer as usize, Exchanged::Choices);
            let want = 8 * top_k * group.shares()[from].rows.len();
            let bytes = group.receive(at, from, Some(want), check)?;
            let (experts, weights) = choices(group, from, &bytes, |expert| expert < layer.experts)?;
            all.experts.extend(experts);
            all.weights.extend(weights);
        }
        Ok(all)
    }

    /// Sends each other rank the sums of its rows.
    fn send_sums(&self, partial: &B::Tensor) -> Result<(), ModelError> {
        let firsts = self.firsts();
        for to in self.group.others() {
            let rows = firsts[to]..firsts[to + 1];
            let bytes = bytes_of(self.backend, partial, rows)?;
            let at = (self.layer.layer as usize, Exchanged::Sums);
            self.group.send(at, to, bytes)?;
        }
        Ok(())
    }

    /// Adds the sums of all ranks for this rank's rows, pairwise as the leaves of one rank's sum are. What the others have sent
    /// is added on the host as far as the pairs go, so that less of it crosses the link to a device.
    fn total(
        &self,
        partial: &B::Tensor,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Self { backend, group, .. } = self;
        let (rows, hidden) = (group.own().rows.len(), self.hidden);
        let mut sums = Vec::with_capacity(group.ranks());
        for from in 0..group.ranks() {
            if from == group.rank() {
                if rows > 0 {
                    let first = self.firsts()[from];
                    let own = rows_of(*backend, partial, first..first + rows)?;
                    sums.push(Sum::OnDevice(own));
                }
                continue;
            }
            let at = (self.layer.layer as usize, Exchanged::Sums);
            let bytes = group.receive(at, from, Some(4 * hidden * rows), check)?;
            sums.push(Sum::OnHost(values(&bytes).collect()));
        }
        match rows {
            0 => Ok(None),
            _ => self.pairwise(sums, rows).map(Some),
        }
    }

    fn pairwise(&self, mut sums: Vec<Sum<B>>, rows: usize) -> Result<B::Tensor, ModelError> {
        while sums.len() > 1 {
            let mut rest = sums.into_iter();
            sums = Vec::new();
            while let Some(left) = rest.next() {
                sums.push(match rest.next() {
                    None => left,
                    Some(right) => self.add(left, right, rows)?,
                });
            }
        }
        match sums.pop() {
            Some(Sum::OnDevice(total)) => Ok(total),
            Some(Sum::OnHost(_)) | None => Err(ModelError::Alone),
        }
    }

    fn add(&self, left: Sum<B>, right: Sum<B>, rows: usize) -> Result<Sum<B>, ModelError> {
        let on_device = |sum: Sum<B>| match sum {
            Sum::OnDevice(sum) => Ok(sum),
            Sum::OnHost(values) => self.backend.upload(rows, self.hidden, &values),
        };
        Ok(match (left, right) {
            (Sum::OnHost(mut left), Sum::OnHost(right)) => {
                for (sum, more) in left.iter_mut().zip(right) {
                    *sum += more;
                }
                Sum::OnHost(left)
            }
            (left, right) => Sum::OnDevice(self.backend.sum(on_device(left)?, on_device(right)?)?),
        })
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
