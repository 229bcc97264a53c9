//! The chart: for every relevant set of values, helm renders valid Kubernetes objects of all versions that it claims
//! to support, grants no more rights than the table in docs/cluster.md, and matches manifests/.

mod install;
mod metrics;
mod power;
mod readme;
mod store;
mod tracing;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_tests::{python, root, run, skipped};
use serde::Deserialize;
use serde_json::{Value, json};

const VERSIONS: &str = "1.30,1.31,1.32,1.33,1.34,1.35,1.36";

/// Values that cover every branch of the templates.
const VALUES: [(&str, &str); 5] = [
    ("defaults", "{}"),
    ("two namespaces", "{namespaces: [team-a, team-b]}"),
    ("the whole cluster", "{namespaces: [], crds: {keep: false}}"),
    (
        "everything",
        "{image: {registry: registry.lan:5000/x, tag: v9, workerTag: v8, pullPolicy: Always, pullSecrets: [one, two]}, \
          nodes: {moveAfter: 1m, forgetAfter: 10m, minResidence: 5m, passingTaints: [a.b/c, d]}, \
          operator: {replicas: 3, logFormat: json, nodeSelector: {a: b}, tolerations: [{key: k, effect: NoSchedule}], \
                     affinity: {nodeAffinity: {}}, priorityClassName: high, podAnnotations: {x: 'y'}}, \
          ledger: {allPods: false, reserve: {cpu: 2}, unseen: {cpu: '1.5', memory: 4Gi}}, gpu: {runtimeClassName: nvidia, claims: false}, \
          hostPath: {allowedPrefixes: [/models, \"/srv/a b/'c'\"]}, agent: {runtimeClassName: nvidia, store: {quota: 200Gi, downloadRate: 20Mi}, virtualDevices: {a.b: 'virtual:memory=8Gi,copy=1GB/s', '*': 'virtual:memory=1Gi'}, devicePluginDirectory: /var/lib/kubelet/device-plugins, directory: /data/hearth, keepModels: 0, diskReservePercent: 20, \
                  fetch: {allowedRanges: [10.43.7.7/32, 'fd00::/64'], clusterRanges: [10.42.0.0/16], hubEndpoint: 'https://hub.lan/hf'}, nodeSelector: {a: b}, affinity: {nodeAffinity: {}}, priorityClassName: low, \
                  podAnnotations: {x: 'y'}}, \
          tracing: {otlpEndpoint: 'http://collector.monitoring.svc:4318', sampleRatio: 0.1}, power: {enabled: true, quietHours: [{from: '22:30', to: '24:00', percent: 60}]}, \
          metrics: {serviceMonitor: {enabled: true, labels: {release: prom}}, prometheusRules: {enabled: true, labels: {release: prom}}, dashboard: {enabled: true}}}",
    ),
    (
        "as little as possible",
        "{hostPath: {allowedPrefixes: []}, agent: {enabled: false}, networkPolicies: {enabled: false}, crds: {install: false}, \
          operator: {resources: {}, replicas: 0}, image: {registry: ''}}",
    ),
];

/// Returns the helm of the test cluster or of the system.
fn helm() -> Option<PathBuf> {
    let (_, directories, _) =
        run(Command::new(root().join("tests/cluster/build.sh")).arg("directories"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = directories.lines().map(PathBuf::from);
    let found = own
        .chain(std::env::split_paths(&path))
        .map(|directory| directory.join("helm"));
    let found = found.into_iter().find(|helm| helm.is_file());
    if found.is_none() {
        skipped(
            "there is no helm, so nothing was rendered: run tests/cluster/build.sh, which needs Go",
        );
    }
    found
}

fn chart() -> PathBuf {
    root().join("charts/hearth")
}

/// Renders the chart with the values; returns standard output, or helm's error.
fn render(helm: &Path, values: &str, arguments: &[&str]) -> Result<String, String> {
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), values).expect("values");
    let (code, stdout, stderr) = run(Command::new(helm)
        .args(["template", "hearth"])
        .arg(chart())
        .args(["--namespace", "hearth-system", "--values"])
        .arg(file.path())
        .args(arguments));
    if code == 0 { Ok(stdout) } else { Err(stderr) }
}

