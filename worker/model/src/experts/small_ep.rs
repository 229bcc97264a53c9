//! Experts on several ranks, each with a share of every layer's, by SmallEP (OSDI '26, section 3.2): all ranks get all
//! rows with their choice, sum the weighted outputs of their own experts, and exchange these sums.
//!
//! A pair of ranks exchanges `4 N D / S` bytes of rows and of sums in each direction, where `S` ranks have `N` rows of `D`
//! numbers together, however many experts a token chooses.

use std::ops::Range;
use std::sync::Arc;

use hearth_kernels::expert_sum::LEAVES;
use hearth_kernels::{Backend, Routing};

use super::choices::{
    Outgoing, choices, choices_to_bytes, collected, each_choice, exchange, is_of, landed, leaving,
    messages, room, rows_of,
};
use super::chosen::ChosenExperts;
use super::{Check, Experts, PendingExperts, RoutedLayer};
use crate::peers::{Exchanged, GroupPass};
use crate::wire::values;
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
        let (own_rows, hidden) = self.backend.shape(x);
        // They leave while the shared experts run, and others come.
        let leaving = messages(0..own_rows)
            .into_iter()
            .map(|rows| self.backend.rows_read_begin(x, rows))
            .collect::<Result<Vec<_>, _>>()?;
        let routing = self.backend.routing(chosen)?;
        let own = choices_to_bytes(each_choice(&routing));
        group.send_all(layer.layer as usize, Exchanged::Choices, &own)?;
        let (backend, residency) = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        let room = room(&*backend, (group.rows(), hidden))?;
        Ok(PendingExperts::new(move |x, check| {
            let step = Step {
                backend: &*backend,
                residency: &*residency,
                group: &group,
                layer,
                hidden,
            };
            let own = Own { x, leaving };
            let total = step.run(&routing, Some(own), room, check)?;
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
        let room = room(&*self.backend, (group.rows(), hidden))?;
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
        step.run(&none, None, room, check).map(|_| ())
    }
}

/// This rank's rows.
struct Own<'a, B: Backend> {
    /// `[rows, hidden]`.
    x: &'a B::Tensor,
    /// The same on their way to the host, by message.
    leaving: Vec<B::HostCopy>,
}

/// Sum of some ranks' experts for this rank's rows, `[rows, hidden]`.
enum Sum<B: Backend> {
    OnDevice(B::Tensor),
    OnHost(Vec<f32>),
}

/// Sums of all ranks for some of this rank's rows.
struct Sums<B: Backend> {
    rows: Range<usize>,
    pairs: Pairs<Sum<B>>,
    /// Once all are added.
    total: Option<Sum<B>>,
}

