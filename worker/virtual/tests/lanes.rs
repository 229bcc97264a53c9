//! Waits that are missing are found in either mode, and a modelled device takes the time and the memory that it should.

#![allow(clippy::unwrap_used)] // a test that cannot set itself up has failed

use std::sync::Arc;

use hearth_kernels::ops::*;
use hearth_kernels::trace::{Trace, TraceLane};
use hearth_kernels::{
    BlockId, CpuOptions, DType, ExpertCall, HostMatrix, KernelError, KvDType, KvLayout,
    RouterScore, RouterSpec, Routing,
};
use hearth_virtual::{
    CopyModel, Modelled, RoutingModel, VirtualBackend, VirtualMode, VirtualOptions, VirtualTensor,
};

const HIDDEN: usize = 64;
const INNER: usize = 32;

const MODELLED: Modelled = Modelled {
    copy_bytes_per_s: 1e9,
    read_bytes_per_s: 1e12,
    compute_flops: 1e12,
    launch_us: 1.0,
    // Much longer than what the test itself takes.
    stretch: 1e4,
    routing: RoutingModel::Uniform,
    seed: 1,
    copies: CopyModel::None,
};

fn device(mode: VirtualMode) -> VirtualBackend {
    let cpu = CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    };
    let options = VirtualOptions {
        mode,
        ..VirtualOptions::exact(1 << 24, cpu)
    };
    VirtualBackend::new(options).unwrap()
}

fn modelled(change: impl FnOnce(&mut Modelled)) -> VirtualBackend {
    let mut modelled = MODELLED;
    change(&mut modelled);
    device(VirtualMode::Modelled(modelled))
}

/// A device of each mode.
fn devices() -> [VirtualBackend; 2] {
    let exact = VirtualMode::Exact {
        copy_bytes_per_s: None,
    };
    [device(exact), modelled(|_| {})]
}

fn matrix(rows: usize, cols: usize) -> HostMatrix {
    let data: Vec<u8> = vec![1.0f32; rows * cols]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    HostMatrix::new(data.into(), DType::F32, rows, cols, None).unwrap()
}

