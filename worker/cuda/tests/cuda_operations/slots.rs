//! Weights in slots: what was loaded last is read, by steps that are recorded and by steps that are not, and a missing wait is
//! found by the host model.

use std::io::Write;
use std::process::Command;

use bytes::Bytes;
use hearth_kernels::convert::bf16_to_f32;
use hearth_kernels::ops::*;
use hearth_kernels::{DType, HostMatrix};

use crate::common::*;
use crate::support::{is_hardware, own, skipped};

const BUDGET_BYTES: u64 = 128 << 20;
/// Environment variable that says which wait a process leaves out.
const MISSING: &str = "HEARTH_MISSING_WAIT";

#[test]
fn a_slot_holds_what_was_loaded_last() {
    let gpu = own(BUDGET_BYTES);
    let mut rng = Rng(7);
    // Rows that are no multiple of the padding, several scales, and a copy that is longer than a staging buffer.
    let shapes = [(3, 5), (130, 200), (40, 256), (2200, 1000)];
    for (dtype, (rows, cols)) in DTYPES.into_iter().flat_map(|d| shapes.map(|s| (d, s))) {
        let matrices = [0, 1, 2, 3].map(|_| random_matrix(&mut rng, rows, cols, dtype));
        let bytes = gpu.slot_bytes(&matrices[0]);
        let slots = gpu.slots(2 * bytes, 2).unwrap();
        let tokens = [0, rows as u32 / 2, rows as u32 - 1];
        let mut free = [None, None];
        for turn in 0..6 {
            let (slot, pair) = (turn % 2, [turn % 4, (turn + 1) % 4]);
            gpu.reuse(&slots[slot], free[slot].as_ref()).unwrap();
            let load = |i: usize| {
                gpu.load(&matrices[pair[i]], &slots[slot], i * bytes)
                    .unwrap()
            };
            let weights = [load(0), load(1)];
            let copied = gpu.copied().unwrap();
            // Steps of few rows are recorded.
            gpu.begin_pass(if turn < 3 { 2 } else { 100 }).unwrap();
            gpu.after(&copied).unwrap();
            let read = weights.each_ref().map(|w| gpu.embed(w, &tokens).unwrap());
            free[slot] = Some(gpu.computed().unwrap());
            for (read, matrix) in read.iter().zip(pair) {
                let want = gpu.weight(&matrices[matrix]).unwrap();
                let want = gpu.download(&gpu.embed(&want, &tokens).unwrap()).unwrap();
                let what = format!("{dtype:?} [{rows}, {cols}], turn {turn}");
                assert_same_bits(&gpu.download(read).unwrap(), &want, &what);
            }
        }
    }
}

#[test]
fn copies_need_no_turn_of_the_thread_that_computes() {
    let gpu = own(BUDGET_BYTES);
    let matrix = random_matrix(&mut Rng(3), 20, 64, DType::Bf16);
    let slots = gpu.slots(gpu.slot_bytes(&matrix), 1).unwrap();
    let load = || {
        gpu.reuse(&slots[0], None).unwrap();
        let weight = gpu.load(&matrix, &slots[0], 0).unwrap();
        let text = gpu.computed().err().unwrap().to_string();
        assert!(text.contains("computes for one thread"), "{text}");
        (weight, gpu.copied().unwrap())
    };
    let (weight, copied) = std::thread::scope(|scope| scope.spawn(load).join().unwrap());
    gpu.after(&copied).unwrap();
    let got = gpu.download(&gpu.embed(&weight, &[7]).unwrap()).unwrap();
    let want = gpu.weight(&matrix).unwrap();
    let want = gpu.download(&gpu.embed(&want, &[7]).unwrap()).unwrap();
    assert_same_bits(&got, &want, "row 7");
}

