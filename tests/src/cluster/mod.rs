//! A Kubernetes cluster for a test: a real control plane and real kubelets, up in seconds and removed without a trace.
//!
//! ```no_run
//! use hearth_tests::cluster::{Cluster, Options};
//!
//! let Some(cluster) = Cluster::start_or_skip(&Options { nodes: 2, dns: true, ..Options::default() }) else {
//!     return;
//! };
//! println!("{}", cluster.kubectl(&["get", "nodes"]));
//! ```
//!
//! The programs come from `tests/cluster/build.sh`. Where a cluster is unavailable, a test is skipped with a line that
//! gives the reason. However a test ends, a [keeper](keep) tears its cluster down.

mod addons;
mod audit;
mod cgroups;
mod control;
mod hearth;
mod host;
mod keeper;
mod kubectl;
mod network;
mod node;
mod own;
mod pki;
mod process;
mod toolbox;
mod tools;
mod wait;

use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Instant;

use anyhow::Context;
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};

pub use audit::AuditEntry;
pub use hearth::Images;
pub use host::Skip;
pub use keeper::{keep, sweep};
pub use kubectl::{Reach, condition};
pub use network::{AddressFamily, HOST_ADDRESS};
pub use node::Node;
pub use toolbox::{STRICT, TOOLBOX, toolbox_pod};
pub use wait::{try_wait_until, wait_until};

use own::Own;
use tools::Tools;

/// Number of events shown when a test has failed.
const LAST_EVENTS: usize = 40;

/// Requirements of a test for its cluster.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Number of nodes with real kubelets. 0: only etcd and an API server, on a loopback port, without root
    /// and alongside other clusters. With nodes, only one cluster is up at a time, and others wait.
    pub nodes: usize,
    /// Without nodes: also garbage collection and namespace deletion. With nodes, all controllers run.
    pub controllers: bool,
    /// IP versions of nodes, Pods and Services. Without nodes: IPv4.
    pub family: AddressFamily,
    /// Cluster DNS.
    pub dns: bool,
    /// The resource metrics used by `kubectl top` and HorizontalPodAutoscalers.
    pub metrics_server: bool,
    /// Nodes, numbered from 1, that offer two fake GPUs.
    pub fake_gpu: Vec<usize>,
    /// Nodes, numbered from 1, whose ResourceSlice offers two fake GPUs: devices of the driver and DeviceClass
    /// `gpu.nvidia.com`, with the attributes of NVIDIA's own, including `uuid` (`GPU-fake-NODE-N`). A container with a
    /// claim finds the UUID of its device N in `GPU_DEVICE_N`.
    pub fake_dra: Vec<usize>,
    /// Kubelets use the static policies of the CPU manager and memory manager: a Guaranteed Pod with whole CPUs has
    /// them to itself. A reserve of 100m takes one whole CPU, so two CPUs leave one per node. The nodes share this
    /// machine's CPUs: nothing keeps their choices apart.
    pub static_policies: bool,
    /// The API server records each write: see [`Cluster::audit_log`].
    pub audit: bool,
    /// The test kills nodes or the API server, so it cannot run on the cluster that `KUBECONFIG` names.
    pub breaks: bool,
}

/// A running cluster, torn down when dropped.
///
/// Its methods are for tests: they panic with enough detail for a person when Kubernetes does not do as told.
pub struct Cluster {
    tools: Tools,
    kubeconfig: PathBuf,
    own: Option<Own>,
    /// Time at which its turn came, for one of the test's own.
    began: Option<Instant>,
}

/// Whether tests are to run on a cluster that the user has named, instead of their own.
pub fn is_somebodys() -> bool {
    host::foreign_kubeconfig().is_some()
}

impl Cluster {
    /// Starts a cluster and waits until its nodes are Ready and the requested add-ons respond; with `make test-cluster
    /// KUBECONFIG=…`, uses the cluster of that kubeconfig.
    ///
    /// # Errors
    /// The reason that none is available here; the test is then skipped.
    ///
    /// # Panics
    /// When it should come up but does not.
    pub fn start(options: &Options) -> Result<Self, Skip> {
        let tools = host::check(options)?;
        Ok(Self::up(options, tools).unwrap_or_else(|error| panic!("no cluster: {error:#}")))
    }

