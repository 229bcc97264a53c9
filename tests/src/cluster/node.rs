//! A node: mount, UTS, network and PID namespaces with containerd, a real kubelet and kube-proxy in them.
//! Killing its first process takes all of these and its Pods with it, like a machine that loses power.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use super::cgroups::{self, Groups};
use super::network::AddressFamily;
use super::process::{Launch, Place, Workspace};
use super::wait::try_wait_until;
use super::{control, keeper, network};
use crate::programs::root;

const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Image of the Pods' sandbox containers; the tests' images use the same registry host.
pub(super) const PAUSE_IMAGE: &str = "hearth.test/pause:1";
/// Free memory below which a kubelet evicts Pods.
const EVICTION_MIB: u64 = 50;
/// Memory that the static policies reserve for the kubelet itself.
const KUBE_RESERVED_MIB: u64 = 64;

/// Returns a node's name.
pub(super) fn name(node: usize) -> String {
    format!("node-{node}")
}

/// A running node. Nodes are numbered from 1.
pub struct Node {
    pub(super) index: usize,
    workspace: Workspace,
    place: Place,
    group: String,
    /// Its first process, by the machine's process id.
    pid: u32,
    /// Child processes of the test.
    children: Mutex<Vec<Child>>,
}

impl Node {
    /// Creates a node's groups and namespaces, connects it to the network and starts containerd.
    pub(super) fn start(
        workspace: &Workspace,
        control: u32,
        index: usize,
        nodes: usize,
    ) -> anyhow::Result<Self> {
        let name = name(index);
        let state = workspace.file(&name);
        std::fs::create_dir_all(state.join("var-lib"))?;
        let group = cgroups::of_node(&workspace.id, &name);
        Groups::of_machine().make(&workspace.id, &name)?;
        let namespaces = ["--mount", "--uts", "--net", "--pid", "--mount-proc"];
        let launch = Launch::new(&name, "unshare", &Place::Host)
            .args(namespaces)
            .args(["--fork", "--kill-child", "--"])
            .args([root().join("tests/cluster/node.sh")])
            .args([name.as_str(), &state.display().to_string(), &group]);
        let holder = workspace.spawn(&launch)?;
        let holder_pid = holder.id();
        try_wait_until(&format!("{name} has its namespaces"), START_TIMEOUT, || {
            state.join("ready").exists().then_some(())
        })
        .with_context(|| workspace.log_tail(&name))?;
        let pid = only_child(holder_pid)
            .with_context(|| format!("the first process of {name} is not found"))?;
        network::join_node(control, pid, index, nodes, workspace.family)?;
        let node = Self {
            index,
            workspace: workspace.clone(),
            place: Place::Node {
                pid,
                group: group.clone(),
            },
            group,
            pid,
            children: Mutex::new(vec![holder]),
        };
        let config = state.join("containerd.toml");
        std::fs::write(&config, containerd_config(workspace, &state)?)?;
        std::fs::create_dir_all(state.join("cni"))?;
        std::fs::write(
            state.join("cni/hearth.conflist"),
            cni_config(index, workspace.family),
        )?;
        let launch = node.launch("containerd", "containerd")?;
        let log_level = ["--log-level", "warn"];
        node.spawn(&launch.flag("config", config).args(log_level))?;
        Ok(node)
    }

    /// Starts the kubelet and kube-proxy. The images of system Pods must already be imported.
    pub(super) fn start_kubelet(&self, static_policies: bool) -> anyhow::Result<()> {
        let name = name(self.index);
        let config = self.state().join("kubelet.json");
        let mut settings = kubelet_config(&self.workspace, &name, &self.group);
        if static_policies {
            settings.extend(static_managers());
        }
        std::fs::write(&config, serde_json::to_vec(&settings)?)?;
        self.run_kubelet()?;
        let proxy_name = format!("{name}-proxy");
        let proxy = control::proxy(&self.workspace, &proxy_name, self.index, &self.place)?;
        self.spawn(&proxy)
    }

    fn run_kubelet(&self) -> anyhow::Result<()> {
        let name = name(self.index);
        let launch = self
            .launch("kubelet", "kubelet")?
            .flag("config", self.state().join("kubelet.json"))
            .flag(
                "kubeconfig",
                self.workspace.file(format!("pki/{name}.kubeconfig")),
            )
            .flag("hostname-override", &name)
            .flag(
                "node-ip",
                self.workspace
                    .family
                    .list(|ranges| ranges.machine(self.index)),
            )
            .flag("v", "2");
        self.spawn(&launch)
    }

