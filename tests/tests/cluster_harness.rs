//! The test cluster itself: it does what other cluster tests rely on, and leaves nothing behind.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, HOST_ADDRESS, Options, condition, toolbox_pod, wait_until};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);

/// Serializes the tests here, which inspect the whole machine.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn a_cluster_does_what_tests_ask_of_it_and_leaves_nothing() {
    let _alone = alone();
    let before = Machine::now();
    let options = Options {
        nodes: 2,
        dns: true,
        metrics_server: true,
        fake_gpu: vec![2],
        audit: true,
        breaks: true,
        ..Options::default()
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    cluster.import_toolbox();
    a_restricted_pod_runs(&cluster);
    names_resolve(&cluster);
    a_pod_reaches_the_test(&cluster);
    the_fake_gpu_is_allocated(&cluster);
    let top = cluster.kubectl(&["top", "nodes"]);
    assert!(top.contains("node-1") && top.contains("node-2"), "{top}");
    hearths_own_images_run(&cluster);
    a_test_uses_the_cluster_that_it_is_given(&cluster);
    a_killed_container_starts_again(&cluster);
    cluster.restart_api_server();
    writes_are_on_record(&cluster);
    a_killed_node_is_lost(&cluster);

    let id = cluster.id().to_owned();
    let mut second = keeper("a-second-cluster");
    drop(cluster);
    assert_eq!(second.first_line(), "ready");
    assert_eq!(Traces::of(&id), Traces::default());
    second.end();
    assert_eq!(Machine::now(), before);
}

fn a_restricted_pod_runs(cluster: &Cluster) {
    cluster.run_pod(&toolbox_pod("toolbox", "exec sleep 1000"));
    let mut root = toolbox_pod("root", "true");
    root["spec"]["containers"][0]["securityContext"] = Value::Null;
    let refused = cluster
        .try_apply(&root.to_string())
        .expect_err("a violation");
    assert!(refused.contains("violates PodSecurity"), "{refused}");
}

fn in_toolbox(cluster: &Cluster, command: &str) -> String {
    let exec = ["exec", "--namespace=strict", "toolbox", "--"];
    cluster.kubectl(&[&exec[..], &["bash", "-c", command]].concat())
}

/// Checks that a Pod resolves names by its resolver, and the test by the DNS Service, which it reaches like any other.
fn names_resolve(cluster: &Cluster) {
    let name = "kubernetes.default.svc.cluster.local";
    let found = in_toolbox(cluster, &format!("getent hosts {name}"));
    let service = cluster.get("service", "default", "kubernetes");
    let service = service.expect("the API server's own Service");
    let address = service["spec"]["clusterIP"].as_str().expect("an address");
    assert!(found.contains(address), "{found}");
    assert_dns_answers(cluster, address);
}

/// Asks the DNS Service for the API server's address, over TCP.
fn assert_dns_answers(cluster: &Cluster, address: &str) {
    let name = "kubernetes.default.svc.cluster.local";
    let dns = cluster.reach("kube-system", "kube-dns", 53);
    let mut stream = TcpStream::connect(dns.address()).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
    // A header with one question, the name's labels, type A, class IN.
    let mut query = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for part in name.split('.') {
        query.push(u8::try_from(part.len()).expect("a short name"));
        query.extend(part.as_bytes());
    }
    query.extend([0, 0, 1, 0, 1]);
    let length = u16::try_from(query.len()).expect("a short query");
    stream.write_all(&length.to_be_bytes()).expect("query");
    stream.write_all(&query).expect("query");
    let mut answer = vec![0; 2];
    stream.read_exact(&mut answer).expect("answer");
    answer.resize(usize::from(u16::from_be_bytes([answer[0], answer[1]])), 0);
    stream.read_exact(&mut answer).expect("answer");
    let octets: Vec<u8> = address.split('.').flat_map(str::parse).collect();
    assert!(answer.ends_with(&octets), "{address} is not in {answer:?}");
}

fn a_pod_reaches_the_test(cluster: &Cluster) {
    let listener = TcpListener::bind((HOST_ADDRESS, 0)).expect("listen");
    let port = listener.local_addr().expect("address").port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a Pod");
        stream.write_all(b"hello").expect("write");
    });
    let said = in_toolbox(cluster, &format!("cat </dev/tcp/{HOST_ADDRESS}/{port}"));
    server.join().expect("server");
    assert_eq!(said, "hello");
}

