//! Agents as processes, the operator, and a real API server that issues and reviews their tokens: an attacker with
//! everything that a compromised node has, at another node's address, is not mistaken for that node.

use std::fs;
use std::net::Ipv4Addr;
use std::process::{Child, Stdio};
use std::time::Duration;

use hearth_tests::cluster::{Cluster, Options, try_wait_until, wait_until};
use hearth_tests::operator::{Operator, Stand};
use hearth_tests::worker;
use serde_json::{Value, json};
use tempfile::TempDir;

const NAMESPACE: &str = "hearth-system";
/// Secret with the first certificate of all agents.
const FIRST: &str = "hearth-agent-tls";
/// Longest wait: an agent measures its node first, which takes seconds, or longer next to other work.
const PATIENCE: Duration = Duration::from_secs(120);

/// An agent process, killed when dropped.
struct Agent {
    child: Child,
    _files: TempDir,
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_node_s_agent_is_who_has_a_token_of_its_pod() {
    let Some(mut stand) = Stand::start_or_skip(&Options::default()) else {
        return;
    };
    stand.stop_kubelets();
    stand.make_namespace(NAMESPACE);
    let cluster = stand.cluster();
    let account = json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "hearth-agent", "namespace": NAMESPACE},
    });
    cluster.apply(&account.to_string());
    // Loopback addresses for this test alone: all agents listen on the same port.
    let [_, x, y, ..] = std::process::id().to_be_bytes().map(|byte| byte.max(1));
    let [a, b] = [2, 3].map(|host| Ipv4Addr::new(127, x ^ 0x40, y, host));
    make_pod(cluster, "a", a);
    make_pod(cluster, "b", b);

    let proxy = stand.proxy();
    let mut operator = Operator::start(proxy.address, NAMESPACE, &["--agents", "true"]);
    let secret = wait_until("the first certificate is there", PATIENCE, || {
        cluster.get("secret", NAMESPACE, FIRST)
    });

    // Node b is compromised: it has the first certificate and its own agent's token, and listens at a's address.
    let impostor = start_agent(
        "a",
        a,
        &secret,
        &token(cluster, "b", Some("hearth-operator")),
    );
    let _b = start_agent(
        "b",
        b,
        &secret,
        &token(cluster, "b", Some("hearth-operator")),
    );
    profile(cluster, &mut operator, "b");
    let words = "another Pod than the agent's of node node-a";
    says(&mut operator, 0, words);
    drop(impostor);
    // Tokens that other programs hold are for the API server, even those of the right Pod.
    let impostor = start_agent("a", a, &secret, &token(cluster, "a", None));
    says(&mut operator, 0, "its token is not valid");
    drop(impostor);
    assert!(cluster.get("nodeprofile", "", "node-a").is_none());

    let of_a = token(cluster, "a", Some("hearth-operator"));
    let genuine = start_agent("a", a, &secret, &of_a);
    profile(cluster, &mut operator, "a");
    drop(genuine);
    // The API server revokes a token along with its Pod.
    cluster.kubectl(&["delete", "nodeprofile", "node-a"]);
    let delete = ["delete", "pod", "agent-a", "-n", NAMESPACE];
    cluster.kubectl(&[&delete[..], &["--grace-period=0", "--force"]].concat());
    make_pod(cluster, "a", a);
    let said = operator.log().len();
    let _old = start_agent("a", a, &secret, &of_a);
    says(&mut operator, said, "its token is not valid");
    assert!(cluster.get("nodeprofile", "", "node-a").is_none());
}

/// Creates a node with its agent's running Pod.
fn make_pod(cluster: &Cluster, name: &str, address: Ipv4Addr) {
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("node-{name}")}});
    cluster.apply(&node.to_string());
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": format!("agent-{name}"), "namespace": NAMESPACE,
            "labels": {"app.kubernetes.io/name": "hearth", "app.kubernetes.io/component": "agent"},
        },
        "spec": {
            "nodeName": format!("node-{name}"), "serviceAccountName": "hearth-agent",
            "containers": [{"name": "agent", "image": "none"}],
        },
    });
    cluster.apply(&pod.to_string());
    let status = json!({"status": {
        "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
    }});
    let pod = format!("pod/agent-{name}");
    let patch = ["patch", &pod, "-n", NAMESPACE, "--subresource=status"];
    cluster.kubectl(
        &[
            &patch[..],
            &["--type=merge", "--patch", &status.to_string()],
        ]
        .concat(),
    );
}

/// Requests a token as the kubelet of the Pod's node does.
fn token(cluster: &Cluster, pod: &str, audience: Option<&str>) -> String {
    let pod = format!("agent-{pod}");
    let found = cluster.get("pod", NAMESPACE, &pod).expect("the Pod");
    let uid = found["metadata"]["uid"].as_str().expect("uid");
    let mut arguments = vec!["create", "token", "hearth-agent", "-n", NAMESPACE];
    arguments.extend(["--bound-object-kind", "Pod", "--bound-object-name", &pod]);
    arguments.extend(["--bound-object-uid", uid]);
    arguments.extend(
        audience
            .iter()
            .flat_map(|audience| ["--audience", audience]),
    );
    cluster.kubectl(&arguments)
}

fn start_agent(node: &str, address: Ipv4Addr, secret: &Value, token: &str) -> Agent {
    let files = tempfile::tempdir().expect("directory");
    let text = |key: &str| {
        let bytes = secret["data"][key].as_str().expect(key);
        let secret: k8s_openapi::ByteString = serde_json::from_value(json!(bytes)).expect(key);
        secret.0
    };
    for key in ["tls.crt", "tls.key", "ca.crt"] {
        fs::write(files.path().join(key), text(key)).expect(key);
    }
    fs::write(files.path().join("token"), token).expect("token");
    let child = worker()
        .args(["agent", "--node", &format!("node-{node}")])
        .args(["--listen", &format!("{address}:9400")])
        .arg("--tls-dir")
        .arg(files.path())
        .arg("--cache-dir")
        .arg(files.path().join("cache"))
        .env("HEARTH_IDENTITY_TOKEN", files.path().join("token"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("agent");
    Agent {
        child,
        _files: files,
    }
}

/// Waits until the operator has stored the node's measurements.
fn profile(cluster: &Cluster, operator: &mut Operator, node: &str) {
    let node = format!("node-{node}");
    let found = try_wait_until(&format!("{node} has a profile"), PATIENCE, || {
        let found = cluster.get("nodeprofile", "", &node)?;
        found["status"].is_object().then_some(found)
    });
    let found = found.unwrap_or_else(|error| panic!("{error}: {}", operator.log()));
    assert_eq!(found["status"]["node"], *node);
}

/// Waits until the operator's log contains `words` after byte `after`.
fn says(operator: &mut Operator, after: usize, words: &str) {
    let said = try_wait_until(&format!("the operator says {words:?}"), PATIENCE, || {
        operator.log()[after..].contains(words).then_some(())
    });
    said.unwrap_or_else(|error| panic!("{error}: {}", operator.log()));
}
