//! What the chart gives to Prometheus and Grafana: monitors, alerts, and a dashboard.

use std::collections::BTreeSet;
use std::path::Path;

use hearth_tests::{DASHBOARD, RULES, queried_metrics, root};
use serde_json::{Value, json};

use super::{defaults, helm, of_kind, one};

#[test]
fn gateways_and_agents_are_scraped_at_a_port_that_no_service_has() {
    let Some(helm) = helm() else { return };
    let objects = defaults(&helm, "{metrics: {serviceMonitor: {enabled: true}}}");
    let monitor = &one(&objects, "PodMonitor", "hearth-gateways")["spec"];
    assert_eq!(monitor["podMetricsEndpoints"][0]["port"], "metrics");
    assert_eq!(monitor["podTargetLabels"], json!(["hearth.dev/deployment"]));
    assert_eq!(
        monitor["namespaceSelector"]["matchNames"],
        json!(["default"])
    );
    assert!(of_kind(&objects, "ServiceMonitor", "hearth-gateways").is_empty());
    let monitor = &one(&objects, "PodMonitor", "hearth-agents")["spec"];
    assert_eq!(monitor["podMetricsEndpoints"][0]["port"], "metrics");
    let pod = &one(&objects, "DaemonSet", "hearth-agent")["spec"]["template"]["spec"];
    let ports = pod["containers"][0]["ports"].as_array().expect("ports");
    let is_metrics = |port: &Value| port["name"] == "metrics" && port["containerPort"] == 9402;
    assert!(ports.iter().any(is_metrics), "{ports:?}");
    let policy = one(&objects, "NetworkPolicy", "hearth-agent").to_string();
    assert!(policy.contains("9402"), "{policy}");
}

/// Series of the operator have the namespace of their deployment, which Prometheus would otherwise replace by the operator's.
#[test]
fn labels_of_the_operator_s_series_are_kept() {
    let Some(helm) = helm() else { return };
    let objects = defaults(&helm, "{metrics: {serviceMonitor: {enabled: true}}}");
    let monitor = &one(&objects, "ServiceMonitor", "hearth-operator")["spec"];
    assert_eq!(monitor["endpoints"][0]["honorLabels"], true);
}

#[test]
fn alerts_are_there_where_they_are_asked_for() {
    let Some(helm) = helm() else { return };
    assert!(of_kind(&defaults(&helm, "{}"), "PrometheusRule", "hearth").is_empty());
    let values = "{metrics: {prometheusRules: {enabled: true, labels: {release: prom}}}}";
    let objects = defaults(&helm, values);
    let rules = one(&objects, "PrometheusRule", "hearth");
    assert_eq!(rules["metadata"]["labels"]["release"], "prom");
    assert_eq!(rules["spec"], yaml(RULES), "as in the file");
}

#[test]
fn each_alert_says_what_it_is_and_what_to_do() {
    let docs = text("docs/cluster.md");
    let rules = yaml(RULES);
    let groups = rules["groups"].as_array().expect("groups");
    let alerts = groups
        .iter()
        .flat_map(|group| group["rules"].as_array().expect("rules"));
    let mut names = BTreeSet::new();
    for alert in alerts {
        let name = alert["alert"].as_str().expect("a name");
        assert!(names.insert(name), "{name} is there twice");
        for part in ["summary", "description", "runbook"] {
            let said = alert["annotations"][part].as_str();
            assert!(said.is_some_and(|said| !said.is_empty()), "{name}: {part}");
        }
        let severity = alert["labels"]["severity"].as_str().unwrap_or_default();
        let known = ["critical", "warning", "info"];
        assert!(known.contains(&severity), "{name}: {severity}");
        assert!(alert["for"].is_string(), "{name} waits for nothing");
        let row = format!("| `{name}` |");
        assert!(docs.contains(&row), "docs/cluster.md has no {row}");
    }
    assert!(names.len() > 8, "{names:?}");
}

/// Names in the sources; a running operator and a running gateway are asked in `operator_storms` and `service`.
#[test]
fn dashboard_and_alerts_ask_only_for_metrics_that_there_are() {
    let mut written = BTreeSet::new();
    for directory in [
        "worker/server/src",
        "worker/src/roles/agent",
        "operator/src",
    ] {
        names_in(&root().join(directory), &mut written);
    }
    let is_written = |name: &str| written.contains(name);
    let is_known = |name: &str| {
        let bases = ["", "_total", "_bucket", "_count", "_sum"];
        let bases = bases.iter().filter_map(|suffix| name.strip_suffix(suffix));
        // The gateway registers its histograms with the unit apart.
        bases
            .flat_map(|base| [base, base.strip_suffix("_seconds").unwrap_or(base)])
            .any(is_written)
    };
    let queried = queried_metrics();
    assert!(queried.len() > 40, "{queried:?}");
    let unknown: Vec<&String> = queried.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "nothing exports {unknown:?}");
    assert!(!is_known("hearth_worker_hopes"));
}

#[test]
fn each_panel_has_its_place_and_is_about_what_was_chosen() {
    let dashboard: Value = serde_json::from_str(&text(DASHBOARD)).expect("JSON");
    let variables = dashboard["templating"]["list"].as_array().expect("list");
    let variables: Vec<&str> = variables
        .iter()
        .filter_map(|it| it["name"].as_str())
        .collect();
    assert_eq!(variables, ["source", "namespace", "deployment"]);
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    for panel in dashboard["panels"].as_array().expect("panels") {
        let title = panel["title"].as_str().expect("a title");
        assert!(ids.insert(panel["id"].as_u64()), "{title}: its id is taken");
        let part = |name: &str| panel["gridPos"][name].as_u64().expect("a number");
        for x in part("x")..part("x") + part("w") {
            assert!(x < 24, "{title} is too wide");
            for y in part("y")..part("y") + part("h") {
                assert!(taken.insert((x, y)), "{title} lies on another panel");
            }
        }
        let targets = panel["targets"].as_array().into_iter().flatten();
        for target in targets {
            let query = target["expr"].as_str().expect("a query");
            let of_all = ["hearth_operator_", "hearth_node_", "hearth_agent_"];
            let is_of_all = of_all.map(|word| query.contains(word));
            let is_chosen =
                query.contains("namespace=~\"$namespace\"") && query.contains("=~\"$deployment\"");
            assert!(is_chosen || is_of_all.contains(&true), "{title}: {query}");
        }
    }
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_norway::from_str(&text(path)).expect("YAML")
}

/// Collects what stands between quotes and begins like one of Hearth's metrics.
fn names_in(directory: &Path, names: &mut BTreeSet<String>) {
    let entries = std::fs::read_dir(directory).expect("a directory");
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            names_in(&path, names);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let source = std::fs::read_to_string(&path).expect("a source");
            let quoted = source.split('"');
            let ours = quoted.filter(|it| it.starts_with("hearth_") || it.starts_with("gen_ai_"));
            names.extend(ours.map(str::to_owned));
        }
    }
}
