//! Halda's problem, from profiles and facts.

use hearth_crds::{NodeProfileStatus, RING_VERSION};

use super::layers::LayerFacts;
use super::{RingPlanning, too_old};
use crate::error::PlanError;
use crate::halda::{Device, Head, Layer, LayerTimes, Link, MAX_DEVICES, Problem, Prompt};
use crate::memory::free_bytes;
use crate::node_ranks::{Devices, NodeRanks};
use crate::predict::{ExpertsAt, Predictor, Rates};

/// GB/s and milliseconds one way between two nodes that have not measured their link: a little under gigabit Ethernet.
pub(super) const UNMEASURED_LINK: Link = Link {
    latency_ms: 0.5,
    gbps: 0.1,
};
/// Milliseconds of a message between two processes beside its way over the network: it passes two runtimes and HTTP/2.
const MESSAGE_MS: f64 = 0.2;
/// GB/s below which a disk is too slow to be read at each token: then all layers of a node must fit into its memory.
const SLOW_DISK_GBPS: f64 = 0.2;
/// GB/s of a disk that was not measured.
const UNMEASURED_DISK_GBPS: f64 = 0.1;

/// A node that may be in the ring.
#[derive(Clone)]
pub(super) struct Member<'a> {
    /// Its index among the planner's nodes.
    pub(super) n: usize,
    pub(super) node: &'a NodeProfileStatus,
    rates: Rates,
}

/// The nodes of a ring; the first one is the head.
#[derive(Clone)]
pub(super) struct Members<'a> {
    pub(super) nodes: Vec<Member<'a>>,
    /// Names of nodes that cannot be in one.
    pub(super) too_old: Vec<&'a str>,
    pub(super) layers: LayerFacts,
}

impl<'a> Members<'a> {
    /// All nodes whose workers know rings and that have CPUs for one; the first [`MAX_DEVICES`] by free memory.
    ///
    /// # Errors
    /// [`PlanError::Unsupported`] if there is none.
    pub(super) fn of(planning: &RingPlanning<'a>) -> Result<Self, PlanError> {
        let nodes = planning.estimator.nodes();
        let is_old = |node: &&NodeProfileStatus| node.reads_up_to() < RING_VERSION;
        let too_old_nodes: Vec<&str> = nodes
            .iter()
            .filter(|node| is_old(node))
            .map(|node| &*node.node)
            .collect();
        let mut members: Vec<Member<'a>> = nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| !is_old(node))
            .filter_map(|(n, node)| {
                let cpus = planning.estimator.cpus(n, ranks(planning, true)).ok()?;
                let rates = Rates::of(node, cpus.decode.first()?);
                Some(Member { n, node, rates })
            })
            .collect();
        if members.is_empty() {
            let why = match too_old_nodes.is_empty() {
                true => "no node has CPUs for a member".to_owned(),
                false => too_old(&too_old_nodes),
            };
            return Err(PlanError::Unsupported(vec![hearth_crds::FieldError::new(
                "spec.strategy",
                "is \"PipedRing\"",
                why,
            )]));
        }
        members.sort_by_key(|member| (std::cmp::Reverse(free_bytes(member.node)), member.n));
        members.truncate(MAX_DEVICES);
        members.sort_by_key(|member| member.n);
        Ok(Self {
            nodes: members,
            too_old: too_old_nodes,
            layers: LayerFacts::of(planning.demand.facts),
        })
    }

    /// The same nodes with another head.
    pub(super) fn led_by(&self, head: usize) -> Self {
        let mut led = self.clone();
        let head = led.nodes.remove(head);
        led.nodes.insert(0, head);
        led
    }

    /// What Halda is asked.
    pub(super) fn problem(&self, planning: &RingPlanning<'_>, chunk_tokens: u32) -> Problem {
        let demand = planning.demand;
        let facts = demand.facts;
        let prompt_tokens = planning.estimator.prompt_tokens();
        let devices = self.nodes.iter().enumerate();
        let devices = devices.map(|(place, member)| Device {
            name: member.node.node.clone(),
            memory_bytes: free_bytes(member.node),
            buffer_bytes: self.buffer_bytes(planning, place),
            disk_read_gbps: match member.rates.disk_gbps {
                gbps if gbps > 0.0 => gbps,
                _ => UNMEASURED_DISK_GBPS,
            },
            is_disk_slow: member.rates.disk_gbps < SLOW_DISK_GBPS,
            cpus: self.times(planning, member, chunk_tokens),
            gpu: None,
        });
        let kv_bytes = kv_layer_bytes(planning);
        let layers = (0..facts.layers).map(|layer| {
            let facts = self.layers.layer(layer);
            let read_bytes = facts.step_bytes(1) as u64;
            let stored_bytes = facts.bytes.total();
            Layer {
                stored_bytes,
                read_bytes: read_bytes.min(stored_bytes),
                routed_bytes: (facts.expert_bytes() * u64::from(facts.experts_per_token))
                    .min(read_bytes),
                kv_bytes,
            }
        });
        let ends = &self.layers.ends;
        Problem {
            devices: devices.collect(),
            layers: layers.collect(),
            head: Head {
                stored_bytes: ends.bytes.total(),
                token_ms: self.nodes[0].rates.ms(
                    ends.bytes.head as f64,
                    2.0 * ends.active_parameter_count as f64,
                ),
            },
            links: self.links(),
            hidden_bytes: 4 * u64::from(facts.hidden),
            prompt: Prompt {
                tokens: prompt_tokens,
                chunk_tokens: chunk_tokens.min(prompt_tokens).max(1),
            },
        }
    }

