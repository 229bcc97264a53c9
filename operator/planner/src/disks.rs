//! What is assumed of disks, and what measures them.

/// GB/s of a disk that was not measured: a slow one.
pub(crate) const UNMEASURED_GBPS: f64 = 0.1;

/// GB/s below which a disk is too slow to be read at each token: then all layers of a node of a ring must fit into its memory.
pub(crate) const SLOW_GBPS: f64 = 0.2;

/// What measures a disk.
pub(crate) const REMEDY: &str = "hearth-worker profile --disk DIRECTORY --probe-disk; in a cluster the agent says why it has not";
