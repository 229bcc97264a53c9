//! Machines and models shared by the planner's tests.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

pub mod advice;
pub mod rings;

use std::collections::{BTreeMap, BTreeSet};

use hearth_crds::{
    ComputeCapability, ComputeProfile, CpuProfile, DiskProfile, GpuProfile,
    InferenceDeploymentSpec, IsaProfile, MemoryProfile, NodeProfileStatus, NumaNodeProfile,
    READER_VERSION,
};
use hearth_crds::{KvShape, ModelFacts, ModuleBytes};
use hearth_planner::{CpuOffer, CpuRoom, GpuOffer, PlanInput};

pub const GIB: u64 = 1 << 30;
pub const MIB: u64 = 1 << 20;

/// A machine of `sockets × cores` cores with `smt` threads each; rates are per thread, core and socket.
pub struct Machine {
    pub name: &'static str,
    pub sockets: u32,
    pub cores: u32,
    pub smt: u32,
    pub available_bytes: u64,
    pub one_thread_gbps: f64,
    pub socket_gbps: f64,
    pub core_gflops: f64,
}

impl Machine {
    pub fn profile(&self) -> NodeProfileStatus {
        let cores = self.sockets * self.cores;
        let cpus: Vec<CpuProfile> = (0..cores * self.smt)
            .map(|id| {
                let core = id % cores;
                CpuProfile {
                    id,
                    core,
                    numa_node: core / self.cores,
                    max_mhz: 4200,
                    cache_bytes: 2 * MIB,
                }
            })
            .collect();
        let numa_nodes = (0..self.sockets)
            .map(|id| NumaNodeProfile {
                id,
                cpus: cpus
                    .iter()
                    .filter(|cpu| cpu.numa_node == id)
                    .map(|cpu| cpu.id)
                    .collect(),
                memory_bytes: self.available_bytes / u64::from(self.sockets),
                free_bytes: self.available_bytes / u64::from(self.sockets),
                read_gbps: self.socket_gbps,
            })
            .collect();
        NodeProfileStatus {
            node: self.name.to_owned(),
            cpus,
            isa: IsaProfile {
                avx2: true,
                avx512f: true,
                avx512bw: true,
                avx512bf16: true,
                ..IsaProfile::default()
            },
            numa_nodes,
            memory: MemoryProfile {
                total_bytes: self.available_bytes + GIB,
                available_bytes: self.available_bytes,
                least_available_bytes: None,
                least_over_seconds: 0,
                read_one_thread_gbps: self.one_thread_gbps,
                read_all_threads_gbps: self.socket_gbps * f64::from(self.sockets),
            },
            compute: ComputeProfile {
                // Products reach less than half of a core's peak.
                bf16_one_thread_gflops: self.core_gflops * 4.0 / 9.0,
                bf16_all_threads_gflops: self.core_gflops * 4.0 / 9.0 * f64::from(cores),
                f32_one_thread_gflops: self.core_gflops,
                f32_all_threads_gflops: self.core_gflops * f64::from(cores),
                ..ComputeProfile::default()
            },
            gpus: Vec::new(),
            disks: vec![DiskProfile {
                path: "/models".into(),
                read_gbps: 3.0,
                free_bytes: 500 * GIB,
                ..DiskProfile::default()
            }],
            links: Vec::new(),
            measured_at: "2026-11-20T12:00:00Z".into(),
            busy_percent: None,
            reader_version: Some(READER_VERSION),
            ..NodeProfileStatus::default()
        }
    }
}

/// Two cores and 22 GiB.
pub fn small_vm() -> NodeProfileStatus {
    Machine {
        name: "here",
        sockets: 1,
        cores: 2,
        smt: 1,
        available_bytes: 22 * GIB,
        one_thread_gbps: 42.0,
        socket_gbps: 60.0,
        core_gflops: 500.0,
    }
    .profile()
}

/// Two sockets of 16 cores with two threads each, 256 GiB.
pub fn server() -> NodeProfileStatus {
    Machine {
        name: "tower",
        sockets: 2,
        cores: 16,
        smt: 2,
        available_bytes: 250 * GIB,
        one_thread_gbps: 20.0,
        socket_gbps: 200.0,
        core_gflops: 300.0,
    }
    .profile()
}

