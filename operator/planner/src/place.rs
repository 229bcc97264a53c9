//! Assignment of ranks to nodes.

use hearth_crds::{NodeProfileStatus, PEERS_VERSION};

use crate::cpus::CpuLack;
use crate::gpus::GpuLack;
use crate::memory::{Demand, NodeBudget, Shortage};
use crate::node_ranks::{Devices, NodeRanks};

/// Number of ranks of each role that the spec asks for, and their devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub gateways: u32,
    pub prefill: u32,
    pub decode: u32,
    /// Ranks that read prompts together, the one prefill rank among them; 0: it reads them alone.
    pub peers: u32,
    pub devices: Devices,
}

impl Wanted {
    /// All ranks on one node.
    pub(crate) fn on_one_node(self) -> NodeRanks {
        NodeRanks {
            gateways: self.gateways,
            prefill: self.prefill,
            decode: self.decode,
            followers: self.followers(),
            peers: self.peers,
            devices: self.devices,
        }
    }

    /// The peers beside the prefill rank.
    fn followers(self) -> u32 {
        self.peers.saturating_sub(self.prefill)
    }
}

/// Ranks and memory budget of each node, in the order of the nodes given; the budget is `None` for a node without
/// ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub ranks: Vec<NodeRanks>,
    /// The node of each gateway, by gateway index.
    pub gateways: Vec<usize>,
    pub budgets: Vec<Option<NodeBudget>>,
}

/// A rank that no node can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Not enough memory; reports the node that lacks the least.
    Memory { what: String, shortage: Shortage },
    /// Not enough CPUs; reports the node that lacks the least.
    Cpus {
        what: String,
        node: usize,
        ranks: NodeRanks,
        lack: CpuLack,
    },
    /// Not enough GPUs or GPU memory; reports the node that lacks the least.
    Gpus { what: String, lack: GpuLack },
}

/// Devices that ranks do not run on, although they were considered first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub devices: Devices,
    /// Ranks that were to read prompts together; 0: one alone.
    pub peers: u32,
    pub why: Objection,
}

/// Why devices were not chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Objection {
    /// No placement has room.
    NoRoom(NoRoom),
    /// The CPUs alone are predicted to be as fast; says by how much.
    Slower(String),
}

/// Costs and limits of a node with a hypothetical set of ranks.
pub(crate) trait Cost {
    /// The CPUs that the node lacks for them; `None` if it has enough.
    fn cpu_lack(&self, node: usize, ranks: NodeRanks) -> Option<CpuLack>;
    /// The GPUs that the node lacks for them; `None` if it has enough.
    fn gpu_lack(&self, node: usize, ranks: NodeRanks) -> Option<GpuLack>;
    /// Time per output token of an additional decode rank, in milliseconds.
    fn decode_ms(&self, node: usize, ranks: NodeRanks) -> f64;
    /// Time to first token through an additional prefill rank, in milliseconds; infinite if it cannot run there.
    fn prefill_ms(&self, node: usize, ranks: NodeRanks, placed: &[NodeRanks]) -> f64;
    /// Time that an additional follower of peers takes for a prompt, in milliseconds; infinite if it cannot run there.
    fn follower_ms(&self, node: usize, ranks: NodeRanks, placed: &[NodeRanks]) -> f64;
}

/// Places decode ranks first, each on the node where a token takes the least time given the ranks already there; then
/// prefill ranks likewise, and the other peers of a prefill rank. The first gateway runs on the node of the first decode
/// rank, each additional one on a node with the fewest of them. Ties are broken by node order.
pub(crate) fn place(
    nodes: &[&NodeProfileStatus],
    demand: &Demand<'_>,
    wanted: Wanted,
    cost: &dyn Cost,
) -> Result<Placement, NoRoom> {
    let nobody = NodeRanks {
        peers: wanted.peers,
        devices: wanted.devices,
        ..NodeRanks::default()
    };
    let mut placed = vec![nobody; nodes.len()];
    let mut gateways = Vec::new();
    for i in 0..wanted.decode {
        let with = |ranks: NodeRanks| NodeRanks {
            decode: ranks.decode + 1,
            gateways: ranks.gateways + u32::from(i == 0),
            ..ranks
        };
        let node = {
            let ms = |n: usize, ranks: NodeRanks| cost.decode_ms(n, ranks);
            Candidates {
                nodes,
                demand,
                placed: &placed,
                cost,
            }
            .cheapest(&format!("decode-{i}"), with, &ms)?
        };
        placed[node] = with(placed[node]);
        gateways.extend((i == 0).then_some(node));
    }
    for i in 0..wanted.prefill {
        let with = |ranks: NodeRanks| NodeRanks {
            prefill: ranks.prefill + 1,
            ..ranks
        };
        let node = {
            let ms = |n: usize, ranks: NodeRanks| cost.prefill_ms(n, ranks, &placed);
            Candidates {
                nodes,
                demand,
                placed: &placed,
                cost,
            }
            .cheapest(&format!("prefill-{i}"), with, &ms)?
        };
        placed[node] = with(placed[node]);
    }
    place_followers(nodes, demand, wanted.followers(), cost, &mut placed)?;
    let further = wanted.gateways.saturating_sub(1);
    gateways.extend(place_gateways(nodes, demand, further, cost, &mut placed)?);
    let budgets = nodes
        .iter()
        .zip(&placed)
        .map(|(node, ranks)| {
            if ranks.count() == 0 {
                None
            } else {
                demand.fit(node, *ranks).ok()
            }
        })
        .collect();
    Ok(Placement {
        ranks: placed,
        gateways,
        budgets,
    })
}

