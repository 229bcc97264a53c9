//! Prompts that workers on two devices read together, or one of them alone, as the plan and the gateway say.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Up, UpOptions, deployment};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{CONTEXT, answer, completion, planned};

const DEVICES: &str = "virtual:memory=40Mi,count=2";
/// What the head logs when it reads prompts with its peer again.
const AGAIN: &str = "complete again";

/// A deployment whose long prompts are streamed, with the mode and quiet window of `prefill`.
fn streaming(directory: &Path, prefill: Value) -> UpOptions {
    let file = deployment(directory, |spec| {
        spec["strategy"] = json!("Hybrid");
        spec["model"]["contextLength"] = json!(CONTEXT);
        spec["prefill"] = prefill;
        spec["prefill"]["chunkedBelowTokens"] = json!(0);
        spec["decode"] = json!({"maxBatch": 1});
    });
    UpOptions {
        file: Some(file),
        arguments: ["--virtual-device", DEVICES].map(str::to_owned).to_vec(),
        ..UpOptions::default()
    }
}

/// A prompt that begins as all others do, with two blocks of the cache, and goes on as none of them.
fn prompt(number: u32) -> Vec<u32> {
    let token = |n: u32| match n {
        0..32 => 3 + n,
        _ => 3 + (n * 37 + number * 101) % 2000,
    };
    (0..CONTEXT / 2).map(token).collect()
}

/// Bytes of experts that the head has copied, once the gateway has asked it after its last prompt: it does so once a second.
fn copied(up: &Up) -> f64 {
    let bytes = || {
        let metrics = up.metrics();
        metrics.of_rank("hearth_worker_expert_copy_bytes_total", "prefill-0")
    };
    let mut before = bytes();
    loop {
        std::thread::sleep(Duration::from_millis(1500));
        let now = bytes();
        if now == before {
            return now;
        }
        before = now;
    }
}

/// The text after a prompt, and the bytes of experts that the head copied for it.
fn read(up: &Up, number: u32) -> (String, f64) {
    let before = copied(up);
    let text = completion(up, &prompt(number));
    (text, copied(up) - before)
}

fn ranks(plan: &Value) -> Vec<&Value> {
    plan["ranks"].as_array().expect("ranks").iter().collect()
}

#[test]
fn two_devices_read_prompts_together_with_the_bits_of_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let alone = streaming(directory.path(), json!({"mode": "StreamLoading"}));
    let up = Up::start(&alone);
    let want: Answer = answer(&up);
    let (first, of_one) = read(&up, 1);
    let (second, _) = read(&up, 2);
    drop(up);

    let together = streaming(
        directory.path(),
        json!({"mode": "DistributedStreamLoading"}),
    );
    let plan = planned(&together.file.clone().expect("a file"), DEVICES).expect("a plan");
    let peers: Vec<&Value> = ranks(&plan)
        .into_iter()
        .filter(|rank| !rank["peers"].is_null())
        .collect();
    assert_eq!(peers.len(), 2, "{plan:#}");
    assert_ne!(peers[0]["gpuUuids"], peers[1]["gpuUuids"], "{plan:#}");
    let up = Up::start(&together);
    assert_eq!(answer(&up), want);
    // The other half of the experts crosses the other device's link.
    let is_half = |bytes: f64| (0.3..0.7).contains(&(bytes / of_one));
    let (text, bytes) = read(&up, 1);
    assert!(text == first && is_half(bytes), "{bytes} of {of_one}");

    // Without its peer the head reads all, and with it again, although the other has lost what prompts begin with.
    up.signal("stage-0", Signal::STOP);
    assert_eq!(answer(&up), want, "without its peer");
    up.signal("stage-0", Signal::CONT);
    up.signal("stage-0", Signal::KILL);
    assert_eq!(answer(&up), want, "after its peer has died");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !up.logs().contains(AGAIN) {
        assert!(Instant::now() < deadline, "{}", up.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    let (text, bytes) = read(&up, 2);
    assert!(text == second && is_half(bytes), "{bytes} of {of_one}");
}

#[test]
fn peers_are_left_to_decoding_until_it_has_been_quiet() {
    let directory = tempfile::tempdir().expect("a directory");
    let prefill = json!({"mode": "DistributedStreamLoading", "quietWindow": "1h"});
    let options = streaming(directory.path(), prefill);
    let plan = planned(&options.file.clone().expect("a file"), DEVICES).expect("a plan");
    let window = &plan["routing"]["togetherAfterQuietMs"];
    assert_eq!(window, 3_600_000, "{plan:#}");
    let up = Up::start(&options);
    let (_, first) = read(&up, 1);
    let (_, second) = read(&up, 2);
    assert!(second > 1.5 * first, "{first}, and alone {second}");
}