#[test]
fn slots_come_out_of_the_budget_and_live_as_long_as_their_weights() {
    let gpu = own(BUDGET_BYTES);
    let matrix = random_matrix(&mut Rng(5), 20, 64, DType::Bf16);
    let before = gpu.memory_bytes().0;
    let slots = gpu.slots(1 << 20, 3).unwrap();
    assert_eq!(gpu.memory_bytes().0, before + (3 << 20));
    let error = gpu.slots(1 << 20, 128).err().unwrap().to_string();
    assert!(
        error.contains("too little memory for a slot of the experts' ring"),
        "{error}"
    );
    let weight = gpu.load(&matrix, &slots[0], 0).unwrap();
    drop(slots);
    assert_eq!(gpu.memory_bytes().0, before + (1 << 20));
    drop(weight);
    assert_eq!(gpu.memory_bytes().0, before);
}

#[test]
fn slots_that_are_given_back_are_memory_for_what_is_computed_next() {
    let gpu = own(BUDGET_BYTES);
    let matrix = random_matrix(&mut Rng(5), 20, 64, DType::Bf16);
    let before = gpu.memory_bytes().0;
    let mut slots = gpu.slots(1 << 20, 3).unwrap();
    let begun = gpu.copied().unwrap();
    // Its copy may still run.
    drop(gpu.load(&matrix, &slots[2], 0).unwrap());
    let copied = gpu.copied().unwrap();
    gpu.give_back(slots.split_off(1)).unwrap();
    assert_eq!(gpu.memory_bytes().0, before + (1 << 20));
    gpu.wait(&copied).unwrap();
    assert!(gpu.ns_between(&begun, &copied).is_some());
    let x = gpu.zeros(512, 1024).unwrap();
    assert!(gpu.download(&x).unwrap().iter().all(|value| *value == 0.0));
    drop(x);
    assert_eq!(gpu.slots(1 << 20, 2).unwrap().len(), 2);
}

#[test]
fn what_does_not_fit_a_slot_is_refused() {
    let gpu = own(BUDGET_BYTES);
    let fits = matrix(&[1.0; 600], 2, 300, DType::F8E4m3);
    let bytes = gpu.slot_bytes(&fits);
    let slots = gpu.slots(2 * bytes, 1).unwrap();
    for at in [bytes + 256, 2 * bytes, 1, usize::MAX - 255] {
        let text = gpu.load(&fits, &slots[0], at).err().unwrap().to_string();
        assert!(
            text.starts_with("load: ") && text.contains("of a slot of"),
            "{text}"
        );
    }
    gpu.load(&fits, &slots[0], bytes).unwrap();
    let codes = vec![0xff_u8; 600];
    let scales = fits.scales().cloned();
    let damaged = HostMatrix::new(codes.into(), DType::F8E4m3, 2, 300, scales).unwrap();
    let text = gpu.load(&damaged, &slots[0], 0).err().unwrap().to_string();
    assert!(text.contains("[2, 300] holds NaN"), "{text}");
}

#[test]
fn a_missing_wait_is_found() {
    if is_hardware() {
        skipped("hardware does not say that a wait is missing");
        return;
    }
    for (missing, seed) in ["none", "after", "free"]
        .into_iter()
        .flat_map(|missing| ["", "1", "2"].map(|seed| (missing, seed)))
    {
        let report = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "slots::one_reuse_of_a_slot", "--ignored"])
            .env(MISSING, missing)
            .env("HEARTH_HOST_MODEL_REPORT", report.path())
            .env_remove("HEARTH_HOST_MODEL_SEED");
        if !seed.is_empty() {
            command.env("HEARTH_HOST_MODEL_SEED", seed);
        }
        let output = command.output().unwrap();
        let text = std::fs::read_to_string(report.path()).unwrap();
        let what = format!("{missing}, seed {seed:?}: {text}");
        assert_eq!(output.status.success(), missing == "none", "{what}");
        let begins = if missing == "none" {
            ""
        } else {
            "race between streams"
        };
        assert!(
            text.starts_with(begins) && text.is_empty() == begins.is_empty(),
            "{what}"
        );
    }
}

