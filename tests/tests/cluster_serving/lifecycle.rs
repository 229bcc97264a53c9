//! A deployment's settings for its Pods and its Service, several gateways, and suspension.

use std::time::{Duration, Instant};

use hearth_tests::chat_stream;
use hearth_tests::cluster::{Cluster, condition, wait_until};
use serde_json::{Value, json};

use super::release::{
    PATIENCE, deployment, infd, names, patch, pods, pool, said, wait_until_settled,
};
use super::streams::{self, Streams};

/// An annotation that another user puts on the Service.
const THEIRS: &str = "example.com/theirs";
const OURS: &str = "external-dns.alpha.kubernetes.io/hostname";

/// A template in running Pods, in a namespace that enforces Pod Security `restricted`.
pub(super) fn a_template_is_in_running_pods(cluster: &Cluster) {
    for object in [
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "house", "namespace": "default"},
               "data": {"ca.crt": "none that is used\n"}}),
        json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "batch"},
               "value": 1000, "preemptionPolicy": "Never"}),
    ] {
        cluster.apply(&object.to_string());
    }
    let made = deployment("demo", json!({}));
    cluster.apply(&made.to_string());
    wait_until_settled(cluster, "demo");
    let before = names(&pods(cluster, "demo", ""));
    let template = json!({"podTemplate": {
        "labels": {"team": "search"},
        "annotations": {"example.com/owner": "ann"},
        "env": [{"name": "NO_COLOR", "value": "1"}],
        "caBundles": [{"configMap": "house", "key": "ca.crt"}],
        "priorityClassName": "batch",
    }});
    patch(cluster, "demo", &template);
    let found = wait_until_settled(cluster, "demo");
    assert_eq!(found["status"]["plan"]["generation"], 2);
    let now = pods(cluster, "demo", "");
    assert!(names(&now).iter().all(|name| !before.contains(name)));
    for pod in &now {
        assert_eq!(pod["metadata"]["labels"]["team"], "search", "{pod:#}");
        assert_eq!(pod["metadata"]["annotations"]["example.com/owner"], "ann");
        assert_eq!(pod["spec"]["priority"], 1000, "{pod:#}");
        let container = &pod["spec"]["containers"][0];
        let env = container["env"].as_array().expect("variables");
        let value = |name: &str| {
            let found = env.iter().find(|variable| variable["name"] == name);
            found.map(|variable| variable["value"].clone())
        };
        assert_eq!(value("NO_COLOR"), Some(json!("1")));
        assert_eq!(
            value("SSL_CERT_DIR"),
            Some(json!("/etc/hearth/authorities:/etc/ssl/certs"))
        );
        let statuses = pod["status"]["containerStatuses"].as_array();
        let is_ready = |status: &Value| status["ready"] == true;
        assert!(
            statuses.expect("a container").iter().all(is_ready),
            "{pod:#}"
        );
    }
    // An impossible one is given up in favour of the running plan.
    let broken = json!({"podTemplate": {"priorityClassName": "none-such"}, "rollout": {"progressDeadline": "5s"}});
    patch(cluster, "demo", &broken);
    wait_until("the plan before it comes back", PATIENCE, || {
        (said(&infd(cluster, "demo"), "Planned").0 == "RolledBack").then_some(())
    });
    assert_eq!(condition(&infd(cluster, "demo"), "Ready"), Some("True"));
    assert_eq!(names(&pods(cluster, "demo", "")), names(&now));
    patch(
        cluster,
        "demo",
        &json!({"podTemplate": null, "rollout": null}),
    );
    wait_until_settled(cluster, "demo");
}

