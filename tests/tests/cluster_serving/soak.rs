//! What takes too long for every day: many streams for ten minutes, and a large model that starts from zero.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, Options, wait_until};
use hearth_tests::{python, root, run, worker};
use serde_json::{Value, json};

use super::release::{self, PATIENCE, deployment, names, pods, prompts_read, wait_until_settled};
use super::streams::Streams;
use super::{OPTIONS, open_directory};

const STREAMS: usize = 64;
const SOAK: Duration = Duration::from_secs(600);
/// Workers of the pools, in turn.
const SIZES: [(&str, usize); 6] = [
    ("decode", 3),
    ("prefill", 2),
    ("decode", 1),
    ("decode", 2),
    ("prefill", 1),
    ("decode", 1),
];

/// One with Hearth.
fn cluster() -> Option<Cluster> {
    let options = Options {
        breaks: false,
        ..OPTIONS
    };
    let cluster = Cluster::start_or_skip(&options)?;
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 1);
    Some(cluster)
}

#[test]
#[ignore = "takes ten minutes: make test-long runs it"]
fn streams_lose_nothing_while_pools_grow_and_shrink_for_ten_minutes() {
    let Some(cluster) = cluster() else {
        return;
    };
    let scaling = |most: u32| json!({"mode": "External", "maxReplicas": most});
    let spec = json!({
        // Prefill workers read all prompts.
        "prefill": {"scaling": scaling(2), "chunkedBelowTokens": 0},
        "decode": {"scaling": scaling(3), "maxBatch": 32},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(&cluster, "demo");
    let streams = Streams::start_many(&cluster.reach("default", "demo", 80).v1(), STREAMS);
    streams.wait_for(STREAMS);
    let (begun, mut changes) = (Instant::now(), 0);
    for (pool, workers) in SIZES.iter().cycle() {
        if begun.elapsed() >= SOAK {
            break;
        }
        let scaled = match *pool {
            "decode" => "infd/demo",
            _ => "infps/demo-prefill",
        };
        cluster.kubectl(&["scale", scaled, &format!("--replicas={workers}")]);
        wait_until(&format!("{workers} {pool} workers"), PATIENCE, || {
            (names(&pods(&cluster, "demo", pool)).len() == *workers).then_some(())
        });
        wait_until_settled(&cluster, "demo");
        streams.wait_for(STREAMS);
        changes += 1;
    }
    let seconds = begun.elapsed().as_secs();
    let answers = streams.finish();
    let (by_prefill, by_decode) = prompts_read(&cluster);
    println!(
        "{answers} answers, all exact, of {STREAMS} streams through {changes} changes in {seconds} s; {by_prefill} prompts were read \
         by prefill workers and {by_decode} by decode workers"
    );
    assert!(by_prefill > 10.0 * by_decode);
}

/// Prints the parts of the times, for docs/benchmarks.md.
#[test]
#[ignore = "takes minutes, and measures: make test-long runs it"]
fn first_tokens_of_a_gibibyte_from_zero_in_parts() {
    let Some(cluster) = cluster() else {
        return;
    };
    let directory = open_directory();
    let model = directory.path().join("model");
    make_a_gibibyte(directory.path(), &model);
    let spec = json!({
        "model": {"source": {"hostPath": {"path": model}}, "contextLength": 512},
        "prefill": {"mode": "Chunked"},
        "decode": {"scaling": {"mode": "Auto", "minReplicas": 0, "maxReplicas": 1}},
        "autoscaling": {"scaleToZeroAfter": "10s"},
    });
    cluster.apply(&deployment("demo", spec).to_string());
    wait_until_settled(&cluster, "demo");
    let v1 = cluster.reach("default", "demo", 80).v1();
    let kubectl = cluster.tool("kubectl");
    let tools = kubectl.parent().expect("a directory");
    for more in [&[][..], &["--drop", model.to_str().expect("a path")]] {
        let mut measure = Command::new(python());
        measure.arg(root().join("docs/benchmarks/zero.py"));
        measure.args(["demo", &v1]).args(more);
        measure.env("KUBECONFIG", cluster.kubeconfig());
        measure.env("PATH", format!("{}:/usr/bin:/bin", tools.display()));
        let (code, times, said) = run(&mut measure);
        assert_eq!(code, 0, "{said}");
        println!("{more:?}\n{times}");
    }
}

/// A random Qwen3 of nine layers with the demo's tokenizer.
fn make_a_gibibyte(directory: &Path, model: &Path) {
    let config = root().join("docs/benchmarks/configs/qwen3-ring.json");
    let config = std::fs::read(config).expect("a config");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["num_hidden_layers"] = json!(9);
    let file = directory.join("config.json");
    std::fs::write(&file, config.to_string()).expect("a file");
    let mut make = worker();
    make.args(["random", "--dtype", "bf16", "--config"])
        .arg(file);
    let (code, _, said) = run(make.arg("--out").arg(model));
    assert_eq!(code, 0, "{said}");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = root().join("models/hearth-demo").join(file);
        std::fs::copy(from, model.join(file)).expect("a copy");
    }
}
