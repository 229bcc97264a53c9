//! Many streams for a long time.

use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, Options, wait_until};
use serde_json::json;

use super::OPTIONS;
use super::release::{self, PATIENCE, deployment, names, pods, wait_until_settled};
use super::streams::Streams;

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

#[test]
#[ignore = "takes ten minutes"]
fn streams_lose_nothing_while_pools_grow_and_shrink_for_ten_minutes() {
    let options = Options {
        breaks: false,
        ..OPTIONS
    };
    let Some(cluster) = Cluster::start_or_skip(&options) else {
        return;
    };
    let images = cluster.import_hearth();
    release::install(&cluster, &images, 1);
    let scaling = |most: u32| json!({"mode": "External", "maxReplicas": most});
    let spec = json!({
        "prefill": {"scaling": scaling(2)},
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
        let (scaler, replicas) = (
            format!("infps/demo-{pool}"),
            format!("--replicas={workers}"),
        );
        cluster.kubectl(&["scale", &scaler, &replicas]);
        wait_until(&format!("{workers} {pool} workers"), PATIENCE, || {
            (names(&pods(&cluster, "demo", pool)).len() == *workers).then_some(())
        });
        wait_until_settled(&cluster, "demo");
        streams.wait_for(STREAMS);
        changes += 1;
    }
    let seconds = begun.elapsed().as_secs();
    println!(
        "{} answers, all exact, of {STREAMS} streams through {changes} changes in {seconds} s",
        streams.finish()
    );
}
