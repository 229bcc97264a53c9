//! The paper's objective for one ring and one number of layers a round.
//!
//! A ring's devices are cut into slots: a device's GPU, if it has one, then its CPUs. A round of `W` layers is cut into one
//! stretch for each slot, so sizes of slots say a split completely, and every round is cut alike. The last round has
//! `L mod W` layers and ends where they end. Position `p` of a round stands for the layers `p`, `p + W`, `p + 2W`, …: what
//! they cost together is the position's cost, with the real bytes and times of each layer.

use crate::ring_problem::Problem;
use crate::ring_simulator::{Window, sums};

pub(super) const GIB: f64 = (1_u64 << 30) as f64;

/// Returns all numbers of layers a round of so many devices in the order in which they get a program: the widest of each number of
/// rounds, fewer rounds first, and then the others, the widest first.
pub(super) fn widths(devices: usize, layers: usize) -> impl Iterator<Item = usize> {
    let of_rounds = move |width: usize| layers.div_ceil(width);
    let is_widest = move |width: usize| width == layers || of_rounds(width + 1) < of_rounds(width);
    let all = move || (devices.max(1)..=layers).rev();
    let widest = all().filter(move |&width| is_widest(width));
    widest.chain(all().filter(move |&width| !is_widest(width)))
}

/// Devices in the order in which a token visits them, the head first.
#[derive(Clone, Debug)]
pub(super) struct Ring<'a> {
    pub problem: &'a Problem,
    pub order: Vec<usize>,
    pub slots: Vec<Slot>,
    /// Slot of each place's CPUs.
    pub cpu_slots: Vec<usize>,
    /// Milliseconds of a round that ends at each place, besides its layers: hops, the one back to the head included, and
    /// copies to GPUs and back (the paper's `ξ` of all places up to this one).
    pub round_ms: Vec<f64>,
    /// The share of the experts without room that a token reads.
    pub chosen_share: f64,
    /// Of each layer, the first one that has the same bytes and takes as long on each of the ring's processors.
    pub kinds: Vec<usize>,
}

/// One processor of the ring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Slot {
    pub place: usize,
    pub device: usize,
    pub is_gpu: bool,
    /// Bytes for weights and KV.
    pub room_bytes: u64,
    /// Milliseconds to read a byte from disk; `None` if all weights must have room.
    pub disk_ms_per_byte: Option<f64>,
}

impl Slot {
    fn new(problem: &Problem, place: usize, device: usize, is_gpu: bool) -> Self {
        let rates = &problem.devices[device];
        let may_overflow = !is_gpu && !rates.must_fit;
        Self {
            place,
            device,
            is_gpu,
            room_bytes: match is_gpu {
                true => problem.gpu_room_bytes(device),
                false => problem.room_bytes(device),
            },
            disk_ms_per_byte: may_overflow.then(|| 1.0 / rates.disk_read_gbps / 1e6),
        }
    }
}

impl<'a> Ring<'a> {
    pub(super) fn new(problem: &'a Problem, order: Vec<usize>) -> Self {
        let mut slots = Vec::new();
        let mut cpu_slots = Vec::new();
        let mut round_ms = Vec::new();
        let mut there_ms = 0.0;
        for (place, &device) in order.iter().enumerate() {
            let gpu = problem.devices[device].gpu.as_ref();
            for is_gpu in [true, false] {
                if is_gpu && gpu.is_none() {
                    continue;
                }
                slots.push(Slot::new(problem, place, device, is_gpu));
            }
            cpu_slots.push(slots.len() - 1);
            let hop_ms = match place {
                0 => 0.0,
                _ => problem.hop_ms(order[place - 1], device, 1),
            };
            there_ms += hop_ms + gpu.map_or(0.0, |gpu| problem.copies_ms(gpu, 1));
            round_ms.push(there_ms + problem.hop_ms(device, 0, 1));
        }
        Self {
            kinds: kinds(problem, &order),
            chosen_share: problem.chosen_share(),
            problem,
            order,
            slots,
            cpu_slots,
            round_ms,
        }
    }

