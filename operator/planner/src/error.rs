//! Errors of the planner: what does not fit, by how much, and what would.

use std::fmt;

use hearth_crds::{FieldError, MemoryQuantity, format_bytes};

use crate::disks;
use crate::gpus::LEAST_CAPABILITY;
use crate::ring_error::RingError;

/// A change to the spec that the planner has tried and found to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Write this `spec.model.contextLength`.
    ContextLength(u32),
    /// Remove `spec.decode.kvCache.memory`.
    RemoveKvMemory,
    /// Write at most this many bytes as `spec.decode.kvCache.memory` (whole MiB).
    KvMemory(u64),
    /// Write this `spec.decode.replicas`.
    DecodeReplicas(u32),
    /// Lower `spec.gateway.replicas`.
    GatewayReplicas(u32),
    /// Remove the prefill workers and write `spec.prefill.mode: Chunked`.
    Chunked,
    /// Write `spec.prefill.mode: StreamLoading`, without `gpusPerWorker` if that is set, so that a GPU reads prompts alone.
    ReadAlone(bool),
    /// Write this `spec.prefill.gpusPerWorker` with mode DistributedStreamLoading.
    FewerPeers(u32),
    /// Write `spec.placement.pinning: Shared`.
    Share,
    /// Write `spec.prefill.gpusPerWorker: 0`, or Auto, in each field that asks for a GPU.
    RunOnCpus(AskedBy),
    /// Nothing in the spec helps: this many more bytes of the GPU must be free, or the model is too large for it.
    FreeGpuMemory(u64),
    /// Nothing in the spec helps: the machine needs this many more bytes, or the model is too large for it.
    FreeMemory(u64),
    /// Nothing in the spec helps: this node of a ring needs this many more bytes.
    FreeMemoryOf(String, u64),
    /// Nothing in the spec helps: a ring of several members needs this many more bytes of each of these nodes.
    FreeMemoryOfNodes(Vec<(String, u64)>),
    /// Nothing in the spec helps: this node must be one with this many more bytes, so that it can be the head of a ring.
    MoreMemoryOf(String, u64),
    /// Nothing in the spec helps: the disks of these nodes must be measured, so that a ring may read from them.
    MeasureDisks(String),
    /// Nothing in the spec helps: write this argument of the command, which says what a node has.
    Argument(String),
    /// Nothing in the spec helps, and no amount of memory of one node.
    SmallerModel,
    /// Change what rules out a ring, which would have room: each field with what to write.
    Ring(String),
    /// Nothing in the spec helps: Pods must request this much less CPU of the node, in thousandths of a CPU.
    FreeCpu(u64),
    /// Nothing in the spec helps: the machine needs this many more cores.
    MoreCores(usize),
}

