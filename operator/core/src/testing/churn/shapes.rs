//! Unequal nodes, and deployments of several sizes.

use std::collections::BTreeSet;

use hearth_crds::{
    ComputeCapability, ComputeProfile, CpuProfile, DiskProfile, GpuProfile,
    InferenceDeploymentSpec, IsaProfile, KvShape, MemoryProfile, ModelFacts, ModuleBytes,
    NodeProfileStatus, NumaNodeProfile, READER_VERSION,
};

use crate::observed::{NodeView, Requests};
use crate::testing::random::SplitMix;
use crate::testing::{GIB, MIB, node as plain_node};

/// Nodes of a rack: the members of a ring are chosen among them.
const RACK_NODES: usize = 8;
/// Bytes of a KV cache's element.
const KV_ELEMENT_BYTES: u64 = 2;

/// A kind of machine.
struct Machine {
    sockets: u32,
    cores_per_socket: u32,
    threads_per_core: u32,
    memory_gib: u64,
    /// Memory of each GPU.
    gpus_gib: &'static [u64],
    /// Whether its GPUs are claimed by UUID; else a device plugin hands them out.
    has_claims: bool,
    socket_gbps: f64,
}

/// From a small box to a server: RAM, CPUs, NUMA nodes and GPUs all differ.
const MACHINES: [Machine; 6] = [
    Machine {
        sockets: 1,
        cores_per_socket: 4,
        threads_per_core: 1,
        memory_gib: 16,
        gpus_gib: &[],
        has_claims: false,
        socket_gbps: 30.0,
    },
    Machine {
        sockets: 1,
        cores_per_socket: 8,
        threads_per_core: 2,
        memory_gib: 32,
        gpus_gib: &[8],
        has_claims: false,
        socket_gbps: 50.0,
    },
    Machine {
        sockets: 1,
        cores_per_socket: 16,
        threads_per_core: 2,
        memory_gib: 64,
        gpus_gib: &[24],
        has_claims: true,
        socket_gbps: 70.0,
    },
    Machine {
        sockets: 2,
        cores_per_socket: 16,
        threads_per_core: 1,
        memory_gib: 128,
        gpus_gib: &[],
        has_claims: false,
        socket_gbps: 90.0,
    },
    Machine {
        sockets: 2,
        cores_per_socket: 12,
        threads_per_core: 2,
        memory_gib: 96,
        gpus_gib: &[16, 24],
        has_claims: true,
        socket_gbps: 90.0,
    },
    Machine {
        sockets: 1,
        cores_per_socket: 6,
        threads_per_core: 2,
        memory_gib: 32,
        gpus_gib: &[12, 12],
        has_claims: false,
        socket_gbps: 40.0,
    },
];

/// The node of that number, which is Ready and measured.
pub(super) fn node(number: usize) -> NodeView {
    let machine = &MACHINES[number % MACHINES.len()];
    let name = format!("node-{number:02}");
    let cores = machine.sockets * machine.cores_per_socket;
    let cpus = cores * machine.threads_per_core;
    let memory_bytes = machine.memory_gib * GIB;
    let gpus = machine.gpus_gib.iter().enumerate();
    let gpus: Vec<GpuProfile> = gpus.map(|(at, gib)| gpu(&name, at, *gib)).collect();
    let mut view = plain_node(&name, cpus, memory_bytes);
    view.labels.insert("rack".to_owned(), rack(number));
    if !machine.has_claims {
        view.gpus = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    }
    view.profile = Some(profile(machine, name, gpus));
    view
}

