//! The operator while the API server is busy, refuses requests, delivers events late, or is down: it reaches the same
//! end state and does not make things worse. When nothing changes, it writes nothing.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hearth_tests::cluster::{Options, try_wait_until, wait_until};
use hearth_tests::operator::{Faults, Operator, Proxy, Stand, is_settled};
use hearth_tests::{Metrics, queried_metrics};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(120);
/// More writes than it takes to create and change a deployment with three Pods, and far fewer than a loop would make.
const MOST_WRITES: usize = 120;

fn stand(options: &Options) -> Option<Stand> {
    let stand = Stand::start_or_skip(options)?;
    stand.make_node("large", 16, 16 << 30, &[("size", "large")]);
    Some(stand)
}

fn start(stand: &Stand, namespace: &str, resync: &str) -> (Proxy, Operator) {
    stand.make_namespace(namespace);
    let proxy = stand.proxy();
    let arguments = ["--namespaces", namespace, "--resync", resync];
    let operator = Operator::start(proxy.address, namespace, &arguments);
    (proxy, operator)
}

fn make(stand: &Stand, namespace: &str) {
    let spec = json!({
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 2048},
        "prefill": {"replicas": 1}, "decode": {"replicas": 1, "maxBatch": 4},
    });
    stand.make_deployment(namespace, "demo", &spec);
}

fn change(stand: &Stand, namespace: &str, context: u32) {
    let fields = json!({"spec": {"model": {"contextLength": context}}});
    stand.patch_deployment(namespace, "demo", "", &fields);
}

/// Waits until the deployment is settled, with Pods of only its newest plan.
fn settle(stand: &Stand, namespace: &str) {
    wait_until("the deployment is settled", PATIENCE, || {
        let deployment = stand.deployment(namespace, "demo")?;
        let objects = stand.objects(namespace);
        let pods = objects.iter().filter(|o| o["kind"] == "pods").count();
        (is_settled(&deployment) && pods == 3).then_some(())
    });
}

#[test]
fn storms_of_refusals_pass() {
    let Some(stand) = stand(&Options::default()) else {
        return;
    };
    for (name, code) in [("conflict", 409), ("busy", 429), ("broken", 500)] {
        let (proxy, mut operator) = start(&stand, name, "20s");
        proxy.set_faults(Faults {
            refused_percent: [(code, 50)].into(),
            refuse_reads: code != 409,
            ..Faults::default()
        });
        make(&stand, name);
        std::thread::sleep(Duration::from_secs(8));
        change(&stand, name, 1024);
        std::thread::sleep(Duration::from_secs(8));
        let busy = proxy.request_count();
        assert!(busy < 1500, "{name}: {busy} requests in 16 s of refusals");
        proxy.set_faults(Faults::default());
        settle(&stand, name);
        let writes = proxy.write_count();
        assert!(writes < MOST_WRITES, "{name}: {writes} writes");
        assert!(operator.ended().is_none(), "{}", operator.log());
    }
}

#[test]
fn late_and_broken_watches_do_no_harm() {
    let Some(stand) = stand(&Options::default()) else {
        return;
    };
    let faults = [
        (
            "late",
            Faults {
                watch_delay: Some(Duration::from_secs(2)),
                ..Faults::default()
            },
        ),
        (
            "cut",
            Faults {
                watch_life: Some(Duration::from_millis(700)),
                ..Faults::default()
            },
        ),
        (
            "mixed",
            Faults {
                watch_jitter: Some(Duration::from_millis(1500)),
                ..Faults::default()
            },
        ),
        (
            "lost",
            Faults {
                watch_lost_percent: 40,
                watch_life: Some(Duration::from_secs(3)),
                ..Faults::default()
            },
        ),
    ];
    for (name, faults) in faults {
        stand.make_namespace(name);
        let proxy = stand.proxy();
        proxy.set_faults(faults);
        let arguments = ["--namespaces", name, "--resync", "1s"];
        let mut operator = Operator::start(proxy.address, name, &arguments);
        make(&stand, name);
        settle(&stand, name);
        change(&stand, name, 1024);
        settle(&stand, name);
        let writes = proxy.write_count();
        assert!(writes < MOST_WRITES, "{name}: {writes} writes");
        assert!(operator.ended().is_none(), "{}", operator.log());
    }
}

