//! Requests of Pods that are not ours, as sums: of each Pod only its node and its amounts are kept.

pub mod holdings;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::key::Key;
use crate::observed::{Others, Requests, Sight};
use crate::validate::is_among;

/// Resources that one Pod takes from its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    /// The node that it is bound to.
    pub node: Arc<str>,
    /// Its requests there.
    pub requests: Requests,
}

/// The Pods that are not ours.
#[derive(Debug, Default)]
pub struct Ledger {
    sight: Sight,
    /// Namespaces whose deployments are served; empty: all.
    served: Vec<String>,
    /// Charges by namespace and name.
    pods: HashMap<Arc<str>, HashMap<Box<str>, Charge>>,
    /// Sums by node, with the number of Pods.
    sums: HashMap<Arc<str>, (u32, Sum)>,
}

/// A sum of requests that loses nothing: anything that was added can be subtracted again, however absurd it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    cpu_millis: u128,
    memory_bytes: u128,
    gpus: u64,
}

impl Sum {
    /// Adds a Pod's requests.
    pub fn add(&mut self, requests: Requests) {
        self.cpu_millis += u128::from(requests.cpu_millis);
        self.memory_bytes += u128::from(requests.memory_bytes);
        self.gpus += u64::from(requests.gpus);
    }

    /// Subtracts what was added before.
    pub fn subtract(&mut self, requests: Requests) {
        let less = |sum: u128, part: u64| sum.saturating_sub(u128::from(part));
        self.cpu_millis = less(self.cpu_millis, requests.cpu_millis);
        self.memory_bytes = less(self.memory_bytes, requests.memory_bytes);
        self.gpus = self.gpus.saturating_sub(u64::from(requests.gpus));
    }

    /// The sum; amounts that are too large saturate.
    pub fn total(self) -> Requests {
        Requests::new(
            u64::try_from(self.cpu_millis).unwrap_or(u64::MAX),
            u64::try_from(self.memory_bytes).unwrap_or(u64::MAX),
            u32::try_from(self.gpus).unwrap_or(u32::MAX),
        )
    }
}

impl Ledger {
    /// Sets the namespaces whose deployments are served: their Pods are counted with the deployments.
    pub fn serve(&mut self, namespaces: &[String]) {
        self.served = namespaces.to_vec();
    }

    /// Whether deployments of a namespace are served.
    pub fn is_served(&self, namespace: &str) -> bool {
        is_among(&self.served, namespace)
    }

    /// Records what a Pod takes; `None`: nothing any more. Returns whether its node has more room than before.
    pub fn put(&mut self, pod: &Key, charge: Option<Charge>) -> bool {
        let before = match charge {
            Some(mut charge) => {
                charge.node = self.shared(&charge.node);
                if self.charge(pod) == Some(&charge) {
                    return false;
                }
                let (count, sum) = self.sums.entry(Arc::clone(&charge.node)).or_default();
                *count += 1;
                sum.add(charge.requests);
                let namespace = self.pods.entry(Arc::clone(&pod.namespace)).or_default();
                namespace.insert((*pod.name).into(), charge)
            }
            None => self.remove(pod),
        };
        let Some(before) = before else {
            return false;
        };
        if let Some((count, sum)) = self.sums.get_mut(&before.node) {
            *count -= 1;
            sum.subtract(before.requests);
            if *count == 0 {
                self.sums.remove(&before.node);
            }
        }
        true
    }

    /// Sets whether all Pods are seen. If they are not, those known are forgotten.
    pub fn see(&mut self, sight: Sight) {
        if sight != Sight::All {
            self.pods.clear();
            self.sums.clear();
        }
        self.sight = sight;
    }

    /// Whether all Pods are seen.
    pub fn sight(&self) -> Sight {
        self.sight
    }

    /// Known requests of other Pods.
    pub fn others(&self) -> Others {
        let sums = self.sums.iter();
        Others {
            sight: self.sight,
            requests: sums
                .map(|(node, (_, sum))| (node.to_string(), sum.total()))
                .collect::<BTreeMap<_, _>>(),
        }
    }

    /// The Pods that are counted.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        self.pods.iter().flat_map(|(namespace, pods)| {
            pods.keys().map(|name| Key {
                namespace: Arc::clone(namespace),
                name: (**name).into(),
            })
        })
    }

    fn charge(&self, pod: &Key) -> Option<&Charge> {
        self.pods.get(&pod.namespace)?.get(&*pod.name)
    }

    fn remove(&mut self, pod: &Key) -> Option<Charge> {
        let pods = self.pods.get_mut(&pod.namespace)?;
        let charge = pods.remove(&*pod.name);
        if pods.is_empty() {
            self.pods.remove(&pod.namespace);
        }
        charge
    }

    /// Shares one copy of each node's name.
    fn shared(&self, node: &Arc<str>) -> Arc<str> {
        let known = self.sums.get_key_value(node);
        known.map_or_else(|| Arc::clone(node), |(known, _)| Arc::clone(known))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(node: &str, cpu_millis: u64) -> Option<Charge> {
        Some(Charge {
            node: node.into(),
            requests: Requests {
                cpu_millis,
                ..Requests::default()
            },
        })
    }

    fn cpu(ledger: &Ledger, node: &str) -> Option<u64> {
        let others = ledger.others();
        others.requests.get(node).map(|sum| sum.cpu_millis)
    }

    #[test]
    fn sums_follow_the_pods() {
        let mut ledger = Ledger::default();
        let (a, b) = (Key::new("n", "a"), Key::new("n", "b"));
        assert!(!ledger.put(&a, charge("office", 100)));
        assert!(!ledger.put(&b, charge("office", 50)));
        assert!(!ledger.put(&b, charge("office", 50)), "told twice");
        assert_eq!(cpu(&ledger, "office"), Some(150));
        // A Pod of that name is created again elsewhere.
        assert!(ledger.put(&b, charge("attic", 70)));
        assert_eq!(
            (cpu(&ledger, "office"), cpu(&ledger, "attic")),
            (Some(100), Some(70))
        );
        assert!(ledger.put(&a, None));
        assert_eq!(cpu(&ledger, "office"), None);
        assert!(!ledger.put(&Key::new("n", "unknown"), None));
        ledger.see(Sight::Forbidden);
        assert_eq!(cpu(&ledger, "attic"), None);
        assert_eq!(ledger.keys().count(), 0);
        assert!(!ledger.put(&b, charge("attic", 70)));
        assert_eq!(cpu(&ledger, "attic"), Some(70));
    }

    /// A request for more CPU than a number can hold is possible: a Pod with `nodeName` bypasses the scheduler.
    #[test]
    fn an_absurd_request_leaves_nothing_behind() {
        let mut ledger = Ledger::default();
        let key = |name: &str| Key::new("n", name);
        ledger.put(&key("a"), charge("office", 700));
        ledger.put(&key("absurd"), charge("office", u64::MAX));
        ledger.put(&key("absurd too"), charge("office", u64::MAX));
        assert_eq!(cpu(&ledger, "office"), Some(u64::MAX));
        assert!(ledger.put(&key("absurd"), None));
        assert!(ledger.put(&key("absurd too"), None));
        assert_eq!(cpu(&ledger, "office"), Some(700));
    }
}
