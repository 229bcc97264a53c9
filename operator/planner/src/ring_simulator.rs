//! How long a ring takes for a token and for a prompt, by simulation (prima.cpp, sections 3.1, A.1 and A.2).
//!
//! One token is in the ring at a time, so compute lanes never compete; each device's disk lane runs beside them. Where the
//! layers of a device do not fit, some modules stay in its memory, and the others, spread evenly over its layers, pass
//! through the rest of it, which is the room to read ahead: they are read from disk once a token, in the order of their use,
//! as soon as there is room, while the device and others compute and hidden states travel. A layer waits for what has not
//! arrived. What is read is what has no room (equation 15 counts as much) and the room itself, since what passes through
//! cannot stay. A window may be larger than that room: nothing is read so early that it would have to be read again
//! (prefetch-release). A device that has experts reads these first, and never ahead, as they are known only when their
//! layer runs. Where even the other weights have no room beside those of one layer, a part of them is read at each token,
//! too, and not ahead either: the experts are in the way. What leaves memory leaves the page cache with it, so that all that
//! has no room is read. A device whose layers all fit reads nothing after the first token.
//!
//! Architecture invariant: no clock; the same windows give the same times.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::ring_problem::{Layer, LayerTimes, Problem, Prompt};

/// Layers for which there is room to read ahead, at least: one is computed while another is read.
const LEAST_LAYERS_AHEAD: u64 = 2;
/// Most tokens until the time of a token repeats; each device's only memory is when its last window ended, and what it had
/// read ahead by then.
const MAX_TOKENS: usize = 12;
/// Relative difference of two tokens' times that counts as none.
const SAME: f64 = 1e-9;

/// Layers that one device computes in one go. A ring is a list of windows in the order of computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// The device's index in the problem.
    pub device: usize,
    /// The round of the token, from 0.
    pub round: usize,
    /// The layers, never none.
    pub layers: Range<usize>,
    /// How many of them, the first ones, are on the GPU.
    pub gpu_layers: usize,
}

impl Window {
    /// Layers on the GPU.
    pub fn on_gpu(&self) -> Range<usize> {
        self.layers.start..self.layers.start + self.gpu_layers
    }

    /// Layers on CPUs.
    pub fn on_cpus(&self) -> Range<usize> {
        self.layers.start + self.gpu_layers..self.layers.end
    }
}

/// What a device keeps and reads in a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    /// Layers on its CPUs.
    pub cpu_layers: usize,
    /// Layers on its GPU.
    pub gpu_layers: usize,
    /// Bytes of the weights of its layers on CPUs.
    pub stored_bytes: u64,
    /// Of these, bytes of routed experts.
    pub expert_bytes: u64,
    /// Bytes of the KV of its layers on CPUs.
    pub kv_bytes: u64,
    /// Bytes of weights and KV on its GPU.
    pub gpu_bytes: u64,
    /// Bytes of weights that have no room in memory.
    pub overflow_bytes: u64,
    /// Bytes of memory that weights pass through as they are read ahead; 0 where none are.
    pub read_ahead_bytes: u64,
}

impl Share {
    /// Whether weights without room are read ahead: all of them are of every token.
    fn reads_ahead(&self) -> bool {
        self.overflow_bytes > 0 && self.expert_bytes == 0
    }
}

/// A problem prepared for many simulations.
#[derive(Clone, Debug)]
pub(crate) struct Simulator<'a> {
    problem: &'a Problem,
    stored: Vec<u64>,
    /// Sums over the first layers of the bytes of routed experts.
    experts: Vec<u64>,
    kv: Vec<u64>,
    largest_layer_bytes: u64,
    /// Most bytes of experts that a token chooses in a layer.
    most_chosen_bytes: u64,
    cpus: Vec<Sums>,
    gpus: Vec<Option<Sums>>,
}

/// Sums of a processor's times over the first layers: one entry more than layers.
#[derive(Clone, Debug)]
struct Sums {
    token_ms: Vec<f64>,
    prompt_token_ms: Vec<f64>,
}

impl Sums {
    fn of(times: &LayerTimes) -> Self {
        Self {
            token_ms: sums(times.token_ms.iter().copied()),
            prompt_token_ms: sums(times.prompt_token_ms.iter().copied()),
        }
    }

    fn token_ms(&self, layers: &Range<usize>) -> f64 {
        self.token_ms[layers.end] - self.token_ms[layers.start]
    }