#[test]
fn the_api_server_may_go_and_come_back() {
    let options = Options {
        breaks: true,
        ..Options::default()
    };
    let Some(stand) = stand(&options) else { return };
    let (proxy, mut operator) = start(&stand, "restart", "20s");
    make(&stand, "restart");
    settle(&stand, "restart");
    let before = operator.pid();
    stand.cluster().stop_api_server();
    std::thread::sleep(Duration::from_secs(3));
    stand.cluster().start_api_server();
    change(&stand, "restart", 1024);
    settle(&stand, "restart");
    assert!(operator.ended().is_none(), "{}", operator.log());
    assert_eq!(operator.pid(), before);
    let writes = proxy.write_count();
    assert!(writes < MOST_WRITES, "{writes} writes");
}

#[test]
fn what_changes_nothing_writes_nothing() {
    let options = Options {
        audit: true,
        breaks: true,
        ..Options::default()
    };
    let Some(stand) = stand(&options) else { return };
    let (proxy, mut operator) = start(&stand, "idle", "500ms");
    make(&stand, "idle");
    settle(&stand, "idle");
    // Echoes of the last writes.
    std::thread::sleep(Duration::from_secs(3));
    let (writes, requests) = (proxy.write_count(), proxy.request_count());
    let audited = |stand: &Stand| {
        let log = stand.cluster().audit_log();
        log.into_iter().filter(|e| e.namespace == "idle").count()
    };
    let on_record = audited(&stand);
    let metrics = format!("http://{}", operator.metrics_address());
    let reconciles = || Metrics::of(&metrics).count("hearth_operator_reconciles_total");
    let before = reconciles();
    let began = Instant::now();
    std::thread::sleep(Duration::from_secs(20));
    let after = reconciles();
    assert!(
        after - before > 20.0,
        "{} visits in {:?}",
        after - before,
        began.elapsed()
    );
    assert_eq!(
        proxy.write_count(),
        writes,
        "{:?}",
        &proxy.writes()[writes..]
    );
    assert_eq!(audited(&stand), on_record);
    // It does not read either: watches deliver changes.
    let asked = proxy.request_count() - requests;
    assert!(asked < 10, "{asked} requests though nothing changed");

    tells_of_deployments(&stand, &metrics);

    // It terminates cleanly when asked to.
    assert_eq!(operator.terminate(), Some(0), "{}", operator.log());
    let log = operator.log();
    assert!(log.contains("ending"), "{log}");
}

