//! What runs, as people see it: by kubectl, and by `kubectl hearth` against a real API server.

use std::path::Path;

use hearth_tests::cluster::{Cluster, wait_until};
use hearth_tests::run;
use serde_json::Value;

use super::release::{PATIENCE, infd, names, pods};

/// A user with no rights at all, in whose name an administrator may ask.
const NOBODY: &str = "nobody";

pub(super) fn newcomers_see_what_goes_on(cluster: &Cluster) {
    // The operator updates the measurements meanwhile.
    wait_until("measured latencies are columns", PATIENCE, || {
        let found = infd(cluster, "demo");
        let measured = &found["status"]["measured"];
        let table = cluster.kubectl(&["get", "infd", "demo"]);
        [
            "timeToFirstTokenMilliseconds",
            "timePerOutputTokenMilliseconds",
        ]
        .iter()
        .all(|name| measured[name].is_number() && table.contains(&measured[name].to_string()))
        .then_some(())
    });
    let told = cluster.kubectl(&["describe", "infd", "demo"]);
    for reason in ["AllReady", "Planned", "WorkerReady", "answers at http://"] {
        assert!(told.contains(reason), "no {reason} in\n{told}");
    }
    // Only of transitions: nothing is reported repeatedly.
    let events = cluster.list("events.events.k8s.io", "default", "");
    let repeated = |event: &&Value| {
        event["regarding"]["kind"] == "InferenceDeployment"
            && event["series"]["count"].as_u64().unwrap_or(0) > 10
    };
    let repeated: Vec<&Value> = events.iter().filter(repeated).collect();
    assert!(repeated.is_empty(), "{repeated:#?}");
}

/// Every command, on the demo as it runs after its latencies have been measured.
pub(super) fn shows_what_runs(cluster: &Cluster) {
    let directory = tempfile::tempdir().expect("directory");
    let plugin = Plugin {
        cluster,
        directory: directory.path(),
    };
    plugin.tells_the_status();
    plugin.tells_the_plan();
    plugin.tells_who_holds_the_nodes();
    plugin.tells_of_models_and_logs();
    plugin.reaches_a_gateway();
    plugin.tells_what_is_wrong();
}

/// Workers of the demo, which has none for want of requests, start and end by command, and nobody asks anything meanwhile.
pub(super) fn loads_and_unloads(cluster: &Cluster) {
    let directory = tempfile::tempdir().expect("directory");
    let plugin = Plugin {
        cluster,
        directory: directory.path(),
    };
    let workers = || pods(cluster, "demo", "decode").len();
    let why = || infd(cluster, "demo")["status"]["scaleToZero"]["reason"].clone();
    plugin.says("load demo --wait");
    assert_eq!(workers(), 1);
    assert_eq!(why(), "a load was asked for");
    plugin.says("unload demo --wait");
    assert_eq!(workers(), 0);
    assert_eq!(why(), "an unload was asked for");
    // It has none already.
    plugin.says("unload demo --wait");
    let (code, _, stderr) = plugin.run("load other");
    assert_eq!(code, 1);
    assert!(stderr.contains("there are: demo"), "{stderr}");
}

/// What a node has, who holds what of it, and what is free.
pub(super) fn ledger_of(cluster: &Cluster, node: &str) -> Value {
    let directory = tempfile::tempdir().expect("directory");
    let plugin = Plugin {
        cluster,
        directory: directory.path(),
    };
    plugin.json(&format!("nodes {node}"))[0].take()
}

struct Plugin<'a> {
    cluster: &'a Cluster,
    directory: &'a Path,
}

