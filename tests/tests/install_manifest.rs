//! `manifests/install.yaml`, used as its first lines say: applied with plain `kubectl apply`, twice, and deleted.

use hearth_tests::cluster::{Cluster, Options};
use hearth_tests::root;

#[test]
fn is_applied_twice_and_deleted() {
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let file = root().join("manifests/install.yaml");
    let file = file.to_str().expect("a path");
    let applied = cluster.kubectl(&["apply", "-f", file]);
    assert!(
        applied.contains("inferencedeployments.hearth.dev created"),
        "{applied}"
    );
    let again = cluster.kubectl(&["apply", "-f", file]);
    let changed: Vec<&str> = again
        .lines()
        .filter(|line| !line.ends_with(" unchanged"))
        .collect();
    assert!(changed.is_empty(), "{changed:#?}");
    cluster.kubectl(&["delete", "-f", file, "--wait=false"]);
    assert!(
        cluster
            .get("deployment", "hearth-system", "hearth-operator")
            .is_none()
    );
}