/// Places the other peers of the prefill rank.
fn place_followers(
    nodes: &[&NodeProfileStatus],
    demand: &Demand<'_>,
    count: u32,
    cost: &dyn Cost,
    placed: &mut [NodeRanks],
) -> Result<(), NoRoom> {
    for i in 0..count {
        let with = |ranks: NodeRanks| NodeRanks {
            followers: ranks.followers + 1,
            ..ranks
        };
        let ms = |n: usize, ranks: NodeRanks| cost.follower_ms(n, ranks, placed);
        let node = Candidates {
            nodes,
            demand,
            placed,
            cost,
        }
        .cheapest(&format!("stage-{i}"), with, &ms)?;
        placed[node] = with(placed[node]);
    }
    Ok(())
}

/// Places the gateways after the first; returns their nodes.
fn place_gateways(
    nodes: &[&NodeProfileStatus],
    demand: &Demand<'_>,
    count: u32,
    cost: &dyn Cost,
    placed: &mut [NodeRanks],
) -> Result<Vec<usize>, NoRoom> {
    let mut gateways = Vec::new();
    for i in 1..=count {
        let with = |ranks: NodeRanks| NodeRanks {
            gateways: ranks.gateways + 1,
            ..ranks
        };
        let cost_of = |n: usize, ranks: NodeRanks| gateway_cost(demand, nodes[n], placed[n], ranks);
        let node = Candidates {
            nodes,
            demand,
            placed,
            cost,
        }
        .cheapest(&format!("gateway-{i}"), with, &cost_of)?;
        placed[node] = with(placed[node]);
        gateways.push(node);
    }
    Ok(gateways)
}

/// Cost of one more gateway on `node`, whose ranks change from `before` to `after`: dominated by weights or KV cache
/// that would lose memory to it, then gateways that could be lost with one node, then using a node that has no worker
/// yet.
fn gateway_cost(
    demand: &Demand<'_>,
    node: &NodeProfileStatus,
    before: NodeRanks,
    after: NodeRanks,
) -> f64 {
    let memory = |ranks: NodeRanks| {
        let budget = demand.fit(node, ranks).ok()?;
        Some((
            budget.policy,
            budget.weight_budget_bytes,
            budget.decode_kv_bytes,
        ))
    };
    let takes_memory = before.count() > 0 && memory(before) != memory(after);
    let is_idle = before.count() == 0;
    f64::from(u32::from(takes_memory) * 1000 + after.gateways * 2 + u32::from(is_idle))
}

/// What is said of nodes whose workers are of an earlier version.
pub(crate) fn no_peers(nodes: &[&str]) -> String {
    format!(
        "the workers' image of {} reads no plans of peers (version {PEERS_VERSION}): renew it",
        nodes.join(", ")
    )
}

struct Candidates<'a> {
    nodes: &'a [&'a NodeProfileStatus],
    demand: &'a Demand<'a>,
    placed: &'a [NodeRanks],
    cost: &'a dyn Cost,
}

impl Candidates<'_> {
    /// The node with room on which one more rank costs the least. `cost_of` takes a node and the ranks that it would
    /// have.
    fn cheapest(
        &self,
        what: &str,
        with: impl Fn(NodeRanks) -> NodeRanks,
        cost_of: &dyn Fn(usize, NodeRanks) -> f64,
    ) -> Result<usize, NoRoom> {
        let mut best: Option<(f64, usize)> = None;
        let mut nearest: Option<Shortage> = None;
        let mut crowded: Option<(CpuLack, usize, NodeRanks)> = None;
        let mut without_gpus: Option<GpuLack> = None;
        for (n, node) in self.nodes.iter().enumerate() {
            let ranks = with(self.placed[n]);
            // All ranks of a plan read it, and those of this node do not know peers.
            if ranks.peers > 0 && node.reads_up_to() < PEERS_VERSION {
                without_gpus.get_or_insert_with(|| GpuLack::Unusable {
                    node: node.node.clone(),
                    why: no_peers(&[&node.node]),
                });
                continue;
            }
            if let Some(lack) = self.cost.cpu_lack(n, ranks) {
                if crowded.is_none_or(|(nearest, ..)| lack.is_nearer_than(&nearest)) {
                    crowded = Some((lack, n, ranks));
                }
                continue;
            }
            if let Some(lack) = self.cost.gpu_lack(n, ranks) {
                if without_gpus
                    .as_ref()
                    .is_none_or(|nearest| lack.is_nearer_than(nearest))
                {
                    without_gpus = Some(lack);
                }
                continue;
            }
            match self.demand.fit(node, ranks) {
                Ok(_) => {
                    let cost = cost_of(n, ranks);
                    if best.is_none_or(|(least, _)| cost < least) {
                        best = Some((cost, n));
                    }
                }
                Err(shortage) => {
                    let lacks = |s: &Shortage| s.needs_bytes.saturating_sub(s.free_bytes);
                    if nearest
                        .as_ref()
                        .is_none_or(|other| lacks(&shortage) < lacks(other))
                    {
                        nearest = Some(shortage);
                    }
                }
            }
        }
        let what = what.to_owned();
        match (best, nearest, without_gpus, crowded) {
            (Some((_, node)), ..) => Ok(node),
            (None, Some(shortage), ..) => Err(NoRoom::Memory { what, shortage }),
            (None, None, Some(lack), _) => Err(NoRoom::Gpus { what, lack }),
            (None, None, None, Some((lack, node, ranks))) => Err(NoRoom::Cpus {
                what,
                node,
                ranks,
                lack,
            }),
            (None, None, None, None) => Ok(0),
        }
    }
}
