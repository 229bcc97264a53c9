//! Nodes that parts of this machine stand for, so that plans over several nodes can be tried, tested and measured on one.

use std::path::Path;
use std::str::FromStr;

use anyhow::bail;
use hearth_crds::{
    GpuProfile, LinkProfile, MemoryQuantity, NodeProfileStatus, NumaNodeProfile, format_bytes,
};
use hearth_planner::{Advice, LEAST_RESERVE_BYTES, PlanError, format_cpu_list};

const FORM: &str = "write a name, its memory, its CPUs where it has not all, and how many GPUs it has, as in attic:memory=2Gi,cpus=0-3,gpus=1";
/// GB/s and round trip in microseconds between two processes of this machine.
const LOOPBACK: (f64, f64) = (1.0, 50.0);

/// A node that a part of this machine stands for: `attic:memory=2Gi,cpus=0-3,gpus=1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BoxArg {
    name: String,
    memory_bytes: u64,
    /// Its CPUs by the kernel's number; `None`: all of the machine, together with other nodes.
    cpus: Option<Vec<u32>>,
    /// How many of the machine's GPUs it has.
    gpus: usize,
}

impl FromStr for BoxArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once(':').ok_or(FORM)?;
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(format!(
                "the node's name is {name:?}: write lower-case letters, digits and -"
            ));
        }
        let (mut memory, mut cpus, mut gpus) = (None, None, None);
        for (key, value) in fields(rest)? {
            let place = match key {
                "memory" => &mut memory,
                "cpus" => &mut cpus,
                "gpus" => &mut gpus,
                other => return Err(format!("{other} is not known: {FORM}")),
            };
            if let Some(first) = place.replace(value.clone()) {
                return Err(format!(
                    "{key} is given twice, {first} and {value}: write it once"
                ));
            }
        }
        let memory = memory.ok_or(FORM)?;
        let quantity: MemoryQuantity = memory
            .parse()
            .map_err(|error| format!("memory is {memory:?}: {error}"))?;
        if quantity.bytes() <= LEAST_RESERVE_BYTES {
            if memory.parse() == Ok(quantity.bytes()) && quantity.bytes() > 0 {
                let unit = if quantity.bytes() > 128 { "Mi" } else { "Gi" };
                return Err(format!(
                    "memory is {memory:?}, which is in bytes: write a unit, as in {name}:memory={memory}{unit}"
                ));
            }
            return Err(format!(
                "memory is {memory:?}: {} of a node stay free, so that it would hold nothing: write more, as in {name}:memory=2Gi",
                format_bytes(LEAST_RESERVE_BYTES)
            ));
        }
        let gpus = gpus.unwrap_or_else(|| "0".to_owned());
        Ok(Self {
            name: name.to_owned(),
            memory_bytes: quantity.bytes(),
            cpus: cpus.as_deref().map(cpu_list).transpose()?,
            gpus: gpus
                .parse()
                .map_err(|_| format!("gpus is {gpus:?}: write a number, as in gpus=1"))?,
        })
    }
}

impl BoxArg {
    /// The argument for the same node with so much memory.
    fn with_memory(&self, bytes: u64) -> String {
        let memory = MemoryQuantity::from_bytes(bytes);
        let mut argument = format!("--node {}:memory={memory}", self.name);
        if let Some(cpus) = &self.cpus {
            argument += &format!(",cpus={}", format_cpu_list(cpus));
        }
        if self.gpus > 0 {
            argument += &format!(",gpus={}", self.gpus);
        }
        argument
    }
}

/// The properties of a node with their values. A list of CPUs has commas of its own.
fn fields(text: &str) -> Result<Vec<(&str, String)>, String> {
    let mut fields: Vec<(&str, String)> = Vec::new();
    for part in text.split(',') {
        match (part.split_once('='), fields.last_mut()) {
            (Some((key, value)), _) => fields.push((key, value.to_owned())),
            (None, Some((_, value))) => {
                value.push(',');
                value.push_str(part);
            }
            (None, None) => return Err(FORM.to_owned()),
        }
    }
    Ok(fields)
}