impl<B: Backend> Sums<B> {
    fn of(ranks: usize, rows: Range<usize>) -> Self {
        Self {
            rows,
            pairs: Pairs::of(ranks),
            total: None,
        }
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
    /// Returns the total for this rank's rows `own`, which chose as `routing` says; `None` if it has none. `room` is for the
    /// rows of all ranks.
    fn run(
        &self,
        routing: &Routing,
        own: Option<Own<'_, B>>,
        room: Option<B::Incoming>,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let partial = self.partial(routing, own, room, check)?;
        self.total(&partial, check)
    }

    /// Sum `[all rows, hidden]` of the weighted outputs of this rank's experts for the rows of all ranks, by rank.
    fn partial(
        &self,
        routing: &Routing,
        own: Option<Own<'_, B>>,
        room: Option<B::Incoming>,
        check: Check<'_>,
    ) -> Result<B::Tensor, ModelError> {
        let Self { group, layer, .. } = self;
        let all = self.all_choices(routing, check)?;
        let is_mine = is_of(group, group.rank(), layer.experts);
        let chosen = ChosenExperts::new(*layer, &all).only(is_mine);
        // The policy loads them while the rows travel.
        self.residency.announce(layer.layer, chosen.ids());
        let at = (layer.layer as usize, Exchanged::Tokens);
        let (x, leaving) = own.map_or((None, Vec::new()), |own| (Some(own.x), own.leaving));
        let own_rows = group.own().rows.len();
        // A message is for all others.
        let (mut leaving, mut bytes, mut is_of) = (leaving.into_iter(), Vec::new(), None);
        let outgoing = Outgoing {
            rows: &|_| 0..own_rows,
            send: &mut |to, rows| {
                if is_of.as_ref() != Some(&rows) {
                    let message = leaving.next().map(|copy| landed(self.backend, copy));
                    bytes = message.transpose()?.unwrap_or_default();
                    is_of = Some(rows);
                }
                group.send(at, to, bytes.clone())
            },
        };
        let rows = (&self.firsts()[..], self.hidden);
        let all = collected(self.backend, (group, at), rows, (room, x), outgoing, check)?;
        match all.filter(|_| !chosen.is_empty()) {
            Some(all) => chosen.run(self.backend, self.residency, &all, check),
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

    /// Sends each other rank the sums of its rows, and adds those of all ranks for this rank's rows, pairwise as the leaves of one
    /// rank's sum are. What the others send is added on the host as far as the pairs go, so that less of it crosses the link to
    /// a device, and as soon as it is there.
    fn total(
        &self,
        partial: &B::Tensor,
        check: Check<'_>,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Self { backend, group, .. } = self;
        let (own, hidden) = (group.own().rows.len(), self.hidden);
        let at = (self.layer.layer as usize, Exchanged::Sums);
        let firsts = self.firsts();
        let mut leaving = leaving(*backend, group, &firsts, partial)?;
        // Those of each message are added for themselves.
        let mut totals: Vec<Sums<B>> = Vec::new();
        let first = firsts[group.rank()];
        let own_messages = messages(0..own).into_iter();
        for rows in own_messages.filter(|rows| !rows.is_empty()) {
            let of_message = first + rows.start..first + rows.end;
            let own = rows_of(*backend, partial, of_message)?;
            let mut sums = Sums::of(group.ranks(), rows);
            self.add(&mut sums, group.rank(), Sum::OnDevice(own))?;
            totals.push(sums);
        }
        let outgoing = Outgoing {
            rows: &|to| firsts[to]..firsts[to + 1],
            send: &mut |to, _| {
                let bytes = leaving.pop_front().map(|copy| landed(*backend, copy));
                group.send(at, to, bytes.transpose()?.unwrap_or_default())
            },
        };
        exchange(
            group,
            outgoing,
            |_| 0..own,
            |from, rows| {
                let bytes = group.receive(at, from, Some(4 * hidden * rows.len()), check)?;
                match totals.iter_mut().find(|sums| sums.rows == rows) {
                    Some(sums) => self.add(sums, from, Sum::OnHost(values(&bytes).collect())),
                    None => Ok(()),
                }
            },
        )?;
        self.joined(totals)
    }

    /// The totals of all messages, one below the other; `None` if there are none.
    fn joined(&self, mut totals: Vec<Sums<B>>) -> Result<Option<B::Tensor>, ModelError> {
        let total = |sums: Sums<B>| match sums.total {
            Some(Sum::OnDevice(total)) => Ok(total),
            Some(Sum::OnHost(_)) | None => Err(ModelError::Alone),
        };
        if totals.len() < 2 {
            return totals.pop().map(total).transpose();
        }
        let rows = self.group.own().rows.len();
        let mut all = self.backend.zeros(rows, self.hidden)?;
        for sums in totals {
            let first = sums.rows.start;
            self.backend.put_tile(&mut all, (first, 0), &total(sums)?)?;
        }
        Ok(Some(all))
    }

    /// Adds a rank's sum to those that it makes pairs with, as far as they are there.
    fn add(&self, sums: &mut Sums<B>, rank: usize, mut sum: Sum<B>) -> Result<(), ModelError> {
        let own = self.group.rank();
        let (pairs, rows) = (&mut sums.pairs, sums.rows.len());
        let mut node = Node {
            level: 0,
            index: rank,
        };
        while !pairs.is_root(node) {
            // What is added to this rank's own sums is added on the device.
            if node.sibling().covers(own) {
                sum = Sum::OnDevice(self.on_device(sum, rows)?);
            }
            if pairs.has_sibling(node) {
                let Some(other) = pairs.take(node.sibling()) else {
                    pairs.put(node, sum);
                    return Ok(());
                };
                sum = match node.is_left() {
                    true => self.sum(sum, other, rows)?,
                    false => self.sum(other, sum, rows)?,
                };
            }
            node = node.parent();
        }
        sums.total = Some(sum);
        Ok(())
    }

    fn sum(&self, left: Sum<B>, right: Sum<B>, rows: usize) -> Result<Sum<B>, ModelError> {
        Ok(match (left, right) {
            (Sum::OnHost(mut left), Sum::OnHost(right)) => {
                for (sum, more) in left.iter_mut().zip(right) {
                    *sum += more;
                }
                Sum::OnHost(left)
            }
            (left, right) => {
                let left = self.on_device(left, rows)?;
                let right = self.on_device(right, rows)?;
                Sum::OnDevice(self.backend.sum(left, right)?)
            }
        })
    }

    fn on_device(&self, sum: Sum<B>, rows: usize) -> Result<B::Tensor, ModelError> {
        let values = match sum {
            Sum::OnDevice(sum) => return Ok(sum),
            Sum::OnHost(values) => values,
        };
        let mut room = self.backend.rows_write_begin(rows, self.hidden)?;
        self.backend.rows_write(&mut room, 0, &values)?;
        Ok(self.backend.rows_write_end(room)?)
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

/// A place in the tree of pairs: the sum of up to `2^level` ranks, of which the first is `index · 2^level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node {
    level: u32,
    index: usize,
}

impl Node {
    fn sibling(self) -> Self {
        Self {
            index: self.index ^ 1,
            ..self
        }
    }

    fn parent(self) -> Self {
        Self {
            level: self.level + 1,
            index: self.index / 2,
        }
    }

    fn is_left(self) -> bool {
        self.index.is_multiple_of(2)
    }

    /// Whether it is a sum of this rank's, too.
    fn covers(self, rank: usize) -> bool {
        rank >> self.level == self.index
    }
}

/// Sums that wait for those that they make pairs with.
struct Pairs<T> {
    ranks: usize,
    waiting: Vec<(Node, T)>,
}

impl<T> Pairs<T> {
    fn of(ranks: usize) -> Self {
        Self {
            ranks,
            waiting: Vec::new(),
        }
    }

    /// Whether it is the sum of all.
    fn is_root(&self, node: Node) -> bool {
        self.ranks <= 1 << node.level
    }

    /// Whether there are ranks in the other half of its pair: the last of an odd number of sums has none.
    fn has_sibling(&self, node: Node) -> bool {
        node.sibling().index << node.level < self.ranks
    }

    fn put(&mut self, node: Node, sum: T) {
        self.waiting.push((node, sum));
    }

    fn take(&mut self, node: Node) -> Option<T> {
        let at = self.waiting.iter().position(|(at, _)| *at == node)?;
        Some(self.waiting.swap_remove(at).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_an_odd_number_of_sums_waits_for_nobody() {
        let pairs = Pairs::<()>::of(5);
        let node = |level, index| Node { level, index };
        assert!(pairs.has_sibling(node(0, 3)) && !pairs.has_sibling(node(0, 4)));
        assert!(pairs.has_sibling(node(1, 1)) && !pairs.has_sibling(node(1, 2)));
        assert!(pairs.has_sibling(node(2, 0)) && pairs.has_sibling(node(2, 1)));
        assert!(!pairs.is_root(node(2, 1)) && pairs.is_root(node(3, 0)));
        assert!(node(1, 1).covers(3) && !node(1, 1).covers(4));
    }
}
