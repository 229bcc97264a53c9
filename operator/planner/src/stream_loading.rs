//! Duration of a prompt whose routed experts pass through a ring of slots (hybrid MoE paper, section 3.1).
//!
//! A pure event simulation of two lanes: copies of experts into free slots, in the order of the layers, and operations.
//! A copy begins when its slot is free; a slot is free when the operation that read it last has ended.

use std::collections::VecDeque;

use hearth_crds::RING_GROUPS;

/// A prompt, as the two lanes see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StreamedPrompt {
    /// Layers without routed experts, simulated as the first ones wherever they are.
    pub dense_layers: u32,
    /// Layers with routed experts.
    pub expert_layers: u32,
    /// Experts of a layer that the prompt chooses.
    pub experts: u32,
    /// Slots of the ring, each for one expert; at least 2.
    pub slots: u32,
    /// Milliseconds that the copy of one expert takes.
    pub copy_ms: f64,
    /// Milliseconds that one expert computes.
    pub expert_ms: f64,
    /// Milliseconds of a layer besides its routed experts: attention, router, shared experts.
    pub dense_ms: f64,
    /// Milliseconds that the copies of a layer's dense modules take, through slots of their own; 0 where these stay.
    pub dense_copy_ms: f64,
    /// Whether experts are copied before their router has spoken: the prompt chooses most of them.
    pub is_ahead: bool,
    /// Milliseconds of each layer in which peers exchange keys and values; 0 alone.
    pub kv_exchange_ms: f64,
    /// Milliseconds of a layer with experts in which peers exchange rows for experts and what comes back; 0 alone.
    pub rows_exchange_ms: f64,
}

/// Duration of a prompt, and what the lanes did meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StreamedTime {
    /// Milliseconds from the first copy to the end of the last operation.
    pub total_ms: f64,
    /// Milliseconds in which the link copied.
    pub copy_ms: f64,
    /// Milliseconds in which the device computed.
    pub compute_ms: f64,
    /// Milliseconds in which it waited for what peers exchange.
    pub exchange_ms: f64,
}

impl StreamedPrompt {
    /// Simulates the two lanes.
    pub(crate) fn simulate(&self) -> StreamedTime {
        let mut lanes = Lanes {
            prompt: *self,
            free_ms: vec![0.0; self.slots.max(2) as usize].into(),
            link_ms: 0.0,
            copied: 0,
            dense_there_ms: Vec::new(),
            dense_free_ms: 0.0,
        };
        let mut now_ms = 0.0;
        for layer in 0..self.dense_layers {
            now_ms = lanes.dense(layer, now_ms) + self.kv_exchange_ms;
        }
        let mut ahead: VecDeque<f64> = VecDeque::new();
        let mut to_copy = match self.is_ahead {
            true => u64::from(self.experts) * u64::from(self.expert_layers),
            false => 0,
        };
        for layer in 0..self.expert_layers {
            lanes.copy(&mut ahead, &mut to_copy, 0.0);
            now_ms = lanes.dense(self.dense_layers + layer, now_ms)
                + self.kv_exchange_ms
                + self.rows_exchange_ms;
            let mut rest = self.experts;
            if !self.is_ahead {
                to_copy = u64::from(rest);
            }
            while rest > 0 {
                lanes.copy(
                    &mut ahead,
                    &mut to_copy,
                    if self.is_ahead { 0.0 } else { now_ms },
                );
                let group = lanes.group(&ahead, rest, now_ms);
                for _ in 0..group {
                    now_ms = now_ms.max(ahead.pop_front().unwrap_or(now_ms));
                }
                now_ms += f64::from(group) * self.expert_ms;
                rest -= group;
                lanes.free_ms.extend((0..group).map(|_| now_ms));
            }
        }
        let copies = f64::from(self.experts) * f64::from(self.expert_layers);
        let layers = f64::from(self.dense_layers + self.expert_layers);
        StreamedTime {
            total_ms: now_ms,
            copy_ms: copies * self.copy_ms + layers * self.dense_copy_ms,
            compute_ms: copies * self.expert_ms + layers * self.dense_ms,
            exchange_ms: layers * self.kv_exchange_ms
                + f64::from(self.expert_layers) * self.rows_exchange_ms,
        }
    }
}

