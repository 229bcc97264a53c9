//! GPUs: data from the driver's library, and rates derived from it.
//!
//! Rates are estimates: clock times width for memory and link, clock times units for arithmetic. They give way to
//! measured ones where the meter can compute on the GPU and no other process uses it.

use hearth_crds::{ComputeCapability, GpuProfile, PcieLink};

use crate::nvml::{self, GpuReading, NvmlUnavailable};
use crate::three_digits;
use crate::tree::Tree;

const LISTED: &str = "/proc/driver/nvidia/gpus";

/// Profiles of the GPUs, in PCI bus order.
///
/// The library describes this machine. If the tree belongs to another one, or the library is missing although the
/// driver is present (in a container without NVIDIA's runtime), the GPUs listed in the kernel's tree are returned by
/// name.
pub(crate) fn gpus(tree: &Tree) -> Vec<GpuProfile> {
    if !tree.is_this_machine() {
        return listed(tree);
    }
    match nvml::read(nvml::LIBRARY) {
        Ok(readings) => readings
            .iter()
            .filter_map(|reading| profile(tree, reading))
            .collect(),
        Err(NvmlUnavailable::NoGpus(why)) => {
            tracing::debug!("profile: no GPU by NVML: {why}");
            listed(tree)
        }
        Err(NvmlUnavailable::Trouble(what)) => {
            tree.warn(what);
            listed(tree)
        }
    }
}

/// Profile of one GPU; `None` for a GPU that no process can use as a whole.
fn profile(tree: &Tree, reading: &GpuReading) -> Option<GpuProfile> {
    let GpuReading {
        uuid,
        name,
        pci_bus_id,
        memory,
        compute_capability,
        pcie: _,
        power_limit_milliwatts,
        max_memory_clock_mhz,
        memory_bus_bits,
        max_sm_clock_mhz: _,
        cores: _,
        is_partitioned,
    } = reading;
    if *is_partitioned {
        tree.warn(format!(
            "GPU {name} ({uuid}) is cut into MIG instances, which this engine does not use: left out"
        ));
        return None;
    }
    if memory.is_none() {
        tree.warn(format!("memory of GPU {name} is not known: given as 0"));
    }
    let memory = memory.unwrap_or_default();
    let capability = compute_capability.and_then(|(major, minor)| {
        Some(ComputeCapability {
            major: u32::try_from(major).ok()?,
            minor: u32::try_from(minor).ok()?,
        })
    });
    let pcie = link(reading);
    let read_gbps = match (max_memory_clock_mhz, memory_bus_bits) {
        (Some(clock_mhz), Some(bits)) => memory_gbps(*clock_mhz, *bits),
        _ => 0.0,
    };
    Some(GpuProfile {
        uuid: uuid.clone(),
        name: name.clone(),
        memory_bytes: memory.total_bytes,
        free_bytes: memory.free_bytes,
        compute_capability: capability,
        numa_node: pci_bus_id
            .as_deref()
            .and_then(|id| numa_node(tree, &sysfs_address(id))),
        pcie,
        pcie_gbps: three_digits(pcie.map_or(0.0, link_gbps)),
        read_gbps: three_digits(read_gbps),
        bf16_gflops: three_digits(capability.map_or(0.0, |of| bf16_gflops(of, reading))),
        // Nothing is run on it here.
        fp8_gflops: 0.0,
        f16_gflops: 0.0,
        f32_weights_gflops: 0.0,
        copy_gbps: 0.0,
        copy_beside_reads_gbps: 0.0,
        operation_us: 0.0,
        exchange_us: 0.0,
        power_limit_watts: power_limit_milliwatts.unwrap_or(0) / 1000,
        virtual_device: None,
        from_device_plugin: false,
        // Determined by the program that would compute on it.
        obstacle: None,
    })
}

fn link(reading: &GpuReading) -> Option<PcieLink> {
    let pcie = &reading.pcie;
    let link = PcieLink {
        generation: pcie.generation.unwrap_or(0),
        width: pcie.width.unwrap_or(0),
        max_generation: pcie.max_generation.or(pcie.generation)?,
        max_width: pcie.max_width.or(pcie.width)?,
    };
    Some(link)
}

