//! Workers with a CPU of their own: where the kubelet chooses it, and where all share all CPUs.

use std::path::PathBuf;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, condition, wait_until};
use hearth_tests::skipped;
use serde_json::{Value, json};

use super::release::{
    self, PATIENCE, deployment, infd, names, patch, pods, said, wait_until_settled,
};
use super::streams::{self, Streams};
use super::{OPTIONS, memory};

/// Longest time until the kubelet's shared pool has changed after Pods came or went, and workers, which look every 10
/// s, have noticed.
const RECONCILED: Duration = Duration::from_secs(60);

#[test]
fn an_exclusive_worker_computes_on_the_cpu_that_the_kubelet_gives_it() {
    // The kubelet's reserve of 100m costs one whole CPU of two.
    let Some(cluster) = start(true) else {
        return;
    };
    let worker = one_is_placed(&cluster);
    let own = own_cpu(&cluster);
    for thread in threads(&cluster, &worker) {
        assert_eq!(thread.cpus, own, "{thread:?} of {worker}");
    }
    // No other process has it.
    let gateway = names(&pods(&cluster, "demo", "gateway")).remove(0);
    wait_until("the gateway leaves the worker's CPU", RECONCILED, || {
        let threads = threads(&cluster, &gateway);
        let keeps_off = |thread: &Thread| thread.cpus.split(',').all(|cpu| cpu != own);
        (!threads.is_empty() && threads.iter().all(keeps_off)).then_some(())
    });
    a_second_is_refused(&cluster, "1900m");
}

#[test]
fn exclusive_and_memory_limited_workers_serve_where_all_share_all_cpus() {
    let Some(cluster) = start(false) else {
        return;
    };
    let worker = one_is_placed(&cluster);
    let own = own_cpu(&cluster);
    let threads = threads(&cluster, &worker);
    let engine = threads.iter().find(|thread| thread.name == "engine");
    assert_eq!(engine.expect("an engine").cpus, own, "{threads:?}");
    a_second_is_refused(&cluster, "2000m");
    cluster.kubectl(&["delete", "infd", "demo"]);
    memory::limited_workers_share_one_copy(&cluster);
}

fn start(static_policies: bool) -> Option<Cluster> {
    if let Some(why) = not_two_cores() {
        skipped(&why);
        return None;
    }
    let options = Options {
        nodes: 1,
        static_policies,
        ..OPTIONS
    };
    let cluster = Cluster::start_or_skip(&options)?;
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 1);
    Some(cluster)
}

/// Returns the reason that the asserted numbers do not apply to this machine, if any.
fn not_two_cores() -> Option<String> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let siblings = "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list";
    let siblings = std::fs::read_to_string(siblings).unwrap_or_default();
    let threads = siblings.trim();
    let is_expected = cpus == 2 && threads.parse::<usize>().is_ok();
    (!is_expected).then(|| {
        format!(
            "it counts on 2 CPUs that are 2 cores: {cpus} CPUs, of which {threads} are one core"
        )
    })
}

/// Deploys one worker, which reads prompts and writes answers, and checks that it answers; returns its Pod's name.
fn one_is_placed(cluster: &Cluster) -> String {
    let spec = json!({
        "prefill": {"mode": "Chunked"},
        "decode": {"replicas": 1},
        "placement": {"pinning": "Exclusive"},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(cluster, "demo");
    let workers = pods(cluster, "demo", "decode");
    let [worker] = &workers[..] else {
        panic!("one worker: {:?}", names(&workers));
    };
    assert_eq!(worker["status"]["qosClass"], "Guaranteed", "{worker:#}");
    let requests = &worker["spec"]["containers"][0]["resources"]["requests"];
    assert_eq!(requests["cpu"], "1", "{requests}");
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    streams.finish();
    wait_until("the status says what it got", PATIENCE, || {
        (condition(&infd(cluster, "demo"), "Placed") == Some("True")).then_some(())
    });
    names(&workers).remove(0)
}

/// Returns the one CPU that the worker reports.
fn own_cpu(cluster: &Cluster) -> String {
    let found = infd(cluster, "demo");
    let placement = found["status"]["placement"].as_array();
    let decode = placement
        .into_iter()
        .flatten()
        .find(|placement| placement["rank"] == "decode-0");
    let cpus = decode.map_or(&Value::Null, |decode| &decode["cpus"]);
    let cpus = cpus.as_str().unwrap_or_default();
    assert!(cpus.parse::<usize>().is_ok(), "one CPU: {found:#}");
    cpus.to_owned()
}

/// Checks that the refusal names what is available and what to write; the first one stays and answers.
fn a_second_is_refused(cluster: &Cluster, allocatable: &str) {
    let before = names(&pods(cluster, "demo", ""));
    patch(cluster, "demo", &json!({"decode": {"replicas": 2}}));
    let message = wait_until("the second one is refused", PATIENCE, || {
        let found = infd(cluster, "demo");
        let is_current = found["status"]["observedGeneration"] == found["metadata"]["generation"];
        let is_refused = condition(&found, "Planned") == Some("False");
        (is_current && is_refused).then(|| said(&found, "Planned").1)
    });
    println!("{message}");
    for part in [
        "\"Exclusive\"",
        "1 whole core",
        "2 workers",
        allocatable,
        "Shared",
    ] {
        assert!(message.contains(part), "{part} is not in: {message}");
    }
    assert_eq!(names(&pods(cluster, "demo", "")), before);
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(1);
    streams.finish();
}

/// A thread of a Pod, according to the kernel.
#[derive(Debug)]
struct Thread {
    name: String,
    /// CPUs that it may run on, such as `0-1`.
    cpus: String,
}

fn threads(cluster: &Cluster, pod: &str) -> Vec<Thread> {
    let processes = cluster.pod_processes("default", pod);
    let tasks = processes.into_iter().flat_map(|pid| {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        tasks.into_iter().flatten().flatten()
    });
    // Threads that end meanwhile are skipped.
    tasks
        .filter_map(|task| {
            let read = |file: &str| -> Option<String> {
                let path: PathBuf = task.path().join(file);
                std::fs::read_to_string(path).ok()
            };
            let status = read("status")?;
            let cpus = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            Some(Thread {
                name: read("comm")?.trim().to_owned(),
                cpus: cpus.trim().to_owned(),
            })
        })
        .collect()
}
