//! Prompts that workers on two devices read together, or one of them alone, as the plan and the gateway say.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Up, UpOptions, deployment};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{CONTEXT, answer, completed, completion, planned};

const DEVICES: &str = "virtual:memory=40Mi,count=2";
/// What the head logs when it reads prompts with its peer again.
const AGAIN: &str = "complete again";

const THREE_DEVICES: &str = "virtual:memory=40Mi,count=3";
/// Four, whose links take more than a second for a quarter of a prompt's experts.
const FOUR_DEVICES: &str = "virtual:memory=40Mi,count=4,copy=1MB/s";
/// Longest time until something happens; a busy machine with an unoptimised build needs some.
const PATIENCE: Duration = Duration::from_secs(120);

/// A deployment whose long prompts are streamed, with the mode and quiet window of `prefill`.
fn streaming(directory: &Path, prefill: Value) -> UpOptions {
    streaming_to(DEVICES, directory, prefill)
}

/// The same with these devices.
fn streaming_to(devices: &str, directory: &Path, prefill: Value) -> UpOptions {
    let file = deployment(directory, |spec| {
        spec["strategy"] = json!("Hybrid");
        spec["model"]["contextLength"] = json!(CONTEXT);
        spec["prefill"] = prefill;
        spec["prefill"]["chunkedBelowTokens"] = json!(0);
        spec["decode"] = json!({"maxBatch": 2});
    });
    UpOptions {
        file: Some(file),
        arguments: ["--virtual-device", devices].map(str::to_owned).to_vec(),
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

/// Sums of three would have other bits: each row goes to the devices of its experts.
#[test]
fn three_devices_read_prompts_together_with_the_bits_of_one_and_two_of_them_read_on() {
    let directory = tempfile::tempdir().expect("a directory");
    let alone = streaming(directory.path(), json!({"mode": "StreamLoading"}));
    let up = Up::start(&alone);
    let want: Answer = answer(&up);
    let (first, of_one) = read(&up, 1);
    let rest = [2, 3].map(|number| completion(&up, &prompt(number)));
    drop(up);

    let mode = json!({"mode": "DistributedStreamLoading", "gpusPerWorker": 3});
    let together = streaming_to(THREE_DEVICES, directory.path(), mode);
    let plan = planned(&together.file.clone().expect("a file"), THREE_DEVICES).expect("a plan");
    let peers = ranks(&plan).into_iter().map(|rank| &rank["peers"]);
    let ways: Vec<&Value> = peers
        .filter(|peers| !peers.is_null())
        .map(|peers| &peers["experts"])
        .collect();
    assert_eq!(ways, ["Ep", "Ep", "Ep"], "{plan:#}");
    let up = Up::start(&together);
    assert_eq!(answer(&up), want);
    let is_about = |bytes: f64, share: f64| (0.6..1.4).contains(&(bytes / of_one / share));
    let (text, bytes) = read(&up, 1);
    assert!(
        text == first && is_about(bytes, 1.0 / 3.0),
        "{bytes} of {of_one}"
    );

    up.signal("stage-1", Signal::STOP);
    wait_until_said(&up, "reads with 2 of 3 ranks, without stage-1 on ", 0);
    let (text, bytes) = read(&up, 2);
    assert!(
        text == rest[0] && is_about(bytes, 0.5),
        "{bytes} of {of_one}"
    );
    up.signal("stage-1", Signal::CONT);
    wait_until_said(&up, AGAIN, 0);
    let (text, bytes) = read(&up, 3);
    assert!(
        text == rest[1] && is_about(bytes, 1.0 / 3.0),
        "{bytes} of {of_one}"
    );
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

/// How often the head has said this.
fn said(up: &Up, words: &str) -> usize {
    up.logs().matches(words).count()
}

/// Waits until the head has said this more often than before.
fn wait_until_said(up: &Up, words: &str, before: usize) {
    let deadline = Instant::now() + PATIENCE;
    while said(up, words) <= before {
        assert!(Instant::now() < deadline, "{words}: {}", up.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn without_one_of_four_devices_two_read_on_until_it_is_back() {
    let directory = tempfile::tempdir().expect("a directory");
    let alone = streaming(directory.path(), json!({"mode": "StreamLoading"}));
    let up = Up::start(&alone);
    let (_, of_one) = read(&up, 1);
    let want: Vec<String> = (1..6)
        .map(|number| completion(&up, &prompt(number)))
        .collect();
    drop(up);

    let mode = json!({"mode": "DistributedStreamLoading", "gpusPerWorker": 4});
    let up = Up::start(&streaming_to(FOUR_DEVICES, directory.path(), mode));
    let is_about = |bytes: f64, share: f64| (0.6..1.4).contains(&(bytes / of_one / share));
    let (text, bytes) = read(&up, 1);
    assert!(
        text == want[0] && is_about(bytes, 0.25),
        "{bytes} of {of_one}"
    );

    // In the middle of a prompt: it is read again, by those that are left.
    let asked = std::thread::scope(|scope| {
        let asked = scope.spawn(|| completion(&up, &prompt(2)));
        std::thread::sleep(Duration::from_millis(600));
        up.signal("stage-1", Signal::KILL);
        asked.join().expect("an answer")
    });
    assert_eq!(asked, want[1], "{}", up.logs());
    let words = "a pass has lost a peer, and is computed again";
    assert!(up.logs().contains(words), "{words}: {}", up.logs());
    // `hearth up` has started it again.
    wait_until_said(&up, AGAIN, 0);
    let (text, bytes) = read(&up, 3);
    assert!(
        text == want[2] && is_about(bytes, 0.25),
        "{bytes} of {of_one}"
    );

    // Between two prompts, and it stays away: it is stopped, and says nothing.
    let short = "reads with 2 of 4 ranks, without stage-1 on ";
    let before = said(&up, short);
    up.signal("stage-1", Signal::STOP);
    wait_until_said(&up, short, before);
    up.wait_for("the status says who is missing", |metrics| {
        let labels = ["worker=\"prefill-0\"", short];
        metrics.values("hearth_worker_placement_info", &labels) == [1.0]
    });
    let (text, bytes) = read(&up, 4);
    assert!(
        text == want[3] && is_about(bytes, 0.5),
        "{bytes} of {of_one}"
    );
    let before = said(&up, AGAIN);
    up.signal("stage-1", Signal::CONT);
    wait_until_said(&up, AGAIN, before);
    let (text, bytes) = read(&up, 5);
    assert!(
        text == want[4] && is_about(bytes, 0.25),
        "{bytes} of {of_one}"
    );
}

/// Sends a prompt once the answer to another one has begun.
fn while_another_is_answered(up: &Up, first: &[u32], second: &[u32]) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let body = json!({
        "model": "hearth-demo", "prompt": first, "max_tokens": 300, "temperature": 0,
        "ignore_eos": true, "stream": true,
    });
    runtime.block_on(async {
        let url = format!("{}/completions", up.v1());
        let answer = reqwest::Client::new().post(url).json(&body).send().await;
        let mut answer = answer.expect("an answer");
        let begun = answer.chunk().await.expect("its beginning");
        assert!(begun.is_some(), "{answer:?}");
        let (v1, second) = (up.v1(), second.to_vec());
        let asked = tokio::task::spawn_blocking(move || completed(&v1, &second));
        while answer.chunk().await.expect("a piece").is_some() {}
        asked.await.expect("no panic").expect("an answer");
    });
}

/// Shortly after an answer, and while one is written, the head reads alone; once all has been quiet, all read again.
#[test]
fn peers_read_again_once_decoding_has_been_quiet_for_the_window() {
    const WINDOW: Duration = Duration::from_secs(10);
    let directory = tempfile::tempdir().expect("a directory");
    let prefill = json!({"mode": "DistributedStreamLoading", "quietWindow": "10s"});
    let up = Up::start(&streaming(directory.path(), prefill));
    let (_, together) = read(&up, 1);
    let (_, alone) = read(&up, 2);
    assert!(alone > 1.5 * together, "{alone}, and together {together}");
    let be_quiet = || std::thread::sleep(WINDOW + Duration::from_secs(1));
    be_quiet();
    let (_, again) = read(&up, 3);
    assert!(again < 1.2 * together, "{again}, and before {together}");
    be_quiet();
    let before = copied(&up);
    while_another_is_answered(&up, &prompt(4), &prompt(5));
    // The first one together, and the second one alone.
    let both = copied(&up) - before;
    assert!(both > 2.5 * together, "{both}, and together {together}");
}
