//! The queueing model: how long a prompt waits for one of several prefill workers, and how many streams run at once on
//! decode workers whose steps grow with their batch.

/// Probability that an arrival has to wait for one of `servers`, of which `offered` are busy on average: Erlang's C
/// formula. 1 where the offered load is all that they can do, or more.
pub fn waits(servers: u32, offered: f64) -> f64 {
    if offered <= 0.0 {
        return 0.0;
    }
    let count = f64::from(servers);
    if offered >= count {
        return 1.0;
    }
    // Erlang's B formula by its recursion, which neither overflows nor cancels.
    let blocked = (1..=servers).fold(1.0, |blocked, server| {
        let load = offered * blocked;
        load / (f64::from(server) + load)
    });
    let utilisation = offered / count;
    blocked / (1.0 - utilisation * (1.0 - blocked))
}

/// Probability that an arrival waits longer than `limit_s` for one of `servers`, whose service takes `service_s` with a
/// squared coefficient of variation of `cv2`. Exponential in the limit, with the decay rate of heavy traffic
/// (Kingman); exact for exponential service (`cv2` is 1).
pub fn waits_longer(servers: u32, offered: f64, service_s: f64, cv2: f64, limit_s: f64) -> f64 {
    let waits = waits(servers, offered);
    if waits >= 1.0 || service_s <= 0.0 {
        return waits;
    }
    let spare = f64::from(servers) - offered;
    let decay_per_s = 2.0 * spare / (service_s * (1.0 + cv2.max(0.0)));
    waits * (-decay_per_s * limit_s.max(0.0)).exp()
}

/// Time of a decode step by the number of streams in it: a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Milliseconds without any stream: the part that does not depend on their number.
    pub base_ms: f64,
    /// Milliseconds that each stream adds.
    pub stream_ms: f64,
}

impl StepTime {
    /// The line through a step of one stream and one of `batch` streams; flat if the latter takes no longer.
    pub fn through(one_ms: f64, batch: f64, batch_ms: f64) -> Self {
        let stream_ms = match batch > 1.0 {
            true => ((batch_ms - one_ms) / (batch - 1.0)).clamp(0.0, one_ms.max(0.0)),
            false => 0.0,
        };
        Self {
            base_ms: (one_ms - stream_ms).max(0.0),
            stream_ms,
        }
    }

    /// Milliseconds of a step with that many streams.
    pub fn at(self, streams: f64) -> f64 {
        self.base_ms + self.stream_ms * streams.max(0.0)
    }

    /// The same line, all of it by this factor.
    pub fn scaled(self, factor: f64) -> Self {
        Self {
            base_ms: self.base_ms * factor,
            stream_ms: self.stream_ms * factor,
        }
    }

    /// Streams that run at once on `workers` if `arrivals_per_s` bring `tokens` each, by Little's law: a stream lasts for
    /// its tokens, and its step for those beside it. `None` if the streams become more and more.
    pub fn streams(self, workers: u32, arrivals_per_s: f64, tokens: f64) -> Option<f64> {
        let tokens_per_ms = arrivals_per_s * tokens / 1e3;
        let left = 1.0 - tokens_per_ms * self.stream_ms / f64::from(workers.max(1));
        (left > 0.0).then(|| tokens_per_ms * self.base_ms / left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_makes_wait_as_often_as_it_is_busy() {
        for offered in [0.1, 0.5, 0.9] {
            assert!((waits(1, offered) - offered).abs() < 1e-12, "{offered}");
        }
        assert_eq!(waits(3, 0.0), 0.0);
        assert_eq!(waits(3, 3.0), 1.0);
        assert_eq!(waits(0, 1.0), 1.0);
    }

    #[test]
    fn several_servers_agree_with_the_tables() {
        // Two servers of which one is busy: C(2, 1) = 1/3. Ten of which eight are: 0.409.
        assert!((waits(2, 1.0) - 1.0 / 3.0).abs() < 1e-12);
        assert!((waits(10, 8.0) - 0.409).abs() < 1e-3);
        let mut before = 1.0;
        for servers in 4..100 {
            let now = waits(servers, 3.5);
            assert!(now <= before, "{servers}");
            before = now;
        }
    }

    #[test]
    fn long_waits_are_rarer_and_uneven_service_makes_them_more_frequent() {
        // One exponential server, half busy: P(W > t) = 0.5 exp(-t/2).
        let exact = 0.5 * (-1.0_f64).exp();
        assert!((waits_longer(1, 0.5, 1.0, 1.0, 2.0) - exact).abs() < 1e-12);
        assert!(waits_longer(1, 0.5, 1.0, 9.0, 2.0) > exact);
        assert!(waits_longer(2, 0.5, 1.0, 1.0, 2.0) < exact);
        assert_eq!(waits_longer(1, 2.0, 1.0, 1.0, 1e9), 1.0);
    }

    #[test]
    fn streams_follow_from_arrivals_and_the_step_that_they_lengthen() {
        let flat = StepTime::through(20.0, 1.0, 20.0);
        // Two a second of 100 tokens of 20 ms: four at once.
        assert_eq!(flat.streams(1, 2.0, 100.0), Some(4.0));
        let steep = StepTime::through(20.0, 8.0, 90.0);
        assert_eq!(
            steep,
            StepTime {
                base_ms: 10.0,
                stream_ms: 10.0
            }
        );
        // Half the step is for the stream itself: with one worker 2 streams, with more fewer.
        assert_eq!(steep.streams(1, 1.0, 50.0), Some(1.0));
        assert!(steep.streams(2, 1.0, 50.0) < steep.streams(1, 1.0, 50.0));
        assert_eq!(steep.streams(1, 2.0, 50.0), None);
        assert_eq!(steep.at(3.0), 40.0);
    }
}
