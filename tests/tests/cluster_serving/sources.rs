//! Models from a claim and from an archive behind a URL, on nodes that have neither.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use hearth_tests::cluster::{Cluster, HOST_ADDRESS, condition, wait_until};
use hearth_tests::{chat_body, chat_stream, copy_of_demo, root};
use serde_json::{Value, json};

use super::release::{PATIENCE, deployment, infd, pods, wait_until_settled};
use super::server::hub::HubServer;
use super::server::{Fault, FileServer, sha256};
use super::streams;

pub(super) fn each_serves(cluster: &Cluster) {
    a_claim_serves(cluster);
    an_archive_is_fetched_and_serves(cluster);
    a_secret_opens_an_archive_and_is_seen_nowhere(cluster);
    a_repository_of_a_mirror_is_fetched_and_serves(cluster);
}

fn a_claim_serves(cluster: &Cluster) {
    let directory = super::open_directory();
    copy_of_demo(directory.path());
    claim(cluster, "models", directory.path());
    let source = json!({"persistentVolumeClaim": {"claimName": "models", "path": "model"}});
    serves(cluster, "claimed", &source);
    cluster.kubectl(&["delete", "pvc/models", "pv/models"]);
}

/// Creates a claim with its volume, available on every node like one over NFS: the nodes share the machine's disk.
pub(super) fn claim(cluster: &Cluster, name: &str, directory: &Path) {
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadOnlyMany"], "storageClassName": "",
            "hostPath": {"path": directory},
            "claimRef": {"namespace": "default", "name": name},
        },
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": name,
                 "resources": {"requests": {"storage": "1Gi"}}},
    });
    cluster.apply(&volume.to_string());
    cluster.apply(&claim.to_string());
}

/// The archive arrives slowly and breaks off once. Only the node that the plan selects then has it.
fn an_archive_is_fetched_and_serves(cluster: &Cluster) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let mut archive = tar::Builder::new(Vec::new());
    let model = root().join("models/hearth-demo");
    archive.append_dir_all("hearth-demo", model).expect("tar");
    let archive = archive.into_inner().expect("tar");
    let server = runtime.block_on(FileServer::start_at(HOST_ADDRESS, archive.clone()));
    server.pace(Duration::from_millis(4));
    server.faults([Fault::CutAfter(archive.len() / 2)]);
    let source = json!({"http": {"url": server.url(), "sha256": sha256(&archive)}});
    let mut percents = Vec::new();
    cluster.apply(&deployment("fetched", json!({"model": {"source": source}})).to_string());
    wait_until("the archive is there", PATIENCE, || {
        let found = infd(cluster, "fetched");
        let model = &found["status"]["model"];
        percents.extend(model["percent"].as_u64());
        (condition(&found, "ModelReady") == Some("True")).then(|| {
            assert_eq!(model["downloadedBytes"], model["totalBytes"], "{model}");
        })
    });
    assert!(percents.is_sorted(), "{percents:?}");
    // The server is private, and it serves an archive.
    assert!(
        percents.iter().any(|percent| (1..100).contains(percent)),
        "{percents:?}"
    );
    assert!(server.seen().iter().any(|seen| seen.range.is_some()));
    wait_until_settled(cluster, "fetched");
    let workers: BTreeSet<String> = pods(cluster, "fetched", "")
        .iter()
        .filter(|pod| pod["metadata"]["labels"]["hearth.dev/role"] != "gateway")
        .map(|pod| pod["spec"]["nodeName"].to_string())
        .collect();
    let kept = kept_models(cluster);
    assert_eq!(kept.len(), workers.len(), "{kept:?} for {workers:?}");
    nodes_say_what_they_store(cluster, &server.url(), &workers);
    serves(cluster, "fetched", &source);
    // `agent.keepModels` is an hour here, until it is set to zero.
    std::thread::sleep(Duration::from_secs(10));
    assert_eq!(kept_models(cluster), kept, "gone with its last deployment");
    super::release::upgrade(cluster, "agent.keepModels=0");
    wait_until("what nobody names is removed", PATIENCE, || {
        kept_models(cluster).is_empty().then_some(())
    });
}

