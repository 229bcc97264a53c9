//! The cluster's network: a bridge in a namespace of its own, with the control plane, each node and the machine on it.
//!
//! The ranges are those that RFC 2544 and RFC 5180 keep for tests. The machine reaches Pods through their nodes, and
//! Services through the control plane's namespace, where a kube-proxy runs too: so a lost node takes nothing from a test
//! but its Pods.

use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

/// The IP versions of a cluster: of its nodes, Pods and Services alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressFamily {
    /// IPv4 alone.
    #[default]
    Ipv4,
    /// IPv6 alone.
    Ipv6,
    /// Both, IPv4 first: Pods have an address of each, Services if they ask for it.
    Dual,
}

/// The ranges of one IP version.
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
    /// What any address is written as.
    pub(super) any: &'static str,
}

/// The machine's IPv4 address on the bridge: what a Pod connects to in order to reach a server of the test's own.
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
    /// The ranges of each IP version that the cluster has, the first one's first.
    pub(super) fn ranges(self) -> &'static [Ranges] {
        const BOTH: [Ranges; 2] = [IPV4, IPV6];
        let both: &[Ranges] = const { &BOTH };
        match self {
            Self::Ipv4 => &both[..1],
            Self::Ipv6 => &both[1..],
            Self::Dual => both,
        }
    }

    /// The ranges of the IP version that addresses are of where only one can be.
    pub(super) fn first(self) -> &'static Ranges {
        &self.ranges()[0]
    }

    /// Where to listen for all that the cluster has; `::` takes IPv4 too.
    pub(super) fn any(self) -> &'static str {
        self.ranges()[self.ranges().len() - 1].any
    }

    /// Values of all IP versions, as Kubernetes' flags take them.
    pub(super) fn list<T: Into<String>>(self, value: impl Fn(&Ranges) -> T) -> String {
        let values: Vec<String> = self.ranges().iter().map(|r| value(r).into()).collect();
        values.join(",")
    }
}

impl Ranges {
    fn is_ipv6(&self) -> bool {
        self.machines.contains(':')
    }

    /// A node's address on the bridge.
    pub(super) fn machine(&self, node: usize) -> String {
        let network = if self.is_ipv6() {
            "2001:2::"
        } else {
            "198.18.0."
        };
        format!("{network}{}", 10 + node)
    }

    /// The addresses of a node's Pods.
    pub(super) fn pods_of(&self, node: usize) -> String {
        if self.is_ipv6() {
            format!("2001:2:0:1{node:02x}::/64")
        } else {
            format!("198.19.{node}.0/24")
        }
    }

    /// An address on the bridge with the length of its prefix, for `ip address add`.
    fn on_bridge(&self, address: &str) -> String {
        let prefix = self.machines.rsplit('/').next().unwrap_or_default();
        format!("{address}/{prefix}")
    }

    /// What `ip address add` is told besides: no other machine can have the address, and it is good at once.
    fn unchallenged(&self) -> &'static str {
        if self.is_ipv6() { "nodad" } else { "" }
    }
}

/// Makes the bridge in the control plane's namespace, which `control` lives in, and joins the machine to it.
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
    // Packets to Services come in and go out by the same interface: no advice to take a shorter way.
    sysctl(control, "ipv4/conf/all/send_redirects", "0")?;
    sysctl(control, "ipv4/conf/bridge0/send_redirects", "0")?;
    forward(control, family)
}

/// Joins a node, whose namespace the process `pid` lives in, to the bridge. `nodes` is how many there will be.
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

/// Lets a network namespace pass packets on.
fn forward(inside: u32, family: AddressFamily) -> anyhow::Result<()> {
    sysctl(inside, "ipv4/ip_forward", "1")?;
    if family == AddressFamily::Ipv4 {
        return Ok(());
    }
    sysctl(inside, "ipv6/conf/all/forwarding", "1")
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