fn fault<T>(result: Result<T, KernelError>) -> String {
    match result {
        Ok(_) => panic!("a missing wait went unnoticed"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_weight_that_is_used_before_its_copy_was_waited_for_is_found() {
    for device in devices() {
        let matrix = matrix(INNER, HIDDEN);
        let slots = device.slots(device.slot_bytes(&matrix), 2).unwrap();
        let x = device.zeros(1, HIDDEN).unwrap();
        device.reuse(&slots[0], None).unwrap();
        let first = device.load(&matrix, &slots[0], 0).unwrap();
        let copied = device.copied().unwrap();
        device.reuse(&slots[1], None).unwrap();
        let second = device.load(&matrix, &slots[1], 0).unwrap();
        let error = fault(device.linear(&x, &first, None));
        assert!(error.contains("before its copy was waited for"), "{error}");
        device.after(&copied).unwrap();
        assert!(device.linear(&x, &first, None).is_ok());
        // A mark of an earlier copy says nothing about a later one.
        let error = fault(device.linear(&x, &second, None));
        assert!(error.contains("before its copy was waited for"), "{error}");
        device.after(&device.copied().unwrap()).unwrap();
        assert!(device.linear(&x, &second, None).is_ok());
    }
}

#[test]
fn a_slot_that_is_filled_before_its_last_operation_was_waited_for_is_found() {
    for device in devices() {
        let matrix = matrix(INNER, HIDDEN);
        let slots = device.slots(device.slot_bytes(&matrix), 1).unwrap();
        let x = device.zeros(1, HIDDEN).unwrap();
        device.reuse(&slots[0], None).unwrap();
        let weight = device.load(&matrix, &slots[0], 0).unwrap();
        device.after(&device.copied().unwrap()).unwrap();
        let early = device.computed().unwrap();
        device.linear(&x, &weight, None).unwrap();
        for mark in [None, Some(&early)] {
            let error = fault(device.reuse(&slots[0], mark));
            assert!(
                error.contains("before the operations that read it"),
                "{error}"
            );
        }
        // The slot is as it was.
        assert!(device.linear(&x, &weight, None).is_ok());
        device
            .reuse(&slots[0], Some(&device.computed().unwrap()))
            .unwrap();
        let error = fault(device.linear(&x, &weight, None));
        assert!(error.contains("given to another one"), "{error}");
        // Copies run in order: what one has waited for, all later ones have.
        device.reuse(&slots[0], None).unwrap();
    }
}

/// The slot is not reused yet, so that its bytes would still be right.
#[test]
fn a_weight_that_is_used_after_its_slot_was_released_is_found() {
    for device in devices() {
        let matrix = matrix(INNER, HIDDEN);
        let slots = device.slots(device.slot_bytes(&matrix), 1).unwrap();
        let x = device.zeros(1, HIDDEN).unwrap();
        device.reuse(&slots[0], None).unwrap();
        let weight = device.load(&matrix, &slots[0], 0).unwrap();
        device.after(&device.copied().unwrap()).unwrap();
        device.linear(&x, &weight, None).unwrap();
        let free = device.computed().unwrap();
        device.vacate(&slots[0]);
        let late = fault(device.linear(&x, &weight, None));
        assert!(late.contains("its slot was released"), "{late}");
        // The slot can be used again as ever.
        device.reuse(&slots[0], Some(&free)).unwrap();
        let weight = device.load(&matrix, &slots[0], 0).unwrap();
        device.after(&device.copied().unwrap()).unwrap();
        device.linear(&x, &weight, None).unwrap();
    }
}

#[test]
fn memory_goes_from_slots_to_activations_and_back_behind_what_uses_it() {
    for device in devices() {
        let matrix = matrix(INNER, HIDDEN);
        let bytes = device.slot_bytes(&matrix);
        let mut slots = device.slots(bytes, 2).unwrap();
        let used_bytes = || device.device_memory().unwrap().used_bytes;
        assert_eq!(used_bytes(), 2 * bytes as u64);
        device.reuse(&slots[1], None).unwrap();
        let weight = device.load(&matrix, &slots[1], 0).unwrap();
        device.after(&device.copied().unwrap()).unwrap();
        device.give_back(vec![slots.remove(1)]).unwrap();
        assert_eq!(used_bytes(), bytes as u64);
        let x = device.zeros(1, HIDDEN).unwrap();
        let late = fault(device.linear(&x, &weight, None));
        assert!(late.contains("given to another one"), "{late}");
        let again = device.slots(bytes, 1).unwrap();
        device.reuse(&again[0], None).unwrap();
        let weight = device.load(&matrix, &again[0], 0).unwrap();
        device.after(&device.copied().unwrap()).unwrap();
        device.linear(&x, &weight, None).unwrap();
    }
}

#[test]
fn the_time_between_two_marks_is_that_of_what_lies_between() {
    let device = modelled(|modelled| modelled.copy_bytes_per_s = 1e9);
    let matrix = matrix(INNER, HIDDEN);
    let bytes = device.slot_bytes(&matrix);
    let slots = device.slots(bytes, 1).unwrap();
    let begun = device.copied().unwrap();
    device.load(&matrix, &slots[0], 0).unwrap();
    let copied = device.copied().unwrap();
    assert_eq!(device.ns_between(&begun, &copied), None, "not reached yet");
    let computed = device.computed().unwrap();
    device.after(&copied).unwrap();
    let waited = device.computed().unwrap();
    device.wait(&copied).unwrap();
    // A GB a second is a byte a nanosecond; the calls themselves take a moment.
    let copy_ns = device.ns_between(&begun, &copied).unwrap();
    let wait_ns = device.ns_between(&computed, &waited).unwrap();
    let bytes = bytes as u64;
    assert!(
        (bytes..bytes + bytes / 4).contains(&copy_ns),
        "{copy_ns} of {bytes}"
    );
    assert!(
        wait_ns > bytes / 2 && wait_ns <= copy_ns,
        "{wait_ns} of {copy_ns}"
    );
}

#[test]
fn modelled_operations_have_shapes_memory_and_time_but_no_values() {
    let device = modelled(|_| {});
    let [gate, up] = [(); 2].map(|()| device.weight(&matrix(INNER, HIDDEN)).unwrap());
    let down = device.weight(&matrix(HIDDEN, INNER)).unwrap();
    let before = device.device_memory().unwrap().used_bytes;
    assert_eq!(before as usize, 3 * 4 * INNER * HIDDEN);
    let x = device.zeros(1000, HIDDEN).unwrap();
    assert_eq!(device.shape(&x), (1000, HIDDEN));
    let used = device.device_memory().unwrap().used_bytes - before;
    assert_eq!(used as usize, 1000 * HIDDEN * 4);
    let mut sum = device.expert_sum(1000, HIDDEN, 1).unwrap();
    let rows: Vec<u32> = (0..1000).collect();
    let call = ExpertCall {
        expert: 0,
        gate: &gate,
        up: &up,
        down: &down,
        rows: &rows,
        weights: &[1.0; 1000],
    };
    let lanes = device.lane_use().unwrap();
    device.experts(&mut sum, &x, &[call], true).unwrap();
    let took_us = 1e3 * device.lane_use().unwrap().since(&lanes).compute_busy_ms;
    // Three products at 1 TFLOPS, and the launch.
    let want_us = 3.0 * 2.0 * (1000 * INNER * HIDDEN) as f64 / 1e12 * 1e6 + 1.0;
    assert!((took_us / want_us - 1.0).abs() < 1e-3, "{took_us} µs");
    let total = device.expert_total(sum).unwrap();
    assert_eq!(device.shape(&total), (1000, HIDDEN));
    // Shapes are checked as ever.
    assert!(device.linear(&x, &down, None).is_err());
    let numerics = device.numerics();
    assert!(numerics.contains("meaningless"), "{numerics}");
}

#[test]
fn results_of_a_modelled_device_come_when_they_are_due() {
    let device = modelled(|modelled| {
        modelled.stretch = 100.0;
        modelled.launch_us = 200.0;
    });
    let before_ns = device.elapsed_ns();
    let x = device.zeros(2, HIDDEN).unwrap();
    for _ in 0..4 {
        device.rows(&x, &[0, 1]).unwrap();
    }
    let values = device.download(&x).unwrap();
    assert_eq!(values, vec![0.0; 2 * HIDDEN]);
    let took_us = (device.elapsed_ns() - before_ns) as f64 / 1e3;
    assert!(took_us >= 1200.0, "{took_us} µs for 6 operations");
}

#[test]
fn copies_and_computation_overlap_behind_their_marks() {
    let trace = Arc::new(Trace::stretched(MODELLED.stretch));
    let recording = trace.begin(usize::MAX).unwrap();
    let options = VirtualOptions {
        mode: VirtualMode::Modelled(MODELLED),
        trace: Some(Arc::clone(&trace)),
        ..VirtualOptions::exact(1 << 24, CpuOptions::default())
    };
    let device = VirtualBackend::new(options).unwrap();
    let matrix = matrix(INNER, HIDDEN);
    let bytes = device.slot_bytes(&matrix);
    let slots = device.slots(bytes, 1).unwrap();
    let x = device.zeros(100, HIDDEN).unwrap();
    let mut free = None;
    for name in ["first", "second"] {
        device.reuse(&slots[0], free.as_ref()).unwrap();
        let weight = device.load(&matrix, &slots[0], 0).unwrap();
        trace.loaded(name);
        device.after(&device.copied().unwrap()).unwrap();
        device.linear(&x, &weight, None).unwrap();
        free = Some(device.computed().unwrap());
        trace.released(name);
    }
    let events = recording.end().events;
    let of = |lane: TraceLane, name: &str| {
        let all = events.iter().filter(|e| e.lane == lane && e.name == name);
        all.map(|e| (e.begin_ns, e.end_ns)).collect::<Vec<_>>()
    };
    let [(_, first), (begin, second)] = ["first", "second"].map(|of_copy| {
        let copies = of(TraceLane::Copy, of_copy);
        assert_eq!(copies.len(), 1);
        let took_ns = copies[0].1 - copies[0].0;
        assert!(took_ns.abs_diff(bytes as u64) <= 1, "1 GB/s: {took_ns} ns");
        copies[0]
    });
    let linear = of(TraceLane::Compute, "linear");
    assert!(linear[0].0 >= first && linear[1].0 >= second);
    assert!(begin >= linear[0].1, "the slot was free");
    assert_eq!(of(TraceLane::Modules, "first ON"), [(first, first)]);
    assert_eq!(
        of(TraceLane::Modules, "first OFF"),
        [(linear[0].1, linear[0].1)]
    );
}

#[test]
fn a_real_copy_keeps_the_pace_of_the_link() {
    let device = modelled(|modelled| {
        modelled.stretch = 1.0;
        modelled.copy_bytes_per_s = 50e6;
        modelled.copies = CopyModel::Real;
    });
    let matrix = matrix(512, 512);
    let slots = device.slots(device.slot_bytes(&matrix), 2).unwrap();
    let before_ns = device.elapsed_ns();
    for slot in &slots {
        device.reuse(slot, None).unwrap();
        device.load(&matrix, slot, 0).unwrap();
    }
    // The last quarter of the second one is copied when the link begins with it.
    let took_ms = (device.elapsed_ns() - before_ns) as f64 / 1e6;
    assert!(took_ms >= 36.0, "2 MiB took {took_ms} ms at 50 MB/s");
    let copied = device.copied().unwrap();
    device.wait(&copied).unwrap();
    let took_ms = (device.elapsed_ns() - before_ns) as f64 / 1e6;
    assert!(took_ms >= 41.9, "they were there after {took_ms} ms");
}

fn choices(device: &VirtualBackend, tokens: usize, experts: usize) -> Routing {
    choices_by(device, &device.zeros(tokens, experts).unwrap())
}

fn choices_by(device: &VirtualBackend, logits: &VirtualTensor) -> Routing {
    let spec = RouterSpec {
        score: RouterScore::Softmax,
        top_k: 4,
        groups: 1,
        top_groups: 1,
        normalize: true,
        scaling: 1.0,
    };
    device.route(logits, None, spec).unwrap()
}

#[test]
fn a_layer_keeps_the_experts_that_its_tokens_like() {
    let zipf = RoutingModel::Zipf { exponent: 1.5 };
    let device = modelled(|m| m.routing = zipf);
    let routers = [(); 2].map(|()| device.weight(&matrix(32, HIDDEN)).unwrap());
    let x = device.zeros(500, HIDDEN).unwrap();
    let favourites = |router| {
        let logits = device.linear(&x, router, None).unwrap();
        let mut counts = [0; 32];
        let chosen = choices_by(&device, &logits);
        chosen.experts.iter().for_each(|&e| counts[e as usize] += 1);
        let mut by_use: Vec<usize> = (0..32).collect();
        by_use.sort_by_key(|expert| std::cmp::Reverse(counts[*expert]));
        by_use.truncate(2);
        by_use
    };
    let first = favourites(&routers[0]);
    assert_eq!(favourites(&routers[0]), first, "in the next step, too");
    assert_ne!(favourites(&routers[1]), first, "of another layer");
}

#[test]
fn routing_is_a_function_of_seed_call_and_row() {
    let zipf = RoutingModel::Zipf { exponent: 1.5 };
    for routing in [RoutingModel::Uniform, zipf] {
        let of_seed = |seed| modelled(|m| (m.seed, m.routing) = (seed, routing));
        let (a, b, other) = (of_seed(1), of_seed(1), of_seed(2));
        let first = choices(&a, 500, 32);
        assert_eq!(first, choices(&b, 500, 32));
        assert_ne!(first, choices(&other, 500, 32));
        let second = choices(&a, 500, 32);
        assert_ne!(first, second, "another step");
        // A row's choice does not depend on how many others there are.
        assert_eq!(choices(&b, 100, 32).experts[..], second.experts[..400]);
        for token in first.experts.chunks(4) {
            assert!(token.windows(2).all(|pair| pair[0] < pair[1]), "{token:?}");
            assert!(token[3] < 32);
        }
        assert_eq!(first.weights, vec![0.25; 2000]);
        let mut counts = [0; 32];
        first.experts.iter().for_each(|&e| counts[e as usize] += 1);
        counts.sort_unstable();
        match routing {
            RoutingModel::Uniform => assert!(counts[0] > 35 && counts[31] < 95, "{counts:?}"),
            RoutingModel::Zipf { .. } => assert!(counts[31] > 10 * counts[0], "{counts:?}"),
        }
    }
}

#[test]
fn a_rate_that_is_not_positive_is_refused() {
    let mode = VirtualMode::Modelled(Modelled {
        read_bytes_per_s: 0.0,
        ..MODELLED
    });
    let options = VirtualOptions {
        mode,
        ..VirtualOptions::exact(1, CpuOptions::default())
    };
    let error = VirtualBackend::new(options).err().unwrap().to_string();
    assert!(error.contains("read is 0"), "{error}");
}

#[test]
fn kv_is_copied_beside_computation_and_read_behind_its_mark() {
    let layout = KvLayout {
        layers: 1,
        kv_heads: 1,
        k_dim: 64,
        v_dim: 64,
        value_in_key: false,
        block_tokens: 16,
        dtype: KvDType::Bf16,
    };
    let blocks = [BlockId(0), BlockId(1)];
    for device in devices() {
        let kv = device.kv_alloc(layout, 2).unwrap();
        let copy = device.kv_read_begin(&kv, 0, &blocks, 0, 32).unwrap();
        let missing = fault(device.host_copy_end(copy));
        assert!(
            missing.contains("before its copy was waited for"),
            "{missing}"
        );
        let copy = device.kv_read_begin(&kv, 0, &blocks, 0, 32).unwrap();
        assert!(!device.host_copy_is_done(&copy).unwrap());
        device.host_copy_wait(&copy).unwrap();
        assert!(device.host_copy_is_done(&copy).unwrap());
        assert_eq!(device.host_copy_end(copy).unwrap().len(), 32 * 256);
    }
    // 8 KiB at 1 GB/s are 8 µs, and the device computes meanwhile.
    let device = modelled(|_| {});
    let kv = device.kv_alloc(layout, 2).unwrap();
    let copy = device.kv_read_begin(&kv, 0, &blocks, 0, 32).unwrap();
    let computed = device.computed().unwrap();
    assert!(!device.host_copy_is_done(&copy).unwrap());
    device.wait(&computed).unwrap();
    assert!(
        !device.host_copy_is_done(&copy).unwrap(),
        "the copy takes eight times as long"
    );
    device.host_copy_wait(&copy).unwrap();
}

#[test]
fn rows_cross_the_link_beside_computation_and_have_their_bits() {
    let values: Vec<f32> = (0..8 * HIDDEN).map(|value| value as f32 / 7.0).collect();
    for device in devices() {
        let mut incoming = device.rows_write_begin(8, HIDDEN).unwrap();
        for first in [4, 0] {
            let part = first * HIDDEN..(first + 4) * HIDDEN;
            device
                .rows_write(&mut incoming, first, &values[part])
                .unwrap();
        }
        assert!(device.rows_write(&mut incoming, 7, &values).is_err());
        let mut x = device.rows_write_end(incoming).unwrap();
        assert!(device.rows_read_begin(&x, 7..9).is_err());
        let missing = device.rows_read_begin(&x, 0..8).unwrap();
        let missing = fault(device.host_copy_end(missing));
        assert!(
            missing.contains("before its copy was waited for"),
            "{missing}"
        );
        let copy = device.rows_read_begin(&x, 2..8).unwrap();
        let more = device.upload(8, HIDDEN, &values).unwrap();
        device.add_assign(&mut x, &more).unwrap();
        device.host_copy_wait(&copy).unwrap();
        let bytes = device.host_copy_end(copy).unwrap();
        let want = values[2 * HIDDEN..].iter();
        let want: Vec<u8> = want.flat_map(|value| value.to_le_bytes()).collect();
        // A modelled device has no values.
        assert!(bytes == want || device.lane_use().is_some() && bytes.len() == want.len());
    }
    // 64 KiB at 1 GB/s are 66 µs each way, and the device computes meanwhile.
    let device = modelled(|_| {});
    let x = device.zeros(256, HIDDEN).unwrap();
    let copy = device.rows_read_begin(&x, 0..256).unwrap();
    let mut incoming = device.rows_write_begin(256, HIDDEN).unwrap();
    device
        .rows_write(&mut incoming, 0, &vec![0.0; 256 * HIDDEN])
        .unwrap();
    device.zeros(256, HIDDEN).unwrap();
    device.wait(&device.computed().unwrap()).unwrap();
    assert!(!device.host_copy_is_done(&copy).unwrap());
    let used = device.lane_use().unwrap();
    assert!(used.compute_busy_ms < 0.01, "{used:?}");
    // What reads them waits for them.
    let began_ms = used.wall_ms;
    let x = device.rows_write_end(incoming).unwrap();
    device
        .add_assign(&mut device.zeros(256, HIDDEN).unwrap(), &x)
        .unwrap();
    device.finish().unwrap();
    let used = device.lane_use().unwrap();
    assert!(used.wall_ms - began_ms > 0.05, "{used:?}");
    assert!((used.copy_busy_ms - 0.065536).abs() < 1e-3, "{used:?}");
}
