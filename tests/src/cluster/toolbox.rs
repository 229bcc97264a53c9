//! Test Pods with this machine's shell and some of its tools, compliant with Pod Security `restricted`.

use std::path::Path;
use std::time::Duration;

use hearth_release::image::Image;
use hearth_release::layout::Layout;
use serde_json::{Value, json};

use super::Cluster;
use super::wait::wait_until;

/// Image of [`Cluster::import_toolbox`]: its containers take a bash command.
pub const TOOLBOX: &str = "hearth.test/toolbox:1";
/// Namespace of these Pods.
pub const STRICT: &str = "strict";

impl Cluster {
    /// Imports the toolbox image into all nodes and creates the Pods' namespace, which enforces Pod Security
    /// `restricted`.
    ///
    /// # Panics
    /// When a tool is missing.
    pub fn import_toolbox(&self) {
        let mut image = Image::new().entrypoint(&["/bin/bash", "-c"]);
        for program in ["bash", "cat", "getent", "sleep"] {
            let from = Path::new("/usr/bin").join(program);
            let inside = format!("/bin/{program}");
            let with = image.program(&from, &inside);
            image = with.unwrap_or_else(|error| panic!("{program}: {error:#}"));
        }
        let archive = self.own().workspace.file("toolbox.tar");
        Layout::new(TOOLBOX)
            .image(image)
            .write(&archive)
            .unwrap_or_else(|error| panic!("{}: {error:#}", archive.display()));
        self.import_image(&archive);
        let namespace = json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": STRICT,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        });
        self.apply(&namespace.to_string());
    }

    /// Creates a Pod and waits until it is Ready.
    ///
    /// # Panics
    /// When it does not become Ready.
    pub fn run_pod(&self, pod: &Value) {
        // The namespace's service account is created a moment after it.
        wait_until("the Pod is accepted", Duration::from_secs(60), || {
            self.try_apply(&pod.to_string()).ok()
        });
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        let namespace = pod["metadata"]["namespace"].as_str().unwrap_or_default();
        let target = format!("pod/{name}");
        let ready = ["wait", "--for=condition=Ready", "--timeout=60s", &target];
        self.kubectl(&[&ready[..], &["--namespace", namespace]].concat());
    }
}

/// Returns a Pod that runs a bash command and complies with Pod Security `restricted`.
pub fn toolbox_pod(name: &str, command: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": STRICT},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "main",
                "image": TOOLBOX,
                "imagePullPolicy": "Never",
                "args": [command],
                "securityContext": {
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    })
}
