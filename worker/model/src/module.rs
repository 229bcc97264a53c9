//! Modules: the granularity of residency, topology and schedule. A module is a set of weights with its computation.

use std::collections::{HashMap, HashSet};
use std::fmt;

use hearth_formats::Checkpoint;
use hearth_kernels::Backend;

use crate::{ModelError, ResidencyError};

/// One module of a model. Layers and experts are numbered from 0.
///
/// The derived order is the execution order within a layer but not across layers; [`crate::modules`] lists
/// modules in execution order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModuleId {
    /// Token embedding.
    Embedding,
    /// Attention of a layer, with the norm before it.
    Attention(u32),
    /// Dense feed-forward block of a layer, with the norm before it.
    DenseFfn(u32),
    /// Router of a layer, with the norm before the layer's experts.
    Router(u32),
    /// Shared experts of a layer, which process every token.
    SharedExpert(u32),
    /// Routed expert: layer, index.
    Expert(u32, u32),
    /// Final norm and head.
    Head,
}

impl ModuleId {
    /// Returns the layer of a module that belongs to one.
    pub const fn layer(self) -> Option<u32> {
        match self {
            Self::Embedding | Self::Head => None,
            Self::Attention(layer)
            | Self::DenseFfn(layer)
            | Self::Router(layer)
            | Self::SharedExpert(layer)
            | Self::Expert(layer, _) => Some(layer),
        }
    }
}

impl fmt::Display for ModuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::Attention(layer) => write!(f, "layer {layer} attention"),
            Self::DenseFfn(layer) => write!(f, "layer {layer} feed-forward"),
            Self::Router(layer) => write!(f, "layer {layer} router"),
            Self::SharedExpert(layer) => write!(f, "layer {layer} shared expert"),
            Self::Expert(layer, expert) => write!(f, "layer {layer} expert {expert}"),
            Self::Head => f.write_str("head"),
        }
    }
}

/// Shape of a tensor in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorShape {
    /// `[rows, cols]`: outputs and inputs of a linear layer.
    Matrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// `[len]`: norm weights, biases.
    Vector {
        /// Elements.
        len: usize,
    },
}

/// One tensor of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name used by the block.
    pub field: &'static str,
    /// Name in the checkpoint.
    pub name: String,
    /// Its shape.
    pub shape: TensorShape,
}

impl TensorSpec {
    pub(crate) fn matrix(field: &'static str, name: String, rows: usize, cols: usize) -> Self {
        let shape = TensorShape::Matrix { rows, cols };
        Self { field, name, shape }
    }

    pub(crate) fn vector(field: &'static str, name: String, len: usize) -> Self {
        let shape = TensorShape::Vector { len };
        Self { field, name, shape }
    }
}

/// One module and its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSpec {
    /// Id of the module.
    pub id: ModuleId,
    /// Its tensors.
    pub tensors: Vec<TensorSpec>,
}

impl ModuleSpec {
    /// Size of the module in a checkpoint in bytes, including scales; missing tensors count as 0.
    pub fn stored_bytes(&self, checkpoint: &Checkpoint) -> u64 {
        let tensors = self.tensors.iter();
        tensors
            .filter_map(|tensor| checkpoint.stored_bytes(&tensor.name).ok())
            .sum()
    }
}

/// Names and shapes of the tensors of some modules, each once: tied embeddings belong to two.
pub fn tensors(modules: &[ModuleSpec]) -> Vec<(String, Vec<usize>)> {
    let mut seen = HashSet::new();
    let all = modules.iter().flat_map(|module| &module.tensors);
    all.filter(|tensor| seen.insert(&tensor.name))
        .map(|tensor| {
            let shape = match tensor.shape {
                TensorShape::Matrix { rows, cols } => vec![rows, cols],
                TensorShape::Vector { len } => vec![len],
            };
            (tensor.name.clone(), shape)
        })
        .collect()
}

/// The weights of one module, ready for use on a backend.
pub struct ModuleWeights<B: Backend> {
    id: ModuleId,
    matrices: Vec<(&'static str, B::Weight)>,
    vectors: Vec<(&'static str, B::Vector)>,
    bytes: u64,
}

impl<B: Backend> ModuleWeights<B> {
    /// Loads a module's tensors from a checkpoint onto the backend. On the CPU this borrows the mapped bytes. `loaded` has
    /// the matrices that earlier modules loaded, by name, and gains this module's: tied embeddings are on a device once.
    ///
    /// # Errors
    /// [`ResidencyError::Format`] if a tensor is missing or has another type or shape, [`ResidencyError::Kernel`]
    /// if the backend cannot load it.
    pub fn load(
        spec: &ModuleSpec,
        checkpoint: &Checkpoint,
        backend: &B,
        loaded: &mut HashMap<String, B::Weight>,
    ) -> Result<Self, ResidencyError> {
        let failed = |source| ResidencyError::Kernel {
            module: spec.id,
            source,
        };
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        for TensorSpec { field, name, shape } in &spec.tensors {
            match *shape {
                TensorShape::Matrix { rows, cols } => {
                    let weight = match loaded.get(name) {
                        Some(weight) => weight.clone(),
                        None => {
                            let host = checkpoint.matrix(name, rows, cols)?;
                            backend.weight(&host).map_err(failed)?
                        }
                    };
                    loaded.insert(name.clone(), weight.clone());
                    matrices.push((*field, weight));
                }
                TensorShape::Vector { len } => {
                    let values = checkpoint.vector(name, len)?;
                    vectors.push((*field, backend.vector(&values).map_err(failed)?));
                }
            }
        }
        Ok(Self {
            id: spec.id,
            matrices,
            vectors,
            bytes: spec.stored_bytes(checkpoint),
        })
    }

    /// Combines tensors that a policy has loaded, by field; `bytes`: the module's size as stored.
    pub fn new(
        id: ModuleId,
        matrices: Vec<(&'static str, B::Weight)>,
        vectors: Vec<(&'static str, B::Vector)>,
        bytes: u64,
    ) -> Self {
        Self {
            id,
            matrices,
            vectors,
            bytes,
        }
    }

    /// Id of the module.
    pub fn id(&self) -> ModuleId {
        self.id
    }

    /// Size in bytes as stored in the checkpoint, including scales.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the matrix of that field.
    ///
    /// # Errors
    /// [`ModelError::Field`] if the module does not have it: its specification came from another model.
    pub fn matrix(&self, field: &'static str) -> Result<&B::Weight, ModelError> {
        find(&self.matrices, field).ok_or(ModelError::Field {
            module: self.id,
            field,
        })
    }

    /// Returns the vector of that field.
    ///
    /// # Errors
    /// Same as [`ModuleWeights::matrix`].
    pub fn vector(&self, field: &'static str) -> Result<&B::Vector, ModelError> {
        self.optional_vector(field).ok_or(ModelError::Field {
            module: self.id,
            field,
        })
    }

    /// Returns the vector of that field, if the architecture has it (biases).
    pub fn optional_vector(&self, field: &str) -> Option<&B::Vector> {
        find(&self.vectors, field)
    }
}

fn find<'a, T>(fields: &'a [(&'static str, T)], field: &str) -> Option<&'a T> {
    fields
        .iter()
        .find(|(name, _)| *name == field)
        .map(|(_, t)| t)
}