fn the_fake_gpu_is_allocated(cluster: &Cluster) {
    let command = "echo $NVIDIA_VISIBLE_DEVICES; [ -c /dev/nvidia0 ] && exec sleep 1000";
    let mut gpu = toolbox_pod("gpu", command);
    gpu["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = Value::from("1");
    cluster.run_pod(&gpu);
    let pod = cluster.get("pod", "strict", "gpu").expect("the Pod");
    assert_eq!(pod["spec"]["nodeName"], "node-2");
    let log = cluster.pod_logs("strict", "gpu");
    assert!(log.starts_with("GPU-fake-"), "{log}");
}

/// Checks that the worker's image has the demo's model and runs unprivileged with a read-only root.
fn hearths_own_images_run(cluster: &Cluster) {
    let (name, tag) = cluster.import_hearth().worker;
    let model = "/usr/share/hearth/models/hearth-demo";
    let report = "/dev/termination-log";
    let mut inspect = toolbox_pod("inspect", "");
    inspect["spec"]["restartPolicy"] = Value::from("Never");
    let container = &mut inspect["spec"]["containers"][0];
    container["image"] = Value::from(format!("{name}:{tag}"));
    container["args"] = serde_json::json!(["inspect", "--model", model, "--report", report]);
    cluster.apply(&inspect.to_string());
    let facts = wait_until("the inspection ends", PATIENCE, || {
        let pod = cluster.get("pod", "strict", "inspect")?;
        let ended = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        assert!(ended.is_null() || ended["exitCode"] == 0, "{ended:#}");
        ended["message"].as_str().map(str::to_owned)
    });
    let facts: Value = serde_json::from_str(&facts).expect("the model's facts");
    assert!(facts.is_object(), "{facts}");
}

/// Runs a test as `make test-cluster KUBECONFIG=…` does, in its own process.
fn a_test_uses_the_cluster_that_it_is_given(cluster: &Cluster) {
    let mut command = Process::of_test("uses_somebodys_cluster");
    command.env("HEARTH_TEST_KUBECONFIG", cluster.kubeconfig());
    let output = command.output().expect("this program");
    let said = String::from_utf8_lossy(&output.stdout);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("used"),
        "{said}{why}"
    );
}

#[test]
#[ignore = "another test runs it in a process of its own, with the cluster that it is to use"]
fn uses_somebodys_cluster() {
    let spoiling = Options {
        nodes: 1,
        breaks: true,
        ..Options::default()
    };
    let refused = Cluster::start(&spoiling).err().expect("a reason");
    assert!(refused.0.contains("nodes that it may kill"), "{refused}");
    let options = Options {
        nodes: 1,
        dns: true,
        ..Options::default()
    };
    let cluster = Cluster::start(&options).unwrap_or_else(|reason| panic!("{reason}"));
    assert!(!cluster.is_own());
    let service = cluster.get("service", "default", "kubernetes");
    let service = service.expect("the API server's own Service");
    let address = service["spec"]["clusterIP"].as_str().expect("an address");
    assert_dns_answers(&cluster, address);
    println!("\nused");
}

fn a_killed_container_starts_again(cluster: &Cluster) {
    assert!(cluster.kill_pod_processes("strict", "toolbox") > 0);
    wait_until("the container runs again", PATIENCE, || {
        let pod = cluster.get("pod", "strict", "toolbox")?;
        let status = &pod["status"]["containerStatuses"][0];
        (status["restartCount"] == 1 && status["ready"] == true).then_some(())
    });
}

fn writes_are_on_record(cluster: &Cluster) {
    let name = "on-record";
    cluster.kubectl(&["create", "configmap", name]);
    cluster.kubectl(&["get", "configmap", name]);
    cluster.kubectl(&["delete", "configmap", name]);
    let log = cluster.audit_log();
    let ours: Vec<_> = log.iter().filter(|entry| entry.name == name).collect();
    let verbs: Vec<_> = ours.iter().map(|entry| entry.verb.as_str()).collect();
    assert_eq!(verbs, ["create", "delete"], "{ours:?}");
    let [first, _] = ours[..] else { return };
    assert_eq!(first.user, "admin");
    assert_eq!(first.resource, "configmaps");
    assert_eq!(first.namespace, "default");
    assert_eq!(first.code, 201);
    assert!(first.user_agent.starts_with("kubectl"), "{first:?}");
    // Written before the API server was restarted.
    assert!(log.iter().any(|entry| entry.name == "toolbox"));
}

