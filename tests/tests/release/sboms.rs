//! What the SBOMs say, against `Cargo.lock` and the crates' own manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use hearth_tests::{root, run};
use serde_json::Value;

use super::{release, text};

#[test]
fn every_package_of_a_program_is_listed_with_its_checksum() {
    let directory = tempfile::tempdir().expect("directory");
    let source = root();
    release(&[
        "sbom",
        "--source",
        text(&source),
        "--output",
        text(directory.path()),
        "--created",
        "86400",
    ]);
    let checksums = checksums();
    let needs = direct_needs();
    for (program, package) in [
        ("hearth", "hearth-operator"),
        ("hearth-worker", "hearth-worker"),
    ] {
        let bill = bill(&directory.path().join(format!("{program}.cdx.json")));
        assert_eq!(bill["specVersion"], "1.5");
        assert_eq!(bill["metadata"]["timestamp"], "1970-01-02T00:00:00Z");
        assert_eq!(bill["metadata"]["component"]["name"], program);
        let components = bill["components"].as_array().expect("components");
        let mut listed = BTreeSet::from([package.to_owned()]);
        for component in components {
            let field = |name: &str| component[name].as_str().unwrap_or_default().to_owned();
            let id = (field("name"), field("version"));
            let found = component["hashes"][0]["content"].as_str();
            assert_eq!(found, checksums[&id].as_deref(), "{id:?}");
            listed.insert(id.0);
        }
        // Beginning with the program's own crate, each of ours brings all that it needs.
        let ours = listed.iter().filter_map(|name| needs.get(name));
        for need in ours.flatten() {
            assert!(listed.contains(need), "{need} is missing in {program}");
        }
        for foreign in ["hearth-tests", "hearth-cuda-host", "criterion", "proptest"] {
            assert!(!listed.contains(foreign), "{foreign} is in {program}");
        }
        assert!(components.len() > 100, "{}", components.len());
        references_lead_somewhere(&bill);
    }
}

fn bill(path: &Path) -> Value {
    let text = std::fs::read(path).expect("a bill");
    serde_json::from_slice(&text).expect("JSON")
}

fn references_lead_somewhere(bill: &Value) {
    let list = |name: &str| bill[name].as_array().expect("a list").clone();
    let mut known: BTreeSet<String> = list("components")
        .iter()
        .map(|component| component["bom-ref"].to_string())
        .collect();
    known.insert(bill["metadata"]["component"]["bom-ref"].to_string());
    for dependency in list("dependencies") {
        assert!(
            known.contains(&dependency["ref"].to_string()),
            "{dependency}"
        );
        for need in dependency["dependsOn"].as_array().expect("a list") {
            assert!(known.contains(&need.to_string()), "{need}");
        }
    }
}

/// The checksums of Cargo.lock by name and version; our own crates have none.
fn checksums() -> BTreeMap<(String, String), Option<String>> {
    let lock = std::fs::read_to_string(root().join("Cargo.lock")).expect("Cargo.lock");
    let packages = lock.split("[[package]]").skip(1);
    let field = |package: &str, name: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(name));
        line.map(|line| line.trim_matches('"').to_owned())
    };
    packages
        .map(|package| {
            let name = field(package, "name = ").expect("a name");
            let version = field(package, "version = ").expect("a version");
            ((name, version), field(package, "checksum = "))
        })
        .collect()
}

/// What each of our crates needs by its manifest, on every platform and with any features.
fn direct_needs() -> BTreeMap<String, BTreeSet<String>> {
    let (code, stdout, stderr) = run(Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root()));
    assert_eq!(code, 0, "{stderr}");
    let metadata: Value = serde_json::from_str(&stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let needs = |package: &Value| {
        let all = package["dependencies"].as_array().expect("a list").iter();
        let always = all.filter(|need| {
            need["kind"].is_null() && need["target"].is_null() && need["optional"] == false
        });
        always
            .filter_map(|need| need["name"].as_str().map(str::to_owned))
            .collect()
    };
    packages
        .iter()
        .map(|package| {
            let name = package["name"].as_str().expect("a name").to_owned();
            (name, needs(package))
        })
        .collect()
}
