//! Resources of nodes that Pods request and hold.

use std::collections::{BTreeMap, BTreeSet};

/// Requests of Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// CPU in thousandths of a CPU.
    pub cpu_millis: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// GPUs from the device plugin.
    pub gpus: u32,
}

impl Requests {
    /// Takes CPU in thousandths of a CPU, bytes of memory, and GPUs.
    pub fn new(cpu_millis: u64, memory_bytes: u64, gpus: u32) -> Self {
        Self {
            cpu_millis,
            memory_bytes,
            gpus,
        }
    }

    /// The sum of each amount.
    pub fn plus(self, other: Self) -> Self {
        self.each(other, u64::saturating_add, u32::saturating_add)
    }

    /// The larger of each amount.
    pub fn max(self, other: Self) -> Self {
        self.each(other, u64::max, u32::max)
    }

    fn each(self, other: Self, wide: fn(u64, u64) -> u64, narrow: fn(u32, u32) -> u32) -> Self {
        Self {
            cpu_millis: wide(self.cpu_millis, other.cpu_millis),
            memory_bytes: wide(self.memory_bytes, other.memory_bytes),
            gpus: narrow(self.gpus, other.gpus),
        }
    }
}

/// Whether the Pods of others can be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sight {
    /// They are not watched, as configured.
    #[default]
    Off,
    /// The operator may not watch them.
    Forbidden,
    /// All of them can be seen.
    All,
}

/// Requests of Pods that belong to no deployment, by node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Others {
    /// Whether they can be seen.
    pub sight: Sight,
    /// Requests by node; empty unless all are seen.
    pub requests: BTreeMap<String, Requests>,
}

impl Others {
    /// Requests to assume on a node; `unseen` if nothing can be seen.
    pub fn on(&self, node: &str, unseen: Requests) -> Requests {
        match self.sight {
            Sight::All => self.requests.get(node).copied().unwrap_or_default(),
            Sight::Off | Sight::Forbidden => unseen,
        }
    }
}

/// Resources of one node that Pods hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Holding {
    /// CPU that they request, in thousandths of a CPU.
    pub cpu_millis: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// GPUs.
    pub gpus: u32,
    /// CPUs held exclusively, by the kernel's number.
    pub exclusive_cpus: Vec<u32>,
    /// UUIDs of GPUs that are claimed, or will be by a plan.
    pub claimed_gpus: BTreeSet<String>,
    /// The part of `memory_bytes` that is memory of the node's virtual device.
    pub virtual_bytes: u64,
}

impl Holding {
    /// The amounts that are requested.
    pub fn requests(&self) -> Requests {
        Requests::new(self.cpu_millis, self.memory_bytes, self.gpus)
    }

    /// Takes away what was added before.
    pub fn subtract(&mut self, other: &Self) {
        let less = |a: u64, b: u64| a.saturating_sub(b);
        self.cpu_millis = less(self.cpu_millis, other.cpu_millis);
        self.memory_bytes = less(self.memory_bytes, other.memory_bytes);
        self.gpus = self.gpus.saturating_sub(other.gpus);
        self.exclusive_cpus
            .retain(|cpu| !other.exclusive_cpus.contains(cpu));
        self.claimed_gpus
            .retain(|uuid| !other.claimed_gpus.contains(uuid));
        self.virtual_bytes = less(self.virtual_bytes, other.virtual_bytes);
    }

    /// Adds another Pod's holding.
    pub fn add(&mut self, other: &Self) {
        let sum = self.requests().plus(other.requests());
        self.cpu_millis = sum.cpu_millis;
        self.memory_bytes = sum.memory_bytes;
        self.gpus = sum.gpus;
        self.exclusive_cpus.extend(&other.exclusive_cpus);
        self.claimed_gpus.extend(other.claimed_gpus.iter().cloned());
        self.virtual_bytes = self.virtual_bytes.saturating_add(other.virtual_bytes);
    }
}
