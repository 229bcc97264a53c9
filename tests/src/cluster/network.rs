//! The cluster's network: a bridge in a namespace of its own, with the control plane, each node and the machine on it.
//!
//! The ranges are those that RFC 2544 keeps for tests. The machine reaches Pods through their nodes, and Services through
//! the control plane's namespace, where a kube-proxy runs too: so a lost node takes nothing from a test but its Pods.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The control plane, the nodes and the machine itself.
pub(super) const MACHINES: &str = "198.18.0.0/24";
/// Cluster addresses of Services.
pub(super) const SERVICES: &str = "198.18.128.0/20";
/// All Pods.
pub(super) const PODS: &str = "198.19.0.0/16";
/// The control plane's address on the bridge.
pub(super) const CONTROL: &str = "198.18.0.1";
/// The machine's address on the bridge: what a Pod connects to in order to reach a server of the test's own.
pub const HOST_ADDRESS: &str = "198.18.0.254";
/// The Service `kubernetes`.
pub(super) const API_SERVICE: &str = "198.18.128.1";
/// The Service of the cluster's DNS.
pub(super) const DNS_SERVICE: &str = "198.18.128.10";
/// The machine's interface on the bridge.
pub(super) const UPLINK: &str = "hearth0";

/// A node's address on the bridge.
pub(super) fn machine(node: usize) -> String {
    format!("198.18.0.{}", 10 + node)
}

/// The addresses of a node's Pods.
pub(super) fn pods(node: usize) -> String {
    format!("198.19.{node}.0/24")
}

/// Makes the bridge in the control plane's namespace, which `control` lives in, and joins the machine to it.
pub(super) fn join_machine(control: u32) -> anyhow::Result<()> {
    let prefix = MACHINES.rsplit('/').next().unwrap_or_default();
    ip(
        Some(control),
        &format!(
            "link set lo up\n\
             link add bridge0 type bridge\n\
             address add {CONTROL}/{prefix} dev bridge0\n\
             link set bridge0 up\n"
        ),
    )?;
    ip(
        None,
        &format!(
            "link add {UPLINK} type veth peer name machine netns {control}\n\
             address add {HOST_ADDRESS}/{prefix} dev {UPLINK}\n\
             link set {UPLINK} up\n\
             route add {SERVICES} via {CONTROL}\n"
        ),
    )?;
    ip(Some(control), "link set machine master bridge0 up\n")?;
    // Packets to Services come in and go out by the same interface: no advice to take a shorter way.
    sysctl(control, "ipv4/conf/all/send_redirects", "0")?;
    sysctl(control, "ipv4/conf/bridge0/send_redirects", "0")?;
    sysctl(control, "ipv4/ip_forward", "1")
}

/// Joins a node, whose namespace the process `pid` lives in, to the bridge. `nodes` is how many there will be.
pub(super) fn join_node(control: u32, pid: u32, node: usize, nodes: usize) -> anyhow::Result<()> {
    let prefix = MACHINES.rsplit('/').next().unwrap_or_default();
    let (address, own_pods) = (machine(node), pods(node));
    ip(
        Some(control),
        &format!(
            "link add node{node} type veth peer name eth0 netns {pid}\n\
             link set node{node} master bridge0 up\n\
             route add {own_pods} via {address}\n"
        ),
    )?;
    ip(None, &format!("route add {own_pods} via {address}\n"))?;
    let mut inside = format!(
        "link set lo up\n\
         address add {address}/{prefix} dev eth0\n\
         link set eth0 up\n\
         route add default via {CONTROL}\n"
    );
    for other in (1..=nodes).filter(|&other| other != node) {
        inside += &format!("route add {} via {}\n", pods(other), machine(other));
    }
    ip(Some(pid), &inside)?;
    sysctl(pid, "ipv4/ip_forward", "1")
}

/// Runs `ip` commands, one a line, in the network namespace of a process or in the machine's own.
fn ip(inside: Option<u32>, commands: &str) -> anyhow::Result<()> {
    within(inside, "ip", &["-batch", "-"], commands)
}

/// Sets a value below `/proc/sys/net` of a process's network namespace.
fn sysctl(inside: u32, name: &str, value: &str) -> anyhow::Result<()> {
    let file = format!("/proc/sys/net/{name}");
    within(Some(inside), "tee", &[&file], value)
}

fn within(
    inside: Option<u32>,
    program: &str,
    arguments: &[&str],
    input: &str,
) -> anyhow::Result<()> {
    let mut command = match inside {
        None => Command::new(program),
        Some(pid) => {
            let mut command = Command::new("nsenter");
            command.args(["--net", "--target", &pid.to_string(), "--", program]);
            command
        }
    };
    command
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("{} cannot be run", command.get_program().display()))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let words: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
        bail!(
            "{} {}: {}\n{input}",
            command.get_program().display(),
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}
