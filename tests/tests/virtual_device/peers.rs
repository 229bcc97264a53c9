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

/// A prompt that begins as no other does.
fn prompt(number: u32) -> Vec<u32> {
    let token = |n: u32| 3 + (n * 37 + number * 101) % 2000;
    (0..CONTEXT / 2).map(token).collect()
}

/// Bytes of experts that the head copied while it read so many prompts more.
struct Copied<'a> {
    up: &'a Up,
    prompts: f64,
    bytes: f64,
}

impl<'a> Copied<'a> {
    /// What was copied for the prompts that were read before, of which there are so many.
    fn after(up: &'a Up, prompts: u32) -> Self {
        let mut copied = Self {
            up,
            prompts: prompts.into(),
            bytes: 0.0,
        };
        if prompts > 0 {
            copied.count();
        }
        copied
    }

    fn of_one_more(&mut self, number: u32) -> f64 {
        completion(self.up, &prompt(number));
        self.prompts += 1.0;
        self.count()
    }

    /// Waits until all prompts are counted, and returns what was copied since the last time.
    fn count(&mut self) -> f64 {
        let metrics = self.up.wait_for("the prompt is counted", |metrics| {
            metrics.of_rank("hearth_worker_steps_total", "prefill-0") >= self.prompts
        });
        let bytes = metrics.of_rank("hearth_worker_expert_copy_bytes_total", "prefill-0");
        bytes - std::mem::replace(&mut self.bytes, bytes)
    }
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
    let of_one = Copied::after(&up, 1).of_one_more(1);
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
    let share = Copied::after(&up, 1).of_one_more(1) / of_one;
    assert!((0.3..0.7).contains(&share), "{share} of all experts");

    // Without its peer the head reads all, and with it again.
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
    assert_eq!(answer(&up), want, "together again");
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
    let mut read = Copied::after(&up, 0);
    let first = read.of_one_more(1);
    let second = read.of_one_more(2);
    assert!(second > 1.5 * first, "{first}, and alone {second}");
}
