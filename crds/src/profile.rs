//! `NodeProfile`: the profiler's measurements of one node. Cluster-scoped, one per node, named after it.

use serde::{Deserialize, Serialize};

use crate::store::{NodeModel, NodeStore};

/// Settings for one node: none yet. Measurements are in the status; profiles of earlier versions have them here, and
/// they are read from here until the node is measured again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::CustomResource, kube::KubeSchema))]
#[cfg_attr(
    feature = "kube",
    kube(
        group = "hearth.dev",
        version = "v1alpha1",
        kind = "NodeProfile",
        category = "hearth",
        status = "NodeProfileStatus",
        derive = "PartialEq",
        doc = "What Hearth measured on one node: CPUs, memory, GPUs, disks and links; and the models that its store has.",
        printcolumn(
            name = "Memory",
            type_ = "integer",
            json_path = ".status.memory.totalBytes"
        ),
        printcolumn(
            name = "Available",
            type_ = "integer",
            json_path = ".status.memory.availableBytes"
        ),
        printcolumn(
            name = "Read-GBps",
            type_ = "number",
            json_path = ".status.memory.readAllThreadsGbps"
        ),
        printcolumn(name = "GPU", type_ = "string", json_path = ".status.gpus[0].name"),
        printcolumn(name = "Models", type_ = "integer", json_path = ".status.store.models"),
        printcolumn(name = "Measured", type_ = "date", json_path = ".status.measuredAt"),
    )
)]
#[cfg_attr(feature = "kube", schemars(extend("x-kubernetes-preserve-unknown-fields" = true)))]
pub struct NodeProfileSpec {}

/// Hardware of one node and its speed. All rates are measured, except most of those of GPUs, which are estimates; a
/// device that is missing is an empty list.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct NodeProfileStatus {
    /// The node's name.
    pub node: String,
    /// Logical CPUs that may be used, by ascending id.
    pub cpus: Vec<CpuProfile>,
    /// Instruction sets of the CPUs.
    pub isa: IsaProfile,
    /// NUMA nodes, by ascending id; at least one.
    pub numa_nodes: Vec<NumaNodeProfile>,
    /// Memory of the whole node.
    pub memory: MemoryProfile,
    /// Arithmetic of the CPUs.
    pub compute: ComputeProfile,
    /// GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuProfile>,
    /// Disks that hold models or KV.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskProfile>,
    /// Links to other nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkProfile>,
    /// Time of the measurement (RFC 3339).
    #[cfg_attr(feature = "kube", schemars(extend("format" = "date-time")))]
    pub measured_at: String,
    /// Share of the CPUs' time that other programs had during the measurement, in percent: rates are lower than the
    /// machine can reach. Unset: the machine was quiet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy_percent: Option<u32>,
    /// Highest `minVersion` of plans that workers of the version that made this profile read: agents have the image of
    /// the workers. Unset in profiles of versions that read 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reader_version: Option<u32>,
    /// What the node's store has. Unset if its agent is of an earlier version, or cannot read the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<NodeStore>,
    /// Models that it has and that are fetched, by source, at most 32; without those that only one namespace may have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<NodeModel>,
}

impl NodeProfileStatus {
    /// The measurements alone: plans take no notice of what else the node's store has.
    #[must_use]
    pub fn without_store(self) -> Self {
        Self {
            store: None,
            models: Vec::new(),
            ..self
        }
    }

    /// Highest `minVersion` of plans that the node's workers read.
    pub fn reads_up_to(&self) -> u32 {
        self.reader_version.unwrap_or(2)
    }
}

/// One logical CPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct CpuProfile {
    /// The kernel's number of the CPU.
    pub id: u32,
    /// The core that it belongs to, unique in the node: siblings of one core share it.
    pub core: u32,
    /// The NUMA node that it belongs to.
    pub numa_node: u32,
    /// Highest clock in MHz, 0 when unknown.
    #[serde(default)]
    pub max_mhz: u32,
    /// Private cache of the core in bytes (L2), 0 when unknown.
    #[serde(default)]
    pub cache_bytes: u64,
}

