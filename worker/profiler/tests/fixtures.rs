//! Recorded trees of several machines, with meters whose rates show which CPUs they were asked to measure.

#![allow(clippy::unwrap_used)] // A test may panic.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hearth_crds::{IsaProfile, NodeProfileStatus};
use hearth_profiler::{
    CpuMeter, Gflops, Measured, Meter, ProfileError, ProfileOptions, Scope, hardware, measure,
    memory_limit_bytes, observe, summary, take_rates,
};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// Meter that reports 10 GB/s per CPU, 100 GFLOP/s in bf16 and 50 in f32.
struct PerCpu;

impl Meter for PerCpu {
    fn isa(&self) -> IsaProfile {
        IsaProfile {
            avx2: true,
            ..IsaProfile::default()
        }
    }

    fn read_gbps(&self, cpus: &[u32], bytes: usize) -> Result<f64, String> {
        assert!((8 << 20..=512 << 20).contains(&bytes));
        Ok(10.0 * cpus.len() as f64)
    }

    fn gflops(&self, cpus: &[u32]) -> Result<Gflops, String> {
        Ok(Gflops {
            bf16: 100.0 * cpus.len() as f64,
            f32: 50.0 * cpus.len() as f64,
        })
    }
}

/// Meter of a machine on which nothing can be measured.
struct Broken;

impl Meter for Broken {
    fn isa(&self) -> IsaProfile {
        IsaProfile::default()
    }

    fn read_gbps(&self, _: &[u32], _: usize) -> Result<f64, String> {
        Err("no memory".to_owned())
    }

    fn gflops(&self, _: &[u32]) -> Result<Gflops, String> {
        Err("no kernels".to_owned())
    }
}

/// Unpacks a tree: `@ path` lines, each followed by the text of that file.
fn unpack(text: &str) -> TempDir {
    let root = TempDir::new().unwrap();
    for part in text.split("\n@ ").skip(1) {
        let (path, content) = part.split_once('\n').unwrap_or((part, ""));
        write(root.path(), path, content);
    }
    root
}

fn write(root: &Path, path: &str, content: &str) {
    let file = root.join(path.trim_start_matches('/'));
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, content).unwrap();
}

fn options(root: &Path) -> ProfileOptions {
    ProfileOptions {
        root: root.to_owned(),
        measured_at: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_795_000_000_500)),
        ..ProfileOptions::default()
    }
}

fn profile(tree: &str) -> (NodeProfileStatus, Vec<String>) {
    let root = unpack(tree);
    let Measured { profile, warnings } = measure(&options(root.path()), &PerCpu).unwrap();
    (profile, warnings)
}

fn ids(profile: &NodeProfileStatus) -> Vec<u32> {
    profile.cpus.iter().map(|cpu| cpu.id).collect()
}

