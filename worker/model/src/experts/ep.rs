//! Experts on several ranks, each with a share of every layer's, by standard expert parallelism (OSDI '26, section 2.2.3): each
//! row goes to the rank of each expert that it chose, and the expert's output comes back.
//!
//! A pair of ranks exchanges `4 N A D / S²` bytes in each direction on the way there, and as many on the way back, where the `N`
//! rows of `D` numbers of `S` ranks choose `A` experts each, evenly. That is less than SmallEP's from `S > A` on.

use std::ops::Range;
use std::sync::Arc;

use hearth_kernels::{Backend, ExpertProducts, Routing};

use super::choices::{
    Outgoing, choices, choices_to_bytes, collected, each_choice, is_of, landed, leaving, room,
    rows_of,
};
use super::chosen::ChosenExperts;
use super::{Check, Experts, PendingExperts, RoutedLayer};
use crate::peers::{Exchanged, GroupPass};
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
        let (own_rows, hidden) = self.backend.shape(x);
        // They leave while the shared experts run.
        let leaving = self.backend.rows_read_begin(x, 0..own_rows)?;
        let routing = self.backend.routing(chosen)?;
        let sent = Sent::of(routing, group.ranks(), layer.experts);
        let at = layer.layer as usize;
        group.send_each(at, Exchanged::Choices, |to| sent.choices(to))?;
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        Ok(PendingExperts::new(move |x, check| {
            let step = Step {
                backend: &*backend,
                residency: &*residency,
                group: &group,
                layer,
                hidden,
            };
            let bytes = landed(&*backend, leaving)?;
            let rows = sent.rows_of(group.rank());
            let own = match rows.is_empty() {
                true => None,
                false => Some(backend.rows(x, &rows)?),
            };
            let outgoing = Outgoing {
                rows: &|to| 0..sent.by_rank[to].len(),
                send: &mut |to, choices| {
                    let copies = sent.copies((to, choices), &bytes, 4 * hidden);
                    group.send((at, Exchanged::Dispatched), to, copies)
                },
            };
            let own_choices = sent.choices(group.rank());
            let done = step.run(&own_choices, own.as_ref(), outgoing, check)?;
            step.combine(&sent, done, check)
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
        let step = Step {
            backend: &*self.backend,
            residency: &*self.residency,
            group,
            layer,
            hidden,
        };
        let outgoing = Outgoing {
            rows: &|_| 0..0,
            send: &mut |to, _| group.send((at, Exchanged::Dispatched), to, Vec::new()),
        };
        let done = step.run(&[], None, outgoing, check)?;
        let none = Sent::of(
            Routing {
                top_k: layer.top_k,
                experts: Vec::new(),
                weights: Vec::new(),
            },
            group.ranks(),
            layer.experts,
        );
        step.collect(&none, done, check).map(|_| ())
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

    /// A row of `row_bytes` for each of some `choices` of a rank's experts, of all `rows`.
    fn copies(
        &self,
        (rank, choices): (usize, Range<usize>),
        rows: &[u8],
        row_bytes: usize,
    ) -> Vec<u8> {
        let mut copies = Vec::with_capacity(choices.len() * row_bytes);
        for row in &self.rows_of(rank)[choices] {
            let first = *row as usize * row_bytes;
            copies.extend(&rows[first..first + row_bytes]);
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
    /// Runs this rank's experts for the rows that are sent to it, while it sends what is `outgoing`, and for its own, `own_rows`
    /// `[choices, hidden]`, which chose `own`.
    fn run(
        &self,
        own: &[u8],
        own_rows: Option<&B::Tensor>,
        outgoing: Outgoing<'_>,
        check: Check<'_>,
    ) -> Result<Done<B>, ModelError> {
        let Self {
            backend,
            group,
            layer,
            hidden,
            ..
        } = self;
        let at = (layer.layer as usize, Exchanged::Dispatched);
        let (all, firsts) = self.all_choices(own, check)?;
        let chosen = ChosenExperts::new(RoutedLayer { top_k: 1, ..*layer }, &all);
        self.residency.announce(layer.layer, chosen.ids());
        let room = room(*backend, (all.experts.len(), *hidden))?;
        let rows = (&firsts[..], *hidden);
        let x = collected(
            *backend,
            (group, at),
            rows,
            (room, own_rows),
            outgoing,
            check,
        )?;
        let products = x.map(|x| chosen.run(*backend, self.residency, &x, check));
        Ok(Done {
            products: products.transpose()?,
            firsts,
        })
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

    /// Sends the others the products of their rows, waits for those of this rank's, and adds them → `[rows, hidden]`.
    fn combine(
        &self,
        sent: &Sent,
        done: Done<B>,
        check: Check<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let products = self.collect(sent, done, check)?;
        let products = products.ok_or(ModelError::Alone)?;
        let mut places = vec![0; sent.routing.experts.len()];
        for (row, choice) in (0u32..).zip(sent.by_rank.iter().flatten()) {
            places[*choice as usize] = row;
        }
        let of = ExpertProducts {
            experts: self.layer.experts,
            routing: &sent.routing,
            rows: &places,
        };
        Ok(self.backend.product_sum(&products, of)?)
    }

    /// Sends the others the products of their rows, and waits for those of this rank's, by the rank that has the expert →
    /// `[choices, hidden]`; `None` if there are none.
    fn collect(
        &self,
        sent: &Sent,
        done: Done<B>,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Self {
            backend,
            group,
            layer,
            hidden,
            ..
        } = self;
        let at = (layer.layer as usize, Exchanged::Combined);
        let Done { products, firsts } = done;
        let of = |rank: usize| firsts[rank]..firsts[rank + 1];
        let copies = products.as_ref();
        let copies = copies.map(|products| leaving(*backend, group, &firsts, products));
        let mut copies = copies.transpose()?.unwrap_or_default();
        let own = match products.filter(|_| !of(group.rank()).is_empty()) {
            Some(products) => Some(rows_of(*backend, &products, of(group.rank()))?),
            None => None,
        };
        let mut sent_firsts = vec![0];
        for choices in &sent.by_rank {
            let first = sent_firsts.last().copied().unwrap_or(0);
            sent_firsts.push(first + choices.len());
        }
        let outgoing = Outgoing {
            rows: &of,
            send: &mut |to, _| {
                let bytes = copies.pop_front().map(|copy| landed(*backend, copy));
                group.send(at, to, bytes.transpose()?.unwrap_or_default())
            },
        };
        let room = room(*backend, (sent.routing.experts.len(), *hidden))?;
        let rows = (&sent_firsts[..], *hidden);
        collected(
            *backend,
            (group, at),
            rows,
            (room, own.as_ref()),
            outgoing,
            check,
        )
    }
}

/// What a rank's experts have computed.
struct Done<B: Backend> {
    /// A row for each choice of one of them, by the rank that it came from; `None` if there are none.
    products: Option<B::Tensor>,
    /// Index of each rank's first row, and behind them the number of rows.
    firsts: Vec<usize>,
}
