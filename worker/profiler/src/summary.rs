//! Human-readable summary of a profile.

use std::fmt::Write;

use hearth_crds::{ComputeProfile, GpuProfile, MemoryProfile, NodeProfileStatus, format_bytes};

/// Summarises the profile in a few lines, each ending in a newline.
pub fn summary(profile: &NodeProfileStatus) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| add_line(&mut text, name, &value);
    let NodeProfileStatus {
        node,
        cpus,
        memory,
        compute,
        measured_at,
        busy_percent,
        ..
    } = profile;
    let cores = crate::cpu::one_of_each_core(cpus).len();
    let busy = busy_percent.map_or_else(String::new, |percent| {
        format!(" while others had {percent} % of the CPUs: rates are low")
    });
    line("node", format!("{node}, measured {measured_at}{busy}"));
    line(
        "cpus",
        format!("{} on {cores} cores: {}", cpus.len(), isa_names(profile)),
    );
    line(
        "memory",
        format!(
            "{}, {} available{}; reads {:.1} GB/s with one thread, {:.1} GB/s with {cores}",
            format_bytes(memory.total_bytes),
            format_bytes(memory.available_bytes),
            least(memory),
            memory.read_one_thread_gbps,
            memory.read_all_threads_gbps
        ),
    );
    line(
        "compute",
        format!(
            "products of bf16 weights {:.0} GFLOP/s with one thread, {:.0} with {cores}{}; multiply-adds of f32 {:.0} and {:.0}",
            compute.bf16_one_thread_gflops,
            compute.bf16_all_threads_gflops,
            other_formats(compute),
            compute.f32_one_thread_gflops,
            compute.f32_all_threads_gflops
        ),
    );
    add_devices(&mut text, profile);
    text
}

/// The least memory that was available, if it was watched.
fn least(memory: &MemoryProfile) -> String {
    memory
        .least_available_bytes
        .map_or_else(String::new, |bytes| {
            let minutes = memory.least_over_seconds / 60;
            format!(", {} at least in {minutes} minutes", format_bytes(bytes))
        })
}

/// Products of weights in other formats than bf16, as far as they were measured.
fn other_formats(compute: &ComputeProfile) -> String {
    let formats = [
        (
            "FP8",
            compute.fp8_one_thread_gflops,
            compute.fp8_all_threads_gflops,
        ),
        (
            "f16",
            compute.f16_one_thread_gflops,
            compute.f16_all_threads_gflops,
        ),
        (
            "f32",
            compute.f32_weights_one_thread_gflops,
            compute.f32_weights_all_threads_gflops,
        ),
    ];
    let measured = formats.iter().filter(|(_, one, _)| *one > 0.0);
    measured
        .map(|(name, one, all)| format!(", of {name} weights {one:.0} and {all:.0}"))
        .collect()
}

fn add_line(text: &mut String, name: &str, value: &str) {
    // Writing into a String cannot fail.
    let _ = writeln!(text, "{name:<9} {value}");
}

/// Adds one line for each NUMA node, GPU, disk and link.
fn add_devices(text: &mut String, profile: &NodeProfileStatus) {
    let mut line = |name: &str, value: String| add_line(text, name, &value);
    for numa in &profile.numa_nodes {
        line(
            &format!("numa {}", numa.id),
            format!(
                "{} CPUs, {}, {} free, reads {:.1} GB/s",
                numa.cpus.len(),
                format_bytes(numa.memory_bytes),
                format_bytes(numa.free_bytes),
                numa.read_gbps
            ),
        );
    }
    for gpu in &profile.gpus {
        line("gpu", gpu_text(gpu));
    }
    for disk in &profile.disks {
        let mapped = match disk.mapped_read_gbps > 0.0 {
            true => format!(" ({:.2} through the page cache)", disk.mapped_read_gbps),
            false => String::new(),
        };
        line(
            "disk",
            format!(
                "{} reads {:.2} GB/s{mapped}, {} free",
                disk.path,
                disk.read_gbps,
                format_bytes(disk.free_bytes)
            ),
        );
    }
    for link in &profile.links {
        line(
            "link",
            format!("{} {:.2} GB/s, {:.0} µs", link.peer, link.gbps, link.rtt_us),
        );
    }
}