fn profile(machine: &Machine, node: String, gpus: Vec<GpuProfile>) -> NodeProfileStatus {
    let cores = machine.sockets * machine.cores_per_socket;
    let sockets = f64::from(machine.sockets);
    let cpus: Vec<CpuProfile> = (0..cores * machine.threads_per_core)
        .map(|id| CpuProfile {
            id,
            core: id % cores,
            numa_node: id % cores / machine.cores_per_socket,
            max_mhz: 4000,
            cache_bytes: 2 * MIB,
        })
        .collect();
    // The system itself takes some.
    let available_bytes = machine.memory_gib * GIB - machine.memory_gib * GIB / 32;
    let of_socket = |id: u32| NumaNodeProfile {
        id,
        cpus: cpus
            .iter()
            .filter(|cpu| cpu.numa_node == id)
            .map(|cpu| cpu.id)
            .collect(),
        memory_bytes: machine.memory_gib * GIB / u64::from(machine.sockets),
        free_bytes: available_bytes / u64::from(machine.sockets),
        read_gbps: machine.socket_gbps,
    };
    NodeProfileStatus {
        node,
        numa_nodes: (0..machine.sockets).map(of_socket).collect(),
        cpus,
        isa: IsaProfile {
            avx2: true,
            ..IsaProfile::default()
        },
        memory: MemoryProfile {
            total_bytes: machine.memory_gib * GIB,
            available_bytes,
            read_one_thread_gbps: 12.0,
            read_all_threads_gbps: machine.socket_gbps * sockets,
            ..MemoryProfile::default()
        },
        compute: ComputeProfile {
            bf16_one_thread_gflops: 30.0,
            bf16_all_threads_gflops: 30.0 * f64::from(cores),
            f32_one_thread_gflops: 60.0,
            f32_all_threads_gflops: 60.0 * f64::from(cores),
            ..ComputeProfile::default()
        },
        gpus,
        disks: vec![DiskProfile {
            path: "/models".to_owned(),
            read_gbps: 1.0,
            free_bytes: 1000 * GIB,
            ..DiskProfile::default()
        }],
        measured_at: "2026-01-01T00:00:00Z".to_owned(),
        reader_version: Some(READER_VERSION),
        ..NodeProfileStatus::default()
    }
}

fn gpu(node: &str, at: usize, gib: u64) -> GpuProfile {
    GpuProfile {
        uuid: format!("GPU-{node}-{at}"),
        name: format!("GPU of {gib} GiB"),
        memory_bytes: gib * GIB,
        free_bytes: gib * GIB,
        compute_capability: Some(ComputeCapability { major: 8, minor: 9 }),
        numa_node: Some(0),
        pcie_gbps: 25.0,
        read_gbps: 30.0 * gib as f64,
        bf16_gflops: 5_000.0 * gib as f64,
        ..GpuProfile::default()
    }
}

fn rack(number: usize) -> String {
    format!("rack-{}", number / RACK_NODES)
}

/// UUIDs of a node's GPUs that are claimed, if its GPUs are.
pub(super) fn claimable(node: &NodeView) -> Option<BTreeSet<String>> {
    let gpus = node.profile.as_ref().map(|profile| &profile.gpus)?;
    let has_claims = node.gpus == 0 && !gpus.is_empty();
    has_claims.then(|| gpus.iter().map(|gpu| gpu.uuid.clone()).collect())
}

/// Requests on a node of Pods that are nobody's here.
pub(super) fn foreign_requests(number: usize) -> Requests {
    let pods = (number % 4) as u64;
    Requests::new(250 * pods, 512 * MIB * pods, 0)
}

/// A size of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Size {
    /// 1.7 B parameters in BF16, which fit anywhere.
    Small,
    /// 7.6 B in BF16.
    Medium,
    /// 32 B in BF16, for the largest nodes' memory.
    Large,
    /// 30 B in FP8, most of them experts: on a small node, only with its GPU.
    Experts,
    /// 69 B in FP8, as a ring.
    Ring,
}

impl Size {
    pub(super) const ALL: [Self; 5] = [
        Self::Small,
        Self::Medium,
        Self::Large,
        Self::Experts,
        Self::Ring,
    ];

    /// The claim that the model is in.
    pub(super) fn claim(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Medium => "medium",
            Self::Large => "large",
            Self::Experts => "experts",
            Self::Ring => "ring",
        }
    }

    /// What placement knows of the model.
    pub(super) fn facts(self) -> ModelFacts {
        match self {
            Self::Small => dense([28, 2048, 6144, 16], 2),
            Self::Medium => dense([36, 4096, 12_288, 32], 2),
            Self::Large => dense([64, 5120, 25_600, 64], 2),
            Self::Ring => dense([80, 8192, 28_672, 64], 1),
            Self::Experts => experts(),
        }
    }
}

