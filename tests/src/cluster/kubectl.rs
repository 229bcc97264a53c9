//! Test operations on a cluster by `kubectl`.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use serde_json::Value;

use super::wait::{try_wait_until, wait_until};
use super::{Cluster, Options, keeper};
use crate::programs::program;

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

impl Cluster {
    /// Creates a `kubectl` command for this cluster.
    pub fn kubectl_command(&self) -> Command {
        let mut command = Command::new(self.tool("kubectl"));
        if let Some(own) = &self.own {
            own.workspace.environment(&mut command);
        }
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command.stdin(Stdio::null());
        command
    }

    /// Creates a command of `kubectl hearth`, which kubectl finds in `directory`: a link to the program is put there.
    ///
    /// # Panics
    /// When it cannot be.
    pub fn plugin_command(&self, directory: &Path) -> Command {
        let link = directory.join("kubectl-hearth");
        if !link.exists() {
            let made = std::os::unix::fs::symlink(program("hearth"), &link);
            made.unwrap_or_else(|error| panic!("{}: {error}", link.display()));
        }
        let known = std::env::var_os("PATH").unwrap_or_default();
        let directories =
            std::iter::once(directory.to_owned()).chain(std::env::split_paths(&known));
        let path = std::env::join_paths(directories)
            .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        // kubectl takes no flags before the name of a plugin.
        let mut command = Command::new(self.tool("kubectl"));
        if let Some(own) = &self.own {
            own.workspace.environment(&mut command);
        }
        command
            .env("PATH", path)
            .env("KUBECONFIG", &self.kubeconfig);
        command.arg("hearth").stdin(Stdio::null());
        command
    }

