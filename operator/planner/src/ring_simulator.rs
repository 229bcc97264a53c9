//! How long a ring takes for a token and for a prompt, by simulation (prima.cpp, sections 3.1, A.1 and A.2).
//!
//! One token is in the ring at a time, so compute lanes never compete; each device's disk lane runs beside them. Weights
//! that have no room are read from disk once a token, spread evenly over the device's layers on its CPUs (equation 15
//! counts the same bytes). When a window has been computed, the disk lane reads what the device's next window lacks, while
//! other devices compute and hidden states travel; the window then waits only for what has not arrived. A window that does
//! not fit in memory is not read ahead, as its first pages would be gone before they are used (prefetch-release): each of
//! its layers waits for its own bytes. Chosen experts are known only when their layer runs, so they are never read ahead. A
//! device whose layers all fit reads nothing after the first token.
//!
//! Architecture invariant: no clock; the same windows give the same times.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::ops::Range;

use crate::ring_problem::{LayerTimes, Problem};

/// Most tokens until the time of a token repeats; each device's only memory is when its last window ended.
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
    /// Bytes of the KV of its layers on CPUs.
    pub kv_bytes: u64,
    /// Bytes of weights and KV on its GPU.
    pub gpu_bytes: u64,
    /// Bytes of weights that have no room in memory.
    pub overflow_bytes: u64,
}

