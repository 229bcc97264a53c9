//! Two workers over one copy of weights that is larger than the limit of one of them, in control groups like a
//! kubelet's: the one whose limit has room for the weights reads them first, whichever starts first and also after a
//! kill, and neither stays within its limit by evicting pages and reading them again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hearth_tests::{
    Cgroup, Rank, Ranks, Vm, chat_body, chat_stream, deployment, root, run, skipped, worker,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Allowed re-reads as a share of all weights: an occasional page does not matter.
const MOST_READ_AGAIN: f64 = 0.02;

/// Creates a random model of 250 MiB, most of it experts, with the demo's tokenizer.
fn large_model() -> (TempDir, u64) {
    let directory = tempfile::tempdir().expect("directory");
    let model = directory.path().join("model");
    let demo = root().join("models/hearth-demo");
    let text = std::fs::read_to_string(demo.join("config.json")).expect("config.json");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["hidden_size"] = json!(512);
    config["moe_intermediate_size"] = json!(320);
    config["n_routed_experts"] = json!(64);
    config["num_hidden_layers"] = json!(5);
    config
        .as_object_mut()
        .expect("object")
        .remove("quantization_config");
    let file = directory.path().join("config.json");
    std::fs::write(&file, config.to_string()).expect("write");
    let (code, _, stderr) = run(worker()
        .args(["random", "--dtype", "bf16", "--config"])
        .arg(&file)
        .arg("--out")
        .arg(&model));
    assert_eq!(code, 0, "{stderr}");
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        std::fs::copy(demo.join(name), model.join(name)).expect("copy");
    }
    let bytes = weights(&model)
        .iter()
        .map(|file| file.metadata().expect("file").len())
        .sum();
    (directory, bytes)
}

fn weights(model: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(model).expect("model").flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|ext| ext == "safetensors"))
        .collect()
}

/// Evicts the weights from the page cache: pages that an earlier test read are charged to its groups.
fn forget(model: &Path) {
    for path in weights(model) {
        let file = File::open(path).expect("weights");
        file.sync_all().expect("sync");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
    }
}

/// Returns the demo's plan for the model at `path`, and the memory in bytes of a worker with the weights and of one
/// without.
fn plan(path: &Path, weight_bytes: u64) -> (Ranks, u64, u64) {
    let mut ranks = Ranks::of_demo();
    let mut alone = 0;
    ranks.edit(|plan| {
        plan["model"]["path"] = json!(path);
        plan["model"]["weightBytes"] = json!(weight_bytes);
        for rank in plan["ranks"].as_array_mut().expect("ranks") {
            if rank["role"] == "Gateway" {
                continue;
            }
            rank["residency"]["weightBytes"] = json!(weight_bytes);
            rank["residency"]["budgetBytes"] = json!(weight_bytes);
            let number = |value: &Value| value.as_u64().expect("number");
            // As in the request of the rank's Pod: KV cache, scratch, page tables.
            let needs = number(&rank["kv"]["memoryBytes"]) + number(&rank["scratchBytes"]);
            alone = alone.max(needs + weight_bytes / 512);
        }
    });
    assert!(
        weight_bytes > alone,
        "{weight_bytes} bytes of weights in a limit of {alone}"
    );
    (ranks, alone + weight_bytes, alone)
}

/// Creates a group with that limit.
fn limited(bytes: u64) -> Cgroup {
    let group = Cgroup::new("memory");
    group.write("memory.limit_in_bytes", &bytes.to_string());
    group
}

/// Both groups with a plan's limits, over one model.
struct Node {
    ranks: Ranks,
    model: PathBuf,
    weight_bytes: u64,
    holder: Cgroup,
    other: Cgroup,
}

impl Node {
    fn new(directory: &TempDir, weight_bytes: u64) -> Self {
        let model = directory.path().join("model");
        forget(&model);
        let (ranks, with_weights, alone) = plan(&model, weight_bytes);
        Self {
            ranks,
            model,
            weight_bytes,
            holder: limited(with_weights),
            other: limited(alone),
        }
    }

