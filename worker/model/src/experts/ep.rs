//! Experts on several ranks, each with a share of every layer's, by standard expert parallelism (OSDI '26, section 2.2.3): each
//! row goes to the rank of each expert that it chose, and the expert's output comes back.
//!
//! A pair of ranks exchanges `4 N A D / S²` bytes in each direction on the way there, and as many on the way back, where the `N`
//! rows of `D` numbers of `S` ranks choose `A` experts each, evenly. That is less than SmallEP's from `S > A` on.

use std::sync::Arc;

use hearth_kernels::{Backend, ExpertProducts, Routing};

use super::choices::{choices, choices_to_bytes, each_choice, is_of};
use super::chosen::ChosenExperts;
use super::{Check, Experts, PendingExperts, RoutedLayer};
use crate::peers::{Exchanged, GroupPass};
use crate::wire::{to_bytes, values};
use crate::{ModelError, Residency, shares};

/// Experts of a group of ranks, of which this one has a share.
pub(crate) struct Ep<B: Backend> {
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
}

impl<B: Backend> Ep<B> {
    pub(crate) fn new(backend: Arc<B>, residency: Arc<dyn Residency<B>>) -> Self {
        Self { backend, residency }
    }
}

impl<B: Backend> Experts<B> for Ep<B> {
    fn begin(
        &self,
        layer: RoutedLayer,
        x: &B::Tensor,
        chosen: B::Chosen,
        group: Option<&Arc<GroupPass>>,
    ) -> Result<PendingExperts<B>, ModelError> {
        let group = Arc::clone(group.ok_or(ModelError::Alone)?);
        let (routing, rows) = self.backend.routing_and_rows(chosen, x)?;
        let hidden = self.backend.shape(x).1;
        let sent = Sent::of(routing, group.ranks(), layer.experts);
        let at = layer.layer as usize;
        group.send_each(at, Exchanged::Choices, |to| sent.choices(to))?;
        group.send_each(at, Exchanged::Dispatched, |to| {
            to_bytes(&sent.rows(to, &rows, hidden))
        })?;
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        Ok(PendingExperts::new(move |_, check| {
            let own = sent.rows(group.rank(), &rows, hidden);
            drop(rows);
            let step = Step {
                backend: &*backend,
                residency: &*residency,
                group: &group,
                layer,
            };
            let own = step.run(sent.choices(group.rank()), own, hidden, check)?;
            step.combine(&sent, &own, hidden, check)
        }))
    }

    fn assist(
        &self,
        layer: RoutedLayer,
        hidden: usize,
        group: &Arc<GroupPass>,
        check: Check<'_>,
    ) -> Result<(), ModelError> {
        let at = layer.layer as usize;
        group.send_each(at, Exchanged::Choices, |_| Vec::new())?;
        group.send_each(at, Exchanged::Dispatched, |_| Vec::new())?;
        let step = Step {
            backend: &*self.backend,
            residency: &*self.residency,
            group,
            layer,
        };
        step.run(Vec::new(), Vec::new(), hidden, check)?;
        for from in group.others() {
            group.receive((at, Exchanged::Combined), from, Some(0), check)?;
        }
        Ok(())
    }
}

/// What a rank's rows chose, by the rank that has the expert.
struct Sent {
    routing: Routing,
    /// For each rank, the indices of the choices of its experts, in order.
    by_rank: Vec<Vec<u32>>,
}

impl Sent {
    fn of(routing: Routing, ranks: usize, experts: usize) -> Self {
        let mut by_rank = vec![Vec::new(); ranks];
        for (choice, expert) in routing.experts.iter().enumerate() {
            let rank = shares::rank_of(*expert as usize, ranks, experts);
            by_rank[rank].push(choice as u32);
        }
        Self { routing, by_rank }
    }

    /// Choices of a rank's experts, as bytes.
    fn choices(&self, rank: usize) -> Vec<u8> {
        let all: Vec<(u32, f32)> = each_choice(&self.routing).collect();
        let of_rank = self.by_rank[rank].iter();
        choices_to_bytes(of_rank.map(|choice| all[*choice as usize]))
    }

