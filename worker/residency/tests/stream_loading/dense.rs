//! Dense modules that stream with the experts: the bits of resident ones, each over the link once a pass, in the room of two
//! slots.

use std::sync::Arc;

use hearth_kernels::CpuBackend;
use hearth_kernels::ops::*;
use hearth_model::{ModuleId, ModuleSpec, ResidencyError, modules};
use hearth_residency::{RingSlots, StreamLoading, StreamLoadingOptions};
use hearth_virtual::VirtualBackend;

use super::{CASES, Crossed, Ending, Files, device, options, prompt};

fn streamed(
    files: &Files,
    device: &Arc<VirtualBackend>,
    slots: usize,
    crossed: &Crossed,
) -> Result<Arc<StreamLoading<VirtualBackend>>, ResidencyError> {
    files.open(
        device,
        StreamLoadingOptions {
            slots: RingSlots::Fixed(slots),
            streams_dense: true,
            experts: files.experts(),
            experts_per_token: files.experts_per_token(),
            listener: Some(crossed.listener()),
        },
    )
}

/// Attention, dense and shared feed-forward blocks, in the order of the pass.
fn dense_specs(files: &Files) -> Vec<ModuleSpec> {
    let mut specs = modules(&files.config).unwrap();
    specs.retain(|spec| {
        matches!(
            spec.id,
            ModuleId::Attention(_) | ModuleId::DenseFfn(_) | ModuleId::SharedExpert(_)
        )
    });
    specs
}

#[test]
fn dense_modules_that_stream_give_the_bits_of_resident_ones() {
    for case in CASES {
        let files = Files::of(case);
        let backend = Arc::new(CpuBackend::new(options()).unwrap());
        let mut plain = files.model(backend, files.resident());
        let passes: [(usize, &[u32]); 3] = [(0, &prompt()), (60, &[5]), (61, &[6, 7])];
        let want = passes.map(|(start, tokens)| plain.run(start, tokens));
        for slots in [2, 3, files.experts()] {
            for tile_rows in [7, usize::MAX] {
                let device = device(1 << 30);
                let policy = streamed(&files, &device, slots, &Crossed::default()).unwrap();
                let mut runner = files.model(Arc::clone(&device), policy);
                runner.model = runner.model.in_row_tiles(tile_rows);
                let got = passes.map(|(start, tokens)| runner.run(start, tokens));
                assert!(got == want, "{case}, {slots} slots, tiles of {tile_rows}");
            }
        }
    }
}

#[test]
fn each_dense_module_crosses_the_link_once_a_pass_and_in_its_order() {
    for case in CASES {
        let files = Files::of(case);
        let want: Vec<ModuleId> = dense_specs(&files).iter().map(|spec| spec.id).collect();
        for slots in [2, files.experts()] {
            let device = device(1 << 30);
            let crossed = Crossed::default();
            let policy = streamed(&files, &device, slots, &crossed).unwrap();
            let mut runner = files.model(Arc::clone(&device), policy);
            let passes: [(usize, &[u32]); 3] = [(0, &prompt()), (60, &[5]), (0, &prompt())];
            for (start, tokens) in passes {
                runner.run(start, tokens);
                let mut ids = crossed.take_in_order();
                let experts = ids.iter().filter(|id| matches!(id, ModuleId::Expert(..)));
                let mut experts: Vec<ModuleId> = experts.copied().collect();
                experts.sort_unstable();
                let twice = experts.windows(2).find(|pair| pair[0] == pair[1]);
                assert_eq!(twice, None, "{case}, {slots} slots");
                ids.retain(|id| !matches!(id, ModuleId::Expert(..)));
                assert_eq!(ids, want, "{case}, {slots} slots");
            }
        }
    }
}

/// Two slots are all that dense modules take on the device, but for their vectors.
#[test]
fn dense_modules_take_the_room_of_two_slots() {
    for case in CASES {
        let files = Files::of(case);
        let peak = |memory_bytes, streams_dense| {
            let device = device(memory_bytes);
            let policy = files.open(
                &device,
                StreamLoadingOptions {
                    slots: RingSlots::Fixed(2),
                    streams_dense,
                    experts: files.experts(),
                    experts_per_token: files.experts_per_token(),
                    listener: None,
                },
            );
            let policy = policy.unwrap();
            let opened_bytes = device.device_memory().unwrap().used_bytes;
            let mut runner = files.model(Arc::clone(&device), policy);
            let bits = runner.run(0, &prompt());
            (
                bits,
                opened_bytes,
                device.device_memory().unwrap().peak_bytes,
            )
        };
        let (want, resident_bytes, resident_peak) = peak(1 << 30, false);
        let (got, opened_bytes, peak_bytes) = peak(1 << 30, true);
        assert!(got == want, "{case}");
        let specs = dense_specs(&files);
        let sizes = specs
            .iter()
            .map(|spec| spec.stored_bytes(&files.checkpoint));
        let (all, largest) = (sizes.clone().sum::<u64>(), sizes.max().unwrap());
        // Vectors stay, and parts of a slot are aligned.
        let saved = resident_bytes - opened_bytes;
        let least = all.saturating_sub(2 * largest) * 8 / 10;
        assert!(
            saved >= least,
            "{case}: {saved} of {all}, slots of {largest}"
        );
        assert_eq!(resident_peak - peak_bytes, saved, "{case}");
        // It runs in its own peak to the byte.
        assert!(
            peak(peak_bytes, true) == (want, opened_bytes, peak_bytes),
            "{case}"
        );
    }
}

#[test]
fn a_pass_that_was_given_up_leaves_no_dense_module_behind() {
    let files = Files::of("deepseek_v3");
    let device = device(1 << 30);
    let policy = streamed(&files, &device, 3, &Crossed::default()).unwrap();
    let mut runner = files.model(Arc::clone(&device), policy);
    let want = runner.run(0, &prompt());
    for checks in (1..).step_by(5) {
        if runner.try_run(0, &prompt(), &mut Ending(checks)).is_ok() {
            return;
        }
        assert!(runner.run(0, &prompt()) == want, "after {checks} checks");
    }
}

#[test]
fn a_device_without_room_for_the_slots_of_dense_modules_says_so() {
    let files = Files::of("deepseek_v3");
    let mut refusals = Vec::new();
    // More and more memory: weights that stay, then slots of dense modules, then those of experts.
    for memory_bytes in (1..400).map(|n| n * 4096) {
        let device = device(memory_bytes);
        match streamed(&files, &device, 2, &Crossed::default()) {
            Ok(_) => break,
            Err(error) => refusals.push(error.to_string()),
        }
    }
    let of_dense = refusals
        .iter()
        .find(|text| text.contains("for dense modules"));
    let text = of_dense.unwrap_or_else(|| panic!("{refusals:#?}"));
    assert!(
        text.contains("2 slots of ") && text.contains("more memory"),
        "{text}"
    );
    let last = refusals.last().unwrap();
    assert!(last.contains("a ring of 2 slots of "), "{last}");
}
