//! Who may be in a ring: the CPUs of each node, and each of its GPUs.
//!
//! A process has one backend, so the window that the paper gives a device, of which the GPU has `n` layers and the CPUs
//! the others (prima.cpp, section 3.1), is here two windows of two members of one node, one behind the other.

use std::cmp::Reverse;

use hearth_crds::{GpuProfile, NodeProfileStatus, PlanRole, RING_VERSION, format_bytes};

use super::RingPlanning;
use super::layers::LayerFacts;
use super::problem::kv_layer_bytes;
use crate::gpus::{GpuRoom, activations_on, gpu_rooms, unusable};
use crate::halda::MAX_DEVICES;
use crate::memory::{GPU_PADDING_SHARE, free_bytes};
use crate::node_ranks::{Device, Devices, NodeRanks};
use crate::predict::Rates;

/// What may be in a ring: CPUs or a GPU of a node.
#[derive(Clone)]
pub(super) struct Member<'a> {
    /// Index of its node among the planner's.
    pub(super) n: usize,
    pub(super) node: &'a NodeProfileStatus,
    /// `None` for the CPUs.
    pub(super) gpu: Option<GpuRoom<'a>>,
    pub(super) rates: Rates,
    /// What it is called: its node, or its GPU with the node; unique among the members.
    pub(super) name: String,
}

/// The members that Halda chooses among; the first one is the head.
#[derive(Clone)]
pub(super) struct Members<'a> {
    pub(super) all: Vec<Member<'a>>,
    /// Names of nodes that cannot be in a ring.
    pub(super) too_old: Vec<&'a str>,
    /// GPUs that cannot be, each with the reason.
    pub(super) refused_gpus: Vec<String>,
    /// The same of nodes' CPUs, which may lack the memory only beside the processes of members on GPUs.
    pub(super) refused_cpus: Vec<String>,
    /// Whether one of them lacks the memory for a layer.
    pub(super) lack_memory: bool,
    pub(super) layers: LayerFacts,
}

impl<'a> Members<'a> {
    /// Members on all nodes whose workers know rings: their CPUs where they have some for one, and those of their GPUs that
    /// `may_use` allows. Of more than [`MAX_DEVICES`], GPUs come first, then those with most memory. There may be none.
    pub(super) fn of(planning: &RingPlanning<'a>, may_use: &dyn Fn(&GpuProfile) -> bool) -> Self {
        let mut members = Self {
            all: Vec::new(),
            too_old: Vec::new(),
            refused_gpus: Vec::new(),
            refused_cpus: Vec::new(),
            lack_memory: false,
            layers: LayerFacts::of(planning.demand.facts),
        };
        for (n, node) in planning.estimator.nodes().iter().enumerate() {
            match node.reads_up_to() < RING_VERSION {
                true => members.too_old.push(&node.node),
                false => members.add(planning, (n, node), may_use),
            }
        }
        let all = &mut members.all;
        // As they were added, members are in the order of nodes.
        let mut kept: Vec<usize> = (0..all.len()).collect();
        kept.sort_by_key(|at| {
            (
                all[*at].gpu.is_none(),
                Reverse(all[*at].memory_bytes()),
                *at,
            )
        });
        let beyond = kept.split_off(MAX_DEVICES.min(kept.len()));
        members
            .refused_cpus
            .extend(beyond_most(beyond.iter().map(|at| &*all[*at].name)));
        kept.sort_unstable();
        *all = kept.into_iter().map(|at| all[at].clone()).collect();
        members
    }

    /// The same members with another head.
    pub(super) fn led_by(&self, head: usize) -> Self {
        let mut led = self.clone();
        let head = led.all.remove(head);
        led.all.insert(0, head);
        led
    }

    /// GPUs of a node among the members.
    pub(super) fn gpus_on(&self, n: usize) -> usize {
        let here = self.all.iter().filter(|member| member.n == n);
        here.filter(|member| member.gpu.is_some()).count()
    }

