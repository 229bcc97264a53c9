//! Problems written by hand.

use crate::halda::testing::times;
use crate::ring_problem::{Device, Head, Layer, Link, Problem, Prompt};

pub(super) const GIB: u64 = 1 << 30;

/// A dense model's layers.
pub(super) fn equal_layers(count: usize, stored_bytes: u64) -> Vec<Layer> {
    let layer = Layer {
        stored_bytes,
        read_bytes: stored_bytes,
        routed_bytes: 0,
        kv_bytes: stored_bytes / 50,
    };
    vec![layer; count]
}

/// A device without a GPU whose memory holds `memory_bytes`, with CPUs that read `cpu_gbps`.
pub(super) fn device(
    name: &str,
    memory_bytes: u64,
    cpu_gbps: f64,
    disk_read_gbps: f64,
    layers: &[Layer],
) -> Device {
    Device {
        name: name.to_owned(),
        memory_bytes,
        buffer_bytes: 64 << 20,
        disk_read_gbps,
        map_ms_per_gb: 15.0,
        must_fit: false,
        cpus: times(layers, cpu_gbps, 20.0 * cpu_gbps),
        gpu: None,
    }
}

/// These devices on one switch.
pub(super) fn problem(devices: Vec<Device>, layers: Vec<Layer>) -> Problem {
    let link = Link {
        latency_ms: 0.3,
        gbps: 0.11,
    };
    Problem {
        links: vec![vec![link; devices.len()]; devices.len()],
        devices,
        layers,
        head: Head {
            stored_bytes: 256 << 20,
            embedding_bytes: 0,
            token_ms: 3.0,
        },
        window_bytes: 0,
        hidden_bytes: 16384,
        prompt: Prompt {
            tokens: 1000,
            chunk_tokens: 256,
            flight_tokens: 64,
        },
    }
}
