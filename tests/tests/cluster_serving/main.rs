//! Hearth on a cluster with two real kubelets, as its users see it: from `helm install` to an empty namespace.

mod addresses;
mod gpus;
mod hung;
mod ledger;
mod lifecycle;
mod memory;
mod nodes;
mod offline;
mod pinning;
mod plugin;
mod ready;
mod refusals;
mod release;
mod rings;
mod scaling;
#[path = "../../../worker/fetch/tests/support/mod.rs"]
mod server;
mod sharing;
mod soak;
mod sources;
mod streams;
mod uninstall;
mod upgrades;
mod versions;
mod virtual_devices;
mod zero;

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use hearth_tests::cluster::{AddressFamily, AuditEntry, Cluster, Options, condition, wait_until};
use hearth_tests::{Metrics, copy_of_demo, python, root, run};
use serde_json::{Value, json};

use release::{PATIENCE, SYSTEM, infd, names, patch, pods, pool, wait_until_settled};
use streams::Streams;

/// Requirements of every test; DNS and metrics need some seconds until they work.
const OPTIONS: Options = Options {
    nodes: 2,
    controllers: true,
    dns: false,
    metrics_server: false,
    fake_gpu: Vec::new(),
    fake_dra: Vec::new(),
    static_policies: false,
    family: AddressFamily::Ipv4,
    audit: false,
    breaks: true,
};

/// Connects to a worker without a certificate and prints how that ends.
const WITHOUT_CERTIFICATE: &str = r#"
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
try:
    with context.wrap_socket(socket.create_connection((sys.argv[1], 9400), 10)) as s:
        s.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        while s.recv(1024):
            pass
        print("it was let in")
except ssl.SSLError as error:
    print(error)
"#;

#[test]
fn from_install_to_uninstall() {
    // On a foreign cluster, the nodes' processes, the operator and the audit log are out of reach.
    let is_own = !hearth_tests::cluster::is_somebodys();
    let options = Options {
        dns: true,
        metrics_server: true,
        audit: is_own,
        breaks: is_own,
        ..OPTIONS
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let before = uninstall::kinds_in_use(&cluster);
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 2);
    release::helm_test(&cluster);
    the_demo_answers(&cluster);
    scales_by_kubectl(&cluster, is_own);
    // `restricted` forbids models on the nodes' disks.
    let unlabelled = format!("{POD_SECURITY}-");
    cluster.kubectl(&["label", "namespace", "default", &unlabelled]);
    refusals::are_refused_with_help(&cluster);
    if is_own {
        a_new_model_comes_beside_the_old_one(&cluster);
        a_killed_worker_costs_no_token(&cluster);
    }
    an_autoscaler_follows_the_cpu(&cluster);
    plugin::newcomers_see_what_goes_on(&cluster);
    plugin::shows_what_runs(&cluster);
    if is_own {
        nodes::drained_drops_nothing(&cluster);
        another_operator_takes_over(&cluster);
        a_quiet_operator_writes_nothing(&cluster);
        uninstall::keeps_the_authority_with_the_definitions(&cluster, &images);
    }
    uninstall::leaves_nothing(&cluster, &before);
}