pub(super) fn annotations_of_the_service_come_and_go(cluster: &Cluster) {
    let kept = names(&pods(cluster, "demo", ""));
    let annotation = |key: &str| {
        let service = cluster
            .get("service", "default", "demo")
            .expect("a Service");
        service["metadata"]["annotations"][key].clone()
    };
    cluster.kubectl(&["annotate", "service", "demo", &format!("{THEIRS}=stays")]);
    let ours = |value: Value| json!({"endpoint": {"annotations": {OURS: value}}});
    patch(cluster, "demo", &ours(json!("llm.example.com")));
    wait_until("the annotation is there", PATIENCE, || {
        (annotation(OURS) == "llm.example.com").then_some(())
    });
    patch(cluster, "demo", &ours(Value::Null));
    wait_until("the annotation is gone", PATIENCE, || {
        annotation(OURS).is_null().then_some(())
    });
    assert_eq!(annotation(THEIRS), "stays");
    wait_until_settled(cluster, "demo");
    assert_eq!(
        names(&pods(cluster, "demo", "")),
        kept,
        "nothing runs for it"
    );
}

pub(super) fn one_of_two_gateways_answers_alone(cluster: &Cluster) {
    let workers = names(&pods(cluster, "demo", "decode"));
    patch(cluster, "demo", &json!({"gateway": {"replicas": 2}}));
    wait_until_settled(cluster, "demo");
    let gateways = pods(cluster, "demo", "gateway");
    let mut nodes: Vec<&Value> = gateways
        .iter()
        .map(|pod| &pod["spec"]["nodeName"])
        .collect();
    nodes.dedup();
    assert_eq!(nodes.len(), 2, "on both nodes: {nodes:?}");
    assert_eq!(names(&pods(cluster, "demo", "decode")), workers);
    let found = infd(cluster, "demo");
    assert_eq!(condition(&found, "GatewayReady"), Some("True"));
    assert_eq!(pool(&found, "gateway")["summary"], "2/2");
    let reach = cluster.reach("default", "demo", 80);
    // Each of them answers: streams are spread over both.
    let streams = Streams::start(&reach.v1());
    streams.wait_for(2 * streams::STREAMS);
    streams.finish();

    let runtime = tokio::runtime::Runtime::new().expect("runtime");
    let known = streams::known().remove(0);
    let body = hearth_tests::chat_body("hearth-demo", &known.question, 8);
    let killed = &names(&gateways)[0];
    cluster.kubectl(&["delete", "pod", killed, "--grace-period=0", "--force"]);
    let start = Instant::now();
    let v1 = reach.v1();
    wait_until("a new request is answered", Duration::from_secs(10), || {
        runtime.block_on(chat_stream(&v1, &body, |_, _| {})).ok()
    });
    let waited = start.elapsed();
    assert!(waited < Duration::from_secs(10), "{waited:?}");
    let streams = Streams::start(&v1);
    streams.wait_for(2 * streams::STREAMS);
    wait_until_settled(cluster, "demo");
    streams.finish();
    wait_until("both are there again", PATIENCE, || {
        (pool(&infd(cluster, "demo"), "gateway")["summary"] == "2/2").then_some(())
    });
    patch(cluster, "demo", &json!({"gateway": null}));
    wait_until_settled(cluster, "demo");
    assert_eq!(pods(cluster, "demo", "gateway").len(), 1);
}

pub(super) fn a_rest_keeps_the_plan_and_frees_the_nodes(cluster: &Cluster) {
    let before = names(&pods(cluster, "demo", ""));
    let plan = infd(cluster, "demo")["status"]["plan"].clone();
    patch(cluster, "demo", &json!({"suspend": true}));
    wait_until("all Pods have ended", PATIENCE, || {
        let is_done = said(&infd(cluster, "demo"), "Progressing").0 == "Suspended";
        (is_done && pods(cluster, "demo", "").is_empty()).then_some(())
    });
    let found = infd(cluster, "demo");
    for kind in [
        "Ready",
        "GatewayReady",
        "PrefillReady",
        "DecodeReady",
        "Degraded",
    ] {
        assert_eq!(condition(&found, kind), Some("False"), "{kind}: {found:#}");
        assert_eq!(said(&found, kind).0, "Suspended");
    }
    assert_eq!(pool(&found, "decode")["summary"], "0/0");
    assert!(cluster.get("service", "default", "demo").is_some());
    patch(cluster, "demo", &json!({"suspend": false}));
    let found = wait_until_settled(cluster, "demo");
    assert_eq!(found["status"]["plan"], plan, "the same plan");
    assert_eq!(names(&pods(cluster, "demo", "")), before, "the same Pods");
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    streams.finish();
}
