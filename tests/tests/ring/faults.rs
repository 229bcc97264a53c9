//! Members that live and do not do as they should: each is found out, and named.

use std::cell::Cell;
use std::time::{Duration, Instant};

use hearth_tests::{Cgroup, RING_MEMBERS, Rank, has_ended, skipped, write_fault};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{AGAIN, PATIENCE, Ring, answers, answers_that_begin, expected, wait_until};

/// Least seconds that a member has for a part of a pass as it has computed before; by default it is more.
const PART_PATIENCE_S: &str = "15";

/// Waits until a member has said something.
fn wait_for(rank: &Rank, words: &str) {
    let what = format!("{} says {words:?}", rank.name);
    wait_until(&what, || rank.output().contains(words));
}

async fn metrics(gateway: &Rank) -> String {
    let url = format!("{}/metrics", gateway.metrics_base());
    let got = reqwest::get(url).await.expect("metrics");
    got.text().await.expect("metrics")
}

/// Whom the head waits for, once the gateway is ready or not, as wanted.
async fn waits_for(gateway: &Rank, is_ready: bool) -> String {
    let url = format!("{}/ready", gateway.base());
    let deadline = Instant::now() + PATIENCE;
    loop {
        let told = reqwest::get(&url).await.expect("an answer");
        let is_as_wanted = told.status().is_success() == is_ready;
        let body: Value = told.json().await.expect("JSON");
        if is_as_wanted {
            let member = body["workers"][0]["waits_for"].as_str();
            return member.unwrap_or_default().to_owned();
        }
        assert!(Instant::now() < deadline, "{body:#}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Its process answers, and beats go on: only what it says of its computation tells that it hangs.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_whose_computation_hangs_is_said_to_be_slow_and_then_lost() {
    let want = expected(0..2).await;
    let directory = tempfile::tempdir().expect("a directory");
    let fault = directory.path().join("fault");
    let device = format!("virtual:memory=256Mi,fault={}", fault.display());
    let mut ring = Ring::start_with(
        |plan| {
            let stage = &mut plan["ranks"][1];
            stage["device"] = json!("VIRTUAL-0");
            stage["gpuUuids"] = json!(["VIRTUAL-0"]);
            stage["gpuMemoryBytes"] = json!(256_u64 << 20);
            stage["virtualDevice"] = json!(device);
        },
        &["--part-patience", PART_PATIENCE_S],
    );
    // More than once: on a busy machine they may come one after the other, and how long both take together is to be usual.
    for _ in 0..3 {
        assert_eq!(answers(&ring.gateway, 0..2).await, want);
    }
    let begun = Cell::new(0);
    let hang = |_| {
        begun.set(begun.get() + 1);
        if begun.get() == 2 {
            write_fault(&fault, "hang\n");
        }
    };
    let asked = answers_that_begin(&ring.gateway, 0..2, hang);
    let mended = async {
        let head = &ring.members[0];
        let wait = async |words: &str| {
            let deadline = Instant::now() + Duration::from_secs(120);
            while !head.output().contains(words) {
                assert!(Instant::now() < deadline, "{words}: {}", head.output());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        wait("slow: stage-0 on ").await;
        loop {
            let told = metrics(&ring.gateway).await;
            if told.contains("complete; slow: stage-0 on ") && told.contains(", layer 1\"") {
                break;
            }
            assert!(!head.output().contains("is lost"), "{told}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        wait("is lost to its group: it has been at layer 1 in pass ").await;
        while !ring.members[1]
            .output()
            .contains("the computation stands still")
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // Its successor listens on the same port.
        while !has_ended(ring.members[1].pid()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        std::fs::remove_file(&fault).expect("the fault");
        ring.process(1, &[])
    };
    let (got, member) = tokio::join!(asked, mended);
    assert_eq!(got, want);
    assert!(!ring.members[1].wait().success());
    ring.members[1] = member;
    // The head's own watchdog has not ended it meanwhile.
    assert!(!ring.members[0].has_ended());
    assert!(ring.members[0].output().contains(AGAIN));
}

/// As where its machine hangs or its cable is out: nothing ends its connections.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_falls_silent_is_missed_and_taken_back() {
    let want = expected(0..4).await;
    let ring = Ring::start();
    assert_eq!(answers(&ring.gateway, 0..4).await, want);
    let begun = Cell::new(0);
    let stopped = Cell::new(None);
    let stop = |_| {
        begun.set(begun.get() + 1);
        if begun.get() == 4 {
            ring.members[1].signal(Signal::STOP);
            stopped.set(Some(Instant::now()));
        }
    };
    let asked = answers_that_begin(&ring.gateway, 0..4, stop);
    let missed = async {
        let head = &ring.members[0];
        let deadline = Instant::now() + PATIENCE;
        while !head.output().contains("the group is not complete") {
            assert!(Instant::now() < deadline, "{}", head.output());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let silent: Instant = stopped.get().expect("a stopped member");
        let took = silent.elapsed();
        // Nobody is told that requests are answered meanwhile.
        assert_eq!(waits_for(&ring.gateway, false).await, "stage-0");
        ring.members[1].signal(Signal::CONT);
        took
    };
    let (got, took) = tokio::join!(asked, missed);
    assert_eq!(got, want);
    println!("it was missed after {took:.2?}");
    wait_for(&ring.members[0], AGAIN);
    assert_eq!(waits_for(&ring.gateway, true).await, "");
    let log = ring.members[0].output();
    assert!(log.contains("why=\"stage-0 on "), "{log}");
}

/// Its computation has a 250th of a CPU: its process answers, and only its times tell that it is slow.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_is_merely_slow_is_named_and_the_answers_end() {
    if let Some(why) = Cgroup::unavailable("cpu") {
        skipped(&why);
        return;
    }
    let group = Cgroup::new("cpu");
    group.write("cpu.cfs_period_us", "250000");
    group.write("cpu.cfs_quota_us", "1000");
    // The slowest kernels: a part of a pass is more than its CPU does in one period.
    let ring = Ring::start_with(|_| {}, &["--isa", "scalar"]);
    let want = answers(&ring.gateway, 0..8).await;
    let begun = Cell::new(0);
    let slow_down = |_| {
        begun.set(begun.get() + 1);
        if begun.get() == 8 {
            let computes = |name: &str| name == "follower" || name.starts_with("kernels-");
            group.take_threads(ring.members[2].pid(), computes);
        }
    };
    let head = &ring.members[0];
    let asked = answers_that_begin(&ring.gateway, 0..8, slow_down);
    let named = async {
        let deadline = Instant::now() + Duration::from_secs(120);
        let words = "complete; slow: stage-1 on ";
        while !metrics(&ring.gateway).await.contains(words) {
            assert!(Instant::now() < deadline, "{}", head.output());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        group.write("cpu.cfs_quota_us", "-1");
    };
    let (got, ()) = tokio::join!(asked, named);
    assert_eq!(got, want);
    wait_for(head, "no longer slow: stage-1 on ");
    let log = head.output();
    assert!(log.contains("slow: stage-1 on "), "{log}");
    assert!(!log.contains("is lost"), "{log}");
}

/// Its answers would go on with other tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_comes_back_with_other_numerics_is_waited_out() {
    if !std::arch::is_x86_feature_detected!("avx2") {
        skipped("this CPU has one instruction set");
        return;
    }
    let want = expected(0..2).await;
    let mut ring = Ring::start();
    assert_eq!(answers(&ring.gateway, 0..2).await, want);
    ring.kill(1);
    ring.members[1] = ring.process(1, &["--isa", "scalar"]);
    let asked = answers(&ring.gateway, 0..2);
    let mended = async {
        let head = &ring.members[0];
        let words =
            "not complete, its requests wait for a member that computes as before: stage-0 on ";
        let deadline = Instant::now() + Duration::from_secs(60);
        while !metrics(&ring.gateway).await.contains(words) {
            assert!(Instant::now() < deadline, "{}", head.output());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let log = head.output();
        assert!(
            log.contains(" computes with ") && log.contains(" is needed"),
            "{log}"
        );
        ring.members[1].signal(Signal::KILL);
        while !has_ended(ring.members[1].pid()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        ring.process(1, &[])
    };
    let (got, member) = tokio::join!(asked, mended);
    assert_eq!(got, want);
    ring.members[1] = member;
}

#[test]
fn a_member_with_another_model_ends_the_head_with_its_name_and_both() {
    let mut ring = Ring::planned(|_| {}, &[]);
    let whole = ring.plan.clone();
    let other = other_model(&ring);
    ring.plan["model"]["path"] = json!(other);
    let mut stage = ring.process(1, &[]);
    ring.plan = whole;
    let mut others = [0, 2].map(|place| ring.process(place, &[]));
    stage.wait_until_ready();
    assert!(!others[0].wait().success());
    let told = others[0].output();
    let name = format!("{} on ", RING_MEMBERS[1].1);
    for words in [
        &*name,
        "does not fit its group: its model: ",
        ", and the head wants ",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
}

/// A copy of the demo with other weights.
fn other_model(ring: &Ring) -> std::path::PathBuf {
    let from = ring.plan["model"]["path"]
        .as_str()
        .expect("a path")
        .to_owned();
    let to = ring.ranks.directory().join("other");
    std::fs::create_dir(&to).expect("a directory");
    for file in std::fs::read_dir(from).expect("the demo") {
        let file = file.expect("a file");
        let copy = to.join(file.file_name());
        std::fs::copy(file.path(), &copy).expect("a copy");
        if copy.extension().is_some_and(|of| of == "safetensors") {
            let mut bytes = std::fs::read(&copy).expect("weights");
            let half = bytes.len() / 2;
            bytes[half..].iter_mut().for_each(|byte| *byte ^= 1);
            std::fs::write(&copy, bytes).expect("weights");
        }
    }
    to
}

/// As after a copy that filled a disk.
#[test]
fn a_member_whose_weights_are_cut_off_says_so_and_the_head_says_whom_it_waits_for() {
    let mut ring = Ring::planned(|_| {}, &[]);
    let whole = ring.plan.clone();
    let cut = other_model(&ring);
    for file in std::fs::read_dir(&cut).expect("the copy") {
        let path = file.expect("a file").path();
        if path.extension().is_some_and(|of| of == "safetensors") {
            let file = std::fs::File::options()
                .write(true)
                .open(&path)
                .expect("weights");
            file.set_len(file.metadata().expect("weights").len() / 2)
                .expect("room");
        }
    }
    ring.plan["model"]["path"] = json!(cut);
    let mut stage = ring.process(1, &[]);
    ring.plan = whole;
    let others = [0, 2].map(|place| ring.process(place, &[]));
    assert!(!stage.wait().success());
    let told = stage.output();
    let last = told.lines().rfind(|line| line.starts_with("error: "));
    let last = last.unwrap_or_else(|| panic!("no error in {told}"));
    assert!(last.contains(".safetensors"), "{last}");
    wait_for(&others[0], "the group is waiting for a member");
    assert!(
        others[0].output().contains("stage-0 on "),
        "{}",
        others[0].output()
    );
}