/// State of the lanes.
struct Lanes {
    prompt: StreamedPrompt,
    /// Time from which on each free slot may be copied to, in the order in which they are used.
    free_ms: VecDeque<f64>,
    /// Time from which on the link is idle.
    link_ms: f64,
    /// Experts whose copies were begun.
    copied: u64,
    /// Time at which the dense modules of each layer are there, as far as their copies were begun.
    dense_there_ms: Vec<f64>,
    /// Time from which on the slots of dense modules may be copied to.
    dense_free_ms: f64,
}

impl Lanes {
    /// Copies as many experts as there are free slots, none before `from_ms`; adds the ends of the copies to `ahead`.
    fn copy(&mut self, ahead: &mut VecDeque<f64>, to_copy: &mut u64, from_ms: f64) {
        while *to_copy > 0
            && let Some(free_ms) = self.free_ms.pop_front()
        {
            let of_layer = u64::from(self.prompt.experts.max(1));
            let layer = u32::try_from(self.copied / of_layer).unwrap_or(u32::MAX);
            // Experts do not wait for a slot of dense modules.
            if self.dense_free_ms <= self.link_ms.max(free_ms).max(from_ms) {
                self.copy_dense(self.prompt.dense_layers.saturating_add(layer));
            }
            self.copied += 1;
            self.link_ms = self.link_ms.max(free_ms).max(from_ms) + self.prompt.copy_ms;
            ahead.push_back(self.link_ms);
            *to_copy -= 1;
        }
    }

    /// Copies the dense modules of all layers up to this one, where they pass through slots.
    fn copy_dense(&mut self, layer: u32) {
        let layers = self.prompt.dense_layers + self.prompt.expert_layers;
        while self.prompt.dense_copy_ms > 0.0
            && self.dense_there_ms.len() <= layer.min(layers) as usize
        {
            self.link_ms = self.link_ms.max(self.dense_free_ms) + self.prompt.dense_copy_ms;
            self.dense_there_ms.push(self.link_ms);
        }
    }

    /// Computes the dense modules of a layer from `now_ms` on, as soon as they are there; returns when that ends. A module
    /// of the next layer takes the slot that one of this layer leaves.
    fn dense(&mut self, layer: u32, now_ms: f64) -> f64 {
        self.copy_dense(layer);
        let there_ms = self.dense_there_ms.get(layer as usize);
        let end_ms =
            there_ms.map_or(now_ms, |there_ms| now_ms.max(*there_ms)) + self.prompt.dense_ms;
        self.dense_free_ms = end_ms;
        end_ms
    }

