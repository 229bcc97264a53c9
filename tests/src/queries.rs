//! Metrics that the chart's dashboard and alerts, and the example of an autoscaler, ask for.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::programs::root;

/// Labels that look like metrics.
const LABELS: [&str; 3] = [
    "hearth_dev_deployment",
    "gen_ai_operation_name",
    "gen_ai_request_model",
];

/// Where the chart keeps its dashboard.
pub const DASHBOARD: &str = "charts/hearth/files/dashboards/hearth.json";
/// Where the chart keeps its alerts.
pub const RULES: &str = "charts/hearth/files/rules/hearth.yaml";

/// An autoscaler that scales a deployment to zero by the gateways' metrics.
const KEDA: &str = "manifests/examples/keda.yaml";

/// Returns the names of Hearth's metrics in the queries of the dashboard, the alerts and the autoscaler, with suffixes such as `_total`.
///
/// # Panics
/// When one of the files cannot be read.
pub fn queried_metrics() -> BTreeSet<String> {
    let read = |path: &str| {
        std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD))
        .unwrap_or_else(|error| panic!("{DASHBOARD}: {error}"));
    let rules: Value =
        serde_norway::from_str(&read(RULES)).unwrap_or_else(|error| panic!("{RULES}: {error}"));
    let keda: Value =
        serde_norway::from_str(&read(KEDA)).unwrap_or_else(|error| panic!("{KEDA}: {error}"));
    let mut queries = Vec::new();
    collect(&keda, &mut queries);
    collect(&dashboard, &mut queries);
    collect(&rules, &mut queries);
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = queries
        .iter()
        .flat_map(|query| query.split(|c| !is_part(c)));
    words
        .filter(|word| word.starts_with("hearth_") || word.starts_with("gen_ai_"))
        .filter(|word| !LABELS.contains(word))
        .map(str::to_owned)
        .collect()
}

/// Collects the texts of all fields named `expr` or `query`.
fn collect(value: &Value, queries: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match field
                    .as_str()
                    .filter(|_| matches!(&**name, "expr" | "query"))
                {
                    Some(query) => queries.push(query.to_owned()),
                    None => collect(field, queries),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, queries)),
        _ => {}
    }
}