fn objects(text: &str) -> Vec<Value> {
    serde_norway::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).expect("YAML"))
        .filter(|object| !object.is_null())
        .collect()
}

fn defaults(helm: &Path, values: &str) -> Vec<Value> {
    objects(&render(helm, values, &[]).expect("rendered"))
}

fn of_kind<'a>(objects: &'a [Value], kind: &str, name: &str) -> Vec<&'a Value> {
    let is_wanted = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
    objects.iter().filter(is_wanted).collect()
}

fn one<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = of_kind(objects, kind, name);
    assert_eq!(found.len(), 1, "{kind} {name}");
    found[0]
}

#[test]
fn the_workers_image_may_have_a_tag_of_its_own() {
    let Some(helm) = helm() else { return };
    let images = |values: &str| -> Vec<String> {
        let objects = defaults(&helm, values);
        let agent = one(&objects, "DaemonSet", "hearth-agent");
        let operator = one(&objects, "Deployment", "hearth-operator");
        let container =
            |object: &Value| object["spec"]["template"]["spec"]["containers"][0].clone();
        let environment = container(operator)["env"].as_array().cloned();
        let mut environment = environment.into_iter().flatten();
        let told = environment.find(|one| one["name"] == "HEARTH_WORKER_IMAGE");
        let told = told.map(|one| one["value"].clone()).unwrap_or_default();
        let all = [
            container(operator)["image"].clone(),
            container(agent)["image"].clone(),
            told,
        ];
        let tag = |image: &Value| {
            image
                .as_str()
                .and_then(|i| i.rsplit(':').next())
                .map(str::to_owned)
        };
        all.iter().filter_map(tag).collect()
    };
    assert_eq!(images("{image: {tag: v9}}"), ["v9", "v9", "v9"]);
    assert_eq!(
        images("{image: {tag: v9, workerTag: v8}}"),
        ["v9", "v8", "v8"]
    );
}

#[test]
fn every_set_of_values_renders_valid_kubernetes() {
    let Some(helm) = helm() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let mut files = Vec::new();
    for (what, values) in VALUES {
        let text = render(&helm, values, &[]).unwrap_or_else(|error| panic!("{what}: {error}"));
        let file = directory.path().join(format!("{what}.yaml"));
        std::fs::write(&file, text).expect("file");
        files.push(file);
    }
    files.push(root().join("manifests/install.yaml"));
    let examples = std::fs::read_dir(root().join("manifests/examples")).expect("examples");
    files.extend(examples.flatten().map(|entry| entry.path()));
    let (code, output) = validated(&files);
    assert_eq!(code, 0, "{output}");

    // The validator detects an error.
    let wrong = directory.path().join("wrong.yaml");
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}});
    std::fs::write(&wrong, object.to_string()).expect("file");
    let (code, output) = validated(&[wrong]);
    assert!(code == 1 && output.contains("prots"), "{output}");
}

/// Checks manifests against the schemas of all versions; returns 0 without findings, and the findings.
fn validated(files: &[PathBuf]) -> (i32, String) {
    let validator = root().join("tests/python/validate_manifests.py");
    let mut command = Command::new(python());
    let (code, stdout, stderr) = run(command.arg(validator).arg(VERSIONS).args(files));
    (code, format!("{stdout}\n{stderr}"))
}

#[test]
fn the_chart_passes_helm_s_own_lint() {
    let Some(helm) = helm() else { return };
    let file = tempfile::NamedTempFile::new().expect("file");
    for (what, values) in VALUES {
        std::fs::write(file.path(), values).expect("values");
        let (code, stdout, stderr) = run(Command::new(&helm)
            .args(["lint", "--strict", "--quiet", "--values"])
            .arg(file.path())
            .arg(chart()));
        assert_eq!(code, 0, "{what}: {stdout}\n{stderr}");
    }
}