#[test]
fn autoscalers_change_numbers_within_bounds() {
    let options = Options {
        dns: true,
        metrics_server: true,
        ..OPTIONS
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let images = cluster.import_hearth();
    cluster.import_toolbox();
    release::install_with(&cluster, &images, 1, &["nodes.minResidence=5s"]);
    zero::workers_end_and_start_again(&cluster);
    zero::an_autoscaler_ends_and_starts_workers(&cluster);
    zero::two_deployments_take_turns_on_one_node(&cluster);
    scaling::of_prefill_workers(&cluster);
    scaling::by_the_load(&cluster);
}

#[test]
fn models_arrive_and_gpus_are_claimed() {
    let options = Options {
        fake_gpu: vec![2],
        fake_dra: vec![1],
        ..OPTIONS
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let images = cluster.import_hearth();
    release::install_with(&cluster, &images, 1, &["agent.keepModels=1"]);
    sources::each_serves(&cluster);
    cluster.import_toolbox();
    gpus::are_not_held_for_nothing(&cluster);
    gpus::that_cannot_be_opened_are_told(&cluster);
    gpus::are_shared_in_one_pod(&cluster);
    gpus::are_claimed_by_uuid(&cluster);
}

#[test]
fn pods_and_services_are_as_asked_and_rest_when_told() {
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 1);
    let restricted = format!("{POD_SECURITY}=restricted");
    cluster.kubectl(&["label", "namespace", "default", &restricted, "--overwrite"]);
    lifecycle::a_template_is_in_running_pods(&cluster);
    lifecycle::annotations_of_the_service_come_and_go(&cluster);
    lifecycle::one_of_two_gateways_answers_alone(&cluster);
    lifecycle::a_rest_keeps_the_plan_and_frees_the_nodes(&cluster);
}

#[test]
fn what_two_cannot_hold_makes_room_and_a_lost_node_is_left() {
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let images = cluster.import_hearth();
    cluster.import_toolbox();
    // Pods on a lost node are removed after this time: long enough to see first that all of its work has moved.
    release::install_with(&cluster, &images, 1, &["nodes.forgetAfter=40s"]);
    old_down_first_drops_nothing(&cluster);
    certificates_change_under_streams(&cluster);
    the_operator_dies_in_the_middle_of_a_rollout(&cluster);
    a_failing_plan_rolls_back(&cluster);
    nodes::lost_is_left(&cluster);
}

#[test]
fn plans_leave_others_what_they_request() {
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let images = cluster.import_hearth();
    cluster.import_toolbox();
    release::install(&cluster, &images, 1);
    ledger::exclusive_runs_with_the_default_chart(&cluster);
    ledger::two_deployments_and_a_foreign_pod_share_the_nodes(&cluster);
    ledger::two_deployments_and_a_foreign_pod_run_on_one_node(&cluster);
    ledger::what_the_scheduler_refuses_moves(&cluster);
    ledger::a_right_that_was_taken_away_is_told(&cluster);
}

#[test]
fn kubelets_that_are_away_end_nothing() {
    for nodes in [1, 2] {
        let options = Options { nodes, ..OPTIONS };
        let Some(cluster) = Cluster::start_or_skip(&options) else {
            return;
        };
        let images = cluster.import_hearth();
        release::install(&cluster, &images, 1);
        nodes::away_end_nothing(&cluster);
        if nodes == 2 {
            nodes::one_away_moves_late_and_comes_back(&cluster);
            nodes::taints_move_unless_they_pass(&cluster);
        }
    }
}

#[test]
fn another_version_comes_to_one_deployment_after_the_other() {
    let Some(cluster) = Cluster::start_or_skip(&OPTIONS) else {
        return;
    };
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 1);
    upgrades::of_operator_and_workers(&cluster, &images);
}

fn demo() -> Value {
    let text = std::fs::read_to_string(root().join("manifests/examples/demo.yaml")).expect("demo");
    serde_norway::from_str(&text).expect("YAML")
}

/// Label with the Pod Security level of the deployments' namespace.
const POD_SECURITY: &str = "pod-security.kubernetes.io/enforce";

fn the_demo_answers(cluster: &Cluster) {
    let restricted = format!("{POD_SECURITY}=restricted");
    cluster.kubectl(&["label", "namespace", "default", &restricted, "--overwrite"]);
    cluster.apply(&demo().to_string());
    let found = wait_until_settled(cluster, "demo");
    for kind in [
        "Ready",
        "Planned",
        "ModelReady",
        "GatewayReady",
        "PrefillReady",
        "DecodeReady",
    ] {
        assert_eq!(condition(&found, kind), Some("True"), "{found:#}");
    }
    let table = cluster.kubectl(&["get", "infd", "demo"]);
    let row: Vec<&str> = table
        .lines()
        .nth(1)
        .expect("a row")
        .split_whitespace()
        .collect();
    assert_eq!(
        row[..6],
        ["demo", "hearth-demo", "True", "1", "1/1", "1/1"],
        "{table}"
    );
    let reach = cluster.reach("default", "demo", 80);
    let (code, stdout, stderr) = run(Command::new(python())
        .arg(root().join("tests/python/openai_client.py"))
        .arg(reach.v1()));
    assert_eq!(code, 0, "{stdout}\n{stderr}");
    let streams = Streams::start(&reach.v1());
    streams.wait_for(2 * streams::STREAMS);
    streams.finish();
    // Pods have no access to the API server.
    for pod in pods(cluster, "demo", "") {
        assert_eq!(
            pod["spec"]["automountServiceAccountToken"], false,
            "{pod:#}"
        );
    }
}