impl Advice {
    /// The shortest context that is suggested, in tokens.
    pub(crate) const LEAST_CONTEXT_TOKENS: u32 = 16;
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ContextLength(tokens) => write!(f, "lower spec.model.contextLength to {tokens}"),
            Self::RemoveKvMemory => f.write_str("remove spec.decode.kvCache.memory"),
            Self::KvMemory(bytes) => write!(
                f,
                "lower spec.decode.kvCache.memory to {}",
                MemoryQuantity::from_bytes(*bytes)
            ),
            Self::DecodeReplicas(replicas) => write!(f, "lower spec.decode.replicas to {replicas}"),
            Self::GatewayReplicas(replicas) => {
                write!(f, "lower spec.gateway.replicas to {replicas}")
            }
            Self::Chunked => {
                f.write_str("write spec.prefill.mode: Chunked without prefill replicas")
            }
            Self::ReadAlone(has_gpus) => write!(
                f,
                "write spec.prefill.mode: StreamLoading{}",
                if *has_gpus {
                    " without gpusPerWorker"
                } else {
                    ""
                }
            ),
            Self::FewerPeers(peers) => {
                write!(f, "lower spec.prefill.gpusPerWorker to {peers}")
            }
            Self::Share => f.write_str("write spec.placement.pinning: Shared"),
            Self::RunOnCpus(asked_by) => f.write_str(&asked_by.remedy()),
            Self::FreeGpuMemory(bytes) => write!(
                f,
                "free {} of the GPU, use a larger one, or a smaller model",
                format_bytes(*bytes)
            ),
            Self::FreeCpu(millis) => write!(
                f,
                "free {millis}m of CPU requests on the node, or add a node"
            ),
            Self::MoreCores(1) => f.write_str("use a machine with 1 more core"),
            Self::MoreCores(cores) => write!(f, "use a machine with {cores} more cores"),
            Self::FreeMemoryOf(node, bytes) => write!(
                f,
                "free {} MiB on {node}, add a node, or use a smaller model",
                bytes.div_ceil(1 << 20)
            ),
            Self::FreeMemoryOfNodes(nodes) => {
                write!(f, "free {} for a ring, or add a node", on_nodes(nodes))
            }
            Self::MoreMemoryOf(node, bytes) => write!(
                f,
                "give {node} {} MiB more memory, add a larger node, or use a smaller model",
                bytes.div_ceil(1 << 20)
            ),
            Self::MeasureDisks(nodes) => write!(
                f,
                "measure the disks of {nodes}, from which layers may be read at {} GB/s and more ({})",
                disks::SLOW_GBPS,
                disks::REMEDY
            ),
            Self::Argument(argument) => write!(f, "write {argument}"),
            Self::Ring(why) => write!(
                f,
                "let a piped ring hold the model, for which there is room ({why})"
            ),
            Self::SmallerModel => f.write_str("add a node, or use a smaller model"),
            Self::FreeMemory(bytes) => {
                write!(f, "free {}, or use a smaller model", format_bytes(*bytes))
            }
        }
    }
}

/// Bytes of each node, for people.
fn on_nodes(nodes: &[(String, u64)]) -> String {
    let of_node =
        |(node, bytes): &(String, u64)| format!("{} MiB on {node}", bytes.div_ceil(1 << 20));
    let all: Vec<String> = nodes.iter().map(of_node).collect();
    all.join(" and ")
}

/// The fields of a spec that ask for a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AskedBy {
    /// `spec.prefill.gpusPerWorker`.
    pub gpus_per_worker: bool,
    /// `spec.prefill.mode: StreamLoading`.
    pub stream_loading: bool,
    /// `spec.prefill.mode: DistributedStreamLoading`.
    pub peers: bool,
    /// `spec.decode.dualBatch: On`.
    pub dual_batch: bool,
}

impl AskedBy {
    /// Each field as it is, with what to write instead; `gpusPerWorker` if no field asks.
    fn fields(self) -> Vec<(&'static str, &'static str)> {
        let prefill = (
            "spec.prefill.gpusPerWorker",
            "spec.prefill.gpusPerWorker: 0",
        );
        let all = [
            (self.gpus_per_worker, prefill),
            (
                self.stream_loading,
                (
                    "spec.prefill.mode is StreamLoading",
                    "spec.prefill.mode: Auto",
                ),
            ),
            (
                self.peers,
                (
                    "spec.prefill.mode is DistributedStreamLoading",
                    "spec.prefill.mode: Auto",
                ),
            ),
            (
                self.dual_batch,
                ("spec.decode.dualBatch is On", "spec.decode.dualBatch: Auto"),
            ),
        ];
        let asking = all.into_iter().filter(|(is_asking, _)| *is_asking);
        let fields: Vec<_> = asking.map(|(_, field)| field).collect();
        match fields.is_empty() {
            true => vec![prefill],
            false => fields,
        }
    }

    /// What to write to do without a GPU.
    fn remedy(self) -> String {
        let writes: Vec<&str> = self.fields().into_iter().map(|(_, write)| write).collect();
        format!("write {} to run on CPUs", writes.join(" and "))
    }
}

impl fmt::Display for AskedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: Vec<&str> = self.fields().into_iter().map(|(is, _)| is).collect();
        f.write_str(&fields.join(" and "))
    }
}

fn any_of(advice: &[Advice]) -> String {
    advice
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", or ")
}

