//! An operator on a control plane without nodes: a fault-injecting proxy, stand-ins for kubelets, and dumps of the
//! final state for comparison.

mod dump;
mod kubelet;
mod process;
mod proxy;
mod scale;
mod stand;

pub use kubelet::{Kubelets, make_node};
pub use process::Operator;
pub use proxy::{Faults, Kill, Proxy, Side, Write};
pub use scale::{Scale, ScaleReport};
pub use stand::{Stand, is_settled};