    /// Runs `kubectl` to completion and returns its output.
    ///
    /// # Panics
    /// When it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments)
            .unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs `kubectl` to completion; returns its output, or its standard error.
    ///
    /// # Errors
    /// When it fails.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        finish(self.kubectl_command().args(arguments), "")
    }

    /// Applies YAML or JSON manifests.
    ///
    /// # Panics
    /// When the API server rejects them.
    pub fn apply(&self, manifests: &str) {
        self.try_apply(manifests)
            .unwrap_or_else(|error| panic!("{error}"));
    }

    /// Applies manifests and returns `kubectl`'s output.
    ///
    /// # Errors
    /// The API server's objections.
    pub fn try_apply(&self, manifests: &str) -> Result<String, String> {
        let mut command = self.kubectl_command();
        command.args(["apply", "--server-side", "--force-conflicts"]);
        finish(command.args(["--filename", "-"]), manifests)
    }

    /// Returns one object (`pod`, `default`, `name`); `None` if it does not exist. Cluster-scoped kinds have the
    /// namespace `""`.
    ///
    /// # Panics
    /// When the API server does not answer.
    pub fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        let arguments = ["get", kind, name, "--ignore-not-found", "--output=json"];
        let text = self.kubectl(&within(namespace, &arguments));
        (!text.trim().is_empty()).then(|| parse(&text))
    }

    /// Returns all objects of a kind in a namespace with the labels of `selector`; all of them if it is empty.
    ///
    /// # Panics
    /// When the API server does not answer.
    pub fn list(&self, kind: &str, namespace: &str, selector: &str) -> Vec<Value> {
        let arguments = ["get", kind, "--selector", selector, "--output=json"];
        let mut list = parse(&self.kubectl(&within(namespace, &arguments)));
        match list["items"].take() {
            Value::Array(items) => items,
            other => panic!("kubectl get {kind}: {other}"),
        }
    }

    /// Returns the logs of a Pod's containers, including the previous ones after a restart; empty if there are none
    /// yet.
    pub fn pod_logs(&self, namespace: &str, pod: &str) -> String {
        let arguments = ["logs", pod, "--all-containers"];
        let now = self.try_kubectl(&within(namespace, &arguments));
        let arguments = ["logs", pod, "--all-containers", "--previous"];
        let before = self.try_kubectl(&within(namespace, &arguments));
        before.unwrap_or_default() + &now.unwrap_or_default()
    }

    /// Sends SIGKILL to all processes of a Pod's containers, as seen by its node; returns their number.
    ///
    /// # Panics
    /// When there is no such Pod on one of the test's own nodes.
    pub fn kill_pod_processes(&self, namespace: &str, pod: &str) -> usize {
        self.signal_pod_processes(namespace, pod, Signal::KILL)
    }

    /// Sends a signal to all processes of a Pod's containers, as seen by its node; returns their number.
    ///
    /// # Panics
    /// When there is no such Pod on one of the test's own nodes.
    pub fn signal_pod_processes(&self, namespace: &str, pod: &str, signal: Signal) -> usize {
        let found = self.pod_processes(namespace, pod);
        for &pid in &found {
            keeper::signal(pid, signal);
        }
        found.len()
    }

    /// Returns all processes of a Pod's containers, by the machine's process ids.
    ///
    /// # Panics
    /// When there is no such Pod on one of the test's own nodes.
    pub fn pod_processes(&self, namespace: &str, pod: &str) -> Vec<u32> {
        let found = self.get("pod", namespace, pod);
        let found = found.unwrap_or_else(|| panic!("no Pod {namespace}/{pod}"));
        let node = found["spec"]["nodeName"].as_str().unwrap_or_default();
        let node = self.node_named(node);
        let containers = found["status"]["containerStatuses"].as_array();
        containers
            .into_iter()
            .flatten()
            .filter_map(|container| container["containerID"].as_str()?.rsplit('/').next())
            .flat_map(|id| node.container_processes(id))
            .collect()
    }

    /// Opens a route to a Service's port and waits until it accepts connections: a Service's rules lag behind its
    /// endpoints.
    ///
    /// # Panics
    /// When there is no such Service, or nothing behind it.
    pub fn reach(&self, namespace: &str, service: &str, port: u16) -> Reach {
        if !self.is_own() {
            return self.forward(namespace, service, port);
        }
        let found = self.get("service", namespace, service);
        let found = found.unwrap_or_else(|| panic!("no Service {namespace}/{service}"));
        let address = found["spec"]["clusterIP"].as_str().unwrap_or_default();
        self.reach_address(address, port)
    }

    /// Opens a route to a port of a Service or Pod at one of its addresses and waits until it accepts connections.
    ///
    /// # Panics
    /// When it cannot.
    pub fn reach_address(&self, address: &str, port: u16) -> Reach {
        let ip: IpAddr = address
            .parse()
            .unwrap_or_else(|error| panic!("{address:?} is no address: {error}"));
        let address = SocketAddr::new(ip, port);
        let what = format!("{address} can be connected to");
        // Rules that still lead to a lost node never answer, and a single attempt would use up the whole timeout.
        wait_until(&what, READY_TIMEOUT, || {
            TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).ok()
        });
        Reach {
            address: address.to_string(),
            forward: None,
        }
    }

    fn forward(&self, namespace: &str, service: &str, port: u16) -> Reach {
        use std::io::{BufRead, BufReader};
        let target = format!("service/{service}");
        let ports = format!(":{port}");
        let arguments = ["port-forward", target.as_str(), ports.as_str()];
        // It ends when its standard input does, so also if the test is killed.
        let mut command = Command::new("sh");
        command
            .args(["-c", r#""$@" & read -r _; kill $!"#, "-"])
            .arg(self.tool("kubectl"))
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(within(namespace, &arguments))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("kubectl port-forward: {error}"));
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            let mut stdout = BufReader::new(stdout);
            let _ = stdout.read_line(&mut line);
            // It prints a line per connection, and would stop if nobody read them.
            std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        }
        // "Forwarding from 127.0.0.1:43615 -> 8080"
        let address = line.split_whitespace().nth(2).unwrap_or_default();
        assert!(!address.is_empty(), "kubectl port-forward said: {line}");
        Reach {
            address: address.to_owned(),
            forward: Some(child),
        }
    }

    pub(super) fn wait_for_api_server(&self) -> anyhow::Result<()> {
        try_wait_until("the API server is ready", READY_TIMEOUT, || {
            self.try_kubectl(&["get", "--raw=/readyz"]).ok()
        })
        .with_context(|| self.own().workspace.log_tail("apiserver"))?;
        Ok(())
    }

    pub(super) fn wait_for_nodes(&self, options: &Options) -> anyhow::Result<()> {
        let ready = || {
            let nodes = self.list("nodes", "", "");
            let ready = nodes
                .iter()
                .filter(|node| condition(node, "Ready") == Some("True"));
            let gpus = nodes
                .iter()
                .filter(|node| node["status"]["allocatable"]["nvidia.com/gpu"] == "2");
            (ready.count() == options.nodes && gpus.count() == options.fake_gpu.len()).then_some(())
        };
        try_wait_until("all nodes are Ready", READY_TIMEOUT, ready)
            .with_context(|| self.own().workspace.log_tail("node-1-kubelet"))?;
        if options.fake_dra.is_empty() {
            return Ok(());
        }
        let published = || {
            let slices = self.list("resourceslices", "", "");
            (slices.len() == options.fake_dra.len()).then_some(())
        };
        try_wait_until("devices are published", READY_TIMEOUT, published).with_context(|| {
            let name = format!("{}-fake-dra", super::node::name(options.fake_dra[0]));
            self.own().workspace.log_tail(&name)
        })
    }

    pub(super) fn wait_for_addons(&self, options: &Options) -> anyhow::Result<()> {
        if options.dns {
            self.wait_for_rollout("deployment/coredns")?;
        }
        if options.metrics_server {
            self.wait_for_rollout("deployment/metrics-server")?;
            try_wait_until("node metrics are there", READY_TIMEOUT, || {
                let text = self
                    .try_kubectl(&["get", "--raw=/apis/metrics.k8s.io/v1beta1/nodes"])
                    .ok()?;
                let measured = parse(&text)["items"].as_array().map_or(0, Vec::len);
                (measured == options.nodes).then_some(())
            })?;
        }
        Ok(())
    }

    fn wait_for_rollout(&self, deployment: &str) -> anyhow::Result<()> {
        let arguments = ["rollout", "status", deployment, "--timeout=90s"];
        self.try_kubectl(&within("kube-system", &arguments))
            .map_err(anyhow::Error::msg)?;
        Ok(())
    }
}

/// An address that a test connects to; dropping it ends a forwarded port.
pub struct Reach {
    address: String,
    forward: Option<Child>,
}

impl Reach {
    /// `HOST:PORT`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Base URL of the OpenAI API there.
    pub fn v1(&self) -> String {
        format!("http://{}/v1", self.address)
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        if let Some(child) = &mut self.forward {
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }
}

/// Returns the status of an object's condition.
pub fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    let conditions = object["status"]["conditions"].as_array()?;
    let condition = conditions
        .iter()
        .find(|condition| condition["type"] == kind)?;
    condition["status"].as_str()
}

/// Prepends the namespace to arguments.
fn within<'a>(namespace: &'a str, arguments: &[&'a str]) -> Vec<&'a str> {
    let mut all = arguments.to_vec();
    if !namespace.is_empty() {
        all.extend(["--namespace", namespace]);
    }
    all
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

fn finish(command: &mut Command, input: &str) -> Result<String, String> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if !input.is_empty() {
        command.stdin(Stdio::piped());
    }
    let mut run = || -> std::io::Result<std::process::Output> {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(input.as_bytes())?;
        }
        child.wait_with_output()
    };
    let output = run().map_err(|error| format!("kubectl: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}