    /// Adds the members of a node.
    fn add(
        &mut self,
        planning: &RingPlanning<'a>,
        (n, node): (usize, &'a NodeProfileStatus),
        may_use: &dyn Fn(&GpuProfile) -> bool,
    ) {
        let rooms = self.usable(planning, node, may_use);
        let gpus = self.hosted(planning, (n, node), rooms);
        let gateways = planning.input.spec.gateway.replicas.max(1);
        // A ring's first gateway is on the head's node, and any node may be that.
        let here = match gpus.is_empty() {
            true => gateways - 1,
            false => gateways,
        };
        let needs_bytes =
            planning.host_bytes(gpus.len(), here) + planning.demand.worker_scratch_bytes();
        let layer_bytes = self.least_layer(planning);
        let has_room = needs_bytes + layer_bytes <= free_bytes(node);
        self.lack_memory |= !has_room;
        if !has_room {
            self.refused_cpus.push(format!(
                "{}: a layer takes {} with its KV, and of {} of memory {} are left beside processes",
                name_of_cpus(node),
                format_bytes(layer_bytes),
                format_bytes(free_bytes(node)),
                format_bytes(free_bytes(node).saturating_sub(needs_bytes))
            ));
        }
        let ranks = planning.node_ranks(1, gpus.len(), gateways);
        let cpus = planning.estimator.cpus(n, ranks).ok();
        let cpus = cpus.filter(|_| has_room);
        if let Some(set) = cpus.as_ref().and_then(|cpus| cpus.decode.first()) {
            self.all.push(Member {
                n,
                node,
                gpu: None,
                rates: Rates::of(node, set, planning.demand.facts),
                name: name_of_cpus(node),
            });
        }
        let asked = planning.input.spec.model.activations;
        self.all.extend(gpus.into_iter().map(|room| Member {
            n,
            node,
            gpu: Some(room),
            rates: Rates::of_gpu(
                room.gpu,
                activations_on(room.gpu, asked),
                planning.demand.facts,
            ),
            name: name_of(room.gpu, node),
        }));
    }

    /// GPUs of a node that have room for a layer.
    fn usable(
        &mut self,
        planning: &RingPlanning<'_>,
        node: &'a NodeProfileStatus,
        may_use: &dyn Fn(&GpuProfile) -> bool,
    ) -> Vec<GpuRoom<'a>> {
        if node.gpus.is_empty() || !node.gpus.iter().any(may_use) {
            return Vec::new();
        }
        if planning.input.spec.prefill.gpus_per_worker == Some(0) {
            self.refused_gpus.push(format!(
                "GPUs of {}: spec.prefill.gpusPerWorker is 0, so that no worker uses one",
                node.node
            ));
            return Vec::new();
        }
        let offer = planning.estimator.gpus();
        let mut rooms = match gpu_rooms(node, offer) {
            Ok(rooms) => rooms,
            Err(why) => {
                self.refused_gpus.push(why);
                return Vec::new();
            }
        };
        for gpu in &node.gpus {
            let is_left = !rooms.iter().any(|room| room.gpu.uuid == gpu.uuid);
            if let Some(why) = unusable(gpu).filter(|_| is_left) {
                let name = &gpu.name;
                self.refused_gpus
                    .push(format!("{name} of {} cannot be used: {why}", node.node));
            }
        }
        if let Some(free) = offer.at(node).count().map(|free| free as usize)
            && free < rooms.len()
        {
            self.refused_gpus.push(format!(
                "{} of the {} GPUs of {} are taken by other Pods",
                rooms.len() - free,
                rooms.len(),
                node.node
            ));
            rooms.truncate(free);
        }
        let (working_bytes, layer_bytes) =
            (planning.gpu_working_bytes(), self.least_layer(planning));
        rooms.retain(|room| {
            let fits = layer_bytes <= planning.gpu_layer_room_bytes(room.usable_bytes);
            self.lack_memory |= !fits;
            if !fits {
                self.refused_gpus.push(format!(
                    "{}: a layer takes {} with its KV, and {} are free beside {} of working room",
                    name_of(room.gpu, node),
                    format_bytes(layer_bytes),
                    format_bytes(room.usable_bytes.saturating_sub(working_bytes)),
                    format_bytes(working_bytes)
                ));
            }
            fits && may_use(room.gpu)
        });
        rooms
    }

