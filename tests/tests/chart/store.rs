//! Values of the nodes' stores of models.

use serde_json::json;

use super::{defaults, helm, one};

#[test]
fn limits_of_the_store_reach_the_agents() {
    let Some(helm) = helm() else { return };
    let agents = |values: &str| {
        let objects = defaults(&helm, values);
        one(&objects, "DaemonSet", "hearth-agent").to_string()
    };
    let usual = agents("{}");
    assert!(usual.contains(r#"{"name":"HEARTH_MODEL_KEEP_RECENT","value":"10m"}"#));
    assert!(!usual.contains("HEARTH_MODEL_QUOTA") && !usual.contains("HEARTH_DOWNLOAD_RATE"));
    let limited = agents("{agent: {store: {quota: 200Gi, keepRecent: 1h, downloadRate: 1.5Mi}}}");
    for (name, value) in [
        ("HEARTH_MODEL_QUOTA", "200Gi"),
        ("HEARTH_MODEL_KEEP_RECENT", "1h"),
        ("HEARTH_DOWNLOAD_RATE", "1.5Mi"),
    ] {
        let variable = json!({"name": name, "value": value}).to_string();
        assert!(limited.contains(&variable), "{variable}");
    }
}