    /// Like [`Cluster::start`]; if no cluster is available, says so on standard error, even for a test that passes.
    pub fn start_or_skip(options: &Options) -> Option<Self> {
        match Self::start(options) {
            Ok(cluster) => Some(cluster),
            Err(reason) => {
                crate::skipped(&reason.to_string());
                None
            }
        }
    }

    fn up(options: &Options, tools: Tools) -> anyhow::Result<Self> {
        if let Some(kubeconfig) = host::foreign_kubeconfig() {
            let cluster = Self {
                tools,
                kubeconfig,
                own: None,
                began: None,
            };
            cluster
                .try_kubectl(&["version"])
                .map_err(anyhow::Error::msg)?;
            return Ok(cluster);
        }
        let own = Own::begin(options, &tools)?;
        let began = Instant::now();
        let mut cluster = Self {
            tools,
            kubeconfig: own.workspace.file("pki/admin.kubeconfig"),
            own: Some(own),
            began: None,
        };
        if let Err(error) = cluster.bring_up(options) {
            return Err(error.context(cluster.failure()));
        }
        cluster.began = Some(began);
        eprintln!("the cluster was up after {:.1?}", began.elapsed());
        Ok(cluster)
    }

    /// Whether the cluster is the test's own rather than that of `KUBECONFIG`.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// Returns the id that identifies its processes, groups and state directory.
    ///
    /// # Panics
    /// When it is not the test's own.
    pub fn id(&self) -> &str {
        &self.own().workspace.id
    }

    /// Returns an administrator's kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Returns a node, numbered from 1.
    ///
    /// # Panics
    /// When the test has no such node of its own.
    pub fn node(&self, index: usize) -> &Node {
        let nodes = &self.own().nodes;
        let node = nodes.iter().find(|node| node.index == index);
        node.unwrap_or_else(|| panic!("node {index} is none of {}", nodes.len()))
    }

    /// Returns the node with that name.
    ///
    /// # Panics
    /// When the test has no such node of its own.
    pub fn node_named(&self, name: &str) -> &Node {
        let node = self.own().nodes.iter().find(|node| node.name() == name);
        node.unwrap_or_else(|| panic!("{name} is no node of this cluster"))
    }

