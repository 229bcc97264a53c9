//! An operator on a control plane without nodes: a proxy that breaks things, stand-ins for kubelets, and what is
//! there in the end, made comparable.

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