/// Instruction sets that all CPUs of the node have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct IsaProfile {
    /// AVX2 with FMA.
    #[serde(default)]
    pub avx2: bool,
    /// AVX-512 F.
    #[serde(default)]
    pub avx512f: bool,
    /// AVX-512 BW.
    #[serde(default)]
    pub avx512bw: bool,
    /// AVX-512 VBMI.
    #[serde(default)]
    pub avx512vbmi: bool,
    /// AVX-512 BF16.
    #[serde(default)]
    pub avx512bf16: bool,
    /// AVX-512 VNNI.
    #[serde(default)]
    pub avx512vnni: bool,
    /// AMX with bfloat16 tiles.
    #[serde(default)]
    pub amx: bool,
    /// NEON (aarch64).
    #[serde(default)]
    pub neon: bool,
}

/// One NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct NumaNodeProfile {
    /// The kernel's number of the NUMA node.
    pub id: u32,
    /// Its CPUs.
    pub cpus: Vec<u32>,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Free and reclaimable memory in bytes.
    pub free_bytes: u64,
    /// Read bandwidth from its own CPUs, all together, in GB/s (10⁹ bytes a second).
    pub read_gbps: f64,
}

/// Memory of the whole node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct MemoryProfile {
    /// All of it in bytes; in a limited container, the limit.
    pub total_bytes: u64,
    /// Memory available to a new program, page cache counted as free, in bytes.
    pub available_bytes: u64,
    /// The least that was available at any time of the last `leastOverSeconds`, in bytes: plans leave the rest to the
    /// programs that took it, where they fit without it. Unset if it was not watched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_available_bytes: Option<u64>,
    /// How long it was watched, in seconds, at most a day; renewed when something else is.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub least_over_seconds: u32,
    /// Read bandwidth of one thread in GB/s.
    pub read_one_thread_gbps: f64,
    /// Read bandwidth of one thread on each core in GB/s.
    pub read_all_threads_gbps: f64,
}

/// Arithmetic of the CPUs, in GFLOP/s (a multiply-add counts as two).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct ComputeProfile {
    /// Products of bfloat16 weights with f32 activations, one thread: what prefill runs.
    pub bf16_one_thread_gflops: f64,
    /// Products of bfloat16 weights with f32 activations, one thread on each core.
    pub bf16_all_threads_gflops: f64,
    /// Fused multiply-adds of float32, one thread.
    pub f32_one_thread_gflops: f64,
    /// Fused multiply-adds of float32, one thread on each core.
    pub f32_all_threads_gflops: f64,
    /// Products of FP8 weights with a scale per 128×128 block and f32 activations, one thread; 0 if they were not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub fp8_one_thread_gflops: f64,
    /// The same, one thread on each core.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub fp8_all_threads_gflops: f64,
    /// Products of float16 weights with f32 activations, one thread; 0 if they were not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub f16_one_thread_gflops: f64,
    /// The same, one thread on each core.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub f16_all_threads_gflops: f64,
    /// Products of float32 weights with f32 activations, one thread; 0 if they were not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub f32_weights_one_thread_gflops: f64,
    /// The same, one thread on each core.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub f32_weights_all_threads_gflops: f64,
}

/// One GPU. Values that the driver does not report are unset, or 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct GpuProfile {
    /// The driver's UUID, such as `GPU-8f3c…`.
    pub uuid: String,
    /// Its product name.
    pub name: String,
    /// Its memory in bytes.
    pub memory_bytes: u64,
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// The CUDA compute capability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<ComputeCapability>,
    /// The NUMA node that it is attached to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// Its PCIe link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieLink>,
    /// Bandwidth of its PCIe link in one direction in GB/s: an estimate from the highest generation and width.
    #[serde(default)]
    pub pcie_gbps: f64,
    /// Read bandwidth of its memory in GB/s: measured with a product of one row, or an estimate from memory clock and bus
    /// width.
    #[serde(default)]
    pub read_gbps: f64,
    /// Dense products of bfloat16 with f32 sums on its tensor cores in GFLOP/s: measured, or an estimate of the peak from
    /// the number of multiprocessors and their highest clock.
    #[serde(default)]
    pub bf16_gflops: f64,
    /// Measured products of FP8 weights with a scale per 128×128 block, in GFLOP/s; 0 if they were not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub fp8_gflops: f64,
    /// Measured products of float16 weights, in GFLOP/s; 0 if they were not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub f16_gflops: f64,
    /// Measured products of float32 weights, in GFLOP/s; 0 if they were not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub f32_weights_gflops: f64,
    /// Measured rate of copies from the node's memory to the GPU's, in GB/s; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub copy_gbps: f64,
    /// The same while the node's CPUs read memory as fast as they can, as they do when they decode; 0 if it was not
    /// measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub copy_beside_reads_gbps: f64,
    /// Measured time that a small operation takes on it, in microseconds; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub operation_us: f64,
    /// Measured time to hand a row of activations and a choice of experts to a thread of the host, and a row back, in
    /// microseconds; 0 if it was not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub exchange_us: f64,
    /// Power limit in watts.
    #[serde(default)]
    pub power_limit_watts: u32,
    /// The virtual device that stands for a GPU, as the worker's `--device` takes it: its rates are measured ones. Unset
    /// for a real GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtual_device: Option<String>,
    /// Whether a device plugin hands the virtual device out, as it does a real GPU, to one container alone; unset: ranks
    /// share it as they fit. Of a real GPU the cluster says who hands it out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_device_plugin: bool,
    /// Reason workers cannot compute on it, such as a driver that is too old; unset if they can, as far as is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub obstacle: Option<String>,
}

