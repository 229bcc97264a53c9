//! Processes use the plan's CPUs where the system grants them, and otherwise those that it does grant: read from the
//! kernel, thread by thread, while control groups are written by hand as a kubelet writes them.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_tests::{
    Cgroup, Metrics, Rank, Ranks, Up, UpOptions, Vm, chat_body, chat_stream, root, skipped,
};
use serde_json::{Value, json};

/// Writes the demo with a placement, and decode workers that read prompts themselves.
fn deployment(directory: &Path, placement: &str) -> std::path::PathBuf {
    let demo =
        std::fs::read_to_string(root().join("manifests/examples/demo.yaml")).expect("demo.yaml");
    let mut value: Value = serde_norway::from_str(&demo).expect("YAML");
    value["spec"]["prefill"] = serde_json::json!({"mode": "Chunked"});
    value["spec"]["placement"] = serde_json::from_str(placement).expect("JSON");
    let file = directory.join("deployment.yaml");
    std::fs::write(&file, value.to_string()).expect("write");
    file
}

/// Returns `(thread name, CPUs that it may run on)` of all threads of a process.
fn threads(pid: u32) -> Vec<(String, String)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("tasks");
    tasks
        .flatten()
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            let field = |name: &str| {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(name))
                    .map(|text| text.trim().to_owned())
            };
            Some((field("Name:")?, field("Cpus_allowed_list:")?))
        })
        .collect()
}

#[tokio::test]
async fn exclusive_ranks_keep_to_their_own_cpus() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        skipped("exclusive pinning of two ranks needs two CPUs, and this machine has one");
        return;
    }
    let directory = tempfile::tempdir().expect("directory");
    let file = deployment(directory.path(), r#"{"pinning": "Exclusive"}"#);
    let up = Up::start(&UpOptions {
        file: Some(file),
        ..UpOptions::default()
    });
    chat_stream(
        &up.v1(),
        &chat_body("hearth-demo", "What is Hearth?", 8),
        |_, _| {},
    )
    .await
    .expect("answer");
    let plan: Value = {
        let text = std::fs::read(up.state_dir().join("demo/plan.json")).expect("plan");
        serde_json::from_slice(&text).expect("JSON")
    };
    let mut taken: Vec<u64> = Vec::new();
    for rank in plan["ranks"].as_array().expect("ranks") {
        let name = rank["name"].as_str().expect("name");
        let cpus: Vec<u64> = rank["cpus"]
            .as_array()
            .expect("cpus")
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        assert!(
            cpus.iter().all(|cpu| !taken.contains(cpu)),
            "{name} shares CPUs {cpus:?} with another rank"
        );
        let threads = threads(up.pid(name));
        assert!(threads.len() > 1, "{threads:?}");
        for (thread, allowed) in threads {
            for part in allowed.split(',') {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                let range = first.parse::<u64>().expect("cpu")..=last.parse::<u64>().expect("cpu");
                assert!(
                    range.clone().all(|cpu| cpus.contains(&cpu)),
                    "thread {thread} of {name} may run on {allowed}, the plan says {cpus:?}"
                );
            }
        }
        taken.extend(cpus);
    }
    assert!(up.logs().contains("CPUs"), "{}", up.logs());
}

/// A decode worker of two threads on CPUs 0 and 1, which other workers may use too, in its own cpuset, with a gateway.
struct Claimed {
    decode: Rank,
    gateway: Rank,
    /// Dropped after its process: only an empty group can be removed.
    group: Cgroup,
    /// Owns the directory of their files.
    _ranks: Ranks,
}

impl Claimed {
    /// Starts both; the worker's cpuset already contains `cpus`.
    fn start(cpus: &str, planned: &[u32]) -> Self {
        let mut ranks = Ranks::of_demo();
        ranks.edit(|plan| {
            for rank in plan["ranks"].as_array_mut().expect("ranks") {
                rank["cpus"] = json!(planned);
                rank["threads"] = json!(planned.len());
                rank["pinning"] = json!("Shared");
            }
        });
        let group = Cgroup::new("cpuset");
        group.write("cpuset.cpus", cpus);
        let often = ["--placement-interval-ms", "100"].map(str::to_owned);
        let mut decode = ranks.start_in("decode", "decode-0", &often, &[&group]);
        decode.wait_until_ready();
        ranks.route_to(&[&decode]);
        let routes = ["--routes".to_owned(), ranks.routes().display().to_string()];
        let mut gateway = ranks.start("gateway", "gateway-0", &routes);
        gateway.wait_until_ready();
        Self {
            group,
            decode,
            gateway,
            _ranks: ranks,
        }
    }