#[test]
fn values_that_mean_nothing_are_refused() {
    let Some(helm) = helm() else { return };
    for (values, word) in [
        ("{namespace: default}", "namespace"),
        ("{operator: {replica: 2}}", "replica"),
        ("{operator: {replicas: many}}", "replicas"),
        ("{image: {pullPolicy: Sometimes}}", "pullPolicy"),
        ("{namespaces: [Not_A_Name]}", "namespaces"),
        ("{agent: {directory: relative}}", "directory"),
        ("{certificates: {lifetime: forever}}", "lifetime"),
        ("{agent: {diskReservePercent: 100}}", "diskReservePercent"),
        ("{agent: {store: {quota: 0Gi}}}", "quota"),
        ("{agent: {store: {downloadRate: fast}}}", "downloadRate"),
        (
            "{agent: {fetch: {privatePatienceSeconds: 0}}}",
            "privatePatienceSeconds",
        ),
        (
            "{agent: {fetch: {allowedRanges: [10.0.0.1]}}}",
            "allowedRanges",
        ),
        ("{hostPath: {allowedPrefixes: [models]}}", "allowedPrefixes"),
        (
            "{hostPath: {allowedPrefixes: [/models/../etc]}}",
            "allowedPrefixes",
        ),
        (
            "{hostPath: {allowedPrefixes: ['/a,/b']}}",
            "allowedPrefixes",
        ),
    ] {
        let error = render(&helm, values, &[]).expect_err(values);
        assert!(error.contains(word), "{values}: {error}");
    }
}

#[test]
fn what_is_generated_is_as_new_as_its_sources() {
    let Some(_) = helm() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let (code, _, stderr) =
        run(Command::new(root().join("scripts/manifests.sh")).arg(directory.path()));
    assert_eq!(code, 0, "{stderr}");
    let mut files = vec![PathBuf::from("manifests/install.yaml")];
    let crds = std::fs::read_dir(root().join("charts/hearth/files/crds")).expect("CRDs");
    files.extend(
        crds.flatten()
            .map(|entry| PathBuf::from("charts/hearth/files/crds").join(entry.file_name())),
    );
    assert_eq!(files.len(), 5, "{files:?}");
    for file in files {
        let [here, generated] = [root().join(&file), directory.path().join(&file)]
            .map(|path| std::fs::read_to_string(path).unwrap_or_default());
        assert!(
            here == generated,
            "{} is not what its sources give: run make manifests",
            file.display()
        );
    }
}

/// Returns rights as lines of `verb group/resource`, with the names that they apply to.
fn rights(role: &Value) -> BTreeSet<String> {
    let texts = |value: &Value| -> Vec<String> {
        let items = value.as_array().into_iter().flatten();
        items
            .map(|item| item.as_str().expect("text").to_owned())
            .collect()
    };
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().expect("rules") {
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for verb in texts(&rule["verbs"]) {
                    let names = texts(&rule["resourceNames"]).join(",");
                    rights.insert(
                        format!("{verb} {group}/{resource} {names}")
                            .trim()
                            .to_owned(),
                    );
                }
            }
        }
    }
    rights
}

/// Rights to see other users' Pods and devices.
const SEEING: [&str; 6] = [
    "list /pods",
    "watch /pods",
    "list resource.k8s.io/resourceclaims",
    "list resource.k8s.io/resourceslices",
    "watch resource.k8s.io/resourceclaims",
    "watch resource.k8s.io/resourceslices",
];

