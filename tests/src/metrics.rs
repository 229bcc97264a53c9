//! `/metrics` of a running deployment, read without an async runtime: from within a stream's callback too.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::up::Up;

/// How long a state is waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// One look at `/metrics`.
#[derive(Clone, Debug)]
pub struct Metrics(String);

impl Up {
    /// All metrics now. Those of workers are as old as the gateway's last look at them: a second or two.
    ///
    /// # Panics
    /// When the gateway does not answer.
    pub fn metrics(&self) -> Metrics {
        Metrics::of(&self.metrics_base())
    }

    /// Waits until `holds` of the metrics.
    ///
    /// # Panics
    /// When it does not come to that in time; `what` is in the message.
    pub fn wait_for(&self, what: &str, holds: impl Fn(&Metrics) -> bool) -> Metrics {
        Metrics::wait_for(&self.metrics_base(), what, holds)
    }
}

impl Metrics {
    /// All metrics at `base` (`http://127.0.0.1:PORT`) now.
    ///
    /// # Panics
    /// When the gateway does not answer.
    pub fn of(base: &str) -> Self {
        let address = base.trim_start_matches("http://");
        let exchange = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        Self(exchange().unwrap_or_else(|error| panic!("/metrics: {error}")))
    }

    /// Waits until `holds` of the metrics at `base`.
    ///
    /// # Panics
    /// When it does not come to that in time; `what` is in the message.
    pub fn wait_for(base: &str, what: &str, holds: impl Fn(&Self) -> bool) -> Self {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let metrics = Self::of(base);
            if holds(&metrics) {
                return metrics;
            }
            assert!(
                Instant::now() < deadline,
                "waited in vain: {what}\n{}",
                metrics.0
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Values of a metric's series that have each of `labels` (`role="decode"`).
    pub fn values(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        self.0
            .lines()
            .filter(|line| line.split(['{', ' ']).next() == Some(name))
            .filter(|line| labels.iter().all(|label| line.contains(label)))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse().ok())
            .collect()
    }

    /// Sum of a metric over all series that have each of `labels` (`role="decode"`).
    ///
    /// # Panics
    /// When there is none.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let series = self.values(name, labels);
        assert!(!series.is_empty(), "no {name}{labels:?} in\n{}", self.0);
        series.iter().sum()
    }

    /// How often something happened that has no series before it first does.
    pub fn count(&self, name: &str) -> f64 {
        self.values(name, &[]).iter().sum()
    }

    /// An upper bound of a histogram's quantile: that of the bucket that it lies in; 0 without any count.
    pub fn quantile(&self, name: &str, share: f64) -> f64 {
        let bucket = format!("{name}_bucket");
        let bounds = self.0.lines().filter_map(|line| {
            let labels = line.strip_prefix(&bucket)?;
            let bound = labels.split("le=\"").nth(1)?.split('"').next()?;
            let count: f64 = line.rsplit_once(' ')?.1.parse().ok()?;
            Some((bound.parse().unwrap_or(f64::INFINITY), count))
        });
        let bounds: Vec<(f64, f64)> = bounds.collect();
        let wanted = share * bounds.last().map_or(0.0, |(_, count)| *count);
        let found = bounds
            .iter()
            .find(|(_, count)| *count > 0.0 && *count >= wanted);
        found.map_or(0.0, |(bound, _)| *bound)
    }

    /// A metric of one rank.
    pub fn of_rank(&self, name: &str, rank: &str) -> f64 {
        self.sum(name, &[&format!("worker=\"{rank}\"")])
    }

    /// A metric of all ranks of a role.
    pub fn of_role(&self, name: &str, role: &str) -> f64 {
        self.sum(name, &[&format!("role=\"{role}\"")])
    }
}
