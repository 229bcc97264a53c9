//! `/metrics` of a running deployment, read without an async runtime, so also from inside a stream's callback.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::up::Up;

/// Longest wait for a state.
const PATIENCE: Duration = Duration::from_secs(120);

/// One snapshot of `/metrics`.
#[derive(Clone, Debug)]
pub struct Metrics(String);

impl Up {
    /// Reads all metrics now. Those of workers are a second or two old: they date from the gateway's last scrape of
    /// them.
    ///
    /// # Panics
    /// When the gateway does not answer.
    pub fn metrics(&self) -> Metrics {
        Metrics::of(&self.metrics_base())
    }

    /// Waits until the metrics satisfy `holds`.
    ///
    /// # Panics
    /// When that does not happen in time; `what` is in the message.
    pub fn wait_for(&self, what: &str, holds: impl Fn(&Metrics) -> bool) -> Metrics {
        Metrics::wait_for(&self.metrics_base(), what, holds)
    }
}

impl Metrics {
    /// Reads all metrics at `base` (`http://127.0.0.1:PORT`) now.
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

    /// Waits until the metrics at `base` satisfy `holds`.
    ///
    /// # Panics
    /// When that does not happen in time; `what` is in the message.
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

    /// Returns the names that queries may use: those of gauges, those of counters with `_total`, and of histograms those with
    /// `_bucket`, `_count` and `_sum`.
    pub fn names(&self) -> BTreeSet<String> {
        let lines = self.0.lines();
        let types = lines.filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        types
            .flat_map(|(name, kind)| {
                let suffixes: &[&str] = match kind {
                    "counter" => &["_total"],
                    "histogram" => &["_bucket", "_count", "_sum"],
                    _ => &[""],
                };
                suffixes.iter().map(move |suffix| format!("{name}{suffix}"))
            })
            .collect()
    }

    /// Returns the lines of series whose names begin like this, for messages.
    pub fn about(&self, prefix: &str) -> String {
        let lines = self.0.lines().filter(|line| line.starts_with(prefix));
        lines.map(|line| format!("{line}\n")).collect()
    }

    /// Returns the values of a metric's series that have all of `labels` (`role="decode"`).
    pub fn values(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        self.0
            .lines()
            .filter(|line| line.split(['{', ' ']).next() == Some(name))
            .filter(|line| labels.iter().all(|label| line.contains(label)))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse().ok())
            .collect()
    }

    /// Returns a metric's sum over all series that have all of `labels` (`role="decode"`).
    ///
    /// # Panics
    /// When no series matches.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let series = self.values(name, labels);
        assert!(!series.is_empty(), "no {name}{labels:?} in\n{}", self.0);
        series.iter().sum()
    }

    /// Returns the number of occurrences of an event whose series appears only after the first one.
    pub fn count(&self, name: &str) -> f64 {
        self.values(name, &[]).iter().sum()
    }

    /// Returns an upper bound of a histogram's quantile: the bound of the bucket that it falls in; 0 if there are no
    /// samples.
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

    /// Returns a metric of one rank.
    pub fn of_rank(&self, name: &str, rank: &str) -> f64 {
        self.sum(name, &[&format!("worker=\"{rank}\"")])
    }

    /// Returns a metric summed over all ranks of a role.
    pub fn of_role(&self, name: &str, role: &str) -> f64 {
        self.sum(name, &[&format!("role=\"{role}\"")])
    }
}
