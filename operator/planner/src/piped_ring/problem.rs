//! Halda's problem, from profiles and facts.

use hearth_crds::PlanMlaForm;

use super::members::{Member, Members};
use super::{Passes, RingPlanning};
use crate::disks;
use crate::halda::{Device, Head, Layer, LayerTimes, Link, Problem, Prompt};
use crate::link::{LinkRates, measured_link};
use crate::operations::Operations;
use crate::predict::{ExpertsAt, LOOPBACK_GBPS, Predictor};

/// GB/s and milliseconds one way between two nodes that have not measured their link: a little under gigabit Ethernet.
pub(super) const UNMEASURED_LINK: Link = Link {
    latency_ms: 0.5,
    gbps: 0.1,
};
/// The same between two processes of one node.
const LOOPBACK: Link = Link {
    latency_ms: 0.025,
    gbps: LOOPBACK_GBPS,
};
/// Milliseconds of a message between two processes beside its way over the network: it passes two runtimes and HTTP/2.
const MESSAGE_MS: f64 = 0.2;

impl Members<'_> {
    /// What Halda is asked: about one stream.
    pub(super) fn problem(&self, planning: &RingPlanning<'_>, passes: Passes) -> Problem {
        self.problem_of(planning, passes, 1)
    }

    /// The same with each of the members as the head. Layers take each of them as long whoever leads.
    pub(super) fn problems_by_head(
        &self,
        planning: &RingPlanning<'_>,
        passes: Passes,
    ) -> Vec<Problem> {
        let times = self.times(planning, passes, 1);
        let led_by = |head: usize| {
            let mut times = times.clone();
            times[..=head].rotate_right(1);
            self.led_by(head).problem_with(times, planning, passes, 1)
        };
        (0..self.all.len()).map(led_by).collect()
    }

    /// The same about steps of so many streams.
    pub(super) fn problem_of(
        &self,
        planning: &RingPlanning<'_>,
        passes: Passes,
        streams: u32,
    ) -> Problem {
        let times = self.times(planning, passes, streams);
        self.problem_with(times, planning, passes, streams)
    }

    fn problem_with(
        &self,
        times: Vec<LayerTimes>,
        planning: &RingPlanning<'_>,
        passes: Passes,
        streams: u32,
    ) -> Problem {
        let demand = planning.demand;
        let facts = demand.facts;
        let prompt_tokens = passes.prompt_tokens.max(1);
        let devices = self.all.iter().zip(times).map(|(member, times)| Device {
            name: member.name.clone(),
            memory_bytes: member.memory_bytes(),
            buffer_bytes: self.buffer_bytes(planning, member),
            disk_read_gbps: member.rates.assumed_disk_gbps(),
            map_ms_per_gb: member.rates.map_ms_per_gb,
            must_fit: member.gpu.is_some() || member.rates.disk_gbps < disks::SLOW_GBPS,
            cpus: times,
            gpu: None,
        });
        let kv_bytes = kv_layer_bytes(planning);
        let layers = (0..facts.layers).map(|layer| {
            let facts = self.layers.layer(layer);
            let stored_bytes = facts.bytes.total();
            let read_bytes = (facts.step_bytes(streams) as u64).min(stored_bytes);
            let chosen = facts.expected_distinct_experts(streams);
            Layer {
                stored_bytes,
                read_bytes,
                routed_bytes: ((facts.expert_bytes() as f64 * chosen).round() as u64)
                    .min(read_bytes),
                kv_bytes,
            }
        });
        let ends = &self.layers.ends;
        Problem {
            devices: devices.collect(),
            layers: layers.collect(),
            head: Head {
                stored_bytes: ends.bytes.head,
                embedding_bytes: ends.bytes.embedding,
                token_ms: self.ends_ms(streams),
            },
            links: self.links(),
            window_bytes: 2 * facts.largest_layer_bytes,
            hidden_bytes: 4 * u64::from(facts.hidden) * u64::from(streams),
            prompt: Prompt {
                tokens: prompt_tokens,
                chunk_tokens: passes.chunk_tokens.min(prompt_tokens).max(1),
                flight_tokens: passes.flight_tokens.min(prompt_tokens).max(1),
            },
        }
    }

    /// Bytes of a member's memory for anything but layers: on a GPU its working room and padding, in a node's memory the
    /// processes of all members there and the gateways'. These are on the nodes of the ring in turn, the first one with the
    /// head, and there may be few nodes.
    fn buffer_bytes(&self, planning: &RingPlanning<'_>, member: &Member<'_>) -> u64 {
        if let Some(room) = &member.gpu {
            return room.usable_bytes - planning.gpu_layer_room_bytes(room.usable_bytes);
        }
        let gateways = planning.input.spec.gateway.replicas.max(1);
        let here = match self.all[0].n == member.n {
            true => gateways,
            false => gateways - 1,
        };
        let others = planning.host_bytes(self.gpus_on(member.n), here);
        planning.demand.worker_scratch_bytes() + others
    }

    /// Milliseconds of embedding and output head of a step of so many streams.
    fn ends_ms(&self, streams: u32) -> f64 {
        let (ends, rates) = (&self.layers.ends, &self.all[0].rates);
        let operations = Operations::of(ends, PlanMlaForm::Absorbed).total(1.0);
        rates.ms(
            ends.bytes.head as f64,
            2.0 * ends.active_parameter_count as f64 * f64::from(streams),
        ) + rates.overhead_ms(ends, operations)
    }

    /// Times of layers of each member.
    fn times(&self, planning: &RingPlanning<'_>, passes: Passes, streams: u32) -> Vec<LayerTimes> {
        let members = self.all.iter();
        let of = |member| self.times_of(member, planning, passes, streams);
        members.map(of).collect()
    }

    fn times_of(
        &self,
        member: &Member<'_>,
        planning: &RingPlanning<'_>,
        passes: Passes,
        streams: u32,
    ) -> LayerTimes {
        let context = planning.estimator.stream_tokens();
        let prompt = passes.prompt_tokens.max(1);
        let flight = passes.flight_tokens.clamp(1, prompt);
        let of_layers = |ms: &dyn Fn(Predictor<'_>) -> f64| {
            let layers = 0..planning.demand.facts.layers;
            layers
                .map(|layer| ms(self.predictor(planning, member, layer)))
                .collect()
        };
        LayerTimes {
            token_ms: of_layers(&|layer| layer.decode_ms(streams, context)),
            prompt_token_ms: of_layers(&|layer| {
                layer.prefill_ms(prompt, flight) / f64::from(prompt)
            }),
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
            mla_form: PlanMlaForm::Absorbed,
        }
    }

    fn links(&self) -> Vec<Vec<Link>> {
        let row = |from| self.all.iter().map(|to| link(from, to)).collect();
        self.all.iter().map(row).collect()
    }
}