    /// Milliseconds of a flight, and at least of one token: a short last flight reads as much.
    fn flight_ms(&self, layers: &Range<usize>, tokens: u32) -> f64 {
        let of_token_ms = self.prompt_token_ms[layers.end] - self.prompt_token_ms[layers.start];
        (of_token_ms * f64::from(tokens)).max(self.token_ms(layers))
    }
}

/// Sums over the first values: one entry more than values.
pub(crate) fn sums<T: Copy + Default + std::ops::Add<Output = T>>(
    values: impl Iterator<Item = T>,
) -> Vec<T> {
    let mut sum = T::default();
    let mut sums = vec![sum];
    for value in values {
        sum = sum + value;
        sums.push(sum);
    }
    sums
}

/// Parts of a device's weights: of those that every token needs, and of the experts that it chooses.
#[derive(Clone, Copy)]
struct Parts {
    dense: f64,
    experts: f64,
}

/// A device's way of reading what has no room.
#[derive(Clone, Copy)]
struct Lane {
    share: Share,
    /// How many windows the device has.
    windows: usize,
    /// What a token reads from disk.
    absent: Parts,
    ms_per_byte: f64,
    /// Milliseconds to map a byte that was read and to unmap another one.
    map_ms_per_byte: f64,
    /// Bytes that have been read ahead.
    ahead_bytes: f64,
    /// When its last window ended: the disk has been free since.
    last_end_ms: f64,
}

impl Lane {
    /// The disk reads ahead for so long, while a layer that leaves behind `used_bytes` of what it has read is computed.
    fn read_ahead(&mut self, ms: f64, used_bytes: f64) {
        // What a layer waited for is there even where nothing is read ahead.
        let most = (self.share.read_ahead_bytes as f64).max(used_bytes);
        let read_bytes = self.ahead_bytes + ms / self.ms_per_byte;
        self.ahead_bytes = read_bytes.min(most) - used_bytes;
    }

    /// Milliseconds until so many bytes have been read ahead.
    fn wait_ms(&mut self, bytes: f64) -> f64 {
        let lacks = (bytes - self.ahead_bytes).max(0.0);
        self.ahead_bytes += lacks;
        lacks * self.ms_per_byte
    }
}

impl<'a> Simulator<'a> {
    /// Expects a problem that [`Problem::check`] has found usable.
    pub(crate) fn new(problem: &'a Problem) -> Self {
        let devices = problem.devices.iter();
        let most = |of: fn(&Layer) -> u64| problem.layers.iter().map(of).max().unwrap_or(0);
        Self {
            problem,
            stored: sums(problem.layers.iter().map(|layer| layer.stored_bytes)),
            experts: sums(problem.layers.iter().map(Layer::expert_bytes)),
            largest_layer_bytes: most(|layer| layer.stored_bytes),
            most_chosen_bytes: most(|layer| layer.routed_bytes),
            kv: sums(problem.layers.iter().map(|layer| layer.kv_bytes)),
            cpus: devices.clone().map(|d| Sums::of(&d.cpus)).collect(),
            gpus: devices
                .map(|d| d.gpu.as_ref().map(|gpu| Sums::of(&gpu.times)))
                .collect(),
        }
    }

    /// What each device of the problem keeps and reads; nothing for one without a window.
    pub(crate) fn shares(&self, windows: &[Window]) -> Vec<Share> {
        let mut shares = vec![Share::default(); self.problem.devices.len()];
        for window in windows {
            let share = &mut shares[window.device];
            let (gpu, cpus) = (window.on_gpu(), window.on_cpus());
            share.gpu_layers += gpu.len();
            share.cpu_layers += cpus.len();
            share.stored_bytes += range(&self.stored, &cpus);
            share.expert_bytes += range(&self.experts, &cpus);
            share.kv_bytes += range(&self.kv, &cpus);
            share.gpu_bytes += range(&self.stored, &gpu) + range(&self.kv, &gpu);
        }
        for (device, share) in shares.iter_mut().enumerate() {
            let taken = share.stored_bytes + share.kv_bytes;
            share.overflow_bytes = taken.saturating_sub(self.problem.room_bytes(device));
        }
        if shares.iter().any(Share::reads_ahead) {
            self.make_room_to_read_ahead(windows, &mut shares);
        }
        shares
    }