/// Profiles are read once a minute.
fn nodes_say_what_they_store(cluster: &Cluster, url: &str, nodes: &BTreeSet<String>) {
    wait_until("the nodes' profiles have the model", PATIENCE, || {
        let profiles = cluster.list("nodeprofiles", "", "");
        let has_it = |profile: &&Value| {
            let models = profile["status"]["models"].as_array();
            let mut models = models.into_iter().flatten();
            let is_used = |model: &Value| {
                model["source"] == url
                    && model["inUse"] == true
                    && model["bytes"].as_u64() > Some(1 << 20)
            };
            models.any(is_used)
        };
        let with_it = profiles.iter().filter(has_it);
        let names = with_it.map(|profile| profile["metadata"]["name"].to_string());
        (names.collect::<BTreeSet<_>>() == *nodes).then_some(())
    });
    let directory = tempfile::tempdir().expect("directory");
    let table = hearth_tests::run(cluster.plugin_command(directory.path()).arg("models")).1;
    for node in nodes {
        let told = format!("{} (in use)", node.trim_matches('"'));
        assert!(table.contains(&told), "no {told} in {table}");
    }
}

/// Checks that neither a token nor a signature in the URL is in any object except the user's own, nor in a log.
fn a_secret_opens_an_archive_and_is_seen_nowhere(cluster: &Cluster) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let mut archive = tar::Builder::new(Vec::new());
    let model = root().join("models/hearth-demo");
    archive.append_dir_all("hearth-demo", model).expect("tar");
    let archive = archive.into_inner().expect("tar");
    let server = runtime.block_on(FileServer::start_at(HOST_ADDRESS, archive.clone()));
    server.open_by("Bearer hush-token");
    let url = format!("{}?signature=hush-query", server.url());
    let http = json!({"url": url, "sha256": sha256(&archive), "secretRef": {"name": "nas"}});
    let source = json!({ "http": http });
    let opened = deployment("opened", json!({"model": {"source": source}}));
    cluster.apply(&opened.to_string());
    wait_until("the Secret is missed", PATIENCE, || {
        let (reason, message) = super::release::said(&infd(cluster, "opened"), "ModelReady");
        (reason == "DownloadFailed" && message.contains("Secret default/nas")).then_some(())
    });
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "nas", "namespace": "default"},
        "stringData": {"token": "hush-token"},
    });
    cluster.apply(&secret.to_string());
    wait_until_settled(cluster, "opened");
    assert!(
        server
            .seen()
            .iter()
            .all(|seen| seen.authorization.as_deref() == Some("Bearer hush-token"))
    );

    let kinds = "inferenceplans,inferencepoolscalers,nodeprofiles,pods,services,networkpolicies,poddisruptionbudgets,\
                 configmaps,events,events.events.k8s.io,leases";
    let all = cluster.kubectl(&["get", kinds, "--all-namespaces", "--output=json"]);
    assert!(all.contains("opened-decode-0"));
    let status = infd(cluster, "opened")["status"].to_string();
    let mut told = vec![all, status];
    for component in ["operator", "agent"] {
        let selector = format!("app.kubernetes.io/component={component}");
        for pod in cluster.list("pods", super::release::SYSTEM, &selector) {
            let name = pod["metadata"]["name"].as_str().expect("a name");
            told.push(cluster.pod_logs(super::release::SYSTEM, name));
        }
    }
    for text in told {
        let found = text
            .find("hush")
            .map(|at| &text[at.saturating_sub(200)..at + 20]);
        assert_eq!(found, None);
    }
    // Knowing the URL and the digest from another source does not give access.
    let plain = json!({"url": server.url(), "sha256": sha256(&archive)});
    let other = deployment("other", json!({"model": {"source": {"http": plain}}}));
    cluster.apply(&other.to_string());
    wait_until("the other is refused", PATIENCE, || {
        let (reason, message) = super::release::said(&infd(cluster, "other"), "ModelReady");
        (reason == "DownloadFailed" && message.contains("log of this node's agent")).then_some(())
    });
    for name in ["opened", "other"] {
        cluster.kubectl(&["delete", "infd", name]);
    }
    cluster.kubectl(&["delete", "secret", "nas"]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, "opened", "").is_empty().then_some(())
    });
}

