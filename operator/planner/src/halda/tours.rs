//! The order of a ring's devices: the shortest way from the head through all of them and back.

use crate::ring_problem::Problem;

/// Most devices of a ring, the head among them, of which each order is tried.
const MAX_DEVICES_OF_ALL_ORDERS: usize = 5;

/// Shortest ways from the head through each set of the other devices (Held and Karp's dynamic program).
#[derive(Clone, Debug)]
pub(super) struct Tours {
    others: usize,
    /// By set, then by the last device: milliseconds of the shortest way, and the device before the last.
    ways: Vec<Vec<(f64, usize)>>,
    back_ms: Vec<f64>,
}

/// Devices without the head, the lowest bit for device 1.
pub(super) type Set = usize;

impl Tours {
    pub(super) fn new(problem: &Problem) -> Self {
        let others = problem.devices.len() - 1;
        let devices = 0..=others;
        let row = |from| devices.clone().map(move |to| problem.hop_ms(from, to, 1));
        let hops: Vec<Vec<f64>> = devices.clone().map(|from| row(from).collect()).collect();
        let hop_ms = |from: usize, to: usize| hops[from][to];
        let mut ways = vec![vec![(f64::INFINITY, 0); others]; 1 << others];
        for set in 1..1_usize << others {
            for last in members(set) {
                let before = set & !(1 << last);
                let mut best = match before {
                    0 => (hop_ms(0, last + 1), last),
                    _ => (f64::INFINITY, last),
                };
                for via in members(before) {
                    let ms = ways[before][via].0 + hop_ms(via + 1, last + 1);
                    if ms < best.0 {
                        best = (ms, via);
                    }
                }
                ways[set][last] = best;
            }
        }
        Self {
            others,
            ways,
            back_ms: (0..others).map(|device| hop_ms(device + 1, 0)).collect(),
        }
    }

    /// All devices but the head.
    pub(super) fn all(&self) -> Set {
        (1 << self.others) - 1
    }

    /// Number of orders worth a try of so many devices beside the head.
    pub(super) fn count_of_orders(others: usize) -> usize {
        match others < MAX_DEVICES_OF_ALL_ORDERS {
            true => (1..=others).product(),
            false => 1,
        }
    }

    /// Orders worth a try: the shortest way, and of a few devices all others.
    pub(super) fn orders(&self, set: Set) -> Vec<Vec<usize>> {
        let shortest = self.order(set);
        if shortest.len() > MAX_DEVICES_OF_ALL_ORDERS {
            return vec![shortest];
        }
        let mut orders = vec![vec![0]];
        for _ in members(set) {
            let longer = |order: &Vec<usize>| {
                let others = members(set).map(|device| device + 1);
                let absent = others.filter(|device| !order.contains(device));
                let with = |device| [order.as_slice(), &[device]].concat();
                absent.map(with).collect::<Vec<_>>()
            };
            orders = orders.iter().flat_map(longer).collect();
        }
        if let Some(first) = orders.iter().position(|order| *order == shortest) {
            orders[..=first].rotate_right(1);
        }
        orders
    }

    /// The head and the devices of `set`, in the order of the shortest way.
    pub(super) fn order(&self, set: Set) -> Vec<usize> {
        let total_ms = |last: usize| self.ways[set][last].0 + self.back_ms[last];
        let last = members(set).reduce(|best, last| match total_ms(last) < total_ms(best) {
            true => last,
            false => best,
        });
        let mut order = Vec::new();
        let mut left = set;
        let mut next = last;
        while let Some(device) = next {
            order.push(device + 1);
            let before = self.ways[left][device].1;
            left &= !(1 << device);
            next = (left != 0).then_some(before);
        }
        order.push(0);
        order.reverse();
        order
    }
}

/// The devices of a set, without the head: device 1 is 0.
pub(super) fn members(set: Set) -> impl Iterator<Item = usize> {
    let rest = |set: &Set| Some(set & (set - 1)).filter(|rest| *rest != 0);
    let rests = std::iter::successors(Some(set).filter(|set| *set != 0), rest);
    rests.map(|set| set.trailing_zeros() as usize)
}