    /// Room to read ahead: as much as the disk reads between two of a device's windows, if the next one needs so much. More
    /// would only take room from what stays.
    fn make_room_to_read_ahead(&self, windows: &[Window], shares: &mut [Share]) {
        let own_ms = self.own_ms(windows);
        let chosen_share = self.problem.chosen_share();
        let read_ms = |(device, share): (usize, &Share)| {
            let experts = share.overflow_bytes.min(share.expert_bytes);
            let read = experts as f64 * chosen_share + (share.overflow_bytes - experts) as f64;
            read / self.problem.devices[device].disk_read_gbps / 1e6
        };
        let reads_ms = shares.iter().enumerate().map(read_ms).fold(0.0, f64::max);
        // A token takes as long as its longest way, be that computation or a disk.
        let token_ms = (own_ms.iter().sum::<f64>() + self.between_ms(windows)).max(reads_ms);
        for (device, share) in shares.iter_mut().enumerate() {
            if !share.reads_ahead() {
                continue;
            }
            let own = windows.iter().filter(|window| window.device == device);
            let count = own.count().max(1) as u64;
            let room = self.problem.room_bytes(device);
            let most = room.saturating_sub(share.kv_bytes).min(share.stored_bytes);
            let needed = share.overflow_bytes.checked_div(count - 1).unwrap_or(0);
            let idle_ms = (token_ms - own_ms[device]) / count as f64;
            let read = idle_ms * self.problem.devices[device].disk_read_gbps * 1e6;
            let least = LEAST_LAYERS_AHEAD * self.largest_layer_bytes;
            share.read_ahead_bytes = needed.min(read as u64).max(least).min(most);
        }
    }

    /// Milliseconds that each device computes for a token.
    fn own_ms(&self, windows: &[Window]) -> Vec<f64> {
        let mut own_ms = vec![0.0; self.problem.devices.len()];
        for window in windows {
            own_ms[window.device] += self.gpu_ms(window, 1, Sums::token_ms)
                + self.cpus[window.device].token_ms(&window.on_cpus());
        }
        own_ms
    }

    /// Milliseconds of a token's hops and of the output head.
    fn between_ms(&self, windows: &[Window]) -> f64 {
        let mut total_ms = self.problem.head.token_ms;
        let mut at = 0;
        for window in windows {
            total_ms += self.problem.hop_ms(at, window.device, 1);
            at = window.device;
        }
        total_ms + self.problem.hop_ms(at, 0, 1)
    }

    /// Whether KV and GPU layers fit, and all layers of devices where these must fit; of other devices, at least as much as
    /// weights pass through.
    pub(crate) fn fits(&self, shares: &[Share]) -> bool {
        shares.iter().enumerate().all(|(device, share)| {
            let passing_bytes = share.kv_bytes.saturating_add(self.problem.window_bytes);
            let may_overflow = !self.problem.devices[device].must_fit
                && passing_bytes <= self.problem.room_bytes(device);
            share.gpu_bytes <= self.problem.gpu_room_bytes(device)
                && (share.overflow_bytes == 0 || may_overflow)
        })
    }

    /// The parts of a device's weights that a token reads from disk.
    fn absent(&self, share: &Share) -> Parts {
        let part = |bytes: u64, of: u64| match of {
            0 => 0.0,
            _ => (bytes as f64 / of as f64).min(1.0),
        };
        let dense_bytes = share.stored_bytes - share.expert_bytes;
        if share.expert_bytes == 0 {
            return Parts {
                dense: part(share.overflow_bytes + share.read_ahead_bytes, dense_bytes),
                experts: 0.0,
            };
        }
        // The experts of the layer at work take room, even where no others do.
        let at_work = self.most_chosen_bytes.min(share.expert_bytes);
        let beyond = share
            .overflow_bytes
            .saturating_sub(share.expert_bytes - at_work);
        Parts {
            dense: part(beyond, dense_bytes),
            experts: part(share.overflow_bytes, share.expert_bytes),
        }
    }

    fn lanes(&self, windows: &[Window]) -> Vec<Lane> {
        let lane = |(device, share): (usize, Share)| {
            let rates = &self.problem.devices[device];
            let own = windows.iter().filter(|window| window.device == device);
            Lane {
                share,
                windows: own.count(),
                absent: self.absent(&share),
                ms_per_byte: 1.0 / rates.disk_read_gbps / 1e6,
                map_ms_per_byte: rates.map_ms_per_gb / 1e9,
                ahead_bytes: 0.0,
                last_end_ms: 0.0,
            }
        };
        let shares = self.shares(windows).into_iter().enumerate();
        shares.map(lane).collect()
    }

