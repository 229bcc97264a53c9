//! Workers whose containers have memory limits, with one copy of weights that is larger than most of these.

use std::fs::File;
use std::path::Path;

use hearth_tests::cluster::{Cluster, wait_until};
use hearth_tests::{chat_body, chat_stream, root, run, worker};
use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};

use super::release::{PATIENCE, deployment, names, pods, wait_until_settled};
use super::sources;

const NAME: &str = "limited";
/// Pages that may be read from disk while an answer is computed: a thrashing worker reads a hundred thousand.
const FEW_FAULTS: u64 = 500;

/// Policy that sets memory limits as an administrator might: for every Pod without one, its request.
const LIMITS: &str = r#"
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: memory-limits}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}]
    objectSelector: {matchExpressions: [{key: hearth.dev/role, operator: In, values: [prefill, decode]}]}
  mutations:
    - patchType: JSONPatch
      jsonPatch:
        expression: >
          [JSONPatch{op: "add", path: "/spec/containers/0/resources/limits",
                     value: {"memory": string(object.spec.containers[0].resources.requests["memory"])}}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: memory-limits}
spec: {policyName: memory-limits}
"#;

/// The first worker's limit has room for the weights and the other's does not; both map all of them, also after the
/// first is killed, and neither is OOM-killed or reads them again.
pub(super) fn limited_workers_share_one_copy(cluster: &Cluster) {
    let directory = super::open_directory();
    let model = directory.path().join("model");
    let model_bytes = random_model(&model);
    sources::claim(cluster, NAME, directory.path());
    cluster.apply(LIMITS);
    wait_until("Pods get limits", PATIENCE, || {
        has_limits(cluster).then_some(())
    });
    let claim = json!({"claimName": NAME, "path": "model"});
    let spec = json!({
        "model": {"source": {"persistentVolumeClaim": claim}, "servedName": NAME, "contextLength": 2048},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    });
    cluster.apply(&deployment(NAME, spec).to_string());
    wait_until_settled(cluster, NAME);
    let workers = Workers::of(cluster, model_bytes);
    answers(cluster);
    workers.compute_without_reading(cluster, model_bytes);

    assert!(cluster.kill_pod_processes("default", &workers.holder) > 0);
    wait_until("the killed worker is back", PATIENCE, || {
        let pod = cluster.get("pod", "default", &workers.holder)?;
        let status = &pod["status"]["containerStatuses"][0];
        (status["restartCount"] == 1 && status["ready"] == true).then_some(())
    });
    wait_until_settled(cluster, NAME);
    answers(cluster);
    workers.compute_without_reading(cluster, model_bytes);
    let other = cluster.get("pod", "default", &workers.other).expect("Pod");
    let restarts = &other["status"]["containerStatuses"][0]["restartCount"];
    assert_eq!(restarts, 0, "{other:#}");
    cluster.kubectl(&["delete", "infd", NAME]);
}

/// The workers' Pods, by whether their limit has room for the weights.
struct Workers {
    holder: String,
    other: String,
}

impl Workers {
    fn of(cluster: &Cluster, model_bytes: u64) -> Self {
        let of_role = |role| names(&pods(cluster, NAME, role)).remove(0);
        let [prefill, decode] = ["prefill", "decode"].map(of_role);
        let limits = [&prefill, &decode].map(|pod| limit_bytes(cluster, pod));
        println!("limits of {limits:?} bytes for {model_bytes} of weights");
        match limits.map(|limit| limit > model_bytes) {
            [true, false] => Self {
                holder: prefill,
                other: decode,
            },
            [false, true] => Self {
                holder: decode,
                other: prefill,
            },
            _ => panic!("one has room for {model_bytes} bytes: {limits:?}"),
        }
    }

