//! Limits on fetching and keeping models, and how long a failure waits.

use std::sync::Arc;
use std::time::Duration;

use hearth_fetch::{AddressPolicy, Egress, FaultOrigin, FetchOptions, Owner, Throttle};
use ipnet::IpNet;

/// Longest time that a failure is reported before the next call tries again.
pub(super) const MOST_WAIT: Duration = Duration::from_secs(6 * 3600);

/// Limits on fetching and keeping models.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// Name of the node.
    pub(super) node: String,
    /// Percentage of the disk to leave free.
    pub(super) disk_reserve: u8,
    /// Most bytes of models and parts; `None` for as many as the disk has.
    pub(super) quota_bytes: Option<u64>,
    /// Time for which a model stays after it was last named, even if its space is needed.
    pub(super) recent: Duration,
    /// Rate of all downloads.
    pub(super) throttle: Option<Arc<Throttle>>,
    /// How servers are reached.
    pub(super) egress: Egress,
    /// Address ranges that may be fetched from even though they are the node's own, link-local or the cluster's.
    pub(super) allow_ranges: Vec<IpNet>,
    /// Time that a model is kept after it was last named, unless its space is needed.
    pub(super) keep: Duration,
    /// See [`FetchOptions::private_patience`].
    pub(super) private_patience: Duration,
}

impl Limits {
    /// For one fetch, which asks no server in these ranges.
    pub(super) fn options(&self, cluster_ranges: Vec<IpNet>) -> FetchOptions {
        FetchOptions {
            reserve_percent: self.disk_reserve,
            quota_bytes: self.quota_bytes,
            recent: self.recent,
            throttle: self.throttle.clone(),
            owner: Owner::Node(self.node.clone()),
            private_patience: self.private_patience,
            egress: self.egress.clone(),
            address_policy: AddressPolicy::outside(cluster_ranges, self.allow_ranges.clone()),
            ..FetchOptions::default()
        }
    }

    /// Time that a failure is reported before the next call tries again. A failure of content is found out only by a
    /// whole download; a new checksum is another key and need not wait. A failure whose details are withheld waits
    /// equally long whatever it was, and not long, since the usual cause is a server at home that was briefly off. But
    /// the wait is at least twice the time of a try that was entirely in vain (`wasted`), or the wrong archive would
    /// be downloaded endlessly.
    pub(super) fn wait_after(
        &self,
        fault_origin: FaultOrigin,
        failures: u32,
        wasted: Duration,
    ) -> Duration {
        let (first, most) = match fault_origin {
            FaultOrigin::Content => (Duration::from_secs(600), MOST_WAIT),
            FaultOrigin::Unknown => (
                (4 * self.private_patience).max(2 * wasted),
                (5 * self.private_patience).max(2 * wasted),
            ),
            FaultOrigin::Request | FaultOrigin::Remote | FaultOrigin::Local => {
                (Duration::from_secs(5), Duration::from_secs(300))
            }
        };
        let doublings = failures.saturating_sub(1).min(16);
        first
            .saturating_mul(1 << doublings)
            .min(most)
            .min(MOST_WAIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_costs_a_download_waits_longer() {
        let limits = Limits {
            node: "attic".to_owned(),
            disk_reserve: 0,
            quota_bytes: None,
            recent: Duration::ZERO,
            throttle: None,
            egress: Egress::default(),
            allow_ranges: Vec::new(),
            keep: Duration::ZERO,
            private_patience: Duration::from_secs(60),
        };
        let seconds = |fault_origin, failures| {
            limits
                .wait_after(fault_origin, failures, Duration::ZERO)
                .as_secs()
        };
        assert_eq!(
            [1, 2, 3, 40].map(|n| seconds(FaultOrigin::Unknown, n)),
            [240, 300, 300, 300]
        );
        let hour = Duration::from_secs(3600);
        assert_eq!(limits.wait_after(FaultOrigin::Unknown, 3, hour), 2 * hour);
        assert_eq!(
            [1, 2, 3, 40].map(|n| seconds(FaultOrigin::Remote, n)),
            [5, 10, 20, 300]
        );
        assert_eq!(
            [1, 2, 40].map(|n| seconds(FaultOrigin::Content, n)),
            [600, 1200, 21_600]
        );
    }
}