    /// Milliseconds from one token to the next, once they repeat; `None` if the windows do not fit.
    pub(crate) fn tpot_ms(&self, windows: &[Window]) -> Option<f64> {
        let mut lanes = self.lanes(windows);
        let shares: Vec<Share> = lanes.iter().map(|lane| lane.share).collect();
        if !self.fits(&shares) {
            return None;
        }
        let mut begin_ms = 0.0;
        let mut last_ms = f64::INFINITY;
        for _ in 0..MAX_TOKENS {
            let end_ms = self.token(windows, &mut lanes, begin_ms);
            let token_ms = end_ms - begin_ms;
            let repeats = (token_ms - last_ms).abs() <= SAME * token_ms;
            (last_ms, begin_ms) = (token_ms, end_ms);
            if repeats {
                break;
            }
        }
        Some(last_ms)
    }

    /// When a token that begins at `begin_ms` is sampled.
    fn token(&self, windows: &[Window], lanes: &mut [Lane], begin_ms: f64) -> f64 {
        let mut now_ms = begin_ms;
        let mut at = 0;
        for window in windows {
            now_ms += self.problem.hop_ms(at, window.device, 1);
            at = window.device;
            now_ms = self.window(window, &mut lanes[at], now_ms);
        }
        now_ms + self.problem.hop_ms(at, 0, 1) + self.problem.head.token_ms
    }

    /// When a window that begins at `begin_ms` is computed.
    fn window(&self, window: &Window, lane: &mut Lane, begin_ms: f64) -> f64 {
        let mut now_ms = begin_ms + self.gpu_ms(window, 1, Sums::token_ms);
        let cpus = window.on_cpus();
        if lane.share.overflow_bytes == 0 {
            return now_ms + self.cpus[window.device].token_ms(&cpus);
        }
        lane.read_ahead(now_ms - lane.last_end_ms, 0.0);
        for index in cpus {
            let layer = &self.problem.layers[index];
            let (dense, routed) = (layer.dense_bytes() as f64, layer.routed_bytes as f64);
            let passing = dense * lane.absent.dense;
            let chosen = routed * lane.absent.experts;
            let compute_ms = self.problem.devices[window.device].cpus.token_ms[index]
                + (passing + chosen) * lane.map_ms_per_byte;
            now_ms += lane.wait_ms(passing) + chosen * lane.ms_per_byte + compute_ms;
            lane.read_ahead(compute_ms, passing);
        }
        lane.last_end_ms = now_ms;
        now_ms
    }

    /// Milliseconds of a window's layers on the GPU, with copies of `tokens` hidden states; 0 without any.
    fn gpu_ms(
        &self,
        window: &Window,
        tokens: u32,
        ms: impl Fn(&Sums, &Range<usize>) -> f64,
    ) -> f64 {
        let gpu = self.problem.devices[window.device].gpu.as_ref();
        match (gpu, &self.gpus[window.device], window.gpu_layers) {
            (Some(gpu), Some(sums), 1..) => {
                self.problem.copies_ms(gpu, tokens) + ms(sums, &window.on_gpu())
            }
            _ => 0.0,
        }
    }

    /// Milliseconds until the first token after a prompt, chunk after chunk.
    pub(crate) fn ttft_ms(&self, windows: &[Window]) -> f64 {
        let lanes = self.lanes(windows);
        let Prompt {
            tokens,
            chunk_tokens,
            ..
        } = self.problem.prompt;
        let chunks = f64::from(tokens / chunk_tokens);
        let mut total_ms = self.problem.head.token_ms;
        if tokens >= chunk_tokens {
            total_ms += chunks * self.pass_ms(windows, &lanes, chunk_tokens);
        }
        match tokens % chunk_tokens {
            0 => total_ms,
            rest => total_ms + self.pass_ms(windows, &lanes, rest),
        }
    }