/// The mirror is the chart's, and only it gets the token. What arrives is told, and neither the death of the node's agent nor a hub that
/// is away for a while nor a broken connection has any of it fetched again.
fn a_repository_of_a_mirror_is_fetched_and_serves(cluster: &Cluster) {
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let entries = std::fs::read_dir(root().join("models/hearth-demo")).expect("the demo model");
    let paths = entries.flatten().map(|entry| entry.path());
    let files: Vec<(String, Vec<u8>)> = paths
        .filter(|path| path.is_file())
        .map(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            let bytes = std::fs::read(&path).expect("a file");
            (name.expect("a name").to_owned(), bytes)
        })
        .collect();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (&**name, &**bytes))
        .collect();
    let hub = runtime.block_on(HubServer::start_at(HOST_ADDRESS, "acme/demo", &files));
    hub.open_by("Bearer hush-token");
    hub.pace(Duration::from_millis(40));
    super::release::upgrade(cluster, &format!("agent.fetch.hubEndpoint={}", hub.url()));
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub", "namespace": "default"},
        "stringData": {"token": "hush-token"},
    });
    cluster.apply(&secret.to_string());
    let source = json!({"huggingFace": {"repo": "acme/demo", "tokenSecretRef": {"name": "hub"}}});
    cluster.apply(&deployment("mirrored", json!({"model": {"source": source}})).to_string());
    wait_until("its progress is told", PATIENCE, || {
        shown_percent(cluster).filter(|percent| *percent >= 5)
    });
    let mut breaks = vec![the_agent_is_killed(cluster, &hub)];
    breaks.push(the_hub_is_away(cluster, &hub, &runtime));
    nothing_was_sent_twice(cluster, &hub, &files);
    breaks.push(the_agent_is_replaced(cluster, &hub));
    wait_until("the repository is there", PATIENCE, || {
        let found = infd(cluster, "mirrored");
        (condition(&found, "ModelReady") == Some("True")).then_some(())
    });
    let starts = starts_bytes(&hub, WEIGHTS);
    for (requests, bytes) in breaks {
        let later = &starts[requests..];
        let goes_on = !later.is_empty() && later.iter().all(|start| *start >= bytes);
        assert!(goes_on, "{bytes} had arrived, then asked from {later:?}");
    }
    wait_until_settled(cluster, "mirrored");
    let asked = hub.asked();
    let token = |is_large: bool| {
        let those = asked.iter().filter(move |asked| asked.is_large == is_large);
        let tokens: BTreeSet<_> = those.map(|it| it.headers.authorization.clone()).collect();
        tokens.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(token(true), [None]);
    assert_eq!(token(false), [Some("Bearer hush-token".to_owned())]);
    a_second_node_takes_it_from_the_first(cluster, &hub, &source);
    serves(cluster, "mirrored", &source);
    cluster.kubectl(&["delete", "secret", "hub"]);
}

/// The demo's weights.
const WEIGHTS: &str = "model.safetensors";

/// Percentage that `kubectl get` shows of the download, if it shows a rate and a time as well.
fn shown_percent(cluster: &Cluster) -> Option<u64> {
    let table = cluster.kubectl(&["get", "infd", "mirrored"]);
    let (before, after) = table.lines().nth(1)?.split_once(" %, ")?;
    let percent = before.split_whitespace().next_back()?;
    after.contains("/s, ").then_some(())?;
    after.contains(" left").then(|| percent.parse().ok())?
}

/// How much there is now of the download, in percent. It is told as under way.
fn told_percent(cluster: &Cluster) -> u64 {
    let found = infd(cluster, "mirrored");
    let (reason, message) = super::release::said(&found, "ModelReady");
    assert_eq!(reason, "Downloading", "{message}");
    let percent = found["status"]["model"]["percent"].as_u64();
    percent.unwrap_or_else(|| panic!("no percentage: {message}"))
}

/// Waits until more is shown than there was before a break. It never becomes less.
fn goes_on_after(cluster: &Cluster, what: &str, before: u64) {
    let mut last = before;
    wait_until(what, PATIENCE, || {
        let now = told_percent(cluster);
        assert!(now >= last, "{now} % after {last} %");
        last = now;
        shown_percent(cluster).filter(|shown| *shown > before)
    });
}

/// The node that downloads, how often the hub was asked for the weights, and how many bytes of them are there.
fn downloading(cluster: &Cluster, hub: &HubServer) -> (String, (usize, u64)) {
    let requests = starts_bytes(hub, WEIGHTS).len();
    let nodes = super::release::names(&cluster.list("nodes", "", ""));
    let parts = nodes
        .into_iter()
        .map(|node| (part_bytes(cluster, &node), node));
    let (bytes, node) = parts.max().expect("a node");
    assert!(bytes > 0, "no node downloads");
    (node, (requests, bytes))
}

