//! The cluster's network: a bridge in a namespace of its own, with the control plane, each node and the machine on it.
//!
//! The ranges are those that RFC 2544 and RFC 5180 reserve for tests. The machine reaches Pods through their nodes,
//! and Services through the control plane's namespace, where a kube-proxy runs too: so a lost node costs a test only
//! its Pods.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// IP versions of a cluster's nodes, Pods and Services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressFamily {
    /// IPv4 only.
    #[default]
    Ipv4,
    /// IPv6 only.
    Ipv6,
    /// Both, IPv4 first: Pods have an address of each, Services if they request it.
    Dual,
}

/// Address ranges of one IP version.
#[derive(Debug, PartialEq)]
pub(super) struct Ranges {
    /// The control plane, the nodes and the machine itself.
    pub(super) machines: &'static str,
    /// Cluster addresses of Services.
    pub(super) services: &'static str,
    /// All Pods.
    pub(super) pods: &'static str,
    /// The control plane's address on the bridge.
    pub(super) control: &'static str,
    /// The machine's address on the bridge.
    pub(super) host: &'static str,
    /// The Service `kubernetes`.
    pub(super) api_service: &'static str,
    /// The Service of the cluster's DNS.
    pub(super) dns_service: &'static str,
    /// The unspecified address.
    pub(super) any: &'static str,
}

/// The machine's IPv4 address on the bridge, at which a Pod reaches a server of the test.
pub const HOST_ADDRESS: &str = IPV4.host;
/// The machine's interface on the bridge.
pub(super) const UPLINK: &str = "hearth0";

const IPV4: Ranges = Ranges {
    machines: "198.18.0.0/24",
    services: "198.18.128.0/20",
    pods: "198.19.0.0/16",
    control: "198.18.0.1",
    host: "198.18.0.254",
    api_service: "198.18.128.1",
    dns_service: "198.18.128.10",
    any: "0.0.0.0",
};

const IPV6: Ranges = Ranges {
    machines: "2001:2::/64",
    services: "2001:2:0:1::/112",
    pods: "2001:2:0:100::/56",
    control: "2001:2::1",
    host: "2001:2::254",
    api_service: "2001:2:0:1::1",
    dns_service: "2001:2:0:1::10",
    any: "::",
};

impl AddressFamily {
    /// Returns the ranges of each of the cluster's IP versions, the primary one first.
    pub(super) fn ranges(self) -> &'static [Ranges] {
        const BOTH: [Ranges; 2] = [IPV4, IPV6];
        let both: &[Ranges] = const { &BOTH };
        match self {
            Self::Ipv4 => &both[..1],
            Self::Ipv6 => &both[1..],
            Self::Dual => both,
        }
    }

    /// Returns the ranges of the IP version used where only one is possible.
    pub(super) fn first(self) -> &'static Ranges {
        &self.ranges()[0]
    }

    /// Returns the address for listening on all of the cluster's addresses; `::` accepts IPv4 too.
    pub(super) fn any(self) -> &'static str {
        self.ranges()[self.ranges().len() - 1].any
    }

    /// Lists values for all IP versions, as Kubernetes flags expect them.
    pub(super) fn list<T: Into<String>>(self, value: impl Fn(&Ranges) -> T) -> String {
        let values: Vec<String> = self.ranges().iter().map(|r| value(r).into()).collect();
        values.join(",")
    }
}

impl Ranges {
    fn is_ipv6(&self) -> bool {
        self.machines.contains(':')
    }

    /// Returns a node's address on the bridge.
    pub(super) fn machine(&self, node: usize) -> String {
        let network = if self.is_ipv6() {
            "2001:2::"
        } else {
            "198.18.0."
        };
        format!("{network}{}", 10 + node)
    }

    /// Returns the address range of a node's Pods.
    pub(super) fn pods_of(&self, node: usize) -> String {
        if self.is_ipv6() {
            format!("2001:2:0:1{node:02x}::/64")
        } else {
            format!("198.19.{node}.0/24")
        }
    }