    /// Devices of the ring.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether any weights may be read from a disk at each token.
    pub(super) fn may_overflow(&self) -> bool {
        let mut slots = self.slots.iter();
        slots.any(|slot| slot.disk_ms_per_byte.is_some())
    }

    /// Whether each device has a layer.
    pub(super) fn has_all(&self, sizes: &[usize]) -> bool {
        (0..self.len()).all(|place| self.has_layer(sizes, place))
    }

    /// Whether the device at `place` has a layer.
    pub(super) fn has_layer(&self, sizes: &[usize], place: usize) -> bool {
        let slots = self.first_slot(place)..=self.cpu_slots[place];
        sizes[slots].iter().any(|&size| size > 0)
    }

    /// The first of a place's slots.
    pub(super) fn first_slot(&self, place: usize) -> usize {
        match place {
            0 => 0,
            _ => self.cpu_slots[place - 1] + 1,
        }
    }

    /// The windows of a split, in the order of computation.
    pub(super) fn windows(&self, sizes: &[usize]) -> Vec<Window> {
        let layers = self.problem.layers.len();
        let width: usize = sizes.iter().sum();
        let mut windows = Vec::with_capacity(layers.div_ceil(width) * self.len());
        let mut begin = 0;
        let mut round = 0;
        while begin < layers {
            for place in 0..self.len() {
                let cpu_slot = self.cpu_slots[place];
                let gpu_size = match self.first_slot(place) == cpu_slot {
                    true => 0,
                    false => sizes[cpu_slot - 1],
                };
                let end = (begin + gpu_size + sizes[cpu_slot]).min(layers);
                if begin < end {
                    windows.push(Window {
                        device: self.order[place],
                        round,
                        layers: begin..end,
                        gpu_layers: gpu_size.min(end - begin),
                    });
                }
                begin = end;
            }
            round += 1;
        }
        windows
    }
}

fn kinds(problem: &Problem, order: &[usize]) -> Vec<usize> {
    let is_same = |a: usize, b: usize| {
        let times = order.iter().map(|&device| &problem.devices[device]);
        problem.layers[a] == problem.layers[b]
            && times
                .flat_map(|device| device.times())
                .all(|times| times.token_ms[a].to_bits() == times.token_ms[b].to_bits())
    };
    let mut kinds: Vec<usize> = Vec::new();
    for layer in 0..problem.layers.len() {
        let first = (0..layer).find(|&first| kinds[first] == first && is_same(first, layer));
        kinds.push(first.unwrap_or(layer));
    }
    kinds
}

/// A ring with a number of layers a round.
#[derive(Clone, Debug)]
pub(super) struct Round<'r, 'a> {
    pub ring: &'r Ring<'a>,
    /// `W`: layers of a full round.
    pub width: usize,
    /// Rounds with all `W` layers.
    pub full_rounds: usize,
    /// Layers of the last round if it is not full, else 0.
    pub rest: usize,
    /// The part of the time to read what has no room that counts: 1 in the paper's objective, less where it is expected to
    /// be read while others compute.
    pub overflow_part: f64,
    /// Sums over a round's first positions of each slot's milliseconds.
    pub ms: Vec<Vec<f64>>,
    /// Sums over a round's first positions of the bytes of weights.
    pub stored: Vec<u64>,
    /// The same of those that each token reads.
    pub dense: Vec<u64>,
    /// The same of KV.
    pub kv: Vec<u64>,
}

/// What a split costs by the paper's objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cost {
    pub ms: f64,
    /// GiB by which the split breaks limits of memory; 0 if it fits.
    pub excess_gib: f64,
}

impl Cost {
    pub(super) fn fits(self) -> bool {
        self.excess_gib == 0.0
    }

    /// Whether it breaks limits less, or as little and is faster.
    pub(super) fn is_below(self, other: Self) -> bool {
        (self.excess_gib, self.ms) < (other.excess_gib, other.ms)
    }
}