#[test]
fn a_two_socket_server() {
    let (p, warnings) = profile(include_str!("fixtures/server.tree"));
    assert_eq!(p.node, "rack-1");
    assert_eq!(p.measured_at, "2026-11-18T11:06:40Z");
    assert_eq!(ids(&p), (0..16).collect::<Vec<_>>());
    // Siblings share a core and belong to one NUMA node.
    let cpu = |id: usize| (p.cpus[id].core, p.cpus[id].numa_node);
    assert_eq!((cpu(5), cpu(13)), ((5, 1), (5, 1)));
    assert_eq!((p.cpus[0].max_mhz, p.cpus[0].cache_bytes), (3900, 2 << 20));
    assert!(p.isa.avx2 && p.isa.amx && !p.isa.avx512f);
    assert_eq!(p.numa_nodes.len(), 2);
    assert_eq!(p.numa_nodes[0].cpus, [0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(p.numa_nodes[0].memory_bytes, 65_933_926 * 1024);
    assert_eq!(p.numa_nodes[0].free_bytes, 57_500_000 * 1024);
    assert_eq!(p.numa_nodes[1].free_bytes, 61_500_000 * 1024);
    assert_eq!(p.memory.total_bytes, 131_867_852 * 1024);
    assert_eq!(p.memory.available_bytes, 120_000_000 * 1024);
    // One thread per core: 8 of them, 4 on each node.
    assert_eq!(p.memory.read_one_thread_gbps, 10.0);
    assert_eq!(p.memory.read_all_threads_gbps, 80.0);
    assert_eq!(p.numa_nodes[1].read_gbps, 40.0);
    assert_eq!(p.compute.bf16_all_threads_gflops, 800.0);
    assert_eq!(p.compute.f32_one_thread_gflops, 50.0);
    assert_eq!(p.gpus.len(), 2);
    assert_eq!(p.gpus[1].name, "NVIDIA GeForce RTX 5090");
    assert_eq!(p.gpus[1].uuid, "GPU-99999999-8888-7777-6666-555555555555");
    assert_eq!(p.gpus[1].numa_node, Some(1));
    assert!(p.links.is_empty() && p.disks.is_empty());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("without NVML"));
}

#[test]
fn a_laptop_with_unequal_cores() {
    let (p, warnings) = profile(include_str!("fixtures/laptop.tree"));
    assert_eq!(warnings, Vec::<String>::new());
    let cores: Vec<_> = p.cpus.iter().map(|c| c.core).collect();
    assert_eq!(cores, [0, 0, 2, 2, 4, 5, 6, 7]);
    assert_eq!((p.cpus[0].max_mhz, p.cpus[7].max_mhz), (4700, 3400));
    assert_eq!(
        (p.cpus[0].cache_bytes, p.cpus[7].cache_bytes),
        (1280 << 10, 2 << 20)
    );
    assert_eq!(p.memory.read_all_threads_gbps, 60.0);
    assert_eq!(p.numa_nodes.len(), 1);
    assert_eq!(p.numa_nodes[0].read_gbps, 60.0);
    // Never more than the total available.
    assert_eq!(p.numa_nodes[0].free_bytes, 9_000_000 * 1024);
    assert!(!p.isa.amx && p.gpus.is_empty());
}

#[test]
fn a_container_is_its_limits() {
    let (p, warnings) = profile(include_str!("fixtures/container.tree"));
    // CPUs 2-7 are three cores; a quota of 2.5 CPUs covers two threads, on two cores.
    assert_eq!(ids(&p), [2, 4]);
    assert!(
        warnings[0].contains("2.5 of 6 CPUs: 2 are used"),
        "{warnings:?}"
    );
    assert_eq!(p.memory.total_bytes, 8 * GIB);
    // 8 GiB minus the 2 GiB that are not cache.
    assert_eq!(p.memory.available_bytes, 6 * GIB);
    assert_eq!(p.numa_nodes[0].free_bytes, 6 * GIB);
    assert_eq!(p.numa_nodes[0].memory_bytes, 8 * GIB);
    assert_eq!(p.numa_nodes[0].cpus, [2, 4]);
}

#[test]
fn an_agent_in_a_container_sees_the_node_around_it() {
    let root = unpack(include_str!("fixtures/container.tree"));
    let mut options = options(root.path());
    options.scope = Scope::Node;
    options.node = Some("node-1".to_owned());
    let Measured { profile, warnings } = measure(&options, &PerCpu).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    assert_eq!(profile.node, "node-1");
    assert_eq!(ids(&profile), (0..16).collect::<Vec<_>>());
    assert_eq!(profile.memory.total_bytes, 65_933_926 * 1024);
    assert_eq!(profile.memory.available_bytes, 60_000_000 * 1024);
    assert_eq!(profile.numa_nodes[0].memory_bytes, 65_933_926 * 1024);
    assert_eq!(profile.numa_nodes[0].cpus.len(), 16);
    // Isolated CPUs are reserved for others.
    write(root.path(), "/sys/devices/system/cpu/isolated", "12-15\n");
    let profile = measure(&options, &PerCpu).unwrap().profile;
    assert_eq!(ids(&profile), (0..12).collect::<Vec<_>>());
}

#[test]
fn what_is_read_anew_takes_the_rates_of_before() {
    let root = unpack(include_str!("fixtures/server.tree"));
    let disk = TempDir::new().unwrap();
    std::fs::write(disk.path().join("weights"), vec![7u8; 2 << 20]).unwrap();
    let mut options = options(root.path());
    options.disk = Some(disk.path().to_owned());
    let measured = measure(&options, &PerCpu).unwrap().profile;
    let again = |options: &ProfileOptions| {
        let mut profile = observe(options).unwrap().profile;
        assert_eq!(profile.memory.read_one_thread_gbps, 0.0);
        take_rates(&mut profile, &measured);
        // The instruction sets are those of the machine running the test.
        profile.isa = measured.isa.clone();
        for (disk, before) in profile.disks.iter_mut().zip(&measured.disks) {
            disk.free_bytes = before.free_bytes;
        }
        profile
    };
    assert_eq!(again(&options), measured);

    // Memory is read again, and the time is that of the rates.
    let meminfo = "MemTotal: 131867852 kB\nMemAvailable: 1000000 kB\n";
    write(root.path(), "/proc/meminfo", meminfo);
    options.measured_at = None;
    let later = again(&options);
    assert_eq!(later.memory.available_bytes, 1_000_000 * 1024);
    assert_eq!(later.measured_at, measured.measured_at);
    assert_eq!(
        hardware(&later, root.path()),
        hardware(&measured, root.path())
    );

    // Removing a CPU makes it different hardware.
    write(root.path(), "/sys/devices/system/cpu/online", "0-14\n");
    let smaller = again(&options);
    assert_ne!(
        hardware(&smaller, root.path()),
        hardware(&measured, root.path())
    );
    assert!(
        hardware(&measured, root.path())
            .contains("CPUs 0-15, cores 0-7; NUMA 0: 0-3,8-11, 1: 4-7,12-15")
    );
}

/// A meter like [`PerCpu`] that records how much memory it was asked to read.
struct Reads(std::cell::RefCell<Vec<usize>>);

impl Meter for Reads {
    fn isa(&self) -> IsaProfile {
        PerCpu.isa()
    }

    fn read_gbps(&self, _: &[u32], bytes: usize) -> Result<f64, String> {
        self.0.borrow_mut().push(bytes);
        Ok(1.0)
    }

    fn gflops(&self, cpus: &[u32]) -> Result<Gflops, String> {
        PerCpu.gflops(cpus)
    }
}

#[test]
fn a_small_container_is_not_filled_by_measuring_its_node() {
    let root = unpack(include_str!("fixtures/container.tree"));
    // 96 MiB are still available, and the caches hold 64 MiB.
    write(root.path(), "/sys/fs/cgroup/memory.max", "134217728\n");
    write(root.path(), "/sys/fs/cgroup/memory.current", "33554432\n");
    write(root.path(), "/sys/fs/cgroup/memory.stat", "active_file 0\n");
    for name in ["level", "size"] {
        let content = if name == "level" { "3" } else { "65536K" };
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index3/{name}");
        write(root.path(), &path, content);
    }
    let mut options = options(root.path());
    options.scope = Scope::Node;
    let meter = Reads(Default::default());
    let warnings = measure(&options, &meter).unwrap().warnings.join("\n");
    assert_eq!(meter.0.borrow().iter().max(), Some(&(48 << 20)));
    assert!(warnings.contains("measured over 48 MiB"), "{warnings}");
}

#[test]
fn limits_of_ancestors_hold_under_cgroup_v1() {
    let (p, _) = profile(include_str!("fixtures/cgroup-v1.tree"));
    // The pod's CPU set 1-3, and its parent's quota of 1.5 CPUs.
    assert_eq!(ids(&p), [1]);
    assert_eq!(p.memory.total_bytes, 4 * GIB);
    assert_eq!(p.memory.available_bytes, 4 * GIB - GIB / 2);
}

#[test]
fn the_memory_limit_is_the_least_around_a_process_in_either_kind_of_group() {
    let limit = |tree: &str| memory_limit_bytes(unpack(tree).path());
    assert_eq!(
        limit(include_str!("fixtures/container.tree")),
        Some(8 * GIB)
    );
    assert_eq!(
        limit(include_str!("fixtures/cgroup-v1.tree")),
        Some(4 * GIB)
    );
    assert_eq!(limit(include_str!("fixtures/laptop.tree")), None);
}

#[test]
fn a_machine_that_tells_next_to_nothing() {
    let root = TempDir::new().unwrap();
    write(
        root.path(),
        "/proc/meminfo",
        "MemTotal: 1048576 kB\nMemFree: 524288 kB\nCached: 1024 kB\n",
    );
    write(
        root.path(),
        "/proc/cpuinfo",
        "processor\t: 0\n\nprocessor\t: 1\n",
    );
    let measured = measure(&options(root.path()), &PerCpu).unwrap();
    let (p, warnings) = (measured.profile, measured.warnings.join("\n"));
    assert_eq!(p.node, "localhost");
    assert_eq!(ids(&p), [0, 1]);
    assert_eq!(
        (p.cpus[1].core, p.cpus[1].max_mhz, p.cpus[1].cache_bytes),
        (1, 0, 0)
    );
    assert_eq!(p.memory.available_bytes, 525_312 * 1024);
    assert_eq!(p.numa_nodes.len(), 1);
    assert_eq!(p.numa_nodes[0].cpus, [0, 1]);
    assert_eq!(p.numa_nodes[0].read_gbps, 20.0);
    for part in [
        "/proc/cpuinfo",
        "each is counted as a core",
        "MemAvailable",
        "one NUMA node",
        "no name",
    ] {
        assert!(warnings.contains(part), "{part} not in\n{warnings}");
    }
}

#[test]
fn garbage_is_a_warning_and_no_panic() {
    let root = unpack(include_str!("fixtures/server.tree"));
    let r = root.path();
    write(
        r,
        "/sys/devices/system/cpu/cpu3/cpufreq/cpuinfo_max_freq",
        "fast\n",
    );
    write(
        r,
        "/sys/devices/system/cpu/cpu3/topology/core_cpus_list",
        "9-3\n",
    );
    write(r, "/sys/devices/system/node/node1/meminfo", "\u{fffd}\n");
    write(r, "/sys/devices/system/node/nodeX/meminfo", "x\n");
    write(
        r,
        "/proc/self/cgroup",
        "nonsense\n0::/system.slice/hearth.service\n",
    );
    write(
        r,
        "/sys/fs/cgroup/system.slice/hearth.service/cpu.max",
        "-5 zero\n",
    );
    write(
        r,
        "/sys/fs/cgroup/system.slice/hearth.service/memory.max",
        "lots\n",
    );
    write(
        r,
        "/proc/driver/nvidia/gpus/0000:17:00.0/information",
        "Model:\n",
    );
    write(r, "/sys/bus/pci/devices/0000:b1:00.0/numa_node", "-1\n");
    let measured = measure(&options(r), &PerCpu).unwrap();
    let p = measured.profile;
    assert_eq!(p.cpus.len(), 16);
    assert_eq!((p.cpus[3].core, p.cpus[3].max_mhz), (3, 0));
    assert_eq!(p.memory.total_bytes, 131_867_852 * 1024);
    // The node's CPUs are still listed; its memory is unknown.
    assert_eq!(
        (p.numa_nodes[1].cpus.len(), p.numa_nodes[1].memory_bytes),
        (8, 0)
    );
    assert_eq!((p.gpus.len(), p.gpus[0].numa_node), (1, None));
    let warnings = measured.warnings.join("\n");
    for part in [
        "cpuinfo_max_freq",
        "\"9-3\"",
        "node1/meminfo",
        "\"nonsense\"",
        "cpu.max",
        "\"lots\"",
        "0000:17:00.0",
    ] {
        assert!(warnings.contains(part), "{part} not in\n{warnings}");
    }
}

#[test]
fn nothing_at_all_is_an_error_that_says_what_is_missing() {
    let root = TempDir::new().unwrap();
    let error = measure(&options(root.path()), &PerCpu).unwrap_err();
    assert!(matches!(error, ProfileError::NoCpu { .. }));
    write(root.path(), "/sys/devices/system/cpu/online", "0-3");
    let error = measure(&options(root.path()), &PerCpu).unwrap_err();
    assert_eq!(
        error.to_string(),
        "/proc/meminfo does not report MemTotal\n  mount /proc into the container"
    );
    write(
        root.path(),
        "/proc/self/status",
        "Cpus_allowed_list:\t8-9\n",
    );
    let error = measure(&options(root.path()), &PerCpu).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("online are 0-3, this process may use 8-9")
    );
}