impl Plugin<'_> {
    /// Exit code, standard output and standard error.
    fn run(&self, arguments: &str) -> (i32, String, String) {
        let mut command = self.cluster.plugin_command(self.directory);
        run(command.args(arguments.split_whitespace()))
    }

    fn says(&self, arguments: &str) -> String {
        let (code, stdout, stderr) = self.run(arguments);
        assert_eq!(code, 0, "kubectl hearth {arguments}: {stdout}\n{stderr}");
        stdout
    }

    fn json(&self, arguments: &str) -> Value {
        let text = self.says(&format!("{arguments} -o json"));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    fn tells_the_status(&self) {
        let table = self.says("status");
        let row: Vec<&str> = table
            .lines()
            .nth(1)
            .expect("a row")
            .split_whitespace()
            .collect();
        assert_eq!(row[..3], ["demo", "hearth-demo", "True"], "{table}");
        let all = self.says("status -A");
        assert!(all.trim().starts_with("NAMESPACE"), "{all}");
        let detail = self.says("status demo");
        for words in ["DecodeReady", "gateway-0", "decode-0", "Ready", "EVENT"] {
            assert!(detail.contains(words), "no {words} in {detail}");
        }
        let detail = self.json("status demo");
        let workers = detail["workers"].as_array().expect("workers");
        let running = pods(self.cluster, "demo", "");
        assert_eq!(workers.len(), running.len(), "{detail:#}");
        assert!(!detail["events"].as_array().expect("events").is_empty());
    }

    fn tells_the_plan(&self) {
        let text = self.says("plan demo --why");
        for words in ["hybrid on ", "PREDICTED", "MEASURED", "TPOT", "Why"] {
            assert!(text.contains(words), "no {words} in {text}");
        }
        assert!(!self.says("plan demo").contains("Why"));
        let plan = self.json("plan demo");
        assert!(plan["measured"]["timeToFirstTokenMilliseconds"].is_number());
        assert_eq!(plan["deployment"]["name"], "demo");
    }

    fn tells_who_holds_the_nodes(&self) {
        let nodes = self.json("nodes");
        let nodes = nodes.as_array().expect("nodes");
        let all = names(&self.cluster.list("nodes", "", ""));
        assert_eq!(nodes.len(), all.len());
        let held = nodes
            .iter()
            .flat_map(|node| node["held"].as_array().expect("held"));
        let mut held: Vec<&str> = held.filter_map(|held| held["pod"].as_str()).collect();
        held.sort_unstable();
        let mut running = names(&pods(self.cluster, "demo", ""));
        running.sort_unstable();
        assert_eq!(held, running);
        for node in nodes {
            let part = |path: &str| node.pointer(path).and_then(Value::as_u64).unwrap_or(0);
            let workers = node["held"].as_array().expect("held").iter();
            let workers: u64 = workers.filter_map(|it| it["memoryBytes"].as_u64()).sum();
            let sum = workers + part("/others/memoryBytes") + part("/free/memoryBytes");
            assert_eq!(sum, part("/all/memoryBytes"), "{node:#}");
            assert!(node["store"]["models"].is_number(), "{node:#}");
        }
        let table = self.says(&format!("nodes {}", all[0]));
        for words in [&*all[0], "other Pods", "free"] {
            assert!(table.contains(words), "no {words} in {table}");
        }
        assert!(!table.contains(&all[1]), "{table}");
    }

    fn tells_of_models_and_logs(&self) {
        let models = self.says("models");
        for words in ["builtin hearth-demo", "MiB", "ready"] {
            assert!(models.contains(words), "no {words} in {models}");
        }
        let logs = self.says("logs demo decode-0 --tail 1000");
        assert!(!logs.is_empty());
        assert!(
            logs.lines().all(|line| line.starts_with("decode-0 ")),
            "{logs}"
        );
        assert!(self.says("logs demo").contains("gateway-0"));
    }

    fn reaches_a_gateway(&self) {
        let answer = self.says("chat demo --message Hearth?");
        assert!(!answer.trim().is_empty());
        let top = self.json("top --once");
        assert_eq!(top[0]["read"], top[0]["gateways"], "{top:#}");
        assert!(
            top[0]["ttftMs"].as_f64().is_some_and(|ms| ms > 0.0),
            "{top:#}"
        );
        assert!(top[0]["tokensPerSecond"].is_number(), "{top:#}");
        // Not a terminal: once, with no escape in it.
        let table = self.says("top");
        assert!(
            table.contains("TOKENS/S") && !table.contains('\u{1b}'),
            "{table}"
        );
    }

    fn tells_what_is_wrong(&self) {
        for (arguments, code, words) in [
            ("status other", 1, "there are: demo"),
            ("logs demo decode-9", 1, "it has decode-0, "),
            ("status --context nowhere", 1, "there are: "),
            ("status -n nowhere", 1, "status -A"),
            ("nodes nowhere", 1, "there are: "),
            ("status --kubeconfig /nowhere", 1, "--kubeconfig FILE"),
            ("plan", 2, "<NAME>"),
        ] {
            let (was, _, stderr) = self.run(arguments);
            assert_eq!(was, code, "{arguments}: {stderr}");
            assert!(stderr.contains(words), "no {words} in {stderr}");
        }
        let config = self.kubeconfig_of_nobody();
        let (code, _, stderr) = self.run(&format!("status --kubeconfig {config}"));
        assert_eq!(code, 1, "{stderr}");
        for words in [
            "InferenceDeployments may not be read",
            NOBODY,
            "--context NAME",
        ] {
            assert!(stderr.contains(words), "no {words} in {stderr}");
        }
    }

    /// A kubeconfig that asks in the name of somebody without rights.
    fn kubeconfig_of_nobody(&self) -> String {
        let text = std::fs::read_to_string(self.cluster.kubeconfig()).expect("kubeconfig");
        let mut config: Value = serde_norway::from_str(&text).expect("YAML");
        for user in config["users"].as_array_mut().expect("users") {
            user["user"]["as"] = NOBODY.into();
        }
        let file = self.directory.join("nobody.kubeconfig");
        std::fs::write(&file, config.to_string()).expect("write");
        file.display().to_string()
    }
}
