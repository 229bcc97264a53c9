//! The choice of workers, as pure functions of numbers.

/// Facts about a decode worker that the choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Index of the worker in the pool.
    pub index: usize,
    /// Number of requests that this gateway has on it.
    pub in_flight: u32,
    /// Maximum number of those.
    pub capacity: u32,
    /// Number of tokens of the prompt that it has seen before.
    pub matched_tokens: u32,
    /// Whether it just failed this request; another is preferred if there is one.
    pub is_avoided: bool,
}

/// Who computes a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillRoute {
    /// The decode worker, in chunks between its decode steps.
    Decode,
    /// A prefill worker, which hands over the KV cache; the decode worker if there is none.
    Prefill {
        /// Whether its peers are left to decoding. One without peers reads every prompt alone.
        alone: bool,
    },
}

/// Applies the routing policy of the hybrid MoE paper (section 3.3.2) for one pool of each kind: "use chunked prefill
/// for short requests", which are not worth a KV transfer and barely stall decoding; long ones go to prefill workers
/// while there are any. "If there are no decode requests within a short window", all peers of one read the prompt, also on the
/// GPUs that otherwise decode; `is_quiet`: there were none. Only tokens that must be computed count: those whose KV the decode
/// worker has cost nothing.
pub fn choose_prefill_route(
    new_tokens: u32,
    chunked_below_tokens: u32,
    is_quiet: bool,
) -> PrefillRoute {
    if new_tokens < chunked_below_tokens {
        PrefillRoute::Decode
    } else {
        PrefillRoute::Prefill { alone: !is_quiet }
    }
}

/// Chooses the decode worker for a request; `None` if none has room.
///
/// The least loaded wins, unless one that knows the start of the prompt is at most a quarter of its capacity busier:
/// then the longest match among those. Ties go to the lower index, with `turn` rotating the order.
pub fn choose_decode(candidates: &[Candidate], turn: usize) -> Option<usize> {
    let open = |avoided: bool| {
        candidates
            .iter()
            .filter(move |c| c.in_flight < c.capacity && c.is_avoided == avoided)
    };
    let least = |avoided: bool| open(avoided).map(|c| c.in_flight).min();
    let (avoided, least) = match (least(false), least(true)) {
        (Some(least), _) => (false, least),
        (None, Some(least)) => (true, least),
        (None, None) => return None,
    };
    let count = candidates.len().max(1);
    open(avoided)
        .filter(|c| c.in_flight <= least + (c.capacity / 4).max(1))
        .max_by_key(|c| {
            let matched = if c.matched_tokens >= MATCH_WORTH_TOKENS {
                c.matched_tokens
            } else {
                0
            };
            let order = (c.index + count - turn % count) % count;
            (
                matched,
                std::cmp::Reverse(c.in_flight),
                std::cmp::Reverse(order),
            )
        })
        .map(|c| c.index)
}

/// Chooses the prefill worker with the fewest requests; takes `(index, in_flight)`, returns the index.
pub fn choose_prefill(ready: &[(usize, u32)], turn: usize) -> Option<usize> {
    let count = ready.len().max(1);
    ready
        .iter()
        .min_by_key(|(index, in_flight)| (*in_flight, (index + count - turn % count) % count))
        .map(|(index, _)| *index)
}

/// Shortest match that is worth waiting behind others.
const MATCH_WORTH_TOKENS: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(index: usize, in_flight: u32, matched_tokens: u32) -> Candidate {
        Candidate {
            index,
            in_flight,
            capacity: 8,
            matched_tokens,
            is_avoided: false,
        }
    }

    #[test]
    fn the_least_loaded_worker_is_chosen() {
        let all = [candidate(0, 3, 0), candidate(1, 1, 0), candidate(2, 7, 0)];
        assert_eq!(choose_decode(&all, 0), Some(1));
    }

    #[test]
    fn a_known_prefix_outweighs_a_little_load_and_no_more() {
        let near = [candidate(0, 2, 512), candidate(1, 1, 0)];
        assert_eq!(choose_decode(&near, 0), Some(0));
        let far = [candidate(0, 6, 512), candidate(1, 1, 0)];
        assert_eq!(choose_decode(&far, 0), Some(1));
        let short = [candidate(0, 2, 63), candidate(1, 1, 0)];
        assert_eq!(choose_decode(&short, 0), Some(1));
    }

    #[test]
    fn full_workers_are_left_out_and_failed_ones_come_last() {
        assert_eq!(choose_decode(&[candidate(0, 8, 512)], 0), None);
        let failed = Candidate {
            is_avoided: true,
            ..candidate(0, 0, 512)
        };
        assert_eq!(choose_decode(&[failed, candidate(1, 7, 0)], 0), Some(1));
        assert_eq!(choose_decode(&[failed, candidate(1, 8, 0)], 0), Some(0));
    }

    #[test]
    fn equals_take_turns() {
        let all = [candidate(0, 0, 0), candidate(1, 0, 0)];
        assert_eq!(choose_decode(&all, 0), Some(0));
        assert_eq!(choose_decode(&all, 1), Some(1));
        assert_eq!(choose_prefill(&[(0, 0), (1, 0)], 1), Some(1));
        assert_eq!(choose_prefill(&[(0, 0), (1, 1)], 1), Some(0));
        assert_eq!(choose_prefill(&[], 1), None);
    }

    #[test]
    fn long_prompts_go_to_prefill_workers() {
        let together = PrefillRoute::Prefill { alone: false };
        for is_quiet in [true, false] {
            let short = choose_prefill_route(2047, 2048, is_quiet);
            assert_eq!(short, PrefillRoute::Decode);
        }
        assert_eq!(choose_prefill_route(2048, 2048, true), together);
        assert_eq!(choose_prefill_route(1, 0, true), together);
    }

    #[test]
    fn peers_are_left_to_decoding_unless_it_is_quiet() {
        let alone = PrefillRoute::Prefill { alone: true };
        assert_eq!(choose_prefill_route(2048, 2048, false), alone);
    }
}