    /// A row for each choice of a rank's experts, `[choices, hidden]`.
    fn rows(&self, rank: usize, rows: &[f32], hidden: usize) -> Vec<f32> {
        let mut copies = Vec::with_capacity(self.by_rank[rank].len() * hidden);
        for choice in &self.by_rank[rank] {
            let row = *choice as usize / self.routing.top_k;
            copies.extend(&rows[row * hidden..(row + 1) * hidden]);
        }
        copies
    }
}

/// A layer's experts in a pass.
struct Step<'a, B: Backend> {
    backend: &'a B,
    residency: &'a dyn Residency<B>,
    group: &'a GroupPass,
    layer: RoutedLayer,
}

impl<B: Backend> Step<'_, B> {
    /// Runs this rank's experts for the rows that were sent to it, and for its own, which chose `own` and are `own_rows`
    /// `[choices, hidden]`; sends the others what is theirs, and returns its own products `[choices, hidden]`.
    fn run(
        &self,
        own: Vec<u8>,
        own_rows: Vec<f32>,
        hidden: usize,
        check: Check<'_>,
    ) -> Result<Vec<f32>, ModelError> {
        let Self { group, layer, .. } = self;
        let (at, rank) = (layer.layer as usize, group.rank());
        let is_mine = is_of(group, rank, layer.experts);
        // Each choice is a row of its own.
        let mut all = Routing {
            top_k: 1,
            experts: Vec::new(),
            weights: Vec::new(),
        };
        let mut firsts = vec![0];
        for from in 0..group.ranks() {
            let bytes = match from == rank {
                true => own.clone(),
                false => group.receive((at, Exchanged::Choices), from, None, check)?,
            };
            let (experts, weights) = choices(group, from, &bytes, &is_mine)?;
            let most = group.shares()[from].rows.len() * layer.top_k;
            if experts.len() > most {
                let why = format!("it sent {} choices of at most {most}", experts.len());
                return Err(group.accuse(from, why));
            }
            all.experts.extend(experts);
            all.weights.extend(weights);
            firsts.push(all.experts.len());
        }
        let chosen = ChosenExperts::new(RoutedLayer { top_k: 1, ..*layer }, &all);
        self.residency.announce(chosen.ids());
        let mut x = Vec::with_capacity(all.experts.len() * hidden);
        for from in 0..group.ranks() {
            if from == rank {
                x.extend(&own_rows);
                continue;
            }
            let want = 4 * hidden * (firsts[from + 1] - firsts[from]);
            let bytes = group.receive((at, Exchanged::Dispatched), from, Some(want), check)?;
            x.extend(values(&bytes));
        }
        let products = match chosen.is_empty() {
            true => Vec::new(),
            false => {
                let x = self.backend.upload(all.experts.len(), hidden, &x)?;
                let products = chosen.run(self.backend, self.residency, &x, check)?;
                self.backend.download(&products)?
            }
        };
        let of = |rank: usize| &products[firsts[rank] * hidden..firsts[rank + 1] * hidden];
        group.send_each(at, Exchanged::Combined, |to| to_bytes(of(to)))?;
        Ok(of(rank).to_vec())
    }

    /// Waits for the products of this rank's rows, of which `own` are here, and adds them → `[rows, hidden]`.
    fn combine(
        &self,
        sent: &Sent,
        own: &[f32],
        hidden: usize,
        check: Check<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let Self { group, layer, .. } = self;
        let all = sent.routing.experts.len();
        let mut products = Vec::with_capacity(all * hidden);
        let mut places = vec![0; all];
        for (from, choices) in sent.by_rank.iter().enumerate() {
            let first = (products.len() / hidden.max(1)) as u32;
            for (row, choice) in (first..).zip(choices) {
                places[*choice as usize] = row;
            }
            if from == group.rank() {
                products.extend(own);
                continue;
            }
            let at = (layer.layer as usize, Exchanged::Combined);
            let want = 4 * hidden * choices.len();
            let bytes = group.receive(at, from, Some(want), check)?;
            products.extend(values(&bytes));
        }
        let products = self.backend.upload(all, hidden, &products)?;
        let of = ExpertProducts {
            experts: layer.experts,
            routing: &sent.routing,
            rows: &places,
        };
        Ok(self.backend.product_sum(&products, of)?)
    }
}
