//! Memory use of kube's reflectors over the objects that the operator watches, each stripped by `modify` of what no
//! decision reads: the baseline for the operator's own tables.
//!
//! Run by `hearth-scale … --then`, with `KUBECONFIG` of a control plane that has the objects; prints one line.

#![allow(clippy::expect_used)]

use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use futures::StreamExt as _;
use hearth_crds::{InferenceDeployment, InferencePlan, NodeProfile};
use k8s_openapi::api::core::v1::{Container, Node, Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::{self, Store};
use kube::runtime::watcher::{Config, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

/// The operator's allocator.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Objects per page of a list, as in the operator's watches.
const PAGE: u32 = 100;
/// Time for memory that a list took to be returned to the system.
const SETTLE: Duration = Duration::from_secs(20);

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    if std::env::var_os("KUBECONFIG").is_none() {
        println!("skipped: there is no KUBECONFIG; hearth-scale … --then runs this");
        return;
    }
    let client = Client::try_default().await.expect("a control plane");
    let mut tasks = JoinSet::new();
    let pods = hold(&mut tasks, &client, strip_pod).await;
    let nodes = hold(&mut tasks, &client, strip_node).await;
    let deployments = hold(&mut tasks, &client, |it: &mut InferenceDeployment| {
        it.managed_fields_mut().clear();
    })
    .await;
    let plans = hold(&mut tasks, &client, |it: &mut InferencePlan| {
        it.managed_fields_mut().clear();
    })
    .await;
    let profiles = hold(&mut tasks, &client, |it: &mut NodeProfile| {
        it.managed_fields_mut().clear();
    })
    .await;
    let services = hold(&mut tasks, &client, |it: &mut Service| {
        it.managed_fields_mut().clear();
    })
    .await;
    let secrets = hold(&mut tasks, &client, |it: &mut Secret| {
        it.managed_fields_mut().clear();
        it.data = None;
    })
    .await;
    let budgets = hold(&mut tasks, &client, |it: &mut PodDisruptionBudget| {
        it.managed_fields_mut().clear();
        it.status = None;
    })
    .await;
    let policies = hold(&mut tasks, &client, |it: &mut NetworkPolicy| {
        it.managed_fields_mut().clear();
    })
    .await;
    tokio::time::sleep(SETTLE).await;
    println!(
        "kube's reflectors of {} Pods, {} nodes, {} profiles, {} deployments, {} plans, {} Services, {} Secrets, \
         {} budgets, {} policies: resident {:.1} MiB, at most {:.1} MiB",
        pods.len(),
        nodes.len(),
        profiles.len(),
        deployments.len(),
        plans.len(),
        services.len(),
        secrets.len(),
        budgets.len(),
        policies.len(),
        resident_mib("VmRSS:"),
        resident_mib("VmHWM:"),
    );
}

/// Starts a reflector of all objects of a kind and returns its store once it has listed them.
async fn hold<K>(
    tasks: &mut JoinSet<()>,
    client: &Client,
    strip: impl Fn(&mut K) + Send + 'static,
) -> Store<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default + Eq + Hash + Clone + Debug + Send + Sync + Unpin,
{
    let (store, writer) = reflector::store::<K>();
    let config = Config::default().page_size(PAGE);
    let events = watcher(Api::<K>::all(client.clone()), config)
        .default_backoff()
        .modify(strip)
        .reflect(writer);
    tasks.spawn(events.for_each(|_| async {}));
    store.wait_until_ready().await.expect("a first list");
    store
}

/// Strips a Pod to what the ledger reads; Pods of deployments also keep what a rollout reads.
fn strip_pod(pod: &mut Pod) {
    pod.managed_fields_mut().clear();
    let is_own = pod.labels().contains_key("hearth.dev/deployment");
    if !is_own {
        pod.metadata.labels = None;
        pod.metadata.annotations = None;
        pod.metadata.owner_references = None;
    }
    if let Some(spec) = &mut pod.spec {
        for container in &mut spec.containers {
            *container = Container {
                name: std::mem::take(&mut container.name),
                resources: container.resources.take(),
                ..Container::default()
            };
        }
        spec.volumes = None;
        spec.tolerations = None;
        spec.service_account = None;
        spec.service_account_name = None;
        spec.scheduler_name = None;
        spec.dns_policy = None;
        spec.security_context = None;
    }
    if let Some(status) = pod.status.as_mut().filter(|_| !is_own) {
        status.conditions = None;
        status.container_statuses = None;
    }
}

fn strip_node(node: &mut Node) {
    node.managed_fields_mut().clear();
    if let Some(status) = &mut node.status {
        status.images = None;
        status.volumes_attached = None;
        status.volumes_in_use = None;
    }
}

/// Reads a value of `/proc/self/status`, in MiB.
fn resident_mib(name: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("status");
    let line = text
        .lines()
        .find(|line| line.starts_with(name))
        .expect("a line");
    let kib = line.split_whitespace().nth(1).expect("a number");
    kib.parse::<f64>().expect("a number") / 1024.0
}