    /// Returns an address on the bridge with its prefix length, for `ip address add`.
    fn on_bridge(&self, address: &str) -> String {
        let prefix = self.machines.rsplit('/').next().unwrap_or_default();
        format!("{address}/{prefix}")
    }

    /// Returns the extra option of `ip address add`: no other machine can have the address, so it is usable at once.
    fn unchallenged(&self) -> &'static str {
        if self.is_ipv6() { "nodad" } else { "" }
    }
}

/// Creates the bridge in the control plane's namespace, which `control` is in, and connects the machine to it.
pub(super) fn join_machine(control: u32, family: AddressFamily) -> anyhow::Result<()> {
    let mut inside = "link set lo up\nlink add bridge0 type bridge\n".to_owned();
    let mut outside = format!("link add {UPLINK} type veth peer name machine netns {control}\n");
    let mut routes = String::new();
    for ranges in family.ranges() {
        let how = ranges.unchallenged();
        let address = ranges.on_bridge(ranges.control);
        inside += &format!("address add {address} dev bridge0 {how}\n");
        let address = ranges.on_bridge(ranges.host);
        outside += &format!("address add {address} dev {UPLINK} {how}\n");
        routes += &format!("route add {} via {}\n", ranges.services, ranges.control);
    }
    ip(Some(control), &format!("{inside}link set bridge0 up\n"))?;
    ip(None, &format!("{outside}link set {UPLINK} up\n{routes}"))?;
    ip(Some(control), "link set machine master bridge0 up\n")?;
    // Packets to Services enter and leave on the same interface, so no redirects to a shorter route.
    sysctl(control, "ipv4/conf/all/send_redirects", "0")?;
    sysctl(control, "ipv4/conf/bridge0/send_redirects", "0")?;
    forward(control, family)
}

/// Connects a node, whose namespace the process `pid` is in, to the bridge. `nodes` is the final number of nodes.
pub(super) fn join_node(
    control: u32,
    pid: u32,
    node: usize,
    nodes: usize,
    family: AddressFamily,
) -> anyhow::Result<()> {
    let mut routes = String::new();
    let mut addresses = "link set lo up\n".to_owned();
    let mut inside = "link set eth0 up\n".to_owned();
    for ranges in family.ranges() {
        let address = ranges.machine(node);
        routes += &format!("route add {} via {address}\n", ranges.pods_of(node));
        let (address, how) = (ranges.on_bridge(&address), ranges.unchallenged());
        addresses += &format!("address add {address} dev eth0 {how}\n");
        inside += &format!("route add default via {}\n", ranges.control);
        for other in (1..=nodes).filter(|&other| other != node) {
            let (pods, via) = (ranges.pods_of(other), ranges.machine(other));
            inside += &format!("route add {pods} via {via}\n");
        }
    }
    ip(
        Some(control),
        &format!(
            "link add node{node} type veth peer name eth0 netns {pid}\n\
             link set node{node} master bridge0 up\n\
             {routes}"
        ),
    )?;
    ip(None, &routes)?;
    ip(Some(pid), &(addresses + &inside))?;
    forward(pid, family)
}

/// Enables packet forwarding in a network namespace.
fn forward(inside: u32, family: AddressFamily) -> anyhow::Result<()> {
    sysctl(inside, "ipv4/ip_forward", "1")?;
    if family == AddressFamily::Ipv4 {
        return Ok(());
    }
    sysctl(inside, "ipv6/conf/all/forwarding", "1")
}

/// Runs `ip` commands, one per line, in a process's network namespace or the machine's own.
fn ip(inside: Option<u32>, commands: &str) -> anyhow::Result<()> {
    within(inside, "ip", &["-batch", "-"], commands)
}

/// Sets a value below `/proc/sys/net` in a process's network namespace.
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