impl<'r, 'a> Round<'r, 'a> {
    /// `width` is from the ring's devices to the model's layers.
    pub(super) fn new(ring: &'r Ring<'a>, width: usize) -> Self {
        let layers = &ring.problem.layers;
        let positions = |at: usize| (at..layers.len()).step_by(width);
        let bytes = |of: &dyn Fn(usize) -> u64| {
            sums((0..width).map(|at| positions(at).map(of).sum::<u64>()))
        };
        let slot_ms = |slot: &Slot| {
            let device = &ring.problem.devices[slot.device];
            let times = match &device.gpu {
                Some(gpu) if slot.is_gpu => &gpu.times,
                _ => &device.cpus,
            };
            let of = |at| {
                positions(at)
                    .map(|layer| times.token_ms[layer])
                    .sum::<f64>()
            };
            sums((0..width).map(of))
        };
        Self {
            ring,
            width,
            full_rounds: layers.len() / width,
            rest: layers.len() % width,
            overflow_part: 1.0,
            ms: ring.slots.iter().map(slot_ms).collect(),
            stored: bytes(&|layer| layers[layer].stored_bytes),
            dense: bytes(&|layer| layers[layer].stored_bytes - layers[layer].expert_bytes()),
            kv: bytes(&|layer| layers[layer].kv_bytes),
        }
    }

    /// The objective (equations 11, 15, 20 and 21 with the maximum kept): times of all layers, overflow of memory from
    /// disk, hops of full rounds and of the last one, and the head. What has no room are experts, of which a token reads
    /// a share, and beyond all of them the weights that each token reads.
    pub(super) fn cost(&self, sizes: &[usize]) -> Cost {
        self.cost_within(sizes, u64::MAX)
    }

    /// The same if it is below another one.
    pub(super) fn cost_below(&self, sizes: &[usize], other: Cost) -> Option<Cost> {
        let cost = self.cost_within(sizes, (other.excess_gib * GIB) as u64);
        cost.is_below(other).then_some(cost)
    }

    /// The cost of a split; of one that breaks limits of memory by more than `most_bytes`, that of its first slots which do.
    fn cost_within(&self, sizes: &[usize], most_bytes: u64) -> Cost {
        let ring = self.ring;
        let mut ms =
            ring.problem.head.token_ms + self.full_rounds as f64 * ring.round_ms[ring.len() - 1];
        let mut excess_bytes = 0;
        let mut last = 0;
        let mut start = 0;
        for (index, (slot, size)) in ring.slots.iter().zip(sizes).enumerate() {
            let end = start + size;
            ms += self.ms[index][end] - self.ms[index][start];
            let kv = self.kv[end] - self.kv[start];
            let bytes = self.stored[end] - self.stored[start] + kv;
            let dense_bytes = self.dense[end] - self.dense[start] + kv;
            if start < self.rest && ring.first_slot(slot.place) == index {
                last = slot.place;
            }
            start = end;
            let overflow = bytes.saturating_sub(slot.room_bytes);
            match slot.disk_ms_per_byte {
                _ if overflow == 0 => {}
                None => excess_bytes += overflow,
                Some(ms_per_byte) => {
                    let passing_bytes = kv.saturating_add(ring.problem.window_bytes);
                    excess_bytes += passing_bytes.saturating_sub(slot.room_bytes);
                    let beyond = dense_bytes.saturating_sub(slot.room_bytes);
                    let read = overflow as f64 * ring.chosen_share
                        + beyond as f64 * (1.0 - ring.chosen_share);
                    ms += read * ms_per_byte * self.overflow_part;
                }
            }
            if excess_bytes > most_bytes {
                break;
            }
        }
        if self.rest > 0 {
            ms += ring.round_ms[last];
        }
        Cost {
            ms,
            excess_gib: excess_bytes as f64 / GIB,
        }
    }
}
