//! What a trace has of a GPU: its lanes, by the host's clock, with the same bits as without.

use std::sync::Arc;

use hearth_kernels::ops::*;
use hearth_kernels::trace::{Recorded, Trace, TraceEvent, TraceLane};
use hearth_kernels::{BlockId, KvDType, KvLayout};
use hearth_residency::{RingSlots, StreamEvent};

use crate::device::{cpu, gpu, gpu_traced};
use crate::host_experts::{Hybrid, STREAMS};
use crate::streaming::Files;

const SLOTS: usize = 3;

fn of(recorded: &Recorded, lane: TraceLane) -> Vec<&TraceEvent> {
    let events = recorded.events.iter();
    events.filter(|event| event.lane == lane).collect()
}

/// Asserts that a lane does one thing after the other.
fn assert_in_turn(events: &[&TraceEvent]) {
    for event in events {
        assert!(event.begin_ns <= event.end_ns, "{event:?}");
    }
    for pair in events.windows(2) {
        assert!(pair[0].end_ns <= pair[1].begin_ns, "{pair:?}");
    }
}

#[test]
fn streamed_experts_are_seen_on_both_lanes_and_their_bits_stay() {
    let files = Files::of("qwen3_moe");
    let plain = gpu();
    let want = files.bits(&plain, files.resident(&plain), usize::MAX);
    let trace = Arc::new(Trace::new());
    let gpu = gpu_traced(&trace);
    let told = Arc::clone(&trace);
    let streamed = files.streamed_and_told(
        &gpu,
        RingSlots::Fixed(SLOTS),
        Some(Box::new(move |event| match event {
            StreamEvent::Loaded(id) => told.loaded(&id.to_string()),
            StreamEvent::Released(id) => told.released(&id.to_string()),
        })),
    );
    // Two recordings, and nothing between them.
    for round in 0..2 {
        let bits = files.bits(&gpu, streamed.clone(), usize::MAX);
        assert!(bits == want, "round {round}");
        let recording = trace.begin(usize::MAX).unwrap();
        let bits = files.bits(&gpu, streamed.clone(), usize::MAX);
        gpu.synchronize().unwrap();
        let now_ns = trace.ns_at(std::time::Instant::now());
        let recorded = recording.end();
        assert!(bits == want, "recorded, round {round}");
        let [copies, compute] =
            [TraceLane::Copy, TraceLane::Compute].map(|lane| of(&recorded, lane));
        assert_in_turn(&copies);
        assert_in_turn(&compute);
        assert!(compute.iter().all(|event| event.end_ns <= now_ns));
        // A prompt is launched kernel by kernel, a token as a graph or so.
        for part in ["attention", "operations)", "download"] {
            let has = compute.iter().any(|event| event.name.contains(part));
            assert!(has, "{part}: {compute:?}");
        }
        assert_modules(&recorded, &copies);
    }
}

/// Each copy belongs to an expert that is there at its end, and is let go later.
fn assert_modules(recorded: &Recorded, copies: &[&TraceEvent]) {
    let modules = of(recorded, TraceLane::Modules);
    assert!(copies.len() > 20, "{} copies", copies.len());
    for copy in copies {
        assert!(copy.name.contains(" expert "), "{copy:?}");
    }
    let (mut offs, mut before) = (0, 0);
    for event in &modules {
        if let Some(expert) = event.name.strip_suffix(" ON") {
            let ends_here =
                |copy: &&&TraceEvent| copy.name == expert && copy.end_ns == event.end_ns;
            assert!(copies.iter().any(|copy| ends_here(&copy)), "{event:?}");
        } else if let Some(expert) = event.name.strip_suffix(" OFF") {
            offs += 1;
            let came =
                |on: &&&TraceEvent| on.name == format!("{expert} ON") && on.end_ns <= event.end_ns;
            before += usize::from(!modules.iter().any(|on| came(&on)));
        }
    }
    assert!(before <= SLOTS, "{before} came before the recording");
    assert!(offs > 20, "{offs} experts were let go");
}

#[test]
fn kv_that_leaves_is_seen_beside_what_is_computed() {
    let trace = Arc::new(Trace::new());
    let gpu = gpu_traced(&trace);
    let layout = KvLayout {
        layers: 2,
        block_tokens: 16,
        kv_heads: 2,
        k_dim: 64,
        v_dim: 64,
        value_in_key: false,
        dtype: KvDType::Bf16,
    };
    let blocks = [BlockId(0), BlockId(1)];
    let mut kv = gpu.kv_alloc(layout, blocks.len()).unwrap();
    let bytes: Vec<u8> = (0..32 * layout.token_layer_bytes())
        .map(|n| n as u8)
        .collect();
    gpu.kv_write(&mut kv, 1, &blocks, 0, &bytes).unwrap();
    let recording = trace.begin(usize::MAX).unwrap();
    let begin = |_| gpu.kv_read_begin(&kv, 1, &blocks, 0, 32).unwrap();
    for copy in (0..3).map(begin).collect::<Vec<_>>() {
        gpu.host_copy_wait(&copy).unwrap();
        assert!(gpu.host_copy_end(copy).unwrap() == bytes);
    }
    let recorded = recording.end();
    let exported = of(&recorded, TraceLane::KvExport);
    assert_eq!(exported.len(), 3, "{exported:?}");
    assert_in_turn(&exported);
    let name = format!("{} bytes", bytes.len());
    assert!(
        exported.iter().all(|event| event.name == name),
        "{exported:?}"
    );
}

#[test]
fn experts_on_the_cpus_are_seen_between_what_the_gpu_does() {
    let files = Files::of("qwen3_moe");
    let trace = Arc::new(Trace::new());
    let gpu = gpu_traced(&trace);
    let kv = (KvDType::F32, 16);
    let mut model = Hybrid::traced(&files, (&gpu, cpu()), (None, true), kv, Some(trace.clone()));
    let tokens = vec![vec![5]; STREAMS];
    model.step(&tokens);
    let recording = trace.begin(usize::MAX).unwrap();
    model.step(&tokens);
    let recorded = recording.end();
    let [experts, compute] =
        [TraceLane::HostExperts, TraceLane::Compute].map(|lane| of(&recorded, lane));
    assert_in_turn(&experts);
    // Two flights by turns: of three rows, two and one.
    let layers: Vec<&str> = experts
        .iter()
        .filter_map(|event| event.name.split(':').next())
        .collect();
    assert!(
        layers.len() >= 4 && layers.chunks(2).all(|pair| pair[0] == pair[1]),
        "{layers:?}"
    );
    let rows = |rows: &str| {
        experts
            .iter()
            .filter(|event| event.name.contains(rows))
            .count()
    };
    assert_eq!(
        (rows(": rows 2,"), rows(": rows 1,")),
        (layers.len() / 2, layers.len() / 2)
    );
    // One clock: the GPU began before them, and ended after them.
    let (first, last) = (compute[0], compute[compute.len() - 1]);
    for event in &experts {
        assert!(
            first.begin_ns <= event.begin_ns && event.end_ns <= last.end_ns,
            "{event:?} between {first:?} and {last:?}"
        );
    }
}