fn scales_by_kubectl(cluster: &Cluster, is_own: bool) {
    let kept = names(&pods(cluster, "demo", ""));
    cluster.kubectl(&["scale", "infd/demo", "--replicas=2"]);
    let found = wait_until_settled(cluster, "demo");
    assert_eq!(pool(&found, "decode")["summary"], "2/2", "{found:#}");
    let now = names(&pods(cluster, "demo", ""));
    assert!(kept.iter().all(|pod| now.contains(pod)), "{kept:?} {now:?}");
    let scale = cluster.kubectl(&["get", "infd/demo", "--subresource=scale", "--output=json"]);
    let scale: Value = serde_json::from_str(&scale).expect("JSON");
    assert_eq!(scale["status"]["replicas"], 2, "{scale:#}");
    if is_own {
        hung::is_said_and_left(cluster);
    }
    cluster.kubectl(&["scale", "infd/demo", "--replicas=1"]);
    wait_until_settled(cluster, "demo");
}

/// Creates a directory that workers can read: the test's nodes share the machine's file system.
fn open_directory() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir_in("/var/tmp").expect("directory");
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(directory.path(), open).expect("permissions");
    directory
}

/// Returns a model on the nodes' disks.
fn model_on_disk(directory: &tempfile::TempDir) -> Value {
    let model = copy_of_demo(directory.path());
    json!({"source": {"builtin": null, "hostPath": {"path": model}}, "servedName": "hearth-demo"})
}

fn a_new_model_comes_beside_the_old_one(cluster: &Cluster) {
    let directory = open_directory();
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let old = names(&pods(cluster, "demo", ""));
    patch(
        cluster,
        "demo",
        &json!({"model": model_on_disk(&directory)}),
    );
    let (found, most) = settled_with_most(cluster, "decode");
    assert_eq!(most, 2, "the old and the new beside each other");
    let new = names(&pods(cluster, "demo", ""));
    let is_new = |pod: &String| !old.contains(pod);
    assert!(new.iter().all(is_new), "{old:?} {new:?} {found:#}");
    streams.wait_for(streams::STREAMS);
    let builtin = json!({"source": {"hostPath": null, "builtin": {"name": "hearth-demo"}}});
    patch(cluster, "demo", &json!({"model": builtin}));
    wait_until_settled(cluster, "demo");
    streams.wait_for(streams::STREAMS);
    println!(
        "{} answers through two changes of the model",
        streams.finish()
    );
}

/// Waits until the current spec runs completely; returns the deployment and the largest number of a role's Pods that
/// ran at once until then.
fn settled_with_most(cluster: &Cluster, role: &str) -> (Value, usize) {
    let mut most = 0;
    let found = wait_until("the new model serves", PATIENCE, || {
        let running = |pod: &&Value| pod["status"]["phase"] == "Running";
        let count = pods(cluster, "demo", role).iter().filter(running).count();
        most = most.max(count);
        release::settled(cluster, "demo")
    });
    (found, most)
}

fn a_killed_worker_costs_no_token(cluster: &Cluster) {
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let decode = names(&pods(cluster, "demo", "decode"));
    assert!(cluster.kill_pod_processes("default", &decode[0]) > 0);
    streams.wait_for(2 * streams::STREAMS);
    streams.finish();
    wait_until("the kubelet counts one restart", PATIENCE, || {
        let after = pods(cluster, "demo", "decode");
        (after[0]["status"]["containerStatuses"][0]["restartCount"] == 1).then_some(())
    });
}

fn an_autoscaler_follows_the_cpu(cluster: &Cluster) {
    cluster.kubectl(&["scale", "infd/demo", "--replicas=1"]);
    let path = root().join("manifests/examples/hpa.yaml");
    let text = std::fs::read_to_string(path).expect("hpa.yaml");
    let mut hpa: Value = serde_norway::from_str(&text).expect("YAML");
    // Two cores are shared with the whole cluster here, so a lower target must do.
    hpa["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"] = json!(30);
    hpa["spec"]["maxReplicas"] = json!(2);
    cluster.apply(&hpa.to_string());
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    wait_until(
        "the autoscaler asks for a second worker",
        Duration::from_secs(150),
        || (infd(cluster, "demo")["spec"]["decode"]["replicas"] == 2).then_some(()),
    );
    let found = wait_until_settled(cluster, "demo");
    assert_eq!(pool(&found, "decode")["summary"], "2/2", "{found:#}");
    streams.finish();
    cluster.kubectl(&["delete", "hpa", "demo"]);
}