/// Reads `0-3,8`.
fn cpu_list(text: &str) -> Result<Vec<u32>, String> {
    let wrong = || format!("cpus is {text:?}: write numbers and ranges, as in 0-3,8");
    let mut cpus = Vec::new();
    for run in text.split(',') {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        let [first, last] = [first, last].map(|n| n.parse::<u32>().map_err(|_| wrong()));
        let (first, last) = (first?, last?);
        if first > last || last - first > 4096 {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

/// Checks nodes as far as can be told before this machine is measured.
///
/// # Errors
/// Those of [`split`] that are certain.
pub(crate) fn check(boxes: &[BoxArg], virtual_device: Option<&str>) -> anyhow::Result<()> {
    check_on(boxes, virtual_device, may_have_gpus())
}

fn check_on(
    boxes: &[BoxArg],
    virtual_device: Option<&str>,
    may_have_gpus: bool,
) -> anyhow::Result<()> {
    if boxes.is_empty() {
        return Ok(());
    }
    check_names(boxes)?;
    if let Ok(memory) = <procfs::Meminfo as procfs::Current>::current() {
        check_memory(boxes, memory.mem_total, "in all")?;
    }
    let present = std::fs::read_to_string("/sys/devices/system/cpu/present").ok();
    if let Some(present) = present.and_then(|text| cpu_list(text.trim()).ok()) {
        boxes.iter().try_for_each(|it| check_cpus(it, &present))?;
    }
    match virtual_device {
        Some(device) => {
            let count = device.split([':', ',']).find_map(|part| {
                let count = part.strip_prefix("count=")?;
                count.parse().ok()
            });
            check_gpus(boxes, count.unwrap_or(1), true)
        }
        None if may_have_gpus => Ok(()),
        None => check_gpus(boxes, 0, false),
    }
}

/// Whether this machine may have GPUs: one on its PCI bus, whose driver may not be loaded yet, or a device of a driver.
fn may_have_gpus() -> bool {
    const NVIDIA: &str = "0x10de";
    let driven = ["/dev/nvidiactl", "/dev/nvgpu", "/dev/dxg"];
    let devices = std::fs::read_dir("/sys/bus/pci/devices");
    let mut devices = devices.into_iter().flatten().flatten();
    driven.iter().any(|path| Path::new(path).exists())
        || devices.any(|device| {
            let vendor = std::fs::read_to_string(device.path().join("vendor"));
            vendor.is_ok_and(|vendor| vendor.trim() == NVIDIA)
        })
}

/// Profiles of the nodes that this machine stands for: itself alone if none is asked for. The machine's GPUs are shared out in
/// their order, and each node is linked to the others by loopback.
///
/// # Errors
/// An error if nodes have one name, together more memory or GPUs than there are, or CPUs that there are not, and if none has the
/// virtual devices that were asked for.
pub(crate) fn split(
    machine: NodeProfileStatus,
    boxes: &[BoxArg],
) -> anyhow::Result<Vec<NodeProfileStatus>> {
    if boxes.is_empty() {
        return Ok(vec![machine]);
    }
    check_names(boxes)?;
    check_memory(boxes, machine.memory.available_bytes, "free")?;
    let is_virtual = |gpu: &GpuProfile| gpu.virtual_device.is_some();
    let is_virtual = machine.gpus.iter().any(is_virtual);
    check_gpus(boxes, machine.gpus.len(), is_virtual)?;
    let cpus: Vec<u32> = machine.cpus.iter().map(|cpu| cpu.id).collect();
    boxes.iter().try_for_each(|it| check_cpus(it, &cpus))?;
    let mut gpus = machine.gpus.iter();
    let nodes = boxes.iter().map(|it| {
        let mut node = part(&machine, it, boxes);
        node.gpus = gpus.by_ref().take(it.gpus).cloned().collect();
        node
    });
    Ok(nodes.collect())
}

fn check_names(boxes: &[BoxArg]) -> anyhow::Result<()> {
    for (n, it) in boxes.iter().enumerate() {
        if boxes[..n].iter().any(|other| other.name == it.name) {
            bail!(
                "--node {} is given twice\n  give each node a name of its own",
                it.name
            );
        }
    }
    Ok(())
}

fn check_memory(boxes: &[BoxArg], has_bytes: u64, which: &str) -> anyhow::Result<()> {
    let asked = boxes.iter().map(|it| it.memory_bytes);
    let asked = asked.fold(0, u64::saturating_add);
    if asked > has_bytes {
        bail!(
            "--node asks for {} of memory in all, and this machine has {} {which}\n  give the nodes less",
            format_bytes(asked),
            format_bytes(has_bytes)
        );
    }
    Ok(())
}

fn check_cpus(it: &BoxArg, has: &[u32]) -> anyhow::Result<()> {
    let mut cpus = it.cpus.iter().flatten();
    if let Some(cpu) = cpus.find(|cpu| !has.contains(cpu)) {
        bail!(
            "--node {} has CPU {cpu}, and this machine has no such CPU\n  see: lscpu --extended",
            it.name
        );
    }
    Ok(())
}

fn check_gpus(boxes: &[BoxArg], has: usize, are_virtual: bool) -> anyhow::Result<()> {
    let asked = boxes
        .iter()
        .map(|it| it.gpus)
        .fold(0, usize::saturating_add);
    if asked > has {
        bail!(
            "--node asks for {asked} GPU{} in all, and this machine has {has}\n  give the nodes fewer, or {}",
            if asked == 1 { "" } else { "s" },
            match are_virtual {
                true => format!("more virtual ones: --virtual-device …,count={asked}"),
                false =>
                    format!("try virtual ones: --virtual-device virtual:memory=1Gi,count={asked}"),
            }
        );
    }
    if asked == 0 && are_virtual {
        bail!(
            "--virtual-device has no effect: no --node has it\n  say which one does, as in attic:memory=2Gi,gpus=1"
        );
    }
    Ok(())
}

/// The error with what to write as `--node` where more memory of a node is what helps.
pub(crate) fn as_arguments(
    mut error: PlanError,
    boxes: &[BoxArg],
    nodes: &[NodeProfileStatus],
) -> PlanError {
    let (node, advice) = match &mut error {
        PlanError::NoRoomInRing { advice, .. } => (String::new(), advice),
        PlanError::InsufficientMemory { node, advice, .. } => (node.clone(), advice),
        _ => return error,
    };
    let argument = |name: &str, more_bytes: u64| {
        let it = boxes.iter().find(|it| it.name == name)?;
        let memory = &nodes.iter().find(|node| node.node == name)?.memory;
        let bytes = memory.available_bytes.saturating_add(more_bytes);
        let bytes = bytes.div_ceil(1 << 20) << 20;
        (bytes <= memory.total_bytes).then(|| it.with_memory(bytes))
    };
    for advice in advice {
        let arguments: Option<Vec<String>> = match &*advice {
            Advice::FreeMemoryOf(name, bytes) => argument(name, *bytes).map(|it| vec![it]),
            Advice::FreeMemory(bytes) => argument(&node, *bytes).map(|it| vec![it]),
            Advice::FreeMemoryOfNodes(more) => more
                .iter()
                .map(|(name, bytes)| argument(name, *bytes))
                .collect(),
            _ => None,
        };
        if let Some(arguments) = arguments {
            *advice = Advice::Argument(arguments.join(" "));
        }
    }
    error
}

fn part(machine: &NodeProfileStatus, it: &BoxArg, boxes: &[BoxArg]) -> NodeProfileStatus {
    let mut node = machine.clone();
    node.node.clone_from(&it.name);
    if let Some(cpus) = &it.cpus {
        node.cpus.retain(|cpu| cpus.contains(&cpu.id));
        for numa in &mut node.numa_nodes {
            numa.cpus.retain(|cpu| cpus.contains(cpu));
        }
        node.numa_nodes.retain(|numa| !numa.cpus.is_empty());
    }
    node.memory.available_bytes = it.memory_bytes;
    // What it may be given, too.
    let others = boxes.iter().filter(|other| other.name != it.name);
    let others = others.map(|other| other.memory_bytes).sum();
    node.memory.total_bytes = machine.memory.available_bytes.saturating_sub(others);
    node.memory.least_available_bytes = None;
    let count = node.numa_nodes.len().max(1) as u64;
    for numa in &mut node.numa_nodes {
        let NumaNodeProfile {
            memory_bytes,
            free_bytes,
            ..
        } = numa;
        *memory_bytes = it.memory_bytes / count;
        *free_bytes = it.memory_bytes / count;
    }
    let (gbps, rtt_us) = LOOPBACK;
    let others = boxes.iter().filter(|other| other.name != it.name);
    node.links = others
        .map(|other| LinkProfile {
            peer: other.name.clone(),
            gbps,
            rtt_us,
        })
        .collect();
    node
}

#[cfg(test)]
mod tests {
    use hearth_crds::CpuProfile;

    use super::*;

    fn machine() -> NodeProfileStatus {
        let cpu = |id| CpuProfile {
            id,
            core: id,
            ..CpuProfile::default()
        };
        let mut machine = NodeProfileStatus {
            node: "here".to_owned(),
            cpus: (0..4).map(cpu).collect(),
            ..NodeProfileStatus::default()
        };
        machine.memory.available_bytes = 8 << 30;
        machine
    }

    fn nodes(texts: &[&str]) -> anyhow::Result<Vec<NodeProfileStatus>> {
        nodes_of(machine(), texts)
    }

    fn nodes_of(
        machine: NodeProfileStatus,
        texts: &[&str],
    ) -> anyhow::Result<Vec<NodeProfileStatus>> {
        let boxes: Result<Vec<BoxArg>, String> = texts.iter().map(|text| text.parse()).collect();
        split(machine, &boxes.map_err(anyhow::Error::msg)?)
    }

    #[test]
    fn a_machine_stands_for_several_nodes() {
        assert_eq!(nodes(&[]).expect("itself"), [machine()]);
        let nodes = nodes(&["attic:memory=4Gi,cpus=0-1,3", "office:cpus=2,memory=1Gi"]);
        let nodes = nodes.expect("two nodes");
        let [attic, office] = nodes.as_slice() else {
            panic!("{nodes:?}");
        };
        let cpus = |node: &NodeProfileStatus| node.cpus.iter().map(|c| c.id).collect::<Vec<_>>();
        assert_eq!((cpus(attic), cpus(office)), (vec![0, 1, 3], vec![2]));
        assert_eq!(attic.memory.available_bytes, 4 << 30);
        assert_eq!(attic.links[0].peer, "office");
    }

    #[test]
    fn gpus_are_shared_out_in_their_order() {
        let gpu = |number: u32| GpuProfile {
            uuid: format!("VIRTUAL-{number}"),
            virtual_device: Some("virtual:memory=1Gi".to_owned()),
            ..GpuProfile::default()
        };
        let machine = || NodeProfileStatus {
            gpus: (0..4).map(gpu).collect(),
            ..machine()
        };
        let texts = ["a:gpus=1,memory=1Gi", "b:memory=1Gi", "c:memory=1Gi,gpus=2"];
        let nodes = nodes_of(machine(), &texts).expect("three nodes");
        let uuids = |node: &NodeProfileStatus| {
            let gpus = node.gpus.iter().map(|gpu| gpu.uuid.clone());
            gpus.collect::<Vec<_>>()
        };
        let shared: Vec<Vec<String>> = nodes.iter().map(uuids).collect();
        assert_eq!(
            shared,
            [&["VIRTUAL-0"][..], &[], &["VIRTUAL-1", "VIRTUAL-2"]]
        );
        for (texts, words) in [
            (&["a:memory=1Gi,gpus=3", "b:memory=1Gi,gpus=2"][..], "has 4"),
            (&["a:memory=1Gi,gpus=0"], "gpus=1"),
        ] {
            let error = nodes_of(machine(), texts).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_value() {
        for (texts, words) in [
            (&["attic"][..], "attic:memory=2Gi"),
            (&["Attic:memory=1Gi"], "\"Attic\""),
            (&["attic:memory=lots"], "memory is \"lots\""),
            (&["attic:memory=0"], "memory is \"0\""),
            (&["attic:memory=128Mi"], "128 MiB of a node stay free"),
            (&["attic:memory=420"], "as in attic:memory=420Mi"),
            (&["attic:memory=2"], "as in attic:memory=2Gi"),
            (&["attic:cpus=0"], "attic:memory=2Gi"),
            (&["attic:memory=1Gi,cpus=3-1"], "cpus is \"3-1\""),
            (&["attic:memory=1Gi,cpus=9"], "no such CPU"),
            (&["attic:memory=1Gi,gpus=all"], "gpus is \"all\""),
            (&["attic:memory=1Gi,gpus=1"], "this machine has 0"),
            (&["attic:disk=2"], "disk is not known"),
            (&["attic:memory=1Gi,gpu=1"], "gpu is not known"),
            (
                &["attic:memory=1Gi,memory=2Gi"],
                "memory is given twice, 1Gi and 2Gi",
            ),
            (&["attic:memory=1Gi,cpus=0,cpus=1"], "cpus is given twice"),
            (&["a:memory=1Gi", "a:memory=1Gi"], "given twice"),
            (&["a:memory=7Gi", "b:memory=7Gi"], "8 GiB free"),
        ] {
            let error = nodes(texts).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    /// As much as the others leave of what the machine has.
    #[test]
    fn more_memory_is_said_as_the_argument_to_write() {
        let texts = ["attic:memory=1Gi,cpus=2,0-1", "office:memory=2Gi,gpus=1"];
        let boxes = texts.map(|text| text.parse::<BoxArg>().expect("a node"));
        let nodes: Vec<_> = boxes
            .iter()
            .map(|it| part(&machine(), it, &boxes))
            .collect();
        let words = |advice| {
            let error = PlanError::NoRoomInRing {
                weights_bytes: 1,
                kv_bytes: 1,
                kv_of: "one context".to_owned(),
                accounts: "there is room for nothing".to_owned(),
                advice: vec![advice],
            };
            let error = as_arguments(error, &boxes, &nodes).to_string();
            error.lines().last().unwrap_or_default().trim().to_owned()
        };
        let more = |name: &str, mib: u64| words(Advice::FreeMemoryOf(name.to_owned(), mib << 20));
        assert_eq!(
            more("attic", 231),
            "write --node attic:memory=1255Mi,cpus=0-2"
        );
        assert_eq!(
            more("office", 1024),
            "write --node office:memory=3Gi,gpus=1"
        );
        let both = ["attic", "office"].map(|name| (name.to_owned(), 1 << 30));
        assert_eq!(
            words(Advice::FreeMemoryOfNodes(both.to_vec())),
            "write --node attic:memory=2Gi,cpus=0-2 --node office:memory=3Gi,gpus=1"
        );
        let too_much = more("office", 6 << 10);
        assert!(
            too_much.starts_with("free 6144 MiB on office"),
            "{too_much}"
        );
    }

    #[test]
    fn what_is_certain_is_refused_before_the_machine_is_measured() {
        let device = Some("virtual:memory=1Gi,count=2");
        for (texts, device, words) in [
            (
                &["a:memory=129Mi", "a:memory=129Mi"][..],
                None,
                "given twice",
            ),
            (&["a:memory=129Mi,gpus=1"], None, "this machine has 0"),
            (&["a:memory=129Mi,cpus=4095"], None, "no such CPU"),
            (&["a:memory=99999Gi"], None, "this machine has"),
            (&["a:memory=129Mi,gpus=3"], device, "this machine has 2"),
            (
                &["a:memory=129Mi"],
                device,
                "--virtual-device has no effect",
            ),
        ] {
            let boxes: Result<Vec<BoxArg>, _> = texts.iter().map(|text| text.parse()).collect();
            let error = check_on(&boxes.expect("nodes"), device, false).expect_err(words);
            assert!(error.to_string().contains(words), "{error}");
        }
        let boxes = ["a:memory=129Mi,cpus=0,gpus=2".parse().expect("a node")];
        check_on(&boxes, device, false).expect("what there is");
        check_on(&boxes, None, true).expect("GPUs that are not known yet");
        check_on(&[], device, false).expect("the machine itself");
    }
}
