//! Requirements of a cluster on the machine, and the location of its state.

use std::fmt;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use super::Options;
use super::cgroups::Groups;
use super::network::{AddressFamily, UPLINK};
use super::tools::{Tools, in_system};

/// Reason that a cluster is unavailable here: one line for the user.
#[derive(Clone, Debug, PartialEq)]
pub struct Skip(pub String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the kubeconfig of a foreign cluster that the tests are to use, from `make test-cluster KUBECONFIG=…`.
pub(super) fn foreign_kubeconfig() -> Option<PathBuf> {
    std::env::var_os("HEARTH_TEST_KUBECONFIG")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// Checks whether a cluster with `options` is possible, and returns its programs.
pub(super) fn check(options: &Options) -> Result<Tools, Skip> {
    if !cfg!(target_os = "linux") {
        return Err(Skip("a Kubernetes node needs Linux".to_owned()));
    }
    let tools = Tools::find().map_err(|error| Skip(format!("{error:#}")))?;
    if foreign_kubeconfig().is_some() {
        check_foreign(options)?;
        return Ok(tools);
    }
    let mut needed = vec!["etcd", "kube-apiserver", "kubectl"];
    let has_controllers = options.nodes > 0 || options.controllers;
    needed.extend(has_controllers.then_some("kube-controller-manager"));
    if options.nodes > 0 {
        check_nodes(options.family)?;
        needed.extend(["kubelet", "kube-proxy", "kube-scheduler", "containerd"]);
        needed.extend(["runc", "bridge", "pause", "helm"]);
        needed.extend(options.dns.then_some("coredns"));
        needed.extend(options.metrics_server.then_some("metrics-server"));
        let has_gpus = !options.fake_gpu.is_empty() || !options.fake_dra.is_empty();
        needed.extend(has_gpus.then_some("fake-gpu"));
    }
    let missing: Vec<_> = needed
        .into_iter()
        .filter(|name| tools.built(name).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(tools);
    }
    Err(Skip(format!(
        "{} not built: run tests/cluster/build.sh, which needs Go",
        missing.join(", ")
    )))
}

fn check_foreign(options: &Options) -> Result<(), Skip> {
    let own = if options.nodes == 0 {
        "a control plane of its own"
    } else if options.breaks {
        "nodes that it may kill"
    } else if options.audit {
        "the API server's audit log"
    } else if !options.fake_gpu.is_empty() || !options.fake_dra.is_empty() {
        "a fake GPU"
    } else if options.family != AddressFamily::Ipv4 {
        "addresses of a certain IP version"
    } else if options.static_policies {
        "kubelets with static policies"
    } else {
        return Ok(());
    };
    Err(Skip(format!(
        "it needs {own}, and runs on the cluster of KUBECONFIG"
    )))
}

/// Checks the requirements of real kubelets in namespaces.
fn check_nodes(family: AddressFamily) -> Result<(), Skip> {
    if !rustix::process::geteuid().is_root() {
        return Err(Skip(
            "nodes need root: run `sudo -E env PATH=$PATH make test-cluster`".to_owned(),
        ));
    }
    let is_tried = std::env::var_os("HEARTH_TEST_CGROUP_V2").is_some();
    if !Groups::of_machine().are_v1() && !is_tried {
        return Err(Skip(
            "nodes of these tests ran in cgroup v1 alone so far, and this machine has only v2: name a cluster by \
             `make test-cluster KUBECONFIG=…`, or try it with HEARTH_TEST_CGROUP_V2=1"
                .to_owned(),
        ));
    }
    let programs = ["ip", "nft", "conntrack", "nsenter", "unshare", "setsid"];
    let missing: Vec<_> = programs
        .into_iter()
        .filter(|name| in_system(name).is_none())
        .collect();
    if !missing.is_empty() {
        return Err(Skip(format!(
            "the system lacks {}: run scripts/bootstrap.sh test as root",
            missing.join(", ")
        )));
    }
    check_routes(family)
}

/// Checks that no route of the machine is in the cluster's ranges, except those of our own clusters.
fn check_routes(family: AddressFamily) -> Result<(), Skip> {
    if family != AddressFamily::Ipv4 && !Path::new("/proc/sys/net/ipv6").exists() {
        return Err(Skip("this machine's kernel has no IPv6".to_owned()));
    }
    let ranges = family.ranges().iter();
    for range in ranges.flat_map(|ranges| [ranges.machines, ranges.pods, ranges.services]) {
        let version = if range.contains(':') { "-6" } else { "-4" };
        let output = Command::new("ip")
            .args([version, "route", "show", "root", range])
            .output()
            .map_err(|error| Skip(format!("ip: {error}")))?;
        let routes = String::from_utf8_lossy(&output.stdout);
        let other = routes
            .lines()
            .find(|route| !route.contains(&format!("dev {UPLINK}")));
        if let Some(route) = other {
            return Err(Skip(format!(
                "the range {range} is in use on this machine: {}",
                route.trim()
            )));
        }
    }
    Ok(())
}

/// Returns the directory of all this user's clusters. It outlives the process that made it, so that the next one can
/// clean up.
pub(super) fn base() -> anyhow::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let base = PathBuf::from(format!("/var/tmp/hearth-cluster-{uid}"));
    match DirBuilder::new().mode(0o700).create(&base) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| base.display().to_string());
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(&base)?;
    if !found.is_dir() || found.uid() != uid {
        bail!(
            "{} is not a directory of this user\n  remove it",
            base.display()
        );
    }
    Ok(base)
}