/// Kills the process of the agent that downloads: the next one in its Pod goes on.
fn the_agent_is_killed(cluster: &Cluster, hub: &HubServer) -> (usize, u64) {
    let (node, at) = downloading(cluster, hub);
    let agent = agent_of(cluster, &node).expect("an agent");
    let before = told_percent(cluster);
    assert!(cluster.kill_pod_processes(super::release::SYSTEM, &agent) > 0);
    goes_on_after(cluster, "the next agent goes on", before);
    wait_until("the Pod of the agent is ready again", PATIENCE, || {
        agent_of(cluster, &node).filter(|name| *name == agent)
    });
    let pod = cluster.get("pod", super::release::SYSTEM, &agent);
    let restarts = &pod.expect("a Pod")["status"]["containerStatuses"][0]["restartCount"];
    assert_eq!(*restarts, 1);
    at
}

/// Nobody listens at the hub's address for some seconds.
fn the_hub_is_away(
    cluster: &Cluster,
    hub: &HubServer,
    runtime: &tokio::runtime::Runtime,
) -> (usize, u64) {
    let (_, at) = downloading(cluster, hub);
    hub.go_away();
    let before = told_percent(cluster);
    std::thread::sleep(Duration::from_secs(3));
    told_percent(cluster);
    runtime.block_on(hub.come_back());
    goes_on_after(cluster, "the hub is back", before);
    at
}

/// Checks what the hub has sent: each break may have cost what was on its way.
fn nothing_was_sent_twice(cluster: &Cluster, hub: &HubServer, files: &[(&str, &[u8])]) {
    let sent_bytes = hub.sent_bytes() as u64;
    let (_, (_, bytes)) = downloading(cluster, hub);
    let others = files.iter().filter(|(name, _)| *name != WEIGHTS);
    let others_bytes: usize = others.map(|(_, bytes)| bytes.len()).sum();
    let most = bytes + others_bytes as u64 + (256 << 10);
    assert!(sent_bytes <= most, "{sent_bytes} sent, {bytes} are there");
}

/// Deletes the Pod of the agent that downloads, and has the connection of the one that goes on break.
fn the_agent_is_replaced(cluster: &Cluster, hub: &HubServer) -> (usize, u64) {
    let (node, at) = downloading(cluster, hub);
    hub.pace(Duration::from_millis(4));
    hub.file_faults([Fault::CutAfter(1_000_000)]);
    let agent = agent_of(cluster, &node).expect("an agent");
    let kill = ["delete", "pod", &agent, "--grace-period=0", "--force"];
    cluster.kubectl(&[&kill[..], &["--namespace", super::release::SYSTEM]].concat());
    at
}

/// Bytes of the file that is being downloaded on a node.
fn part_bytes(cluster: &Cluster, node: &str) -> u64 {
    let count = "cat /var/lib/hearth/partial/*.part | wc -c";
    let counted = cluster.node_named(node).exec(&["sh", "-c", count]);
    let counted = String::from_utf8_lossy(&counted.stdout);
    counted.trim().parse().expect("a number of bytes")
}

/// The first bytes that the hub was asked for of a large file, in order of the requests.
fn starts_bytes(hub: &HubServer, name: &str) -> Vec<u64> {
    let asked = hub.asked().into_iter();
    let of_file = asked.filter(|asked| asked.is_large && asked.path.ends_with(name));
    let start = |range: &str| {
        range
            .strip_prefix("bytes=")?
            .strip_suffix('-')?
            .parse()
            .ok()
    };
    of_file
        .map(|asked| match asked.headers.range {
            Some(range) => start(&range).unwrap_or_else(|| panic!("{range}")),
            None => 0,
        })
        .collect()
}

/// A deployment on the node that has no copy gets one without the hub, which is only asked for its list, as soon as the node's
/// disk has room for it.
fn a_second_node_takes_it_from_the_first(cluster: &Cluster, hub: &HubServer, source: &Value) {
    let large = || {
        let asked = hub.asked().into_iter();
        let large = asked.filter(|asked| asked.is_large);
        large.map(|asked| asked.path).collect::<Vec<_>>()
    };
    let lists = || {
        let asked = hub.asked();
        let lists = asked.iter().filter(|asked| asked.path.starts_with("/api/"));
        lists.count()
    };
    let decode = &pods(cluster, "mirrored", "decode")[0];
    let first = decode["spec"]["nodeName"].as_str().expect("a node");
    let nodes = super::release::names(&cluster.list("nodes", "", ""));
    let second = nodes.iter().find(|node| *node != first).expect("a node");
    let (before, lists_before) = (large(), lists());
    let disk = SmallDisk::new(cluster, second);
    let beside = json!({
        "model": {"source": source, "servedName": "hearth-demo"},
        "placement": {"nodeSelector": {"kubernetes.io/hostname": second}},
    });
    cluster.apply(&deployment("beside", beside).to_string());
    wait_until("the full disk is told", PATIENCE, || {
        let (_, message) = super::release::said(&infd(cluster, "beside"), "ModelReady");
        let words = [&**second, "has no room for", "free space on that disk"];
        words
            .iter()
            .all(|part| message.contains(part))
            .then_some(())
    });
    disk.grow();
    wait_until_settled(cluster, "beside");
    let decode = &pods(cluster, "beside", "decode")[0];
    assert_eq!(decode["spec"]["nodeName"], **second);
    assert_eq!(large(), before, "the hub gave weights again");
    assert!(
        lists() > lists_before,
        "the hub was not asked who may have it"
    );
    let taker = format!("the agent of node {second} has read what it wanted");
    let agent = agent_of(cluster, first).expect("an agent");
    let logs = cluster.pod_logs(super::release::SYSTEM, &agent);
    assert!(logs.contains(&taker), "{first}: {logs}");
    cluster.kubectl(&["delete", "infd", "beside"]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, "beside", "").is_empty().then_some(())
    });
    disk.remove();
}

