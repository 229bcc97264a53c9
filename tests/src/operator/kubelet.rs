//! Stand-in for the scheduler and kubelets: Pods of the test's nodes are bound, run, become ready, and end when asked
//! to.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{Config, watcher};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::task::JoinHandle;

/// Time between two steps of a Pod.
const STEP: Duration = Duration::from_millis(30);

/// The stand-in. It stops when dropped.
pub struct Kubelets {
    task: JoinHandle<()>,
}

impl Kubelets {
    /// Starts serving all Pods of the cluster.
    pub fn start(client: Client) -> Self {
        let task = tokio::spawn(async move {
            let config = Config::default().timeout(60);
            let pods = watcher(Api::<Pod>::all(client.clone()), config)
                .default_backoff()
                .applied_objects();
            pods.filter_map(async |pod| pod.ok())
                .for_each_concurrent(64, |pod| {
                    let client = client.clone();
                    async move {
                        // A failed step is retried at the next change, or below.
                        for _ in 0..20 {
                            match serve(&client, &pod).await {
                                Ok(()) => return,
                                Err(_) => tokio::time::sleep(Duration::from_millis(250)).await,
                            }
                        }
                    }
                })
                .await;
        });
        Self { task }
    }
}

impl Drop for Kubelets {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Advances one Pod by one step.
async fn serve(client: &Client, pod: &Pod) -> Result<(), kube::Error> {
    let namespace = pod.namespace().unwrap_or_default();
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
    let Some(now) = pods.get_opt(&pod.name_any()).await? else {
        return Ok(());
    };
    if now.uid() != pod.uid() {
        return Ok(());
    }
    tokio::time::sleep(STEP).await;
    if now.metadata.deletion_timestamp.is_some() {
        let parameters = DeleteParams::default().grace_period(0);
        return pods
            .delete(&pod.name_any(), &parameters)
            .await
            .map(|_| ())
            .or_else(gone);
    }
    let spec = now.spec.clone().unwrap_or_default();
    if spec.node_name.is_none() {
        return bind(client, &now, &namespace).await.or_else(gone);
    }
    let is_running = now
        .status
        .as_ref()
        .is_some_and(|status| status.phase.as_deref() == Some("Running"));
    if is_running {
        return Ok(());
    }
    // A real kubelet waits for volumes too.
    for volume in spec.volumes.iter().flatten() {
        if let Some(secret) = volume.secret.as_ref().and_then(|s| s.secret_name.as_ref()) {
            let secrets: Api<Secret> = Api::namespaced(client.clone(), &namespace);
            secrets.get(secret).await?;
        }
    }
    run(&pods, &now).await.or_else(gone)
}

/// Binds the Pod to the node that its affinity requires.
async fn bind(client: &Client, pod: &Pod, namespace: &str) -> Result<(), kube::Error> {
    let spec = serde_json::to_value(&pod.spec).unwrap_or_default();
    let node = spec.pointer(
        "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchFields/0/values/0",
    );
    let Some(node) = node.and_then(|node| node.as_str()) else {
        return Ok(());
    };
    let name = pod.name_any();
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": pod.uid()},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/binding");
    let body = binding.to_string().into_bytes();
    let request = axum::http::Request::post(path)
        .header("content-type", "application/json")
        .body(body)
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await?;
    Ok(())
}

/// Marks the Pod running and ready, at its own address.
async fn run(pods: &Api<Pod>, pod: &Pod) -> Result<(), kube::Error> {
    let name = pod.name_any();
    let container = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.containers.first())
        .map_or("", |container| container.name.as_str());
    let image = "test";
    let status = json!({
        "metadata": {"uid": pod.uid()},
        "status": {
            "phase": "Running",
            "podIP": address(pod),
            "podIPs": [{"ip": address(pod)}],
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True"},
            ],
            "containerStatuses": [{
                "name": container, "image": image, "imageID": image, "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }],
        },
    });
    pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
        .await?;
    Ok(())
}

/// Derives an address from the Pod's name.
fn address(pod: &Pod) -> String {
    let mut hasher = DefaultHasher::new();
    (pod.namespace(), pod.name_any()).hash(&mut hasher);
    let [a, b, c, ..] = hasher.finish().to_le_bytes();
    format!("10.{a}.{b}.{c}")
}

/// Ignores errors about objects that are gone or have changed.
fn gone(error: kube::Error) -> Result<(), kube::Error> {
    match &error {
        kube::Error::Api(status) if matches!(status.code, 404 | 409) => Ok(()),
        _ => Err(error),
    }
}

/// Creates a Ready node with a profile and labels.
///
/// # Errors
/// The API server's error.
pub async fn make_node(
    client: &Client,
    name: &str,
    cpus: u32,
    memory_bytes: u64,
    labels: &[(&str, &str)],
) -> Result<(), kube::Error> {
    use k8s_openapi::api::core::v1::Node;
    let nodes: Api<Node> = Api::all(client.clone());
    let labels: serde_json::Map<_, _> = labels
        .iter()
        .map(|(key, value)| ((*key).to_owned(), json!(value)))
        .collect();
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    let node: Node = serde_json::from_value(node).unwrap_or_default();
    nodes.create(&PostParams::default(), &node).await?;
    let amounts =
        json!({"cpu": cpus.to_string(), "memory": memory_bytes.to_string(), "pods": "1000"});
    let status = json!({"status": {
        "capacity": amounts, "allocatable": amounts,
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": "",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    }});
    let parameters = PatchParams::default();
    nodes
        .patch_status(name, &parameters, &Patch::Merge(&status))
        .await?;
    // Admission marks new nodes as not ready, and the controller that undoes this is not running.
    let untainted = json!({"spec": {"taints": null}});
    nodes
        .patch(name, &parameters, &Patch::Merge(&untainted))
        .await?;
    make_profile(client, name, cpus, memory_bytes).await
}

async fn make_profile(
    client: &Client,
    name: &str,
    cpus: u32,
    memory_bytes: u64,
) -> Result<(), kube::Error> {
    let all: Vec<u32> = (0..cpus).collect();
    let cpu = |id: &u32| json!({"id": id, "core": id, "numaNode": 0, "maxMhz": 3000, "cacheBytes": 1 << 20});
    let profile = json!({
        "apiVersion": "hearth.dev/v1alpha1", "kind": "NodeProfile", "metadata": {"name": name}, "spec": {},
    });
    let status = json!({
        "status": {
            "node": name,
            "cpus": all.iter().map(cpu).collect::<Vec<_>>(),
            "isa": {"avx2": true},
            "numaNodes": [{"id": 0, "cpus": all, "memoryBytes": memory_bytes, "freeBytes": memory_bytes,
                           "readGbps": 20.0}],
            "memory": {"totalBytes": memory_bytes, "availableBytes": memory_bytes,
                       "readOneThreadGbps": 10.0, "readAllThreadsGbps": 20.0},
            "compute": {"bf16OneThreadGflops": 20.0, "bf16AllThreadsGflops": 80.0,
                        "f32OneThreadGflops": 20.0, "f32AllThreadsGflops": 80.0},
            "measuredAt": "2026-01-01T00:00:00Z",
        },
    });
    let request = axum::http::Request::post("/apis/hearth.dev/v1alpha1/nodeprofiles")
        .header("content-type", "application/json")
        .body(profile.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await?;
    let path = format!("/apis/hearth.dev/v1alpha1/nodeprofiles/{name}/status");
    let request = axum::http::Request::patch(path)
        .header("content-type", "application/merge-patch+json")
        .body(status.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request_text(request).await?;
    Ok(())
}
