//! Checks that every InferenceDeployment in manifests/examples, and every one between ```yaml and ``` in README.md and docs, is accepted as it is, also by `hearth up` unless it is
//! about a cluster.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use hearth_crds::{Target, parse_deployment_for};

#[test]
fn every_example_is_accepted_where_it_is_for() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../manifests/examples");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        // Other objects that accompany deployments in a cluster, such as an autoscaler.
        if !text.contains("\nkind: InferenceDeployment\n") {
            continue;
        }
        let targets = match path.ends_with("warm.yaml") {
            // About deployments that share nodes.
            true => vec![Target::Cluster],
            false => vec![Target::Machine, Target::Cluster],
        };
        for target in targets {
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
            "deepseek-v3-two-gpus.yaml",
            "demo-ring.yaml",
            "demo.yaml",
            "http.yaml",
            "hub.yaml",
            "qwen3-moe-hostpath.yaml",
            "warm.yaml"
        ]
    );
}

/// YAML of a page, block by block.
fn yaml_of(page: &str) -> Vec<&str> {
    let blocks = page.split("```yaml\n").skip(1);
    blocks
        .map(|block| block.split_once("\n```").unwrap().0)
        .collect()
}

#[test]
fn every_deployment_on_a_page_is_accepted_where_it_is_for() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = std::fs::read_dir(root.join("docs")).unwrap();
    let docs = docs.map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|it| it == "md"));
    let mut names = Vec::new();
    for path in pages.chain([root.join("README.md")]) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        for text in yaml_of(&std::fs::read_to_string(&path).unwrap()) {
            // A part of an object's status.
            if name != "README.md" && !text.contains("kind: InferenceDeployment\n") {
                continue;
            }
            let targets = match text.contains("scaling:") {
                true => vec![Target::Cluster],
                false => vec![Target::Machine, Target::Cluster],
            };
            for target in targets {
                if let Err(error) = parse_deployment_for(text, target) {
                    panic!("{name} for {target:?}: {error}\n{text}");
                }
            }
            names.push(name.clone());
        }
    }
    names.sort();
    assert_eq!(
        names,
        [
            "README.md",
            "README.md",
            "deployment.md",
            "deployment.md",
            "rings.md"
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
