//! Choices of routers in modelled mode, where there are no logits to choose by.

use std::sync::atomic::{AtomicU64, Ordering};

use hearth_kernels::Routing;

use crate::options::{Modelled, RoutingModel};

/// Draws until a token takes the next expert that is free.
const DRAWS: usize = 64;

/// Counts the routers that were called, so that each call has choices of its own.
#[derive(Debug, Default)]
pub(crate) struct Routings(AtomicU64);

impl Routings {
    /// Chooses `top_k` of `experts` for each of `tokens` tokens: a function of the seed, the layer, the number of earlier
    /// calls, and the token's row. Weights are equal. Groups of experts are ignored.
    pub(crate) fn choose(
        &self,
        modelled: &Modelled,
        layer: u64,
        (tokens, experts): (usize, usize),
        top_k: usize,
    ) -> Routing {
        let call = self.0.fetch_add(1, Ordering::Relaxed);
        let sampler = Sampler::new(modelled.routing, experts, modelled.seed ^ mixed(layer));
        let mut chosen = Vec::with_capacity(tokens * top_k);
        let mut is_chosen = vec![false; experts];
        for row in 0..tokens {
            let mut random = Random(mixed(modelled.seed ^ mixed(call << 32 | row as u64)));
            let first = chosen.len();
            while chosen.len() - first < top_k {
                let expert = sampler.sample(&mut random, &is_chosen);
                is_chosen[expert] = true;
                chosen.push(expert as u32);
            }
            let of_token = &mut chosen[first..];
            of_token.sort_unstable();
            for &expert in &*of_token {
                is_chosen[expert as usize] = false;
            }
        }
        Routing {
            top_k,
            weights: vec![1.0 / top_k as f32; chosen.len()],
            experts: chosen,
        }
    }
}

/// Distribution over the experts of a layer.
struct Sampler {
    /// Experts by rank.
    ranks: Vec<usize>,
    /// Sums of the probabilities up to each rank; empty if all are equal.
    sums: Vec<f64>,
}

impl Sampler {
    fn new(routing: RoutingModel, experts: usize, seed: u64) -> Self {
        let mut ranks: Vec<usize> = (0..experts).collect();
        let RoutingModel::Zipf { exponent } = routing else {
            return Self {
                ranks,
                sums: Vec::new(),
            };
        };
        let mut random = Random(seed);
        for last in (1..experts).rev() {
            ranks.swap(last, random.below(last + 1));
        }
        let mut sum = 0.0;
        let sums = (1..=experts).map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        });
        Self {
            sums: sums.collect(),
            ranks,
        }
    }

    /// An expert that is not chosen yet, of which there is one.
    fn sample(&self, random: &mut Random, is_chosen: &[bool]) -> usize {
        let mut rank = 0;
        for _ in 0..DRAWS {
            rank = match self.sums.last() {
                None => random.below(self.ranks.len()),
                Some(total) => {
                    let at = random.unit() * total;
                    let rank = self.sums.partition_point(|sum| *sum <= at);
                    rank.min(self.ranks.len() - 1)
                }
            };
            if !is_chosen[self.ranks[rank]] {
                return self.ranks[rank];
            }
        }
        // Nearly all of the probability is with those that were chosen: the next one.
        let mut ranks = (rank..self.ranks.len()).chain(0..rank);
        ranks
            .find(|rank| !is_chosen[self.ranks[*rank]])
            .map_or(0, |rank| self.ranks[rank])
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// At least 0 and less than 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn mixed(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