/// A model like Qwen3 of so many layers, widths of the residual stream and of the feed-forward layers, and query heads.
fn dense([layers, hidden, inner, heads]: [u32; 4], element_bytes: u64) -> ModelFacts {
    const VOCAB: u32 = 151_936;
    const KV_HEADS: u32 = 8;
    let (width, of_layers) = (u64::from(hidden), u64::from(layers));
    let attention = width * 128 * 2 * u64::from(heads + KV_HEADS);
    let ffn = 3 * width * u64::from(inner);
    let head = u64::from(VOCAB) * width;
    let parameters = of_layers * (attention + ffn) + head;
    ModelFacts {
        architecture: "qwen3".to_owned(),
        dtype: if element_bytes == 1 { "FP8" } else { "BF16" }.to_owned(),
        parameter_count: parameters,
        active_parameter_count: parameters,
        layers,
        hidden,
        vocab: VOCAB,
        max_context: 40_960,
        experts: 0,
        experts_per_token: 0,
        expert_layers: 0,
        expert_hidden: 0,
        heads,
        kv: KvShape::Heads {
            kv_heads: KV_HEADS,
            key_dim: 128,
            value_dim: 128,
        },
        bytes: ModuleBytes {
            attention: of_layers * attention * element_bytes,
            dense_ffn: of_layers * ffn * element_bytes,
            head: head * element_bytes,
            ..ModuleBytes::default()
        },
        largest_layer_bytes: (attention + ffn) * element_bytes,
        largest_dense_module_bytes: ffn * element_bytes,
        largest_expert_bytes: 0,
        layer_kinds: None,
    }
}

/// A model like Qwen3-30B-A3B in FP8.
fn experts() -> ModelFacts {
    ModelFacts {
        architecture: "qwen3_moe".to_owned(),
        parameter_count: 30_500_000_000,
        active_parameter_count: 3_300_000_000,
        experts: 128,
        experts_per_token: 8,
        expert_layers: 48,
        expert_hidden: 768,
        kv: KvShape::Heads {
            kv_heads: 4,
            key_dim: 128,
            value_dim: 128,
        },
        bytes: ModuleBytes {
            embedding: 594 * MIB,
            attention: 900 * MIB,
            router: 24 * MIB,
            routed_experts: 27 * GIB,
            head: 594 * MIB,
            ..ModuleBytes::default()
        },
        largest_layer_bytes: 600 * MIB,
        largest_dense_module_bytes: 20 * MIB,
        largest_expert_bytes: 27 * GIB / 48 / 128,
        layer_kinds: None,
        ..dense([48, 2048, 6144, 32], 1)
    }
}

/// Which deployments there are.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Rings, in a thousand deployments.
    pub rings_per_mille: usize,
    /// Whether some may end their workers for want of requests, and for others; of these, some keep them, and some start without a
    /// request.
    pub rests: bool,
    /// Changes, in a hundred, after which workers never become ready, so that the plan before comes back.
    pub broken_percent: usize,
}

/// What a deployment asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) size: Size,
    context_tokens: u32,
    decode: u32,
    /// Workers for prompts alone; 0: none.
    prefill: u32,
    streams: u32,
    is_exclusive: bool,
    /// Whether it asks for GPUs.
    has_gpu: bool,
    /// Whether its workers may end for want of requests.
    pub(super) rests: bool,
    /// Whether these end for a higher priority alone.
    keeps: bool,
    /// Whether they start again without a request.
    preloads: bool,
    priority: i32,
    rack: String,
    /// Whether its workers never become ready, once it has others that are.
    pub(super) is_broken: bool,
}

