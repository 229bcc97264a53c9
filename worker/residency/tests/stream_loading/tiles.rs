//! Prompts in tiles of rows.

use std::sync::Arc;

use hearth_kernels::ops::*;
use hearth_model::{Residency, modules};
use hearth_residency::Resident;

use super::{Files, device, prompt};

#[test]
fn row_tiles_give_the_same_bits_in_no_more_memory() {
    for case in [
        "deepseek_v3",
        "deepseek_v3_fp8",
        "qwen3_moe",
        "qwen3_moe_sparse_step",
    ] {
        let files = Files::of(case);
        let run = |tile_rows: usize| {
            let device = device(1 << 30);
            let streamed = files.streamed(&device, Some(3)).unwrap();
            let mut runner = files.model(Arc::clone(&device), streamed.clone());
            runner.model = runner.model.in_row_tiles(tile_rows);
            // A prompt after a cached part, so that positions and rows differ.
            let got = [
                runner.run(0, &[4, 9]),
                runner.run(2, &prompt()),
                runner.run(62, &[5]),
            ];
            let loaded = streamed.stats().prefetched_bytes;
            (got, device.device_memory().unwrap().peak_bytes, loaded)
        };
        let (want, peak, loaded) = run(usize::MAX);
        for tile_rows in [1, 7, 32, 60] {
            let (got, tiled_peak, tiled_loaded) = run(tile_rows);
            assert!(got == want, "{case}, tiles of {tile_rows}");
            // In models this small, a whole prompt's experts take more than what is tiled.
            assert!(tiled_peak <= peak, "{case}: {tiled_peak} of {peak}");
            // Copies that were under way when a router spoke may differ.
            assert!(
                tiled_loaded <= 3 * files.expert_bytes() && loaded > 0,
                "{case}"
            );
        }
    }
}

#[test]
fn row_tiles_take_less_memory_where_no_experts_take_more() {
    let files = Files::of("qwen3");
    let run = |tile_rows: usize| {
        let device = device(1 << 30);
        let modules = modules(&files.config).unwrap();
        let resident = Resident::open(&files.checkpoint, modules, Arc::clone(&device)).unwrap();
        let mut runner = files.model(Arc::clone(&device), Arc::new(resident));
        runner.model = runner.model.in_row_tiles(tile_rows);
        runner.last_alone = true;
        let got = runner.run(0, &prompt());
        (got, device.device_memory().unwrap().peak_bytes)
    };
    let (want, whole_peak) = run(usize::MAX);
    let mut peak = whole_peak;
    for tile_rows in [32, 7] {
        let (got, tiled_peak) = run(tile_rows);
        assert!(got == want, "tiles of {tile_rows}");
        assert!(tiled_peak < peak, "{tile_rows}: {tiled_peak} of {peak}");
        peak = tiled_peak;
    }
}
