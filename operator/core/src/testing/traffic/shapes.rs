//! Shapes of load: when requests arrive, how long their prompts and answers are. The same seed gives the same requests.

use std::f64::consts::TAU;

use crate::testing::random::SplitMix;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Seconds from the start.
    pub at_s: f64,
    /// Tokens of its prompt.
    pub prompt_tokens: f64,
    /// Tokens of its answer.
    pub output_tokens: f64,
}

/// A shape of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Arrivals of a constant rate.
    Poisson,
    /// Two minutes at eight times the rate, every twenty minutes.
    Bursts,
    /// A day, in two hours.
    Diurnal,
    /// A rate that grows for an hour and a half, and stays.
    Ramp,
    /// Short prompts, and every five minutes one that takes a prefill worker most of a minute.
    OneLong,
}

impl Shape {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Poisson,
        Self::Bursts,
        Self::Diurnal,
        Self::Ramp,
        Self::OneLong,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Poisson => "Poisson",
            Self::Bursts => "bursts",
            Self::Diurnal => "diurnal",
            Self::Ramp => "ramp",
            Self::OneLong => "one long among short",
        }
    }

    /// Requests a second at a time.
    fn rate(self, at_s: f64) -> f64 {
        match self {
            Self::Poisson => 0.8,
            Self::Bursts if at_s % 1200.0 >= 600.0 && at_s % 1200.0 < 720.0 => 2.4,
            Self::Bursts => 0.3,
            Self::Diurnal => 1.05 - 0.95 * (TAU * at_s / 7200.0).cos(),
            Self::Ramp => 0.1 + 2.3 * (at_s / 5400.0).min(1.0),
            Self::OneLong => 0.6,
        }
    }

    /// The requests of `hours`, in the order of their arrival.
    pub fn requests(self, seed: u64, hours: f64) -> Vec<Request> {
        const MOST_PER_S: f64 = 3.0;
        let mut random = SplitMix(seed);
        let end_s = hours * 3600.0;
        let mut requests = Vec::new();
        let (mut at_s, mut next_long_s) = (0.0, 150.0);
        // Arrivals of the highest rate, thinned to the rate of their time.
        loop {
            at_s += -random.unit().ln() / MOST_PER_S;
            if at_s >= end_s {
                return requests;
            }
            if self == Self::OneLong && at_s >= next_long_s {
                next_long_s += 300.0;
                requests.push(Request {
                    at_s,
                    prompt_tokens: 6000.0,
                    output_tokens: random.output(),
                });
            }
            if random.unit() * MOST_PER_S < self.rate(at_s) {
                let mean = if self == Self::OneLong { 128.0 } else { 256.0 };
                requests.push(Request {
                    at_s,
                    prompt_tokens: random.log_normal(mean, 0.6).clamp(16.0, 4096.0),
                    output_tokens: random.output(),
                });
            }
        }
    }
}

impl SplitMix {
    /// Log-normal with this mean, and this standard deviation of the logarithm.
    fn log_normal(&mut self, mean: f64, sigma: f64) -> f64 {
        let normal = (-2.0 * self.unit().ln()).sqrt() * (TAU * self.unit()).cos();
        mean * (sigma * normal - sigma * sigma / 2.0).exp()
    }

    /// Tokens of an answer: exponential around 150.
    fn output(&mut self) -> f64 {
        (-self.unit().ln() * 150.0).clamp(4.0, 1000.0).round()
    }
}