/// A laptop with `available_bytes` of free memory and a small GPU.
pub fn laptop(available_bytes: u64) -> NodeProfileStatus {
    let mut profile = Machine {
        name: "office",
        sockets: 1,
        cores: 8,
        smt: 2,
        available_bytes,
        one_thread_gbps: 18.0,
        socket_gbps: 40.0,
        core_gflops: 60.0,
    }
    .profile();
    profile.gpus = vec![gpu("RTX 4060 Laptop", 1, 8)];
    profile
}

/// A GPU of compute capability 8.9 with `gib` GiB, of which one is in use.
pub fn gpu(name: &str, number: u32, gib: u64) -> GpuProfile {
    GpuProfile {
        uuid: format!("GPU-{number:08}-2222-3333-4444-555555555555"),
        name: name.into(),
        memory_bytes: gib * GIB,
        free_bytes: (gib - 1) * GIB,
        compute_capability: Some(ComputeCapability { major: 8, minor: 9 }),
        numa_node: Some(0),
        pcie_gbps: 31.5,
        read_gbps: 32.0 * gib as f64,
        bf16_gflops: 7_000.0 * gib as f64,
        ..GpuProfile::default()
    }
}

/// A DeepSeek-V3 with 7 M parameters in FP8, like the demo.
pub fn demo_model() -> ModelFacts {
    ModelFacts {
        architecture: "deepseek_v3".into(),
        dtype: "FP8".into(),
        parameter_count: 7_100_000,
        active_parameter_count: 3_100_000,
        layers: 6,
        hidden: 256,
        vocab: 4096,
        max_context: 4096,
        experts: 16,
        experts_per_token: 2,
        expert_layers: 5,
        expert_hidden: 96,
        heads: 8,
        kv: KvShape::Latent {
            rank: 64,
            rope_dim: 16,
            nope_dim: 32,
            value_dim: 32,
        },
        bytes: ModuleBytes {
            embedding: 2 * MIB,
            attention: MIB,
            dense_ffn: MIB / 2,
            shared_expert: MIB / 4,
            router: MIB / 8,
            routed_experts: 3 * MIB,
            head: MIB / 2,
        },
        largest_layer_bytes: MIB,
        largest_dense_module_bytes: 0,
        largest_expert_bytes: 0,
        layer_kinds: None,
    }
}

/// Qwen3-30B-A3B in FP8: 30.5 B parameters, 3.3 B active.
pub fn qwen3_30b() -> ModelFacts {
    ModelFacts {
        architecture: "qwen3_moe".into(),
        dtype: "FP8".into(),
        parameter_count: 30_500_000_000,
        active_parameter_count: 3_000_000_000,
        layers: 48,
        hidden: 2048,
        vocab: 151_936,
        max_context: 40_960,
        experts: 128,
        experts_per_token: 8,
        expert_layers: 48,
        expert_hidden: 768,
        heads: 32,
        kv: KvShape::Heads {
            kv_heads: 4,
            key_dim: 128,
            value_dim: 128,
        },
        bytes: ModuleBytes {
            embedding: 622 * MIB / 2,
            attention: 900 * MIB,
            dense_ffn: 0,
            shared_expert: 0,
            router: 24 * MIB,
            routed_experts: 27 * GIB,
            head: 594 * MIB,
        },
        largest_layer_bytes: 600 * MIB,
        largest_dense_module_bytes: 0,
        largest_expert_bytes: 0,
        layer_kinds: None,
    }
}

/// DeepSeek-V3 in FP8 as published: 671 B parameters, 37 B active; embedding, head and routers in BF16.
pub fn deepseek_v3() -> ModelFacts {
    const MB: u64 = 1_000_000;
    ModelFacts {
        architecture: "deepseek_v3".into(),
        dtype: "FP8".into(),
        parameter_count: 671_000_000_000,
        active_parameter_count: 37_000_000_000,
        layers: 61,
        hidden: 7168,
        vocab: 129_280,
        max_context: 163_840,
        experts: 256,
        experts_per_token: 8,
        expert_layers: 58,
        expert_hidden: 2048,
        heads: 128,
        kv: KvShape::Latent {
            rank: 512,
            rope_dim: 64,
            nope_dim: 128,
            value_dim: 128,
        },
        bytes: ModuleBytes {
            embedding: 1853 * MB,
            attention: 61 * 187 * MB,
            dense_ffn: 3 * 396 * MB,
            shared_expert: 58 * 44 * MB,
            router: 58 * 4 * MB,
            routed_experts: 58 * 256 * 44 * MB,
            head: 1853 * MB,
        },
        largest_layer_bytes: (187 + 44 + 4 + 256 * 44) * MB,
        largest_dense_module_bytes: 0,
        largest_expert_bytes: 0,
        layer_kinds: None,
    }
}