#[test]
fn the_operator_has_the_rights_that_it_needs_and_no_others() {
    let Some(helm) = helm() else { return };
    let objects = defaults(&helm, "{namespaces: [team-a, team-b]}");
    let cluster = rights(one(&objects, "ClusterRole", "hearth-operator"));
    let wanted = [
        "get /nodes",
        "list /nodes",
        "watch /nodes",
        "create hearth.dev/nodeprofiles",
        "get hearth.dev/nodeprofiles",
        "list hearth.dev/nodeprofiles",
        "patch hearth.dev/nodeprofiles",
        "watch hearth.dev/nodeprofiles",
        "patch hearth.dev/nodeprofiles/status",
        "get hearth.dev/inferencedeployments",
        "list hearth.dev/inferencedeployments",
        "watch hearth.dev/inferencedeployments",
        "patch hearth.dev/inferencedeployments/status",
        "list networking.k8s.io/servicecidrs",
        // The owner of an agent's token: documented with the agents' certificates.
        "create authentication.k8s.io/tokenreviews",
    ];
    let mut wanted: BTreeSet<String> = wanted.map(str::to_owned).into();
    let unseeing = defaults(
        &helm,
        "{namespaces: [team-a], ledger: {allPods: false}, gpu: {claims: false}}",
    );
    assert_eq!(
        rights(one(&unseeing, "ClusterRole", "hearth-operator")),
        wanted
    );
    wanted.extend(SEEING.map(str::to_owned));
    assert_eq!(cluster, wanted);

    let roles = of_kind(&objects, "Role", "hearth-deployments");
    let places: Vec<&Value> = roles
        .iter()
        .map(|role| &role["metadata"]["namespace"])
        .collect();
    assert_eq!(places, ["team-a", "team-b"]);
    let own = one(&objects, "Role", "hearth-operator");
    assert_eq!(own["metadata"]["namespace"], "hearth-system");
    let all: BTreeSet<String> = roles
        .iter()
        .copied()
        .chain([own])
        .flat_map(rights)
        .chain(cluster)
        .collect();
    for right in &all {
        assert!(
            !right.contains('*') && !right.contains("exec") && !right.contains("escalate"),
            "{right}"
        );
        assert!(!right.contains("pods/"), "{right}");
        // The Secret that signs all certificates is never deleted by its operator.
        assert!(
            right != "delete /secrets hearth-ca,hearth-agent-tls",
            "{right}"
        );
    }
    assert!(!rights(own).contains("delete /secrets"));
    assert!(all.contains("get /secrets hearth-ca,hearth-agent-tls"));

    // All namespaces must be requested explicitly; it is never the default.
    let everywhere = defaults(&helm, "{namespaces: []}");
    assert!(of_kind(&everywhere, "Role", "hearth-deployments").is_empty());
    let cluster = rights(one(&everywhere, "ClusterRole", "hearth-operator"));
    assert!(cluster.contains("create /pods") && cluster.contains("get /secrets"));
}

#[test]
fn only_the_operator_is_known_to_the_api_server() {
    let Some(helm) = helm() else { return };
    let objects = defaults(&helm, "{}");
    for binding in objects.iter().filter(|object| {
        object["kind"]
            .as_str()
            .is_some_and(|kind| kind.ends_with("RoleBinding"))
    }) {
        assert_eq!(
            binding["subjects"][0]["name"], "hearth-operator",
            "{binding}"
        );
    }
    let agent = &one(&objects, "DaemonSet", "hearth-agent")["spec"]["template"]["spec"];
    assert_eq!(agent["automountServiceAccountToken"], false);
    // Its only token is for the operator: the API server does not accept it.
    let volumes = agent["volumes"].as_array().expect("volumes").iter();
    let tokens: Vec<&Value> = volumes
        .flat_map(|volume| {
            volume["projected"]["sources"]
                .as_array()
                .into_iter()
                .flatten()
        })
        .map(|source| &source["serviceAccountToken"])
        .collect();
    let token = json!({"audience": "hearth-operator", "expirationSeconds": 3600, "path": "token"});
    assert_eq!(tokens, [&token]);
    let reviews = "create authentication.k8s.io/tokenreviews".to_owned();
    assert!(rights(one(&objects, "ClusterRole", "hearth-operator")).contains(&reviews));
    // And only its account writes plans.
    let account = &one(&objects, "Deployment", "hearth-operator")["spec"]["template"]["spec"];
    assert_eq!(account["serviceAccountName"], "hearth-operator");
    let policy = one(&objects, "ValidatingAdmissionPolicy", "hearth-plans").to_string();
    assert!(policy.contains("system:serviceaccount:hearth-system:hearth-operator"));
    let binding = one(&objects, "ValidatingAdmissionPolicyBinding", "hearth-plans");
    assert_eq!(binding["spec"]["validationActions"], json!(["Deny"]));
    let alone = defaults(&helm, "{agent: {enabled: false}}");
    assert!(!rights(one(&alone, "ClusterRole", "hearth-operator")).contains(&reviews));
}