impl Wish {
    /// A deployment of the mix on a cluster of so many nodes.
    pub(super) fn drawn(random: &mut SplitMix, mix: Mix, nodes: usize) -> Self {
        let size = match random.below(1000) < mix.rings_per_mille {
            true => Size::Ring,
            false => match random.below(100) {
                0..45 => Size::Small,
                45..70 => Size::Medium,
                70..80 => Size::Large,
                _ => Size::Experts,
            },
        };
        let is_ring = size == Size::Ring;
        let wish = Self {
            size,
            context_tokens: 1024 << random.below(4),
            decode: match is_ring {
                true => 1,
                false => 1 + u32::from(random.happens(20)),
            },
            prefill: u32::from(!is_ring && random.happens(30)),
            has_gpu: match size {
                Size::Small | Size::Medium => random.happens(25),
                Size::Experts => random.happens(75),
                Size::Large | Size::Ring => false,
            },
            streams: 1 + random.below(4) as u32,
            is_exclusive: random.happens(30),
            rests: mix.rests && !is_ring && random.happens(40),
            keeps: false,
            preloads: false,
            priority: random.below(3) as i32 - 1,
            rack: rack(random.below(nodes)),
            is_broken: random.happens(mix.broken_percent),
        };
        match wish.rests {
            true => Self {
                keeps: random.happens(20),
                preloads: random.happens(30),
                ..wish
            },
            false => wish,
        }
    }

    /// The same with another number of workers.
    pub(super) fn scaled(&self, random: &mut SplitMix) -> Self {
        let mut wish = self.clone();
        match self.size == Size::Ring {
            true => wish.streams = 1 + random.below(4) as u32,
            false => wish.decode = 1 + random.below(3) as u32,
        }
        wish
    }

    /// The spec that says so.
    pub(super) fn spec(&self) -> InferenceDeploymentSpec {
        let Self {
            size,
            context_tokens,
            decode,
            prefill,
            streams,
            is_exclusive,
            has_gpu,
            rests,
            keeps,
            preloads,
            priority,
            rack,
            is_broken: _,
        } = self;
        let token_bytes = size
            .facts()
            .kv_bytes_per_token(KV_ELEMENT_BYTES, KV_ELEMENT_BYTES);
        // So much and no more, wherever it runs.
        let kv_mib = (u64::from(context_tokens * streams) * token_bytes).div_ceil(MIB);
        let strategy = if *size == Size::Ring {
            "PipedRing"
        } else {
            "Hybrid"
        };
        let pinning = if *is_exclusive { "Exclusive" } else { "Shared" };
        let selector = match size {
            Size::Ring => format!(", nodeSelector: {{rack: {rack}}}"),
            _ => String::new(),
        };
        let prefill = match (size, prefill) {
            (Size::Ring, _) => String::new(),
            (_, count) if *has_gpu => {
                let count = (*count).max(1);
                format!("prefill: {{replicas: {count}, gpusPerWorker: 1}}\n")
            }
            (_, 0) => "prefill: {mode: Chunked}\n".to_owned(),
            (_, count) => format!("prefill: {{replicas: {count}}}\n"),
        };
        let workers = match rests {
            true => format!(
                "scaling: {{mode: Auto, minReplicas: 0, maxReplicas: {}}}",
                decode + 1
            ),
            false => format!("replicas: {decode}"),
        };
        let after = match (rests, keeps, preloads) {
            (false, _, _) => "",
            (true, false, false) => "autoscaling: {scaleToZeroAfter: 5m}\n",
            (true, true, false) => "autoscaling: {keep: true}\n",
            (true, false, true) => "autoscaling: {preload: true}\n",
            (true, true, true) => "autoscaling: {keep: true, preload: true}\n",
        };
        let claim = size.claim();
        let yaml = format!(
            "model: {{source: {{persistentVolumeClaim: {{claimName: {claim}}}}}, contextLength: {context_tokens}}}\n\
             strategy: {strategy}\npriority: {priority}\n{prefill}{after}\
             decode: {{{workers}, maxBatch: {streams}, kvCache: {{memory: {kv_mib}Mi}}}}\n\
             placement: {{pinning: {pinning}{selector}}}\nrollout: {{progressDeadline: 2m}}\n"
        );
        serde_norway::from_str(&yaml).expect("a spec")
    }
}