/// A dense 1.7 B model in BF16 with a long context: 112 KiB of KV per token.
pub fn dense_1_7b() -> ModelFacts {
    ModelFacts {
        architecture: "qwen3".into(),
        dtype: "BF16".into(),
        parameter_count: 1_700_000_000,
        active_parameter_count: 1_700_000_000,
        layers: 28,
        hidden: 2048,
        vocab: 151_936,
        max_context: 131_072,
        experts: 0,
        experts_per_token: 0,
        expert_layers: 0,
        expert_hidden: 0,
        heads: 16,
        kv: KvShape::Heads {
            kv_heads: 8,
            key_dim: 128,
            value_dim: 128,
        },
        bytes: ModuleBytes {
            embedding: 0,
            attention: 700 * MIB,
            dense_ffn: 2 * GIB,
            shared_expert: 0,
            router: 0,
            routed_experts: 0,
            head: 594 * MIB,
        },
        largest_layer_bytes: 100 * MIB,
        largest_dense_module_bytes: 0,
        largest_expert_bytes: 0,
        layer_kinds: None,
    }
}

/// Parses a spec from YAML, with a builtin model added.
pub fn spec(yaml: &str) -> InferenceDeploymentSpec {
    let text = format!("model: {{source: {{builtin: {{name: hearth-demo}}}}}}\n{yaml}");
    serde_norway::from_str(&text).unwrap()
}

/// No device plugin on any node.
static NO_GPUS: BTreeMap<String, u32> = BTreeMap::new();
/// No claimable GPUs on any node.
static NO_CLAIMS: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();

/// Offer of GPUs that device plugins can allocate.
pub fn plugin(free: &BTreeMap<String, u32>) -> GpuOffer<'_> {
    GpuOffer::Cluster {
        plugin: free,
        claimable: &NO_CLAIMS,
    }
}

/// Offer of GPUs that can be claimed.
pub fn claims(uuids: &BTreeMap<String, BTreeSet<String>>) -> GpuOffer<'_> {
    GpuOffer::Cluster {
        plugin: &NO_GPUS,
        claimable: uuids,
    }
}

pub fn plan_input<'a>(
    spec: &'a InferenceDeploymentSpec,
    facts: &'a ModelFacts,
    profiles: &'a [NodeProfileStatus],
) -> PlanInput<'a> {
    PlanInput {
        name: "demo",
        namespace: "default",
        generation: 1,
        spec,
        facts,
        model_path: "/models/m",
        profiles,
        gpus: plugin(&NO_GPUS),
        cpus: CpuOffer::Machine,
    }
}

/// Every CPU of each node, with `requested_millis` requested by others and 100m kept free.
pub fn cpu_rooms(
    profiles: &[NodeProfileStatus],
    requested_millis: u64,
) -> BTreeMap<String, CpuRoom> {
    let room = |profile: &NodeProfileStatus| CpuRoom {
        allocatable_millis: profile.cpus.len() as u64 * 1000,
        requested_millis,
        reserve_millis: 100,
    };
    let rooms = profiles.iter();
    rooms
        .map(|profile| (profile.node.clone(), room(profile)))
        .collect()
}

/// The same input on one machine without a cluster.
pub fn plan_input_here<'a>(
    spec: &'a InferenceDeploymentSpec,
    facts: &'a ModelFacts,
    profiles: &'a [NodeProfileStatus],
) -> PlanInput<'a> {
    PlanInput {
        gpus: GpuOffer::Machine,
        ..plan_input(spec, facts, profiles)
    }
}