/// Bandwidth of a link in one direction at its highest generation and width, net of framing but not of protocol
/// overhead.
fn link_gbps(link: PcieLink) -> f64 {
    // From generation 3 on, 128 of 130 bits are data; generation 6 sends 242 of 256 bytes.
    let lane_gbps = match link.max_generation {
        0 => return 0.0,
        1 => 0.25,
        2 => 0.5,
        3 => 0.985,
        4 => 1.969,
        5 => 3.938,
        _ => 7.563,
    };
    lane_gbps * f64::from(link.max_width)
}

/// Bandwidth of memory that transfers twice per period of the reported clock, as is the case for GDDR and HBM.
fn memory_gbps(clock_mhz: u32, bus_bits: u32) -> f64 {
    f64::from(clock_mhz) * 2.0 * f64::from(bus_bits) / 8.0 / 1e3
}

/// Peak rate of dense bf16 products with f32 sums; 0 if the number of multiprocessors or their clock is unknown.
fn bf16_gflops(capability: ComputeCapability, reading: &GpuReading) -> f64 {
    let (Some(cores), Some(clock_mhz)) = (reading.cores, reading.max_sm_clock_mhz) else {
        return 0.0;
    };
    let ComputeCapability { major, minor } = capability;
    let cores_per_sm = match (major, minor) {
        (7, _) | (8, 0) => 64,
        _ => 128,
    };
    // Operations per multiprocessor and clock, a multiply-add counted as two, from NVIDIA's white papers.
    let per_clock = match (major, minor) {
        (0..=7, _) => return 0.0,
        (8, 0) => 2048,
        (9, _) => 4096,
        (10 | 11, _) => 8192,
        _ => 1024,
    };
    // GeForce accumulates bf16 products in f32 at half the rate of the same chip on a professional card.
    let per_clock = if reading.name.contains("GeForce") {
        per_clock / 2
    } else {
        per_clock
    };
    f64::from(cores / cores_per_sm) * f64::from(per_clock) * f64::from(clock_mhz) / 1e3
}

/// Converts the library's `00000000:17:00.0` to the kernel's `0000:17:00.0`.
fn sysfs_address(pci_bus_id: &str) -> String {
    let id = pci_bus_id.to_ascii_lowercase();
    match id.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => format!("{}:{rest}", &domain[4..]),
        _ => id,
    }
}

fn numa_node(tree: &Tree, address: &str) -> Option<u32> {
    // The kernel writes -1 if it does not know.
    let node: Option<i64> = tree.number(&format!("/sys/bus/pci/devices/{address}/numa_node"));
    node.and_then(|n| u32::try_from(n).ok())
}

/// GPUs listed by the driver in the kernel's tree, by name.
fn listed(tree: &Tree) -> Vec<GpuProfile> {
    let addresses = tree.names(LISTED).unwrap_or_default();
    addresses
        .iter()
        .filter_map(|address| listed_gpu(tree, address))
        .collect()
}

