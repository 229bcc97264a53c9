//! Values of traces.

use serde_json::json;

use super::{defaults, helm, one, render};

#[test]
fn a_collector_reaches_the_operator_and_only_one_that_can_be_used() {
    let Some(helm) = helm() else { return };
    let operator = |values: &str| {
        let objects = defaults(&helm, values);
        one(&objects, "Deployment", "hearth-operator").to_string()
    };
    let usual = operator("{}");
    assert!(!usual.contains("HEARTH_OTLP") && !usual.contains("HEARTH_TRACE"));
    for (ratio, told) in [
        ("", "1"),
        (", sampleRatio: 0.25", "0.25"),
        (", sampleRatio: 0", "0"),
    ] {
        let values = format!("{{tracing: {{otlpEndpoint: 'http://otel.lan:4318'{ratio}}}}}");
        let traced = operator(&values);
        for (name, value) in [
            ("HEARTH_OTLP_ENDPOINT", "http://otel.lan:4318"),
            ("HEARTH_TRACE_SAMPLE_RATIO", told),
        ] {
            let variable = json!({"name": name, "value": value}).to_string();
            assert!(traced.contains(&variable), "{variable}");
        }
    }
    for wrong in [
        "otlpEndpoint: 'otel.lan:4318'",
        "sampleRatio: 2",
        "endpoint: x",
    ] {
        let refused = render(&helm, &format!("{{tracing: {{{wrong}}}}}"), &[]);
        assert!(refused.is_err(), "{wrong}");
    }
}
