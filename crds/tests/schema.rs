//! Checks that the checked-in YAML matches the types, and that the API server can take it.
#![cfg(feature = "kube")]
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use hearth_crds::{crd_yaml, crd_yaml_files, crds};

fn yaml_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("yaml")
}

#[test]
fn checked_in_yaml_is_current() {
    for (name, text) in crd_yaml_files().unwrap() {
        let path = yaml_dir().join(&name);
        if std::env::var_os("UPDATE").is_some() {
            std::fs::create_dir_all(yaml_dir()).unwrap();
            std::fs::write(&path, &text).unwrap();
        }
        let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            checked_in == text,
            "{} differs from the types: run UPDATE=1 cargo test -p hearth-crds --features kube --test schema",
            path.display()
        );
        assert!(
            text.len() < 104 << 10,
            "{name} has {} bytes: kubectl apply must stay far from its limit",
            text.len()
        );
    }
    assert_eq!(
        std::fs::read_dir(yaml_dir()).unwrap().count(),
        crds().len(),
        "a file of crds/yaml has no type"
    );
}

#[test]
fn the_stream_holds_every_definition() {
    let text = crd_yaml().unwrap();
    let kinds: Vec<String> = serde_norway::Deserializer::from_str(&text)
        .map(|document| {
            let value: serde_json::Value = serde::Deserialize::deserialize(document).unwrap();
            value["spec"]["names"]["kind"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(
        kinds,
        [
            "InferenceDeployment",
            "InferencePlan",
            "NodeProfile",
            "InferencePoolScaler"
        ]
    );
}

/// Visits every schema node below `node` with its path.
fn visit(node: &serde_json::Value, path: &str, f: &mut dyn FnMut(&serde_json::Value, &str)) {
    f(node, path);
    for (name, child) in node["properties"].as_object().into_iter().flatten() {
        visit(child, &format!("{path}.{name}"), f);
    }
    for keyword in ["items", "additionalProperties"] {
        if node[keyword].is_object() {
            visit(&node[keyword], &format!("{path}[]"), f);
        }
    }
}

#[test]
fn schemas_are_structural_and_of_known_formats() {
    for crd in crds() {
        let kind = crd.spec.names.kind.clone();
        let value = serde_json::to_value(&crd).unwrap();
        let schema = &value["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        assert!(schema["properties"]["spec"].is_object());
        visit(schema, &kind, &mut |node, path| {
            assert!(node["type"].is_string(), "{path} has no type");
            for forbidden in ["$ref", "oneOf", "anyOf", "allOf", "nullable", "const"] {
                assert!(node.get(forbidden).is_none(), "{path} has {forbidden}");
            }
            if let Some(format) = node["format"].as_str() {
                assert!(
                    ["int32", "int64", "double", "float", "date-time"].contains(&format),
                    "{path}: {format}"
                );
            }
            let metadata =
                path.ends_with(".metadata") || path == kind || path.ends_with(".apiVersion");
            let described =
                node["description"].is_string() || path.ends_with("[]") || path.ends_with(".kind");
            assert!(metadata || described, "{path} has no description");
        });
    }
}

#[test]
fn rules_carry_messages_and_bounded_strings() {
    let value = serde_json::to_value(&crds()[0]).unwrap();
    let schema = &value["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut rules = 0;
    visit(&schema["properties"]["spec"], "spec", &mut |node, path| {
        for rule in node["x-kubernetes-validations"]
            .as_array()
            .into_iter()
            .flatten()
        {
            rules += 1;
            assert!(
                rule["message"].is_string(),
                "{path} has a rule without a message"
            );
            // The API server estimates a rule's cost from a string's maximum length, or from its enum's words.
            assert!(
                node["type"] != "string" || node["maxLength"].is_u64() || node["enum"].is_array(),
                "{path} has a rule and no maxLength"
            );
        }
    });
    assert!(rules > 30, "{rules} rules");
}

#[test]
fn names_columns_and_scale_are_as_designed() {
    let value = serde_json::to_value(crds()).unwrap();
    let deployment = &value[0];
    assert_eq!(deployment["spec"]["scope"], "Namespaced");
    assert_eq!(deployment["spec"]["names"]["shortNames"][0], "infd");
    assert_eq!(deployment["spec"]["names"]["categories"][0], "hearth");
    let version = &deployment["spec"]["versions"][0];
    let columns: Vec<&str> = version["additionalPrinterColumns"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|column| column["priority"].as_i64().unwrap_or(0) == 0)
        .map(|column| column["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        columns,
        [
            "Model", "Ready", "Fetch", "Plan", "Prefill", "Decode", "TTFT-ms", "TPOT-ms", "Age"
        ]
    );
    assert_eq!(
        version["subresources"]["scale"]["specReplicasPath"],
        ".spec.decode.replicas"
    );
    assert_eq!(
        version["subresources"]["scale"]["labelSelectorPath"],
        ".status.selector"
    );
    assert_eq!(
        version["subresources"]["scale"]["statusReplicasPath"],
        ".status.replicas"
    );
    let scaler = &value[3]["spec"];
    assert_eq!(scaler["names"]["shortNames"][0], "infps");
    assert_eq!(scaler["names"]["plural"], "inferencepoolscalers");
    let scale = &scaler["versions"][0]["subresources"]["scale"];
    assert_eq!(scale["specReplicasPath"], ".spec.replicas");
    assert_eq!(scale["statusReplicasPath"], ".status.replicas");
    assert_eq!(scale["labelSelectorPath"], ".status.selector");
    let conditions =
        &version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["conditions"];
    assert_eq!(conditions["x-kubernetes-list-type"], "map");
    assert_eq!(conditions["x-kubernetes-list-map-keys"][0], "type");
    let pools =
        &version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["poolStatuses"];
    assert_eq!(pools["x-kubernetes-list-type"], "map");
    assert_eq!(pools["x-kubernetes-list-map-keys"][0], "name");
    let text = serde_json::to_string(&version["schema"]).unwrap();
    assert!(!text.contains("\"phase\""), "status has a phase");
    assert_eq!(value[2]["spec"]["scope"], "Cluster");
}

#[test]
fn defaults_are_written_and_replicas_have_none() {
    let value = serde_json::to_value(&crds()[0]).unwrap();
    let spec = &value["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"];
    assert_eq!(spec["strategy"]["default"], "Auto");
    assert_eq!(spec["decode"]["properties"]["maxBatch"]["default"], 6);
    assert_eq!(spec["decode"]["default"]["maxBatch"], 6);
    assert_eq!(
        spec["placement"]["properties"]["pinning"]["default"],
        "Shared"
    );
    // A default here would take the field away from kubectl scale.
    assert!(
        spec["decode"]["properties"]["replicas"]
            .get("default")
            .is_none()
    );
}

#[test]
fn no_plain_word_is_a_boolean_of_yaml_1_1() {
    let text = crd_yaml().unwrap();
    assert!(
        text.contains("- \"On\"\n"),
        "the enum of dualBatch is quoted"
    );
    for line in text.lines() {
        let scalar = line.rsplit(' ').next().unwrap_or_default();
        let plain = line.trim_end_matches(scalar).ends_with(": ")
            || line.trim_end_matches(scalar).ends_with("- ");
        assert!(
            !(plain && ["On", "Off", "Yes", "No", "on", "off"].contains(&scalar)),
            "{line}"
        );
    }
}

/// Bounds readable by `kubectl explain` and editors, in addition to the API server's messages.
#[test]
fn every_bound_of_a_rule_stands_natively_and_in_the_description() {
    let value = serde_json::to_value(&crds()[0]).unwrap();
    let schema = &value["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let (mut numbers, mut patterns, mut words) = (0, 0, 0);
    visit(&schema["properties"]["spec"], "spec", &mut |node, path| {
        let description = node["description"].as_str().unwrap_or_default();
        assert!(!description.contains('\n'), "{path}: {description}");
        let rules: Vec<&str> = node["x-kubernetes-validations"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|rule| rule["rule"].as_str().unwrap())
            .collect();
        let compares = |rule: &&str| rule.starts_with("self >") || rule.starts_with("self <");
        if let Some(rule) = rules.iter().find(|rule| compares(rule))
            && !description.starts_with("Deprecated:")
        {
            let bounds = [&node["minimum"], &node["maximum"]].map(|bound| bound.as_f64().unwrap());
            let [least, most] = bounds;
            assert_eq!(
                *rule,
                format!("self >= {least} && self <= {most}"),
                "{path}"
            );
            assert!(
                description.contains(&format!("From {least} to {most}.")),
                "{path}: {description}"
            );
            numbers += 1;
        }
        if rules.iter().any(|rule| rule.contains("self.matches('")) {
            let pattern = node["pattern"].as_str().unwrap_or_default();
            assert!(!pattern.is_empty(), "{path} has no pattern: {rules:?}");
            assert!(rules.iter().any(|rule| rule.contains(pattern)), "{path}");
            // Characters that CEL and OpenAPI would read differently.
            assert!(!pattern.contains(['\\', '\'']), "{path}: {pattern}");
            patterns += 1;
        }
        if rules.iter().any(|rule| rule.starts_with("self in [")) {
            assert!(node["enum"].is_array(), "{path} has no enum: {rules:?}");
            words += 1;
        }
        // Only the API server would enforce a bound without a rule, and with its own message.
        let is_bounded = node["minimum"].as_f64().is_some_and(|least| least != 0.0)
            || ["maximum", "pattern"]
                .iter()
                .any(|keyword| node.get(keyword).is_some());
        assert!(
            !is_bounded || !rules.is_empty(),
            "{path} has bounds and no rule"
        );
    });
    assert!(numbers >= 7, "{numbers}");
    assert!(patterns >= 20, "{patterns}");
    assert!(words >= 5, "{words}");
}

/// An embedded Kubernetes type would change the schema with each Kubernetes version, and tie the planner and workers
/// to it.
#[test]
fn no_type_of_kubernetes_is_embedded() {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut seen = 0;
    for file in std::fs::read_dir(here.join("src")).unwrap().flatten() {
        let name = file.file_name();
        // These handle the definitions themselves, and objects as they are written.
        if ["crd.rs", "bounds.rs"].iter().any(|own| name == *own) {
            continue;
        }
        seen += 1;
        let text = std::fs::read_to_string(file.path()).unwrap();
        for foreign in [
            "k8s_openapi",
            "ObjectMeta",
            "EmbeddedResource",
            "IntOrString",
        ] {
            assert!(!text.contains(foreign), "{name:?} names {foreign}");
        }
    }
    assert!(seen > 15, "{seen} files");
    let value = serde_json::to_value(crds()).unwrap().to_string();
    for keyword in ["embedded-resource", "int-or-string"] {
        assert!(!value.contains(keyword), "a schema has {keyword}");
    }
    let manifest = std::fs::read_to_string(here.join("Cargo.toml")).unwrap();
    let (_, dependencies) = manifest.split_once("\n[dependencies]\n").unwrap();
    let (dependencies, _) = dependencies.split_once("\n[").unwrap();
    for library in ["kube", "k8s-openapi", "schemars"] {
        let line = dependencies
            .lines()
            .find(|line| line.starts_with(&format!("{library} ")))
            .unwrap();
        assert!(line.contains("optional = true"), "{line}");
    }
}
