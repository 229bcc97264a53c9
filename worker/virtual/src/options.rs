//! What a virtual device is made of.

use std::path::PathBuf;
use std::sync::Arc;

use hearth_kernels::trace::Trace;
use hearth_kernels::{CpuOptions, KernelError};

/// Options of a virtual device.
#[derive(Clone, Debug)]
pub struct VirtualOptions {
    /// Bytes of its memory: for weights, KV and activations together.
    pub memory_bytes: u64,
    /// Whether it computes, or models the time that this takes.
    pub mode: VirtualMode,
    /// Kernels and threads that compute for it in exact mode.
    pub cpu: CpuOptions,
    /// Receives its operations and copies; its clock is stretched as the device's.
    pub trace: Option<Arc<Trace>>,
    /// A fault on demand: once this file exists the device is lost, for the cause that the file says; where that is `hang`, it computes
    /// nothing instead, as long as the file is there. `None`: never.
    pub fault: Option<PathBuf>,
}

impl VirtualOptions {
    /// A device of that memory that computes, and copies as fast as the host does.
    pub fn exact(memory_bytes: u64, cpu: CpuOptions) -> Self {
        Self {
            memory_bytes,
            mode: VirtualMode::Exact {
                copy_bytes_per_s: None,
            },
            cpu,
            trace: None,
            fault: None,
        }
    }
}

/// What a virtual device does when an operation is called.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum VirtualMode {
    /// It computes: tokens, bytes and peaks are those of a device, times are not.
    Exact {
        /// Most bytes that are copied to a slot in a second; `None`: as many as the host can.
        copy_bytes_per_s: Option<f64>,
    },
    /// It computes nothing: an operation ends when the rates say so, and its output has a shape but no values.
    Modelled(Modelled),
}

/// Rates of a modelled device, and what it does in place of routers and copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Modelled {
    /// Bytes a second that cross the link between host and device.
    pub copy_bytes_per_s: f64,
    /// Bytes a second that operations read or write in the device's memory.
    pub read_bytes_per_s: f64,
    /// Floating-point operations a second in products; a multiplication with its addition counts as two.
    pub compute_flops: f64,
    /// What each operation takes in addition to its bytes or products, µs.
    pub launch_us: f64,
    /// Real seconds of a modelled second: the host's own work counts for this much less.
    pub stretch: f64,
    /// Which experts routers choose.
    pub routing: RoutingModel,
    /// Seed of the routing.
    pub seed: u64,
    /// Whether weights are copied in the host's memory while the link is busy with them.
    pub copies: CopyModel,
}

/// Distribution of the experts that a token chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutingModel {
    /// All experts are equally likely.
    Uniform,
    /// The expert of rank r, from 1, is chosen with a probability that is proportional to `r^-exponent`; which expert
    /// has which rank differs from layer to layer.
    Zipf {
        /// Larger than 0.
        exponent: f64,
    },
}

/// What happens in the host's memory during a modelled copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyModel {
    /// Nothing.
    None,
    /// The bytes are copied, at the pace of the link: they take the host's memory bandwidth, as a GPU's copies do.
    Real,
}

impl VirtualMode {
    /// Real seconds of a second of its time; `None` if it computes.
    pub fn stretch(&self) -> Option<f64> {
        match self {
            Self::Modelled(modelled) => Some(modelled.stretch),
            Self::Exact { .. } => None,
        }
    }

    /// Checks that rates are positive.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        let rates = match self {
            Self::Exact { copy_bytes_per_s } => vec![("copy", copy_bytes_per_s.unwrap_or(1.0))],
            Self::Modelled(modelled) => {
                let exponent = match modelled.routing {
                    RoutingModel::Uniform => 1.0,
                    RoutingModel::Zipf { exponent } => exponent,
                };
                vec![
                    ("copy", modelled.copy_bytes_per_s),
                    ("read", modelled.read_bytes_per_s),
                    ("compute", modelled.compute_flops),
                    ("stretch", modelled.stretch),
                    ("routing=zipf", exponent),
                ]
            }
        };
        match rates
            .iter()
            .find(|(_, rate)| !(rate.is_finite() && *rate > 0.0))
        {
            None => Ok(()),
            Some((name, rate)) => Err(KernelError::Device {
                device: "virtual".to_owned(),
                detail: format!("{name} is {rate}\n  give it a number larger than 0"),
            }),
        }
    }
}