    fn start_holder(&self) -> Rank {
        self.ranks
            .start_in("prefill", "prefill-0", &[], &[&self.holder])
    }

    fn start_other(&self) -> Rank {
        self.ranks
            .start_in("decode", "decode-0", &[], &[&self.other])
    }

    /// Asks a question that both workers compute, twice, and checks how much was re-read.
    async fn serves(&self, what: &str, workers: &mut [&mut Rank]) {
        for worker in workers.iter_mut() {
            worker.wait_until_ready();
        }
        self.ranks
            .route_to(&workers.iter().map(|worker| &**worker).collect::<Vec<_>>());
        let routes = [
            "--routes".to_owned(),
            self.ranks.routes().display().to_string(),
        ];
        let mut gateway = self.ranks.start("gateway", "gateway-0", &routes);
        gateway.wait_until_ready();
        let question = "What is Hearth? ".repeat(12);
        for _ in 0..2 {
            let body = chat_body("hearth-demo", &question, 12);
            let answer = chat_stream(&format!("{}/v1", gateway.base()), &body, |_, _| {}).await;
            answer.expect("answer");
        }
        for worker in workers {
            assert!(!worker.has_ended(), "{what}: {}", worker.output());
        }
        for (name, group) in [("holder", &self.holder), ("other", &self.other)] {
            let again = group.stat("workingset_refault_file") * 4096;
            let share = again as f64 / self.weight_bytes as f64;
            let stat = group.read("memory.stat");
            assert!(
                share <= MOST_READ_AGAIN,
                "{what}: {name} read {again} bytes again\n{stat}"
            );
            eprintln!(
                "{what}: {name} read {again} bytes again, limit hit {} times",
                group.read("memory.failcnt")
            );
        }
        let held = self.holder.stat("cache");
        assert!(
            held as f64 >= 0.9 * self.weight_bytes as f64,
            "{what}: the holder has {held}"
        );
    }
}

/// Returns the bytes that a single process re-reads under the other's limit: shows that the measure detects thrashing.
fn read_again_alone(node: &Node) -> u64 {
    let script = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
    let program = worker();
    let (code, _, stderr) = run(Command::new("sh")
        .args(["-c", script])
        .arg(node.other.path())
        .arg(program.get_program())
        .args(["generate", "--max-tokens", "4", "--prompt"])
        .arg("What is Hearth? ".repeat(12))
        .arg("--model")
        .arg(&node.model));
    assert_eq!(code, 0, "{stderr}");
    node.other.stat("workingset_refault_file") * 4096
}

/// Asserts that the other worker is waiting and has mapped nothing.
fn waits(node: &Node, other: &mut Rank) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !other
        .output()
        .contains("waiting until a worker whose memory limit has room")
    {
        assert!(std::time::Instant::now() < deadline, "{}", other.output());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert!(
        !other.output().contains("\"event\":\"ready\""),
        "{}",
        other.output()
    );
    let cache = node.other.stat("cache");
    assert!(
        cache < node.weight_bytes / 10,
        "it has {cache} bytes in memory already"
    );
}