#[test]
#[ignore = "one order of work in a process of its own: the test above starts it"]
fn one_reuse_of_a_slot() {
    let missing = std::env::var(MISSING).unwrap();
    let gpu = own(BUDGET_BYTES);
    let matrices = [1, 2].map(|seed| random_matrix(&mut Rng(seed), 20, 64, DType::Bf16));
    let slots = gpu.slots(gpu.slot_bytes(&matrices[0]), 1).unwrap();
    let mut free = None;
    for matrix in &matrices {
        let free_mark = free.as_ref().filter(|_| missing != "free");
        gpu.reuse(&slots[0], free_mark).unwrap();
        let weight = gpu.load(matrix, &slots[0], 0).unwrap();
        let copied = gpu.copied().unwrap();
        // The first one waits in any case: nothing was written before it.
        if missing != "after" || free.is_none() {
            gpu.after(&copied).unwrap();
        }
        gpu.embed(&weight, &[3]).unwrap();
        free = Some(gpu.computed().unwrap());
    }
    // Both streams have ended then.
    gpu.after(&gpu.copied().unwrap()).unwrap();
    gpu.synchronize().unwrap();
}

#[test]
fn weights_take_the_faster_way() {
    if is_hardware() {
        skipped("hardware has one faster way, which the log of a prompt tells");
        return;
    }
    for slow_us in ["0", "200000"] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "slots::mapped_weights_in_slots", "--ignored"])
            .env("HEARTH_HOST_MODEL_SLOW_REGISTERED_US", slow_us)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{slow_us} us: {text}");
    }
}

#[test]
#[ignore = "its environment says what is slow: the test above starts it"]
fn mapped_weights_in_slots() {
    let is_slow = std::env::var("HEARTH_HOST_MODEL_SLOW_REGISTERED_US").unwrap() != "0";
    let gpu = own(BUDGET_BYTES);
    let (rows, cols) = (600, 1000);
    let codes: Vec<u16> = (0..2 * rows * cols)
        .map(|i| (i % 16_000) as u16 | 0x3000)
        .collect();
    let mut file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = codes.iter().flat_map(|code| code.to_le_bytes()).collect();
    file.write_all(&bytes).unwrap();
    // SAFETY: the file has no name, so nothing changes it.
    let mapped = Bytes::from_owner(unsafe { memmap2::Mmap::map(&file) }.unwrap());
    let matrix = |index: usize| {
        let data = mapped.slice(index * rows * cols * 2..(index + 1) * rows * cols * 2);
        HostMatrix::new(data, DType::Bf16, rows, cols, None).unwrap()
    };
    assert_eq!(gpu.copy_ways(), None);
    let slots = gpu.slots(gpu.slot_bytes(&matrix(0)), 1).unwrap();
    let mut free = None;
    // The first one is timed, and the others take the way that was chosen.
    for index in [0, 1, 0] {
        gpu.reuse(&slots[0], free.as_ref()).unwrap();
        let weight = gpu.load(&matrix(index), &slots[0], 0).unwrap();
        gpu.after(&gpu.copied().unwrap()).unwrap();
        let got = gpu
            .download(&gpu.embed(&weight, &[0, 599]).unwrap())
            .unwrap();
        let want = [0, rows - 1].map(|row| &codes[(index * rows + row) * cols..][..cols]);
        assert!(
            got.iter()
                .copied()
                .eq(want.concat().iter().map(|&code| bf16_to_f32(code)))
        );
        free = Some(gpu.computed().unwrap());
    }
    let ways = gpu.copy_ways().unwrap();
    // Without the delay the two are near each other.
    assert!(ways.prefers_ring() || !is_slow, "{ways:?}");
    for rate in [ways.register_gbps, ways.registered_gbps, ways.staged_gbps] {
        assert!(rate > 0.0 && rate.is_finite(), "{ways:?}");
    }
    gpu.synchronize().unwrap();
}