    /// Waits until the worker's threads may run on these CPUs, and the gateway reports this with the shortfall.
    fn wait_for(&self, cpus: &str, compute: &[&str], shortfall: &str) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let threads = threads(self.decode.pid());
            let of = |name: &str| {
                let found = threads.iter().find(|(thread, _)| thread == name);
                found.map_or("", |(_, allowed)| allowed.as_str())
            };
            let others = threads
                .iter()
                .filter(|(name, _)| !name.starts_with("kernels") && name != "engine");
            let is_bound = others.clone().all(|(_, allowed)| allowed == cpus)
                && [of("engine"), of("kernels-1")] == compute;
            if is_bound {
                break;
            }
            assert!(Instant::now() < deadline, "not on {cpus}: {threads:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let got = format!("cpus=\"{cpus}\",numa_nodes=\"0\",");
        let less = format!("shortfalls=\"{shortfall}\"");
        Metrics::wait_for(
            &self.gateway.metrics_base(),
            "what the worker got",
            |metrics| {
                let told = metrics.values("hearth_worker_placement_info", &[&got, &less]);
                told == [1.0]
            },
        );
    }

    async fn answers(&self) {
        let body = chat_body("hearth-demo", "What is Hearth?", 8);
        let answer = chat_stream(&format!("{}/v1", self.gateway.base()), &body, |_, _| {}).await;
        answer.expect("answer");
    }
}

/// Returns the reason to skip the tests with cpusets here, if any.
fn without_cpusets() -> Option<String> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let few = (cpus < 2).then(|| "two CPUs are needed".to_owned());
    Cgroup::unavailable("cpuset").or(few)
}

#[tokio::test]
async fn a_shared_worker_outlives_the_claim_on_its_cpu_and_takes_it_back() {
    if let Some(why) = without_cpusets() {
        skipped(&why);
        return;
    }
    let claimed = Claimed::start("0-1", &[0, 1]);
    claimed.wait_for("0-1", &["0", "1"], "");
    claimed.answers().await;
    // Another Pod gets CPU 0 exclusively.
    claimed.group.write("cpuset.cpus", "1");
    let less = "CPUs 1 where 2 are planned (0-1); 1 of 2 threads compute";
    claimed.wait_for("1", &["1", "1"], less);
    claimed.answers().await;
    // It releases the CPU.
    claimed.group.write("cpuset.cpus", "0-1");
    claimed.wait_for("0-1", &["0", "1"], "");
    claimed.answers().await;
}

#[tokio::test]
async fn a_worker_starts_on_other_cpus_than_planned() {
    if let Some(why) = without_cpusets() {
        skipped(&why);
        return;
    }
    let claimed = Claimed::start("1", &[0]);
    claimed.wait_for("1", &["1", ""], "");
    claimed.answers().await;
}

/// KV cache of that worker: most of its own memory.
const KV_BYTES: u32 = 64 << 20;

