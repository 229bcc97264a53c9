//! Experts on several ranks, each with a share of every layer's, by standard expert parallelism (OSDI '26, section 2.2.3): each
//! row goes to the rank of each expert that it chose, and the expert's output comes back.
//!
//! A pair of ranks exchanges `4 N A D / S²` bytes in each direction on the way there, and as many on the way back, where the `N`
//! rows of `D` numbers of `S` ranks choose `A` experts each, evenly. That is less than SmallEP's from `S > A` on.

use std::sync::Arc;

use hearth_kernels::{Backend, ExpertProducts, Routing};

use super::choices::{bytes_of, choices, choices_to_bytes, collected, each_choice, is_of, rows_of};
use super::chosen::ChosenExperts;
use super::{Check, Experts, PendingExperts, RoutedLayer};
use crate::peers::{Exchanged, GroupPass};
use crate::wire::to_bytes;
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
            to_bytes(&sent.copies(to, &rows, hidden))
        })?;
        drop(rows);
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        Ok(PendingExperts::new(move |x, check| {
            let step = Step {
                backend: &*backend,
                residency: &*residency,
                group: &group,
                layer,
                hidden,
            };
            let rows = sent.rows_of(group.rank());
            let own = match rows.is_empty() {
                true => None,
                false => Some(backend.rows(x, &rows)?),
            };
            let own = step.run(&sent.choices(group.rank()), own.as_ref(), check)?;
            step.combine(&sent, own.as_ref(), check)
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
            hidden,
        };
        step.run(&[], None, check)?;
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

    /// The row of each choice of a rank's experts.
    fn rows_of(&self, rank: usize) -> Vec<u32> {
        let choices = self.by_rank[rank].iter();
        choices
            .map(|choice| choice / self.routing.top_k as u32)
            .collect()
    }

    /// A row for each choice of a rank's experts, `[choices, hidden]`, of all `rows` `[rows, hidden]`.
    fn copies(&self, rank: usize, rows: &[f32], hidden: usize) -> Vec<f32> {
        let mut copies = Vec::with_capacity(self.by_rank[rank].len() * hidden);
        for row in self.rows_of(rank) {
            let first = row as usize * hidden;
            copies.extend(&rows[first..first + hidden]);
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
    hidden: usize,
}

impl<B: Backend> Step<'_, B> {
    /// Runs this rank's experts for the rows that were sent to it, and for its own, `own_rows` `[choices, hidden]`, which chose
    /// `own`; sends the others what is theirs, and returns its own products `[choices, hidden]`, if there are any.
    fn run(
        &self,
        own: &[u8],
        own_rows: Option<&B::Tensor>,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Self {
            backend,
            group,
            layer,
            hidden,
            ..
        } = self;
        let (at, rank) = (layer.layer as usize, group.rank());
        let (all, firsts) = self.all_choices(own, check)?;
        let chosen = ChosenExperts::new(RoutedLayer { top_k: 1, ..*layer }, &all);
        self.residency.announce(layer.layer, chosen.ids());
        let rows = (&firsts[..], *hidden);
        let x = collected(
            *backend,
            group,
            (at, Exchanged::Dispatched),
            rows,
            own_rows,
            check,
        )?;
        let products = x.map(|x| chosen.run(*backend, self.residency, &x, check));
        let products = products.transpose()?;
        let of = |rank: usize| firsts[rank]..firsts[rank + 1];
        for to in group.others() {
            let bytes = match &products {
                Some(products) => bytes_of(*backend, products, of(to))?,
                None => Vec::new(),
            };
            group.send((at, Exchanged::Combined), to, bytes)?;
        }
        match products.filter(|_| !of(rank).is_empty()) {
            Some(products) => rows_of(*backend, &products, of(rank)).map(Some),
            None => Ok(None),
        }
    }

    /// The choices of this rank's experts, each as if it were a row of its own, by the rank that they come from, and the index of
    /// the first one of each rank.
    fn all_choices(
        &self,
        own: &[u8],
        check: Check<'_>,
    ) -> Result<(Routing, Vec<usize>), ModelError> {
        let Self { group, layer, .. } = self;
        let is_mine = is_of(group, group.rank(), layer.experts);
        let mut all = Routing {
            top_k: 1,
            experts: Vec::new(),
            weights: Vec::new(),
        };
        let mut firsts = vec![0];
        for from in 0..group.ranks() {
            let at = (layer.layer as usize, Exchanged::Choices);
            let sent = match from == group.rank() {
                true => None,
                false => Some(group.receive(at, from, None, check)?),
            };
            let bytes = sent.as_deref().unwrap_or(own);
            let (experts, weights) = choices(group, from, bytes, &is_mine)?;
            let most = group.shares()[from].rows.len() * layer.top_k;
            if experts.len() > most {
                let why = format!("it sent {} choices of at most {most}", experts.len());
                return Err(group.accuse(from, why));
            }
            all.experts.extend(experts);
            all.weights.extend(weights);
            firsts.push(all.experts.len());
        }
        Ok((all, firsts))
    }

    /// Waits for the products of this rank's rows, of which `own` are here, and adds them → `[rows, hidden]`.
    fn combine(
        &self,
        sent: &Sent,
        own: Option<&B::Tensor>,
        check: Check<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let Self {
            backend,
            group,
            layer,
            hidden,
            ..
        } = self;
        let mut places = vec![0; sent.routing.experts.len()];
        let mut firsts = vec![0];
        for choices in &sent.by_rank {
            let first = firsts.last().copied().unwrap_or(0);
            for (row, choice) in (first as u32..).zip(choices) {
                places[*choice as usize] = row;
            }
            firsts.push(first + choices.len());
        }
        let at = (layer.layer as usize, Exchanged::Combined);
        let products = collected(*backend, group, at, (&firsts, *hidden), own, check)?;
        let products = products.ok_or(ModelError::Alone)?;
        let of = ExpertProducts {
            experts: layer.experts,
            routing: &sent.routing,
            rows: &places,
        };
        Ok(backend.product_sum(&products, of)?)
    }
}