fn a_killed_node_is_lost(cluster: &Cluster) {
    cluster.node(2).kill();
    // Both in one look: a loaded machine may delay the other's heartbeat too, but only for a while.
    wait_until("node-2 alone is not Ready", PATIENCE, || {
        let [other, killed] = ["node-1", "node-2"].map(|name| cluster.get("node", "", name));
        let lost = condition(&killed?, "Ready") == Some("Unknown");
        (lost && condition(&other?, "Ready") == Some("True")).then_some(())
    });
}

#[test]
fn a_control_plane_alone_cleans_up_after_deleted_objects() {
    let _alone = alone();
    let options = Options {
        controllers: true,
        ..Options::default()
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    cluster.kubectl(&["create", "configmap", "owner"]);
    let owner = cluster.get("configmap", "default", "owner");
    let uid = owner.expect("the owner")["metadata"]["uid"].clone();
    let owned = serde_json::json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "owned",
            "namespace": "default",
            "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}],
        },
    });
    cluster.apply(&owned.to_string());
    cluster.kubectl(&["delete", "configmap", "owner"]);
    wait_until("what it owned is deleted", PATIENCE, || {
        let owned = cluster.get("configmap", "default", "owned");
        owned.is_none().then_some(())
    });
}

#[test]
#[ignore = "the tests below run it in a process of its own, and kill that"]
fn holds_a_cluster() {
    let options = Options {
        nodes: 1,
        breaks: true,
        ..Options::default()
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    cluster.import_toolbox();
    cluster.run_pod(&toolbox_pod("toolbox", "exec sleep 1000"));
    println!("\nup {}", cluster.id());
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_killed_test_leaves_nothing() {
    let _alone = alone();
    let before = Machine::now();
    let Some((mut test, id)) = Process::holding_a_cluster() else {
        return;
    };
    let there = Traces::of(&id);
    assert!(
        there.processes.len() > 5 && !there.groups.is_empty() && there.state,
        "{there:?}"
    );
    test.kill();
    let killed = Instant::now();
    Traces::gone(&id);
    assert!(killed.elapsed() < Duration::from_secs(20));
    assert_eq!(Machine::now(), before);
}

#[test]
fn what_a_killed_keeper_left_is_removed_later() {
    let _alone = alone();
    let before = Machine::now();
    let Some((mut test, id)) = Process::holding_a_cluster() else {
        return;
    };
    let keepers = processes(|pid| command_line(pid).contains(&format!("keep\0{id}")));
    assert_eq!(keepers.len(), 1, "{keepers:?}");
    assert!(keepers.into_iter().all(kill_9));
    test.kill();
    std::thread::sleep(Duration::from_secs(1));
    assert!(
        !Traces::of(&id).processes.is_empty(),
        "nobody is left to act"
    );
    let status = Command::new(env!("CARGO_BIN_EXE_hearth-cluster"))
        .arg("down")
        .status();
    assert!(status.expect("hearth-cluster down").success());
    assert_eq!(Traces::of(&id), Traces::default());
    assert_eq!(Machine::now(), before);
}

/// A process whose output is read line by line; killed when dropped.
struct Process {
    child: std::process::Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Process {
    fn start(command: &mut Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let output = BufReader::new(child.stdout.take().expect("output"));
        Self { child, output }
    }

    /// Returns a command that runs this test program with one test that is otherwise ignored.
    fn of_test(name: &str) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--ignored", "--exact", "--nocapture", name]);
        command
    }

    /// Starts this test program with the one test that starts a cluster and waits. Returns it with the cluster's name,
    /// or `None` where clusters are unavailable.
    fn holding_a_cluster() -> Option<(Self, String)> {
        let mut process = Self::start(&mut Self::of_test("holds_a_cluster"));
        loop {
            let mut line = String::new();
            let length = process.output.read_line(&mut line).expect("output");
            if let Some(id) = line.trim().strip_prefix("up ") {
                return Some((process, id.to_owned()));
            }
            if length == 0 {
                assert!(process.child.wait().expect("its end").success());
                return None;
            }
        }
    }

    fn first_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("output");
        line.trim().to_owned()
    }

    fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("its end");
    }

    /// Closes its standard input, as happens when a test ends.
    fn end(&mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("its end").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the keeper of another cluster with nodes, which must wait for its turn.
fn keeper(id: &str) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hearth-cluster"));
    let process = Process::start(command.args(["keep", id, "--nodes"]));
    // It has created its directory, but does not have a turn yet.
    wait_until(
        "the keeper has a directory",
        Duration::from_secs(30),
        || state(id).is_dir().then_some(()),
    );
    std::thread::sleep(Duration::from_millis(500));
    assert!(!state(id).join("nodes").exists());
    process
}

/// Visible traces of one cluster on the machine.
#[derive(Debug, Default, PartialEq)]
struct Traces {
    processes: BTreeSet<u32>,
    groups: BTreeSet<String>,
    mounts: BTreeSet<String>,
    state: bool,
}

impl Traces {
    fn of(id: &str) -> Self {
        let tree = format!("hearth-{id}");
        let mark = format!("HEARTH_CLUSTER={id}");
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        Self {
            processes: processes(|pid| {
                let environment = std::fs::read(format!("/proc/{pid}/environ"));
                String::from_utf8_lossy(&environment.unwrap_or_default()).contains(&mark)
            }),
            groups: names("/sys/fs/cgroup")
                .into_iter()
                .filter(|hierarchy| {
                    Path::new("/sys/fs/cgroup")
                        .join(hierarchy)
                        .join(&tree)
                        .exists()
                })
                .collect(),
            mounts: mounts
                .lines()
                .filter(|line| line.contains(id))
                .map(str::to_owned)
                .collect(),
            state: state(id).exists(),
        }
    }

    /// Waits until nothing is left.
    fn gone(id: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let traces = Self::of(id);
            if traces == Self::default() {
                return;
            }
            assert!(Instant::now() < deadline, "left: {traces:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// State of the machine that a cluster must not change, or must restore.
#[derive(Debug, PartialEq)]
struct Machine {
    links: BTreeSet<String>,
    routes: BTreeSet<String>,
    rules: String,
    settings: Vec<String>,
}

impl Machine {
    /// Reads the state as it is while no cluster with nodes is up; another one may have had its turn, whose interface
    /// and routes are left out.
    fn now() -> Self {
        let settings = [
            "vm/overcommit_memory",
            "vm/panic_on_oom",
            "kernel/panic",
            "kernel/panic_on_oops",
            "kernel/keys/root_maxkeys",
            "kernel/keys/root_maxbytes",
            "net/ipv4/ip_forward",
        ];
        let read = |name| std::fs::read_to_string(format!("/proc/sys/{name}"));
        let other = names(&state("").display().to_string())
            .iter()
            .any(|id| state(id).join("nodes").exists());
        let keep = |text: &String| !(other && text.contains("hearth0"));
        Self {
            links: names("/sys/class/net").into_iter().filter(keep).collect(),
            routes: output("ip", &["-4", "route"])
                .lines()
                .map(str::to_owned)
                .filter(keep)
                .collect(),
            rules: output("nft", &["list", "ruleset"]),
            settings: settings.map(read).into_iter().flatten().collect(),
        }
    }
}

/// Returns the state directory of a cluster.
fn state(id: &str) -> std::path::PathBuf {
    let user = rustix::process::geteuid().as_raw();
    Path::new("/var/tmp")
        .join(format!("hearth-cluster-{user}"))
        .join(id)
}

fn names(directory: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

fn processes(holds: impl Fn(u32) -> bool) -> BTreeSet<u32> {
    names("/proc")
        .iter()
        .filter_map(|name| name.parse().ok())
        .filter(|&pid| holds(pid))
        .collect()
}

fn command_line(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&words).into_owned()
}

fn kill_9(pid: u32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok()
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}