/// Script for the emulated machine: a worker on NUMA node 1 of two, in a cgroup v2 group whose CPUs change, then one
/// on node 0, and their gateway.
/// Prints `AT moment: thread=CPUs ...` and the gateway's series.
const ON_TWO_NODES: &str = r#"
group=/sys/fs/cgroup/worker
mkdir $group
echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control
# The weights come into the page cache on the other NUMA node, as a fetch would leave them.
fetch=/sys/fs/cgroup/fetch
mkdir $fetch
echo 0-1 > $fetch/cpuset.cpus
cached() {
    echo "CACHED $1 $(awk '/FilePages/ {print $4}' /sys/devices/system/node/node0/meminfo)"
}
cached before
(echo 0 > $fetch/cgroup.procs; cat /model/*.safetensors > /dev/null)
cached after
echo 0-3 > $group/cpuset.cpus
(echo 0 > $group/cgroup.procs
 exec hearth-worker decode --plan /decode.json --rank decode-0 --placement-interval-ms 3000 > /decode.log 2>&1) &
waited=0
again() {
    sleep 1
    waited=$((waited + 1))
    [ $waited -lt 300 ] || { cat /*.log; exit 1; }
}
until grep -q '"event":"ready"' /decode.log; do again; done
# Its weights are the other's too, which is planned where they are not.
hearth-worker prefill --plan /prefill.json --rank prefill-0 > /prefill.log 2>&1 &
# It looks at samples of the weights, from the other NUMA node: behind the worker, which reads all of them.
hearth-worker gateway --plan /gateway.json --rank gateway-0 --routes /routes.json --metrics 127.0.0.1:8001 > /gateway.log 2>&1 &
until wget -q -O /dev/null http://127.0.0.1:8000/ready; do again; done
pid=$(cat $group/cgroup.procs | head -n 1)
at() {
    threads=
    for task in /proc/$pid/task/*; do
        # One that has just ended is left out.
        name=$(cat $task/comm) && cpus=$(awk '/^Cpus_allowed_list/ {print $2}' $task/status) || continue
        threads="$threads $name=$cpus"
    done
    echo "AT $1:$threads"
}
# Waits until all of these threads (NAME=CPUS) may run just there.
at_last() {
    moment=$1
    shift
    for wanted in "$@"; do
        until at $moment | grep -qE " $wanted( |$)"; do again; done
    done
    at $moment
}
# Gives the worker CPUs while it stands still, so that what the kernel does to its threads is seen before it looks.
give() {
    kill -STOP $pid
    echo $1 > $group/cpuset.cpus
    at $2
    kill -CONT $pid
}
series() {
    wget -q -O - http://127.0.0.1:8001/metrics | grep -E '^hearth_worker_(placement_info|numa_bytes)' || true
}
at start
until series | grep -q prefill-0; do again; done
series
give 1-3 widened-by-the-kernel
at_last bound-again engine=2 kernels-1=3 hearth-worker=2-3
give 0,2 claimed
at_last adapted engine=0 kernels-1=2
until series | grep -q 'cpus="0,2"'; do again; done
series
echo '{"model": "hearth-demo", "prompt": "What is", "max_tokens": 4}' > /body
wget -q -O - --header 'Content-Type: application/json' --post-file /body http://127.0.0.1:8000/v1/completions
"#;

/// Returns the CPUs of the threads at that moment, by thread name.
fn at(output: &str, moment: &str) -> Vec<(String, String)> {
    let start = format!("AT {moment}: ");
    let line = output.lines().find_map(|line| line.strip_prefix(&start));
    let line = line.unwrap_or_else(|| panic!("no {moment} in\n{output}"));
    let thread = |word: &str| {
        let (name, cpus) = word.rsplit_once('=')?;
        Some((name.to_owned(), cpus.to_owned()))
    };
    line.split_whitespace().filter_map(thread).collect()
}

/// Runs a decode worker planned on NUMA node 1, and its gateway and a prefill worker on node 0, on the emulated
/// machine; returns the output.
fn on_two_nodes() -> String {
    let mut ranks = Ranks::of_demo();
    ranks.edit(|plan| {
        plan["model"]["path"] = json!("/model");
        for rank in plan["ranks"].as_array_mut().expect("ranks") {
            let is_decode = rank["role"] == "Decode";
            let (cpus, node) = if is_decode { ([2, 3], 1) } else { ([0, 1], 0) };
            rank["cpus"] = json!(cpus);
            rank["numaNodes"] = json!([node]);
            rank["threads"] = json!(2);
            rank["pinning"] = json!("Shared");
            if is_decode {
                rank["kv"]["memoryBytes"] = json!(KV_BYTES);
            }
        }
    });
    let worker = json!({"name": "decode-0", "role": "Decode", "endpoint": "127.0.0.1:9000"});
    let other = json!({"name": "prefill-0", "role": "Prefill", "endpoint": "127.0.0.1:9001"});
    let decode = ranks.plan_of("decode", "decode-0", "127.0.0.1:9000");
    let prefill = ranks.plan_of("prefill", "prefill-0", "127.0.0.1:9001");
    let gateway = ranks.plan_of("gateway", "gateway-0", "127.0.0.1:8000");
    Vm::default()
        .cpus(4, 2)
        .memory_mib(1536)
        .worker()
        .disk(root().join("models/hearth-demo"), "/model")
        .json(&decode, "/decode.json")
        .json(&prefill, "/prefill.json")
        .json(&gateway, "/gateway.json")
        .json(&json!({"workers": [worker, other]}), "/routes.json")
        .run(ON_TWO_NODES)
}

#[test]
fn on_two_numa_nodes_threads_and_memory_are_where_the_plan_says_and_bound_again_when_the_kernel_forgets()
 {
    if let Some(why) = Vm::unavailable() {
        skipped(&why);
        return;
    }
    let output = on_two_nodes();
    let on = |moment: &str, name: &str| {
        let mut threads = at(&output, moment).into_iter();
        let found = threads.find(|(thread, _)| thread == name);
        found
            .unwrap_or_else(|| panic!("no {name} at {moment} in\n{output}"))
            .1
    };
    let compute = |moment: &str| [on(moment, "engine"), on(moment, "kernels-1")];
    assert_eq!(compute("start"), ["2", "3"]);
    // This kernel is older than 6.2: the masks are lost although the new set has both CPUs.
    assert_eq!(compute("widened-by-the-kernel"), ["1-3", "1-3"], "{output}");
    assert_eq!(compute("bound-again"), ["2", "3"]);
    assert_eq!(on("bound-again", "hearth-worker"), "2-3");
    // CPU 3 was given to another Pod: a CPU of another NUMA node is better than none, and this is reported.
    assert_eq!(compute("claimed"), ["0,2", "0,2"]);
    assert_eq!(compute("adapted"), ["0", "2"]);

    let as_planned = "cpus=\"2-3\",numa_nodes=\"1\",memory_numa_nodes=\"1\"";
    series(&output, &[DECODE, as_planned, "shortfalls=\"\""]);
    let less = "shortfalls=\"CPUs on NUMA node 0 where 1 is planned\"";
    series(&output, &[DECODE, "cpus=\"0,2\"", less]);
    let own = |node| numa_bytes(&output, DECODE, node, "own");
    assert!(own(1) >= 0.95 * f64::from(KV_BYTES), "{output}");
    assert!(own(0) < 0.1 * f64::from(KV_BYTES), "{output}");
    assert!(output.contains("\"text\""), "no answer in\n{output}");
    weights_are_where_the_first_worker_wants_them(&output);
}

/// Checks the weights' placement: they were in node 0's page cache, the first worker is planned on node 1, and the
/// other on node 0.
fn weights_are_where_the_first_worker_wants_them(output: &str) {
    let cached_kib = |moment: &str| -> u64 {
        let start = format!("CACHED {moment} ");
        let line = output.lines().find_map(|line| line.strip_prefix(&start));
        let number = line.and_then(|number| number.trim().parse().ok());
        number.unwrap_or_else(|| panic!("no {start}in\n{output}"))
    };
    let file = root().join("models/hearth-demo/model.safetensors");
    let file_kib = file.metadata().expect("weights").len() >> 10;
    let on_node_0_kib = cached_kib("after") - cached_kib("before");
    assert!(on_node_0_kib >= file_kib / 10 * 9, "{output}");
    for worker in [DECODE, PREFILL] {
        let weights = |node| numa_bytes(output, worker, node, "weights");
        assert!(weights(1) > 9.0 * weights(0), "{worker}\n{output}");
    }
    let less = " MiB of the weights on NUMA node 1 where 0 is planned\"";
    series(output, &[PREFILL, "numa_nodes=\"0\"", less]);
}

/// Labels of the workers in the metrics.
const DECODE: &str = "worker=\"decode-0\"";
const PREFILL: &str = "worker=\"prefill-0\"";

/// Returns the metrics line that contains all the parts.
fn series<'a>(output: &'a str, wanted: &[&str]) -> &'a str {
    let found = find_series(output, wanted);
    found.unwrap_or_else(|| panic!("no {wanted:?} in\n{output}"))
}

fn find_series<'a>(output: &'a str, wanted: &[&str]) -> Option<&'a str> {
    let mut lines = output.lines();
    lines.find(|line| wanted.iter().all(|part| line.contains(part)))
}

/// Returns a worker's bytes on a NUMA node; it does not report a node on which it has none.
fn numa_bytes(output: &str, worker: &str, node: u32, kind: &str) -> f64 {
    let labels = format!("numa_node=\"{node}\",kind=\"{kind}\"");
    let Some(line) = find_series(output, &[worker, &labels]) else {
        return 0.0;
    };
    let value = line.rsplit_once(' ');
    let value = value.and_then(|(_, value)| value.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no number for {labels}\n{output}"))
}