/// The way of a hidden state from one member to another: between two processes, and from a GPU and to one beside that.
fn link(from: &Member<'_>, to: &Member<'_>) -> Link {
    let between = match from.n == to.n {
        true => LOOPBACK,
        false => measured_link(from.node, to.node).map_or(UNMEASURED_LINK, |link| Link {
            latency_ms: link.rtt_us / 2e3,
            gbps: link.gbps,
        }),
    };
    let mut link = Link {
        latency_ms: between.latency_ms + MESSAGE_MS,
        ..between
    };
    for end in [from, to] {
        let Some(room) = &end.gpu else {
            continue;
        };
        // An exchange is there and back; the paper's t^ram-vram and t^vram-ram.
        link.latency_ms += end.rates.exchange_ms / 2.0;
        if let Some(copies) = LinkRates::of(room.gpu) {
            link.gbps = 1.0 / (1.0 / link.gbps + 1.0 / copies.alone_gbps);
        }
    }
    link
}

/// Bytes of a layer's KV that there must be room for: what the spec says, or else that of one whole context.
pub(super) fn kv_layer_bytes(planning: &RingPlanning<'_>) -> u64 {
    let demand = planning.demand;
    let layers = u64::from(demand.facts.layers.max(1));
    let all = demand.kv_memory_bytes;
    all.unwrap_or_else(|| demand.kv_bytes(demand.context_length)) / layers
}
