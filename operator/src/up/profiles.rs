//! Profiles of nodes from files, so that a plan for a cluster can be seen without the cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, bail};
use hearth_crds::NodeProfileStatus;
use serde::Deserialize;
use serde_json::Value;

const REMEDY: &str = "write one with: kubectl get nodeprofiles -o yaml > FILE, or hearth-worker profile --json --scope node --node NAME --disk DIRECTORY --probe-disk > FILE on each node";

/// Nodes by name.
type Nodes = BTreeMap<String, NodeProfileStatus>;

/// Reads NodeProfiles, lists of them as kubectl prints them, or what `hearth-worker profile --json` prints; in each file one
/// document or several, YAML or JSON.
///
/// # Errors
/// A file that cannot be read, a document that is none of these, a node that is there twice, or a file without any node.
pub(super) fn read(files: &[PathBuf]) -> anyhow::Result<Vec<NodeProfileStatus>> {
    let mut nodes = Nodes::new();
    for file in files {
        let text = super::prepare::read(file, REMEDY)?;
        parse(&text, &mut nodes).with_context(|| {
            format!(
                "{} cannot be read as profiles of nodes\n  {REMEDY}",
                file.display()
            )
        })?;
    }
    Ok(nodes.into_values().collect())
}

/// Adds the nodes of a file.
fn parse(text: &str, nodes: &mut Nodes) -> anyhow::Result<()> {
    let before = nodes.len();
    for document in serde_norway::Deserializer::from_str(text.trim_start_matches('\u{feff}')) {
        let document = Value::deserialize(document)?;
        let items = match document.get("items") {
            Some(Value::Array(items)) if items.is_empty() => {
                bail!("its list of profiles is empty: no node was measured yet")
            }
            Some(Value::Array(items)) => items.clone(),
            Some(_) => bail!("items is not a list"),
            None => vec![document],
        };
        for item in items.into_iter().filter(|item| !item.is_null()) {
            let node = profile(item)?;
            if let Some(twice) = nodes.insert(node.node.clone(), node) {
                bail!(
                    "node {} is there twice: each needs a name of its own (hearth-worker profile --node NAME)",
                    twice.node
                );
            }
        }
    }
    if nodes.len() == before {
        bail!("there is no document in it");
    }
    Ok(())
}

/// The status of a NodeProfile, or a status alone.
fn profile(mut item: Value) -> anyhow::Result<NodeProfileStatus> {
    if !item.is_object() {
        bail!("it holds a list or a single value where a profile is expected");
    }
    let kind = item.get("kind").and_then(Value::as_str).map(str::to_owned);
    let name = item.pointer("/metadata/name").and_then(Value::as_str);
    let name = name.unwrap_or("without a name").to_owned();
    let status = match kind.as_deref() {
        Some("NodeProfile") => item.get_mut("status").map(Value::take).with_context(|| {
            format!("NodeProfile {name} has no status: its node was not measured yet")
        })?,
        Some(other) => bail!("{other} {name} is not a NodeProfile"),
        None => item,
    };
    let named = status.get("node").and_then(Value::as_str);
    let named = named.filter(|node| !node.is_empty());
    let name = named.map_or(name, str::to_owned);
    let node: NodeProfileStatus = serde_path_to_error::deserialize(status).map_err(|error| {
        let at = match error.path().to_string().as_str() {
            "." => String::new(),
            field => format!("{field}: "),
        };
        anyhow::anyhow!("profile {name}: {at}{}", error.into_inner())
    })?;
    if node.node.is_empty() {
        bail!("profile {name} does not say its node");
    }
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(node: &str) -> Value {
        let mut profile = NodeProfileStatus::default();
        node.clone_into(&mut profile.node);
        serde_json::to_value(profile).expect("a profile")
    }

    fn object(node: &str) -> Value {
        serde_json::json!({"kind": "NodeProfile", "metadata": {"name": node}, "status": status(node)})
    }

    fn nodes(text: &str) -> anyhow::Result<Vec<String>> {
        let mut nodes = Nodes::new();
        parse(text, &mut nodes)?;
        Ok(nodes.into_keys().collect())
    }

    #[test]
    fn lists_objects_and_what_a_worker_prints_are_read() {
        let list =
            serde_json::json!({"kind": "List", "items": [object("office"), object("attic")]});
        assert_eq!(nodes(&list.to_string()).unwrap(), ["attic", "office"]);
        let both = format!("{}\n---\n{}\n", object("attic"), status("cellar"));
        assert_eq!(nodes(&both).unwrap(), ["attic", "cellar"]);
        let yaml = serde_norway::to_string(&list).unwrap();
        assert_eq!(nodes(&yaml).unwrap().len(), 2);
    }

    #[test]
    fn nodes_of_several_files_are_one_cluster() {
        let mut both = Nodes::new();
        parse(&status("attic").to_string(), &mut both).unwrap();
        parse(&status("cellar").to_string(), &mut both).unwrap();
        assert!(both.keys().eq(["attic", "cellar"]));
        let again = parse(&status("attic").to_string(), &mut both).unwrap_err();
        assert!(again.to_string().contains("attic is there twice"));
        let none = parse("", &mut both).unwrap_err();
        assert!(none.to_string().contains("no document"));
    }

    #[test]
    fn what_is_no_profile_is_refused_with_its_name() {
        let pod = serde_json::json!({"kind": "Pod", "metadata": {"name": "web"}});
        let unmeasured = serde_json::json!({"kind": "NodeProfile", "metadata": {"name": "attic"}});
        let twice = serde_json::json!({"items": [object("attic"), object("attic")]});
        for (text, words) in [
            (pod.to_string(), "Pod web is not a NodeProfile"),
            (unmeasured.to_string(), "attic has no status"),
            (twice.to_string(), "attic is there twice"),
            (String::new(), "no document"),
            ("items: 3".to_owned(), "not a list"),
            ("items: []".to_owned(), "its list of profiles is empty"),
            ("[]".to_owned(), "where a profile is expected"),
            (
                "{node: attic, memory: {totalBytes: lots}}".to_owned(),
                "profile attic: memory.totalBytes: invalid type: string \"lots\"",
            ),
            ("node: ''".to_owned(), "profile without a name"),
            ("{".to_owned(), ""),
        ] {
            let error = format!("{:#}", nodes(&text).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