    /// Kills only the kubelet: containers and their network keep running, and the cluster hears nothing from the node.
    ///
    /// # Panics
    /// When no kubelet is running.
    pub fn stop_kubelet(&self) {
        let program = self.workspace.tools.get("kubelet").expect("kubelet");
        let killed = self.kill_process(&program.display().to_string());
        assert!(killed > 0, "no kubelet on {}", self.name());
        self.reap();
    }

    /// Starts the kubelet again.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn start_kubelet_again(&self) {
        self.run_kubelet()
            .unwrap_or_else(|error| panic!("kubelet of {}: {error:#}", self.name()));
    }

    /// Gives an image of the node a second name.
    ///
    /// # Panics
    /// With containerd's error.
    pub fn tag_image(&self, from: &str, to: &str) {
        let output = self
            .ctr(&["images", "tag", "--force", from, to])
            .and_then(|mut command| Ok(command.output()?))
            .unwrap_or_else(|error| panic!("{error:#}"));
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{from} on {}: {words}",
            self.name()
        );
    }

    /// Offers fake GPUs.
    pub(super) fn start_fake_gpu(&self) -> anyhow::Result<()> {
        self.spawn(&self.launch("fake-gpu", "fake-gpu")?)
    }

    /// Offers fake GPUs as devices of ResourceClaims.
    pub(super) fn start_fake_dra(&self) -> anyhow::Result<()> {
        let name = self.name();
        let kubeconfig = self.workspace.file(format!("pki/{name}.kubeconfig"));
        let launch = self.launch("fake-dra", "fake-gpu")?;
        let launch = launch.args(["--dra"]).flag("node", &name);
        self.spawn(&launch.flag("kubeconfig", kubeconfig))
    }

    /// Returns its name in the cluster.
    pub fn name(&self) -> String {
        name(self.index)
    }

    /// Returns its address, which the machine can reach too.
    pub fn address(&self) -> String {
        self.workspace.family.first().machine(self.index)
    }

    /// Runs one of the machine's commands inside the node, to completion.
    ///
    /// # Panics
    /// When it cannot be run.
    pub fn exec(&self, command: &[&str]) -> Output {
        self.inside(command)
            .output()
            .unwrap_or_else(|error| panic!("{command:?} on {}: {error}", self.name()))
    }

    /// Imports the images of an archive into the node.
    ///
    /// # Errors
    /// With containerd's complaint about the archive.
    pub fn import_image(&self, archive: &Path) -> anyhow::Result<()> {
        let archive = archive.display().to_string();
        let arguments = ["images", "import", "--local", archive.as_str()];
        let output = self.ctr(&arguments)?.output()?;
        if !output.status.success() {
            bail!(
                "{archive} on {}: {}",
                self.name(),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(())
    }

    /// Kills every process of the node at once: its Pods, its kubelet, everything. It does not come back.
    pub fn kill(&self) {
        keeper::kill(self.pid);
        for child in self
            .children
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .iter_mut()
        {
            let _ = child.wait();
        }
    }

    /// Sends SIGKILL to each process of the node, including Pods', whose command line contains `pattern`; returns
    /// their number.
    pub fn kill_process(&self, pattern: &str) -> usize {
        self.signal_process(pattern, Signal::KILL).len()
    }

    /// Sends a signal to each process of the node, including Pods', whose command line contains `pattern`; returns
    /// their ids on the machine.
    pub fn signal_process(&self, pattern: &str, signal: Signal) -> Vec<u32> {
        let found: Vec<_> = Groups::of_machine()
            .processes_of_node(&self.workspace.id, &self.name())
            .into_iter()
            .filter(|&pid| command_line(pid).contains(pattern))
            .collect();
        for &pid in &found {
            keeper::signal(pid, signal);
        }
        found
    }

    /// Returns all processes of one container, by the machine's process ids.
    pub fn container_processes(&self, id: &str) -> Vec<u32> {
        Groups::of_machine().processes_of_container(&self.workspace.id, &self.name(), id)
    }

    pub(super) fn wait_for_containerd(&self) -> anyhow::Result<()> {
        let what = format!("containerd of {} answers", self.name());
        try_wait_until(&what, START_TIMEOUT, || {
            let output = self.ctr(&["version"]).ok()?.output().ok()?;
            output.status.success().then_some(())
        })
        .with_context(|| {
            self.workspace
                .log_tail(&format!("{}-containerd", self.name()))
        })
    }

    /// Reaps ended processes, so that none stays a zombie.
    pub(super) fn reap(&self) {
        for child in self
            .children
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .iter_mut()
        {
            let _ = child.try_wait();
        }
    }

    fn ctr(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let program = self.workspace.tools.get("ctr")?.display().to_string();
        let mut command = vec![program.as_str(), "--namespace", "k8s.io"];
        command.extend(arguments);
        Ok(self.inside(&command))
    }

    fn inside(&self, command: &[&str]) -> Command {
        let mut inside = Command::new("nsenter");
        inside
            .args(["--target", &self.pid.to_string()])
            .args(["--mount", "--uts", "--net", "--pid", "--"])
            .args(command)
            .stdin(Stdio::null());
        self.workspace.environment(&mut inside);
        inside
    }

    fn launch(&self, name: &str, program: &str) -> anyhow::Result<Launch> {
        let program = self.workspace.tools.get(program)?;
        let name = format!("{}-{name}", self.name());
        Ok(Launch::new(&name, program, &self.place))
    }

    fn spawn(&self, launch: &Launch) -> anyhow::Result<()> {
        let child = self.workspace.spawn(launch)?;
        self.children
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .push(child);
        Ok(())
    }

    fn state(&self) -> PathBuf {
        self.workspace.file(self.name())
    }
}

fn only_child(pid: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

fn command_line(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&words).replace('\0', " ")
}

fn containerd_config(workspace: &Workspace, state: &Path) -> anyhow::Result<String> {
    let state = state.display();
    let runc = workspace.tools.get("runc")?;
    let cni = workspace.tools.directory("bridge")?;
    // Some machines do not let root lower a process's oom_score_adj.
    Ok(format!(
        r#"version = 3
root = "{state}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.blockfile"]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state}/opt"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_hugetlb_controller = true
  disable_apparmor = true
  enable_unprivileged_ports = true
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
      SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni}"]
    conf_dir = "{state}/cni"
"#,
        runc = runc.display(),
        cni = cni.display(),
    ))
}

