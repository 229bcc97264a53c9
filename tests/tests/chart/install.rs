//! Values for clusters of all kinds: images by digest, private authorities, proxies, further variables, the examples, and
//! what `helm test` asks.

use std::path::PathBuf;
use std::process::Command;

use hearth_tests::{root, run};
use serde_json::{Value, json};

use super::{chart, defaults, helm, objects, of_kind, one, render, validated};

const PEM: &str = "-----BEGIN CERTIFICATE-----\nMTIz\n-----END CERTIFICATE-----\n";

/// A digest that ends with this digit.
fn digest(last: char) -> String {
    format!("sha256:{}{last}", "0".repeat(63))
}

/// The Pod of a Deployment or DaemonSet.
fn pod<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    &one(objects, kind, name)["spec"]["template"]["spec"]
}

/// The entry of this name in a list of a Pod's first container.
fn entry<'a>(pod: &'a Value, list: &str, name: &str) -> Option<&'a Value> {
    let mut entries = pod["containers"][0][list].as_array()?.iter();
    entries.find(|entry| entry["name"] == name)
}

fn agent(objects: &[Value]) -> &Value {
    pod(objects, "DaemonSet", "hearth-agent")
}

fn operator(objects: &[Value]) -> &Value {
    pod(objects, "Deployment", "hearth-operator")
}

#[test]
fn images_are_pinned_by_digest() {
    let Some(helm) = helm() else { return };
    let (own, workers) = (digest('1'), digest('2'));
    let values = format!("{{image: {{tag: v9, digest: '{own}', workerDigest: '{workers}'}}}}");
    let objects = defaults(&helm, &values);
    let own = format!("hearth.dev/hearth@{own}");
    let workers = format!("hearth.dev/hearth-worker@{workers}");
    assert_eq!(operator(&objects)["containers"][0]["image"], own);
    assert_eq!(agent(&objects)["containers"][0]["image"], workers);
    assert_eq!(agent(&objects)["initContainers"][0]["image"], workers);
    let told = entry(operator(&objects), "env", "HEARTH_WORKER_IMAGE");
    assert_eq!(told.expect("told")["value"], workers);
    for test in ["hearth-test-ready", "hearth-test-demo"] {
        assert_eq!(
            one(&objects, "Pod", test)["spec"]["containers"][0]["image"],
            own
        );
    }
    // Each of the two may have a digest while the other has a tag.
    let values = format!(
        "{{image: {{tag: v9, digest: '{}', workerTag: v8}}}}",
        digest('1')
    );
    let image = agent(&defaults(&helm, &values))["containers"][0]["image"].clone();
    assert_eq!(image, "hearth.dev/hearth-worker:v8");
}

