//! What the names of hosts resolved to, remembered for a while: who asks a proxy for file after file need not resolve the
//! same name before each, and wait for a resolver that knows nothing of the world outside.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time for which an answer counts: that of a short-lived DNS record.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Most names that are remembered: a download asks few hosts, but servers may redirect to as many as they like.
const MOST_NAMES: usize = 64;

/// Addresses by name, with the time at which they were looked up; none where no address was found.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<BTreeMap<String, (Instant, Vec<IpAddr>)>>);

impl Names {
    /// Addresses of a host: what `lookup` finds, or found up to a minute before `now`.
    pub(crate) async fn addresses(
        &self,
        host: &str,
        now: Instant,
        lookup: impl Future<Output = Vec<IpAddr>>,
    ) -> Vec<IpAddr> {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= REMEMBERED;
        if let Some((_, known)) = self.lock().get(host).filter(|(at, _)| !is_old(*at)) {
            return known.clone();
        }
        let found = lookup.await;
        let mut names = self.lock();
        names.retain(|_, (at, _)| !is_old(*at));
        if names.len() >= MOST_NAMES {
            let oldest = names.iter().min_by_key(|(_, (at, _))| *at);
            if let Some(oldest) = oldest.map(|(name, _)| name.clone()) {
                names.remove(&oldest);
            }
        }
        names.insert(host.to_owned(), (now, found.clone()));
        found
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (Instant, Vec<IpAddr>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_is_looked_up_once_a_minute_also_where_it_is_unknown() {
        let names = Names::default();
        let began = Instant::now();
        let lookups = Mutex::new(Vec::new());
        let ask = async |host: &str, after_s: u64, address: Option<&str>| {
            let lookup = async {
                lookups.lock().unwrap().push(host.to_owned());
                address.iter().map(|text| text.parse().unwrap()).collect()
            };
            let now = began + Duration::from_secs(after_s);
            names.addresses(host, now, lookup).await.len()
        };
        assert_eq!(ask("hub", 0, Some("203.0.113.7")).await, 1);
        assert_eq!(ask("nowhere", 10, None).await, 0);
        assert_eq!(ask("hub", 59, None).await, 1);
        assert_eq!(ask("nowhere", 69, Some("203.0.113.7")).await, 0);
        assert_eq!(ask("hub", 60, None).await, 0, "it is looked up again");
        assert_eq!(*lookups.lock().unwrap(), ["hub", "nowhere", "hub"]);
        // A server that redirects to ever more names.
        for number in 0..2 * MOST_NAMES {
            ask(&format!("{number}.example"), 61, None).await;
        }
        assert!(names.lock().len() <= MOST_NAMES);
    }
}