impl GpuProfile {
    /// Takes the rates of one that was measured.
    pub fn take_rates(&mut self, measured: &Self) {
        self.copy_gbps = measured.copy_gbps;
        self.copy_beside_reads_gbps = measured.copy_beside_reads_gbps;
        self.read_gbps = measured.read_gbps;
        self.bf16_gflops = measured.bf16_gflops;
        self.fp8_gflops = measured.fp8_gflops;
        self.f16_gflops = measured.f16_gflops;
        self.f32_weights_gflops = measured.f32_weights_gflops;
        self.operation_us = measured.operation_us;
        self.exchange_us = measured.exchange_us;
    }

    /// Whether it is a virtual device that nothing hands out.
    pub fn is_shared(&self) -> bool {
        self.virtual_device.is_some() && !self.from_device_plugin
    }

    /// Whether its rates were measured; else they are estimates.
    pub fn is_measured(&self) -> bool {
        self.operation_us > 0.0
    }
}

fn is_unmeasured(rate: &f64) -> bool {
    *rate == 0.0
}

fn is_zero(seconds: &u32) -> bool {
    *seconds == 0
}

/// CUDA compute capability, such as 8.9; ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct ComputeCapability {
    /// The generation.
    pub major: u32,
    /// The revision within it.
    pub minor: u32,
}

impl std::fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A PCIe link. A GPU lowers the current generation while it idles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct PcieLink {
    /// The generation at the time of measuring.
    pub generation: u32,
    /// Lanes at the time of measuring.
    pub width: u32,
    /// The highest generation that GPU and slot have in common.
    pub max_generation: u32,
    /// The most lanes that GPU and slot have in common.
    pub max_width: u32,
}

/// One disk, by a directory on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct DiskProfile {
    /// The directory that was measured.
    pub path: String,
    /// Sequential read bandwidth past the page cache in GB/s.
    pub read_gbps: f64,
    /// The same through the page cache, which is asked ahead of what is read, as weights that exceed memory arrive; 0 if it
    /// was not measured.
    #[serde(default, skip_serializing_if = "is_unmeasured")]
    pub mapped_read_gbps: f64,
    /// Free bytes of its file system.
    pub free_bytes: u64,
    /// Bytes of the directory's own files that the page cache held, by samples; unset when that was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_bytes: Option<u64>,
}

/// One link to another node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "kube", derive(kube::KubeSchema))]
#[serde(rename_all = "camelCase")]
pub struct LinkProfile {
    /// The other node's name.
    pub peer: String,
    /// Bandwidth in GB/s (10⁹ bytes a second, not bits).
    pub gbps: f64,
    /// Round trip in microseconds.
    pub rtt_us: f64,
}

impl LinkProfile {
    /// Whether both values can be those of a link, from a kilobyte a second and up to ten minutes: what an agent says, or
    /// a file, may be anything.
    pub fn is_possible(&self) -> bool {
        // A comparison with NaN is false.
        (1e-6..=1e6).contains(&self.gbps) && (0.0..=6e8).contains(&self.rtt_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_above_zero_are_rates_of_links() {
        let is_possible = |gbps, rtt_us| {
            let peer = "attic".to_owned();
            LinkProfile { peer, gbps, rtt_us }.is_possible()
        };
        assert!(is_possible(0.117, 300.0) && is_possible(100.0, 0.0));
        for odd in [0.0, -0.117, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
            assert!(!is_possible(odd, 300.0), "{odd} GB/s");
        }
        for odd in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(!is_possible(0.117, odd), "{odd} µs");
        }
    }
}