    /// Bytes of a place's processes: the gateways are on the nodes of the ring in turn, the first one with the head, and there
    /// may be few nodes.
    fn buffer_bytes(&self, planning: &RingPlanning<'_>, place: usize) -> u64 {
        let gateways = planning.input.spec.gateway.replicas.max(1);
        let here = match place {
            0 => gateways,
            _ => gateways - 1,
        };
        let demand = planning.demand;
        demand.worker_scratch_bytes() + demand.gateway_scratch_bytes() * u64::from(here)
    }

    /// Milliseconds of a step of `batch` streams in all layers and hops of a ring.
    pub(super) fn pass_ms(
        &self,
        planning: &RingPlanning<'_>,
        choice: &crate::halda::Choice,
        batch: u32,
    ) -> f64 {
        let context = planning.estimator.stream_tokens();
        let links = self.links();
        let bytes = 4.0 * f64::from(planning.demand.facts.hidden) * f64::from(batch);
        let mut total_ms = 0.0;
        let mut at = 0;
        for window in &choice.windows {
            if window.device != at {
                total_ms += links[at][window.device].ms(bytes);
                at = window.device;
            }
            for layer in window.layers.clone() {
                let predictor = self.predictor(planning, &self.nodes[at], layer as u32);
                total_ms += predictor.decode_ms(batch, context);
            }
        }
        match at {
            0 => total_ms,
            _ => total_ms + links[at][0].ms(bytes),
        }
    }

    fn times(
        &self,
        planning: &RingPlanning<'_>,
        member: &Member<'_>,
        chunk_tokens: u32,
    ) -> LayerTimes {
        let context = planning.estimator.stream_tokens();
        let chunk = chunk_tokens.max(1);
        let of_layers = |ms: &dyn Fn(Predictor<'_>) -> f64| {
            let layers = 0..planning.demand.facts.layers;
            layers
                .map(|layer| ms(self.predictor(planning, member, layer)))
                .collect()
        };
        LayerTimes {
            token_ms: of_layers(&|layer| layer.decode_ms(1, context)),
            prompt_token_ms: of_layers(&|layer| layer.prefill_ms(chunk, chunk) / f64::from(chunk)),
        }
    }

    /// The predictor of one layer on a member, with its weights in memory.
    fn predictor(
        &self,
        planning: &RingPlanning<'_>,
        member: &Member<'_>,
        layer: u32,
    ) -> Predictor<'_> {
        let layers = u64::from(planning.demand.facts.layers.max(1));
        Predictor {
            facts: self.layers.layer(layer),
            rates: member.rates,
            kv_bytes_per_token: planning.demand.kv_bytes_per_token / layers,
            kept_bytes: u64::MAX,
            mapped_bytes: u64::MAX,
            experts_at: ExpertsAt::Device,
            mla_form: hearth_crds::PlanMlaForm::Absorbed,
        }
    }

    fn links(&self) -> Vec<Vec<Link>> {
        let nodes = &self.nodes;
        let link = |from: &Member<'_>, to: &Member<'_>| {
            let link = measured_link(from.node, to.node).unwrap_or(UNMEASURED_LINK);
            Link {
                latency_ms: link.latency_ms + MESSAGE_MS,
                ..link
            }
        };
        let row = |from| nodes.iter().map(|to| link(from, to)).collect();
        nodes.iter().map(row).collect()
    }
}

/// The link between two nodes as either of them measured it. Values that no link has are as good as none: one odd profile
/// must not keep all rings from being planned.
pub(super) fn measured_link(from: &NodeProfileStatus, to: &NodeProfileStatus) -> Option<Link> {
    let of = |at: &NodeProfileStatus, peer: &NodeProfileStatus| {
        let mut links = at.links.iter().filter(|link| link.is_possible());
        let link = links.find(|link| link.peer == peer.node)?;
        Some(Link {
            latency_ms: link.rtt_us / 2e3,
            gbps: link.gbps,
        })
    };
    of(from, to).or_else(|| of(to, from))
}

/// Ranks of a node in a ring; the gateway is on the head's.
pub(super) fn ranks(planning: &RingPlanning<'_>, is_head: bool) -> NodeRanks {
    NodeRanks {
        gateways: match is_head {
            true => planning.input.spec.gateway.replicas.max(1),
            false => 0,
        },
        decode: 1,
        devices: Devices::CPUS,
        ..NodeRanks::default()
    }
}

/// Bytes of a layer's KV that there must be room for: what the spec says, or else that of one whole context.
pub(super) fn kv_layer_bytes(planning: &RingPlanning<'_>) -> u64 {
    let demand = planning.demand;
    let layers = u64::from(demand.facts.layers.max(1));
    let all = demand.kv_memory_bytes;
    all.unwrap_or_else(|| demand.kv_bytes(demand.context_length)) / layers
}
