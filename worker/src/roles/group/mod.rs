//! Ranks that run one model together, as a ring or as peers: what the plan says of a group, and the processes' side of it.

mod addresses;
mod follower;
mod former;
mod head;
mod judge;
mod link;
mod membership;
mod net;
mod place;
#[cfg(test)]
mod short_tests;
mod terms;
#[cfg(test)]
mod tests;
mod way;

use hearth_kernels::KvLayout;

pub(super) use follower::FollowerWorker;
pub(super) use head::Head;
pub(super) use membership::Membership;
pub(super) use place::{Place, Task};

/// What is said of a group that cannot be.
fn wrong(head: &str) -> String {
    format!("the plan's group of {head} cannot be\n  plan again with this version of hearth")
}

/// Blocks of a cache of `bytes` for `layers` layers.
fn kv_blocks(bytes: u64, layers: usize, layout: &KvLayout) -> u32 {
    let block_bytes = (layers * layout.block_layer_bytes()).max(1) as u64;
    u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX)
}

/// What each layer of a cache is, whichever layers there are.
fn of_one_layer(layout: &KvLayout) -> String {
    KvLayout {
        layers: 1,
        ..*layout
    }
    .fingerprint()
}
