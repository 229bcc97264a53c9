//! Values of the nodes' power limits.

use hearth_tests::cluster::{Cluster, Options};
use serde_json::{Value, json};

use super::{defaults, helm, of_kind, one, render};

#[test]
fn limits_of_power_are_set_by_a_pod_of_their_own_and_only_when_asked_for() {
    let Some(helm) = helm() else { return };
    let usual = defaults(&helm, "{}");
    for kind in ["DaemonSet", "NetworkPolicy"] {
        assert!(of_kind(&usual, kind, "hearth-power").is_empty(), "{kind}");
    }
    let objects = defaults(
        &helm,
        "{agent: {runtimeClassName: nvidia, nodeSelector: {gpu: 'yes'}}, \
          power: {enabled: true, idleAfter: 90s, timeZone: Europe/Berlin, quietHours: \
          [{from: '22:30', to: '07:00', percent: 60}, {from: '13:00', to: '15:00', percent: 80}]}}",
    );
    let pod = &one(&objects, "DaemonSet", "hearth-power")["spec"]["template"]["spec"];
    assert_eq!(pod["runtimeClassName"], "nvidia");
    assert_eq!(pod["nodeSelector"], json!({"gpu": "yes"}));
    assert_eq!(pod["automountServiceAccountToken"], false);
    let containers = pod["containers"].as_array().expect("containers");
    assert_eq!(containers.len(), 1);
    let arguments = [
        "power",
        "--state-dir=/run/hearth-power",
        "--idle-percent=50",
        "--idle-after=90s",
        "--quiet-hours=22:30-07:00=60",
        "--quiet-hours=13:00-15:00=80",
        "--time-zone=Europe/Berlin",
    ];
    assert_eq!(containers[0]["args"], json!(arguments));
    let privileges = json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": false, "runAsUser": 0, "runAsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    assert_eq!(containers[0]["securityContext"], privileges);
    for field in ["hostNetwork", "hostPID", "hostIPC", "initContainers"] {
        assert!(pod[field].is_null(), "{field}");
    }
    let state = json!([{"name": "state", "hostPath": {"path": "/run/hearth-power", "type": "DirectoryOrCreate"}}]);
    assert_eq!(pod["volumes"], state);
    // Nobody reaches it, and it reaches nobody.
    let policy = &one(&objects, "NetworkPolicy", "hearth-power")["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress", "Egress"]));
    assert!(policy["ingress"].is_null() && policy["egress"].is_null());
    // The agent gains nothing by it.
    let agent = |objects: &[Value]| {
        let pod = &one(objects, "DaemonSet", "hearth-agent")["spec"]["template"]["spec"];
        pod["containers"][0]["securityContext"].clone()
    };
    assert_eq!(agent(&objects), agent(&usual));
}

/// A privilege beside `allowPrivilegeEscalation: false` is something that API servers look at.
#[test]
fn an_api_server_takes_that_pod() {
    let Some(helm) = helm() else { return };
    let Some(cluster) = Cluster::start_or_skip(&Options::default()) else {
        return;
    };
    let objects = defaults(&helm, "{power: {enabled: true}}");
    let file = tempfile::NamedTempFile::new().expect("file");
    let path = file.path().to_str().expect("path");
    let verdict = |object: &Value| {
        let mut object = object.clone();
        object["metadata"]["namespace"] = json!("default");
        std::fs::write(path, object.to_string()).expect("object");
        cluster.try_kubectl(&["create", "--dry-run=server", "--filename", path])
    };
    let power = one(&objects, "DaemonSet", "hearth-power");
    let taken = verdict(power);
    assert!(taken.is_ok(), "{taken:?}");
    // It would refuse a Pod that is privileged altogether.
    let mut privileged = power.clone();
    let container = &mut privileged["spec"]["template"]["spec"]["containers"][0];
    container["securityContext"]["privileged"] = json!(true);
    let refused = verdict(&privileged).expect_err("privileged");
    assert!(refused.contains("allowPrivilegeEscalation"), "{refused}");
}

#[test]
fn quiet_hours_alone_leave_idle_gpus_their_limits() {
    let Some(helm) = helm() else { return };
    let objects = defaults(
        &helm,
        "{power: {enabled: true, idlePercent: null, quietHours: [{from: '00:00', to: '24:00', percent: 60}]}}",
    );
    let told = one(&objects, "DaemonSet", "hearth-power").to_string();
    assert!(told.contains("--quiet-hours=00:00-24:00=60"), "{told}");
    assert!(!told.contains("--idle"), "{told}");
}

#[test]
fn policies_of_power_that_mean_nothing_are_refused() {
    let Some(helm) = helm() else { return };
    let span = |from: &str, to: &str, percent: u32| {
        format!("quietHours: [{{from: '{from}', to: '{to}', percent: {percent}}}]")
    };
    for (values, word) in [
        ("idlePercent: null".to_owned(), "power.idlePercent"),
        ("idlePercent: 0".to_owned(), "idlePercent"),
        ("idlePercent: 101".to_owned(), "idlePercent"),
        ("idleAfter: soon".to_owned(), "idleAfter"),
        ("timeZone: 'Central European Time'".to_owned(), "timeZone"),
        ("quiet: []".to_owned(), "quiet"),
        (span("25:00", "07:00", 60), "from"),
        (span("24:00", "07:00", 60), "from"),
        (span("22:30", "7:00", 60), "to"),
        (span("22:30", "07:00", 0), "percent"),
        (span("07:00", "07:00", 60), "00:00 to 24:00"),
    ] {
        let values = format!("{{power: {{enabled: true, {values}}}}}");
        let error = render(&helm, &values, &[]).expect_err(&values);
        assert!(error.contains(word), "{values}: {error}");
    }
}