    /// As many of a node's GPUs as it has CPUs and memory for their processes.
    fn hosted(
        &mut self,
        planning: &RingPlanning<'_>,
        (n, node): (usize, &NodeProfileStatus),
        mut gpus: Vec<GpuRoom<'a>>,
    ) -> Vec<GpuRoom<'a>> {
        let gateways = planning.input.spec.gateway.replicas.max(1);
        while let Some(last) = gpus.last() {
            let needs = planning.host_bytes(gpus.len(), gateways);
            let ranks = planning.node_ranks(0, gpus.len(), gateways);
            let has_cpus = planning.estimator.cpus(n, ranks).is_ok();
            if has_cpus && needs <= free_bytes(node) {
                break;
            }
            self.lack_memory |= has_cpus;
            self.refused_gpus.push(match has_cpus {
                true => format!(
                    "{}: the processes on the node's GPUs and the gateways' take {} of its memory, and {} are free",
                    name_of(last.gpu, node),
                    format_bytes(needs),
                    format_bytes(free_bytes(node))
                ),
                false => format!("{}: no CPUs for its process", name_of(last.gpu, node)),
            });
            gpus.pop();
        }
        gpus
    }

    /// Bytes of the smallest layer with the least KV.
    fn least_layer(&self, planning: &RingPlanning<'_>) -> u64 {
        let layers = 0..planning.demand.facts.layers;
        let bytes = layers.map(|layer| self.layers.layer(layer).bytes.total());
        bytes.min().unwrap_or(0) + kv_layer_bytes(planning)
    }
}

impl Member<'_> {
    /// Bytes of its memory that ranks may use.
    pub(super) fn memory_bytes(&self) -> u64 {
        match &self.gpu {
            Some(room) => room.usable_bytes,
            None => free_bytes(self.node),
        }
    }
}

/// What is said of members beyond the most that a ring is chosen among.
fn beyond_most<'m>(names: impl ExactSizeIterator<Item = &'m str>) -> Option<String> {
    /// Most names that are told.
    const TOLD: usize = 4;
    let count = names.len();
    let told: Vec<&str> = names.take(TOLD).collect();
    let more = match count.saturating_sub(TOLD) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (count > 0).then(|| {
        format!(
            "{}{more}: a ring is chosen among {MAX_DEVICES} members, GPUs first, then those with most memory",
            told.join(", ")
        )
    })
}

/// A node's name, where it has GPUs as that of its CPUs.
fn name_of_cpus(node: &NodeProfileStatus) -> String {
    match node.gpus.is_empty() {
        true => node.node.clone(),
        false => format!("CPUs of {}", node.node),
    }
}

/// A GPU's name with its node, and with a number where others there have the same one.
fn name_of(gpu: &GpuProfile, node: &NodeProfileStatus) -> String {
    let alike = node.gpus.iter().filter(|other| other.name == gpu.name);
    let uuids: Vec<&str> = alike.map(|other| &*other.uuid).collect();
    let index = uuids.iter().position(|uuid| *uuid == gpu.uuid);
    match index.filter(|_| uuids.len() > 1) {
        Some(index) => format!("{} {} of {}", gpu.name, index + 1, node.node),
        None => format!("{} of {}", gpu.name, node.node),
    }
}

impl RingPlanning<'_> {
    /// Ranks of a node in a ring, for the division of its CPUs: its members on GPUs need what prefill ranks on them need.
    pub(super) fn node_ranks(&self, on_cpus: u32, on_gpus: usize, gateways: u32) -> NodeRanks {
        NodeRanks {
            gateways,
            prefill: u32::try_from(on_gpus).unwrap_or(u32::MAX),
            decode: on_cpus,
            devices: Devices {
                prefill: match on_gpus {
                    0 => Device::Cpus,
                    _ => Device::Gpu,
                },
                decode: Device::Cpus,
            },
            ..NodeRanks::default()
        }
    }

    /// Bytes of a node's memory for the processes of members on its GPUs and of gateways.
    pub(super) fn host_bytes(&self, gpus: usize, gateways: u32) -> u64 {
        self.demand.gpu_worker_scratch_bytes() * gpus as u64
            + self.demand.gateway_scratch_bytes() * u64::from(gateways)
    }

    /// Bytes of a GPU that a member needs beside weights and KV: activations, logits, the driver's context.
    pub(super) fn gpu_working_bytes(&self) -> u64 {
        let need = self.demand.on_gpu(PlanRole::Decode, Device::Gpu);
        need.working_bytes
    }

    /// Bytes of weights as stored, and of KV, that fit on a GPU of which ranks may use so many.
    pub(super) fn gpu_layer_room_bytes(&self, usable_bytes: u64) -> u64 {
        let room_bytes = usable_bytes.saturating_sub(self.gpu_working_bytes());
        // Weights that fill it, without their padding.
        room_bytes - room_bytes.div_ceil(GPU_PADDING_SHARE + 1)
    }
}