#[test]
fn the_disk_of_a_directory_is_read() {
    let root = unpack(include_str!("fixtures/laptop.tree"));
    let model = TempDir::new().unwrap();
    let mut options = options(root.path());
    options.disk = Some(model.path().to_owned());
    let empty = measure(&options, &PerCpu).unwrap();
    assert!(empty.profile.disks.is_empty());
    assert!(empty.warnings[0].contains("less than 1 MiB to read"));
    // An odd size: the last direct read is short.
    std::fs::write(
        model.path().join("model.safetensors"),
        vec![7u8; (3 << 20) + 17],
    )
    .unwrap();
    let p = measure(&options, &PerCpu).unwrap().profile;
    assert_eq!(p.disks[0].path, model.path().display().to_string());
    assert!(p.disks[0].read_gbps > 0.0 && p.disks[0].free_bytes > 0);
    options.disk = Some(model.path().join("missing"));
    let missing = measure(&options, &PerCpu).unwrap();
    assert!(missing.profile.disks.is_empty() && missing.warnings[0].contains("missing"));
}

#[test]
fn a_disk_with_nothing_to_read_is_measured_with_a_file_that_is_gone_after() {
    let root = unpack(include_str!("fixtures/laptop.tree"));
    let cache = TempDir::new().unwrap();
    let mut options = options(root.path());
    options.disk = Some(cache.path().to_owned());
    options.probe_disk = true;
    let free_bytes = observe(&options).unwrap().profile.disks[0].free_bytes;
    if free_bytes < 1 << 30 {
        // Bypasses the test harness, which shows output only of failed tests.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: {} has less than 1 GiB free",
            cache.path().display()
        );
        return;
    }
    let Measured { profile, warnings } = measure(&options, &PerCpu).unwrap();
    assert_eq!(warnings, Vec::<String>::new());
    assert!(profile.disks[0].read_gbps > 0.0);
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
}