    /// Experts that are computed together: those that are there, at most a small part of the ring, so that copies go on.
    fn group(&self, ahead: &VecDeque<f64>, rest: u32, now_ms: f64) -> u32 {
        let first_ms = ahead.front().copied().unwrap_or(now_ms).max(now_ms);
        let there = ahead.iter().take_while(|end_ms| **end_ms <= first_ms);
        let most = (self.prompt.slots / RING_GROUPS).max(1).min(rest) as usize;
        u32::try_from(there.take(most).count()).map_or(1, |count| count.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: StreamedPrompt = StreamedPrompt {
        dense_layers: 1,
        expert_layers: 10,
        experts: 16,
        slots: 16,
        copy_ms: 1.0,
        expert_ms: 0.1,
        dense_ms: 2.0,
        dense_copy_ms: 0.0,
        is_ahead: true,
        kv_exchange_ms: 0.0,
        rows_exchange_ms: 0.0,
    };

    fn total_ms(prompt: StreamedPrompt) -> f64 {
        prompt.simulate().total_ms
    }

    #[test]
    fn the_link_bounds_a_short_prompt_and_arithmetic_a_long_one() {
        // 160 copies, and at most the last expert's arithmetic after them.
        let short = total_ms(PROMPT);
        assert!((160.0..=161.0).contains(&short), "{short}");
        let long = StreamedPrompt {
            expert_ms: 3.0,
            dense_ms: 40.0,
            ..PROMPT
        };
        // 11 dense layers and 160 experts; the copies are behind them.
        let sum = 11.0 * 40.0 + 160.0 * 3.0;
        let time = long.simulate();
        assert!((sum..sum + 1.0).contains(&time.total_ms), "{time:?}");
        assert!((time.compute_ms - sum).abs() < 1e-6, "{time:?}");
        assert!((time.copy_ms - 160.0).abs() < 1e-6, "{time:?}");
    }

    #[test]
    fn a_shorter_ring_is_never_faster_and_never_slower_than_no_overlap() {
        for (expert_ms, dense_ms) in [(0.1, 2.0), (1.0, 2.0), (1.0, 16.0), (4.0, 40.0)] {
            let of = |slots| {
                total_ms(StreamedPrompt {
                    slots,
                    expert_ms,
                    dense_ms,
                    ..PROMPT
                })
            };
            let times = [160, 16, 8, 4, 3, 2].map(of);
            assert!(times.is_sorted(), "{times:?}");
            let apart = 160.0 + 160.0 * expert_ms + 11.0 * dense_ms;
            assert!(times[5] <= apart, "{times:?}, apart {apart}");
            let bound = 160.0_f64.max(160.0 * expert_ms + 11.0 * dense_ms);
            assert!(times[0] >= bound, "{times:?}, bound {bound}");
        }
    }

    #[test]
    fn dense_modules_that_stream_too_cost_their_share_of_the_link_and_hide_behind_arithmetic() {
        let streamed = StreamedPrompt {
            dense_copy_ms: 0.5,
            ..PROMPT
        };
        // 11 copies more, and nothing else is to be seen of them.
        let (stays, streams) = (total_ms(PROMPT), total_ms(streamed));
        let more = streams - stays;
        assert!((5.0..=7.0).contains(&more), "{stays} {streams}");
        assert!((streamed.simulate().copy_ms - 165.5).abs() < 1e-6);
        let long = StreamedPrompt {
            expert_ms: 3.0,
            dense_ms: 40.0,
            ..streamed
        };
        // The first layer's alone is not hidden.
        let sum = 11.0 * 40.0 + 160.0 * 3.0;
        let time = total_ms(long);
        assert!((sum + 0.5..sum + 2.0).contains(&time), "{time}, sum {sum}");
    }

    #[test]
    fn what_peers_exchange_is_not_hidden_and_copies_go_on_meanwhile() {
        let exchanging = StreamedPrompt {
            expert_ms: 3.0,
            dense_ms: 40.0,
            kv_exchange_ms: 1.0,
            rows_exchange_ms: 5.0,
            ..PROMPT
        };
        let time = exchanging.simulate();
        assert!((time.exchange_ms - 61.0).abs() < 1e-6, "{time:?}");
        let sum = 11.0 * 41.0 + 160.0 * 3.0 + 10.0 * 5.0;
        assert!((sum..sum + 1.0).contains(&time.total_ms), "{time:?}");
        // Of a short prompt, whose copies take longer, the ring hides it.
        let short = total_ms(StreamedPrompt {
            expert_ms: 0.1,
            dense_ms: 2.0,
            ..exchanging
        });
        assert!((160.0..162.0).contains(&short), "{short}");
    }

    #[test]
    fn copies_that_wait_for_the_router_do_not_overlap_attention() {
        let few = StreamedPrompt {
            experts: 2,
            is_ahead: false,
            ..PROMPT
        };
        // Each layer: attention, the first copy, the second beside the first expert, the second expert.
        let expected = 2.0 + 10.0 * (2.0 + 2.0 + 0.1);
        assert!((total_ms(few) - expected).abs() < 1e-6);
    }
}