fn join(errors: &[FieldError]) -> String {
    errors
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\nerror: ")
}

/// Reason that there is no plan. Displays as two lines: the numbers, then what would fit.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The spec asks for something that this engine does not support.
    #[error("{}", join(.0))]
    Unsupported(Vec<FieldError>),
    /// There is no node to place ranks on.
    #[error(
        "there is no profiled node to place {0} on\n  profile one with hearth-worker profile, or wait for the agents"
    )]
    NoNodes(String),
    /// A profile that is unusable.
    #[error("the profile of node {node} {problem}\n  profile it again with hearth-worker profile")]
    BadProfile {
        /// The node.
        node: String,
        /// The problem, such as `has no CPUs`.
        problem: String,
    },
    /// No node has enough memory; the numbers are those of the node with the most.
    #[error(
        "{what} needs {}, node {node} has {} free ({breakdown})\n  {}",
        format_bytes(*.needs_bytes), format_bytes(*.free_bytes), any_of(.advice)
    )]
    InsufficientMemory {
        /// The rank or group that was to be placed, such as `decode-0`.
        what: String,
        /// The node with the most free memory.
        node: String,
        /// Bytes that all ranks of the node would need at least.
        needs_bytes: u64,
        /// Bytes that are free on the node.
        free_bytes: u64,
        /// Breakdown of the bytes, in words.
        breakdown: String,
        /// Changes that fit, each on its own; at least one.
        advice: Vec<Advice>,
    },
    /// The problem of a ring is none: a value that no machine or model has.
    #[error("no ring can be planned\n  {0}")]
    NoRing(RingError),
    /// No ring of the nodes has room.
    #[error(
        "the model fits no ring of the nodes: weights take {}, and KV {} ({kv_of})\n  \
         {accounts}\n  {}",
        format_bytes(*.weights_bytes), format_bytes(*.kv_bytes), any_of(.advice)
    )]
    NoRoomInRing {
        /// Bytes of the weights.
        weights_bytes: u64,
        /// Bytes of KV.
        kv_bytes: u64,
        /// What says how much KV.
        kv_of: String,
        /// What each node and GPU has, in words.
        accounts: String,
        /// Changes that fit, each on its own; at least one.
        advice: Vec<Advice>,
    },
    /// A KV budget that does not hold one stream of the requested length.
    #[error(
        "spec.decode.kvCache.memory is {memory} and holds {holds_tokens} tokens, contextLength is {context_length}\n  \
         raise it to {}Mi, or lower spec.model.contextLength to {fitting_context_length}",
        .needed_bytes.div_ceil(1 << 20)
    )]
    KvBudgetTooSmall {
        /// The budget in the spec.
        memory: hearth_crds::MemoryQuantity,
        /// Tokens that it holds.
        holds_tokens: u64,
        /// The requested context length in tokens.
        context_length: u32,
        /// Bytes that the requested context needs.
        needed_bytes: u64,
        /// The longest context that the budget holds.
        fitting_context_length: u32,
    },
    /// A KV budget that does not even hold the shortest context allowed.
    #[error("spec.decode.kvCache.memory is {memory} and holds {holds_tokens} tokens\n  raise it to {}Mi", .needed_bytes.div_ceil(1 << 20))]
    KvBudgetTiny {
        /// The budget in the spec.
        memory: hearth_crds::MemoryQuantity,
        /// Tokens that it holds.
        holds_tokens: u64,
        /// Bytes that the requested context needs.
        needed_bytes: u64,
    },
    /// A context that the model does not support.
    #[error(
        "spec.model.contextLength is {asked}\n  {architecture} supports at most {max} tokens here: write at most {max}"
    )]
    ContextTooLong {
        /// The context length that the spec asks for.
        asked: u32,
        /// The longest context that the model supports.
        max: u32,
        /// The model's architecture.
        architecture: String,
    },
    /// Too few cores for workers that need their own; the numbers are those of the node that lacks the least.
    #[error(
        "spec.placement.pinning is \"Exclusive\" and node {node} has {cores} whole core{} for {workers} worker{} ({names}){accounts}\n  {}",
        if *.cores == 1 { "" } else { "s" }, if *.workers == 1 { "" } else { "s" }, any_of(.advice)
    )]
    TooFewCores {
        /// The node.
        node: String,
        /// Cores that workers may have to themselves.
        cores: usize,
        /// Workers that need one.
        workers: usize,
        /// Their names.
        names: String,
        /// Breakdown of the node's CPU, such as `: of its 2000m CPU …`; empty on a single machine.
        accounts: String,
        /// Changes that fit, each on its own; at least one.
        advice: Vec<Advice>,
    },
    /// Less CPU than the Pods request; the numbers are those of the node that lacks the least.
    #[error(
        "{what} does not fit the CPU of node {node}: with it, its Pods would request {needs_millis}m, and {free_millis}m are available{accounts}\n  {}",
        any_of(.advice)
    )]
    InsufficientCpu {
        /// The rank or group that was to be placed, such as `decode-0`.
        what: String,
        /// The node.
        node: String,
        /// Sum of the CPU that all ranks of the node would request, in thousandths of a CPU.
        needs_millis: u64,
        /// CPU that they may request, in thousandths of a CPU.
        free_millis: u64,
        /// Breakdown of the node's CPU.
        accounts: String,
        /// Changes that fit, each on its own; at least one.
        advice: Vec<Advice>,
    },
    /// Fewer GPUs than needed are available.
    #[error(
        "{what} needs {needs} GPU{} on one node ({asked_by}), node {node} has {free} free\n  \
         {}add a GPU node with its device plugin, or {}", if *.needs == 1 { "" } else { "s" },
        if .asked_by.gpus_per_worker { "lower spec.prefill.gpusPerWorker, " } else { "" }, .asked_by.remedy()
    )]
    TooFewGpus {
        /// The rank that was to be placed, such as `prefill-0`.
        what: String,
        /// What asks for GPUs.
        asked_by: AskedBy,
        /// The node with the most free GPUs.
        node: String,
        /// GPUs that the ranks of one node would hold.
        needs: u32,
        /// GPUs that are available on the node.
        free: u32,
    },
    /// Fewer GPUs than are to read a prompt together.
    #[error(
        "{peers} GPUs are to read a prompt together ({asked_by}), and workers may use {usable} ({accounts})\n  \
         add GPUs, or {}", .advice.as_ref().map_or_else(|| .asked_by.remedy(), ToString::to_string)
    )]
    TooFewPeers {
        /// GPUs that are to read a prompt together.
        peers: u32,
        /// The fields that ask for them.
        asked_by: AskedBy,
        /// GPUs that workers may use.
        usable: u32,
        /// GPUs of each node, in words.
        accounts: String,
        /// A change that needs fewer, and fits.
        advice: Option<Advice>,
    },
    /// No GPU that this engine supports.
    #[error(
        "{what} needs a GPU ({asked_by}), and {why}\n  \
         {}, or add a GPU of compute capability {LEAST_CAPABILITY} or higher", .asked_by.remedy()
    )]
    NoUsableGpu {
        /// The rank that was to be placed, such as `prefill-0`.
        what: String,
        /// What asks for a GPU.
        asked_by: AskedBy,
        /// The node.
        node: String,
        /// The problem with its GPUs.
        why: String,
    },
    /// A rank does not fit on any one GPU as a whole; the numbers are those of the GPU with the most memory left.
    #[error(
        "{what} needs {} of a GPU's memory, {gpu} has {} free ({breakdown})\n  {}",
        format_bytes(*.needs_bytes), format_bytes(*.free_bytes), any_of(.advice)
    )]
    InsufficientGpuMemory {
        /// The rank that was to be placed, such as `prefill-0`.
        what: String,
        /// The GPU, such as `NVIDIA L4 of node office`.
        gpu: String,
        /// Bytes that the rank needs at least.
        needs_bytes: u64,
        /// Bytes that are free on the GPU.
        free_bytes: u64,
        /// Breakdown of the bytes, in words.
        breakdown: String,
        /// Changes that fit, each on its own; at least one.
        advice: Vec<Advice>,
    },
}