/// Checks the columns and the description of a deployment that has served for a while.
fn another_operator_takes_over(cluster: &Cluster) {
    let holder = || {
        let lease = cluster
            .get("lease", SYSTEM, "hearth-operator")
            .expect("Lease");
        lease["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let first = holder();
    assert!(!first.is_empty());
    let arguments = ["delete", "pod", &first, "--grace-period=0", "--force"];
    cluster.kubectl(&[&arguments[..], &["--namespace", SYSTEM]].concat());
    patch(
        cluster,
        "demo",
        &json!({"decode": {"replicas": 1, "maxBatch": 4}}),
    );
    wait_until_settled(cluster, "demo");
    assert_ne!(holder(), first);
}

/// Checks that reconciling everything every few seconds, and the node profiles every minute, writes nothing.
fn a_quiet_operator_writes_nothing(cluster: &Cluster) {
    // The definitions and the authority are kept for the following tests.
    release::upgrade(cluster, "operator.resync=2s,crds.keep=true");
    let writes = || {
        let log = cluster.audit_log();
        let by_us = log
            .into_iter()
            .filter(|entry| entry.user.contains(":hearth-operator") && entry.resource != "leases");
        by_us.collect::<Vec<_>>()
    };
    // Measurements settle after the last stream.
    std::thread::sleep(Duration::from_secs(15));
    let operators = cluster.reach(SYSTEM, "hearth-operator", 8081);
    let operators = format!("http://{}", operators.address());
    // Of either replica: only the leader's counter grows.
    let visits = || {
        let scrapes =
            (0..16).map(|_| Metrics::of(&operators).count("hearth_operator_reconciles_total"));
        scrapes.fold(0.0, f64::max)
    };
    let measured = || {
        let profiles = cluster.list("nodeprofiles", "", "");
        let times = profiles.into_iter().map(|profile| {
            let name = profile["metadata"]["name"].as_str().map(str::to_owned);
            (
                name.expect("a name"),
                profile["status"]["measuredAt"].clone(),
            )
        });
        times.collect::<BTreeMap<_, _>>()
    };
    let measured_before = measured();
    let (before, visits_before) = (writes().len(), visits());
    std::thread::sleep(Duration::from_secs(65));
    let (after, visits_after) = (writes(), visits());
    let measured_after = measured();
    // A node that was busy with other tests may be measured again: that is news.
    let is_news = |entry: &&AuditEntry| {
        entry.resource == "nodeprofiles"
            && measured_before.get(&entry.name) != measured_after.get(&entry.name)
    };
    let idle: Vec<_> = after[before..].iter().filter(|it| !is_news(it)).collect();
    assert!(idle.is_empty(), "{idle:#?}");
    let visited = visits_after - visits_before;
    assert!(visited > 10.0, "{visited} visits in 65 s");
}

/// Old and new do not fit together if foreign Pods leave room for only a second gateway.
fn old_down_first_drops_nothing(cluster: &Cluster) {
    cluster.apply(&demo().to_string());
    wait_until_settled(cluster, "demo");
    let gateway = &pods(cluster, "demo", "gateway")[0]["spec"];
    let needed = ledger::millis(&gateway["containers"][0]["resources"]["requests"]["cpu"]);
    for node in ["node-1", "node-2"] {
        let is_its_node = gateway["nodeName"] == node;
        let room = if is_its_node { needed } else { 0 };
        ledger::occupy_all_but(cluster, node, room + ledger::RESERVE_MILLIS);
    }
    let directory = open_directory();
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    patch(
        cluster,
        "demo",
        &json!({"model": model_on_disk(&directory)}),
    );
    let (found, most) = settled_with_most(cluster, "prefill");
    assert_eq!(found["status"]["plan"]["generation"], 2, "{found:#}");
    assert_eq!(most, 1, "two prefill workers at a time");
    streams.wait_for(streams::STREAMS);
    println!("{} answers while the old made room", streams.finish());
    for node in ["node-1", "node-2"] {
        ledger::leave(cluster, node);
    }
    let builtin = json!({"source": {"hostPath": null, "builtin": {"name": "hearth-demo"}}});
    patch(cluster, "demo", &json!({"model": builtin}));
    wait_until_settled(cluster, "demo");
}

/// A missing Secret is rewritten with new certificates, which every process loads while running, as at a renewal.
fn certificates_change_under_streams(cluster: &Cluster) {
    let shown = |pod: &Value| {
        let ip = pod["status"]["podIP"].as_str().expect("an address");
        let script = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 9400)))";
        let (code, certificate, stderr) = run(Command::new(python()).args(["-c", script, ip]));
        assert_eq!(code, 0, "{stderr}");
        certificate
    };
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let workers: Vec<Value> = ["prefill", "decode"]
        .iter()
        .flat_map(|role| pods(cluster, "demo", role))
        .collect();
    let before: Vec<String> = workers.iter().map(shown).collect();
    cluster.kubectl(&["delete", "secret", "demo-hearth-certificates"]);
    wait_until(
        "all workers show new certificates",
        Duration::from_secs(150),
        || {
            let is_new = |(pod, old): (&Value, &String)| shown(pod) != *old;
            workers.iter().zip(&before).all(is_new).then_some(())
        },
    );
    // New and old connections alike continue.
    streams.wait_for(4 * streams::STREAMS);
    println!("{} answers through new certificates", streams.finish());
    // No client without a certificate is let in.
    let ip = workers[0]["status"]["podIP"].as_str().expect("an address");
    let (_, told, stderr) = run(Command::new(python()).args(["-c", WITHOUT_CERTIFICATE, ip]));
    assert!(told.contains("CERTIFICATE_REQUIRED"), "{told}{stderr}");
    let now = names(&pods(cluster, "demo", ""));
    assert!(
        names(&workers).iter().all(|worker| now.contains(worker)),
        "{now:?}"
    );
}