fn cni_config(node: usize, family: AddressFamily) -> String {
    let ranges = family.ranges();
    let subnets: Vec<Value> = ranges
        .iter()
        .map(|ranges| json!([{"subnet": ranges.pods_of(node)}]))
        .collect();
    let routes: Vec<Value> = ranges
        .iter()
        .map(|ranges| json!({"dst": format!("{}/0", ranges.any)}))
        .collect();
    let bridge = json!({
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": true,
        "ipMasq": false,
        "hairpinMode": true,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni",
            "ranges": subnets,
            "routes": routes,
        },
    });
    let ports = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    json!({"cniVersion": "1.0.0", "name": "hearth", "plugins": [bridge, ports]}).to_string()
}

fn kubelet_config(workspace: &Workspace, name: &str, group: &str) -> Map<String, Value> {
    let pki = |file: String| workspace.file("pki").join(file);
    let config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": pki("ca.crt".to_owned())},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki(format!("{name}.crt")),
        "tlsPrivateKeyFile": pki(format!("{name}.key")),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": group,
        "failCgroupV1": false,
        "failSwapOn": false,
        "oomScoreAdj": 0,
        "maxOpenFiles": 20000,
        "address": workspace.family.any(),
        "clusterDNS": [workspace.family.first().dns_service],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        // Changed Secrets reach their Pods within this time instead of a minute.
        "syncFrequency": "10s",
        // The machine's disk is not the node's: it only needs some free space.
        "evictionHard": {
            "memory.available": format!("{EVICTION_MIB}Mi"),
            "nodefs.available": "200Mi",
            "imagefs.available": "200Mi",
            "nodefs.inodesFree": "1000",
        },
        // Images are imported once and cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "volumePluginDir": "/var/lib/kubelet/volumeplugins",
        // A heartbeat every 3 s.
        "nodeLeaseDurationSeconds": 12,
        "nodeStatusUpdateFrequency": "5s",
        "maxPods": 60,
    });
    object(config)
}

/// Settings of the CPU manager and memory manager with the policy `static`. The reserve takes one whole CPU from the
/// exclusive ones.
fn static_managers() -> Map<String, Value> {
    let kept_mib = KUBE_RESERVED_MIB + EVICTION_MIB;
    object(json!({
        "cpuManagerPolicy": "static",
        "kubeReserved": {"cpu": "100m", "memory": format!("{KUBE_RESERVED_MIB}Mi")},
        "memoryManagerPolicy": "Static",
        // The kubelet starts only if this is exactly what it reserves and keeps free.
        "reservedMemory": [{"numaNode": 0, "limits": {"memory": format!("{kept_mib}Mi")}}],
    }))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        other => unreachable!("{other} is no object"),
    }
}