    /// Imports the images of an archive into all nodes.
    ///
    /// # Panics
    /// When containerd rejects it.
    pub fn import_image(&self, archive: &Path) {
        std::thread::scope(|scope| {
            let imports: Vec<_> = self
                .own()
                .nodes
                .iter()
                .map(|node| scope.spawn(move || node.import_image(archive)))
                .collect();
            for import in imports {
                match import.join() {
                    Ok(result) => result.unwrap_or_else(|error| panic!("{error:#}")),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
    }

    /// Kills the API server without warning.
    pub fn stop_api_server(&self) {
        self.own().stop_api_server();
    }

    /// Starts the API server again and waits until it is ready.
    ///
    /// # Panics
    /// When it does not come up.
    pub fn start_api_server(&self) {
        let start = || -> anyhow::Result<()> {
            self.own().start_api_server()?;
            self.wait_for_api_server()
        };
        start().unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Kills the API server and starts it again.
    pub fn restart_api_server(&self) {
        self.stop_api_server();
        self.start_api_server();
    }

    /// Returns all writes so far, oldest first. Requires [`Options::audit`].
    ///
    /// # Panics
    /// When the option was not set.
    pub fn audit_log(&self) -> Vec<AuditEntry> {
        self.audit_log_from(&mut 0)
    }

    /// Returns the logged writes from byte `offset`, which is advanced past the last of them.
    ///
    /// # Panics
    /// When [`Options::audit`] was not set.
    pub fn audit_log_from(&self, offset: &mut u64) -> Vec<AuditEntry> {
        let log = self.own().workspace.log("audit");
        audit::read(&log, offset)
            .unwrap_or_else(|error| panic!("Options::audit? {}: {error}", log.display()))
    }

    /// Returns a client with administrator rights, for callers whose requests are too frequent to start a program each
    /// time. It belongs to the runtime that it is created in.
    ///
    /// # Panics
    /// When the cluster's kubeconfig is invalid.
    pub async fn client(&self) -> kube::Client {
        let read = Kubeconfig::read_from(self.kubeconfig());
        let read = read.unwrap_or_else(|error| panic!("kubeconfig: {error}"));
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
        let mut config = config.unwrap_or_else(|error| panic!("kubeconfig: {error}"));
        config.default_retry = false;
        // kube takes the environment's, which is for the way out of the network.
        config.proxy_url = None;
        kube::Client::try_from(config).unwrap_or_else(|error| panic!("client: {error}"))
    }

    /// Returns the directory with the logs of all the cluster's processes. It is kept.
    pub fn logs(&self) -> &Path {
        &self.own().workspace.logs
    }

    /// Returns one of the cluster's programs: `helm`, `kubectl`.
    ///
    /// # Panics
    /// When it is neither built nor installed.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.find_tool(name)
            .unwrap_or_else(|| panic!("{name} is not there: run tests/cluster/build.sh"))
    }

    /// Like [`Cluster::tool`]; `None` if it is neither built nor installed.
    pub fn find_tool(&self, name: &str) -> Option<PathBuf> {
        self.tools.built(name).or_else(|| tools::in_system(name))
    }

    fn own(&self) -> &Own {
        let own = self.own.as_ref();
        own.unwrap_or_else(|| panic!("set Options::breaks: this is the cluster of KUBECONFIG"))
    }

    fn bring_up(&mut self, options: &Options) -> anyhow::Result<()> {
        let own = self.own.as_mut().context("a cluster of one's own")?;
        own.start_control(options)?;
        // Containerd starts and imports the system images while the API server starts.
        own.start_nodes(options)?;
        self.wait_for_api_server()?;
        let own = self.own();
        own.start_controllers(options)?;
        if options.nodes == 0 {
            return Ok(());
        }
        own.start_kubelets(options)?;
        self.apply(addons::BASE);
        if options.dns {
            self.apply(&addons::dns(options.family));
        }
        if options.metrics_server {
            self.apply(&addons::metrics_server(options.family));
        }
        if !options.fake_dra.is_empty() {
            self.apply(addons::DEVICE_CLASS);
        }
        self.wait_for_nodes(options)?;
        self.wait_for_addons(options)
    }

    /// Describes the cluster's state and the location of the logs, to find out why a test failed.
    fn failure(&self) -> String {
        let Some(own) = &self.own else {
            return String::new();
        };
        let logs = own.workspace.logs.display();
        let mut text = format!("the logs of the cluster are in {logs}\n");
        let pods = ["get", "nodes,pods", "--all-namespaces", "--output=wide"];
        let events = [
            "get",
            "events",
            "--all-namespaces",
            "--sort-by=.lastTimestamp",
        ];
        match self.try_kubectl(&pods) {
            Ok(found) => text += &found,
            Err(error) => return text + &error,
        }
        match self.try_kubectl(&events) {
            // More would hide the failure itself, which stands above.
            Ok(found) => {
                let skipped = found.lines().count().saturating_sub(LAST_EVENTS);
                text.extend(found.split_inclusive('\n').skip(skipped));
            }
            Err(error) => text += &error,
        }
        text
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- cluster ---\n{}", self.failure());
        }
        let Some(own) = &mut self.own else { return };
        let mut keeper = own.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        keeper.dismiss();
        loop {
            // The test is the parent of many of the processes that the keeper kills.
            own.reap();
            match keeper.is_done() {
                Ok(false) => std::thread::sleep(std::time::Duration::from_millis(10)),
                Ok(true) => break,
                Err(error) if std::thread::panicking() => return eprintln!("{error:#}"),
                Err(error) => panic!("{error:#}"),
            }
        }
        if let Some(began) = self.began {
            eprintln!("the cluster was gone after {:.1?}", began.elapsed());
        }
    }
}