fn the_operator_dies_in_the_middle_of_a_rollout(cluster: &Cluster) {
    let reach = cluster.reach("default", "demo", 80);
    let streams = Streams::start(&reach.v1());
    streams.wait_for(streams::STREAMS);
    let generation = infd(cluster, "demo")["status"]["plan"]["generation"].clone();
    patch(cluster, "demo", &json!({"decode": {"maxBatch": 3}}));
    wait_until("the rollout begins", PATIENCE, || {
        (infd(cluster, "demo")["status"]["plan"]["generation"] != generation).then_some(())
    });
    let selector = "--selector=app.kubernetes.io/component=operator";
    let arguments = ["delete", "pods", selector, "--grace-period=0", "--force"];
    cluster.kubectl(&[&arguments[..], &["--namespace", SYSTEM]].concat());
    wait_until_settled(cluster, "demo");
    streams.wait_for(streams::STREAMS);
    streams.finish();
    let names = names(&pods(cluster, "demo", ""));
    assert_eq!(names.len(), 3, "{names:?}");
}

/// A model that is damaged after its inspection prevents the new workers from starting.
fn a_failing_plan_rolls_back(cluster: &Cluster) {
    let reach = cluster.reach("default", "demo", 80);
    let directory = open_directory();
    let model = model_on_disk(&directory);
    let tokenizer = directory.path().join("model/tokenizer.json");
    let streams = Streams::start(&reach.v1());
    let good = infd(cluster, "demo")["status"]["plan"]["name"].clone();
    patch(
        cluster,
        "demo",
        &json!({"model": model, "rollout": {"progressDeadline": "20s"}}),
    );
    // The model is inspected while it is intact, and damaged before the workers read it.
    wait_until("the new plan is made", PATIENCE, || {
        (infd(cluster, "demo")["status"]["plan"]["name"] != good).then_some(())
    });
    std::fs::write(&tokenizer, "{}").expect("damage");
    let found = wait_until(
        "the last good plan is back",
        Duration::from_secs(150),
        || {
            let found = infd(cluster, "demo");
            (found["status"]["plan"]["name"] == good && condition(&found, "Ready") == Some("True"))
                .then_some(found)
        },
    );
    let (reason, message) = release::said(&found, "Progressing");
    println!("{reason}: {message}");
    assert!(message.contains("tokenizer.json"), "{found:#}");
    streams.wait_for(streams::STREAMS);
    streams.finish();
}
