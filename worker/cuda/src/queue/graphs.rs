//! Lists of commands as CUDA graphs.
//!
//! A list is identified by its kernels, in order. When first seen it is launched command by command; when seen again,
//! it becomes a graph; from then on only nodes whose arguments or grid changed are
//! updated, and the whole list is one launch.

use std::hash::{DefaultHasher, Hash, Hasher};

use hearth_kernels::KernelError;

use super::{Command, Launch};
use crate::driver::sys::{
    self, CUDA_KERNEL_NODE_PARAMS, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUgraph, CUgraphExec,
    CUgraphNode,
};
use crate::driver::{Stream, check};

/// Maximum number of graphs; beyond it, the least recently used one is dropped.
const KEPT: usize = 24;
/// Minimum number of commands that is worth a graph.
const LEAST_COMMANDS: usize = 8;

#[derive(Default)]
pub(super) struct Graphs {
    known: Vec<Known>,
    clock: u64,
    made: u64,
    launched: u64,
    /// Nodes of the graph that was launched last.
    last_nodes: usize,
}

struct Known {
    shape: u64,
    graph: Option<Graph>,
    /// Whether the driver failed to make a graph of it.
    is_refused: bool,
    used: u64,
}

impl Graphs {
    /// Launches `commands` as a graph; returns false if they must be launched one by one this time.
    pub(super) fn launch(
        &mut self,
        stream: &Stream,
        commands: &[Command],
    ) -> Result<bool, KernelError> {
        if commands.len() < LEAST_COMMANDS {
            return Ok(false);
        }
        self.clock += 1;
        let shape = shape(commands);
        let Some(known) = self.known.iter_mut().find(|k| k.shape == shape) else {
            self.remember(shape);
            return Ok(false);
        };
        known.used = self.clock;
        if known.is_refused {
            return Ok(false);
        }
        match &mut known.graph {
            Some(graph) => graph.update(commands)?,
            none => match Graph::new(commands) {
                Ok(graph) => {
                    *none = Some(graph);
                    self.made += 1;
                }
                Err(error) => {
                    tracing::warn!(%error, "a step cannot be captured as a graph and is launched kernel by kernel");
                    known.is_refused = true;
                    return Ok(false);
                }
            },
        }
        if let Some(graph) = &known.graph {
            graph.launch(stream)?;
            self.launched += 1;
            self.last_nodes = graph.nodes.len();
        }
        Ok(true)
    }

    pub(super) fn counts(&self) -> (u64, u64) {
        (self.made, self.launched)
    }

    pub(super) fn last_nodes(&self) -> usize {
        self.last_nodes
    }

    fn remember(&mut self, shape: u64) {
        if self.known.len() >= KEPT {
            let oldest = (0..self.known.len()).min_by_key(|&i| self.known[i].used);
            if let Some(oldest) = oldest {
                self.known.swap_remove(oldest);
            }
        }
        self.known.push(Known {
            shape,
            graph: None,
            is_refused: false,
            used: self.clock,
        });
    }
}

/// Hash of the part of a graph that cannot be updated: the kinds of the commands, in order. Kernels could change, but
/// are part of the shape so that a graph's nodes stay alike and few need updates.
fn shape(commands: &[Command]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for command in commands {
        match command {
            Command::Launch(launch) => launch.function.hash(&mut hasher),
            // A memset's node keeps its address and size.
            Command::Zero { address, bytes } => (address, bytes).hash(&mut hasher),
        }
    }
    hasher.finish()
}

/// An executable graph: one chain of nodes.
struct Graph {
    graph: CUgraph,
    exec: CUgraphExec,
    nodes: Vec<CUgraphNode>,
    /// Each node's current command.
    told: Vec<Command>,
}

// SAFETY: handles; only one thread at a time uses them, under the queue's lock.
unsafe impl Send for Graph {}

