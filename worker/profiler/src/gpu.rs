//! GPUs that the NVIDIA driver lists in `/proc`; without NVML their memory is not known.

use hearth_crds::GpuProfile;

use crate::tree::Tree;

const GPUS: &str = "/proc/driver/nvidia/gpus";

pub(crate) fn gpus(tree: &Tree) -> Vec<GpuProfile> {
    let addresses = tree.names(GPUS).unwrap_or_default();
    addresses
        .iter()
        .filter_map(|address| gpu(tree, address))
        .collect()
}

/// The GPU at a PCI address such as `0000:01:00.0`.
fn gpu(tree: &Tree, address: &str) -> Option<GpuProfile> {
    let name = format!("{GPUS}/{address}/information");
    let text = tree.read(&name).unwrap_or_default();
    let field = |name: &str| {
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().to_owned()).filter(|value| !value.is_empty())
    };
    let (Some(model), Some(uuid)) = (field("Model"), field("GPU UUID")) else {
        tree.warn(format!(
            "{name} does not tell Model and GPU UUID: the GPU is left out"
        ));
        return None;
    };
    tree.warn(format!(
        "memory of GPU {model} is not known without NVML: given as 0"
    ));
    // The kernel writes -1 where it does not know.
    let node: Option<i64> = tree.number(&format!("/sys/bus/pci/devices/{address}/numa_node"));
    Some(GpuProfile {
        uuid,
        name: model,
        numa_node: node.and_then(|n| u32::try_from(n).ok()),
        ..GpuProfile::default()
    })
}
