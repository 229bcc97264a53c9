//! What happens to a cluster: deployments come, change and go, nodes are lost and come back. It depends on nothing that
//! becomes of them, so that all that are compared see the same.

use std::collections::{BTreeMap, BTreeSet};

use super::shapes::{Mix, Wish};
use crate::testing::random::SplitMix;

/// One thing that happens; deployments and nodes are given by their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A deployment is created.
    Create(usize, Wish),
    /// Its spec changes.
    Change(usize, Wish),
    /// It is deleted.
    Delete(usize),
    /// A request for it arrives.
    Request(usize),
    /// A node is not Ready any more.
    Lose(usize),
    /// It is again.
    Return(usize),
}

/// The course of events.
#[derive(Clone, Debug)]
pub(super) struct Events {
    random: SplitMix,
    mix: Mix,
    /// Deployments that there are in the long run.
    deployments: usize,
    nodes: usize,
    present: BTreeMap<usize, Wish>,
    lost: BTreeSet<usize>,
    made: usize,
}

impl Events {
    pub(super) fn new(seed: u64, deployments: usize, nodes: usize, mix: Mix) -> Self {
        Self {
            random: SplitMix(seed),
            mix,
            deployments,
            nodes,
            present: BTreeMap::new(),
            lost: BTreeSet::new(),
            made: 0,
        }
    }

    /// The next one. Deployments are created until there are as many as there are to be; from then on as many are created as
    /// deleted.
    pub(super) fn next(&mut self) -> Event {
        if self.made < self.deployments || self.present.len() < self.deployments / 2 {
            return self.create();
        }
        match self.random.below(100) {
            0..30 if self.present.len() < self.deployments => self.create(),
            0..30 => Event::Delete(self.forget()),
            30..50 => Event::Delete(self.forget()),
            50..70 => self.change(Wish::scaled),
            70..80 => {
                let (mix, nodes) = (self.mix, self.nodes);
                self.change(|_, random| Wish::drawn(random, mix, nodes))
            }
            80..88 => self.lose_or_return(),
            _ => Event::Request(self.any()),
        }
    }

    fn create(&mut self) -> Event {
        let wish = Wish::drawn(&mut self.random, self.mix, self.nodes);
        let number = self.made;
        self.made += 1;
        self.present.insert(number, wish.clone());
        Event::Create(number, wish)
    }

    fn any(&mut self) -> usize {
        let at = self.random.below(self.present.len());
        self.present.keys().nth(at).copied().unwrap_or_default()
    }

    fn forget(&mut self) -> usize {
        let number = self.any();
        self.present.remove(&number);
        number
    }

    fn change(&mut self, to: impl FnOnce(&Wish, &mut SplitMix) -> Wish) -> Event {
        let number = self.any();
        let wish = to(&self.present[&number], &mut self.random);
        self.present.insert(number, wish.clone());
        Event::Change(number, wish)
    }

    /// At most a tenth of the nodes are lost at a time.
    fn lose_or_return(&mut self) -> Event {
        let most = (self.nodes / 10).max(1);
        let returns = self.lost.len() >= most || self.random.happens(50);
        if returns && let Some(node) = self.lost.pop_first() {
            return Event::Return(node);
        }
        let node = self.random.below(self.nodes);
        match self.lost.insert(node) {
            true => Event::Lose(node),
            false => Event::Request(self.any()),
        }
    }
}
