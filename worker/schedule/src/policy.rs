//! Where a prompt is computed: the gateway's routing policy (hybrid MoE paper, section 3.3.2).
//!
//! "Use chunked prefill for short requests (e.g., <2K tokens). For long prefill requests, if there are no decode
//! requests within a short window (e.g., 5 minutes), route to DSLP to maximize throughput; otherwise, route to
//! disaggregated SLP to preserve decode latency." What counts as short is what has to be computed: tokens whose
//! KV is cached where they would be decoded cost nothing.

use std::time::Duration;

/// How a prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// By the decode worker itself, in chunks between its decode rows.
    Chunked,
    /// By a prefill worker; the KV goes to the decode worker. Stream-loading prefill where there is a GPU for it.
    Disaggregated,
    /// By all GPUs together (distributed stream-loading prefill); the decode GPU's work stands still meanwhile.
    Distributed,
}

/// Which routes can be taken now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AvailableRoutes {
    /// A decode worker is up that also prefills.
    pub chunked: bool,
    /// A prefill worker and a decode worker are up.
    pub disaggregated: bool,
    /// The ranks of distributed stream-loading prefill are up.
    pub distributed: bool,
}

impl AvailableRoutes {
    fn has(self, route: Route) -> bool {
        match route {
            Route::Chunked => self.chunked,
            Route::Disaggregated => self.disaggregated,
            Route::Distributed => self.distributed,
        }
    }
}

/// What the decode workers do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeActivity {
    /// Sequences that decode now, or wait to.
    pub active_sequences: usize,
    /// Time since the last one decoded; none if none ever did.
    pub idle: Option<Duration>,
}

/// One decision's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteInput {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of them whose KV the decode worker has.
    pub cached_tokens: usize,
    /// What the decode workers do.
    pub decode: DecodeActivity,
    /// Which routes there are.
    pub available: AvailableRoutes,
}

/// The policy's two figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingPolicy {
    /// Prompts with fewer tokens to compute are chunked.
    pub chunked_below_tokens: usize,
    /// Without decoding for so long, all GPUs may prefill.
    pub idle_window: Duration,
}

impl Default for RoutingPolicy {
    /// The paper's figures: 2K tokens and 5 minutes.
    fn default() -> Self {
        Self {
            chunked_below_tokens: 2048,
            idle_window: Duration::from_secs(300),
        }
    }
}

impl RoutingPolicy {
    /// The route of a prompt: the paper's choice, or the best of those that there are; none when there is none.
    pub fn route(&self, input: &RouteInput) -> Option<Route> {
        use Route::{Chunked, Disaggregated, Distributed};
        let to_compute = input.prompt_tokens.saturating_sub(input.cached_tokens);
        let preferred = if to_compute < self.chunked_below_tokens {
            [Chunked, Disaggregated, Distributed]
        } else if self.is_idle(input.decode) {
            [Distributed, Disaggregated, Chunked]
        } else {
            // Chunks slow the streams in flight down; distributed prefill stops them.
            [Disaggregated, Chunked, Distributed]
        };
        preferred.into_iter().find(|r| input.available.has(*r))
    }

    fn is_idle(&self, decode: DecodeActivity) -> bool {
        decode.active_sequences == 0 && decode.idle.is_none_or(|idle| idle >= self.idle_window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: AvailableRoutes = AvailableRoutes {
        chunked: true,
        disaggregated: true,
        distributed: true,
    };
    const BUSY: DecodeActivity = DecodeActivity {
        active_sequences: 1,
        idle: None,
    };
    const FRESH: DecodeActivity = DecodeActivity {
        active_sequences: 0,
        idle: None,
    };

    fn idle_for(seconds: u64) -> DecodeActivity {
        DecodeActivity {
            active_sequences: 0,
            idle: Some(Duration::from_secs(seconds)),
        }
    }

    fn route(
        prompt: usize,
        cached: usize,
        decode: DecodeActivity,
        available: AvailableRoutes,
    ) -> Option<Route> {
        RoutingPolicy::default().route(&RouteInput {
            prompt_tokens: prompt,
            cached_tokens: cached,
            decode,
            available,
        })
    }

    #[test]
    fn the_papers_three_cases() {
        assert_eq!(route(2047, 0, FRESH, ALL), Some(Route::Chunked));
        assert_eq!(route(2048, 0, FRESH, ALL), Some(Route::Distributed));
        assert_eq!(route(2048, 0, BUSY, ALL), Some(Route::Disaggregated));
    }

    #[test]
    fn the_window_decides_what_idle_means() {
        assert_eq!(
            route(9000, 0, idle_for(299), ALL),
            Some(Route::Disaggregated)
        );
        assert_eq!(route(9000, 0, idle_for(300), ALL), Some(Route::Distributed));
    }

    #[test]
    fn cached_tokens_make_a_prompt_short() {
        assert_eq!(route(32_000, 30_000, BUSY, ALL), Some(Route::Chunked));
        assert_eq!(route(32_000, 29_952, BUSY, ALL), Some(Route::Disaggregated));
        // More cached than asked for, as after a race with the cache: still short.
        assert_eq!(route(100, 200, BUSY, ALL), Some(Route::Chunked));
    }

    #[test]
    fn what_is_missing_is_replaced_by_the_next_best() {
        let no = |r: Route| AvailableRoutes {
            chunked: r != Route::Chunked,
            disaggregated: r != Route::Disaggregated,
            distributed: r != Route::Distributed,
        };
        let fresh_long = route(9000, 0, FRESH, no(Route::Distributed));
        assert_eq!(fresh_long, Some(Route::Disaggregated));
        let busy_long = route(9000, 0, BUSY, no(Route::Disaggregated));
        assert_eq!(busy_long, Some(Route::Chunked));
        let short = route(10, 0, BUSY, no(Route::Chunked));
        assert_eq!(short, Some(Route::Disaggregated));
        assert_eq!(route(10, 0, BUSY, AvailableRoutes::default()), None);
    }
}