#[test]
fn pods_are_restricted_but_for_what_the_docs_name() {
    let Some(helm) = helm() else { return };
    let restricted = json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": true,
    });
    let nobody = json!({
        "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    let objects = defaults(&helm, "{}");
    let pods = [
        &one(&objects, "Deployment", "hearth-operator")["spec"]["template"]["spec"],
        &one(&objects, "DaemonSet", "hearth-agent")["spec"]["template"]["spec"],
        &one(&objects, "Pod", "hearth-test-ready")["spec"],
    ];
    for pod in pods {
        assert_eq!(pod["securityContext"], nobody);
        assert_eq!(pod["containers"].as_array().map(Vec::len), Some(1));
        assert_eq!(pod["containers"][0]["securityContext"], restricted);
        for field in ["hostNetwork", "hostPID", "hostIPC"] {
            assert!(pod[field].is_null(), "{field}");
        }
    }
    // The exceptions: a host directory, and the step that hands it to the agent's user.
    let [operator, agent, test] = pods;
    assert!(
        operator["volumes"].is_null()
            && operator["initContainers"].is_null()
            && test["volumes"].is_null()
    );
    let kinds = |volume: &Value| {
        volume
            .as_object()
            .map(|volume| volume.keys().cloned().collect::<Vec<_>>())
    };
    let volumes = agent["volumes"]
        .as_array()
        .expect("volumes")
        .iter()
        .filter_map(kinds)
        .flatten();
    let volumes: Vec<String> = volumes.filter(|key| key != "name").collect();
    assert_eq!(volumes, ["hostPath", "secret", "projected", "emptyDir"]);
    let mut own = restricted;
    own["capabilities"] = json!({"drop": ["ALL"], "add": ["CHOWN"]});
    own["runAsNonRoot"] = json!(false);
    own["runAsUser"] = json!(0);
    own["runAsGroup"] = json!(0);
    assert_eq!(agent["initContainers"].as_array().map(Vec::len), Some(1));
    assert_eq!(agent["initContainers"][0]["securityContext"], own);
}

/// Returns the environment of the operator's container.
fn environment(objects: &[Value]) -> BTreeMap<String, Value> {
    let pod = &one(objects, "Deployment", "hearth-operator")["spec"]["template"]["spec"];
    let variables = pod["containers"][0]["env"].as_array().expect("env").iter();
    let pair = |variable: &Value| {
        let name = variable["name"].as_str().expect("name").to_owned();
        (name, variable["value"].clone())
    };
    variables.map(pair).collect()
}

#[test]
fn the_operator_and_the_policy_are_told_the_same_directories() {
    let Some(helm) = helm() else { return };
    for (values, told, listed) in [
        (
            "{}",
            "/models,/var/lib/hearth/models",
            r#"["/models","/var/lib/hearth/models"]"#,
        ),
        (
            "{agent: {directory: /data}}",
            "/models,/data/models",
            r#"["/models","/data/models"]"#,
        ),
        ("{hostPath: {allowedPrefixes: []}}", "", "[]"),
        ("{hostPath: {allowedPrefixes: [/]}}", "/", r#"[""]"#),
        (
            "{hostPath: {allowedPrefixes: ['/a\"b/']}}",
            "/a\"b/",
            r#"["/a\"b"]"#,
        ),
    ] {
        let objects = defaults(&helm, values);
        assert_eq!(environment(&objects)["HEARTH_HOST_PATHS"], told, "{values}");
        let policy = one(&objects, "ValidatingAdmissionPolicy", "hearth-host-paths");
        let variables = policy["spec"]["variables"].as_array().expect("variables");
        let prefixes = variables.iter().find(|v| v["name"] == "prefixes");
        assert_eq!(
            prefixes.expect("prefixes")["expression"],
            listed,
            "{values}"
        );
    }
}

#[test]
fn agents_and_operator_are_told_what_is_fetched_from_and_what_stays_free() {
    let Some(helm) = helm() else { return };
    let arguments = |objects: &[Value]| -> Vec<String> {
        let pod = &one(objects, "DaemonSet", "hearth-agent")["spec"]["template"]["spec"];
        let all = pod["containers"][0]["args"]
            .as_array()
            .expect("args")
            .clone();
        all.iter()
            .map(|word| word.as_str().expect("text").to_owned())
            .collect()
    };
    let objects = defaults(&helm, "{}");
    assert!(arguments(&objects).contains(&"--disk-reserve=17".to_owned()));
    assert!(
        !arguments(&objects)
            .iter()
            .any(|word| word.starts_with("--allow-range"))
    );
    assert_eq!(environment(&objects).get("HEARTH_CLUSTER_RANGES"), None);
    assert_eq!(environment(&objects).get("HEARTH_HUB_ENDPOINT"), None);
    assert_eq!(environment(&objects)["HEARTH_KEEP_AUTHORITY"], "true");
    let objects = defaults(
        &helm,
        "{agent: {diskReservePercent: 0, fetch: {allowedRanges: [10.43.7.7/32, 10.9.0.0/16], \
          clusterRanges: [10.42.0.0/16, 'fd42::/48'], hubEndpoint: 'https://hub.lan', privatePatienceSeconds: 90}}, crds: {keep: false}}",
    );
    let agents = one(&objects, "DaemonSet", "hearth-agent").to_string();
    assert!(agents.contains(r#"{"name":"HEARTH_PRIVATE_PATIENCE","value":"90"}"#));
    for word in [
        "--disk-reserve=0",
        "--allow-range=10.43.7.7/32",
        "--allow-range=10.9.0.0/16",
    ] {
        assert!(arguments(&objects).contains(&word.to_owned()), "{word}");
    }
    let environment = environment(&objects);
    assert_eq!(
        environment["HEARTH_CLUSTER_RANGES"],
        "10.42.0.0/16,fd42::/48"
    );
    assert_eq!(environment["HEARTH_HUB_ENDPOINT"], "https://hub.lan");
    assert_eq!(environment["HEARTH_KEEP_AUTHORITY"], "false");
}

#[test]
fn what_it_means_to_serve_all_namespaces_is_said() {
    let Some(helm) = helm() else { return };
    let notes = |values: &str| {
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), values).expect("values");
        let (code, stdout, stderr) = run(Command::new(&helm)
            .args(["install", "hearth"])
            .arg(chart())
            .args([
                "--dry-run=client",
                "--namespace",
                "hearth-system",
                "--values",
            ])
            .arg(file.path()));
        assert_eq!(code, 0, "{stderr}");
        stdout.rsplit_once("NOTES:").expect("notes").1.to_owned()
    };
    assert!(notes("{namespaces: []}").contains("every Secret of the cluster"));
    assert!(!notes("{namespaces: [team-a]}").contains("every Secret"));
}

#[test]
fn definitions_are_kept_unless_asked_otherwise() {
    let Some(helm) = helm() else { return };
    for (values, count, kept) in [
        ("{}", 4, json!("keep")),
        ("{crds: {keep: false}}", 4, json!(null)),
        ("{crds: {install: false}}", 0, json!(null)),
    ] {
        let objects = defaults(&helm, values);
        let crds: Vec<&Value> = objects
            .iter()
            .filter(|object| object["kind"] == "CustomResourceDefinition")
            .collect();
        assert_eq!(crds.len(), count, "{values}");
        for crd in crds {
            assert_eq!(
                crd["metadata"]["annotations"]["helm.sh/resource-policy"], kept,
                "{values}"
            );
            assert_eq!(
                crd["metadata"]["labels"]["app.kubernetes.io/name"],
                "hearth"
            );
            assert!(
                crd["metadata"]["name"]
                    .as_str()
                    .is_some_and(|name| name.ends_with(".hearth.dev"))
            );
        }
    }
}
