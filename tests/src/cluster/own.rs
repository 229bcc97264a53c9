//! The processes of a test's own cluster, in the order in which they start.

use std::path::PathBuf;
use std::process::Child;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;

use super::control::{self, Endpoints};
use super::keeper::{self, Keeper};
use super::node::Node;
use super::process::{Launch, Place, Workspace};
use super::tools::Tools;
use super::wait::try_wait_until;
use super::{Options, addons, network};
use crate::programs::target_directory;

/// Number of clusters whose logs are kept.
const LOGS_KEPT: usize = 8;

/// Number of clusters that this process has begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// A cluster that the test started.
pub(super) struct Own {
    pub(super) workspace: Workspace,
    pub(super) keeper: Mutex<Keeper>,
    pub(super) nodes: Vec<Node>,
    /// Control plane processes that are children of the test, apart from the API server.
    children: Mutex<Vec<Child>>,
    api_server: Mutex<ApiServer>,
    endpoints: Option<Endpoints>,
}

#[derive(Default)]
struct ApiServer {
    launch: Option<Launch>,
    child: Option<Child>,
}

impl Own {
    /// Waits for the cluster's turn and creates its state directory; only its keeper runs yet.
    pub(super) fn begin(options: &Options, tools: &Tools) -> anyhow::Result<Self> {
        let since = SystemTime::UNIX_EPOCH.elapsed()?.as_millis();
        // Tests in one process begin in the same millisecond.
        let count = BEGUN.fetch_add(1, Ordering::Relaxed);
        let id = format!("{since:x}-{}-{count}", std::process::id());
        let keeper = Keeper::start(&id, options.nodes > 0)?;
        let workspace = Workspace {
            state: keeper::state_dir(&id)?,
            logs: logs_directory(&id)?,
            tools: tools.clone(),
            family: options.family,
            id,
        };
        Ok(Self {
            workspace,
            keeper: Mutex::new(keeper),
            nodes: Vec::new(),
            children: Mutex::default(),
            api_server: Mutex::default(),
            endpoints: None,
        })
    }

    /// Starts etcd and the API server.
    pub(super) fn start_control(&mut self, options: &Options) -> anyhow::Result<()> {
        let endpoints = if options.nodes == 0 {
            Endpoints::on_loopback()?
        } else {
            Endpoints::in_namespace(self.make_network()?, options.family)
        };
        control::write_pki(&self.workspace, options.nodes, &endpoints.api)?;
        self.spawn(&control::etcd(&self.workspace, &endpoints)?)?;
        let launch = control::api_server(&self.workspace, &endpoints, options)?;
        lock(&self.api_server).launch = Some(launch);
        self.endpoints = Some(endpoints);
        self.start_api_server()
    }

    pub(super) fn start_api_server(&self) -> anyhow::Result<()> {
        let mut api_server = lock(&self.api_server);
        let launch = api_server.launch.as_ref().context("no API server yet")?;
        let child = self.workspace.spawn(launch)?;
        api_server.child = Some(child);
        Ok(())
    }

    pub(super) fn stop_api_server(&self) {
        if let Some(mut child) = lock(&self.api_server).child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Starts the nodes without their kubelets, and imports the images of the system Pods.
    pub(super) fn start_nodes(&mut self, options: &Options) -> anyhow::Result<()> {
        if options.nodes == 0 {
            return Ok(());
        }
        let Place::Network(control) = self.endpoints()?.place else {
            anyhow::bail!("nodes have no network to join");
        };
        for index in 1..=options.nodes {
            let node = Node::start(&self.workspace, control, index, options.nodes)?;
            self.nodes.push(node);
        }
        let archives = addons::images(&self.workspace, options)?;
        std::thread::scope(|scope| {
            let import = |node: &Node| -> anyhow::Result<()> {
                node.wait_for_containerd()?;
                archives.iter().try_for_each(|file| node.import_image(file))
            };
            let imports: Vec<_> = self
                .nodes
                .iter()
                .map(|node| scope.spawn(move || import(node)))
                .collect();
            imports
                .into_iter()
                .try_for_each(|import| match import.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
        })
    }

    /// Starts the components that act on objects; the API server must be ready.
    pub(super) fn start_controllers(&self, options: &Options) -> anyhow::Result<()> {
        let endpoints = self.endpoints()?;
        if options.nodes > 0 || options.controllers {
            self.spawn(&control::controllers(&self.workspace, endpoints, options)?)?;
        }
        if options.nodes > 0 {
            self.spawn(&control::scheduler(&self.workspace, endpoints)?)?;
            // The machine's route to Services. It needs some node's name, but is not part of that node.
            let entry = control::proxy(&self.workspace, "entry-proxy", 1, &endpoints.place)?;
            self.spawn(&entry)?;
        }
        Ok(())
    }

    pub(super) fn start_kubelets(&self, options: &Options) -> anyhow::Result<()> {
        for node in &self.nodes {
            node.start_kubelet(options.static_policies)?;
            if options.fake_gpu.contains(&node.index) {
                node.start_fake_gpu()?;
            }
            if options.fake_dra.contains(&node.index) {
                node.start_fake_dra()?;
            }
        }
        Ok(())
    }

    /// Reaps ended processes, so that none stays a zombie.
    pub(super) fn reap(&self) {
        for child in lock(&self.children).iter_mut() {
            let _ = child.try_wait();
        }
        if let Some(child) = &mut lock(&self.api_server).child {
            let _ = child.try_wait();
        }
        for node in &self.nodes {
            node.reap();
        }
    }

    /// Creates a network namespace with the bridge, and the process that holds it.
    fn make_network(&self) -> anyhow::Result<u32> {
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let holder = Launch::new("network", "unshare", &Place::Host);
        let child = self
            .workspace
            .spawn(&holder.args(["--net", "--", "sleep", "infinity"]))?;
        let control = child.id();
        lock(&self.children).push(child);
        let of_holder = format!("/proc/{control}/ns/net");
        let what = "the control plane has its network namespace";
        try_wait_until(what, Duration::from_secs(10), || {
            let namespace = std::fs::read_link(&of_holder).ok()?;
            (namespace != own).then_some(())
        })
        .with_context(|| self.workspace.log_tail("network"))?;
        network::join_machine(control, self.workspace.family)?;
        Ok(control)
    }

    fn endpoints(&self) -> anyhow::Result<&Endpoints> {
        self.endpoints.as_ref().context("no control plane yet")
    }

    fn spawn(&self, launch: &Launch) -> anyhow::Result<()> {
        let child = self.workspace.spawn(launch)?;
        lock(&self.children).push(child);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shortest time that logs are kept: a younger cluster may be up, or waiting for its turn.
const LOGS_KEPT_FOR: Duration = Duration::from_secs(3 * 3600);

/// Creates a directory for logs next to cargo's output; removes all others except the newest and those too young.
fn logs_directory(id: &str) -> anyhow::Result<PathBuf> {
    let all = target_directory().join("cluster-logs");
    let logs = all.join(id);
    std::fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
    // Names start with the time.
    let mut names: Vec<_> = std::fs::read_dir(&all)?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    names.sort();
    let is_old = |logs: &PathBuf| {
        let written = std::fs::metadata(logs).and_then(|found| found.modified());
        written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LOGS_KEPT_FOR))
    };
    for old in names
        .iter()
        .rev()
        .skip(LOGS_KEPT)
        .filter(|logs| is_old(logs))
    {
        let _ = std::fs::remove_dir_all(old);
    }
    Ok(logs)
}