/// A problem prepared for many simulations.
#[derive(Clone, Debug)]
pub(crate) struct Simulator<'a> {
    problem: &'a Problem,
    stored: Vec<u64>,
    kv: Vec<u64>,
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

    /// Milliseconds of a chunk: its arithmetic, and at least the reads of one token.
    fn chunk_ms(&self, layers: &Range<usize>, tokens: u32) -> f64 {
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

/// A device's way of reading what has no room.
#[derive(Clone, Copy)]
struct Lane {
    share: Share,
    /// The part of its weights on CPUs that is not in memory.
    missing: f64,
    ms_per_byte: f64,
    /// Bytes of memory for weights.
    weight_room_bytes: u64,
    /// When its last window ended: the disk has been free since.
    last_end_ms: f64,
}

impl<'a> Simulator<'a> {
    /// Expects a problem that [`Problem::check`] has found usable.
    pub(crate) fn new(problem: &'a Problem) -> Self {
        let devices = problem.devices.iter();
        Self {
            problem,
            stored: sums(problem.layers.iter().map(|layer| layer.stored_bytes)),
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
            share.kv_bytes += range(&self.kv, &cpus);
            share.gpu_bytes += range(&self.stored, &gpu) + range(&self.kv, &gpu);
        }
        for (device, share) in shares.iter_mut().enumerate() {
            let taken = share.stored_bytes + share.kv_bytes;
            share.overflow_bytes = taken.saturating_sub(self.problem.room_bytes(device));
        }
        shares
    }

    /// Whether KV and GPU layers fit, and all layers of devices where these must fit.
    pub(crate) fn fits(&self, shares: &[Share]) -> bool {
        shares.iter().enumerate().all(|(device, share)| {
            share.kv_bytes <= self.problem.room_bytes(device)
                && share.gpu_bytes <= self.problem.gpu_room_bytes(device)
                && (share.overflow_bytes == 0 || !self.problem.devices[device].must_fit)
        })
    }

    fn lanes(&self, windows: &[Window]) -> Vec<Lane> {
        let lane = |(device, share): (usize, Share)| Lane {
            share,
            missing: match share.stored_bytes {
                0 => 0.0,
                stored => share.overflow_bytes as f64 / stored as f64,
            },
            ms_per_byte: 1.0 / self.problem.devices[device].disk_read_gbps / 1e6,
            weight_room_bytes: self
                .problem
                .room_bytes(device)
                .saturating_sub(share.kv_bytes),
            last_end_ms: 0.0,
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
            now_ms = self.window(window, &lanes[at], now_ms);
            lanes[at].last_end_ms = now_ms;
        }
        now_ms + self.problem.hop_ms(at, 0, 1) + self.problem.head.token_ms
    }

    /// When a window that begins at `begin_ms` is computed.
    fn window(&self, window: &Window, lane: &Lane, begin_ms: f64) -> f64 {
        let mut now_ms = begin_ms + self.gpu_ms(window, 1, |sums, gpu| sums.token_ms(gpu));
        let cpus = window.on_cpus();
        if lane.missing == 0.0 {
            return now_ms + self.cpus[window.device].token_ms(&cpus);
        }
        let is_read_ahead = range(&self.stored, &cpus) <= lane.weight_room_bytes;
        let mut disk_ms = lane.last_end_ms;
        for index in cpus {
            let layer = &self.problem.layers[index];
            let ms = |bytes: u64| bytes as f64 * lane.missing * lane.ms_per_byte;
            if !is_read_ahead {
                disk_ms = now_ms;
            }
            disk_ms += ms(layer.read_bytes - layer.routed_bytes);
            now_ms = now_ms.max(disk_ms) + ms(layer.routed_bytes);
            disk_ms += ms(layer.routed_bytes);
            now_ms += self.problem.devices[window.device].cpus.token_ms[index];
        }
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

    /// Milliseconds until the first token after a prompt, chunk after chunk. Chunks follow each other through the ring;
    /// a device takes what has waited longest. What has no room is read once a chunk, beside the arithmetic of a window
    /// that fits, before that of one that does not.
    pub(crate) fn ttft_ms(&self, windows: &[Window]) -> f64 {
        let lanes = self.lanes(windows);
        let prompt = self.problem.prompt;
        let chunks = prompt.tokens.div_ceil(prompt.chunk_tokens);
        let tokens_of = |chunk: u32| {
            let before = chunk * prompt.chunk_tokens;
            prompt.chunk_tokens.min(prompt.tokens - before)
        };
        let mut free_ms = vec![0.0_f64; self.problem.devices.len()];
        let mut waiting: BinaryHeap<Reverse<Arrival>> = (0..chunks)
            .map(|chunk| Reverse(Arrival::new(0.0, chunk, 0)))
            .collect();
        let mut end_ms = 0.0_f64;
        while let Some(Reverse(arrival)) = waiting.pop() {
            let tokens = tokens_of(arrival.chunk);
            let Some(window) = windows.get(arrival.step) else {
                end_ms = end_ms.max(arrival.ms);
                continue;
            };
            let device = window.device;
            let begin_ms = arrival.ms.max(free_ms[device]);
            free_ms[device] = begin_ms + self.chunk_ms(window, &lanes[device], tokens);
            let next = windows.get(arrival.step + 1).map_or(0, |w| w.device);
            let ms = free_ms[device] + self.problem.hop_ms(device, next, tokens);
            waiting.push(Reverse(Arrival::new(ms, arrival.chunk, arrival.step + 1)));
        }
        end_ms + self.problem.head.token_ms
    }

    fn chunk_ms(&self, window: &Window, lane: &Lane, tokens: u32) -> f64 {
        let gpu_ms = self.gpu_ms(window, tokens, |sums, gpu| sums.chunk_ms(gpu, tokens));
        let cpus = window.on_cpus();
        let compute_ms = self.cpus[window.device].chunk_ms(&cpus, tokens);
        if lane.missing == 0.0 {
            return gpu_ms + compute_ms;
        }
        // A chunk of many tokens chooses nearly all experts.
        let bytes = |index: usize| {
            let layer = &self.problem.layers[index];
            let shared = layer.read_bytes - layer.routed_bytes;
            let chosen = layer.routed_bytes.saturating_mul(u64::from(tokens));
            shared.saturating_add(chosen).min(layer.stored_bytes) as f64
        };
        let read: f64 = cpus.clone().map(bytes).sum();
        let disk_ms = read * lane.missing * lane.ms_per_byte;
        match range(&self.stored, &cpus) <= lane.weight_room_bytes {
            true => gpu_ms + compute_ms.max(disk_ms),
            false => gpu_ms + compute_ms + disk_ms,
        }
    }
}

/// The sum over `layers`, from sums over the first ones.
fn range(sums: &[u64], layers: &Range<usize>) -> u64 {
    sums[layers.end] - sums[layers.start]
}

/// A chunk that waits for a window: the earliest first, then the chunk that came first.
#[derive(Clone, Copy)]
struct Arrival {
    ms: f64,
    chunk: u32,
    step: usize,
}

impl Arrival {
    fn new(ms: f64, chunk: u32, step: usize) -> Self {
        Self { ms, chunk, step }
    }
}

impl Ord for Arrival {
    fn cmp(&self, other: &Self) -> Ordering {
        let times = self.ms.total_cmp(&other.ms);
        times
            .then(self.chunk.cmp(&other.chunk))
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
mod tests {
    use super::*;
    use crate::ring_problem::{Device, Gpu, Head, Layer, Link, Prompt};

    const MB: u64 = 1_000_000;

    /// Two devices with four layers of 10 MB, which take 2 ms each; a byte takes 1 ms a MB from disk, a hop 1 ms.
    fn problem(memory_bytes: u64) -> Problem {
        let layer = Layer {
            stored_bytes: 10 * MB,
            read_bytes: 10 * MB,
            routed_bytes: 0,
            kv_bytes: 0,
        };
        let times = LayerTimes {
            token_ms: vec![2.0; 4],
            prompt_token_ms: vec![1.0; 4],
        };
        let device = Device {
            name: "device".to_owned(),
            memory_bytes,
            buffer_bytes: 0,
            disk_read_gbps: 1.0,
            must_fit: false,
            cpus: times,
            gpu: None,
        };
        let link = Link {
            latency_ms: 1.0,
            gbps: 1e9,
        };
        Problem {
            devices: vec![device; 2],
            layers: vec![layer; 4],
            head: Head {
                stored_bytes: 0,
                token_ms: 3.0,
            },
            links: vec![vec![link; 2]; 2],
            hidden_bytes: 1,
            prompt: Prompt {
                tokens: 8,
                chunk_tokens: 4,
            },
        }
    }

    /// The layers in windows of `width`, the devices in turn.
    fn windows(width: usize) -> Vec<Window> {
        let windows = (0..4 / width).map(|index| Window {
            device: index % 2,
            round: index / 2,
            layers: index * width..(index + 1) * width,
            gpu_layers: 0,
        });
        windows.collect()
    }

    fn tpot_ms(problem: &Problem, width: usize) -> f64 {
        let ms = Simulator::new(problem).tpot_ms(&windows(width)).unwrap();
        (ms * 1e3).round() / 1e3
    }

    #[test]
    fn layers_that_fit_are_read_once() {
        let problem = problem(20 * MB);
        // Layers, hops there and back, the head; two rounds have two hops more.
        assert_eq!(tpot_ms(&problem, 2), 8.0 + 2.0 + 3.0);
        assert_eq!(tpot_ms(&problem, 1), 8.0 + 4.0 + 3.0);
    }

    #[test]
    fn a_window_that_does_not_fit_waits_for_what_is_missing() {
        // 4 MB of 20 MB are missing on each device, half of it in each layer.
        assert_eq!(tpot_ms(&problem(16 * MB), 2), 13.0 + 2.0 * 4.0);
    }

    #[test]
    fn what_fits_by_rounds_is_read_while_others_compute() {
        // 2 MB for each window, and 4 ms between two windows of a device: all of it is hidden.
        assert_eq!(tpot_ms(&problem(16 * MB), 1), 15.0);
        // 5 MB for each window. The head's second one comes 4 ms after its first and waits 1 ms; that is also what the
        // other device's second one, 5 ms after its first, would have lacked. Between two tokens there is more time.
        assert_eq!(tpot_ms(&problem(10 * MB), 1), 16.0);
    }

    #[test]
    fn chosen_experts_are_never_read_ahead() {
        let mut problem = problem(16 * MB);
        for layer in &mut problem.layers {
            layer.read_bytes = 6 * MB;
            layer.routed_bytes = 5 * MB;
        }
        // A fifth of each layer is missing: of 5 MB each waits, of 1 MB none does.
        assert_eq!(tpot_ms(&problem, 1), 15.0 + 4.0);
    }

    #[test]
    fn a_gpu_has_its_layers_in_its_own_memory() {
        let mut problem = problem(10 * MB);
        problem.devices[0].gpu = Some(Gpu {
            memory_bytes: 10 * MB,
            buffer_bytes: 0,
            times: LayerTimes {
                token_ms: vec![0.5; 4],
                prompt_token_ms: vec![0.1; 4],
            },
            copy: Link {
                latency_ms: 0.25,
                gbps: 1e9,
            },
        });
        problem.devices[1].memory_bytes = 20 * MB;
        let mut windows = windows(2);
        windows[0].gpu_layers = 1;
        let simulator = Simulator::new(&problem);
        let ms = simulator.tpot_ms(&windows).unwrap();
        // A layer on the GPU with two copies, three on CPUs, hops, the head.
        assert!((ms - (0.5 + 0.5 + 6.0 + 2.0 + 3.0)).abs() < 1e-3, "{ms}");
        windows[0].gpu_layers = 2;
        assert_eq!(simulator.tpot_ms(&windows), None);
    }

    #[test]
    fn chunks_of_a_prompt_follow_each_other() {
        let problem = problem(20 * MB);
        let simulator = Simulator::new(&problem);
        // A chunk of 4 tokens takes 8 ms on each device; the second follows 8 ms behind the first.
        let ms = simulator.ttft_ms(&windows(2));
        assert!(
            (ms - (8.0 + 1.0 + 8.0 + 8.0 + 1.0 + 3.0)).abs() < 1e-3,
            "{ms}"
        );
    }
}