    /// Checks that both have all weights mapped, and read next to nothing from disk while they answer.
    fn compute_without_reading(&self, cluster: &Cluster, model_bytes: u64) {
        let faults = || {
            [&self.holder, &self.other].map(|pod| {
                let pid = main_process(cluster, pod);
                let mapped = status_bytes(pid, "RssFile:");
                assert!(mapped > model_bytes * 9 / 10, "{pod} has {mapped} bytes");
                major_faults(pid)
            })
        };
        let before = faults();
        answers(cluster);
        let after = faults();
        for (before, after) in before.into_iter().zip(after) {
            assert!(after - before < FEW_FAULTS, "{before} {after}");
        }
    }
}

/// Writes a model of random weights that no cache holds; returns its bytes.
fn random_model(model: &Path) -> u64 {
    let config = root().join("docs/benchmarks/configs/qwen3-moe.json");
    let text = std::fs::read_to_string(config).expect("config");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["num_hidden_layers"] = json!(2);
    let small = model.with_extension("json");
    std::fs::write(&small, config.to_string()).expect("config");
    let (code, _, stderr) = run(worker()
        .args(["random", "--dtype", "fp8", "--config"])
        .arg(&small)
        .arg("--out")
        .arg(model));
    assert_eq!(code, 0, "{stderr}");
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        let from = root().join("models/hearth-demo").join(file);
        std::fs::copy(from, model.join(file)).expect(file);
    }
    let mut bytes = 0;
    for entry in std::fs::read_dir(model).expect("model").flatten() {
        let file = File::open(entry.path()).expect("file");
        file.sync_all().expect("sync");
        // Pages that the writer touched are charged to it, not to the workers.
        fadvise(&file, 0, None, Advice::DontNeed).expect("fadvise");
        bytes += file.metadata().expect("file").len();
    }
    bytes
}

/// Whether the policy is in force: the API server enforces it a moment after its creation.
fn has_limits(cluster: &Cluster) -> bool {
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "probe", "namespace": "default", "labels": {"hearth.dev/role": "decode"}},
        "spec": {"containers": [{"name": "main", "image": "none", "resources": {"requests": {"memory": "1Mi"}}}]},
    });
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), pod.to_string()).expect("file");
    let path = file.path().display().to_string();
    let arguments = ["create", "--dry-run=server", "--output=json", "--filename"];
    let made = cluster.try_kubectl(&[&arguments[..], &[&path]].concat());
    made.is_ok_and(|made| made.contains("\"limits\""))
}

fn limit_bytes(cluster: &Cluster, pod: &str) -> u64 {
    let pid = main_process(cluster, pod);
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("cgroup");
    let group = groups
        .lines()
        .find_map(|line| line.split_once(":memory:"))
        .expect("a memory group");
    let file = format!("/sys/fs/cgroup/memory{}/memory.limit_in_bytes", group.1);
    let text = std::fs::read_to_string(&file).expect(&file);
    text.trim().parse().expect("bytes")
}

fn main_process(cluster: &Cluster, pod: &str) -> u32 {
    let processes = cluster.pod_processes("default", pod);
    *processes.first().expect("a process")
}

/// Returns a line of /proc/PID/status, in bytes.
fn status_bytes(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.expect(field).trim().trim_end_matches(" kB");
    kib.parse::<u64>().expect("a number") * 1024
}

/// Returns the number of major page faults of a process.
fn major_faults(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    // The name may contain anything and ends with the last parenthesis; the field is the twelfth.
    let (_, fields) = stat.rsplit_once(") ").expect("fields");
    let field = fields.split(' ').nth(9).expect("majflt");
    field.parse().expect("a number")
}

/// Asks with a prompt long enough for the prefill worker and checks for an answer.
fn answers(cluster: &Cluster) {
    let reach = cluster.reach("default", NAME, 80);
    let question = "Say it again. ".repeat(40);
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let mut body = chat_body(NAME, &question, 16);
    body["logprobs"] = json!(false);
    let answer = runtime.block_on(chat_stream(&reach.v1(), &body, |_, _| {}));
    let answer = answer.expect("an answer");
    assert!(answer.completion_tokens > 0, "{answer:?}");
}
