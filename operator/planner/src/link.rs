//! Links as they were measured: between a node's memory and one of its GPUs, and between two nodes.

use hearth_crds::{GpuProfile, LinkProfile, NodeProfileStatus};

/// Share of the bandwidth that a PCIe link has by its generation and width which copies from pinned memory reach.
pub const LINK_EFFICIENCY: f64 = 0.8;

/// Rates of copies from a node's memory to one of its GPUs, in GB/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinkRates {
    /// With nothing else running.
    pub alone_gbps: f64,
    /// While the node's CPUs decode.
    pub beside_decode_gbps: f64,
}

impl LinkRates {
    /// The measured rates, else a share of the estimate for both; `None` if neither is known.
    pub(crate) fn of(gpu: &GpuProfile) -> Option<Self> {
        let alone_gbps = match gpu.copy_gbps {
            measured if measured > 0.0 => measured,
            _ => gpu.pcie_gbps * LINK_EFFICIENCY,
        };
        let beside_decode_gbps = match gpu.copy_beside_reads_gbps {
            measured if measured > 0.0 => measured,
            _ => alone_gbps,
        };
        (alone_gbps > 0.0).then_some(Self {
            alone_gbps,
            beside_decode_gbps,
        })
    }
}

/// The link between two nodes as either of them measured it. Values that no link has are as good as none: one odd profile
/// must not keep all plans from being made.
pub(crate) fn measured_link<'a>(
    from: &'a NodeProfileStatus,
    to: &'a NodeProfileStatus,
) -> Option<&'a LinkProfile> {
    let of = |at: &'a NodeProfileStatus, peer: &NodeProfileStatus| {
        let mut links = at.links.iter().filter(|link| link.is_possible());
        links.find(|link| link.peer == peer.node)
    };
    of(from, to).or_else(|| of(to, from))
}
