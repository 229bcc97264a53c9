//! Checks that `hearth up` accepts every InferenceDeployment in manifests/examples as it is.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use hearth_crds::{Target, parse_deployment_for};

#[test]
fn every_example_is_accepted_on_one_machine_and_in_a_cluster() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../manifests/examples");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        // Other objects that accompany deployments in a cluster, such as an autoscaler.
        if !text.contains("\nkind: InferenceDeployment\n") {
            continue;
        }
        for target in [Target::Machine, Target::Cluster] {
            if let Err(error) = parse_deployment_for(&text, target) {
                panic!("{} for {target:?}: {error}", path.display());
            }
        }
        names.push(path.file_name().unwrap().to_string_lossy().into_owned());
    }
    names.sort();
    assert_eq!(
        names,
        [
            "deepseek-v3-one-gpu.yaml",
            "demo-ring.yaml",
            "demo.yaml",
            "http.yaml",
            "qwen3-moe-hostpath.yaml"
        ]
    );
}

#[test]
fn the_demo_is_what_its_comments_say() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../manifests/examples/demo.yaml");
    let demo =
        parse_deployment_for(&std::fs::read_to_string(path).unwrap(), Target::Machine).unwrap();
    assert_eq!(demo.spec.served_name(), "hearth-demo");
    assert_eq!(demo.spec.model.context_length, Some(2048));
    assert_eq!(
        (
            demo.spec.prefill.planned_replicas(),
            demo.spec.decode.planned_replicas()
        ),
        (1, 1)
    );
    assert_eq!(demo.spec.decode.max_batch, 8);
}