/// Name of a node's agent that is ready.
fn agent_of(cluster: &Cluster, node: &str) -> Option<String> {
    let selector = "app.kubernetes.io/component=agent";
    let agents = cluster.list("pods", super::release::SYSTEM, selector);
    let is_here = |pod: &&Value| {
        pod["spec"]["nodeName"] == node
            && pod["metadata"]["deletionTimestamp"].is_null()
            && condition(pod, "Ready") == Some("True")
    };
    let agent = agents.iter().find(is_here)?;
    agent["metadata"]["name"].as_str().map(str::to_owned)
}

/// A disk of its own for the models of a node, without room for any.
struct SmallDisk<'a> {
    cluster: &'a Cluster,
    node: &'a str,
}

impl<'a> SmallDisk<'a> {
    const PLACE: &'static str = "/var/lib/hearth";

    fn new(cluster: &'a Cluster, node: &'a str) -> Self {
        let disk = Self { cluster, node };
        disk.run(&[
            "mount",
            "-t",
            "tmpfs",
            "-o",
            "size=4m",
            "models",
            Self::PLACE,
        ]);
        disk.replace_agent();
        disk
    }

    /// Has room for the demo, beside what always stays free.
    fn grow(&self) {
        self.run(&["mount", "-o", "remount,size=1g", Self::PLACE]);
    }

    fn remove(self) {
        self.run(&["umount", "--lazy", Self::PLACE]);
        self.replace_agent();
    }

    fn run(&self, command: &[&str]) {
        let done = self.cluster.node_named(self.node).exec(command);
        assert!(done.status.success(), "{command:?}: {done:?}");
    }

    /// Only Pods that start later see what was mounted.
    fn replace_agent(&self) {
        let before = agent_of(self.cluster, self.node).expect("an agent");
        self.cluster.kubectl(&[
            "delete",
            "pod",
            &before,
            "--namespace",
            super::release::SYSTEM,
        ]);
        wait_until("the node has another agent", PATIENCE, || {
            agent_of(self.cluster, self.node).filter(|name| *name != before)
        });
    }
}

/// Returns the models in the agents' directories.
fn kept_models(cluster: &Cluster) -> Vec<String> {
    let list = "ls /var/lib/hearth/models | grep -v '^\\.' || true";
    let nodes = cluster.list("nodes", "", "");
    let of_node = |node: &Value| {
        let node = cluster.node_named(node["metadata"]["name"].as_str().unwrap_or_default());
        let found = node.exec(&["sh", "-c", list]);
        String::from_utf8_lossy(&found.stdout)
            .lines()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    nodes.iter().flat_map(of_node).collect()
}

/// Applies a deployment with this source, asks it a question, and deletes it.
pub(super) fn serves(cluster: &Cluster, name: &str, source: &Value) {
    let model = json!({"source": source, "servedName": "hearth-demo"});
    cluster.apply(&deployment(name, json!({"model": model})).to_string());
    wait_until_settled(cluster, name);
    let known = &streams::known()[0];
    let reach = cluster.reach("default", name, 80);
    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let body = chat_body("hearth-demo", &known.question, 200);
    let answer = runtime.block_on(chat_stream(&reach.v1(), &body, |_, _| {}));
    assert_eq!(answer.expect("an answer").text.trim(), known.answer);
    cluster.kubectl(&["delete", "infd", name]);
    wait_until("its Pods are gone", PATIENCE, || {
        pods(cluster, name, "").is_empty().then_some(())
    });
}