/// Describes a GPU with its known data.
fn gpu_text(gpu: &GpuProfile) -> String {
    let GpuProfile {
        uuid,
        name,
        memory_bytes,
        free_bytes,
        compute_capability,
        numa_node,
        pcie,
        pcie_gbps,
        read_gbps: _,
        bf16_gflops: _,
        fp8_gflops: _,
        f16_gflops: _,
        f32_weights_gflops: _,
        copy_gbps,
        copy_beside_reads_gbps,
        operation_us,
        exchange_us,
        power_limit_watts,
        virtual_device,
        from_device_plugin,
        obstacle,
    } = gpu;
    let mut parts = vec![format!("{name} {uuid}")];
    parts.push(match memory_bytes {
        0 => "memory not known".to_owned(),
        _ => format!(
            "{}, {} free",
            format_bytes(*memory_bytes),
            format_bytes(*free_bytes)
        ),
    });
    if let Some(capability) = compute_capability {
        parts.push(format!("compute capability {capability}"));
    }
    if let Some(link) = pcie {
        parts.push(format!(
            "PCIe {} x{} (now {} x{}, about {pcie_gbps:.1} GB/s)",
            link.max_generation, link.max_width, link.generation, link.width
        ));
    }
    if let Some(node) = numa_node {
        parts.push(format!("NUMA node {node}"));
    }
    if *power_limit_watts > 0 {
        parts.push(format!("at most {power_limit_watts} W"));
    }
    parts.extend(rates_text(gpu));
    if *copy_gbps > 0.0 {
        parts.push(format!(
            "copies {copy_gbps:.2} GB/s ({copy_beside_reads_gbps:.2} while the CPUs read)"
        ));
    }
    if *operation_us > 0.0 {
        parts.push(format!("{operation_us:.1} µs an operation"));
    }
    if *exchange_us > 0.0 {
        parts.push(format!("{exchange_us:.0} µs to the host and back"));
    }
    parts.extend(virtual_device.as_ref().map(|text| {
        let by = match from_device_plugin {
            true => ", handed out by a device plugin",
            false => "",
        };
        format!("stands for a GPU: {text}{by}")
    }));
    parts.extend(obstacle.as_ref().map(|why| format!("not usable: {why}")));
    parts.join(", ")
}

/// Those that are known of a GPU's rates: of reads of its memory, and of products with weights of each format.
fn rates_text(gpu: &GpuProfile) -> Vec<String> {
    let reads = format!("reads about {:.0} GB/s", gpu.read_gbps);
    let products = [
        ("bf16 about", gpu.bf16_gflops),
        ("FP8 weights", gpu.fp8_gflops),
        ("F16 weights", gpu.f16_gflops),
        ("F32 weights", gpu.f32_weights_gflops),
    ];
    let products = products.into_iter().map(|(of, gflops)| {
        let text = format!("{of} {:.0} TFLOP/s", gflops / 1e3);
        (gflops, text)
    });
    let rates = std::iter::once((gpu.read_gbps, reads)).chain(products);
    let known = rates.filter(|(rate, _)| *rate > 0.0);
    known.map(|(_, text)| text).collect()
}

/// Names of the instruction sets, such as `avx2 avx512f`.
pub(crate) fn isa_names(profile: &NodeProfileStatus) -> String {
    let isa = &profile.isa;
    let flags = [
        ("avx2", isa.avx2),
        ("avx512f", isa.avx512f),
        ("avx512bw", isa.avx512bw),
        ("avx512vbmi", isa.avx512vbmi),
        ("avx512bf16", isa.avx512bf16),
        ("avx512vnni", isa.avx512vnni),
        ("amx", isa.amx),
        ("neon", isa.neon),
    ];
    let has: Vec<&str> = flags.iter().filter(|f| f.1).map(|f| f.0).collect();
    if has.is_empty() {
        "no vector extensions".to_owned()
    } else {
        has.join(" ")
    }
}