#[test]
fn authorities_reach_the_agents_wherever_they_are_kept() {
    let Some(helm) = helm() else { return };
    let pem = json!({"caBundle": {"pem": PEM}}).to_string();
    let objects = defaults(&helm, &pem);
    assert_eq!(
        one(&objects, "ConfigMap", "hearth-ca-bundle")["data"],
        json!({"ca.crt": PEM})
    );
    for (values, volume) in [
        (
            pem.as_str(),
            json!({"configMap": {"name": "hearth-ca-bundle", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}),
        ),
        (
            "{caBundle: {configMap: corp, key: root.pem}}",
            json!({"configMap": {"name": "corp", "items": [{"key": "root.pem", "path": "ca.crt"}]}}),
        ),
        (
            "{caBundle: {secret: corp}}",
            json!({"secret": {"secretName": "corp", "defaultMode": "0444", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}),
        ),
    ] {
        let objects = defaults(&helm, values);
        let mut wanted = volume;
        wanted["name"] = json!("authorities");
        let volumes = agent(&objects)["volumes"].as_array().expect("volumes");
        assert!(volumes.contains(&wanted), "{values}: {volumes:#?}");
        let mounted = entry(agent(&objects), "volumeMounts", "authorities").expect("mounted");
        let file = entry(agent(&objects), "env", "HEARTH_CA_BUNDLE").expect("named");
        let path = format!("{}/ca.crt", mounted["mountPath"].as_str().expect("a path"));
        assert_eq!(
            (&file["value"], &mounted["readOnly"]),
            (&json!(path), &json!(true))
        );
        assert_eq!(entry(operator(&objects), "env", "HEARTH_CA_BUNDLE"), None);
    }
    // Agents start again for other certificates, and for nothing else.
    let annotation = |pem: &str| {
        let values = json!({"caBundle": {"pem": pem}, "agent": {"podAnnotations": {"a": "b"}}});
        let objects = defaults(&helm, &values.to_string());
        let template = &one(&objects, "DaemonSet", "hearth-agent")["spec"]["template"];
        template["metadata"]["annotations"].clone()
    };
    let other = PEM.replace("MTIz", "MTI0");
    assert_eq!(annotation(PEM)["a"], "b");
    assert_eq!(annotation(PEM), annotation(PEM));
    assert_ne!(annotation(PEM), annotation(&other));
    let usual = defaults(&helm, "{}");
    assert!(of_kind(&usual, "ConfigMap", "hearth-ca-bundle").is_empty());
    assert_eq!(entry(agent(&usual), "volumeMounts", "authorities"), None);
}

#[test]
fn proxies_and_further_variables_reach_those_that_they_are_for() {
    let Some(helm) = helm() else { return };
    let values = "{proxy: {http: 'http://p.lan:3128', https: 'http://[fd00::7]:3128', noProxy: [.lan, 192.168.0.0/16]}, \
                   operator: {env: [{name: TZ, value: Europe/Vienna}]}, \
                   agent: {env: [{name: ALL_PROXY, valueFrom: {secretKeyRef: {name: proxy, key: url}}}]}}";
    let objects = defaults(&helm, values);
    let value = |pod: &Value, name: &str| {
        let variable = entry(pod, "env", name)?;
        variable["value"].as_str().map(str::to_owned)
    };
    for (name, expected) in [
        ("HTTP_PROXY", "http://p.lan:3128"),
        ("HTTPS_PROXY", "http://[fd00::7]:3128"),
        ("NO_PROXY", ".lan,192.168.0.0/16"),
    ] {
        assert_eq!(value(agent(&objects), name).as_deref(), Some(expected));
        // It calls nobody outside the cluster.
        assert_eq!(value(operator(&objects), name), None);
    }
    let secret = entry(agent(&objects), "env", "ALL_PROXY").expect("a variable");
    assert_eq!(secret["valueFrom"]["secretKeyRef"]["name"], "proxy");
    assert_eq!(
        value(operator(&objects), "TZ").as_deref(),
        Some("Europe/Vienna")
    );
    assert_eq!(value(agent(&objects), "TZ"), None);
    // Exceptions may belong to a proxy that a Secret names.
    let values = "{proxy: {noProxy: [.lan]}, agent: {env: [{name: HTTPS_PROXY, valueFrom: {secretKeyRef: {name: p, key: u}}}]}}";
    assert_eq!(
        value(agent(&defaults(&helm, values)), "NO_PROXY").as_deref(),
        Some(".lan")
    );
}

#[test]
fn values_that_contradict_each_other_are_refused_with_a_remedy() {
    let Some(helm) = helm() else { return };
    let digest = digest('1');
    for (values, words) in [
        (
            format!("{{image: {{workerTag: v8, workerDigest: '{digest}'}}}}"),
            "leave workerTag empty",
        ),
        (
            "{caBundle: {configMap: a, secret: b}}".to_owned(),
            "set one of them",
        ),
        (
            "{caBundle: {pem: MTIz}}".to_owned(),
            "--set-file caBundle.pem=FILE",
        ),
        (
            "{caBundle: {secret: a}, agent: {enabled: false}}".to_owned(),
            "or enable the agents",
        ),
        (
            "{proxy: {https: 'http://p'}, agent: {enabled: false}}".to_owned(),
            "or enable the agents",
        ),
        ("{proxy: {noProxy: [.lan]}}".to_owned(), "there is no proxy"),
        (
            "{proxy: {https: 'http://p'}, agent: {env: [{name: https_proxy, value: x}]}}"
                .to_owned(),
            "write it in one place",
        ),
        (
            "{operator: {env: [{name: HEARTH_LOG, value: debug}]}}".to_owned(),
            "operator.env has HEARTH_LOG",
        ),
        (
            "{agent: {env: [{name: NODE_NAME, value: x}]}}".to_owned(),
            "agent.env has NODE_NAME",
        ),
        (
            "{agent: {env: [{name: A, value: x}, {name: A, value: z}]}}".to_owned(),
            "agent.env has A twice",
        ),
        (
            "{operator: {env: [{name: A}]}}".to_owned(),
            "write either value or valueFrom",
        ),
        ("{image: {digest: latest}}".to_owned(), "digest"),
        ("{proxy: {http: 'socks5://p'}}".to_owned(), "proxy"),
        // A password would be in plain sight.
        ("{proxy: {http: 'http://ann:hush@p'}}".to_owned(), "proxy"),
        ("{proxy: {noProxy: ['a,b']}}".to_owned(), "noProxy"),
        ("{test: {demo: 'yes'}}".to_owned(), "demo"),
    ] {
        let error = render(&helm, &values, &[]).expect_err(&values);
        assert!(error.contains(words), "{values}: {error}");
    }
}

/// `helm upgrade --reuse-values` has the values of the earlier chart alone.
#[test]
fn values_of_an_earlier_chart_render_too() {
    let Some(helm) = helm() else { return };
    let values = "{caBundle: null, proxy: null, test: null, image: {digest: null, workerDigest: null}, \
                   operator: {env: null}, agent: {env: null}}";
    let without = defaults(&helm, values);
    assert_eq!(without, defaults(&helm, "{}"));
}

#[test]
fn helm_test_serves_the_demo_where_deployments_are_served_and_asks_it() {
    let Some(helm) = helm() else { return };
    for (values, namespace) in [
        ("{}", "default"),
        ("{namespaces: [team-a, team-b]}", "team-a"),
        ("{namespaces: []}", "hearth-system"),
    ] {
        let objects = defaults(&helm, values);
        let deployment = one(&objects, "InferenceDeployment", "hearth-test");
        assert_eq!(deployment["metadata"]["namespace"], namespace);
        let asks = one(&objects, "Pod", "hearth-test-demo");
        assert_eq!(asks["metadata"]["namespace"], "hearth-system");
        let url = format!("http://hearth-test.{namespace}/v1");
        let arguments = asks["spec"]["containers"][0]["args"].as_array();
        let arguments = arguments.expect("arguments");
        assert!(arguments.contains(&json!(url)), "{arguments:?}");
        // Helm waits for five minutes.
        let deadline_s = asks["spec"]["activeDeadlineSeconds"].as_u64();
        assert!(deadline_s.is_some_and(|it| it < 300), "{deadline_s:?}");
        // Both belong to the test alone, and what is asked is there first.
        let weight = |object: &Value| {
            let annotations = &object["metadata"]["annotations"];
            assert_eq!(annotations["helm.sh/hook"], "test");
            let deletes = annotations["helm.sh/hook-delete-policy"].as_str();
            assert!(deletes.is_some_and(|policy| policy.contains("hook-succeeded")));
            annotations["helm.sh/hook-weight"]
                .as_str()
                .and_then(|it| it.parse::<i32>().ok())
        };
        assert!(weight(deployment) < weight(asks));
    }
    let without = defaults(&helm, "{test: {demo: false}}");
    assert!(of_kind(&without, "InferenceDeployment", "hearth-test").is_empty());
    assert!(of_kind(&without, "Pod", "hearth-test-demo").is_empty());
    assert_eq!(of_kind(&without, "Pod", "hearth-test-ready").len(), 1);
}

fn examples() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(chart().join("examples")).expect("examples");
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files
}

#[test]
fn every_example_renders_valid_kubernetes() {
    let Some(helm) = helm() else { return };
    let directory = tempfile::tempdir().expect("directory");
    let usual = render(&helm, "{}", &[]).expect("rendered");
    let mut rendered = Vec::new();
    for file in examples() {
        let path = file.to_str().expect("a path");
        let text = render(&helm, "{}", &["--values", path]);
        let text = text.unwrap_or_else(|error| panic!("{path}: {error}"));
        assert_ne!(text, usual, "{path} changes nothing");
        let (code, stdout, stderr) = run(Command::new(&helm)
            .args(["lint", "--strict", "--quiet", "--values", path])
            .arg(chart()));
        assert_eq!(code, 0, "{path}: {stdout}\n{stderr}");
        let file = directory.path().join(file.file_name().expect("a name"));
        std::fs::write(&file, &text).expect("file");
        assert!(!objects(&text).is_empty());
        rendered.push(file);
    }
    assert_eq!(rendered.len(), 4, "{rendered:?}");
    let (code, output) = validated(&rendered);
    assert_eq!(code, 0, "{output}");
}

#[test]
fn every_example_is_explained_where_people_install() {
    let readme = std::fs::read_to_string(chart().join("README.md")).expect("README.md");
    let docs = std::fs::read_to_string(root().join("docs/install.md")).expect("docs/install.md");
    for file in examples() {
        let name = file.file_name().and_then(|name| name.to_str());
        let path = format!("examples/{}", name.expect("a name"));
        assert!(
            readme.contains(&path),
            "charts/hearth/README.md has no {path}"
        );
        assert!(docs.contains(&path), "docs/install.md has no {path}");
    }
}