#[test]
fn a_profile_survives_json_and_is_told_in_lines() {
    let (p, _) = profile(include_str!("fixtures/server.tree"));
    let json = serde_json::to_string(&p).unwrap();
    assert_eq!(serde_json::from_str::<NodeProfileStatus>(&json).unwrap(), p);
    let text = summary(&p);
    for part in [
        "rack-1",
        "16 on 8 cores: avx2 amx",
        "80.0 GB/s with 8",
        "numa 1",
        "RTX 5090",
    ] {
        assert!(text.contains(part), "{part} not in\n{text}");
    }
}

#[test]
fn what_cannot_be_measured_is_0_and_a_warning() {
    let root = unpack(include_str!("fixtures/laptop.tree"));
    let measured = measure(&options(root.path()), &Broken).unwrap();
    assert_eq!(measured.profile.memory.read_all_threads_gbps, 0.0);
    assert_eq!(measured.profile.compute.f32_all_threads_gflops, 0.0);
    let expected = [
        "read bandwidth could not be measured: no memory: given as 0",
        "arithmetic could not be measured: no kernels: given as 0",
    ];
    assert_eq!(measured.warnings, expected);
}

/// Profiles the machine that the test runs on: real numbers, in about a second.
#[test]
fn this_machine() {
    let start = std::time::Instant::now();
    let measured = measure(&ProfileOptions::default(), &CpuMeter).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let p = measured.profile;
    eprintln!("{seconds:.2} s\n{}{:?}", summary(&p), measured.warnings);
    // Unoptimised, and in parallel with other tests; a release build takes well under 2 s.
    assert!(seconds < 20.0, "{seconds} s");
    assert!(!p.cpus.is_empty() && !p.numa_nodes.is_empty());
    assert!(p.memory.available_bytes <= p.memory.total_bytes);
    assert!(p.memory.read_one_thread_gbps > 0.1);
    assert!(p.memory.read_all_threads_gbps >= p.memory.read_one_thread_gbps);
    assert!(p.compute.f32_one_thread_gflops > 0.01);
    let cpus: usize = p.numa_nodes.iter().map(|n| n.cpus.len()).sum();
    assert_eq!(cpus, p.cpus.len());
}
