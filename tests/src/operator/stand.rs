//! Test fixture of the operator's tests.

use std::time::Duration;

use kube::Client;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::dump;
use super::kubelet::Kubelets;
use super::proxy::Proxy;
use crate::cluster::{Cluster, Options, wait_until};
use crate::programs::{hearth, run};

/// Kinds that an operator creates in the namespace of a deployment, as paths.
const KINDS: [&str; 8] = [
    "apis/hearth.dev/v1alpha1/NS/inferencedeployments",
    "apis/hearth.dev/v1alpha1/NS/inferenceplans",
    "apis/hearth.dev/v1alpha1/NS/inferencepoolscalers",
    "api/v1/NS/pods",
    "api/v1/NS/services",
    "api/v1/NS/secrets",
    "apis/policy/v1/NS/poddisruptionbudgets",
    "apis/networking.k8s.io/v1/NS/networkpolicies",
];

/// Longest time that a list may be refused.
const LIST_PATIENCE: Duration = Duration::from_secs(20);

/// A control plane with Hearth's definitions, a client of it, and stand-ins for kubelets.
pub struct Stand {
    /// Dropped first: it talks to the cluster.
    kubelets: Option<Kubelets>,
    runtime: Runtime,
    client: Client,
    cluster: Cluster,
}

impl Stand {
    /// Starts it, or reports why it is unavailable.
    ///
    /// # Panics
    /// When it should come up but does not.
    pub fn start_or_skip(options: &Options) -> Option<Self> {
        let cluster = Cluster::start_or_skip(options)?;
        let (code, crds, errors) = run(hearth().arg("crd"));
        assert_eq!(code, 0, "{errors}");
        cluster.apply(&crds);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        let runtime = runtime.unwrap_or_else(|error| panic!("no runtime: {error}"));
        let client = runtime.block_on(cluster.client());
        let kubelets = runtime.block_on(async { Kubelets::start(client.clone()) });
        let stand = Self {
            kubelets: Some(kubelets),
            runtime,
            client,
            cluster,
        };
        wait_until("Hearth's kinds are served", Duration::from_secs(30), || {
            let path = "/apis/hearth.dev/v1alpha1/inferencedeployments";
            stand.try_get(path).map(|_| ())
        });
        Some(stand)
    }

    /// Returns the control plane.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns a client with all rights.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a future to completion.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Starts a proxy in front of the API server.
    pub fn proxy(&self) -> Proxy {
        self.runtime.block_on(Proxy::start(self.client.clone()))
    }

    /// Stops the stand-ins for kubelets: Pods stay as they are.
    pub fn stop_kubelets(&mut self) {
        self.kubelets = None;
    }

    /// Creates a namespace.
    ///
    /// # Panics
    /// When the API server refuses it.
    pub fn make_namespace(&self, name: &str) {
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        self.post("/api/v1/namespaces", &object);
    }

    /// Creates a node with a profile.
    ///
    /// # Panics
    /// When the API server refuses it.
    pub fn make_node(&self, name: &str, cpus: u32, memory_bytes: u64, labels: &[(&str, &str)]) {
        let made = super::kubelet::make_node(&self.client, name, cpus, memory_bytes, labels);
        let made = self.block_on(made);
        made.unwrap_or_else(|error| panic!("node {name}: {error}"));
    }

    /// Creates a deployment of the built-in model with a spec.
    ///
    /// # Panics
    /// When the API server refuses it.
    pub fn make_deployment(&self, namespace: &str, name: &str, spec: &Value) {
        let object = json!({
            "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": name, "namespace": namespace}, "spec": spec,
        });
        let path = format!("/apis/hearth.dev/v1alpha1/namespaces/{namespace}/inferencedeployments");
        self.post(&path, &object);
    }

    /// Merges fields into a deployment, or with `subresource` `/scale` into its scale.
    ///
    /// # Panics
    /// When the API server refuses it.
    pub fn patch_deployment(&self, namespace: &str, name: &str, subresource: &str, fields: &Value) {
        let path = format!("{}{subresource}", deployment_path(namespace, name));
        let request = http::Request::patch(&path)
            .header("content-type", "application/merge-patch+json")
            .body(fields.to_string().into_bytes());
        self.send(request, &path);
    }

    /// Deletes a deployment, as `kubectl delete` does.
    ///
    /// # Panics
    /// When the API server refuses it.
    pub fn delete_deployment(&self, namespace: &str, name: &str) {
        let path = deployment_path(namespace, name);
        let request = http::Request::delete(&path).body(Vec::new());
        self.send(request, &path);
    }

    /// Returns a deployment as it is now.
    pub fn deployment(&self, namespace: &str, name: &str) -> Option<Value> {
        self.try_get(&deployment_path(namespace, name))
    }

    /// Returns the object at an API path.
    pub fn try_get(&self, path: &str) -> Option<Value> {
        let request = http::Request::get(path).body(Vec::new()).ok()?;
        let answer = self.block_on(self.client.request_text(request));
        serde_json::from_str(&answer.ok()?).ok()
    }

    /// Returns all objects in a namespace, as the API server has them.
    ///
    /// # Panics
    /// When they cannot be listed.
    pub fn objects(&self, namespace: &str) -> Vec<Value> {
        let mut all = Vec::new();
        for kind in KINDS {
            let path = format!(
                "/{}",
                kind.replace("NS", &format!("namespaces/{namespace}"))
            );
            // Kinds that were just defined are not served at once, nor is anything by an API server that has just come
            // back.
            let mut list = wait_until(&format!("{path} can be listed"), LIST_PATIENCE, || {
                self.try_get(&path)
            });
            let plural = kind.rsplit('/').next().unwrap_or(kind);
            if let Value::Array(items) = list["items"].take() {
                for mut item in items {
                    item["kind"] = plural.into();
                    all.push(item);
                }
            }
        }
        all
    }

    /// Returns all objects in a namespace without values that differ between runs: see [`dump::normal`].
    pub fn dump(&self, namespace: &str) -> String {
        dump::normal(namespace, self.objects(namespace))
    }

    fn post(&self, path: &str, object: &Value) {
        let request = http::Request::post(path)
            .header("content-type", "application/json")
            .body(object.to_string().into_bytes());
        self.send(request, path);
    }

    fn send(&self, request: http::Result<http::Request<Vec<u8>>>, path: &str) {
        let request = request.unwrap_or_else(|error| panic!("{path}: {error}"));
        let answer = self.block_on(self.client.request_text(request));
        answer.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

/// Whether a deployment is ready in its newest generation and nothing is in progress.
pub fn is_settled(deployment: &Value) -> bool {
    let status = &deployment["status"];
    let holds = |name: &str, value: &str| {
        let conditions = status["conditions"].as_array();
        conditions
            .into_iter()
            .flatten()
            .any(|c| c["type"] == name && c["status"] == value)
    };
    status["observedGeneration"] == deployment["metadata"]["generation"]
        && holds("Ready", "True")
        && holds("Progressing", "False")
        && holds("Degraded", "False")
}

fn deployment_path(namespace: &str, name: &str) -> String {
    format!("/apis/hearth.dev/v1alpha1/namespaces/{namespace}/inferencedeployments/{name}")
}
