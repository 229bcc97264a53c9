//! Copies beside computation on a device whose time is modelled.

use std::io::Write;
use std::sync::Arc;

use hearth_virtual::{
    CopyModel, LaneUse, Modelled, RoutingModel, VirtualBackend, VirtualMode, VirtualOptions,
};

use super::{Files, options, prompt};

/// Reports a skipped test directly on stderr: the test harness shows only what failed tests print.
fn skipped(why: &str) {
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}

/// A prompt on a modelled device whose copies and whose operations take about as long: what its lanes did.
fn modelled_prompt(files: &Files, slots: usize) -> LaneUse {
    let mode = VirtualMode::Modelled(Modelled {
        copy_bytes_per_s: files.expert_bytes() as f64 / 2e-3,
        read_bytes_per_s: 1e15,
        compute_flops: 1e18,
        launch_us: 15.0,
        stretch: 100.0,
        routing: RoutingModel::Uniform,
        seed: 1,
        copies: CopyModel::None,
    });
    let options = VirtualOptions {
        mode,
        ..VirtualOptions::exact(1 << 30, options())
    };
    let device = Arc::new(VirtualBackend::new(options).unwrap());
    let streamed = files.streamed(&device, Some(slots)).unwrap();
    let mut runner = files.model(Arc::clone(&device), streamed);
    let before = device.lane_use().unwrap();
    runner.run(0, &prompt());
    device.lane_use().unwrap().since(&before)
}

/// How much longer the lanes are busy than the prompt lasts; `None` if operations ended too late for the model of time.
fn overlap(files: &Files, slots: usize) -> Option<f64> {
    let used = modelled_prompt(files, slots);
    (used.late_operations * 100 <= used.operations)
        .then(|| (used.compute_busy_ms + used.copy_busy_ms) / used.wall_ms)
}

/// Other tests may keep the loader's thread from its CPU, which delays copies: one prompt of ten must show the overlap.
#[test]
fn copies_overlap_with_computation_where_the_ring_has_room() {
    let files = Files::of("deepseek_v3");
    let mut measured = Vec::new();
    for _ in 0..10 {
        let (Some(short), Some(long)) = (overlap(&files, 2), overlap(&files, files.experts()))
        else {
            continue;
        };
        if long > short && long > 1.25 {
            return;
        }
        measured.push((short, long));
    }
    if measured.is_empty() {
        skipped("this machine is too busy to model time");
        return;
    }
    panic!("lanes overlap with two slots, and with a slot for each expert: {measured:.2?}");
}