/// Asserts what the operator exports of the deployment and its node, and that nothing of it is left once it is deleted.
fn tells_of_deployments(stand: &Stand, metrics: &str) {
    let read = || Metrics::of(metrics);
    let now = read();
    let of_operator = ["hearth_operator_", "hearth_deployment_", "hearth_node_"];
    let asked: Vec<String> = queried_metrics()
        .into_iter()
        .filter(|name| of_operator.iter().any(|start| name.starts_with(start)))
        .filter(|name| !now.names().contains(name))
        .collect();
    assert!(asked.is_empty(), "the dashboard asks for {asked:?}");

    let whose = [r#"namespace="idle""#, r#"name="demo""#];
    let value = |name: &str, label: &str| now.sum(name, &[whose[0], whose[1], label]);
    let flag = |kind: &str| value("hearth_deployment_condition", &format!(r#"type="{kind}""#));
    assert_eq!((flag("Ready"), flag("Degraded")), (1.0, 0.0));
    for pool in ["gateway", "prefill", "decode"] {
        let pool = format!(r#"pool="{pool}""#);
        assert_eq!(value("hearth_deployment_pool_wanted", &pool), 1.0);
        assert_eq!(value("hearth_deployment_pool_ready", &pool), 1.0);
    }
    assert_eq!(value("hearth_deployment_plan_generation", ""), 1.0);
    assert_eq!(value("hearth_deployment_plans_made_total", ""), 1.0);
    assert_eq!(value("hearth_deployment_plans_replaced_total", ""), 0.0);
    let soon = SystemTime::now() + Duration::from_secs(30 * 86_400);
    let soon = soon
        .duration_since(UNIX_EPOCH)
        .expect("a time")
        .as_secs_f64();
    let expiry = "hearth_deployment_certificate_expiry_timestamp_seconds";
    assert!(value(expiry, "") > soon);
    let authority = "hearth_operator_certificate_authority_expiry_timestamp_seconds";
    assert!(now.sum(authority, &[]) > value(expiry, ""));

    let node = r#"node="large""#;
    let memory = |state: &str| {
        let state = format!(r#"state="{state}""#);
        now.sum("hearth_node_memory_bytes", &[node, &state])
    };
    let held = value("hearth_deployment_held_memory_bytes", node);
    assert!(held > 0.0);
    assert_eq!(memory("hearth"), held);
    assert_eq!(memory("allocatable"), 16.0 * f64::from(1 << 30));
    assert!(memory("free") > 0.0 && memory("free") < memory("allocatable") - held);

    // Another number of workers is a decision.
    let fields = json!({"spec": {"decode": {"replicas": 2}}});
    stand.patch_deployment("idle", "demo", "", &fields);
    let more = [r#"pool="decode""#, r#"direction="up""#];
    Metrics::wait_for(metrics, "a second decode worker was decided", |now| {
        now.values("hearth_deployment_scalings_total", &more) == [1.0]
            && now.count("hearth_deployment_plans_replaced_total") == 1.0
    });
    stand.delete_deployment("idle", "demo");
    Metrics::wait_for(metrics, "nothing is left of the deployment", |now| {
        let left = now.names();
        let left = left
            .iter()
            .filter(|it| it.starts_with("hearth_deployment_"));
        left.map(|name| now.values(name, &[]))
            .all(|it| it.is_empty())
    });
    let kept = read().sum(
        "hearth_node_memory_bytes",
        &[node, r#"state="allocatable""#],
    );
    assert_eq!(kept, memory("allocatable"));
}

#[test]
fn drift_is_put_right_and_what_was_deleted_is_made_again() {
    let Some(stand) = stand(&Options::default()) else {
        return;
    };
    let (_proxy, _operator) = start(&stand, "drift", "20s");
    make(&stand, "drift");
    settle(&stand, "drift");
    let before = stand.dump("drift");
    let cluster = stand.cluster();
    let arguments = |verb: &'static str, kind: &'static str, name: &'static str| {
        [verb, kind, name, "--namespace", "drift"]
    };
    let patch = r#"{"spec":{"ports":[{"name":"http","port":81,"targetPort":9999},{"name":"more","port":82}]}}"#;
    let mut change = arguments("patch", "service", "demo").to_vec();
    change.extend(["--type=merge", "--patch", patch]);
    cluster.kubectl(&change);
    cluster.kubectl(&arguments("delete", "networkpolicy", "demo-workers"));
    cluster.kubectl(&arguments("delete", "poddisruptionbudget", "demo-decode"));
    cluster.kubectl(&arguments("delete", "secret", "demo-hearth-certificates"));
    let pods = stand.objects("drift");
    let pod = pods.iter().find(|object| {
        object["kind"] == "pods" && object["metadata"]["labels"]["hearth.dev/role"] == "decode"
    });
    let name = pod
        .and_then(|pod| pod["metadata"]["name"].as_str())
        .unwrap_or_default()
        .to_owned();
    cluster.kubectl(&[
        "delete",
        "pod",
        &name,
        "--namespace",
        "drift",
        "--wait=false",
    ]);
    let whole = try_wait_until("all is as it was", PATIENCE, || {
        (stand.dump("drift") == before).then_some(())
    });
    if whole.is_err() {
        let after = stand.dump("drift");
        let other = |a: &str, b: &str| -> Vec<String> {
            let b: Vec<&str> = b.lines().collect();
            let lines = a.lines().filter(|line| !b.contains(line));
            lines.map(str::to_owned).collect()
        };
        panic!(
            "only before: {:#?}\nonly after: {:#?}",
            other(&before, &after),
            other(&after, &before)
        );
    }
}