/// Returns the GPU at a PCI address such as `0000:01:00.0`.
fn listed_gpu(tree: &Tree, address: &str) -> Option<GpuProfile> {
    let name = format!("{LISTED}/{address}/information");
    let text = tree.read(&name).unwrap_or_default();
    let field = |name: &str| {
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().to_owned()).filter(|value| !value.is_empty())
    };
    let (Some(model), Some(uuid)) = (field("Model"), field("GPU UUID")) else {
        tree.warn(format!(
            "{name} does not report Model and GPU UUID: the GPU is left out"
        ));
        return None;
    };
    tree.warn(format!(
        "memory of GPU {model} is not known without NVML: given as 0"
    ));
    Some(GpuProfile {
        uuid,
        name: model,
        numa_node: numa_node(tree, address),
        ..GpuProfile::default()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

    use tempfile::TempDir;

    use super::*;
    use crate::nvml::{MemoryReading, PcieReading};

    const GIB: u64 = 1 << 30;

    /// Reading of an idle GeForce RTX 4090.
    fn rtx_4090() -> GpuReading {
        GpuReading {
            uuid: "GPU-11111111-2222-3333-4444-555555555555".to_owned(),
            name: "NVIDIA GeForce RTX 4090".to_owned(),
            pci_bus_id: Some("00000000:B1:00.0".to_owned()),
            memory: Some(MemoryReading {
                total_bytes: 24 * GIB,
                free_bytes: 23 * GIB,
            }),
            compute_capability: Some((8, 9)),
            pcie: PcieReading {
                generation: Some(1),
                width: Some(16),
                max_generation: Some(4),
                max_width: Some(16),
            },
            power_limit_milliwatts: Some(450_000),
            max_memory_clock_mhz: Some(10_501),
            memory_bus_bits: Some(384),
            max_sm_clock_mhz: Some(2_520),
            cores: Some(16_384),
            is_partitioned: false,
        }
    }

    fn tree() -> (TempDir, Tree) {
        let root = TempDir::new().unwrap();
        let device = root.path().join("sys/bus/pci/devices/0000:b1:00.0");
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("numa_node"), "1\n").unwrap();
        let tree = Tree::new(root.path());
        (root, tree)
    }

    #[test]
    fn a_reading_becomes_a_profile() {
        let (_root, tree) = tree();
        let gpu = profile(&tree, &rtx_4090()).unwrap();
        assert_eq!(
            gpu,
            GpuProfile {
                uuid: "GPU-11111111-2222-3333-4444-555555555555".to_owned(),
                name: "NVIDIA GeForce RTX 4090".to_owned(),
                memory_bytes: 24 * GIB,
                free_bytes: 23 * GIB,
                compute_capability: Some(ComputeCapability { major: 8, minor: 9 }),
                numa_node: Some(1),
                pcie: Some(PcieLink {
                    generation: 1,
                    width: 16,
                    max_generation: 4,
                    max_width: 16,
                }),
                pcie_gbps: 31.5,
                read_gbps: 1010.0,
                bf16_gflops: 165_000.0,
                power_limit_watts: 450,
                ..GpuProfile::default()
            }
        );
        assert_eq!(tree.into_warnings(), Vec::<String>::new());
    }

    #[test]
    fn estimates_are_near_the_data_sheets() {
        // (name, capability, cores, SM clock, memory clock, bus, GB/s and GFLOP/s from the data sheet)
        let cards = [
            (
                "NVIDIA A100-SXM4-40GB",
                (8, 0),
                6912,
                1410,
                1215,
                5120,
                1555.0,
                312e3,
            ),
            (
                "NVIDIA GeForce RTX 3090",
                (8, 6),
                10_496,
                1695,
                9751,
                384,
                936.0,
                71e3,
            ),
            ("NVIDIA L40S", (8, 9), 18_176, 2520, 9001, 384, 864.0, 362e3),
            (
                "NVIDIA H100 80GB HBM3",
                (9, 0),
                16_896,
                1830,
                2619,
                5120,
                3352.0,
                989e3,
            ),
            (
                "NVIDIA GeForce RTX 5090",
                (12, 0),
                21_760,
                2407,
                14_001,
                512,
                1792.0,
                209.5e3,
            ),
        ];
        for (name, (major, minor), cores, sm_mhz, memory_mhz, bits, gbps, gflops) in cards {
            let reading = GpuReading {
                name: name.to_owned(),
                cores: Some(cores),
                max_sm_clock_mhz: Some(sm_mhz),
                ..GpuReading::default()
            };
            let read = memory_gbps(memory_mhz, bits);
            assert!((read / gbps - 1.0).abs() < 0.01, "{name} reads {read}");
            let peak = bf16_gflops(ComputeCapability { major, minor }, &reading);
            assert!((peak / gflops - 1.0).abs() < 0.03, "{name} computes {peak}");
        }
    }

    #[test]
    fn what_the_library_does_not_tell_is_left_out() {
        let (_root, tree) = tree();
        let reading = GpuReading {
            uuid: "GPU-1".to_owned(),
            name: "NVIDIA Something".to_owned(),
            ..GpuReading::default()
        };
        let gpu = profile(&tree, &reading).unwrap();
        let expected = GpuProfile {
            uuid: "GPU-1".to_owned(),
            name: "NVIDIA Something".to_owned(),
            ..GpuProfile::default()
        };
        assert_eq!(gpu, expected);
        let warnings = tree.into_warnings();
        assert_eq!(
            warnings,
            ["memory of GPU NVIDIA Something is not known: given as 0"]
        );
    }

    #[test]
    fn a_partitioned_gpu_is_left_out_with_a_word() {
        let (_root, tree) = tree();
        let reading = GpuReading {
            is_partitioned: true,
            ..rtx_4090()
        };
        assert_eq!(profile(&tree, &reading), None);
        assert!(tree.into_warnings()[0].contains("MIG"));
    }

    #[test]
    fn addresses_are_written_as_the_kernel_does() {
        assert_eq!(sysfs_address("00000000:B1:00.0"), "0000:b1:00.0");
        assert_eq!(sysfs_address("0001:01:00.0"), "0001:01:00.0");
    }
}