#[tokio::test]
async fn workers_over_a_model_larger_than_a_limit_start_in_either_order_and_again() {
    if let Some(why) = Cgroup::unavailable("memory") {
        skipped(&why);
        return;
    }
    let (directory, weight_bytes) = large_model();
    let again = read_again_alone(&Node::new(&directory, weight_bytes));
    let share = again as f64 / weight_bytes as f64;
    assert!(
        share > 10.0 * MOST_READ_AGAIN,
        "alone it read {again} bytes again"
    );
    eprintln!("alone: {again} bytes read again");
    {
        let node = Node::new(&directory, weight_bytes);
        let mut holder = node.start_holder();
        let mut other = node.start_other();
        node.serves("holder first", &mut [&mut holder, &mut other])
            .await;
    }
    let node = Node::new(&directory, weight_bytes);
    let mut other = node.start_other();
    waits(&node, &mut other);
    let mut holder = node.start_holder();
    node.serves("other first", &mut [&mut holder, &mut other])
        .await;

    // The holder is killed while the other keeps running.
    holder.signal(Signal::KILL);
    holder.wait();
    let mut holder = node.start_holder();
    node.serves("holder again", &mut [&mut holder, &mut other])
        .await;

    // Both are gone, the pages are not, and the other returns first.
    for rank in [&mut holder, &mut other] {
        rank.signal(Signal::KILL);
        rank.wait();
    }
    let mut other = node.start_other();
    waits(&node, &mut other);
    let mut holder = node.start_holder();
    node.serves("both again", &mut [&mut holder, &mut other])
        .await;
    drop((holder, other));
    forget(&node.model);
}

/// Context length of the deployment that `hearth up` serves on the emulated machine.
const ANSWERED_TOKENS: u32 = 64;

/// Script of the same test on a kernel with only cgroup v2. Prints `STAT moment group name value`, and
/// `AT moment seconds` for whoever wants to know where the time goes.
const ON_V2: &str = r#"
cd /sys/fs/cgroup
echo '+memory +cpuset' > cgroup.subtree_control
mkdir holder other
echo HOLDER_LIMIT > holder/memory.max
echo OTHER_LIMIT > other/memory.max
worker() { # GROUP ROLE NAME
    (echo 0 > /sys/fs/cgroup/$1/cgroup.procs
     exec hearth-worker $2 --plan /$2.json --rank $3 >> /$1.log 2>&1) &
}
stats() {
    for group in holder other; do
        grep -E '^(file|workingset_refault_file) ' $group/memory.stat | sed "s/^/STAT $1 $group /"
        sed "s/^/STAT $1 $group /" $group/memory.events
    done
}
until_ready() { # GROUP TIMES
    waited=0
    until [ "$(grep -c '"event":"ready"' /$1.log)" = $2 ]; do
        sleep 1
        waited=$((waited + 1))
        [ $waited -lt 400 ] || { cat /$1.log; exit 1; }
    done
}
at() {
    echo "AT $1 $(cut -d ' ' -f 1 /proc/uptime)"
}
ask() {
    waited=0
    until wget -q -O /answer --header 'Content-Type: application/json' --post-file /body.json http://127.0.0.1:8000/v1/completions; do
        sleep 1
        waited=$((waited + 1))
        [ $waited -lt 60 ] || { cat /gateway.log; exit 1; }
    done
    grep -q '"text"' /answer
}
at begin
worker other decode decode-0
waited=0
until grep -q 'waiting until a worker whose memory limit has room' /other.log; do
    sleep 1
    waited=$((waited + 1))
    [ $waited -lt 400 ] || { cat /other.log; exit 1; }
done
sleep 3
grep -c '"event":"ready"' /other.log | sed 's/^/READY /'
stats waiting
at waiting
worker holder prefill prefill-0
until_ready holder 1
at holder
until_ready other 1
at other
hearth-worker gateway --plan /gateway.json --rank gateway-0 --routes /routes.json > /gateway.log 2>&1 &
ask
at answer
ask
at first
stats first
kill -9 $(cat holder/cgroup.procs)
sleep 1
worker holder prefill prefill-0
until_ready holder 2
at holder
ask
at again
stats again
(echo 0 > other/cgroup.procs; exec hearth-worker profile --json 2> /dev/null) | grep -o '"totalBytes": *[0-9]*' | head -n 1 | sed 's/^/PROFILE /'
at profile

# `hearth up` within one limit for all of its processes.
kill -9 $(cat holder/cgroup.procs other/cgroup.procs) $(pidof hearth-worker)
mkdir up
echo UP_LIMIT > up/memory.max
(echo 0 > up/cgroup.procs
 exec hearth up -f /deployment.yaml --port 8001 --state-dir /state --ask 'What is Hearth?' --once > /up.log 2>&1) || { cat /up.log; exit 1; }
