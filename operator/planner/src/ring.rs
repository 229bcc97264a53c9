//! Length of the experts' ring by the length of a prompt (hybrid MoE paper, section 3.1).

use hearth_crds::PlanRingLength;

/// Most lengths that a ring has: each is half of the one before, down to the smallest.
const MOST_LENGTHS: usize = 16;

/// Lengths of a ring: the first that is for prompts of so many tokens, in ascending order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RingLengths {
    lengths: [PlanRingLength; MOST_LENGTHS],
    count: usize,
}

impl RingLengths {
    /// Makes a ring of at most `most` slots and at least `least`: halved as often as a prompt needs, `longest` says the
    /// longest prompt beside which so many slots have room. Prompts of more than `gains_until` tokens get the smallest
    /// ring, since a longer one would save them nothing; no prompt is longer than `context`.
    pub(crate) fn new(
        (most, least): (u32, u32),
        context: u32,
        gains_until: u32,
        longest: impl Fn(u32) -> u32,
    ) -> Self {
        let mut ring = Self {
            lengths: [PlanRingLength {
                prompt_tokens: 0,
                slots: 0,
            }; MOST_LENGTHS],
            count: 0,
        };
        let mut slots = most.max(least);
        loop {
            let is_least = slots <= least || ring.count + 1 == MOST_LENGTHS;
            let prompt_tokens = match is_least {
                true => context,
                false => match longest(slots) {
                    // Memory that no prompt needs.
                    fits if fits >= context && slots >= most => context,
                    fits => fits.min(gains_until),
                },
            };
            let slots_then = if is_least { least } else { slots };
            if prompt_tokens > ring.last().map_or(0, |last| last.prompt_tokens) {
                ring.lengths[ring.count] = PlanRingLength {
                    prompt_tokens,
                    slots: slots_then,
                };
                ring.count += 1;
            }
            if is_least || prompt_tokens >= context {
                return ring;
            }
            slots = (slots / 2).max(least);
        }
    }

    fn last(&self) -> Option<&PlanRingLength> {
        self.lengths().last()
    }

    /// The lengths, at least one.
    pub(crate) fn lengths(&self) -> &[PlanRingLength] {
        &self.lengths[..self.count]
    }

    /// Slots for a prompt of `tokens`.
    pub(crate) fn at(&self, tokens: u32) -> u32 {
        let mut lengths = self.lengths().iter();
        let length = lengths.find(|length| length.prompt_tokens >= tokens);
        length.or(self.last()).map_or(0, |length| length.slots)
    }

    /// Slots of the longest ring.
    pub(crate) fn most(&self) -> u32 {
        self.lengths().first().map_or(0, |length| length.slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(ring: &RingLengths) -> Vec<(u32, u32)> {
        let lengths = ring.lengths().iter();
        lengths.map(|l| (l.prompt_tokens, l.slots)).collect()
    }

    #[test]
    fn a_ring_shrinks_as_far_as_memory_demands_and_to_the_smallest_past_the_turning_point() {
        // A slot takes the room of 100 tokens, and there is room for 2,000 tokens in all.
        let longest = |slots: u32| 2000_u32.saturating_sub(100 * slots);
        let ring = RingLengths::new((16, 2), 1800, u32::MAX, longest);
        assert_eq!(lengths(&ring), [(400, 16), (1200, 8), (1600, 4), (1800, 2)]);
        assert_eq!(
            [1, 400, 401, 1700, 9999].map(|t| ring.at(t)),
            [16, 16, 8, 2, 2]
        );
        assert_eq!(ring.most(), 16);
        let ring = RingLengths::new((16, 2), 1800, 900, longest);
        assert_eq!(lengths(&ring), [(400, 16), (900, 8), (1800, 2)]);
        let ring = RingLengths::new((16, 2), 1800, 300, longest);
        assert_eq!(lengths(&ring), [(300, 16), (1800, 2)]);
    }

    #[test]
    fn a_ring_that_has_room_beside_every_prompt_keeps_its_length() {
        let ring = RingLengths::new((16, 2), 300, 10, |_| 5000);
        assert_eq!(lengths(&ring), [(300, 16)]);
        let ring = RingLengths::new((1, 2), 300, 10, |_| 0);
        assert_eq!(lengths(&ring), [(300, 2)]);
        let ring = RingLengths::new((16, 2), 300, 0, |_| 200);
        assert_eq!(lengths(&ring), [(300, 2)]);
    }
}