impl Graph {
    fn new(commands: &[Command]) -> Result<Self, KernelError> {
        let mut context: CUcontext = std::ptr::null_mut();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream's context is current, the out-pointers valid.
        unsafe {
            check("cuCtxGetCurrent", sys::cuCtxGetCurrent(&raw mut context))?;
            check("cuGraphCreate", sys::cuGraphCreate(&raw mut graph, 0))?;
        }
        let mut made = Self {
            graph,
            exec: std::ptr::null_mut(),
            nodes: Vec::with_capacity(commands.len()),
            told: commands.to_vec(),
        };
        for command in commands {
            made.add(command, context)?;
        }
        // SAFETY: the graph is whole; the out-pointer is valid.
        check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut made.exec, graph, 0)
        })?;
        Ok(made)
    }

    /// Adds a node after the last one.
    fn add(&mut self, command: &Command, context: CUcontext) -> Result<(), KernelError> {
        let before = self.nodes.last().copied();
        let (dependencies, count) = match &before {
            Some(node) => (std::ptr::from_ref(node), 1),
            None => (std::ptr::null(), 0),
        };
        let mut node = std::ptr::null_mut();
        match command {
            Command::Launch(launch) => {
                let mut pointers = launch.args.pointers();
                let params = node_params(launch, pointers.as_mut_ptr());
                // SAFETY: the parameters are copied by the call; the rest as for a launch.
                check("cuGraphAddKernelNode", unsafe {
                    sys::cuGraphAddKernelNode_v2(
                        &raw mut node,
                        self.graph,
                        dependencies,
                        count,
                        &raw const params,
                    )
                })?;
            }
            Command::Zero { address, bytes } => {
                let params = CUDA_MEMSET_NODE_PARAMS {
                    dst: *address,
                    pitch: 0,
                    value: 0,
                    elementSize: 1,
                    width: *bytes,
                    height: 1,
                };
                // SAFETY: as above; the range lies in a buffer of the step.
                check("cuGraphAddMemsetNode", unsafe {
                    sys::cuGraphAddMemsetNode(
                        &raw mut node,
                        self.graph,
                        dependencies,
                        count,
                        &raw const params,
                        context,
                    )
                })?;
            }
        }
        self.nodes.push(node);
        Ok(())
    }

    /// Updates the nodes that changed.
    fn update(&mut self, commands: &[Command]) -> Result<(), KernelError> {
        for ((node, told), command) in self.nodes.iter().zip(&mut self.told).zip(commands) {
            let (Command::Launch(before), Command::Launch(now)) = (&*told, command) else {
                continue; // A memset is part of the shape.
            };
            let same = before.args == now.args
                && before.grid == now.grid
                && before.threads == now.threads
                && before.shared_bytes == now.shared_bytes;
            if same {
                continue;
            }
            let mut pointers = now.args.pointers();
            let params = node_params(now, pointers.as_mut_ptr());
            // SAFETY: the node is one of this graph's kernels, with the same function; the parameters are copied.
            check("cuGraphExecKernelNodeSetParams", unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(self.exec, *node, &raw const params)
            })?;
            *told = command.clone();
        }
        Ok(())
    }

    fn launch(&self, stream: &Stream) -> Result<(), KernelError> {
        // SAFETY: the graph is instantiated; its buffers live until later commands.
        check("cuGraphLaunch", unsafe {
            sys::cuGraphLaunch(self.exec, stream.raw())
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; a launch in flight keeps what it needs.
        unsafe {
            if !self.exec.is_null() {
                sys::cuGraphExecDestroy(self.exec);
            }
            sys::cuGraphDestroy(self.graph);
        }
    }
}

fn node_params(launch: &Launch, pointers: *mut *mut std::ffi::c_void) -> CUDA_KERNEL_NODE_PARAMS {
    let [x, y, z] = launch.grid;
    CUDA_KERNEL_NODE_PARAMS {
        func: launch.function.raw(),
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.shared_bytes,
        kernelParams: pointers,
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}