sed "s/^/STAT up up /" up/memory.events
at up
"#;

/// Runs both workers, their gateway and `hearth up` on the emulated machine; returns the output.
fn on_v2(model: &Path, (ranks, with_weights, alone): &(Ranks, u64, u64)) -> String {
    let (prefill, decode) = ("127.0.0.1:9001", "127.0.0.1:9000");
    let routes = json!({"workers": [
        {"name": "prefill-0", "role": "Prefill", "endpoint": prefill},
        {"name": "decode-0", "role": "Decode", "endpoint": decode},
    ]});
    let question = "What is Hearth? ".repeat(12);
    let body = json!({"model": "hearth-demo", "prompt": question, "max_tokens": 6});
    let deployment = deployment(ranks.directory(), |spec| {
        spec["model"]["source"] = json!({"hostPath": {"path": "/model"}});
        // A random model never ends an answer: `--ask` is answered until the context is full.
        spec["model"]["contextLength"] = json!(ANSWERED_TOKENS);
    });
    let script = ON_V2
        .replace("HOLDER_LIMIT", &with_weights.to_string())
        .replace("OTHER_LIMIT", &alone.to_string())
        .replace("UP_LIMIT", &(2 * with_weights).to_string());
    let gateway = ranks.plan_of("gateway", "gateway-0", "127.0.0.1:8000");
    Vm::default()
        .memory_mib(2048)
        .hearth()
        .disk(model, "/model")
        .file(deployment, "/deployment.yaml")
        .json(
            &ranks.plan_of("prefill", "prefill-0", prefill),
            "/prefill.json",
        )
        .json(&ranks.plan_of("decode", "decode-0", decode), "/decode.json")
        .json(&gateway, "/gateway.json")
        .json(&routes, "/routes.json")
        .json(&body, "/body.json")
        .run(&script)
}

#[test]
fn workers_over_a_model_larger_than_a_limit_serve_under_cgroup_v2() {
    if let Some(why) = Vm::unavailable() {
        skipped(&why);
        return;
    }
    let (directory, weight_bytes) = large_model();
    let planned = plan(Path::new("/model"), weight_bytes);
    let output = on_v2(&directory.path().join("model"), &planned);
    let stat = |moment: &str, group: &str, name: &str| -> u64 {
        let start = format!("STAT {moment} {group} {name} ");
        let line = output.lines().find_map(|line| line.strip_prefix(&start));
        let value = line.and_then(|value| value.trim().parse().ok());
        value.unwrap_or_else(|| panic!("no {start}in\n{output}"))
    };
    let has_waited = output.contains("READY 0");
    assert!(has_waited, "the worker without room did not wait\n{output}");
    let waiting_bytes = stat("waiting", "other", "file");
    assert!(waiting_bytes < weight_bytes / 10, "{output}");
    for moment in ["first", "again"] {
        let held = stat(moment, "holder", "file") as f64 / weight_bytes as f64;
        assert!(
            held >= 0.9,
            "{moment}: the holder has {held} of the weights\n{output}"
        );
        for group in ["holder", "other"] {
            let again = stat(moment, group, "workingset_refault_file") * 4096;
            let share = again as f64 / weight_bytes as f64;
            assert!(
                share <= MOST_READ_AGAIN,
                "{moment}: {group} read {again} bytes again\n{output}"
            );
            assert_eq!(stat(moment, group, "oom_kill"), 0, "{output}");
        }
    }
    assert_eq!(stat("up", "up", "oom_kill"), 0, "{output}");
    // A profile measured inside a group shows the group's limit.
    let limit = (planned.2 / 4096 * 4096).to_string();
    let mut lines = output.lines();
    let profile = lines.find_map(|line| line.strip_prefix("PROFILE "));
    assert!(
        profile.is_some_and(|text| text.contains(&limit)),
        "{limit}\n{output}"
    );
}