    /// Milliseconds of a pass over `pass_tokens` of a prompt. Its flights follow each other through the ring; a device takes
    /// what has waited longest. What passes through memory is read once a flight, beside its arithmetic; missing experts
    /// before theirs. What a device reads ahead is of its next window: where it has several, a flight behind another one
    /// finds that in the room, and waits for its own first layer.
    fn pass_ms(&self, windows: &[Window], lanes: &[Lane], pass_tokens: u32) -> f64 {
        let most = self.problem.prompt.flight_tokens;
        let tokens_of = |flight: u32| most.min(pass_tokens - flight * most);
        let mut free_ms = vec![0.0_f64; self.problem.devices.len()];
        // A device sends one flight after the other: they share its link.
        let mut sent_ms = free_ms.clone();
        let mut waiting: BinaryHeap<Reverse<Arrival>> = (0..pass_tokens.div_ceil(most))
            .map(|flight| Reverse(Arrival::new(0.0, flight, 0)))
            .collect();
        let mut end_ms = 0.0_f64;
        while let Some(Reverse(arrival)) = waiting.pop() {
            let tokens = tokens_of(arrival.flight);
            let Some(window) = windows.get(arrival.step) else {
                end_ms = end_ms.max(arrival.ms);
                continue;
            };
            let device = window.device;
            let begin_ms = arrival.ms.max(free_ms[device]);
            free_ms[device] =
                begin_ms + self.flight_ms(window, &lanes[device], arrival.flight, tokens);
            let next = windows.get(arrival.step + 1).map_or(0, |w| w.device);
            let ms = match device == next {
                true => free_ms[device],
                false => {
                    let link = self.problem.links[device][next];
                    let bytes = self.problem.hidden_bytes as f64 * f64::from(tokens);
                    let begin_ms = free_ms[device].max(sent_ms[device]);
                    sent_ms[device] = begin_ms + link.ms(bytes) - link.latency_ms;
                    sent_ms[device] + link.latency_ms
                }
            };
            waiting.push(Reverse(Arrival::new(ms, arrival.flight, arrival.step + 1)));
        }
        end_ms
    }

    fn flight_ms(&self, window: &Window, lane: &Lane, flight: u32, tokens: u32) -> f64 {
        let gpu_ms = self.gpu_ms(window, tokens, |sums, gpu| sums.flight_ms(gpu, tokens));
        let cpus = window.on_cpus();
        let compute_ms = self.cpus[window.device].flight_ms(&cpus, tokens);
        if lane.share.overflow_bytes == 0 {
            return gpu_ms + compute_ms;
        }
        // A flight of many tokens chooses nearly all experts.
        let bytes = |parts: Parts| -> f64 {
            let of_layer = |index: usize| {
                let layer = &self.problem.layers[index];
                let chosen = layer.routed_bytes.saturating_mul(u64::from(tokens));
                let chosen = chosen.min(layer.expert_bytes());
                layer.dense_bytes() as f64 * parts.dense + chosen as f64 * parts.experts
            };
            cpus.clone().map(of_layer).sum()
        };
        let read = bytes(lane.absent);
        let disk_ms = read * lane.ms_per_byte;
        let compute_ms = compute_ms + read * lane.map_ms_per_byte;
        if !lane.share.reads_ahead() {
            return gpu_ms + compute_ms + disk_ms;
        }
        let (in_vain, waited) = match lane.windows > 1 && flight > 0 {
            true => (lane.share.read_ahead_bytes, self.largest_layer_bytes),
            false => (0, 0),
        };
        let disk_ms = disk_ms + in_vain as f64 * lane.ms_per_byte;
        gpu_ms + compute_ms.max(disk_ms) + waited as f64 * lane.ms_per_byte
    }
}

/// The sum over `layers`, from sums over the first ones.
fn range(sums: &[u64], layers: &Range<usize>) -> u64 {
    sums[layers.end] - sums[layers.start]
}

/// A flight that waits for a window: the earliest first, then the flight that came first.
#[derive(Clone, Copy)]
struct Arrival {
    ms: f64,
    flight: u32,
    step: usize,
}

impl Arrival {
    fn new(ms: f64, flight: u32, step: usize) -> Self {
        Self { ms, flight, step }
    }
}

impl Ord for Arrival {
    fn cmp(&self, other: &Self) -> Ordering {
        let times = self.ms.total_cmp(&other.ms);
        times
            .then(self.flight.cmp(&other.flight))
            .then(self.step.cmp(&other.step))
    }
}

impl PartialOrd for Arrival {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Arrival {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Arrival {}

#[cfg(test)]
mod tests;
