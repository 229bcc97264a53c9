//! Problems drawn from a seed, or written by hand.

use crate::ring_problem::{Device, Gpu, Head, Layer, LayerTimes, Link, Problem, Prompt};

/// A generator of numbers (SplitMix64): the same seed gives the same ones everywhere.
pub(in crate::halda) struct Draws(u64);

impl Draws {
    pub(in crate::halda) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(in crate::halda) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    pub(in crate::halda) fn whole(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    /// From `low` to `high`, with as many draws below their geometric mean as above.
    pub(in crate::halda) fn rate(&mut self, low: f64, high: f64) -> f64 {
        let part = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        low * (high / low).powf(part)
    }

    pub(in crate::halda) fn chance(&mut self, percent: u64) -> bool {
        self.next() % 100 < percent
    }
}

/// How a drawn model's layers differ.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Equal,
    /// The first few are dense, the others have experts.
    DenseFirst,
    AllDifferent,
}

/// A problem of home machines with `devices` devices and `layers` layers, whose memory may be short or plenty.
pub(in crate::halda) fn drawn(draws: &mut Draws, devices: usize, layers: usize) -> Problem {
    let kind = match draws.whole(0, 9) {
        0..=4 => Kind::Equal,
        5..=7 => Kind::DenseFirst,
        _ => Kind::AllDifferent,
    };
    let layers = drawn_layers(draws, kind, layers);
    let total: u64 = layers.iter().map(|l| l.stored_bytes + l.kv_bytes).sum();
    // What the devices have together, as a share of what the model needs.
    let plenty = draws.rate(0.5, 3.0);
    let mean_bytes = total as f64 * plenty / devices as f64;
    let devices: Vec<Device> = (0..devices)
        .map(|index| drawn_device(draws, index, mean_bytes, &layers))
        .collect();
    let link = Link {
        latency_ms: draws.rate(0.1, 5.0),
        gbps: draws.rate(0.01, 1.2),
    };
    let links = devices.iter().map(|_| {
        let same = draws.chance(50);
        let mut link = link;
        let links = devices.iter().map(|_| {
            if !same {
                link.latency_ms = draws.rate(0.1, 5.0);
            }
            link
        });
        links.collect()
    });
    let links = links.collect();
    let mut problem = Problem {
        head: Head {
            stored_bytes: total / 40,
            embedding_bytes: 0,
            token_ms: draws.rate(0.5, 10.0),
        },
        links,
        devices,
        layers,
        window_bytes: 0,
        hidden_bytes: 16384,
        prompt: Prompt {
            tokens: 700,
            chunk_tokens: 256,
            flight_tokens: 64,
        },
    };
    if draws.chance(50) {
        let largest = problem.layers.iter().map(|layer| layer.stored_bytes).max();
        problem.window_bytes = 2 * largest.unwrap_or(0);
    }
    problem
}

/// Makes a problem one of slow disks, of which all layers must fit, with about as much memory as the model needs.
pub(in crate::halda) fn tighten(draws: &mut Draws, problem: &mut Problem) {
    let layers = problem.layers.iter();
    let needed_bytes: u64 = layers.map(|l| l.stored_bytes + l.kv_bytes).sum();
    let all = 0..problem.devices.len();
    let room = |device| problem.room_bytes(device) + problem.gpu_room_bytes(device);
    let room_bytes: u64 = all.map(room).sum();
    let factor = draws.rate(0.9, 1.2) * needed_bytes as f64 / room_bytes as f64;
    for device in &mut problem.devices {
        device.must_fit = true;
        device.memory_bytes = (device.memory_bytes as f64 * factor) as u64;
        device.buffer_bytes = device.memory_bytes / 20;
        if let Some(gpu) = &mut device.gpu {
            gpu.memory_bytes = (gpu.memory_bytes as f64 * factor) as u64;
        }
    }
}

/// The same problem with each of its devices as the head, which may take each of them another time.
pub(in crate::halda) fn with_each_head(draws: &mut Draws, problem: &Problem) -> Vec<Problem> {
    let heads = 0..problem.devices.len();
    heads
        .map(|head| {
            let mut led = problem.clone();
            let first = led.devices.remove(head);
            led.devices.insert(0, first);
            for links in &mut led.links {
                let first = links.remove(head);
                links.insert(0, first);
            }
            let first = led.links.remove(head);
            led.links.insert(0, first);
            led.head.token_ms = draws.rate(0.5, 10.0);
            led
        })
        .collect()
}

fn drawn_layers(draws: &mut Draws, kind: Kind, layers: usize) -> Vec<Layer> {
    let bytes = draws.rate(0.05e9, 2e9) as u64;
    let kv_bytes = draws.rate(1e6, 1e8) as u64;
    let dense = draws.whole(1, 3);
    let active = draws.rate(0.05, 0.5);
    let mut layer = |index: usize| {
        let (stored, read, routed) = match kind {
            Kind::Equal => (bytes, bytes, 0),
            Kind::DenseFirst if index < dense => (bytes / 4, bytes / 4, 0),
            Kind::DenseFirst => {
                let read = (bytes as f64 * active) as u64;
                (bytes, read, read / 2)
            }
            Kind::AllDifferent => {
                let bytes = (bytes as f64 * draws.rate(0.5, 2.0)) as u64;
                (bytes, bytes, 0)
            }
        };
        Layer {
            stored_bytes: stored,
            read_bytes: read,
            routed_bytes: routed,
            kv_bytes,
        }
    };
    (0..layers).map(&mut layer).collect()
}

fn drawn_device(draws: &mut Draws, index: usize, mean_bytes: f64, layers: &[Layer]) -> Device {
    let memory_bytes = (mean_bytes * draws.rate(0.4, 1.6)) as u64;
    let cpu_gbps = draws.rate(5.0, 80.0);
    let gpu = draws.chance(40).then(|| Gpu {
        memory_bytes: (mean_bytes * draws.rate(0.2, 0.8)) as u64,
        buffer_bytes: (mean_bytes * 0.02) as u64,
        times: times(layers, draws.rate(100.0, 900.0), draws.rate(5e3, 5e4)),
        copy: Link {
            latency_ms: 0.02,
            gbps: 10.0,
        },
    });
    let disk_read_gbps = draws.rate(0.05, 6.0);
    Device {
        name: format!("device-{index}"),
        memory_bytes,
        buffer_bytes: memory_bytes / 20,
        disk_read_gbps,
        map_ms_per_gb: 15.0,
        must_fit: disk_read_gbps < 0.15,
        cpus: times(layers, cpu_gbps, draws.rate(50.0, 1e3)),
        gpu,
    }
}

/// Times of layers on a processor of these rates.
pub(in crate::halda) fn times(layers: &[Layer], read_gbps: f64, gflops: f64) -> LayerTimes {
    let read_ms = |layer: &Layer| (layer.read_bytes + layer.kv_bytes) as f64 / read_gbps / 1e6;
    LayerTimes {
        token_ms: layers.iter().map(|layer| read_ms(layer) + 0.05).collect(),
        prompt_token_ms: layers
            .iter()
            .map(|layer| 4.0 * layer.read_bytes as f64 / gflops / 1e6)
            .collect(),
    }
}
