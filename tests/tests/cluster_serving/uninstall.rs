//! Leftovers of an uninstall: nothing, or what it is told to keep.

use hearth_tests::Metrics;
use hearth_tests::cluster::{Cluster, Images, wait_until};
use serde_json::json;

use super::release::{self, PATIENCE, SYSTEM, names, patch, pods, wait_until_settled};
use super::streams::{self, Streams};

pub(super) const AUTHORITY: &str = "hearth-ca";

/// Deployments keep running when the release goes, and running Pods trust the next one: streams between Pods of both
/// releases never break.
pub(super) fn keeps_the_authority_with_the_definitions(cluster: &Cluster, images: &Images) {
    let authority = || {
        let secret = cluster.get("secret", SYSTEM, AUTHORITY);
        secret.unwrap_or_else(|| panic!("no Secret {AUTHORITY}"))["data"].clone()
    };
    let before = authority();
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let running = names(&pods(cluster, "demo", ""));
    release::uninstall(cluster);
    // Objects owned by the release's Deployment go a moment after it.
    wait_until("the authority alone is left", PATIENCE, || {
        let secrets = names(&cluster.list("secrets", SYSTEM, ""));
        let pods = cluster.list("pods", SYSTEM, "");
        (pods.is_empty() && secrets == [AUTHORITY]).then_some(())
    });
    assert_eq!(authority(), before);
    assert_eq!(names(&pods(cluster, "demo", "")), running);
    streams.wait_for(streams::STREAMS);

    release::install(cluster, images, 1);
    patch(cluster, "demo", &json!({"decode": {"replicas": 2}}));
    wait_until_settled(cluster, "demo");
    assert_eq!(authority(), before);
    let now = names(&pods(cluster, "demo", ""));
    assert_eq!(now.len(), running.len() + 1, "{now:?}");
    assert!(
        running.iter().all(|pod| now.contains(pod)),
        "{running:?} {now:?}"
    );
    streams.wait_for(2 * streams::STREAMS);
    println!("{} answers while the release was away", streams.finish());
    // The new worker has certificates of the new release, and the gateway of the old one accepts them.
    let gateway = pods(cluster, "demo", "gateway").remove(0);
    let gateway = gateway["status"]["podIP"].as_str().expect("an address");
    let gateway = format!("http://{gateway}:9402");
    Metrics::wait_for(&gateway, "both decode workers are ready", |metrics| {
        let label = "role=\"decode\"";
        metrics.values("hearth_worker_ready", &[label]) == [1.0, 1.0]
    });
}

/// Lists the objects of namespaced and cluster-scoped kinds by kind, namespace and name.
pub(super) fn kinds_in_use(cluster: &Cluster) -> Vec<String> {
    let kinds = cluster.kubectl(&["api-resources", "--verbs=list", "--output=name"]);
    let passing = [
        "events",
        "events.events.k8s.io",
        "leases.coordination.k8s.io",
    ];
    let measured = |kind: &str| kind.ends_with("metrics.k8s.io");
    let kinds: Vec<&str> = kinds
        .lines()
        .filter(|kind| !passing.contains(kind) && !measured(kind))
        .collect();
    let arguments = [
        "get",
        &kinds.join(","),
        "--all-namespaces",
        "--ignore-not-found",
    ];
    let columns = "--output=custom-columns=K:.kind,NS:.metadata.namespace,N:.metadata.name";
    let all = cluster.kubectl(&[&arguments[..], &["--no-headers", columns]].concat());
    let squeezed = all.lines().map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.join(" ")
    });
    squeezed.collect()
}

pub(super) fn leaves_nothing(cluster: &Cluster, before: &[String]) {
    cluster.kubectl(&["delete", "infd", "--all", "--timeout=60s"]);
    wait_until(
        "all that belonged to the deployment is gone",
        PATIENCE,
        || {
            let kinds = "pods,services,secrets,poddisruptionbudgets,networkpolicies,infp";
            let left = cluster.kubectl(&[
                "get",
                kinds,
                "--selector=hearth.dev/deployment",
                "--output=name",
            ]);
            left.trim().is_empty().then_some(())
        },
    );
    release::uninstall(cluster);
    // The operator's own objects go with its Deployment, including the Lease.
    wait_until("the release's namespace is empty", PATIENCE, || {
        let kinds = "pods,secrets,services,leases,networkpolicies,poddisruptionbudgets,serviceaccounts,roles";
        let arguments = ["get", kinds, "--namespace", SYSTEM, "--output=name"];
        let names = cluster.kubectl(&arguments);
        (!names.contains("hearth")).then_some(())
    });
    cluster.kubectl(&["delete", "namespace", SYSTEM]);
    let mut left = Vec::new();
    let is_gone =
        hearth_tests::cluster::try_wait_until("nothing of ours is left", PATIENCE, || {
            left = kinds_in_use(cluster);
            // Kubernetes keeps its own objects, such as root certificates in ConfigMaps; ours have our name.
            left.retain(|line| !before.contains(line));
            left.retain(|line| {
                ["hearth", "demo", "infd"]
                    .iter()
                    .any(|word| line.contains(word))
            });
            left.is_empty().then_some(())
        });
    assert!(is_gone.is_ok(), "{left:#?}");
}
